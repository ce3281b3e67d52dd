//! The reference runtime and another one, found by its socket, each serve a Network of the same pod.

mod common;

#[allow(dead_code, unreachable_pub, reason = "it is a program of its own; its main is not called here")]
#[path = "../../knit-runtime/examples/bridge.rs"]
mod bridge;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bridge::BridgeRuntime;
use common::{NODE, Node, in_namespace, network};
use knit_api::NetworkClass;
use knit_kernel::addr::Address;
use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces, namespace};
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_linux::{Config, LinuxRuntime};
use knit_node::reconcile::Pass;
use knit_node::{Core, Parts};
use knit_runtime::wire::serve;
use serde_json::json;
use tokio::time::Instant;

fn name(text: &str) -> IfName {
    IfName::new(text).expect("a name")
}

/// The node's namespace gets an uplink with the address that its Node object has.
fn uplink(neighbour: &NetNs) -> LinuxRuntime {
    let node = NetNs::current().expect("this namespace");
    let handle = Handle::open(&node).expect("a handle");
    let link = NewLink::veth(name("eth0"), Peer::new(name("eth0"), neighbour));
    let index = handle.create_link(&link).expect("an uplink").index;
    let other = Handle::open(neighbour).expect("a handle");
    other.apply(&[Change::named(name("eth0")).up().into()]).expect("the other end is up");
    let address = Address::new(index, "192.0.2.1/24".parse().expect("an address"));
    handle.apply(&[Change::of(index).up().into(), Op::create(address)]).expect("an address");
    let mut config = Config::new(NODE, vec!["192.0.2.1".parse().expect("an address")], node);
    config.router_directory = "/run/routers".into();
    std::fs::create_dir_all(&config.router_directory).expect("a directory");
    LinuxRuntime::new(config).expect("the reference runtime")
}

#[test]
fn a_pod_has_networks_of_two_runtimes() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(run());
    });
}

async fn run() {
    let neighbour = namespace();
    let linux = uplink(&neighbour);
    let mut node = Node::new();
    let class: NetworkClass = serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkClass", "metadata": {"name": "other"},
        "spec": {"runtime": "example.com/bridge"}
    }))
    .expect("a class");
    Arc::make_mut(&mut node.world.classes).insert("other".into(), Arc::new(class));
    let switched = json!({"class": "other", "topology": "Layer2", "allowedNamespaces": {"from": "All"}});
    let other = network("other", 4, "10.4.0.0/16", switched);
    Arc::make_mut(&mut node.world.networks).insert("other".into(), Arc::new(other));

    // Another process in real life: all that the agent sees of it is its socket.
    let mut config = node.config();
    // Here setting a Network up is real work.
    (config.block_wait, config.runtime_deadline) = (Duration::from_secs(60), Duration::from_secs(60));
    std::fs::create_dir_all(config.runtimes_dir()).expect("a directory");
    let socket = config.runtimes_dir().join("bridge.sock");
    let listening = socket.clone();
    tokio::spawn(async move {
        serve(&listening, Arc::new(BridgeRuntime::default()), std::future::pending()).await
    });
    // Bound is not yet listening.
    eventually("the other runtime listens", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());

    let (ledger, _) = knit_node::files::Files::open(&config.ledger()).expect("the ledger");
    let (dir, limit) = (config.runtimes_dir(), config.runtime_deadline);
    let core = Core::new(Parts {
        config,
        world: node.world.clone(),
        store: Box::new(ledger),
        proxy: None,
        policies: None,
    });
    core.runtimes().add(Arc::new(linux)).await.expect("the reference runtime");
    assert!(core.runtimes().refresh(&dir, limit).await, "a runtime was found");
    let found: Vec<String> = core.runtimes().describe().into_iter().map(|r| r.name).collect();
    assert_eq!(found, ["example.com/bridge", "knit.dev/linux"]);
    core.begin(&Pass { first: true, adopt: false, netns_dirs: Vec::new() }).await;

    let mut pods = Vec::new();
    for sandbox in ["s1", "s2"] {
        let path = PathBuf::from(format!("/run/pod-{sandbox}"));
        let space = NetNs::create(&path).expect("a namespace");
        let request = in_namespace(node.request(sandbox, "shop", "other"), path);
        let attached =
            core.attach(request, Instant::now() + Duration::from_secs(30)).await.expect("attached");
        let interfaces: Vec<(&str, &str)> =
            attached.attachments.iter().map(|a| (a.interface.as_str(), a.network.as_str())).collect();
        assert_eq!(interfaces, [("eth0", "default"), ("net1", "other")]);
        pods.push((space, attached));
    }
    // Packets flow on both.
    for index in [0, 1] {
        let from = pods[0].1.attachments[index].addresses[0].net.addr();
        let to = pods[1].1.attachments[index].addresses[0].net.addr();
        assert_eq!(talk(&pods[0].0, &pods[1].0, to), from, "{from} to {to}");
    }
    // Somebody deletes a foreign interface: its runtime still lists it, but knows better when asked.
    let before = pods[0].1.attachments[1].clone();
    as_stranger(|| {
        let inside = Handle::open(&pods[0].0).expect("a handle");
        inside.delete_link(inside.index_of(&name("net1")).expect("net1")).expect("deleted");
    });
    let outcome = core.reconcile(&Pass::default()).await;
    assert_eq!((outcome.repaired, outcome.failed), (1, 0), "{outcome:?}");
    let to = pods[1].1.attachments[1].addresses[0].net.addr();
    assert_eq!(talk(&pods[0].0, &pods[1].0, to), before.addresses[0].net.addr(), "it has its address again");
    assert_eq!(core.reconcile(&Pass::default()).await, Default::default(), "and nothing more is to be done");
    for sandbox in ["s1", "s2"] {
        core.detach(common::id(sandbox), None).await.expect("detached");
    }
    for (space, _) in &pods {
        let links = Handle::open(space).and_then(|h| h.links(&Default::default())).expect("links");
        assert!(links.iter().all(|l| l.name.as_str() == "lo"), "{links:?}");
    }
    assert!(core.list(None).is_empty());
}

/// Sends a packet, and says where it came from.
fn talk(from: &NetNs, at: &NetNs, to: IpAddr) -> IpAddr {
    let server = at.run(|| UdpSocket::bind("0.0.0.0:7777")).expect("entered").expect("a socket");
    let client = from.run(|| UdpSocket::bind("0.0.0.0:0")).expect("entered").expect("a socket");
    server.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    client.send_to(b"hello", SocketAddr::new(to, 7777)).expect("sent");
    server.recv_from(&mut [0; 16]).expect("received").1.ip()
}
