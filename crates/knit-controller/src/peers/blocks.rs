//! In whose block an address is. Blocks are found by node and by range, so that an address costs the same
//! however many blocks there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use knit_policy::model::Name;

/// What counts of an AddressBlock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockFacts {
    pub(crate) network: Name,
    pub(crate) node: Name,
    pub(crate) ranges: Vec<IpNet>,
}

/// All blocks.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    all: BTreeMap<Name, BlockFacts>,
    /// The names of each node's blocks.
    on_node: BTreeMap<Name, BTreeSet<Name>>,
    networks: BTreeMap<Name, OfNetwork>,
}

/// Whose an address of a Network is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum BlockOwner {
    /// The node's that was asked about.
    This,
    /// Another node's.
    Another,
    /// In no block.
    Nobody,
}

#[derive(Debug, Default)]
struct OfNetwork {
    /// How many blocks of each node have a range.
    owners: BTreeMap<IpNet, BTreeMap<Name, usize>>,
    /// How many ranges have a length. There are few lengths.
    lengths: BTreeMap<u8, usize>,
}

// === impl Blocks ===

impl Blocks {
    /// A block is like this; none if it is gone. What it was like before.
    pub(super) fn set(&mut self, name: &Name, facts: Option<BlockFacts>) -> Option<BlockFacts> {
        let old = self.all.remove(name);
        if let Some(old) = &old {
            if let Some(names) = self.on_node.get_mut(&old.node) {
                names.remove(name);
                if names.is_empty() {
                    self.on_node.remove(&old.node);
                }
            }
            if let Some(network) = self.networks.get_mut(&old.network) {
                network.remove(old);
                if network.owners.is_empty() {
                    self.networks.remove(&old.network);
                }
            }
        }
        if let Some(facts) = facts {
            self.on_node.entry(facts.node.clone()).or_default().insert(name.clone());
            self.networks.entry(facts.network.clone()).or_default().add(&facts);
            self.all.insert(name.clone(), facts);
        }
        old
    }

    /// The Networks in which a node has a block with this address.
    pub(super) fn networks_of(&self, node: &Name, address: IpAddr) -> BTreeSet<&Name> {
        let names = self.on_node.get(node).into_iter().flatten();
        let blocks = names.filter_map(|name| self.all.get(name));
        let has = |block: &&BlockFacts| block.ranges.iter().any(|range| range.contains(&address));
        blocks.filter(has).map(|block| &block.network).collect()
    }

    /// Whether an address of a Network is in a block of this node, or of another.
    pub(super) fn owner(&self, network: &Name, node: &Name, address: IpAddr) -> BlockOwner {
        let Some(of) = self.networks.get(network) else { return BlockOwner::Nobody };
        let ranges = of.lengths.keys().filter_map(|length| IpNet::new(address, *length).ok());
        let mut owner = BlockOwner::Nobody;
        for owners in ranges.filter_map(|range| of.owners.get(&range.trunc())) {
            if owners.contains_key(node) {
                return BlockOwner::This;
            }
            owner = BlockOwner::Another;
        }
        owner
    }
}

// === impl OfNetwork ===

impl OfNetwork {
    fn add(&mut self, facts: &BlockFacts) {
        for range in &facts.ranges {
            *self.lengths.entry(range.prefix_len()).or_default() += 1;
            *self.owners.entry(range.trunc()).or_default().entry(facts.node.clone()).or_default() += 1;
        }
    }

    fn remove(&mut self, facts: &BlockFacts) {
        for range in &facts.ranges {
            take_one(&mut self.lengths, &range.prefix_len());
            let range = range.trunc();
            if let Some(owners) = self.owners.get_mut(&range) {
                take_one(owners, &facts.node);
                if owners.is_empty() {
                    self.owners.remove(&range);
                }
            }
        }
    }
}

fn take_one<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = IpNet> {
        let v4 = (0_u32..32, 27_u8..=32).prop_map(|(n, len)| (IpAddr::V4((0x0a00_0000 + n).into()), len));
        let v6 =
            (0_u128..32, 123_u8..=128).prop_map(|(n, len)| (IpAddr::V6(((0xfd << 120) + n).into()), len));
        prop_oneof![v4, v6].prop_map(|(address, len)| IpNet::new(address, len).expect("a range"))
    }

    fn facts() -> impl Strategy<Value = BlockFacts> {
        (0..2_u8, 0..3_u8, prop::collection::vec(range(), 0..3)).prop_map(|(network, node, ranges)| {
            let name = |n: u8| Name::from(n.to_string().as_str());
            BlockFacts { network: name(network), node: name(node), ranges }
        })
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_search_of_all_blocks_finds(
            steps in prop::collection::vec((0..6_u8, prop::option::of(facts())), 0..30), asked in range()
        ) {
            let (mut blocks, mut all) = (Blocks::default(), BTreeMap::new());
            for (which, facts) in steps {
                let name = Name::from(which.to_string().as_str());
                let before = match facts.clone() {
                    Some(facts) => all.insert(name.clone(), facts),
                    None => all.remove(&name),
                };
                prop_assert_eq!(blocks.set(&name, facts), before);
            }
            let address = asked.addr();
            let having = || all.values().filter(|b| b.ranges.iter().any(|range| range.contains(&address)));
            for (network, node) in [("0", "0"), ("0", "2"), ("1", "1"), ("2", "0")] {
                let (network, node) = (Name::from(network), Name::from(node));
                let mine: BTreeSet<&Name> = having().filter(|b| b.node == node).map(|b| &b.network).collect();
                prop_assert_eq!(blocks.networks_of(&node, address), mine.clone());
                let owner = match having().any(|b| b.network == network) {
                    _ if mine.contains(&network) => BlockOwner::This,
                    true => BlockOwner::Another,
                    false => BlockOwner::Nobody,
                };
                prop_assert_eq!(blocks.owner(&network, &node, address), owner);
            }
        }
    }
}
