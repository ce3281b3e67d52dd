//! Two nodes with real agents in namespaces, pods that answer with their names, and a folder of objects.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use knit_cni::protocol::{self, Command, PROTOCOL_VERSION, Request, Response};
use knit_cni::{Args, NetworkConfig};
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::namespace;
use knit_kernel::{Handle, IfName, Op};
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_node::proxy::ServicesState;
use knit_objects::{FolderOptions, Source};
use knit_proxy::backends::Backends;
use knit_services::{Config, Mode, Services};
use serde_json::{Value, json};

/// How long to wait for what must come.
pub const SOON: Duration = Duration::from_secs(60);
/// How long to wait for what must not come.
pub const NEVER: Duration = Duration::from_millis(400);

pub struct Node {
    pub name: &'static str,
    pub space: NetNs,
    pub dir: PathBuf,
    pub objects: PathBuf,
}

pub struct Pod {
    pub space: NetNs,
    pub name: &'static str,
    /// One per family.
    pub addresses: Vec<IpAddr>,
    namespace: &'static str,
    path: PathBuf,
}

impl Node {
    pub async fn start(&self) -> Agent {
        self.start_with(Arc::new(knit_proxy_nft::NftBackends)).await
    }

    /// The same with other backends of its proxies.
    pub async fn start_with(&self, backends: Arc<dyn Backends>) -> Agent {
        let clone = || self.space.try_clone().expect("a clone");
        let (space, name, routers) = (clone(), self.name, self.dir.join("run").join("netns"));
        let folder = FolderOptions {
            output: Some(self.dir.join("status")),
            ..FolderOptions::new(self.objects.clone())
        };
        let services = Config {
            node: self.name.to_owned(),
            namespace: clone(),
            mode: Mode::Auto,
            healthz: Some(knit_services::HEALTHZ),
            metrics: Some(knit_services::METRICS),
            backends,
        };
        let config = AgentConfig {
            core: CoreConfig::new(self.name, self.dir.join("run"), self.dir.join("state")),
            socket: self.socket(),
            source: Source::Folder(folder),
            node_addresses: Vec::new(),
            http: None,
            lock_wait: SOON,
            netns_dirs: vec![PathBuf::from("/run/pods")],
            runtime: Box::new(move |addresses| {
                std::fs::create_dir_all(&routers).expect("a directory");
                let mut config = knit_linux::Config::new(name, addresses, space);
                config.router_directory = routers;
                Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
            }),
            proxy: Some(Arc::new(Services::new(services))),
        };
        Agent::start(config).await.expect("started")
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("run").join("cni.sock")
    }

    /// Makes a pod, and a server in it that says the pod's name; returns its address too.
    pub async fn pod(&self, name: &'static str, namespace: &'static str) -> (Pod, IpAddr) {
        self.pod_with_port(name, namespace, None).await
    }

