//! Which node owns which range: blocks for nodes that join or ask, and back again when a node is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::names::{DEFAULT_NETWORK, MANAGED_BY, MANAGED_BY_LABEL, NETWORK_LABEL, NODE_LABEL};
use knit_api::{AddressBlock, AddressBlockSpec, NodeNetworkStatusNetwork};
use knit_ipam::{Block, BlockQuery, Family, Growth, Pool, next_block};
use knit_model::Network;
use knit_types::NetworkName;

use super::accept::{Verdict, Verdicts};
use super::action::{Action, Note, Plan, subject};
use super::index::Index;
use super::share::{self, Left};
use crate::cluster::{BlockView, Cluster, Memory, NodeView, Now, Remembered};
use crate::rate;

/// How long a block counts that was made and is never seen.
pub(crate) const REMEMBER: Duration = Duration::from_secs(60);

/// Where many nodes could not have a block of a Network, they are tried again after this time: one Network
/// that is full does not keep the controller busy.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(5);
/// So many are not many.
const FEW_REFUSED: usize = 8;
/// Next attempts for a node that was refused within this time have a budget of their own, and those of the
/// default Network another one: Networks that are full take nothing from the others.
const REMEMBER_REFUSAL: Duration = Duration::from_secs(60);

/// All blocks there are, with those that are about to be.
struct Books<'a> {
    index: Index<'a>,
    /// Those that are not seen yet, by Network.
    of_network: BTreeMap<NetworkName, Vec<Block>>,
    /// The same, by node.
    of_node: HashMap<String, Vec<Block>>,
}

/// Nodes that wait for a block of one Network.
struct Queue<'a> {
    name: &'a str,
    network: &'a Network,
    verdict: &'a Verdict<'a>,
    nodes: std::vec::IntoIter<&'a str>,
    /// What is taken of the Network, once a block is looked for.
    existing: Option<Vec<Block>>,
    /// What is left of it: counted once for all nodes that ask, and only if one of them has a block already.
    left: Option<Left>,
}

/// Gives blocks: of the default Network to every node that has none, of any other to a node that asks.
/// Nodes that have no block of the default Network come first: a node that joins does not wait behind
/// thousands that ask for something else. Then Networks take turns.
pub(super) fn give(
    cluster: &Cluster,
    index: &Index<'_>,
    memory: &mut Memory,
    verdicts: &Verdicts<'_>,
    now: Now,
    plan: &mut Plan,
) {
    let mut books = Books::new(cluster, *index, memory, now);
    memory.taken.retain(|(_, until)| now.steady < *until);
    ask_again(cluster, memory, now, plan);
    memory.refused.retain(|_, nodes| {
        nodes.retain(|_, at| now.steady < at.saturating_add(REMEMBER_REFUSAL));
        !nodes.is_empty()
    });
    let mut queues = queues(cluster, index, &books, verdicts);
    let after = |queue: &Queue<'_>| memory.last_given.as_deref().is_some_and(|last| queue.name <= last);
    queues.sort_by_key(|queue| (queue.name != DEFAULT_NETWORK, after(queue)));
    // A node without any block of the default Network runs no pod at all.
    if let Some(queue) = queues.first_mut().filter(|queue| queue.name == DEFAULT_NETWORK) {
        while queue.nodes.as_slice().first().is_some_and(|node| books.count(DEFAULT_NETWORK, node) == 0) {
            match queue.serve(cluster, &mut books, memory, now, plan) {
                Ok(true) => {}
                Ok(false) => break,
                Err(next) => return plan.again_at(next),
            }
        }
    }
    while !queues.is_empty() {
        let mut waiting = Vec::with_capacity(queues.len());
        for mut queue in queues {
            match queue.serve(cluster, &mut books, memory, now, plan) {
                Ok(true) => waiting.push(queue),
                Ok(false) => {}
                Err(next) => return plan.again_at(next),
            }
        }
        queues = waiting;
    }
}

