//! Which AddressBlocks count. No two of one Network should overlap, but two controllers that both believe to
//! lead may make such blocks, and then each address must still be one node's only: every agent goes by the
//! same rule. The older block counts, and of two of one age the one whose name comes first; the other is as
//! if it were not there. What pods of its node have out of it they keep, as out of any block that is taken
//! back.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use knit_api::names;
use knit_ipam::{Block, outranked};
use knit_model::AddressBlock;
use knit_types::NetworkName;

/// A block as the API has it.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownBlock {
    /// What it says.
    pub block: Arc<AddressBlock>,
    /// Since when it is there; nothing for one that is known from before the start.
    pub created: Option<Timestamp>,
    /// The controller wants it back: the value that it wrote.
    pub reclaim: Option<String>,
}

/// All blocks, with those that do not count.
#[derive(Debug, Default)]
pub struct Blocks {
    network_of: HashMap<String, NetworkName>,
    networks: HashMap<NetworkName, OfNetwork>,
}

/// A block that counts from now on, or counts no longer.
pub type Change = (String, Option<Arc<AddressBlock>>);

#[derive(Debug, Default)]
struct OfNetwork {
    given: BTreeMap<String, KnownBlock>,
    /// First and last addresses; disjoint, and only kept while nothing overlaps.
    ranges: BTreeMap<IpAddr, IpAddr>,
    /// Those that overlap one with a better right.
    refused: BTreeSet<String>,
}

// === impl KnownBlock ===

impl KnownBlock {
    /// What counts of an object. One that cannot be used is as if it were not there.
    #[must_use]
    pub fn of(object: knit_api::AddressBlock) -> Option<Self> {
        let created = object.metadata.creation_timestamp.map(|time| time.0);
        let reclaim = object.metadata.annotations.and_then(|mut all| all.remove(names::RECLAIM_ANNOTATION));
        match AddressBlock::of(&object.spec) {
            Ok(block) => Some(Self { block: Arc::new(block), created, reclaim }),
            Err(error) => {
                tracing::warn!(
                    address_block = object.metadata.name,
                    error = &error as &dyn std::error::Error,
                    "cannot use an AddressBlock"
                );
                None
            }
        }
    }

    fn block(&self) -> &Block {
        self.block.block()
    }
}

// === impl Blocks ===

impl Blocks {
    /// A block is there, or is gone: what that changes.
    pub fn change(&mut self, name: &str, given: Option<KnownBlock>) -> Vec<Change> {
        let mut changes = Vec::new();
        let network = given.as_ref().map(|given| given.block.network().to_owned());
        if let Some(before) = self.network_of.get(name).filter(|before| Some(*before) != network.as_ref()) {
            let before = before.clone();
            changes.extend(self.networks.get_mut(&before).map(|n| n.change(name, None)).unwrap_or_default());
            self.networks.retain(|_, network| !network.given.is_empty());
            self.network_of.remove(name);
        }
        if let Some((network, given)) = network.zip(given) {
            self.network_of.insert(name.to_owned(), network.clone());
            changes.extend(self.networks.entry(network).or_default().change(name, Some(given)));
        }
        changes
    }
}

// === impl OfNetwork ===

impl OfNetwork {
    fn change(&mut self, name: &str, given: Option<KnownBlock>) -> Vec<Change> {
        let block = given.as_ref().map(|given| Arc::clone(&given.block));
        let before = match given {
            Some(given) => self.given.insert(name.to_owned(), given),
            None => self.given.remove(name),
        };
        if self.refused.is_empty() {
            for (start, _) in before.iter().flat_map(|before| spans(before.block())) {
                self.ranges.remove(&start);
            }
            // Usually nothing overlaps, and one look at the neighbours tells.
            let spans: Vec<_> = block.iter().flat_map(|block| spans(block.block())).collect();
            if spans.iter().all(|span| self.is_free(*span)) {
                self.ranges.extend(spans);
                return vec![(name.to_owned(), block)];
            }
        }
        self.judge(name)
    }

    fn is_free(&self, (first, last): (IpAddr, IpAddr)) -> bool {
        self.ranges.range(..=last).next_back().is_none_or(|(_, end)| *end < first)
    }

