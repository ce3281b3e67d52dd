//! What is where, for one pass: the indices that are kept, and which nodes have departed by now.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::{Family, NodeNetworkStatusNetwork, SpareBlock};
use knit_ipam::Block;
use knit_model::Network;

use super::kept::{Indexed, Kept, OfNetwork, OfRuntime, spare_of};
use super::primary::Primaries;
use crate::cluster::{AttachmentView, BlockView, Cluster, NamespaceView};

/// What is where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Index<'a> {
    cluster: &'a Cluster,
    kept: &'a Kept,
    departed: &'a HashSet<String>,
}

impl<'a> Index<'a> {
    pub(super) fn new(indexed: &'a Indexed, departed: &'a HashSet<String>) -> Self {
        Self { cluster: &indexed.cluster, kept: &indexed.kept, departed }
    }

    fn network(&self, name: &str) -> Option<&'a OfNetwork> {
        self.kept.networks.get(name)
    }

    /// Which Network is a namespace's primary.
    pub(super) fn primaries(&self) -> &'a Primaries {
        &self.kept.primaries
    }

    /// What nodes say of a runtime; nothing if none has it.
    pub(super) fn runtime(&self, name: &str) -> Option<&'a OfRuntime> {
        self.kept.runtimes.get(name)
    }

    /// What nodes say of a Network's addresses: used and free. Nothing if none speaks of this family.
    pub(super) fn addresses(&self, network: &str, family: Family) -> Option<(i128, i128)> {
        self.network(network)?.addresses(family)
    }

    /// Addresses of a Network's subnet that no block has; nothing if there is no block.
    pub(super) fn unassigned(&self, network: &str, family: Family) -> Option<u128> {
        self.network(network)?.unassigned[family as usize]
    }

    /// Whether a Network has blocks that can be used.
    pub(super) fn has_blocks(&self, network: &str) -> bool {
        self.network(network).is_some_and(|of| of.usable > 0)
    }

    /// The blocks of a Network that can be used.
    pub(super) fn blocks(&self, network: &str) -> impl Iterator<Item = &'a Block> {
        let names = self.network(network).into_iter().flat_map(|of| &of.blocks);
        names.filter_map(|name| Some(self.cluster.blocks.get(name)?.block.as_ref()?.block()))
    }

    /// What nodes that have not departed have of a Network besides their blocks.
    pub(super) fn lingering(&self, network: &str) -> impl Iterator<Item = &'a Block> {
        let (departed, network) = (self.departed, network.to_owned());
        let of_nodes = self.kept.lingering.iter().filter(move |(node, _)| !departed.contains(*node));
        of_nodes.flat_map(|(_, blocks)| blocks).filter(move |block| *block.network() == network)
    }

    /// The names of all Networks of which there is a block, with its blocks.
    pub(super) fn all_blocks(&self) -> impl Iterator<Item = (&'a str, &'a OfNetwork)> {
        let with = self.kept.networks.iter().filter(|(_, of)| !of.blocks.is_empty());
        with.map(|(name, of)| (name.as_str(), of))
    }

    /// The AddressBlocks of a node.
    pub(super) fn blocks_on(&self, node: &str) -> impl Iterator<Item = (&'a str, &'a BlockView)> {
        let names = self.kept.nodes.get(node).into_iter().flat_map(|of| &of.blocks);
        names.filter_map(|name| Some((name.as_str(), &**self.cluster.blocks.get(name)?)))
    }

    /// Blocks that are wanted back.
    pub(super) fn reclaimed(&self) -> impl Iterator<Item = &'a str> {
        self.kept.reclaimed.iter().map(String::as_str)
    }

    /// Nodes that can do without some of their blocks, with what they say of each.
    pub(super) fn with_spare(&self) -> impl Iterator<Item = (&'a str, &'a SpareBlock)> {
        let cluster = self.cluster;
        self.kept.with_spare.iter().flat_map(move |node| {
            let said = cluster.node_networks.get(node);
            said.into_iter().flat_map(|said| spare_of(said)).map(move |spare| (node.as_str(), spare))
        })
    }

    /// What a node says of one of its blocks that it can do without.
    pub(super) fn spare(&self, node: &str, block: &str) -> Option<&'a SpareBlock> {
        spare_of(self.cluster.node_networks.get(node)?).iter().find(|spare| spare.name == block)
    }

    /// Whether a node wants a block of a Network.
    pub(super) fn is_asking(&self, network: &str, node: &str) -> bool {
        self.network(network).is_some_and(|of| of.asking.contains(node))
    }

    /// Blocks of the default Network that are a podCIDR which their Node does not have.
    pub(super) fn not_pod_ranges(&self) -> impl Iterator<Item = &'a str> {
        self.kept.not_pod_ranges.iter().map(String::as_str)
    }

    /// Whether a block is one of those.
    pub(super) fn is_not_its_pod_range(&self, name: &str) -> bool {
        self.kept.not_pod_ranges.contains(name)
    }

    /// The AddressBlock that overlaps this one and has a better right.
    pub(super) fn outranking(&self, network: &str, name: &str) -> Option<&'a BlockView> {
        let winner = self.network(network)?.overlapping.get(name)?;
        self.cluster.blocks.get(winner).map(|view| &**view)
    }

    /// Nodes that want a block of this Network, with what they say of it.
    pub(super) fn asking(
        &self,
        network: &str,
    ) -> impl Iterator<Item = (&'a str, &'a NodeNetworkStatusNetwork)> {
        self.entries(network, |of| &of.asking).filter(|(_, entry)| entry.wants_block)
    }

    /// Nodes on which this Network is not ready, with what they say of it.
    pub(super) fn not_ready(
        &self,
        network: &str,
    ) -> impl Iterator<Item = (&'a str, &'a NodeNetworkStatusNetwork)> {
        self.entries(network, |of| &of.not_ready).filter(|(_, entry)| !entry.ready)
    }

    /// How many nodes say that it is not ready.
    pub(super) fn not_ready_count(&self, network: &str) -> usize {
        self.network(network).map_or(0, |of| of.not_ready.len())
    }

    fn entries(
        &self,
        network: &str,
        set: impl Fn(&'a OfNetwork) -> &'a std::collections::BTreeSet<String>,
    ) -> impl Iterator<Item = (&'a str, &'a NodeNetworkStatusNetwork)> {
        let (cluster, name) = (self.cluster, network.to_owned());
        let nodes = self.network(network).into_iter().flat_map(set);
        nodes.flat_map(move |node| {
            let status = cluster.node_networks.get(node).and_then(|object| object.status.as_ref());
            let name = name.clone();
            let entries = status.into_iter().flat_map(|status| &status.networks);
            entries.filter(move |entry| entry.name == name).map(move |entry| (node.as_str(), entry))
        })
    }

    /// Nodes that have no block of the default Network.
    pub(super) fn without_default(&self) -> impl Iterator<Item = &'a str> {
        self.kept.without_default.iter().map(String::as_str)
    }

    /// Nodes that are not there and have blocks or attachments, or something that lingers.
    pub(super) fn missing(&self) -> impl Iterator<Item = &'a str> {
        self.kept.missing.iter().map(String::as_str)
    }

    /// Attachments about which nobody has said anything.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &'a AttachmentView> {
        let places = self.kept.unanswered.iter();
        places.filter_map(|place| self.cluster.attachments.get(place)).map(|view| &**view)
    }

    /// Attachments that are being deleted and have our finalizer, and all of departed nodes.
    pub(super) fn left_behind(&self) -> Vec<&'a AttachmentView> {
        let of_departed = self.departed.iter().filter_map(|node| self.kept.nodes.get(node));
        let mut places: Vec<_> = of_departed.flat_map(|of| &of.attachments).collect();
        places.extend(&self.kept.leaving);
        places.sort_unstable();
        places.dedup();
        places.into_iter().filter_map(|place| self.cluster.attachments.get(place)).map(|v| &**v).collect()
    }

    /// The addresses that pods of primary Networks have on this node, each with its Network.
    pub(super) fn primary_addresses(&self, node: &str) -> Vec<(&'a str, IpAddr)> {
        let places = self.kept.nodes.get(node).into_iter().flat_map(|of| &of.attachments);
        let views = places.filter_map(|place| self.cluster.attachments.get(place)).filter(|view| view.ready);
        let is_primary = |name: &str| self.cluster.networks.get(name).is_some_and(|n| n.is_primary());
        views
            .filter(|view| is_primary(&view.network))
            .flat_map(|view| view.addresses.iter().map(|address| (view.network.as_str(), *address)))
            .collect()
    }

    /// A node whose own address is in this range.
    pub(super) fn node_inside(&self, range: IpNet) -> Option<(IpAddr, &'a str)> {
        self.nodes_inside(range).next()
    }

    /// All nodes whose own address is in this range.
    pub(super) fn nodes_inside(&self, range: IpNet) -> impl Iterator<Item = (IpAddr, &'a str)> {
        let addresses = &self.kept.addresses;
        let at = addresses.partition_point(|(address, _)| *address < range.network());
        let from_there = addresses[at..].iter().map(|(address, node)| (*address, node.as_str()));
        from_there.take_while(move |(address, _)| *address <= range.broadcast())
    }

    /// A podCIDR that overlaps this range, and whose it is.
    pub(super) fn pod_range_over(&self, range: IpNet) -> Option<(IpNet, &'a str)> {
        self.kept.pod_range_over(range)
    }

    /// Who uses a Network, in words; nothing if nobody does.
    pub(super) fn user_of(&self, network: &str) -> Option<String> {
        let published = self.published(network);
        if published > 0 {
            return Some(format!("{published} NetworkAttachments"));
        }
        let (node, here) = self.entries(network, |of| &of.used_on).find(|(_, n)| n.attachments > 0)?;
        Some(format!("{} pods on node {node}", here.attachments))
    }

    /// How many attachments hold a Network that is being deleted: those of namespaces that may use it.
    fn published(&self, name: &str) -> usize {
        let network = self.cluster.networks.get(name).filter(|network| network.is_being_deleted());
        let (Some(network), Some(of)) = (network, self.network(name)) else { return 0 };
        let allowed = of.attached.iter().filter(|(namespace, _)| {
            self.cluster.namespaces.get(*namespace).is_some_and(|view| may_use(network, view))
        });
        let nodes = allowed.flat_map(|(_, nodes)| nodes);
        nodes.filter(|(node, _)| !self.departed.contains(*node)).map(|(_, count)| count).sum()
    }
}

/// Whether a namespace may use a Network. A selector that cannot be understood might have meant it.
fn may_use(network: &Network, namespace: &NamespaceView) -> bool {
    network.is_default() || network.admits(&namespace.labels).unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::cluster::{Cluster, NodeView};

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
            let mut indexed = Indexed::new(cluster);
            indexed.refresh();
            let departed = HashSet::new();
            let index = Index::new(&indexed, &departed);
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
