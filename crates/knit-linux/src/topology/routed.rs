//! Routed Networks: a router routes between its pods, each of which has nothing but the gateway on its link.

use std::collections::BTreeSet;

use ipnet::IpNet;
use knit_nft::{Family, TableId, TableState};
use knit_runtime::{Network, Result, Topology};

use super::Driver;
use crate::mark::Mark;
use crate::rules::{self, SetElement};
use crate::shape::{Facts, Path, RouterHome, Shape, tunnel_hop, tunnel_mac};
use crate::tunnel::ROUTER_TUNNEL;
use crate::uplink::ROUTER_END;
use crate::wanted::Entry;

/// Routed Networks.
#[derive(Debug)]
pub(super) struct Routed;

impl Driver for Routed {
    fn topology(&self) -> Topology {
        Topology::Layer3
    }

    fn letter(&self) -> Option<char> {
        None
    }

    fn check(&self, _: &Network, _: RouterHome) -> Result<(), String> {
        Ok(())
    }

    fn tables(&self, vxlan_port: u16) -> Vec<TableState> {
        vec![rules::port::no_arp(), rules::router::layout(rules::router::with_ports(), vxlan_port)]
    }

    fn sources(&self) -> TableId {
        rules::table(Family::Inet)
    }

    fn router_elements(&self) -> Vec<SetElement> {
        rules::router::not_ports([ROUTER_END, ROUTER_TUNNEL])
    }

    fn router_entries(&self, shape: &Shape, _: &Facts) -> BTreeSet<Entry> {
        let own = shape.network.subnets.iter().filter_map(|subnet| subnet.gateway);
        let own = own.chain(shape.network.router_addresses.iter().copied());
        let address = |address| Entry::Address { link: "lo".into(), net: IpNet::from(address) };
        let mut entries: BTreeSet<Entry> = own.map(address).collect();
        entries.extend(remote_entries(shape, ROUTER_END, ROUTER_TUNNEL));
        entries
    }

    /// A route to each of its addresses, and a neighbour so that nobody asks.
    fn pod_entries(&self, host: &str, mark: &Mark) -> Vec<Entry> {
        let (link, mac) = (|| host.to_owned(), mark.mac);
        let both = |address| {
            let to = IpNet::from(address);
            [
                Entry::Route { to, via: None, link: link(), source: None },
                Entry::Neighbour { link: link(), address, mac },
            ]
        };
        mark.ips().flat_map(both).collect()
    }
}

/// The routes to other nodes' ranges: directly, or by a tunnel with one neighbour and one forwarding entry
/// per node.
pub(crate) fn remote_entries(shape: &Shape, uplink: &str, tunnel: &str) -> BTreeSet<Entry> {
    let mut entries = BTreeSet::new();
    for remote in &shape.remotes {
        for (range, path) in &remote.ranges {
            let (via, link) = match (path, remote.tunnel) {
                (Path::Direct(address), _) => (*address, uplink),
                (Path::Tunnel, Some(end)) => {
                    let hop = tunnel_hop(end, *range);
                    let (link, mac) = (tunnel.to_owned(), tunnel_mac(end));
                    entries.insert(Entry::Neighbour { link: link.clone(), address: hop, mac });
                    entries.insert(Entry::Remote { link, mac, node: end });
                    (hop, tunnel)
                }
                (Path::Tunnel, None) => continue,
            };
            let route = Entry::Route { to: range.trunc(), via: Some(via), link: link.into(), source: None };
            entries.insert(route);
        }
    }
    entries
}