/// Asks again for blocks of which it is not known whether they were made: under the same names, so that none
/// is made twice.
fn ask_again(cluster: &Cluster, memory: &mut Memory, now: Now, plan: &mut Plan) {
    let unknown = memory.blocks.iter().filter(|(_, known)| known.again.is_some());
    let names: Vec<String> = unknown.map(|(name, _)| name.clone()).collect();
    for name in names {
        let network =
            memory.blocks.get(&name).and_then(|known| cluster.networks.get(known.block.network.as_str()));
        if network.is_none_or(|network| network.is_being_deleted())
            || plan.leaves_out(memory, &subject("addressblocks", &name), now)
        {
            continue;
        }
        if let Err(next) = memory.rates.blocks.take(rate::BLOCKS, now.steady) {
            return plan.again_at(next);
        }
        let again = memory.blocks.get_mut(&name).and_then(|known| known.again.take());
        plan.actions.extend(again.map(Action::GiveBlock));
    }
}

fn queues<'a>(
    cluster: &'a Cluster,
    index: &Index<'a>,
    books: &Books<'a>,
    verdicts: &'a Verdicts<'a>,
) -> Vec<Queue<'a>> {
    let mut queues = Vec::new();
    for (name, network) in &cluster.networks {
        let Some(verdict) = verdicts.of_network.get(name.as_str()) else { continue };
        if network.is_being_deleted() || !verdict.may_give_blocks() {
            continue;
        }
        let nodes = needy(cluster, index, books, name);
        if !nodes.is_empty() {
            let nodes = nodes.into_iter();
            queues.push(Queue { name, network, verdict, nodes, existing: None, left: None });
        }
    }
    queues
}

// === impl Queue ===

impl Queue<'_> {
    /// Serves the next node of this Network that was not refused a moment ago. Whether there may be more.
    ///
    /// # Errors
    /// When enough was given for now: when to go on.
    fn serve(
        &mut self,
        cluster: &Cluster,
        books: &mut Books<'_>,
        memory: &mut Memory,
        now: Now,
        plan: &mut Plan,
    ) -> Result<bool, Duration> {
        let refused = memory.refused.get(self.name);
        let are_many = refused.is_some_and(|nodes| nodes.len() > FEW_REFUSED);
        let (node, was_refused) = loop {
            let Some(node) = self.nodes.next() else { return Ok(false) };
            let Some(at) = refused.and_then(|nodes| nodes.get(node)).copied() else { break (node, false) };
            let over = at.saturating_add(REFUSED_RETRY_DELAY);
            let rates = &mut memory.rates;
            let retries = if self.name == DEFAULT_NETWORK {
                &mut rates.default_retries
            } else {
                &mut rates.block_retries
            };
            if are_many && now.steady < over {
                plan.again_at(over);
            } else if let Err(next) = retries.take(rate::BLOCK_RETRIES, now.steady) {
                plan.again_at(next);
            } else {
                break (node, true);
            }
        };
        let (name, network) = (self.name, self.network);
        // An attempt is a turn, whatever comes of it.
        if was_refused && name != DEFAULT_NETWORK {
            memory.last_given = Some(name.to_owned());
        }
        let held = books.held(name, node);
        let left = |pool: &Pool| *self.left.get_or_insert_with(|| books.left(cluster, network, pool));
        let growth = match share::allows(cluster, self.verdict.pool, node, held, left) {
            Ok(growth) => growth,
            Err(text) => {
                plan.notes.push(Note { regarding: reference(network), reason: "NodeHasItsShare", text });
                refuse(memory, name, node, now);
                return Ok(true);
            }
        };
        if !was_refused {
            memory.rates.blocks.take(rate::BLOCKS, now.steady)?;
        }
        if name != DEFAULT_NETWORK {
            memory.last_given = Some(name.to_owned());
        }
        let existing = self.existing.get_or_insert_with(|| {
            let mut existing = books.of_network(name);
            // A podCIDR is the cluster's to give, and its Node has no other.
            if self.verdict.pool.is_some() {
                existing.extend(books.lingering(cluster, name));
                existing.extend(memory.taken.iter().map(|(block, _)| block.clone()));
            }
            existing
        });
        match choose(cluster, books, existing, (node, growth), name, self.verdict) {
            Ok(Some(block)) => {
                let object = object_of(&block, network);
                let name_of_block = object.metadata.name.clone().unwrap_or_default();
                if plan.leaves_out(memory, &subject("addressblocks", &name_of_block), now) {
                    // Whoever is next gets the next range, and does not wait for this one.
                    existing.push(block);
                    return Ok(true);
                }
                if was_refused {
                    memory.rates.blocks.take(rate::BLOCKS, now.steady)?;
                    memory.refused.get_mut(name).and_then(|nodes| nodes.remove(node));
                }
                if let Some(left) = &mut self.left {
                    left.addresses = left.addresses.saturating_sub(u128::from(block.size().addresses()));
                    left.without -= usize::from(books.count(name, node) == 0);
                }
                existing.push(block.clone());
                books.add(block);
                let block = Arc::new(BlockView::of(object.clone()));
                let until = now.steady.saturating_add(REMEMBER);
                let known = Remembered { block, until, again: None };
                memory.blocks.insert(name_of_block, known);
                plan.actions.push(Action::GiveBlock(object));
            }
            Ok(None) => {}
            Err(text) => {
                plan.notes.push(Note { regarding: reference(network), reason: "AddressesExhausted", text });
                refuse(memory, name, node, now);
            }
        }
        Ok(true)
    }
}

