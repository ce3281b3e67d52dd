//! Two agents with the reference runtime in namespaces, driven through the shim's protocol: overlapping
//! Networks over two nodes, a restart that no pod notices, and nothing left at the end.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_cni::protocol::{self, Command, PROTOCOL_VERSION, Request, Response};
use knit_cni::{Args, NetworkConfig};
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::{eventually, in_namespaces, namespace};
use knit_kernel::{Handle, IfName, Op};
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_objects::{FolderOptions, Source};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);
const NEVER: Duration = Duration::from_millis(300);

struct Node {
    name: &'static str,
    space: NetNs,
    dir: PathBuf,
    objects: PathBuf,
}

struct Pod {
    space: NetNs,
    path: PathBuf,
    sandbox: String,
    namespace: &'static str,
}

impl Node {
    async fn start(&self) -> Agent {
        let (space, name, routers) =
            (self.space.try_clone().expect("a clone"), self.name, self.dir.join("run").join("netns"));
        let folder = FolderOptions {
            output: Some(self.dir.join("status")),
            ..FolderOptions::new(self.objects.clone())
        };
        let config = AgentConfig {
            core: CoreConfig::new(self.name, self.dir.join("run"), self.dir.join("state")),
            socket: self.socket(),
            source: Source::Folder(folder),
            node_addresses: Vec::new(),
            http: None,
            lock_wait: Duration::from_secs(60),
            netns_dirs: vec![PathBuf::from("/run/pods")],
            runtime: Box::new(move |addresses| {
                std::fs::create_dir_all(&routers).expect("a directory");
                let mut config = knit_linux::Config::new(name, addresses, space);
                config.router_directory = routers;
                Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
            }),
            proxy: None,
        };
        Agent::start(config).await.expect("started")
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("run").join("cni.sock")
    }

    async fn call(&self, command: Command, pod: &Pod, networks: &str) -> Value {
        let config = json!({
            "cniVersion": "1.1.0", "name": "knit",
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": networks}}
        });
        let request = Request {
            version: PROTOCOL_VERSION,
            command,
            container_id: pod.sandbox.clone(),
            netns: pod.path.display().to_string(),
            ifname: "eth0".into(),
            args: Args {
                pod_namespace: Some(pod.namespace.into()),
                pod_name: Some(pod.sandbox.clone()),
                pod_uid: None,
                infra_container_id: None,
            },
            path: String::new(),
            config: NetworkConfig::parse(config.to_string().as_bytes()).expect("a configuration"),
            timeout_ms: Some(60_000),
        };
        let socket = self.socket();
        let asked = tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).expect("connected");
            protocol::send(&mut stream, &request).expect("sent");
            protocol::receive::<Response>(&mut stream).expect("an answer")
        });
        match asked.await.expect("asked") {
            Response::Ok(value) => value,
            Response::Err(error) => panic!("{command:?} of {}: {error:?}", pod.sandbox),
        }
    }
}

impl Pod {
    fn new(sandbox: &str, namespace: &'static str) -> Self {
        std::fs::create_dir_all("/run/pods").expect("a directory");
        let path = PathBuf::from(format!("/run/pods/{sandbox}"));
        let space = NetNs::create(&path).expect("a namespace");
        Self { space, path, sandbox: sandbox.to_owned(), namespace }
    }
}

fn name(text: &str) -> IfName {
    IfName::new(text).expect("a name")
}

/// Two nodes on one wire: 192.168.7.1 and 192.168.7.2. The wire is a namespace of its own, since links that
/// are made here carry the mark of what Knit made.
fn nodes(dir: &Path) -> (NetNs, [Node; 2]) {
    let wire = namespace();
    let outside = Handle::open(&wire).expect("a handle");
    let mut bridge = NewLink::bridge(name("wire"), Bridge::default());
    bridge.up = true;
    outside.create_link(&bridge).expect("the wire");
    let bridge = outside.index_of(&name("wire")).expect("the wire");
    let node = |node: &'static str, text: &str| {
        let space = namespace();
        let mut port = NewLink::veth(name(node), Peer::new(name("eth0"), &space));
        port.master = Some(bridge);
        port.up = true;
        outside.create_link(&port).expect("a port of the wire");
        let handle = Handle::open(&space).expect("a handle");
        let eth0 = handle.index_of(&name("eth0")).expect("eth0");
        let net: IpNet = text.parse().expect("a prefix");
        handle.apply(&[Change::of(eth0).up().into(), Op::create(Address::new(eth0, net))]).expect("eth0");
        let node = Node { name: node, space, dir: dir.join(node), objects: dir.join("objects") };
        std::fs::create_dir_all(&node.dir).expect("a directory");
        node
    };
    let nodes = [node("a", "192.168.7.1/24"), node("b", "192.168.7.2/24")];
    (wire, nodes)
}

