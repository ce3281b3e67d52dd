//! Ranges of addresses, and whose they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use knit_types::{NetworkName, parse_net};

use crate::{AddressBlock, Network};

/// The ranges of a ServiceCIDR: where Services have their addresses.
#[must_use]
pub fn service_ranges(service_cidr: &ServiceCIDR) -> Vec<IpNet> {
    let cidrs = service_cidr.spec.as_ref().and_then(|spec| spec.cidrs.as_ref());
    cidrs.into_iter().flatten().filter_map(|cidr| parse_net(cidr.trim())).collect()
}

/// Where pods of all Networks have their addresses: in the Networks' subnets, and where a Network has none,
/// or is not known, in its blocks. A Network without a router is not among them: its subnet is a segment
/// outside, most of which belongs to others.
pub fn addresses_of_networks<'a>(
    networks: &'a BTreeMap<NetworkName, Arc<Network>>,
    blocks: &'a BTreeMap<String, Arc<AddressBlock>>,
) -> impl Iterator<Item = IpNet> + 'a {
    let with_router = networks.values().filter(|network| network.topology().has_router());
    let subnets = with_router.flat_map(|network| network.ranges().iter().copied());
    let without = |name: &str| networks.get(name).is_none_or(|network| !network.has_subnets());
    let blocks = blocks.values().filter(move |block| without(block.network()));
    subnets.chain(blocks.flat_map(|block| block.ranges()))
}

/// Where pods have their addresses on segments outside: in the blocks of Networks on links of nodes.
pub fn addresses_on_segments<'a>(
    networks: &'a BTreeMap<NetworkName, Arc<Network>>,
    blocks: &'a BTreeMap<String, Arc<AddressBlock>>,
) -> impl Iterator<Item = IpNet> + 'a {
    let on_segment =
        |name: &str| networks.get(name).is_some_and(|network| network.topology().is_on_host_link());
    blocks.values().filter(move |block| on_segment(block.network())).flat_map(|block| block.ranges())
}

/// Whether two ranges share an address.
#[must_use]
pub fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(other) || other.contains(one)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use knit_api::AddressBlockSpec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn blocks_count_where_a_network_has_no_subnets_or_is_not_known() {
        let network = |name: &str, subnets: serde_json::Value| {
            let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network",
                "metadata": {"name": name}, "spec": {"topology": "Layer3", "subnets": subnets}});
            let object: knit_api::Network = serde_json::from_value(object).expect("a Network");
            let network = Network::try_from(object).expect("a name");
            (network.name().clone(), Arc::new(network))
        };
        let block = |network: &str, range: &str| {
            let spec = AddressBlockSpec {
                network: network.into(),
                node: "a".into(),
                ipv4: Some(range.into()),
                ipv6: None,
            };
            (format!("{network}-a"), Arc::new(AddressBlock::of(&spec).expect("a block")))
        };
        let networks = [
            network("default", json!([])),
            network("blue", json!([{"cidr": "10.2.0.0/16"}])),
            // One of its subnets cannot be read: the other is its own all the same.
            network("red", json!([{"cidr": "nonsense"}, {"cidr": "10.3.0.0/16"}])),
            // A segment outside: what pods have there is all that is the cluster's.
            network("lan", json!([{"cidr": "192.168.20.0/24"}])),
        ];
        let blocks = [
            block("default", "10.244.1.0/24"),
            block("blue", "10.2.0.0/28"),
            block("late", "10.9.0.0/28"),
            block("lan", "192.168.20.32/28"),
        ];
        let (mut networks, blocks): (BTreeMap<_, Arc<Network>>, BTreeMap<_, _>) =
            (networks.into(), blocks.into());
        let lan = Arc::make_mut(networks.get_mut("lan").expect("a Network"));
        lan.edit(|lan| lan.spec.topology = knit_api::Topology::Underlay);
        let found: Vec<String> =
            addresses_of_networks(&networks, &blocks).map(|range| range.to_string()).collect();
        assert_eq!(found, ["10.2.0.0/16", "10.3.0.0/16", "10.244.1.0/24", "10.9.0.0/28"]);
        let found: Vec<String> =
            addresses_on_segments(&networks, &blocks).map(|range| range.to_string()).collect();
        assert_eq!(found, ["192.168.20.32/28"]);
    }

    fn range() -> impl Strategy<Value = IpNet> {
        (0_u32..32, 27_u8..=32).prop_map(|(n, len)| {
            IpNet::new(IpAddr::V4((0x0a00_0000 + n).into()), len).expect("a range").trunc()
        })
    }

    proptest! {
        #[test]
        fn ranges_overlap_if_an_address_is_in_both(one in range(), other in range()) {
            let shared = one.hosts().chain([one.network(), one.broadcast()]).any(|a| other.contains(&a));
            prop_assert_eq!(overlap(&one, &other), shared);
            prop_assert_eq!(overlap(&other, &one), shared);
        }
    }
}
