//! Pods on Networks of Knit: two nodes on one segment, each with the runtime that an agent has.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::route::Route;
use knit_kernel::testing::namespace;
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_linux::{Config, LinuxRuntime};
use knit_runtime::{
    Address, AttachRequest, Block, Dns, Network, NetworkId, Pod, Runtime as _, Subnet, Topology,
};

/// Two nodes, an outside, and pods.
pub struct Cluster {
    pub outside: NetNs,
    pub nodes: [Node; 2],
    pub pods: Vec<KnitPod>,
    _wire: NetNs,
}

pub struct Node {
    pub namespace: NetNs,
    pub addresses: [IpAddr; 2],
    runtime: LinuxRuntime,
}

/// A pod on one Network.
pub struct KnitPod {
    pub network: &'static str,
    pub node: usize,
    pub namespace: NetNs,
    /// IPv4 and IPv6.
    pub addresses: [IpAddr; 2],
}

const NAMES: [&str; 2] = ["a", "b"];
/// The Networks: the default one, whose router is the node, and two with routers of their own.
pub const NETWORKS: [&str; 3] = ["default", "routed", "switched"];
/// What nodes' addresses begin with.
const SEGMENT: [&str; 2] = ["192.168.7.", "fd07::"];

impl Cluster {
    /// With two pods of each Network on the first node, and one on the second.
    pub async fn start() -> Result<Self> {
        let wire = namespace();
        let mut bridge = NewLink::bridge(IfName::new("wire")?, Bridge::default());
        bridge.up = true;
        Handle::open(&wire)?.create_link(&bridge)?;
        let nodes = [Node::start(&wire, 0)?, Node::start(&wire, 1)?];
        let outside = namespace();
        plug(&wire, &outside, "outside", 99)?;
        let mut pods = Vec::new();
        for name in NETWORKS {
            for (at, node) in nodes.iter().enumerate() {
                let network = network(name, at)?;
                node.runtime.setup_network(&network).await.with_context(|| format!("Network {name}"))?;
                for host in 0..2 - at {
                    pods.push(node.attach(&network, name, at, host).await?);
                }
            }
        }
        Ok(Self { outside, nodes, pods, _wire: wire })
    }

    /// A Network's pods: two on the first node, then one on the second.
    pub fn pods_of(&self, network: &str) -> Vec<&KnitPod> {
        self.pods.iter().filter(|pod| pod.network == network).collect()
    }
}

impl Node {
    fn start(wire: &NetNs, number: usize) -> Result<Self> {
        let namespace = namespace();
        let addresses = plug(wire, &namespace, NAMES[number], number as u8 + 1)?;
        let handle = Handle::open(&namespace)?;
        let eth0 = handle.index_of(&IfName::new("eth0")?)?;
        for (route, segment) in [Route::default_v4(), Route::default_v6()].into_iter().zip(SEGMENT) {
            let via = format!("{segment}99").parse()?;
            handle.apply(&[Op::create(Route { protocol: 4, ..route.dev(eth0).via(via) })])?;
        }
        let mut config = Config::new(NAMES[number], addresses.to_vec(), namespace.try_clone()?);
        config.router_directory = PathBuf::from(format!("/run/routers-{}", NAMES[number]));
        std::fs::create_dir_all(&config.router_directory)?;
        let runtime = LinuxRuntime::new(config).context("cannot start the runtime")?;
        Ok(Self { namespace, addresses, runtime })
    }

