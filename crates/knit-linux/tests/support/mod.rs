//! A small cluster out of namespaces: nodes and an outside world on one segment, pods, and packets between
//! them.
#![allow(dead_code, unused_imports, reason = "every test file uses a part of it")]

pub mod segment;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::owner;
use knit_kernel::route::Route as KernelRoute;
use knit_kernel::{Handle, Op};
use knit_linux::{Config, LinuxRuntime};
use knit_nft::{Family, Nftables, TableId, TableState};
use knit_runtime::{
    Address, AttachRequest, Attachment, Block, Dns, Network, NetworkId, Pod, Runtime, Subnet, Topology,
};
use knit_testbed::wire::{self, Wire};
pub use knit_testbed::{NEVER, SOON, ip, name, net};

/// Nodes `a` and `b`, and the outside, on one segment 192.168.7.0/24 and fd07::/64.
pub struct Cluster {
    pub wire: Wire,
    pub a: Node,
    pub b: Node,
    pub outside: NetNs,
}

pub struct Node {
    pub name: &'static str,
    pub space: NetNs,
    pub addresses: Vec<IpAddr>,
    pub runtime: LinuxRuntime,
    pub routers: PathBuf,
}

/// Runs something that waits, on a runtime of its own.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

impl Cluster {
    pub fn new() -> Self {
        Self::with_mtu(1500)
    }

    pub fn with_mtu(mtu: u32) -> Self {
        let wire = Wire::with_mtu(mtu);
        let a = Node::new("a", 1, &wire);
        let b = Node::new("b", 2, &wire);
        let outside = wire.host("outside", 99);
        // The outside knows another world: 203.0.113.0/24 and 2001:db8:99::/64 are behind it.
        let out = Handle::open(&outside).expect("a handle");
        let lo = out.index_of(&name("lo")).expect("lo");
        for address in ["203.0.113.9/32", "2001:db8:99::9/128"] {
            out.apply(&[Op::create(LinkAddress::new(lo, net(address)))]).expect("an address");
        }
        for node in [&a, &b] {
            let handle = Handle::open(&node.space).expect("a handle");
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            let world = [KernelRoute::default_v4(), KernelRoute::default_v6()];
            let via = [ip("192.168.7.99"), ip("fd07::99")];
            for (route, via) in world.into_iter().zip(via) {
                let route = KernelRoute { protocol: 4, ..route.dev(eth0).via(via) };
                handle.apply(&[Op::create(route)]).expect("a default route");
            }
        }
        Self { wire, a, b, outside }
    }
}

impl Node {
    fn new(name: &'static str, host: u8, wire: &Wire) -> Self {
        let space = wire.host(name, host);
        let addresses = wire::addresses(host).map(|net| net.addr()).to_vec();
        let routers = PathBuf::from(format!("/run/routers-{name}"));
        let runtime = Self::runtime(name, &space, &addresses, &routers, |_| {});
        Self { name, space, addresses, runtime, routers }
    }

    fn runtime(
        name: &str,
        space: &NetNs,
        addresses: &[IpAddr],
        routers: &std::path::Path,
        change: impl FnOnce(&mut Config),
    ) -> LinuxRuntime {
        std::fs::create_dir_all(routers).expect("a directory");
        let mut config = Config::new(name, addresses.to_vec(), space.try_clone().expect("a clone"));
        config.router_directory = routers.to_path_buf();
        change(&mut config);
        LinuxRuntime::new(config).expect("a runtime")
    }

    /// The agent is replaced: a new runtime that knows nothing.
    pub fn restart(&mut self) {
        self.restart_with(|_| {});
    }

    /// The agent is replaced by one that is told something else.
    pub fn restart_with(&mut self, change: impl FnOnce(&mut Config)) {
        self.runtime = Self::runtime(self.name, &self.space, &self.addresses, &self.routers, change);
    }

    pub fn handle(&self) -> Handle {
        Handle::open(&self.space).expect("a handle")
    }

