//! A segment outside: nodes have a link `eth1` on it, and so has a host that is nobody's pod. With the
//! Networks that are on it.

use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::{eventually, namespace};
use knit_kernel::{Handle, Op};
use knit_runtime::{AttachRequest, Network, NetworkId, NetworkName, Subnet, Topology, Underlay};

use super::{Cluster, Node, SOON, Talk, TestPod, block, ip, name, net, udp};

/// A cluster on such a segment. The host has 10.9.0.200 and fd09::200.
pub struct Lan {
    pub cluster: Cluster,
    pub host: NetNs,
    switch: NetNs,
}

impl Lan {
    pub fn new() -> Self {
        let cluster = Cluster::new();
        let (switch, host) = (namespace(), namespace());
        let mut wire = NewLink::bridge(name("lan"), Bridge::default());
        wire.up = true;
        Handle::open(&switch).expect("a handle").create_link(&wire).expect("the segment");
        let lan = Self { cluster, host, switch };
        lan.plug(&lan.cluster.a.space, "a");
        lan.plug(&lan.cluster.b.space, "b");
        lan.plug(&lan.host, "host");
        give(&lan.host, "eth1", ["10.9.0.200/24", "fd09::200/64"]);
        lan
    }

    /// Joins a namespace to the segment by a link `eth1`.
    pub fn plug(&self, space: &NetNs, port: &str) {
        let handle = Handle::open(&self.switch).expect("a handle");
        let mut link = NewLink::veth(name(port), Peer::new(name("eth1"), space));
        link.master = Some(handle.index_of(&name("lan")).expect("the segment"));
        link.up = true;
        handle.create_link(&link).expect("a port of the segment");
        let up = Change::named(name("eth1")).up();
        Handle::open(space).expect("a handle").apply(&[up.into()]).expect("eth1 up");
        has_carrier(space, "eth1");
    }

    /// Takes the link of a node off the segment.
    pub fn unplug(&self, port: &str) {
        let handle = Handle::open(&self.switch).expect("a handle");
        let index = handle.index_of(&name(port)).expect("a port");
        handle.delete_link(index).expect("deleted");
    }
}

/// Waits until a link has a carrier.
pub fn has_carrier(space: &NetNs, link: &str) {
    let handle = Handle::open(space).expect("a handle");
    let carrier = || handle.link_by_name(&name(link)).is_ok_and(|link| link.is_some_and(|link| link.carrier));
    eventually(&format!("{link} has a carrier"), SOON, carrier);
}

/// Gives a link addresses.
pub fn give<const N: usize>(space: &NetNs, link: &str, addresses: [&str; N]) {
    let handle = Handle::open(space).expect("a handle");
    let index = handle.index_of(&name(link)).expect("the link");
    let ops = addresses.map(|text| Op::create(LinkAddress::new(index, net(text))));
    handle.apply(&ops).expect("addresses");
}

/// A Network on the segment: 10.9.0.0/24 and fd09::/64, of which each node has a block.
pub fn on_segment(name: impl Into<NetworkName>, id: u32, underlay: Underlay) -> Network {
    Network {
        name: name.into(),
        id: NetworkId::new(id).expect("an id"),
        topology: Topology::Underlay,
        subnets: vec![
            Subnet { cidr: net("10.9.0.0/24"), gateway: None },
            Subnet { cidr: net("fd09::/64"), gateway: None },
        ],
        mtu: None,
        primary: false,
        outside: false,
        not_outside: Vec::new(),
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: vec![
            block("a", 1, "10.9.0.16/28", "fd09::10/124"),
            block("b", 2, "10.9.0.32/28", "fd09::20/124"),
        ],
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: Some(underlay),
        parameters: serde_json::Map::new(),
    }
}

/// A request for an interface beside others: no default route.
pub fn beside(pod: &TestPod, network: &Network, interface: &str, addresses: &[&str]) -> AttachRequest {
    AttachRequest {
        interface: interface.parse().expect("a name"),
        default_route: false,
        ..pod.request(network, addresses)
    }
}

/// A pod with an interface `net1` on the segment, beside others.
pub async fn pod(node: &Node, network: &Network, sandbox: &str, addresses: &[&str]) -> TestPod {
    let pod = TestPod::new(sandbox);
    let request = beside(&pod, network, "net1", addresses);
    pod.attached(node, request).await
}

/// Sends a packet, which must be answered.
#[track_caller]
pub fn talks(from: &NetNs, to: &NetNs, address: &str) {
    let talk = udp(from, to, ip(address), 7000, SOON);
    assert!(matches!(talk, Talk::From(_)), "to {address}: {talk:?}");
}