fn refuse(memory: &mut Memory, network: &str, node: &str, now: Now) {
    memory.refused.entry(network.to_owned()).or_default().insert(node.to_owned(), now.steady);
}

/// Takes blocks back whose node is gone for long enough, whose Network is gone or goes and is not used any
/// more, or that overlap another one.
pub(super) fn release(
    cluster: &Cluster,
    index: &Index<'_>,
    departed: &HashSet<String>,
    memory: &mut Memory,
    now: Now,
    plan: &mut Plan,
) {
    let mut candidates: BTreeSet<&str> = index.not_pod_ranges().collect();
    for (name, of) in index.all_blocks() {
        match cluster.networks.get(name) {
            None => candidates.extend(of.blocks.iter().map(String::as_str)),
            Some(network) if network.is_being_deleted() && index.user_of(name).is_none() => {
                candidates.extend(of.blocks.iter().map(String::as_str));
            }
            Some(network) => {
                for (loser, winner) in &of.overlapping {
                    candidates.insert(loser);
                    let winner = cluster.blocks.get(winner).and_then(|view| view.block.as_ref());
                    let Some(range) = winner else { continue };
                    let text = format!(
                        "AddressBlock {loser} overlaps {range} of node {}, which is older: it is revoked",
                        range.node()
                    );
                    plan.notes.push(Note { regarding: reference(network), reason: "BlocksOverlap", text });
                }
            }
        }
    }
    candidates.extend(departed.iter().flat_map(|node| index.blocks_on(node)).map(|(name, _)| name));
    for name in candidates {
        let Some(block) = cluster.blocks.get(name).filter(|block| !block.deleting) else { continue };
        let why = match cluster.networks.get(block.network.as_str()) {
            None => Some(format!("Network {} is gone", block.network)),
            Some(network) if network.is_being_deleted() => {
                let unused = index.user_of(&block.network).is_none();
                unused.then(|| format!("Network {} is being deleted", block.network))
            }
            Some(_) if index.is_not_its_pod_range(name) => {
                Some(format!("the podCIDRs of node {} have changed", block.node))
            }
            Some(_) if departed.contains(&block.node) => Some(format!("node {} is gone", block.node)),
            Some(_) => index
                .outranking(&block.network, name)
                .and_then(|winner| winner.block.as_ref())
                .map(|winner| format!("it overlaps {winner} of node {}, which is older", winner.node())),
        };
        let Some(why) = why else { continue };
        if plan.leaves_out(memory, &subject("addressblocks", name), now) {
            continue;
        }
        if let Err(next) = memory.rates.releases.take(rate::RELEASES, now.steady) {
            return plan.again_at(next);
        }
        memory.blocks.remove(name);
        let (name, uid) = (name.to_owned(), block.uid.clone());
        plan.actions.push(Action::ReleaseBlock { name, uid, resource_version: None, why });
    }
}

