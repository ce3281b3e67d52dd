//! What is where, kept between plans: a change of one object changes what is known of that object here, so
//! that no plan looks at the whole cluster again.
//!
//! [`Indexed`] is a cluster with these indices. Whatever the order of changes, they are those that
//! [`Indexed::new`] makes of the cluster as it is: a property test compares them after every change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_api::names::DEFAULT_NETWORK;
use knit_api::{Family, HeldRanges, NetworkClass, NodeNetwork, NodeNetworkStatusNetwork, SpareBlock};
use knit_ipam::Block;
use knit_model::{AddressBlock, Network};
use knit_types::NetworkName;

use super::primary::{Primaries, primaries};
use crate::cluster::{
    AgentLease, AttachmentView, BlockView, Cluster, NamespaceView, NamespacedName, NodeView, PolicyView,
};

/// A cluster with indices that follow its changes.
#[derive(Clone, Debug, Default)]
pub struct Indexed {
    pub(super) cluster: Cluster,
    pub(super) kept: Kept,
}

/// One object is another now, or gone.
#[derive(Clone, Debug)]
pub enum Change {
    /// A NetworkClass.
    Class(String, Option<Arc<NetworkClass>>),
    /// A Network.
    Network(NetworkName, Option<Arc<Network>>),
    /// An AddressBlock.
    Block(String, Option<Arc<BlockView>>),
    /// What a node says of itself.
    NodeNetwork(String, Option<Arc<NodeNetwork>>),
    /// A Node.
    Node(String, Option<Arc<NodeView>>),
    /// A Namespace.
    Namespace(String, Option<Arc<NamespaceView>>),
    /// A NetworkAttachment.
    Attachment(NamespacedName, Option<Arc<AttachmentView>>),
    /// A NetworkPolicy.
    Policy(NamespacedName, Option<Arc<PolicyView>>),
    /// The sign of life of a node's agent.
    Lease(String, Option<AgentLease>),
    /// Where Services have their addresses.
    ServiceRanges(Vec<IpNet>),
    /// Whether news of Leases arrive.
    HearsAgents(bool),
}

/// The indices.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    pub(super) networks: BTreeMap<String, OfNetwork>,
    pub(super) nodes: BTreeMap<String, OfNode>,
    pub(super) runtimes: BTreeMap<String, OfRuntime>,
    /// Nodes that are not there and have blocks or attachments, or something that lingers.
    pub(super) missing: BTreeSet<String>,
    /// Attachments about which nobody has said anything.
    pub(super) unanswered: BTreeSet<NamespacedName>,
    /// Attachments that are being deleted and have our finalizer.
    pub(super) leaving: BTreeSet<NamespacedName>,
    /// Nodes' own addresses, sorted.
    pub(super) addresses: Vec<(IpAddr, String)>,
    /// Nodes' podCIDRs, sorted by their first address; with each the one of those up to it that reaches
    /// furthest.
    pub(super) ranges: Vec<(IpNet, String, usize)>,
    pub(super) primaries: Primaries,
    /// Nodes that have no block of the default Network.
    pub(super) without_default: BTreeSet<String>,
    /// Blocks of the default Network that are a podCIDR which their Node does not have.
    pub(super) not_pod_ranges: BTreeSet<String>,
    /// What nodes say they have and is in none of their blocks: pods still have addresses of blocks that were
    /// deleted.
    pub(super) lingering: BTreeMap<String, Vec<Block>>,
    /// Blocks that are wanted back.
    pub(super) reclaimed: BTreeSet<String>,
    /// Nodes that can do without some of their blocks.
    pub(super) with_spare: BTreeSet<String>,
    dirty: Dirty,
    /// Counts the objects that were looked at to keep all this: what a change costs.
    pub(super) work: u64,
}

/// What is known of a Network, whether or not it is there.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OfNetwork {
    /// Its AddressBlocks.
    pub(super) blocks: BTreeSet<String>,
    /// What nodes that are there say of its addresses, by family.
    said: [ReportedCounts; 2],
    /// Nodes that want a block.
    pub(super) asking: BTreeSet<String>,
    /// Nodes on which it is not ready.
    pub(super) not_ready: BTreeSet<String>,
    /// Nodes on which pods use it.
    pub(super) used_on: BTreeSet<String>,
    /// How many attachments are there, by namespace and node.
    pub(super) attached: BTreeMap<String, BTreeMap<String, usize>>,
    /// Addresses of each of its subnets that no block has.
    pub(super) unassigned: [Option<u128>; 2],
    /// Blocks that overlap one with a better right, each with that one.
    pub(super) overlapping: BTreeMap<String, String>,
    /// How many blocks can be used.
    pub(super) usable: usize,
}