    /// Decides about all of them again, after this one changed.
    fn judge(&mut self, changed: &str) -> Vec<Change> {
        let mut all: Vec<(&String, &KnownBlock)> = self.given.iter().collect();
        all.sort_by_key(|(name, given)| (given.created, *name));
        let blocks: Vec<Block> = all.iter().map(|(_, given)| given.block().clone()).collect();
        let mut refused = BTreeSet::new();
        for (loser, winner) in outranked(&blocks) {
            let (name, winner) = (all[loser].0, all[winner].0);
            if !self.refused.contains(name) {
                tracing::warn!(
                    address_block = name,
                    "{} of node {} overlaps AddressBlock {winner}, which is older: it is ignored",
                    blocks[loser],
                    blocks[loser].node()
                );
            }
            refused.insert(name.clone());
        }
        let mut touched: BTreeSet<String> = refused.symmetric_difference(&self.refused).cloned().collect();
        touched.insert(changed.to_owned());
        self.ranges.clear();
        if refused.is_empty() {
            self.ranges = blocks.iter().flat_map(spans).collect();
        }
        self.refused = refused;
        let counting = |name: &String| self.given.get(name).filter(|_| !self.refused.contains(name));
        touched
            .into_iter()
            .map(|name| {
                let block = counting(&name).map(|given| Arc::clone(&given.block));
                (name, block)
            })
            .collect()
    }
}

/// Where the ranges of a block begin and end.
fn spans(block: &Block) -> Vec<(IpAddr, IpAddr)> {
    block.ranges().map(|range| (range.first(), range.last())).collect()
}

#[cfg(test)]
mod tests {
    use knit_api::AddressBlockSpec;

    use super::*;

    fn given(node: &str, range: &str, second: i64) -> Option<KnownBlock> {
        let spec = AddressBlockSpec {
            network: "blue".into(),
            node: node.into(),
            ipv4: Some(range.into()),
            ipv6: None,
        };
        let block = Arc::new(AddressBlock::of(&spec).expect("a block"));
        Some(KnownBlock { block, created: Timestamp::from_second(second).ok(), reclaim: None })
    }

    /// Plays changes, and gives the nodes and ranges that count in the end.
    fn play(changes: &[(&str, Option<KnownBlock>)]) -> Vec<String> {
        let (mut blocks, mut counting) = (Blocks::default(), BTreeMap::new());
        for (name, given) in changes {
            for (name, block) in blocks.change(name, given.clone()) {
                match block {
                    Some(block) => drop(counting.insert(name, block)),
                    None => drop(counting.remove(&name)),
                }
            }
        }
        counting.values().map(|block| format!("{} {block}", block.node())).collect()
    }

    #[test]
    fn of_blocks_that_overlap_the_older_counts_in_whatever_order_they_come() {
        let old = ("b-24", given("a", "10.77.0.24/29", 100));
        let late = ("b-16", given("b", "10.77.0.16/28", 101));
        let other = ("b-32", given("b", "10.77.0.32/29", 102));
        let expected = ["a 10.77.0.24/29", "b 10.77.0.32/29"];
        assert_eq!(play(&[old.clone(), late.clone(), other.clone()]), expected);
        assert_eq!(play(&[late.clone(), other.clone(), old.clone()]), expected);
        assert_eq!(play(&[other.clone(), late.clone(), old.clone()]), expected);
        // The older one goes: the other counts. Of one age, the name decides.
        assert_eq!(play(&[old.clone(), late.clone(), ("b-24", None)]), ["b 10.77.0.16/28"]);
        let same = ("b-16", given("b", "10.77.0.16/28", 100));
        assert_eq!(play(&[old.clone(), same.clone()]), ["b 10.77.0.16/28"]);
        // The younger one goes, and nothing is contested any more.
        assert_eq!(play(&[old, late, ("b-16", None), other]), expected);
    }

    #[test]
    fn what_is_known_from_before_the_start_gives_way_to_what_the_api_says() {
        let seed = |node: &str, range: &str| given(node, range, 0).map(|g| KnownBlock { created: None, ..g });
        let changes = [
            ("b-24", seed("a", "10.77.0.24/29")),
            ("b-24", given("a", "10.77.0.24/29", 200)),
            ("b-16", given("b", "10.77.0.16/28", 100)),
        ];
        assert_eq!(play(&changes), ["b 10.77.0.16/28"]);
    }
}
