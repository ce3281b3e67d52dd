//! The cluster turned round once per pass, so that no step looks at every node for every Network.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use knit_api::names::DEFAULT_NETWORK;
use knit_api::{AllowedNamespacesFrom, Network, NodeNetworkStatusNetwork};
use knit_ipam::Block;
use kube::core::{Selector, SelectorExt};

use super::blocks::block_of;
use crate::cluster::{AttachmentView, Cluster, NamespaceView};

/// What is where.
#[derive(Debug)]
pub(super) struct Index<'a> {
    /// What nodes that are there say of a Network.
    said: HashMap<&'a str, Vec<(&'a str, &'a NodeNetworkStatusNetwork)>>,
    /// The blocks of a Network.
    blocks: HashMap<&'a str, Vec<Block>>,
    /// How many NetworkAttachments a Network has that is being deleted.
    attachments: HashMap<&'a str, usize>,
    /// The addresses that pods of primary Networks have on a node, each with its Network.
    primary: HashMap<&'a str, Vec<(&'a str, IpAddr)>>,
    /// Nodes' own addresses, sorted.
    addresses: Vec<(IpAddr, &'a str)>,
    /// Nodes' podCIDRs, sorted by their first address; with each the one of those up to it that reaches
    /// furthest.
    ranges: Vec<(IpNet, &'a str, usize)>,
}

impl<'a> Index<'a> {
    pub(super) fn new(cluster: &'a Cluster, departed: &HashSet<String>) -> Self {
        let mut said: HashMap<&str, Vec<_>> = HashMap::new();
        for (node, object) in
            cluster.node_networks.iter().filter(|(node, _)| cluster.nodes.contains_key(*node))
        {
            for entry in object.status.iter().flat_map(|status| &status.networks) {
                said.entry(entry.name.as_str()).or_default().push((node.as_str(), entry));
            }
        }
        let mut blocks: HashMap<&str, Vec<Block>> = HashMap::new();
        for object in cluster.blocks.values() {
            blocks.entry(object.spec.network.as_str()).or_default().extend(block_of(object));
        }
        let mut primary: HashMap<&str, Vec<(&str, IpAddr)>> = HashMap::new();
        for (node, attachment) in there(cluster, departed) {
            let network = attachment.network.as_str();
            if cluster.networks.get(network).is_some_and(|n| n.spec.primary_for.is_some()) {
                primary.entry(node).or_default().extend(attachment.addresses.iter().map(|a| (network, *a)));
            }
        }
        let of_nodes = || cluster.nodes.iter().map(|(name, node)| (name.as_str(), node));
        let mut addresses: Vec<(IpAddr, &str)> =
            of_nodes().flat_map(|(name, node)| node.addresses.iter().map(move |a| (*a, name))).collect();
        addresses.sort_unstable();
        let mut sorted: Vec<(IpNet, &str)> =
            of_nodes().flat_map(|(name, node)| node.pod_ranges.iter().map(move |r| (*r, name))).collect();
        sorted.sort_unstable_by_key(|(range, name)| (range.network(), *name));
        let mut ranges: Vec<(IpNet, &str, usize)> = Vec::with_capacity(sorted.len());
        let mut furthest = 0;
        for (i, (range, name)) in sorted.into_iter().enumerate() {
            if i == 0 || range.broadcast() > ranges[furthest].0.broadcast() {
                furthest = i;
            }
            ranges.push((range, name, furthest));
        }
        Self { said, blocks, attachments: users(cluster, departed), primary, addresses, ranges }
    }

    /// What nodes say of this Network, by node.
    pub(super) fn said(&self, network: &str) -> &[(&'a str, &'a NodeNetworkStatusNetwork)] {
        self.said.get(network).map_or(&[], Vec::as_slice)
    }

    /// The blocks of this Network.
    pub(super) fn blocks(&self, network: &str) -> &[Block] {
        self.blocks.get(network).map_or(&[], Vec::as_slice)
    }

    /// The addresses that pods of primary Networks have on this node, each with its Network.
    pub(super) fn primary_addresses(&self, node: &str) -> &[(&'a str, IpAddr)] {
        self.primary.get(node).map_or(&[], Vec::as_slice)
    }

    /// A node whose own address is in this range.
    pub(super) fn node_inside(&self, range: IpNet) -> Option<(IpAddr, &'a str)> {
        let at = self.addresses.partition_point(|(address, _)| *address < range.network());
        self.addresses.get(at).copied().filter(|(address, _)| *address <= range.broadcast())
    }

    /// A podCIDR that overlaps this range, and whose it is.
    pub(super) fn pod_range_over(&self, range: IpNet) -> Option<(IpNet, &'a str)> {
        // Of those that begin before the range's end, the one that reaches furthest reaches into it if any
        // does.
        let before = self.ranges.partition_point(|(other, _, _)| other.network() <= range.broadcast());
        let furthest = self.ranges.get(before.checked_sub(1)?)?.2;
        let (other, node, _) = self.ranges[furthest];
        (other.broadcast() >= range.network()).then_some((other, node))
    }

    /// Who uses a Network, in words; nothing if nobody does.
    pub(super) fn user_of(&self, network: &str) -> Option<String> {
        if let Some(published) = self.attachments.get(network) {
            return Some(format!("{published} NetworkAttachments"));
        }
        let (node, here) = self.said(network).iter().find(|(_, n)| n.attachments > 0)?;
        Some(format!("{} pods on node {node}", here.attachments))
    }
}

/// NetworkAttachments whose interface is there, with its node. What an object only asks for, or was refused,
/// is none.
fn there<'a>(
    cluster: &'a Cluster,
    departed: &HashSet<String>,
) -> impl Iterator<Item = (&'a str, &'a AttachmentView)> {
    cluster.attachments.iter().filter(|attachment| attachment.ready).filter_map(|attachment| {
        let node = attachment.node.as_deref().filter(|node| !departed.contains(*node))?;
        Some((node, &**attachment))
    })
}

/// How many NetworkAttachments each Network has that is being deleted: only for those it counts.
fn users<'a>(cluster: &'a Cluster, departed: &HashSet<String>) -> HashMap<&'a str, usize> {
    let mut users: HashMap<&str, usize> = HashMap::new();
    let mut allowed: HashMap<(&str, &str), bool> = HashMap::new();
    for (_, attachment) in there(cluster, departed) {
        let name = attachment.network.as_str();
        let network = cluster.networks.get(name).filter(|n| n.metadata.deletion_timestamp.is_some());
        let Some(network) = network else { continue };
        let namespace = attachment.namespace.as_str();
        let allowed = allowed.entry((name, namespace)).or_insert_with(|| {
            cluster.namespaces.get(namespace).is_some_and(|view| may_use(name, network, view))
        });
        if *allowed {
            *users.entry(name).or_default() += 1;
        }
    }
    users
}