/// What nodes say of one family of a Network, in sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ReportedCounts {
    entries: usize,
    used: i128,
    free: i128,
}

/// What is known of a node, whether or not it is there.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OfNode {
    pub(super) blocks: BTreeSet<String>,
    pub(super) attachments: BTreeSet<NamespacedName>,
}

/// What nodes say of a runtime, in sum.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OfRuntime {
    pub(super) entries: usize,
    pub(super) healthy: usize,
    /// How many of them have a feature.
    pub(super) features: BTreeMap<String, usize>,
}

/// What must be worked out again before the next plan.
#[derive(Clone, Debug, Default)]
struct Dirty {
    nodes: bool,
    primaries: bool,
    networks: BTreeSet<String>,
}

// === impl Indexed ===

impl Indexed {
    /// A cluster as it is.
    #[must_use]
    pub fn new(cluster: Cluster) -> Self {
        let Cluster {
            classes,
            networks,
            blocks,
            node_networks,
            nodes,
            namespaces,
            attachments,
            service_ranges,
            leases,
            hears_agents,
            policies,
        } = cluster;
        let rest = Cluster { classes, service_ranges, leases, hears_agents, policies, ..Cluster::default() };
        let mut all = Self { cluster: rest, kept: Kept::default() };
        for (name, network) in networks {
            all.apply(Change::Network(name, Some(network)));
        }
        for (name, node) in nodes {
            all.apply(Change::Node(name, Some(node)));
        }
        for (name, said) in node_networks {
            all.apply(Change::NodeNetwork(name, Some(said)));
        }
        for (name, block) in blocks {
            all.apply(Change::Block(name, Some(block)));
        }
        for (name, namespace) in namespaces {
            all.apply(Change::Namespace(name, Some(namespace)));
        }
        for (place, attachment) in attachments {
            all.apply(Change::Attachment(place, Some(attachment)));
        }
        all
    }

    /// The cluster.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// How many objects were looked at to keep the indices, since the start.
    #[must_use]
    pub fn work(&self) -> u64 {
        self.kept.work
    }

    /// Takes a change.
    pub fn apply(&mut self, change: Change) {
        self.kept.work += 1;
        let (cluster, kept) = (&mut self.cluster, &mut self.kept);
        match change {
            Change::Class(name, class) => _ = put(&mut cluster.classes, name, class),
            Change::Namespace(name, namespace) => {
                let old = put(&mut cluster.namespaces, name, namespace.clone());
                kept.dirty.primaries |= old != namespace;
            }
            Change::Policy(place, policy) => _ = put(&mut cluster.policies, place, policy),
            Change::Lease(name, lease) => _ = put(&mut cluster.leases, name, lease),
            Change::ServiceRanges(ranges) => cluster.service_ranges = ranges,
            Change::HearsAgents(hears) => cluster.hears_agents = hears,
            Change::Network(name, network) => {
                kept.dirty.primaries = true;
                kept.dirty.networks.insert(name.to_string());
                put(&mut cluster.networks, name, network);
            }
            Change::Block(name, block) => {
                let old = put(&mut cluster.blocks, name.clone(), block.clone());
                if old == block {
                    return;
                }
                if let Some(old) = old {
                    kept.remove_block(&name, &old);
                    kept.look_what_lingers(&old.node, cluster);
                }
                if let Some(block) = block {
                    kept.add_block(&name, &block);
                    kept.look_what_lingers(&block.node, cluster);
                }
            }
            Change::NodeNetwork(name, said) => {
                let old = put(&mut cluster.node_networks, name.clone(), said.clone());
                let there = cluster.nodes.contains_key(&name);
                if old.as_deref().and_then(held) != said.as_deref().and_then(held) {
                    kept.look_what_lingers(&name, cluster);
                }
                if let Some(old) = old {
                    kept.runtimes(&old, -1);
                    if there {
                        kept.said(&name, &old, -1);
                    }
                }
                if said.as_ref().is_some_and(|said| !spare_of(said).is_empty()) {
                    kept.with_spare.insert(name.clone());
                } else {
                    kept.with_spare.remove(&name);
                }
                if let Some(said) = said {
                    kept.runtimes(&said, 1);
                    if there {
                        kept.said(&name, &said, 1);
                    }
                }
            }
            Change::Node(name, node) => {
                let old = put(&mut cluster.nodes, name.clone(), node.clone());
                let same = |a: &NodeView, b: &NodeView| {
                    (&a.addresses, &a.pod_ranges) == (&b.addresses, &b.pod_ranges)
                };
                kept.dirty.nodes |= match (&old, &node) {
                    (Some(old), Some(new)) => !same(old, new),
                    _ => true,
                };
                if old.is_some() != node.is_some() {
                    if let Some(said) = cluster.node_networks.get(&name) {
                        kept.said(&name, &Arc::clone(said), if node.is_some() { 1 } else { -1 });
                    }
                    kept.look_for(&name, cluster);
                }
            }
            Change::Attachment(place, attachment) => {
                let old = put(&mut cluster.attachments, place.clone(), attachment.clone());
                if let Some(old) = old {
                    kept.remove_attachment(&place, &old);
                    kept.look_for(old.node.as_deref().unwrap_or_default(), cluster);
                }
                if let Some(attachment) = attachment {
                    kept.add_attachment(&place, &attachment);
                    kept.look_for(attachment.node.as_deref().unwrap_or_default(), cluster);
                }
            }
        }
    }