/// The nodes that should get a block of this Network now.
fn needy<'a>(cluster: &'a Cluster, index: &Index<'a>, books: &Books<'_>, network: &str) -> Vec<&'a str> {
    // A node that does not know all its blocks yet asks out of an old view. It may know of more: those that
    // were taken back and still have pods. That it says so is no more than its word; what it gets is limited
    // by its share.
    let asks = |node: &str, here: &NodeNetworkStatusNetwork| {
        usize::try_from(here.blocks).is_ok_and(|known| known >= books.count(network, node))
    };
    // One of whose blocks is wanted back has that one again first.
    let has_all = |node: &str| {
        index.blocks_on(node).all(|(_, block)| block.network != network || block.reclaim.is_none())
    };
    let asking = index.asking(network).filter(|(node, here)| asks(node, here) && has_all(node));
    let asking = asking.map(|(node, _)| node);
    if network != DEFAULT_NETWORK {
        return asking.collect();
    }
    let own_subnets = cluster.networks.get(network).is_some_and(|n| n.has_subnets());
    let ranges = |node: &str| cluster.nodes.get(node).map_or(&[][..], |view| view.pod_ranges.as_slice());
    let without = index.without_default().filter(|node| books.count(network, node) == 0);
    if !own_subnets {
        // The cluster gives Nodes their ranges: one each, and one that has none yet will have it in a moment.
        return without.filter(|node| !ranges(node).is_empty()).collect();
    }
    // Those that have nothing first.
    let mut nodes: Vec<&str> = without.collect();
    let has_none: HashSet<&str> = nodes.iter().copied().collect();
    nodes.extend(asking.filter(|node| !has_none.contains(node)));
    nodes
}

fn choose(
    cluster: &Cluster,
    books: &Books<'_>,
    existing: &[Block],
    (node, growth): (&str, Growth),
    network: &str,
    verdict: &Verdict<'_>,
) -> Result<Option<Block>, String> {
    let Some(pool) = verdict.pool else {
        // Only the default Network may have no subnets: Nodes' podCIDRs are its blocks.
        let ranges = cluster.nodes.get(node).map_or(&[][..], |view| view.pod_ranges.as_slice());
        return if ranges.is_empty() { Ok(None) } else { pod_range(existing, node, ranges).map(Some) };
    };
    // A podIP is unique on its node, so blocks of two primary Networks never overlap there. For others it is
    // better too, since one pod can make any Network its primary, but not at the price of no block.
    let others: Vec<Block> = books.on_node(node).filter(|b| b.network() != network).cloned().collect();
    let is_primary = |name: &str| cluster.networks.get(name).is_some_and(|n| n.is_primary());
    let primaries: Vec<Block> = others.iter().filter(|b| is_primary(b.network())).cloned().collect();
    let elsewhere = books.index.primary_addresses(node).into_iter().filter(|(other, _)| *other != network);
    let avoid: Vec<IpAddr> = elsewhere.map(|(_, address)| address).collect();
    let query =
        |pool, other_primaries| BlockQuery { pool, node, existing, other_primaries, avoid: &avoid, growth };
    let strictest: Pool = pool.clone().primary(true);
    let result = next_block(&query(&strictest, &others)).or_else(|_| next_block(&query(pool, &primaries)));
    result.map(Some).map_err(|error| error.to_string())
}

