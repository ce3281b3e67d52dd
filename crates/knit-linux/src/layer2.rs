//! Switched Networks: what they want on their bridge and its ports.
//!
//! Remote pods' MACs follow from their addresses, so neighbours and forwarding entries for a whole block of another
//! node are written before any pod exists there; nothing is learned and nothing is flooded to other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::{Mac, pod_mac};
use knit_kernel::link::PortFlags;
use knit_runtime::Block;

use crate::shape::{Facts, Shape};
use crate::tunnel::ROUTER_TUNNEL;
use crate::wanted::Entry;

/// The bridge, in the router.
pub(crate) const BRIDGE: &str = "bridge";

/// A pod's port. All addresses are written, so nothing is learned, and nothing unknown is sent there. Without hairpin a
/// pod that reaches itself by a service would never hear itself.
pub(crate) const POD_PORT: PortFlags = PortFlags {
    isolated: false,
    hairpin: true,
    neigh_suppress: false,
    learning: false,
    flood: false,
    multicast_flood: true,
    broadcast_flood: true,
};

/// The tunnel's port. The bridge answers for remote pods, and floods nothing to other nodes.
pub(crate) const TUNNEL_PORT: PortFlags = PortFlags {
    isolated: false,
    hairpin: false,
    neigh_suppress: true,
    learning: false,
    flood: false,
    multicast_flood: false,
    broadcast_flood: false,
};

/// The bridge's MAC: that of the router's own address, so that other nodes find it by that; the gateway's if it has no
/// address of its own.
pub(crate) fn bridge_mac(shape: &Shape) -> Mac {
    let own = shape.router_address(true).or_else(|| shape.router_address(false));
    own.map_or_else(|| shape.gateway_mac(), |address| pod_mac(shape.id(), address))
}

/// The bridge's addresses: the router's own with the subnet, and the gateway's alone.
pub(crate) fn bridge_addresses(shape: &Shape) -> Vec<Entry> {
    let mut entries = Vec::new();
    for subnet in &shape.network.subnets {
        let own = shape.router_address(subnet.cidr.addr().is_ipv4());
        let (first, gateway_alone) = match own {
            Some(own) => (own, true),
            None => (subnet.gateway, false),
        };
        let net = IpNet::new(first, subnet.cidr.prefix_len()).expect("a prefix length of the same family");
        entries.push(Entry::Address { link: BRIDGE.into(), net });
        if gateway_alone {
            entries.push(Entry::Address { link: BRIDGE.into(), net: IpNet::from(subnet.gateway) });
        }
    }
    entries
}

/// The pods of other nodes: all that their blocks can have, and those that were announced one by one.
pub(crate) fn remote_entries(shape: &Shape, facts: &Facts) -> BTreeSet<Entry> {
    let announced = || shape.network.announced.iter().filter(|announced| announced.node != facts.node);
    // An address has one neighbour entry, and what was announced is what is.
    let own_mac = |address: &IpAddr| announced().any(|announced| announced.addresses.contains(address));
    let mut entries = BTreeSet::new();
    for block in shape.network.blocks.iter().filter(|block| block.node != facts.node) {
        let remote = shape.remotes.iter().find(|remote| remote.node == block.node);
        let Some(node) = remote.and_then(|remote| remote.tunnel) else { continue };
        for addresses in pairs(block) {
            let Some(first) = addresses.first() else { continue };
            let mac = pod_mac(shape.id(), *first);
            let link = || ROUTER_TUNNEL.to_owned();
            entries.insert(Entry::Remote { link: link(), mac, node });
            entries.insert(Entry::Port { link: link(), mac });
            for address in addresses.into_iter().filter(|address| !own_mac(address)) {
                entries.insert(Entry::Neighbour { link: BRIDGE.into(), address, mac });
            }
        }
    }
    for announced in announced() {
        let remote = shape.remotes.iter().find(|remote| remote.node == announced.node);
        let Some(node) = remote.and_then(|remote| remote.tunnel) else { continue };
        let (link, mac) = (|| ROUTER_TUNNEL.to_owned(), announced.mac);
        entries.insert(Entry::Remote { link: link(), mac, node });
        entries.insert(Entry::Port { link: link(), mac });
        for address in &announced.addresses {
            entries.insert(Entry::Neighbour { link: BRIDGE.into(), address: *address, mac });
        }
    }
    entries
}

/// A pod of this node.
pub(crate) fn pod_entries(host: &str, mac: Mac, addresses: impl Iterator<Item = IpAddr>) -> Vec<Entry> {
    let neighbour = |address| Entry::Neighbour { link: BRIDGE.into(), address, mac };
    let port = Entry::Port { link: host.to_owned(), mac };
    std::iter::once(port).chain(addresses.map(neighbour)).collect()
}

/// The addresses of a block, those of one pod together: families are paired by place.
fn pairs(block: &Block) -> impl Iterator<Item = Vec<IpAddr>> {
    /// The controller cuts blocks of at most this many; a range that says more is not written out.
    const MOST: u128 = 256;
    let v4 = block.ipv4.map(|net| (u128::from(net.network().to_bits()), 1u128 << (32 - net.prefix_len())));
    let v6 = block.ipv6.map(|net| {
        let bits = u32::from(128 - net.prefix_len());
        (net.network().to_bits(), 1u128.checked_shl(bits).unwrap_or(u128::MAX))
    });
    let count = v4.map_or(0, |(_, size)| size).max(v6.map_or(0, |(_, size)| size)).min(MOST);
    (0..count).map(move |place| {
        let mut addresses = Vec::with_capacity(2);
        if let Some((base, size)) = v4
            && place < size
        {
            addresses.push(std::net::Ipv4Addr::from_bits((base + place) as u32).into());
        }
        if let Some((base, size)) = v6
            && place < size
        {
            addresses.push(std::net::Ipv6Addr::from_bits(base + place).into());
        }
        addresses
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_paired_by_place() {
        let block = Block {
            node: "b".into(),
            node_addresses: vec![],
            ipv4: Some("10.0.0.8/30".parse().expect("v4")),
            ipv6: Some("fd00::8/126".parse().expect("v6")),
        };
        let text: Vec<String> = pairs(&block).map(|pair| format!("{} {}", pair[0], pair[1])).collect();
        assert_eq!(text, ["10.0.0.8 fd00::8", "10.0.0.9 fd00::9", "10.0.0.10 fd00::a", "10.0.0.11 fd00::b"]);
    }

    #[test]
    fn a_huge_range_is_not_written_out() {
        let block = Block {
            node: "b".into(),
            node_addresses: vec![],
            ipv4: None,
            ipv6: Some("fd00::/64".parse().expect("v6")),
        };
        assert_eq!(pairs(&block).count(), 256);
    }
}