    /// The same, with a TCP port of the node that leads to one of its own.
    pub async fn pod_with_port(
        &self,
        name: &'static str,
        namespace: &'static str,
        port: Option<(u16, u16)>,
    ) -> (Pod, IpAddr) {
        std::fs::create_dir_all("/run/pods").expect("a directory");
        let path = PathBuf::from(format!("/run/pods/{name}"));
        let space = NetNs::create(&path).expect("a namespace");
        let mut pod = Pod { space, path, name, namespace, addresses: Vec::new() };
        let ports: Vec<Value> = port
            .iter()
            .map(|(host, own)| json!({"hostPort": host, "containerPort": own, "protocol": "tcp"}))
            .collect();
        let config = json!({"cniVersion": "1.1.0", "name": "knit",
            "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {}, "portMappings": ports}});
        let request = Request {
            version: PROTOCOL_VERSION,
            command: Command::Add,
            container_id: name.to_owned(),
            netns: pod.path.display().to_string(),
            ifname: "eth0".into(),
            args: Args {
                pod_namespace: Some(pod.namespace.into()),
                pod_name: Some(name.to_owned()),
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
        let result = match asked.await.expect("asked") {
            Response::Ok(value) => value,
            Response::Err(error) => panic!("ADD of {name}: {error:?}"),
        };
        let ips = result["ips"].as_array().unwrap_or_else(|| panic!("addresses in {result}"));
        let address =
            |ip: &Value| ip["address"].as_str().expect("text").parse::<IpNet>().expect("an address");
        pod.addresses = ips.iter().map(|ip| address(ip).addr()).collect();
        pod.addresses.sort_unstable();
        serve(&pod.space, 8080, name);
        let first = pod.addresses[0];
        (pod, first)
    }
}

/// How the Services of a Network are.
pub fn services(agent: &Agent, network: &str) -> Option<ServicesState> {
    agent.core().networks().states().into_iter().find(|s| s.name == network)?.services
}

/// A server that says this, and then echoes.
pub fn serve(space: &NetNs, port: u16, says: &'static str) {
    let listener = space.run(|| TcpListener::bind(("0.0.0.0", port))).expect("in").expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                if stream.write_all(format!("{says}\n").as_bytes()).is_err() {
                    return;
                }
                while let Ok(n @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// A connection, and who answered.
pub fn connect(from: &NetNs, to: (&str, u16), wait: Duration) -> std::io::Result<(TcpStream, String)> {
    let target = SocketAddr::new(to.0.parse().expect("an address"), to.1);
    let mut stream = from.run(|| TcpStream::connect_timeout(&target, wait)).expect("in")?;
    stream.set_read_timeout(Some(SOON))?;
    let (mut name, mut byte) = (String::new(), [0]);
    loop {
        stream.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return Ok((stream, name));
        }
        name.push(char::from(byte[0]));
    }
}

/// Says something over a connection and hears it again.
pub fn echo(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"still here")?;
    let mut heard = [0; 10];
    stream.read_exact(&mut heard)?;
    assert_eq!(&heard, b"still here");
    Ok(())
}

/// Who answers there, over many connections.
pub fn answers(from: &NetNs, to: (&str, u16), wait: Duration) -> Result<BTreeSet<String>, String> {
    (0..24).map(|_| connect(from, to, wait).map(|(_, name)| name).map_err(|e| e.to_string())).collect()
}

/// Waits until exactly these answer there.
pub async fn wait_for(from: &Pod, to: (&str, u16), expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|&name| name.to_owned()).collect();
    let what = format!("{} to {to:?} gives {expected:?}", from.name);
    wait_until(&what, || match answers(&from.space, to, Duration::from_secs(2)) {
        Ok(names) if names == expected => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

/// Waits until something is so.
pub async fn wait_until(what: &str, mut look: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + SOON;
    loop {
        match look() {
            Ok(()) => return,
            Err(last) => assert!(Instant::now() < deadline, "{what}: {last}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn name(text: &str) -> IfName {
    IfName::new(text).expect("a name")
}

/// Two nodes on one wire: 192.168.7.1 and 192.168.7.2, fd07::1 and fd07::2. The wire is a namespace of its own.
pub fn nodes(dir: &Path) -> (NetNs, [Node; 2]) {
    let wire = namespace();
    let outside = Handle::open(&wire).expect("a handle");
    let mut bridge = NewLink::bridge(name("wire"), Bridge::default());
    bridge.up = true;
    outside.create_link(&bridge).expect("the wire");
    let node = |node: &'static str, number: u8| {
        let space = plug(&wire, node, number);
        let node = Node { name: node, space, dir: dir.join(node), objects: dir.join("objects") };
        std::fs::create_dir_all(&node.dir).expect("a directory");
        node
    };
    let nodes = [node("a", 1), node("b", 2)];
    (wire, nodes)
}

/// A namespace on the wire: 192.168.7.NUMBER and fd07::NUMBER.
pub fn plug(wire: &NetNs, port: &str, number: u8) -> NetNs {
    let space = namespace();
    let outside = Handle::open(wire).expect("a handle");
    let mut link = NewLink::veth(name(port), Peer::new(name("eth0"), &space));
    link.master = Some(outside.index_of(&name("wire")).expect("the wire"));
    link.up = true;
    outside.create_link(&link).expect("a port of the wire");
    let handle = Handle::open(&space).expect("a handle");
    let eth0 = handle.index_of(&name("eth0")).expect("eth0");
    let mut ops = vec![Change::of(eth0).up().into()];
    for text in [format!("192.168.7.{number}/24"), format!("fd07::{number}/64")] {
        ops.push(Op::create(Address::new(eth0, text.parse().expect("a prefix"))));
    }
    handle.apply(&ops).expect("eth0");
    space
}

/// Writes an object; a reader never sees half of it.
pub fn write(folder: &Path, file: &str, object: &Value) {
    let beside = folder.with_extension("new");
    std::fs::write(&beside, object.to_string()).expect("written");
    std::fs::rename(beside, folder.join(format!("{file}.json"))).expect("in place");
}

/// A Service and its endpoints: address, node.
pub fn write_service(folder: &Path, (space, name): (&str, &str), ip: &str, port: u16) {
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": space, "name": name},
        "spec": {"clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ports": [{"port": port, "protocol": "TCP"}]}});
    write(folder, &format!("service-{space}-{name}"), &object);
}

pub fn write_slice(folder: &Path, (space, name): (&str, &str), port: u16, endpoints: &[(IpAddr, &str)]) {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|(address, node)| json!({"addresses": [address.to_string()], "nodeName": node, "conditions": {"ready": true}}))
        .collect();
    let object = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": space, "name": name, "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": "", "port": port, "protocol": "TCP"}], "endpoints": endpoints});
    write(folder, &format!("slice-{space}-{name}"), &object);
}

/// Writes one of the Networks, with what it says about Services.
pub fn write_network(folder: &Path, name: &str, services: &Value) {
    let (id, topology, cidrs) = match name {
        "blue" => (2, "Layer3", ["10.77.0.0/16", "fd77::/64"]),
        "green" => (3, "Layer2", ["10.77.0.0/16", "fd77::/64"]),
        _ => (1, "Layer3", ["10.244.0.0/16", "fd44::/64"]),
    };
    let subnets = cidrs.map(|cidr| json!({"cidr": cidr}));
    let mut spec = json!({"class": "knit", "topology": topology, "subnets": subnets, "services": services});
    if name != "default" {
        spec["primaryFor"] = json!({"matchLabels": {"team": name}});
    }
    let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
        "spec": spec, "status": {"id": id}});
    write(folder, &format!("network-{name}"), &object);
}

/// A default Network that is where its blocks are, as where Nodes have podCIDRs.
pub fn without_subnets(folder: &Path) {
    let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "default"},
        "spec": {"class": "knit", "topology": "Layer3"}, "status": {"id": 1}});
    write(folder, "network-default", &object);
}