    pub async fn setup(&self, network: &Network) {
        self.runtime.setup_network(network).await.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Attaches a new pod.
    pub async fn pod(&self, network: &Network, sandbox: &str, addresses: &[&str]) -> TestPod {
        let pod = TestPod::new(sandbox);
        let request = pod.request(network, addresses);
        pod.attached(self, request).await
    }
}

/// A pod's namespace.
pub struct TestPod {
    pub space: NetNs,
    pub path: PathBuf,
    pub pod: Pod,
    pub attachments: Vec<Attachment>,
}

impl TestPod {
    pub fn new(sandbox: &str) -> Self {
        let path = PathBuf::from(format!("/run/pod-{sandbox}"));
        let space = NetNs::create(&path).expect("a namespace");
        let pod = Pod {
            sandbox: sandbox.parse().expect("a sandbox id"),
            namespace: Some("ns".into()),
            name: Some(sandbox.into()),
            uid: None,
        };
        Self { space, path, pod, attachments: Vec::new() }
    }

    pub fn request(&self, network: &Network, addresses: &[&str]) -> AttachRequest {
        let address = |text: &&str| {
            let ip = ip(text);
            Address { net: IpNet::from(ip), gateway: network.gateway_for(ip) }
        };
        AttachRequest {
            pod: self.pod.clone(),
            netns: self.path.clone(),
            network: network.name.clone(),
            interface: "eth0".parse().expect("a name"),
            addresses: addresses.iter().map(address).collect(),
            mac: None,
            default_route: true,
            ports: Vec::new(),
            routes: Vec::new(),
            dns: Dns::default(),
        }
    }

    pub async fn attached(mut self, node: &Node, request: AttachRequest) -> Self {
        let attachment = node.runtime.attach(&request).await;
        let attachment = attachment.unwrap_or_else(|error| panic!("{}: {error}", self.pod.sandbox));
        self.attachments.push(attachment);
        self
    }

    pub fn handle(&self) -> Handle {
        Handle::open(&self.space).expect("a handle")
    }
}

/// The default Network, dual-stack, with a block on each node.
pub fn default_network() -> Network {
    Network {
        name: "default".into(),
        id: NetworkId::new(1).expect("an id"),
        topology: Topology::Layer3,
        subnets: vec![
            Subnet { cidr: net("10.244.0.0/16"), gateway: Some(ip("10.244.255.254")) },
            Subnet { cidr: net("fd44::/64"), gateway: Some(ip("fd44::ffff:fffe")) },
        ],
        mtu: None,
        primary: true,
        outside: true,
        not_outside: vec![
            net("192.168.7.1/32"),
            net("192.168.7.2/32"),
            net("fd07::1/128"),
            net("fd07::2/128"),
        ],
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: vec![
            block("a", 1, "10.244.1.0/24", "fd44::1:0/120"),
            block("b", 2, "10.244.2.0/24", "fd44::2:0/120"),
        ],
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: None,
        parameters: serde_json::Map::new(),
    }
}

pub fn block(node: &str, host: u8, v4: &str, v6: &str) -> Block {
    Block {
        node: node.into(),
        node_addresses: vec![ip(&format!("192.168.7.{host}")), ip(&format!("fd07::{host}"))],
        ipv4: Some(v4.parse().expect("an IPv4 range")),
        ipv6: Some(v6.parse().expect("an IPv6 range")),
    }
}

/// What came of an attempt to talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Talk {
    /// An answer came, and the server saw this source.
    From(IpAddr),
    /// Nothing came.
    Silence,
}

/// A datagram there and back: `server` listens on all its addresses, `client` sends to `to`.
pub fn udp(client: &NetNs, server: &NetNs, to: IpAddr, port: u16, wait: Duration) -> Talk {
    udp_via(client, server, SocketAddr::new(to, port), port, wait)
}