fn write_objects(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    let network = |name: &str, id: u32, spec: Value| {
        json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
            "spec": spec, "status": {"id": id}})
    };
    let block = |name: &str, network: &str, node: &str, ipv4: &str, ipv6: Option<&str>| {
        let mut object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AddressBlock",
            "metadata": {"name": name},
            "spec": {"network": network, "node": node, "ipv4": ipv4}});
        if let Some(ipv6) = ipv6 {
            object["spec"]["ipv6"] = ipv6.into();
        }
        object
    };
    let node = |name: &str, address: &str| {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]}})
    };
    let objects = [
        network(
            "default",
            1,
            json!({"class": "knit", "topology": "Layer3", "subnets": [{"cidr": "10.244.0.0/16"},
                {"cidr": "fd44::/64"}]}),
        ),
        network(
            "blue",
            2,
            json!({"class": "knit", "topology": "Layer3", "subnets": [{"cidr": "10.77.0.0/16"}],
                "allowedNamespaces": {"from": "All"}}),
        ),
        network(
            "green",
            3,
            json!({"class": "knit", "topology": "Layer2", "subnets": [{"cidr": "10.77.0.0/16"}],
                "primaryFor": {"matchLabels": {"team": "green"}}}),
        ),
        block("default-a", "default", "a", "10.244.1.0/28", Some("fd44::1:0/124")),
        block("default-b", "default", "b", "10.244.2.0/28", Some("fd44::2:0/124")),
        block("blue-a", "blue", "a", "10.77.0.16/28", None),
        block("blue-b", "blue", "b", "10.77.0.32/28", None),
        block("green-a", "green", "a", "10.77.0.16/28", None),
        block("green-b", "green", "b", "10.77.0.32/28", None),
        node("a", "192.168.7.1"),
        node("b", "192.168.7.2"),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "forest",
            "labels": {"team": "green"}}}),
    ];
    for (n, object) in objects.iter().enumerate() {
        std::fs::write(folder.join(format!("{n}.json")), object.to_string()).expect("written");
    }
}

/// The address number `n` of a result.
fn address(result: &Value, n: usize) -> IpAddr {
    let text = result["ips"][n]["address"].as_str().unwrap_or_else(|| panic!("{n} in {result}"));
    text.parse::<IpNet>().expect("an address").addr()
}

/// Whether a packet arrives and is answered, within this time.
fn talk(from: &Pod, to: &Pod, address: IpAddr, port: u16, wait: Duration) -> bool {
    let target = SocketAddr::new(address, port);
    let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let bind = |pod: &Pod, at: SocketAddr| {
        let socket = pod.space.run(|| UdpSocket::bind(at)).expect("in").expect("bound");
        socket.set_read_timeout(Some(wait)).expect("a timeout");
        socket
    };
    let server = bind(to, SocketAddr::new(any, port));
    let client = bind(from, SocketAddr::new(any, 0));
    if client.send_to(b"ping", target).is_err() {
        return false;
    }
    let Ok((_, back)) = server.recv_from(&mut [0; 16]) else { return false };
    server.send_to(b"pong", back).is_ok() && client.recv(&mut [0; 16]).is_ok()
}

/// The first packets between two nodes may come before the other node's part is there.
#[track_caller]
fn reaches(from: &Pod, to: &Pod, address: IpAddr, port: u16) {
    let what = format!("{} reaches {} at {address}", from.sandbox, to.sandbox);
    eventually(&what, SOON, || talk(from, to, address, port, NEVER));
}

#[test]
fn overlapping_networks_over_two_nodes() {
    in_namespaces(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(scenario());
    });
}

async fn scenario() {
    let dir = PathBuf::from("/run/test");
    let (_wire, nodes) = nodes(&dir);
    write_objects(&dir.join("objects"));
    let (agent_a, agent_b) = tokio::join!(nodes[0].start(), nodes[1].start());
    let [one, two] = [Pod::new("one", "shop"), Pod::new("two", "shop")];
    let [tree, bush] = [Pod::new("tree", "forest"), Pod::new("bush", "forest")];
    let (first, second) =
        tokio::join!(nodes[0].call(Command::Add, &one, "blue"), nodes[1].call(Command::Add, &two, "blue"));
    let (third, fourth) =
        tokio::join!(nodes[0].call(Command::Add, &tree, ""), nodes[1].call(Command::Add, &bush, ""));
    // Both tenants have the same addresses.
    assert_eq!(address(&first, 2), address(&third, 0), "{first} {third}");
    // The default Network in both families, and each tenant in its own.
    for n in 0..3 {
        reaches(&one, &two, address(&second, n), 5000);
        reaches(&two, &one, address(&first, n), 5000);
    }
    reaches(&tree, &bush, address(&fourth, 0), 5001);
    reaches(&bush, &tree, address(&third, 0), 5001);
    // Nothing crosses between Networks.
    assert!(!talk(&tree, &two, address(&second, 0), 5002, NEVER));
    assert!(!talk(&one, &bush, address(&fourth, 0), 5003, NEVER), "that is blue's address for pod one");

    // The agent goes and comes: no pod notices, and the same request has the same answer.
    agent_a.stop(Duration::from_secs(5)).await;
    assert!(talk(&one, &two, address(&second, 0), 5004, SOON), "the agent is away");
    let agent_a = nodes[0].start().await;
    assert!(talk(&one, &two, address(&second, 2), 5005, SOON), "the agent is back");
    assert_eq!(nodes[0].call(Command::Add, &one, "blue").await, first);

    // A pod that vanishes without a DEL is cleared away; the others by their DELs.
    NetNs::delete(&tree.path).expect("unmounted");
    drop(tree.space);
    let outcome = agent_a.core().reconcile(&Default::default()).await;
    assert_eq!((outcome.removed, outcome.failed), (1, 0), "{outcome:?}");
    nodes[0].call(Command::Del, &one, "").await;
    nodes[1].call(Command::Del, &two, "").await;
    nodes[1].call(Command::Del, &bush, "").await;
    for agent in [&agent_a, &agent_b] {
        assert!(agent.core().list(None).is_empty());
        let runtime = agent.core().runtimes().get("knit.dev/linux").expect("the runtime");
        assert_eq!(runtime.list(None).await.expect("a list"), []);
    }
    agent_a.stop(Duration::from_secs(5)).await;
    agent_b.stop(Duration::from_secs(5)).await;
}