    /// Works out again what changes have made wrong.
    pub(super) fn refresh(&mut self) {
        let (cluster, kept) = (&self.cluster, &mut self.kept);
        let dirty = std::mem::take(&mut kept.dirty);
        if dirty.nodes {
            kept.work += cluster.nodes.len() as u64;
            kept.sort_nodes(cluster);
        }
        for name in &dirty.networks {
            kept.work_out_blocks(cluster, name);
        }
        if dirty.nodes || dirty.networks.contains(DEFAULT_NETWORK) {
            kept.work += cluster.nodes.len() as u64;
            kept.work_out_default(cluster);
        }
        if dirty.primaries {
            kept.work += cluster.namespaces.len() as u64;
            kept.primaries = primaries(&cluster.networks, &cluster.namespaces);
        }
    }
}

/// Puts something into a map, or takes it out. What was there before.
fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    }
}

/// The blocks that a node says it can do without.
pub(super) fn spare_of(said: &NodeNetwork) -> &[SpareBlock] {
    said.status.as_ref().map_or(&[], |status| status.spare_blocks.as_slice())
}

/// The ranges that a node says it has.
fn held(said: &NodeNetwork) -> Option<&[HeldRanges]> {
    said.status.as_ref().map(|status| status.held_ranges.as_slice())
}

// === impl Kept ===

impl Kept {
    /// What a node says it has and is in none of its blocks; and with that, whether it is missing.
    fn look_what_lingers(&mut self, node: &str, cluster: &Cluster) {
        self.lingering.remove(node);
        let Some(held) = cluster.node_networks.get(node).and_then(|said| held(said)) else {
            return self.look_for(node, cluster);
        };
        let names = self.nodes.get(node).into_iter().flat_map(|of| &of.blocks);
        let own: Vec<_> =
            names.filter_map(|name| cluster.blocks.get(name).and_then(|view| view.block.as_ref())).collect();
        let mut lingering = Vec::new();
        for HeldRanges { network, ranges } in held {
            for range in ranges.iter().filter_map(|range| range.parse::<IpNet>().ok()) {
                self.work += 1;
                let covers =
                    |b: &&AddressBlock| b.network() == network && b.ranges().any(|r| r.contains(&range));
                if own.iter().any(covers) {
                    continue;
                }
                let (v4, v6) = match range {
                    IpNet::V4(range) => (Some(range.trunc()), None),
                    IpNet::V6(range) => (None, Some(range.trunc())),
                };
                // What cannot be a Network has no addresses.
                let Ok(network) = NetworkName::new(network) else { continue };
                lingering.extend(Block::from_ranges(network, node, v4, v6));
            }
        }
        if !lingering.is_empty() {
            self.lingering.insert(node.to_owned(), lingering);
        }
        self.look_for(node, cluster);
    }

    /// Whether this node is missing: it has something and is not there. What lingers is something, too: it
    /// is only free once its node has departed, and that is found out of missing nodes.
    fn look_for(&mut self, node: &str, cluster: &Cluster) {
        let has_something = self.nodes.contains_key(node) || self.lingering.contains_key(node);
        if has_something && !cluster.nodes.contains_key(node) {
            self.missing.insert(node.to_owned());
        } else {
            self.missing.remove(node);
        }
    }

    fn add_block(&mut self, name: &str, block: &BlockView) {
        self.dirty.networks.insert(block.network.clone());
        self.network(&block.network).blocks.insert(name.to_owned());
        self.nodes.entry(block.node.clone()).or_default().blocks.insert(name.to_owned());
        if block.reclaim.is_some() {
            self.reclaimed.insert(name.to_owned());
        }
    }

    fn remove_block(&mut self, name: &str, block: &BlockView) {
        self.dirty.networks.insert(block.network.clone());
        self.in_network(&block.network, |of| _ = of.blocks.remove(name));
        self.in_node(&block.node, |of| _ = of.blocks.remove(name));
        self.reclaimed.remove(name);
    }