    async fn attach(
        &self,
        network: &Network,
        name: &'static str,
        node: usize,
        host: usize,
    ) -> Result<KnitPod> {
        let id = format!("{name}-{node}-{host}");
        let path = PathBuf::from(format!("/run/pod-{id}"));
        let namespace = NetNs::create(&path)?;
        let addresses = [16 * (node + 1) + 4 + host; 2];
        let addresses: [IpAddr; 2] = [
            format!("{}{}", prefix(name, 0), addresses[0]).parse()?,
            format!("{}{:x}", prefix(name, 1), addresses[1]).parse()?,
        ];
        let request = AttachRequest {
            pod: Pod {
                sandbox: id.parse()?,
                namespace: Some("ns".into()),
                name: Some(id.clone()),
                uid: None,
            },
            netns: path,
            network: network.name.clone(),
            interface: "eth0".parse()?,
            addresses: addresses
                .iter()
                .map(|&ip| Address { net: IpNet::from(ip), gateway: network.gateway_for(ip) })
                .collect(),
            mac: None,
            default_route: true,
            ports: Vec::new(),
            routes: Vec::new(),
            dns: Dns::default(),
        };
        self.runtime.attach(&request).await.with_context(|| format!("pod {id}"))?;
        Ok(KnitPod { network: name, node, namespace, addresses })
    }
}

/// What the addresses of a Network begin with: primary Networks share the node's routes.
fn prefix(network: &str, family: usize) -> &'static str {
    match (network, family) {
        ("default", 0) => "10.244.0.",
        ("default", _) => "fd44::",
        ("routed", 0) => "10.77.0.",
        ("routed", _) => "fd77::",
        (_, 0) => "10.78.0.",
        (_, _) => "fd78::",
    }
}

/// A Network as one of the nodes knows it.
fn network(name: &'static str, node: usize) -> Result<Network> {
    let own_router = name != "default";
    let (v4, v6) = (prefix(name, 0), prefix(name, 1));
    let block = |at: usize| -> Result<Block> {
        Ok(Block {
            node: NAMES[at].into(),
            node_addresses: SEGMENT
                .iter()
                .map(|s| format!("{s}{}", at + 1).parse())
                .collect::<Result<_, _>>()?,
            ipv4: Some(format!("{v4}{}/28", 16 * (at + 1)).parse()?),
            ipv6: Some(format!("{v6}{:x}/124", 16 * (at + 1)).parse()?),
        })
    };
    let router = 16 * (node + 1) + 1;
    Ok(Network {
        name: name.into(),
        id: NetworkId::new(NETWORKS.iter().position(|n| *n == name).unwrap_or_default() as u32 + 1)
            .context("an id is not 0")?,
        topology: if name == "switched" { Topology::Layer2 } else { Topology::Layer3 },
        subnets: vec![
            Subnet { cidr: format!("{v4}0/24").parse()?, gateway: Some(format!("{v4}1").parse()?) },
            Subnet { cidr: format!("{v6}/64").parse()?, gateway: Some(format!("{v6}1").parse()?) },
        ],
        mtu: None,
        primary: true,
        outside: true,
        not_outside: vec!["192.168.7.0/24".parse()?, "fd07::/64".parse()?],
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: vec![block(0)?, block(1)?],
        router_addresses: if own_router {
            vec![format!("{v4}{router}").parse()?, format!("{v6}{router:x}").parse()?]
        } else {
            Vec::new()
        },
        announced: Vec::new(),
        underlay: None,
        parameters: serde_json::Map::new(),
    })
}

/// Joins a namespace to the wire: its `eth0` has host number `host`.
fn plug(wire: &NetNs, space: &NetNs, port: &str, host: u8) -> Result<[IpAddr; 2]> {
    let handle = Handle::open(wire)?;
    let mut link = NewLink::veth(IfName::new(port)?, Peer::new(IfName::new("eth0")?, space));
    (link.master, link.up) = (Some(handle.index_of(&IfName::new("wire")?)?), true);
    handle.create_link(&link)?;
    let inside = Handle::open(space)?;
    let eth0 = inside.index_of(&IfName::new("eth0")?)?;
    let addresses: [IpAddr; 2] =
        [format!("{}{host}", SEGMENT[0]).parse()?, format!("{}{host}", SEGMENT[1]).parse()?];
    let mut ops: Vec<Op<'_>> = vec![Change::of(eth0).up().into()];
    for (address, length) in addresses.iter().zip([24, 64]) {
        ops.push(Op::create(LinkAddress::new(eth0, IpNet::new(*address, length)?)));
    }
    inside.apply(&ops)?;
    Ok(addresses)
}
