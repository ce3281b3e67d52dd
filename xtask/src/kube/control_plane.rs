//! The daemons of the control plane, with their flags.

use std::path::PathBuf;

use super::Options;
use super::machine::control::Daemon;
use super::net::{API_PORT, V4, V6, control_plane_v4};
use super::paths::State;

const ETCD: &str = "http://127.0.0.1:2379";
const ETCD_PEER: &str = "http://127.0.0.1:2380";

/// A daemon of the control plane.
fn daemon(state: &State, name: &str, args: Vec<String>) -> Daemon {
    Daemon {
        name: name.into(),
        program: state.program(name),
        args,
        path: state.bin(),
        log: state.logs().join(format!("{name}.log")),
        group: None,
    }
}

/// Both families' ranges, or one's.
fn ranges(options: &Options, pick: fn(super::net::Ranges) -> &'static str) -> String {
    if options.dual_stack { format!("{},{}", pick(V4), pick(V6)) } else { pick(V4).into() }
}

/// Its data is as short-lived as the bed, so nothing waits for the disk.
pub fn etcd(state: &State) -> Daemon {
    let data = state.path().join("etcd").display().to_string();
    let args = [
        "--name=bed".to_owned(),
        format!("--data-dir={data}"),
        format!("--listen-client-urls={ETCD}"),
        format!("--advertise-client-urls={ETCD}"),
        format!("--listen-peer-urls={ETCD_PEER}"),
        format!("--initial-advertise-peer-urls={ETCD_PEER}"),
        format!("--initial-cluster=bed={ETCD_PEER}"),
        "--unsafe-no-fsync".into(),
        "--log-level=warn".into(),
    ];
    daemon(state, "etcd", args.into())
}

pub fn api_server(state: &State, options: &Options) -> Daemon {
    let pki = |name: &str| state.pki().join(name).display().to_string();
    let args = [
        format!("--etcd-servers={ETCD}"),
        "--bind-address=0.0.0.0".into(),
        format!("--advertise-address={}", control_plane_v4()),
        format!("--secure-port={API_PORT}"),
        format!("--service-cluster-ip-range={}", ranges(options, |r| r.services)),
        format!("--client-ca-file={}", pki("ca.crt")),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--kubelet-client-certificate={}", pki("apiserver-kubelet-client.crt")),
        format!("--kubelet-client-key={}", pki("apiserver-kubelet-client.key")),
        "--kubelet-preferred-address-types=InternalIP".into(),
        format!("--service-account-key-file={}", pki("sa.pub")),
        format!("--service-account-signing-key-file={}", pki("sa.key")),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        "--allow-privileged=true".into(),
        "--profiling=false".into(),
        "--v=1".into(),
    ];
    daemon(state, "kube-apiserver", args.into())
}

pub fn controller_manager(state: &State, options: &Options) -> Daemon {
    let name = "kube-controller-manager";
    let pki = |name: &str| state.pki().join(name).display().to_string();
    let mut args = authenticated(state, name);
    args.extend([
        "--allocate-node-cidrs=true".into(),
        format!("--cluster-cidr={}", ranges(options, |r| r.pods)),
        format!("--service-cluster-ip-range={}", ranges(options, |r| r.services)),
        format!("--root-ca-file={}", pki("ca.crt")),
        format!("--service-account-private-key-file={}", pki("sa.key")),
        "--use-service-account-credentials=true".into(),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        // Its default is a folder of this machine.
        format!("--flex-volume-plugin-dir={}", state.path().join("flex").display()),
        "--v=1".into(),
    ]);
    args.extend(options.node_mask.map(|mask| match options.dual_stack {
        true => format!("--node-cidr-mask-size-ipv4={mask}"),
        false => format!("--node-cidr-mask-size={mask}"),
    }));
    daemon(state, name, args)
}

pub fn scheduler(state: &State) -> Daemon {
    let mut args = authenticated(state, "kube-scheduler");
    args.push("--v=1".into());
    daemon(state, "kube-scheduler", args)
}

fn authenticated(state: &State, name: &str) -> Vec<String> {
    let config: PathBuf = state.kubeconfig_of(name);
    let mut args: Vec<_> = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
        .map(|flag| format!("--{flag}={}", config.display()))
        .into();
    args.extend(["--bind-address=127.0.0.1".into(), "--leader-elect=false".into()]);
    args
}
