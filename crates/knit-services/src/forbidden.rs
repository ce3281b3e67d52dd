//! Addresses that no Service may take besides its cluster IP: pure.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_model::{addresses_of_networks, addresses_on_segments};
use knit_node::world::World;

/// Ranges and addresses that belong to somebody.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Forbidden {
    /// Pods', Services', uplinks', and what means one machine only. Sorted, and apart from each other.
    ranges: Vec<IpNet>,
    /// Nodes', of any type.
    nodes: HashSet<IpAddr>,
    /// Pods' on segments outside, where nodes and others may be among them. Sorted, and apart from each
    /// other.
    segments: Vec<IpNet>,
}

/// Whose an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressUse {
    /// A node's.
    Node,
    /// A pod's or a Service's, or one that is nobody's to give.
    Cluster,
}

/// What means one machine or many at once, and never a host elsewhere.
const ALWAYS: [&str; 9] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255/32",
    "::/128",
    "::1/128",
    "fe80::/10",
    "ff00::/8",
];

impl Forbidden {
    pub(crate) fn new(
        ranges: impl IntoIterator<Item = IpNet>,
        nodes: impl IntoIterator<Item = IpAddr>,
    ) -> Self {
        Self { ranges: sorted(ranges), nodes: nodes.into_iter().collect(), segments: Vec::new() }
    }

    /// What belongs to somebody in the cluster; `uplinks`: where the addresses of links to routers come from.
    pub(crate) fn of(world: &World, uplinks: &[IpNet]) -> Self {
        let pods = addresses_of_networks(&world.networks, &world.blocks);
        let services = world.service_cidrs.values().flatten().copied();
        let always = ALWAYS.into_iter().filter_map(|range| range.parse().ok());
        let ranges = pods.chain(services).chain(uplinks.iter().copied()).chain(always);
        let nodes = world.nodes.values().flat_map(|node| node.addresses.iter().chain(&node.others).copied());
        let segments = sorted(addresses_on_segments(&world.networks, &world.blocks));
        Self { segments, ..Self::new(ranges, nodes) }
    }

    /// Whether two states of things come to the same, without a look at each object.
    pub(crate) fn same(one: &World, other: &World) -> bool {
        use std::sync::Arc;
        Arc::ptr_eq(&one.networks, &other.networks)
            && Arc::ptr_eq(&one.blocks, &other.blocks)
            && Arc::ptr_eq(&one.nodes, &other.nodes)
            && Arc::ptr_eq(&one.service_cidrs, &other.service_cidrs)
    }

    /// Whose an address is; none: nobody's in the cluster.
    pub(crate) fn whose(&self, address: IpAddr) -> Option<AddressUse> {
        match (contain(&self.ranges, address), self.nodes.contains(&address)) {
            (true, _) => Some(AddressUse::Cluster),
            (false, true) => Some(AddressUse::Node),
            (false, false) => contain(&self.segments, address).then_some(AddressUse::Cluster),
        }
    }
}

/// Sorted, and apart from each other.
fn sorted(ranges: impl IntoIterator<Item = IpNet>) -> Vec<IpNet> {
    let mut ranges = IpNet::aggregate(&ranges.into_iter().collect());
    ranges.sort_unstable();
    ranges
}

/// Whether one of these ranges, sorted and apart from each other, has an address.
fn contain(ranges: &[IpNet], address: IpAddr) -> bool {
    let after = ranges.partition_point(|range| range.network() <= address);
    after.checked_sub(1).is_some_and(|at| ranges[at].contains(&address))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use knit_api::{AddressBlockSpec, Network, NetworkSpec};
    use knit_model::AddressBlock;
    use knit_node::world::NodeView;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn blocks_of_a_network_without_subnets_and_every_address_of_a_node_belong_to_somebody() {
        let network = Network::new("default", NetworkSpec::default());
        let block = AddressBlockSpec {
            network: "default".to_owned(),
            node: "a".to_owned(),
            ipv4: Some("10.244.1.0/24".to_owned()),
            ipv6: Some("fd44:1::/64".to_owned()),
        };
        let block = AddressBlock::of(&block).expect("a block");
        let node = NodeView {
            addresses: vec![ip("192.168.7.1"), ip("fd07::1")],
            others: vec![ip("198.51.100.7")],
            ..NodeView::default()
        };
        let world = World {
            networks: Arc::new(BTreeMap::from([(
                "default".into(),
                Arc::new(network.try_into().expect("a name")),
            )])),
            blocks: Arc::new(BTreeMap::from([("default-a".to_owned(), Arc::new(block))])),
            nodes: Arc::new(BTreeMap::from([("a".to_owned(), Arc::new(node))])),
            ..World::default()
        };
        let uplinks = ["169.254.192.0/18".parse().expect("a range")];
        let forbidden = Forbidden::of(&world, &uplinks);
        for (address, whose) in [
            ("10.244.1.5", Some(AddressUse::Cluster)),
            ("10.244.2.5", None),
            ("fd44:1::5", Some(AddressUse::Cluster)),
            ("fd44:2::5", None),
            ("192.168.7.1", Some(AddressUse::Node)),
            ("198.51.100.7", Some(AddressUse::Node)),
            ("fd07::1", Some(AddressUse::Node)),
            ("169.254.192.2", Some(AddressUse::Cluster)),
            ("239.1.2.3", Some(AddressUse::Cluster)),
            ("ff02::1", Some(AddressUse::Cluster)),
            ("203.0.113.60", None),
            ("2001:db8::60", None),
        ] {
            assert_eq!(forbidden.whose(ip(address)), whose, "{address}");
        }
    }

    #[test]
    fn a_segment_that_pods_are_on_was_taken_from_load_balancers_and_nodes() {
        let spec = serde_json::json!({"topology": "Underlay", "subnets": [{"cidr": "192.168.20.0/24"}]});
        let network = Network::new("lan", serde_json::from_value(spec).expect("a spec"));
        let block = AddressBlockSpec {
            network: "lan".to_owned(),
            node: "a".to_owned(),
            ipv4: Some("192.168.20.32/28".to_owned()),
            ipv6: None,
        };
        let block = AddressBlock::of(&block).expect("a block");
        let node = NodeView { addresses: vec![ip("192.168.20.40")], ..NodeView::default() };
        let world = World {
            networks: Arc::new(BTreeMap::from([(
                "lan".into(),
                Arc::new(network.try_into().expect("a name")),
            )])),
            blocks: Arc::new(BTreeMap::from([("lan-a".to_owned(), Arc::new(block))])),
            nodes: Arc::new(BTreeMap::from([("a".to_owned(), Arc::new(node))])),
            ..World::default()
        };
        let forbidden = Forbidden::of(&world, &[]);
        for (address, whose) in [
            ("192.168.20.33", Some(AddressUse::Cluster)),
            ("192.168.20.40", Some(AddressUse::Node)),
            ("192.168.20.200", None),
        ] {
            assert_eq!(forbidden.whose(ip(address)), whose, "{address}");
        }
    }
}