    fn add_attachment(&mut self, place: &NamespacedName, view: &AttachmentView) {
        if view.unanswered.is_some() {
            self.unanswered.insert(place.clone());
        }
        if view.leaving.is_some() {
            self.leaving.insert(place.clone());
        }
        let Some(node) = &view.node else { return };
        self.nodes.entry(node.clone()).or_default().attachments.insert(place.clone());
        if view.ready {
            let of = self.network(&view.network);
            *of.attached.entry(view.namespace.clone()).or_default().entry(node.clone()).or_default() += 1;
        }
    }

    fn remove_attachment(&mut self, place: &NamespacedName, view: &AttachmentView) {
        self.unanswered.remove(place);
        self.leaving.remove(place);
        let Some(node) = &view.node else { return };
        self.in_node(node, |of| _ = of.attachments.remove(place));
        if !view.ready {
            return;
        }
        self.in_network(&view.network, |of| {
            let Some(nodes) = of.attached.get_mut(&view.namespace) else { return };
            if let Some(count) = nodes.get_mut(node) {
                *count -= 1;
                if *count == 0 {
                    nodes.remove(node);
                }
            }
            if nodes.is_empty() {
                of.attached.remove(&view.namespace);
            }
        });
    }

    /// Counts what a node says of Networks, or counts it no more.
    fn said(&mut self, node: &str, object: &NodeNetwork, sign: i8) {
        for entry in object.status.iter().flat_map(|status| &status.networks) {
            self.work += 1;
            if sign > 0 {
                self.network(&entry.name);
            }
            self.in_network(&entry.name, |of| of.count(node, entry, sign));
        }
    }

    /// Counts a node's runtimes, or counts them no more.
    fn runtimes(&mut self, object: &NodeNetwork, sign: i8) {
        for runtime in object.status.iter().flat_map(|status| &status.runtimes) {
            let of = self.runtimes.entry(runtime.name.clone()).or_default();
            step(&mut of.entries, sign);
            if runtime.healthy {
                step(&mut of.healthy, sign);
            }
            for feature in runtime.features.iter().collect::<BTreeSet<_>>() {
                let count = of.features.entry(feature.clone()).or_default();
                step(count, sign);
                if *count == 0 {
                    of.features.remove(feature);
                }
            }
            if of.entries == 0 {
                self.runtimes.remove(&runtime.name);
            }
        }
    }

    fn network(&mut self, name: &str) -> &mut OfNetwork {
        if !self.networks.contains_key(name) {
            self.dirty.networks.insert(name.to_owned());
        }
        self.networks.entry(name.to_owned()).or_default()
    }

    fn in_network(&mut self, name: &str, change: impl FnOnce(&mut OfNetwork)) {
        let Some(of) = self.networks.get_mut(name) else { return };
        change(of);
        if of.is_nothing() {
            self.networks.remove(name);
        }
    }

    fn in_node(&mut self, name: &str, change: impl FnOnce(&mut OfNode)) {
        let Some(of) = self.nodes.get_mut(name) else { return };
        change(of);
        if *of == OfNode::default() {
            self.nodes.remove(name);
        }
    }
}

// === impl OfNetwork ===

impl OfNetwork {
    /// Addresses that nodes say are used and free; nothing if none speaks of this family.
    pub(super) fn addresses(&self, family: Family) -> Option<(i128, i128)> {
        let said = &self.said[family as usize];
        (said.entries > 0).then_some((said.used, said.free))
    }

    fn count(&mut self, node: &str, entry: &NodeNetworkStatusNetwork, sign: i8) {
        for counts in &entry.addresses {
            let said = &mut self.said[counts.family as usize];
            step(&mut said.entries, sign);
            said.used += i128::from(counts.used.max(0)) * i128::from(sign);
            said.free += i128::from(counts.free.max(0)) * i128::from(sign);
        }
        for (set, is) in [
            (&mut self.asking, entry.wants_block),
            (&mut self.not_ready, !entry.ready),
            (&mut self.used_on, entry.attachments > 0),
        ] {
            if sign < 0 {
                set.remove(node);
            } else if is {
                set.insert(node.to_owned());
            }
        }
    }

    /// Whether nobody speaks of it.
    fn is_nothing(&self) -> bool {
        self.blocks.is_empty()
            && self.attached.is_empty()
            && self.said == [ReportedCounts::default(); 2]
            && self.asking.is_empty()
            && self.not_ready.is_empty()
            && self.used_on.is_empty()
    }
}

fn step(count: &mut usize, sign: i8) {
    *count = if sign < 0 { count.saturating_sub(1) } else { *count + 1 };
}