/// A datagram to `to` that is answered by who listens on `port` in `server`. It is sent again each second
/// until `wait` is over: a busy machine may lose one.
pub fn udp_via(client: &NetNs, server: &NetNs, to: SocketAddr, port: u16, wait: Duration) -> Talk {
    let any: IpAddr = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    // With the very address where that is the server's: a datagram must be answered from where it went to.
    let bind = || UdpSocket::bind((to.ip(), port)).or_else(|_| UdpSocket::bind((any, port)));
    let listener = server.run(bind).expect("a visit").expect("a listener");
    let socket = client.run(|| UdpSocket::bind((any, 0))).expect("a visit").expect("a socket");
    let until = Instant::now() + wait;
    loop {
        if let Err(error) = socket.send_to(b"hello", to) {
            println!("send to {to}: {error}");
            return Talk::Silence;
        }
        if let Some(from) = received(&listener, until) {
            listener.send_to(b"hello", from).expect("an answer");
            if received(&socket, until).is_some() {
                return Talk::From(from.ip());
            }
        }
        if Instant::now() >= until {
            return Talk::Silence;
        }
    }
}

/// Whom a datagram is from that arrives within a second, and before then.
fn received(socket: &UdpSocket, until: Instant) -> Option<SocketAddr> {
    let left = until.saturating_duration_since(Instant::now()).min(Duration::from_secs(1));
    socket.set_read_timeout(Some(left.max(Duration::from_millis(1)))).expect("a timeout");
    match socket.recv_from(&mut [0; 64]) {
        Ok((_, from)) => Some(from),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => None,
        Err(error) => panic!("receive: {error}"),
    }
}

/// A TCP connection with one byte each way.
pub fn tcp(client: &NetNs, server: &NetNs, to: SocketAddr, port: u16) -> Talk {
    use std::io::{Read, Write};
    let any: IpAddr = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let listener = server.run(|| TcpListener::bind((any, port))).expect("a visit").expect("a listener");
    let served = std::thread::spawn(move || {
        let (mut stream, from) = listener.accept().expect("a connection");
        stream.write_all(b"x").expect("a byte");
        from.ip()
    });
    let connected = client.run(|| TcpStream::connect_timeout(&to, SOON)).expect("a visit");
    let mut stream = connected.unwrap_or_else(|error| panic!("connect to {to}: {error}"));
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    let mut byte = [0];
    stream.read_exact(&mut byte).expect("a byte");
    Talk::From(served.join().expect("the server"))
}

