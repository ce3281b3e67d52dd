//! Bad objects beside good ones, in a proxy that runs with nftables: real connections to the good ones go on.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::route::Route;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_kernel::{Handle, IfName, Op};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long one try of many may take.
const TRY: Duration = Duration::from_millis(500);
const GOOD: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: good}
spec: {clusterIP: 10.96.0.100, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: good-1, labels: {kubernetes.io/service-name: good}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [192.0.2.40]}]
"#;

/// What is bad, and what is said of it.
const BAD: [(&str, &str, &[&str]); 5] = [
    ("broken.yaml", include_str!("proxy/bad/broken.yaml"), &["broken.yaml:10: not YAML"]),
    (
        "addresses.yaml",
        include_str!("proxy/bad/addresses.yaml"),
        &[
            "Service bad/addresses: spec.externalIPs[0]: \"10.0.0.300\" is not an IP address",
            "Service bad/addresses: spec.loadBalancerSourceRanges[0]: \"10.0.0.0/99\" is not a valid \
             CIDR",
            "EndpointSlice bad/addresses-1: endpoints[0].addresses[0]: \"192.0.2.999\" is not an IP address",
        ],
    ),
    (
        "ports.yaml",
        include_str!("proxy/bad/ports.yaml"),
        &[
            "Service bad/ports: spec.ports[0].port: 70000 is not a port number (1 to 65535)",
            "Service bad/ports: spec.ports[3].nodePort: 99999 is not a port number (1 to 65535)",
            "EndpointSlice bad/ports-1: ports[1].port: -5 is not a port number (1 to 65535)",
        ],
    ),
    (
        "same-address.yaml",
        include_str!("proxy/bad/same-address.yaml"),
        &["Service bad/younger: spec.externalIPs: external IP 198.51.100.50:80 TCP of port \"\" is already \
             used by bad/older"],
    ),
    (
        "no-service.yaml",
        include_str!("proxy/bad/no-service.yaml"),
        &["EndpointSlice bad/lost-1: metadata.labels[kubernetes.io/service-name]: Service bad/lost \
             does not exist"],
    ),
];

struct Stop(Child);

impl Drop for Stop {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network in which 192.0.2.40:8080 answers, and service addresses are sent somewhere.
fn network() {
    let handle = Handle::current().expect("a handle");
    let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
    let address = |text: &str| Op::create(Address::new(lo, text.parse().expect("an address")));
    handle.apply(&["192.0.2.1/32", "192.0.2.40/32"].map(address)).expect("addresses");
    for range in ["10.96.0.0/16", "198.51.100.0/24"] {
        let to = Route::to(range.parse().expect("a range")).dev(lo);
        let route = Route { source: Some([192, 0, 2, 1].into()), ..to };
        handle.apply(&[Op::create(route)]).expect("a route");
    }
    let listener = TcpListener::bind("192.0.2.40:8080").expect("bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // A client that is gone does not care.
            let _ = stream.write_all(b"here");
        }
    });
}

fn answers(address: &str, wait: Duration) -> bool {
    let address: SocketAddr = address.parse().expect("an address");
    let Ok(mut stream) = TcpStream::connect_timeout(&address, wait) else {
        return false;
    };
    let mut text = String::new();
    stream.read_to_string(&mut text).is_ok_and(|_| text == "here")
}

fn start(folder: &Path, log: &Path) -> Stop {
    let file = File::create(log).expect("a file");
    let child = Command::new(env!("CARGO_BIN_EXE_knit"))
        .args(["proxy", "--node-name", "here", "--from-files"])
        .arg(folder)
        .args(["--healthz-bind-address", "127.0.0.1:0", "--metrics-bind-address", "127.0.0.1:0", "--socket"])
        .arg(log.with_extension("sock"))
        .env_remove("KNIT_LOG")
        .stdout(Stdio::null())
        .stderr(file)
        .spawn();
    Stop(child.expect("knit starts"))
}

#[test]
fn rules_12_21_bad_objects_are_named_and_connections_to_the_others_go_on() {
    in_namespaces(|| {
        network();
        let place = tempfile::tempdir().expect("a folder");
        let (folder, log) = (place.path().join("objects"), place.path().join("log"));
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("good.yaml"), GOOD).expect("a file");
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let check = |bad: &[(&str, &str, &[&str])]| {
            for words in bad.iter().flat_map(|(_, _, words)| *words) {
                eventually(words, TEST_TIMEOUT, || said().contains(words));
            }
            // The good Service, and what is good of the bad ones.
            for address in ["10.96.0.100:80", "10.96.0.40:80"] {
                eventually(address, TEST_TIMEOUT, || answers(address, TRY));
            }
        };
        // They come one after the other while the good one is used.
        let proxy = start(&folder, &log);
        eventually("the good one answers", TEST_TIMEOUT, || answers("10.96.0.100:80", TRY));
        for (name, text, _) in BAD {
            fs::write(folder.join(name), text).expect("a file");
            assert!(answers("10.96.0.100:80", TEST_TIMEOUT), "{name}: {}", said());
        }
        check(&BAD);
        drop(proxy);
        // And they are there when it starts. (A slice may be there before its Service: that one takes a while
        // to be told.)
        let proxy = start(&folder, &log);
        check(&BAD[..4]);
        // The table of the one before still answers, so that alone says nothing of this one.
        eventually("its own rules are in force", TEST_TIMEOUT, || said().contains("in force:"));
        drop(proxy);
    });
}
