//! Which node owns which range: blocks for nodes that join or ask, and back again when a node is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::names::{DEFAULT_NETWORK, MANAGED_BY, MANAGED_BY_LABEL, NETWORK_LABEL, NODE_LABEL};
use knit_api::{AddressBlock, AddressBlockSpec, Network, NodeNetworkStatusNetwork};
use knit_ipam::{AddressRange, Block, BlockQuery, Family, Growth, Pool, next_block, outranked};

use super::accept::{Verdict, Verdicts};
use super::action::{Action, Note, Plan};
use super::index::Index;
use super::share;
use crate::cluster::{Cluster, Memory, NodeView, Now, Remembered};

/// How long a block counts that was made and is never seen.
pub(crate) const REMEMBER: Duration = Duration::from_secs(60);

/// All blocks there are, with those that are about to be.
struct Books {
    of_network: BTreeMap<String, Vec<Block>>,
    /// The same, by node.
    of_node: HashMap<String, Vec<Block>>,
}

/// Gives blocks: of the default Network to every node that has none, of any other to a node that asks.
pub(super) fn give(
    cluster: &Cluster,
    index: &Index<'_>,
    memory: &mut Memory,
    verdicts: &Verdicts,
    now: Now,
    plan: &mut Plan,
) {
    let mut books = Books::new(cluster, memory, now);
    let until = now.steady.saturating_add(REMEMBER);
    for (name, network) in &cluster.networks {
        let Some(verdict) = verdicts.of_network.get(name) else { continue };
        if network.metadata.deletion_timestamp.is_some() || !verdict.may_give_blocks() {
            continue;
        }
        for node in needy(cluster, index, &books, name) {
            if let Err(text) = share::allows(cluster, verdict.pool.as_ref(), node, books.held(name, node)) {
                plan.notes.push(Note { regarding: reference(network), reason: "NodeHasItsShare", text });
                continue;
            }
            match choose(cluster, index, &books, node, name, verdict) {
                Ok(Some(block)) => {
                    let object = object_of(&block, network);
                    books.add(block);
                    let block = Arc::new(object.clone());
                    memory.blocks.insert(
                        object.metadata.name.clone().unwrap_or_default(),
                        Remembered { block, until },
                    );
                    plan.actions.push(Action::GiveBlock(object));
                }
                Ok(None) => {}
                Err(text) => {
                    plan.notes.push(Note {
                        regarding: reference(network),
                        reason: "AddressesExhausted",
                        text,
                    });
                }
            }
        }
    }
}

/// Takes blocks back whose node is gone for long enough, whose Network is gone or goes and is not used any
/// more, or that overlap another one.
pub(super) fn release(
    cluster: &Cluster,
    index: &Index<'_>,
    departed: &HashSet<String>,
    memory: &mut Memory,
    plan: &mut Plan,
) {
    let overlapping = overlapping(cluster);
    for (name, winner) in &overlapping {
        if let Some(network) = cluster.networks.get(&winner.spec.network) {
            let (node, range) = (&winner.spec.node, ranges(winner));
            let text = format!(
                "AddressBlock {name} overlaps {range} of node {node}, which is older: it is taken back"
            );
            plan.notes.push(Note { regarding: reference(network), reason: "BlocksOverlap", text });
        }
    }
    for (name, block) in &cluster.blocks {
        if block.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let spec = &block.spec;
        let network = cluster.networks.get(&spec.network);
        let why = match network {
            None => Some(format!("Network {} is gone", spec.network)),
            Some(network) if network.metadata.deletion_timestamp.is_some() => {
                let unused = index.user_of(&spec.network).is_none();
                unused.then(|| format!("Network {} is being deleted", spec.network))
            }
            Some(network) if not_its_pod_range(cluster, network, block) => {
                Some(format!("the podCIDRs of node {} are others", spec.node))
            }
            Some(_) if departed.contains(&spec.node) => Some(format!("node {} is gone", spec.node)),
            Some(_) => overlapping.get(name.as_str()).map(|winner| {
                format!("it overlaps {} of node {}, which is older", ranges(winner), winner.spec.node)
            }),
        };
        if let Some(why) = why {
            memory.blocks.remove(name);
            let uid = block.metadata.uid.clone().unwrap_or_default();
            plan.actions.push(Action::ReleaseBlock { name: name.clone(), uid, why });
        }
    }
}