/// Whether a namespace may use a Network. A selector that cannot be understood might have meant it.
fn may_use(name: &str, network: &Network, namespace: &NamespaceView) -> bool {
    let matches = |selector: &LabelSelector| {
        Selector::try_from(selector.clone()).map_or(true, |selector| selector.matches(&namespace.labels))
    };
    let allowed = network.spec.allowed_namespaces.as_ref();
    name == DEFAULT_NETWORK
        || network.spec.primary_for.as_ref().is_some_and(matches)
        || allowed.is_some_and(|allowed| match allowed.from {
            AllowedNamespacesFrom::None => false,
            AllowedNamespacesFrom::All => true,
            AllowedNamespacesFrom::Selector => allowed.selector.as_ref().is_some_and(matches),
        })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::cluster::NodeView;

    fn range() -> impl Strategy<Value = IpNet> {
        let v4 = (0_u32..64, 26_u8..=32).prop_map(|(n, len)| {
            IpNet::new(IpAddr::V4((0x0a00_0000 + n).into()), len).expect("a range").trunc()
        });
        let v6 = (0_u128..64, 122_u8..=128).prop_map(|(n, len)| {
            IpNet::new(IpAddr::V6(((0xfd << 120) + n).into()), len).expect("a range").trunc()
        });
        prop_oneof![v4, v6]
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_search_finds(
            ranges in prop::collection::vec(range(), 0..8), asked in range()
        ) {
            let mut cluster = Cluster::default();
            for (i, range) in ranges.iter().enumerate() {
                let view = NodeView { addresses: vec![range.addr()], pod_ranges: vec![*range],
                    ..NodeView::default() };
                cluster.nodes.insert(format!("n{i}"), Arc::new(view));
            }
            let index = Index::new(&cluster, &HashSet::new());
            let overlapping = ranges.iter().any(|r| r.contains(&asked) || asked.contains(r));
            let found = index.pod_range_over(asked);
            prop_assert_eq!(found.is_some(), overlapping);
            prop_assert!(found.is_none_or(|(r, _)| r.contains(&asked) || asked.contains(&r)));
            let inside = ranges.iter().any(|r| asked.contains(&r.addr()));
            let found = index.node_inside(asked);
            prop_assert_eq!(found.is_some(), inside);
            prop_assert!(found.is_none_or(|(a, _)| asked.contains(&a)));
        }
    }
}
