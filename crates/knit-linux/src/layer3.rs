//! Routed Networks: what they want in their router's namespace.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::Mac;

use crate::shape::{Path, Shape, tunnel_hop, tunnel_mac};
use crate::wanted::Entry;

/// The routes to other nodes' ranges: directly, or by a tunnel with one neighbour and one forwarding entry per node.
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

/// What a pod has in its router: a route to each of its addresses, and a neighbour so that nobody asks.
pub(crate) fn pod_entries(host: &str, mac: Mac, addresses: impl Iterator<Item = IpAddr>) -> Vec<Entry> {
    let link = || host.to_owned();
    addresses
        .flat_map(|address| {
            let to = IpNet::from(address);
            [
                Entry::Route { to, via: None, link: link(), source: None },
                Entry::Neighbour { link: link(), address, mac },
            ]
        })
        .collect()
}
