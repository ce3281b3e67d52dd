//! `knit proxy` takes over from a real kube-proxy, with connections open.
//!
//! It needs etcd, kube-apiserver, kube-proxy and kubectl, as `cargo xtask kube build` leaves them in its
//! cache, or in the folder that `KNIT_KUBE_BIN` names; and `nft` and `openssl`. Where they are not, it is
//! skipped.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_kernel::{Handle, IfName, Op};
use knit_nft::Nftables;
use knit_testbed::control_plane::{ControlPlane, START_TIMEOUT, program};
use knit_testbed::echo;

const SERVICE: &str = "10.96.0.10:80";

const OBJECTS: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: node-a}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP, name: ""}]
endpoints: [{addresses: [192.0.2.11]}, {addresses: [192.0.2.12]}]
"#;

fn ping(stream: &mut TcpStream) {
    stream.write_all(b"ping").expect("sent");
    let mut buffer = [0; 4];
    stream.read_exact(&mut buffer).expect("answered");
    assert_eq!(&buffer, b"ping");
}

fn connect(wait: Duration) -> Option<TcpStream> {
    let address: SocketAddr = SERVICE.parse().expect("an address");
    let stream = TcpStream::connect_timeout(&address, wait).ok()?;
    stream.set_read_timeout(Some(START_TIMEOUT)).expect("a timeout");
    Some(stream)
}

fn tables() -> Vec<String> {
    let mut nft = Kernel::open().expect("nftables");
    nft.tables().expect("a listing").iter().map(ToString::to_string).collect()
}

fn network() {
    let handle = Handle::current().expect("a handle");
    let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
    let address = |text: &str| Op::create(Address::new(lo, text.parse().expect("an address")));
    let own = ["192.0.2.11/32", "192.0.2.12/32"].map(address);
    handle.apply(&own).expect("addresses");
    let route = Route {
        source: Some([192, 0, 2, 1].into()),
        ..Route::to("10.96.0.0/16".parse().expect("a range")).dev(lo)
    };
    handle.apply(&[Op::create(route)]).expect("a route");
}

#[test]
fn rule_62_kube_proxy_is_taken_over_with_connections_open() {
    in_namespaces(|| {
        let kube_proxy = match program("kube-proxy") {
            Ok(kube_proxy) => kube_proxy,
            Err(why) => return skip(why),
        };
        if !Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success()) {
            return skip("there is no nft, which kube-proxy needs");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let mut bed = match ControlPlane::start(folder.path(), "AlwaysAllow") {
            Ok(bed) => bed,
            Err(why) => return skip(why),
        };
        network();
        echo::serve_at("192.0.2.11:8080");
        echo::serve_at("192.0.2.12:8080");
        bed.write("objects.yaml", OBJECTS);
        bed.apply(&["--validate=false", "-f", "objects.yaml"]);
        let args = [
            "--kubeconfig=kubeconfig",
            "--proxy-mode=nftables",
            "--hostname-override=node-a",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ];
        bed.run(&kube_proxy, &args);
        eventually("kube-proxy serves", START_TIMEOUT, || {
            bed.check("kube-proxy");
            connect(Duration::from_millis(500)).is_some()
        });
        let mut streams: Vec<TcpStream> =
            (0..4).map(|_| connect(START_TIMEOUT).expect("connected")).collect();
        streams.iter_mut().for_each(ping);
        assert!(tables().contains(&"ip kube-proxy".to_owned()), "{:?}", tables());

        // It does not start beside it, and says what to do.
        let knit = Path::new(env!("CARGO_BIN_EXE_knit"));
        let socket = path("proxy.sock");
        let common = ["proxy", "--kubeconfig=kubeconfig", "--node-name=node-a", "--socket", &socket];
        let common: Vec<&str> = common
            .into_iter()
            .chain(["--metrics-bind-address=127.0.0.1:0", "--healthz-bind-address=127.0.0.1:0"])
            .collect();
        let refused =
            Command::new(knit).args(&common).current_dir(folder.path()).output().expect("knit runs");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("--takeover"), "{said}");

        // Beside it: both are there, and traffic goes on.
        bed.run(knit, &[&common[..], &["--beside-kube-proxy"]].concat());
        eventually("both are there", START_TIMEOUT, || bed.log("knit").contains("in force:"));
        assert!(
            tables().contains(&"ip kube-proxy".to_owned()) && tables().contains(&"ip knit-proxy".to_owned())
        );
        streams.iter_mut().for_each(ping);
        ping(&mut connect(START_TIMEOUT).expect("connected"));
        bed.stop("knit");

        // kube-proxy ends, which leaves its rules; they go once ours are in force, and no connection breaks.
        bed.stop("kube-proxy");
        bed.run(knit, &[&common[..], &["--takeover"]].concat());
        eventually("kube-proxy's tables are gone", START_TIMEOUT, || {
            assert!(connect(START_TIMEOUT).is_some(), "there is always one of the two");
            tables().iter().all(|table| !table.contains("kube-proxy"))
        });
        assert!(tables().contains(&"ip knit-proxy".to_owned()), "{}", bed.log("knit"));
        streams.iter_mut().for_each(ping);
        ping(&mut connect(START_TIMEOUT).expect("connected"));
        // Its own rules are what serves now: a change is followed.
        bed.kubectl(&["delete", "endpointslice", "web-1"]).expect("deleted");
        eventually("nobody is left", START_TIMEOUT, || connect(START_TIMEOUT).is_none());
        streams.iter_mut().for_each(ping);
    });
}