/// A Node with these addresses.
pub fn write_node(folder: &Path, name: &str, internal: &[&str], external: &[&str]) {
    let of_type = |kind: &str, list: &[&str]| -> Vec<Value> {
        list.iter().map(|address| json!({"type": kind, "address": address})).collect()
    };
    let addresses = [of_type("InternalIP", internal), of_type("ExternalIP", external)].concat();
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"addresses": addresses}});
    write(folder, &format!("node-{name}"), &object);
}

/// Whether an agent wrote an event of this reason.
pub fn told(node: &Node, reason: &str) -> Result<(), String> {
    let mut folders = vec![node.dir.join("status")];
    let mut seen = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if std::fs::read_to_string(entry.path()).is_ok_and(|text| text.contains(reason)) {
                return Ok(());
            } else {
                seen.push(entry.path());
            }
        }
    }
    Err(format!("{reason} is in none of {seen:?}"))
}

/// Networks default (Layer3), blue (Layer3) and green (Layer2), the last two with the same addresses and each the
/// primary of a namespace: sky and forest.
pub fn write_objects(folder: &Path) {
    std::fs::create_dir_all(folder).expect("a folder");
    for name in ["default", "blue", "green"] {
        write_network(folder, name, &json!({}));
    }
    // One node never has the same block of two primary Networks; two nodes do.
    let blocks = [
        ("default", "a", "10.244.1.0/28", "fd44::100/124"),
        ("default", "b", "10.244.2.0/28", "fd44::200/124"),
        ("blue", "a", "10.77.0.16/28", "fd77::10/124"),
        ("blue", "b", "10.77.0.32/28", "fd77::20/124"),
        ("green", "a", "10.77.0.32/28", "fd77::20/124"),
        ("green", "b", "10.77.0.16/28", "fd77::10/124"),
    ];
    for (network, node, ipv4, ipv6) in blocks {
        let name = format!("{network}-{node}");
        let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AddressBlock", "metadata": {"name": name},
            "spec": {"network": network, "node": node, "ipv4": ipv4, "ipv6": ipv6}});
        write(folder, &format!("block-{name}"), &object);
    }
    write_node(folder, "a", &["192.168.7.1", "fd07::1"], &[]);
    write_node(folder, "b", &["192.168.7.2", "fd07::2"], &[]);
    let teams = ["shop", "kube-system", "default"].map(|name| (name, "none"));
    for (name, team) in teams.into_iter().chain([("sky", "blue"), ("forest", "green")]) {
        let object = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": {"team": team}}});
        write(folder, &format!("namespace-{name}"), &object);
    }
    let ranges = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "fd96::/112"]}});
    write(folder, "ranges", &ranges);
}