/// The block that a Node's podCIDRs are.
fn pod_range(existing: &[Block], node: &str, ranges: &[IpNet]) -> Result<Block, String> {
    let v4 = ranges.iter().find_map(|r| if let IpNet::V4(r) = r { Some(r.trunc()) } else { None });
    let v6 = ranges.iter().find_map(|r| if let IpNet::V6(r) = r { Some(r.trunc()) } else { None });
    let block = Block::from_ranges(DEFAULT_NETWORK, node, v4, v6).map_err(|e| e.to_string())?;
    match existing.iter().find(|other| other.overlaps(&block)) {
        Some(other) => Err(format!(
            "the podCIDRs of node {node} ({block}) overlap {other} of node {}: assign each Node its own",
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
    let owner = kube::Resource::controller_owner_ref(network.object(), &());
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
            network: block.network().to_string(),
            node: block.node().to_owned(),
            ipv4: range(Family::V4),
            ipv6: range(Family::V6),
        },
    }
}

fn reference(network: &Network) -> ObjectReference {
    ObjectReference { namespace: None, ..kube::Resource::object_ref(network.object(), &()) }
}

// === impl Books ===

impl<'a> Books<'a> {
    fn new(cluster: &Cluster, index: Index<'a>, memory: &mut Memory, now: Now) -> Self {
        // What the cache shows by now needs no memory. What is being written may come at any time.
        let writes = &memory.writes;
        memory.blocks.retain(|name, known| {
            let counts = now.steady < known.until || writes.is_under_way(&subject("addressblocks", name));
            counts && !cluster.blocks.contains_key(name)
        });
        let mut books = Self { index, of_network: BTreeMap::new(), of_node: HashMap::new() };
        for known in memory.blocks.values() {
            if let Some(block) = &known.block.block {
                books.add(block.block().clone());
            }
        }
        books
    }

    fn add(&mut self, block: Block) {
        self.of_node.entry(block.node().to_owned()).or_default().push(block.clone());
        self.of_network.entry(block.network().to_owned()).or_default().push(block);
    }

    /// All blocks of a Network that are there or about to be.
    fn of_network(&self, network: &str) -> Vec<Block> {
        let unseen = self.of_network.get(network).into_iter().flatten();
        self.index.blocks(network).chain(unseen).cloned().collect()
    }

    /// What pods still have out of blocks that are deleted. It is no more than their node's word, which
    /// counts for twice as many addresses as a node may have of a Network.
    fn lingering(&self, cluster: &Cluster, network: &str) -> Vec<Block> {
        let mut believed: HashMap<&str, u64> = HashMap::new();
        let lingering = self.index.lingering(network).filter(|block| {
            let sum = believed.entry(block.node()).or_default();
            *sum += u64::from(block.size().addresses());
            *sum <= 2 * share::most(cluster, block.node())
        });
        lingering.cloned().collect()
    }

    fn count(&self, network: &str, node: &str) -> usize {
        self.on_node(node).filter(|b| b.network() == network).count()
    }

    /// What is left of a Network, and how many of the nodes that it is for have no block yet.
    fn left(&self, cluster: &Cluster, network: &Network, pool: &Pool) -> Left {
        let mut blocks = self.of_network(pool.network());
        let owners: HashSet<String> = blocks.iter().map(|block| block.node().to_owned()).collect();
        blocks.extend(self.lingering(cluster, pool.network()));
        // A selector that cannot be read may mean any node.
        let is_for = |node: &NodeView| network.is_for_node(&node.labels).unwrap_or(true);
        let nodes = cluster.nodes.iter().filter(|(name, node)| !owners.contains(*name) && is_for(node));
        Left::of(pool, &blocks, nodes.count())
    }

    /// How many addresses the blocks of a node have.
    fn held(&self, network: &str, node: &str) -> u64 {
        let mine = self.on_node(node).filter(|b| b.network() == network);
        mine.map(|block| u64::from(block.size().addresses())).sum()
    }

    fn on_node(&self, node: &str) -> impl Iterator<Item = &Block> {
        let seen = self.index.blocks_on(node).filter_map(|(_, view)| Some(view.block.as_ref()?.block()));
        seen.chain(self.of_node.get(node).into_iter().flatten())
    }
}