/// Blocks that overlap one of their Network with a better right, each with that one. The older has it, as on
/// nodes.
fn overlapping(cluster: &Cluster) -> HashMap<&str, &AddressBlock> {
    let mut of_network: BTreeMap<&str, Vec<(&str, &AddressBlock, Block)>> = BTreeMap::new();
    for (name, object) in &cluster.blocks {
        if let Some(block) = block_of(object) {
            of_network.entry(&object.spec.network).or_default().push((name, object, block));
        }
    }
    let mut found = HashMap::new();
    for mut objects in of_network.into_values() {
        objects.sort_by_key(|(name, object, _)| (object.metadata.creation_timestamp.clone(), *name));
        let blocks: Vec<Block> = objects.iter().map(|(_, _, block)| block.clone()).collect();
        found.extend(
            outranked(&blocks).into_iter().map(|(loser, winner)| (objects[loser].0, objects[winner].1)),
        );
    }
    found
}

fn ranges(block: &AddressBlock) -> String {
    let ranges = [&block.spec.ipv4, &block.spec.ipv6];
    ranges.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(",")
}

/// Whether a block is a podCIDR that its Node does not have any more: the Node joined anew and got another,
/// or it is gone and the cluster gave its range to another Node, which cannot wait then.
fn not_its_pod_range(cluster: &Cluster, network: &Network, object: &AddressBlock) -> bool {
    let default = network.metadata.name.as_deref() == Some(DEFAULT_NETWORK);
    if !default || !network.spec.subnets.is_empty() {
        return false;
    }
    let Some(block) = block_of(object) else { return false };
    let covers = |view: &NodeView| {
        let overlap = |range: &IpNet| block.ranges().any(|r| r.overlaps(&AddressRange::from(*range)));
        view.pod_ranges.iter().any(overlap)
    };
    match cluster.nodes.get(block.node()) {
        Some(view) => !view.pod_ranges.is_empty() && !covers(view),
        None => cluster.nodes.values().any(|view| covers(view)),
    }
}

/// The nodes that should get a block of this Network now.
fn needy<'a>(cluster: &'a Cluster, index: &Index<'a>, books: &Books, network: &str) -> Vec<&'a str> {
    // A node that does not know all its blocks yet asks out of an old view. It may know of more: those that
    // were taken back and still have pods. That it says so is no more than its word; what it gets is limited
    // by its share.
    let asks = |node: &str, here: &NodeNetworkStatusNetwork| {
        let has = books.count(network, node);
        here.wants_block && usize::try_from(here.blocks).is_ok_and(|known| known >= has)
    };
    let asking = index.said(network).iter().filter(|(node, here)| asks(node, here)).map(|(node, _)| *node);
    if network != DEFAULT_NETWORK {
        return asking.collect();
    }
    let has_none = |node: &str| books.count(network, node) == 0;
    let own_subnets = cluster.networks.get(network).is_some_and(|n| !n.spec.subnets.is_empty());
    let ranges = |node: &str| cluster.nodes.get(node).map_or(&[][..], |view| view.pod_ranges.as_slice());
    let all = || cluster.nodes.keys().map(String::as_str);
    if !own_subnets {
        // The cluster gives Nodes their ranges: one each, and one that has none yet will have it in a moment.
        return all().filter(|node| has_none(node) && !ranges(node).is_empty()).collect();
    }
    let asking: BTreeSet<&str> = asking.collect();
    all().filter(|node| has_none(node) || asking.contains(node)).collect()
}

fn choose(
    cluster: &Cluster,
    index: &Index<'_>,
    books: &Books,
    node: &str,
    network: &str,
    verdict: &Verdict,
) -> Result<Option<Block>, String> {
    let Some(pool) = &verdict.pool else {
        // Only the default Network may have no subnets: Nodes' podCIDRs are its blocks.
        let ranges = cluster.nodes.get(node).map_or(&[][..], |view| view.pod_ranges.as_slice());
        return if ranges.is_empty() { Ok(None) } else { pod_range(books, node, ranges).map(Some) };
    };
    // A podIP is unique on its node, so blocks of two primary Networks never overlap there. For others it is
    // better too, since one pod can make any Network its primary, but not at the price of no block.
    let empty = Vec::new();
    let existing = books.of_network.get(network).unwrap_or(&empty);
    let others: Vec<Block> = books.on_node(node).filter(|b| b.network() != network).cloned().collect();
    let is_primary = |name: &str| cluster.networks.get(name).is_some_and(|n| n.spec.primary_for.is_some());
    let primaries: Vec<Block> = others.iter().filter(|b| is_primary(b.network())).cloned().collect();
    let elsewhere = index.primary_addresses(node).iter().filter(|(other, _)| *other != network);
    let avoid: Vec<IpAddr> = elsewhere.map(|(_, address)| *address).collect();
    let query = |pool, other_primaries| BlockQuery {
        pool,
        node,
        existing,
        other_primaries,
        avoid: &avoid,
        growth: Growth::default(),
    };
    let strictest: Pool = pool.clone().primary(true);
    let result = next_block(&query(&strictest, &others)).or_else(|_| next_block(&query(pool, &primaries)));
    result.map(Some).map_err(|error| error.to_string())
}

