//! Switched Networks: a bridge in each router joins its pods, and a tunnel joins the bridges of all nodes.
//!
//! Remote pods' MACs follow from their addresses, so neighbours and forwarding entries for a whole block of
//! another node are written before any pod exists there; nothing is learned and nothing is flooded to other
//! nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::{Mac, pod_mac};
use knit_kernel::link::{AddrGenMode, Bridge, NewLink, PortFlags};
use knit_kernel::{Handle, IfName, Mtu, owner};
use knit_nft::{Family, TableId, TableState};
use knit_runtime::{Block, Network, Result, Topology};
use knit_types::{Family as IpFamily, HasFamily as _};

use super::{Driver, Master};
use crate::fail::internal;
use crate::links::WantedLink;
use crate::mark::Mark;
use crate::rules;
use crate::settings::{self, Setting};
use crate::shape::{Facts, RouterHome, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::tunnel::ROUTER_TUNNEL;
use crate::wanted::Entry;

/// Switched Networks.
#[derive(Debug)]
pub(super) struct Switched;

/// What it means where a kernel does not have the settings.
const NO_BRIDGE_FILTER: &str = "bridged packets do not pass IP rules here, so Services and policies \
of switched Networks do not work: load the module br_netfilter";
const ASKS: &str = "the router sends solicitations for unassigned addresses, and its pods may fill the \
    machine's neighbor table";

/// The bridge, in the router.
const BRIDGE: &str = "bridge";

/// A pod's port. All addresses are written, so nothing is learned, and nothing unknown is sent there. Without
/// hairpin a pod that reaches itself by a service would never hear itself.
const POD_PORT: PortFlags = PortFlags {
    isolated: false,
    hairpin: true,
    neigh_suppress: false,
    learning: false,
    flood: false,
    multicast_flood: true,
    broadcast_flood: true,
};

/// The tunnel's port. The bridge answers for remote pods, and floods nothing to other nodes.
const TUNNEL_PORT: PortFlags = PortFlags {
    isolated: false,
    hairpin: false,
    neigh_suppress: true,
    learning: false,
    flood: false,
    multicast_flood: false,
    broadcast_flood: false,
};

impl Driver for Switched {
    fn topology(&self) -> Topology {
        Topology::Layer2
    }

    fn letter(&self) -> Option<char> {
        Some('s')
    }

    fn check(&self, network: &Network, home: RouterHome) -> Result<(), String> {
        match home {
            RouterHome::Node => Err(format!(
                "Network {} uses the node's own namespace and can only be \
            Layer3",
                network.name
            )),
            RouterHome::Own => Ok(()),
        }
    }

    /// The bridge: its MAC first, because changing it later takes its neighbours away.
    fn settle_links(&self, router: &Handle, shape: &Shape) -> Result<Option<u32>> {
        let name = IfName::new(BRIDGE).expect("bridge is a name");
        let there = router.link_by_name(&name).map_err(internal("look for the bridge"))?;
        if let Some(link) = there {
            like(shape).settle(router, &link)?;
            return Ok(Some(link.index));
        }
        let mut bridge = NewLink::bridge(name, Bridge::default());
        (bridge.mac, bridge.mtu) = (Some(bridge_mac(shape)), Mtu::new(shape.mtu).ok());
        (bridge.group, bridge.up) = (0, true);
        bridge.alias = Some(owner::alias(&format!("bridge {}", shape.id())));
        bridge.addr_gen = Some(AddrGenMode::None);
        router.create_link(&bridge).map(|made| Some(made.index)).map_err(internal("create the bridge"))
    }

    fn compare_links(
        &self,
        router: &NamespaceSight,
        shape: &Shape,
        wrong: &mut NetworkDamage,
    ) -> Option<u32> {
        let Some(link) = router.links.get(BRIDGE) else {
            wrong.add("links", "the bridge is missing");
            return None;
        };
        wrong.link(&like(shape), link);
        Some(link.index)
    }

    fn master(&self) -> Option<Master> {
        Some(Master { name: BRIDGE, pod_port: POD_PORT, tunnel_port: TUNNEL_PORT })
    }

    fn settings(&self) -> Vec<(Vec<Setting>, &'static str)> {
        vec![(settings::bridge_filter(), NO_BRIDGE_FILTER), (settings::ask_nobody(BRIDGE), ASKS)]
    }

    /// The ports of a bridge are checked where frames come in.
    fn tables(&self, vxlan_port: u16) -> Vec<TableState> {
        vec![rules::bridge::layout(), rules::router::layout(rules::router::without_ports(), vxlan_port)]
    }

    fn sources(&self) -> TableId {
        rules::table(Family::Bridge)
    }

    fn router_entries(&self, shape: &Shape, facts: &Facts) -> BTreeSet<Entry> {
        let mut entries = remote_entries(shape, facts);
        entries.extend(bridge_addresses(shape));
        entries
    }

    fn pod_entries(&self, host: &str, mark: &Mark) -> Vec<Entry> {
        let port = Entry::Port { link: host.to_owned(), mac: mark.mac };
        std::iter::once(port).chain(self.left_by(mark)).collect()
    }

    /// The bridge's neighbours; everything else goes with the link.
    fn left_by(&self, mark: &Mark) -> Vec<Entry> {
        let neighbour = |address| Entry::Neighbour { link: BRIDGE.into(), address, mac: mark.mac };
        mark.ips().map(neighbour).collect()
    }
}

/// The bridge as it is to be.
fn like(shape: &Shape) -> WantedLink {
    let mac = Some(bridge_mac(shape));
    WantedLink { mtu: Some(shape.mtu), mac, group: Some(0), ..WantedLink::default() }
}

/// The bridge's MAC: that of the router's own address, so that other nodes find it by that; the gateway's if
/// it has no address of its own.
fn bridge_mac(shape: &Shape) -> Mac {
    let own = IpFamily::ALL.into_iter().find_map(|family| shape.router_address(family));
    own.map_or_else(|| shape.gateway_mac(), |address| pod_mac(shape.id(), address))
}

/// The bridge's addresses: the router's own with the subnet, and the gateway's alone.
fn bridge_addresses(shape: &Shape) -> Vec<Entry> {
    let mut entries = Vec::new();
    for subnet in &shape.network.subnets {
        let own = shape.router_address(subnet.family());
        let Some(first) = own.or(subnet.gateway) else { continue };
        let net = IpNet::new(first, subnet.cidr.prefix_len()).expect("a prefix length of the same family");
        entries.push(Entry::Address { link: BRIDGE.into(), net });
        let alone = subnet.gateway.filter(|gateway| *gateway != first);
        entries.extend(alone.map(|it| Entry::Address { link: BRIDGE.into(), net: IpNet::from(it) }));
    }
    entries
}

/// The pods of other nodes: all that their blocks can have, and those that were announced one by one.
fn remote_entries(shape: &Shape, facts: &Facts) -> BTreeSet<Entry> {
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
