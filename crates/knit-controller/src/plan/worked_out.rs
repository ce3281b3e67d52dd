//! Indices that are worked out again when something they are made of has changed: of nodes, or of one
//! Network's blocks.

use std::collections::BTreeSet;

use ipnet::IpNet;
use knit_api::Family;
use knit_api::names::DEFAULT_NETWORK;
use knit_ipam::{AddressRange, Block, outranked};

use super::kept::Kept;
use crate::cluster::{BlockView, Cluster};

impl Kept {
    pub(super) fn sort_nodes(&mut self, cluster: &Cluster) {
        let of_nodes = || cluster.nodes.iter();
        self.addresses =
            of_nodes().flat_map(|(name, node)| node.addresses.iter().map(|a| (*a, name.clone()))).collect();
        self.addresses.sort_unstable();
        let mut sorted: Vec<(IpNet, String)> =
            of_nodes().flat_map(|(name, node)| node.pod_ranges.iter().map(|r| (*r, name.clone()))).collect();
        sorted.sort_unstable_by(|a, b| (a.0.network(), &a.1).cmp(&(b.0.network(), &b.1)));
        self.ranges = Vec::with_capacity(sorted.len());
        let mut furthest = 0;
        for (i, (range, name)) in sorted.into_iter().enumerate() {
            if i == 0 || range.broadcast() > self.ranges[furthest].0.broadcast() {
                furthest = i;
            }
            self.ranges.push((range, name, furthest));
        }
    }

    /// What a Network's blocks leave, and which of them overlap.
    pub(super) fn work_out_blocks(&mut self, cluster: &Cluster, name: &str) {
        let Some(of) = self.networks.get_mut(name) else { return };
        self.work += of.blocks.len() as u64;
        let mut objects: Vec<(&String, _, &Block)> = Vec::with_capacity(of.blocks.len());
        for name in &of.blocks {
            let view = cluster.blocks.get(name);
            if let Some((view, block)) = view.and_then(|view| Some((view, view.block.as_ref()?))) {
                objects.push((name, view.created, block.block()));
            }
        }
        // The older has the better right, as on nodes.
        objects.sort_by_key(|(name, created, _)| (*created, *name));
        let blocks: Vec<Block> = objects.iter().map(|(_, _, block)| (*block).clone()).collect();
        of.usable = blocks.len();
        let outranked = outranked(&blocks).into_iter();
        of.overlapping =
            outranked.map(|(loser, winner)| (objects[loser].0.clone(), objects[winner].0.clone())).collect();
        let pool = cluster.networks.get(name).and_then(|network| network.pool().ok().flatten());
        of.unassigned = Family::ALL.map(|family| Some(pool?.subnet(family)?.unassigned(&blocks)));
    }

    /// What is missing of the default Network, and what is not its own any more.
    pub(super) fn work_out_default(&mut self, cluster: &Cluster) {
        let empty = BTreeSet::new();
        let blocks = self.networks.get(DEFAULT_NETWORK).map_or(&empty, |of| &of.blocks);
        let views = || blocks.iter().filter_map(|name| Some((name, cluster.blocks.get(name)?)));
        let owners: BTreeSet<&str> =
            views().filter(|(_, view)| view.block.is_some()).map(|(_, view)| view.node.as_str()).collect();
        let without = cluster.nodes.keys().filter(|node| !owners.contains(node.as_str()));
        self.without_default = without.cloned().collect();
        let network = cluster.networks.get(DEFAULT_NETWORK).filter(|network| !network.has_subnets());
        self.not_pod_ranges = match network {
            Some(_) => views()
                .filter(|(_, view)| self.is_not_its_pod_range(cluster, view))
                .map(|(name, _)| name.clone())
                .collect(),
            None => BTreeSet::new(),
        };
    }

    /// Whether a block is a podCIDR that its Node does not have any more: the Node joined again and got
    /// another, or it is gone and the cluster gave its range to another Node, which cannot wait then.
    fn is_not_its_pod_range(&self, cluster: &Cluster, object: &BlockView) -> bool {
        let Some(block) = object.block.as_ref().map(knit_model::AddressBlock::block) else { return false };
        match cluster.nodes.get(block.node()) {
            Some(view) => {
                let covers = |range: &IpNet| block.ranges().any(|r| r.overlaps(&AddressRange::from(*range)));
                !view.pod_ranges.is_empty() && !view.pod_ranges.iter().any(covers)
            }
            None => Family::ALL
                .into_iter()
                .filter_map(|family| block.prefix(family))
                .any(|range| self.pod_range_over(range).is_some()),
        }
    }

    /// A podCIDR that overlaps this range, and whose it is.
    pub(super) fn pod_range_over(&self, range: IpNet) -> Option<(IpNet, &str)> {
        // Of those that begin before the range's end, the one that reaches furthest reaches into it if any
        // does.
        let before = self.ranges.partition_point(|(other, _, _)| other.network() <= range.broadcast());
        let furthest = self.ranges.get(before.checked_sub(1)?)?.2;
        let (other, node, _) = &self.ranges[furthest];
        (other.broadcast() >= range.network()).then_some((*other, node.as_str()))
    }
}