/// The block that a Node's podCIDRs are.
fn pod_range(books: &Books, node: &str, ranges: &[IpNet]) -> Result<Block, String> {
    let v4 = ranges.iter().find_map(|r| if let IpNet::V4(r) = r { Some(r.trunc()) } else { None });
    let v6 = ranges.iter().find_map(|r| if let IpNet::V6(r) = r { Some(r.trunc()) } else { None });
    let block = Block::from_ranges(DEFAULT_NETWORK, node, v4, v6).map_err(|e| e.to_string())?;
    let others = books.of_network.get(DEFAULT_NETWORK).into_iter().flatten();
    match others.into_iter().find(|other| other.overlaps(&block)) {
        Some(other) => Err(format!(
            "the podCIDRs of node {node} ({block}) overlap {other}, which node {} has: give each Node its \
             own",
            other.node()
        )),
        None => Ok(block),
    }
}

/// The object of a block. Its name says its Network and its first address, so that no range is given twice
/// even if two controllers should be at it: the second finds the name taken.
fn object_of(block: &Block, network: &Network) -> AddressBlock {
    let first = block.start().first().to_string().replace([':', '.'], "-");
    let name = format!("{}-{}", block.network(), first.trim_matches('-'));
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let mut labels: BTreeMap<String, String> =
        [label(NETWORK_LABEL, block.network()), label(MANAGED_BY_LABEL, MANAGED_BY)].into();
    // A label's value is shorter than a node's name may be.
    if block.node().len() <= 63 {
        labels.extend([label(NODE_LABEL, block.node())]);
    }
    let owner = kube::Resource::controller_owner_ref(network, &());
    let range = |family| block.prefix(family).map(|r| r.to_string());
    AddressBlock {
        metadata: ObjectMeta {
            name: Some(name),
            labels: Some(labels),
            owner_references: owner.map(|mut owner| {
                // The Network may go before its blocks are looked at again: nothing has to wait for them.
                owner.block_owner_deletion = None;
                vec![owner]
            }),
            ..ObjectMeta::default()
        },
        spec: AddressBlockSpec {
            network: block.network().to_owned(),
            node: block.node().to_owned(),
            ipv4: range(Family::V4),
            ipv6: range(Family::V6),
        },
    }
}

/// The block of an object; nothing if its ranges are none.
pub(super) fn block_of(object: &AddressBlock) -> Option<Block> {
    let spec = &object.spec;
    let v4 = spec.ipv4.as_deref().map(str::parse).transpose().ok()?;
    let v6 = spec.ipv6.as_deref().map(str::parse).transpose().ok()?;
    Block::from_ranges(spec.network.as_str(), spec.node.as_str(), v4, v6).ok()
}

fn reference(network: &Network) -> ObjectReference {
    ObjectReference { namespace: None, ..kube::Resource::object_ref(network, &()) }
}

// === impl Books ===

impl Books {
    fn new(cluster: &Cluster, memory: &mut Memory, now: Now) -> Self {
        // What the cache shows by now needs no memory.
        memory.blocks.retain(|name, known| !cluster.blocks.contains_key(name) && now.steady < known.until);
        let mut books = Self { of_network: BTreeMap::new(), of_node: HashMap::new() };
        for object in cluster.blocks.values().chain(memory.blocks.values().map(|known| &known.block)) {
            if let Some(block) = block_of(object) {
                books.add(block);
            }
        }
        books
    }

    fn add(&mut self, block: Block) {
        self.of_node.entry(block.node().to_owned()).or_default().push(block.clone());
        self.of_network.entry(block.network().to_owned()).or_default().push(block);
    }

    fn count(&self, network: &str, node: &str) -> usize {
        self.on_node(node).filter(|b| b.network() == network).count()
    }

    /// How many addresses the blocks of a node have.
    fn held(&self, network: &str, node: &str) -> u64 {
        let mine = self.on_node(node).filter(|b| b.network() == network);
        mine.map(|block| u64::from(block.size().addresses())).sum()
    }

    fn on_node(&self, node: &str) -> impl Iterator<Item = &Block> {
        self.of_node.get(node).into_iter().flatten()
    }
}
