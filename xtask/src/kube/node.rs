//! A node: its configuration files and its daemons.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::machine::control::Daemon;
use super::net::{self, DNS_V4, V4, V6};
use super::paths::State;
use super::{Options, cgroups, images};

/// The nodes' names: `n1`, `n2`, …
pub fn names(options: &Options) -> Vec<String> {
    (1..=options.nodes).map(|number| format!("n{number}")).collect()
}

/// Where its pods' control groups are, as the kubelet names it.
fn pods_group(name: &str) -> String {
    format!("{}/{name}", cgroups::TOP)
}

fn daemon_group(name: &str, daemon: &str) -> String {
    format!("{}/system/{name}-{daemon}", cgroups::TOP)
}

/// Writes what the node needs before it is there.
pub fn prepare(state: &State, index: usize, name: &str) -> Result<()> {
    let folder = state.machine(name);
    let etc = folder.join("overlay/etc/upper");
    for path in [&etc, &folder.join("kubelet")] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    let write = |path: PathBuf, content: String| {
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
    };
    let [v4, v6] = net::node_addresses(index).map(|net| net.addr());
    write(etc.join("hosts"), format!("127.0.0.1 localhost\n::1 localhost\n{v4} {name}\n{v6} {name}\n"))?;
    write(etc.join("hostname"), format!("{name}\n"))?;
    // What tells machines apart where names do not.
    write(etc.join("machine-id"), format!("{:032x}\n", index + 1))?;
    write(etc.join("resolv.conf"), format!("nameserver {}\n", net::control_plane_v4()))?;
    write(folder.join("containerd.toml"), containerd_config(state))?;
    write(folder.join("kubelet/config.json"), kubelet_config(state, name).to_string())?;
    cgroups::make(&pods_group(name))?;
    for daemon in ["containerd", "kubelet", "kube-proxy"] {
        cgroups::make(&daemon_group(name, daemon))?;
    }
    Ok(())
}

fn daemon(state: &State, node: &str, name: &str, args: Vec<String>) -> Daemon {
    Daemon {
        name: name.into(),
        program: state.program(name),
        args,
        path: state.bin(),
        log: state.logs().join(format!("{node}-{name}.log")),
        group: Some(daemon_group(node, name)),
    }
}

pub fn containerd(state: &State, node: &str) -> Daemon {
    let config = state.machine(node).join("containerd.toml");
    daemon(state, node, "containerd", vec!["--config".into(), config.display().to_string()])
}

pub fn kubelet(state: &State, options: &Options, index: usize, node: &str) -> Daemon {
    let [v4, v6] = net::node_addresses(index).map(|net| net.addr());
    let address = if options.dual_stack { format!("{v4},{v6}") } else { v4.to_string() };
    let args = [
        "--config=/var/lib/kubelet/config.json".to_owned(),
        format!("--kubeconfig={}", state.kubeconfig_of(node).display()),
        "--root-dir=/var/lib/kubelet".into(),
        format!("--hostname-override={node}"),
        format!("--node-ip={address}"),
        "--v=2".into(),
    ];
    daemon(state, node, "kubelet", args.into())
}

/// kube-proxy in its nftables mode. Its configuration is written here, since no other daemon needs it.
pub fn kube_proxy(state: &State, options: &Options, node: &str) -> Result<Daemon> {
    let pods = if options.dual_stack { format!("{},{}", V4.pods, V6.pods) } else { V4.pods.into() };
    let config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": pods,
        "hostnameOverride": node,
        "clientConnection": { "kubeconfig": state.kubeconfig_of("kube-proxy") },
        // The table's size belongs to the whole machine's kernel; the timeouts are the namespace's own.
        "conntrack": { "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "24h",
            "tcpCloseWaitTimeout": "1h" },
    });
    let path = state.machine(node).join("kube-proxy.json");
    fs::write(&path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(daemon(state, node, "kube-proxy", vec![format!("--config={}", path.display()), "--v=2".into()]))
}

/// The bridge plugin's configuration for a node's pods.
pub fn bridge_conflist(pods: &[ipnet::IpNet]) -> String {
    let ranges: Vec<_> = pods.iter().map(|range| json!([{ "subnet": range }])).collect();
    let everywhere = |v4| if v4 { "0.0.0.0/0" } else { "::/0" };
    let routes: Vec<_> =
        pods.iter().map(|range| json!({ "dst": everywhere(range.addr().is_ipv4()) })).collect();
    let list = json!({
        "cniVersion": "1.0.0",
        "name": "bridge",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
                "ipam": { "type": "host-local", "ranges": ranges, "routes": routes },
            },
            { "type": "portmap", "capabilities": { "portMappings": true }, "backend": "nftables" },
        ],
    });
    list.to_string()
}

/// `ctr` in the node, for the images that the kubelet sees.
pub fn ctr(state: &State, args: &[&str]) -> Vec<String> {
    let program = state.program("ctr").display().to_string();
    [program.as_str(), "--namespace", "k8s.io"]
        .into_iter()
        .chain(args.iter().copied())
        .map(Into::into)
        .collect()
}

fn kubelet_config(state: &State, name: &str) -> serde_json::Value {
    let pki = |file: String| state.pki().join(file);
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": false,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", pods_group(name)),
        "failSwapOn": false,
        "oomScoreAdj": 0,
        "volumePluginDir": "/var/lib/kubelet/volumeplugins",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": pki("ca.crt".into()) },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": pki(format!("{name}.crt")),
        "tlsPrivateKeyFile": pki(format!("{name}.key")),
        "clusterDNS": [DNS_V4],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "resolvConf": "/etc/resolv.conf",
        "staticPodPath": "/etc/kubernetes/manifests",
        "address": "0.0.0.0",
        "healthzBindAddress": "127.0.0.1",
        "makeIPTablesUtilChains": false,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
        },
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        // 100 pods come and go on one node in a test.
        "maxPods": 200,
        "serializeImagePulls": false,
    })
}

fn containerd_config(state: &State) -> String {
    let runc: &Path = &state.program("runc");
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
# Lowering it takes a capability that the bed may not have.
oom_score = 0

[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
    # Else every node needs a plugin for it.
    use_internal_loopback = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false

# Nothing of a bed outlives it, so nothing needs to reach the disk: otherwise each container that ends waits
# for all of it.
[plugins."io.containerd.snapshotter.v1.overlayfs"]
  mount_options = ["volatile"]

[plugins."io.containerd.nri.v1.nri"]
  disable = false
  socket_path = "/var/run/nri/nri.sock"
  plugin_path = "/opt/nri/plugins"
  plugin_config_path = "/etc/nri/conf.d"
  disable_connections = false
  # Holds containers back for pods that name a plugin, and only for these.
  [plugins."io.containerd.nri.v1.nri".default_validator]
    enable = true

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
"#,
        pause = images::PAUSE,
        runc = runc.display(),
    )
}