/// Whether a datagram with this source arrives.
pub fn udp_from(client: &NetNs, source: IpAddr, server: &NetNs, to: SocketAddr, wait: Duration) -> bool {
    let listener = server.run(|| UdpSocket::bind(to)).expect("a visit").expect("a listener");
    listener.set_read_timeout(Some(wait)).expect("a timeout");
    let socket = client.run(|| UdpSocket::bind((source, 0))).expect("a visit").expect("a socket");
    socket.send_to(b"lie", to).expect("sent");
    let mut buffer = [0; 64];
    match listener.recv_from(&mut buffer) {
        Ok((_, from)) => {
            assert_eq!(from.ip(), source);
            true
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
        Err(error) => panic!("receive: {error}"),
    }
}

/// A Network beside the default one, as node `node` knows it. All of them have the same subnets; `shift`
/// exchanges the blocks of the two nodes, so that two of them overlap across nodes but not on one.
pub fn tenant(name: &'static str, id: u32, topology: Topology, shift: bool, node: &str) -> Network {
    let low = ("10.77.0.16/28", "fd77::10/124", "10.77.0.17", "fd77::11");
    let high = ("10.77.0.32/28", "fd77::20/124", "10.77.0.33", "fd77::21");
    let (a, b) = if shift { (high, low) } else { (low, high) };
    let own = if node == "a" { a } else { b };
    Network {
        name: name.into(),
        id: NetworkId::new(id).expect("an id"),
        topology,
        subnets: vec![
            Subnet { cidr: net("10.77.0.0/24"), gateway: Some(ip("10.77.0.1")) },
            Subnet { cidr: net("fd77::/64"), gateway: Some(ip("fd77::1")) },
        ],
        mtu: None,
        primary: true,
        outside: true,
        not_outside: vec![
            net("192.168.7.0/24"),
            net("fd07::/64"),
            net("10.244.0.0/16"),
            net("fd44::/64"),
            net("10.96.0.0/16"),
            net("fd96::/112"),
        ],
        cluster_service_ips: vec![ip("10.96.0.1"), ip("fd96::1")],
        routes: Vec::new(),
        blocks: vec![block("a", 1, a.0, a.1), block("b", 2, b.0, b.1)],
        router_addresses: vec![ip(own.2), ip(own.3)],
        announced: Vec::new(),
        underlay: None,
        parameters: serde_json::Map::new(),
    }
}

/// Blue is switched, green is routed; both have the same subnets.
pub fn blue(node: &Node) -> Network {
    tenant("blue", 2, Topology::Layer2, false, node.name)
}

pub fn green(node: &Node) -> Network {
    tenant("green", 3, Topology::Layer3, true, node.name)
}

impl Cluster {
    /// Sets the default Network and both tenants up on both nodes.
    pub async fn with_tenants() -> Self {
        let cluster = Self::new();
        for node in [&cluster.a, &cluster.b] {
            node.setup(&default_network()).await;
            node.setup(&blue(node)).await;
            node.setup(&green(node)).await;
        }
        cluster
    }
}

impl Node {
    /// Lets programs of the node send frames of tunnels, as they can on one that somebody has taken over.
    pub fn take_over(&self) {
        let mut tx = knit_nft::Transaction::new();
        tx.flush_chain(&TableId::new(Family::Inet, "knit"), "tunnel-out");
        Kernel::open_in(&self.space).expect("nftables").commit(&tx).expect("flushed");
    }

    /// The namespace of a Network's router.
    pub fn router(&self, network: &str) -> NetNs {
        NetNs::open(self.routers.join(network)).expect("a router")
    }
}

/// Everything in a namespace that is ours, in words.
pub fn ours_in(space: &NetNs) -> Vec<String> {
    let handle = Handle::open(space).expect("a handle");
    let mut all = Vec::new();
    for link in handle.links(&LinkFilter { owned: true, ..LinkFilter::default() }).expect("links") {
        all.push(format!("{} {:?} {:?} {:?} {}", link.name, link.alias, link.mac, link.port, link.up));
    }
    let routes = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
    all.extend(handle.routes(&routes).expect("routes").iter().map(ToString::to_string));
    let neighbours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
    for neighbour in handle.neighbours(&neighbours).expect("neighbours") {
        all.push(format!("{neighbour} is {:?}", neighbour.mac));
    }
    for address in handle.addresses(None).expect("addresses") {
        all.push(address.to_string());
    }
    for entry in handle.fdb(None).expect("forwarding entries").iter().filter(|entry| !entry.learned) {
        all.push(entry.to_string());
    }
    all.sort();
    all
}

/// Everything on a node that is ours.
pub fn ours(node: &Node) -> Vec<String> {
    let mut all = ours_in(&node.space);
    // The node's own addresses are not ours.
    let own = ["192.168.7.", "fd07::", "fe80::", "127.0.0.1", "::1/128"];
    all.retain(|text| !(text.starts_with("address") && own.iter().any(|own| text.contains(own))));
    all.retain(|text| !text.starts_with("forwarding"));
    all
}

/// Our tables in a namespace.
pub fn tables_in(space: &NetNs) -> Vec<String> {
    let mut kernel = Kernel::open_in(space).expect("nftables");
    let table = |family| kernel.table(&TableId::new(family, "knit")).expect("a listing");
    let mut tables: Vec<TableState> =
        [Family::Inet, Family::Arp, Family::Bridge].into_iter().filter_map(table).collect();
    // What rules add to sets goes by itself, after a while.
    for set in tables.iter_mut().flat_map(|table| table.sets.values_mut()) {
        if set.set.dynamic {
            set.elements.clear();
        }
    }
    // With the numbers of rules, so that one that was made again shows.
    let rules = |table: &TableState| -> Vec<u64> {
        table.chains.values().flat_map(|chain| chain.rules.iter().map(|rule| rule.handle)).collect()
    };
    tables.iter().map(|table| format!("{}\n{:?}", table.clone().without_handles(), rules(table))).collect()
}

/// Our tables on a node.
pub fn tables(node: &Node) -> Vec<String> {
    tables_in(&node.space)
}
