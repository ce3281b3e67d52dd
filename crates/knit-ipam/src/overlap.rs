//! Blocks of one Network that overlap: which of them count.
//!
//! No controller makes such blocks, but two that both believe to lead may, and so may an operator. Everybody
//! decides by the same rule, so that an address is one node's only.

use std::collections::BTreeMap;

use knit_types::Family;

use crate::block::Block;

/// Of blocks of one Network, in the order of their right to be there: those that do not count, because one
/// that counts and comes before them overlaps, each with that one. Both are places in the list.
///
/// ```
/// use knit_ipam::{Block, outranked};
///
/// let block = |node: &str, range: &str| Block::from_ranges("blue", node, Some(range.parse().unwrap()),
/// None).unwrap(); let blocks = [block("a", "10.77.0.16/28"), block("b", "10.77.0.24/29"), block("b",
/// "10.77.0.32/29")]; assert_eq!(outranked(&blocks), [(1, 0)]);
/// ```
#[must_use]
pub fn outranked(blocks: &[Block]) -> Vec<(usize, usize)> {
    // Those that count are disjoint, so that their last addresses are in the order of their first ones.
    let mut counting: BTreeMap<(Family, u128), (u128, usize)> = BTreeMap::new();
    let mut found = Vec::new();
    for (place, block) in blocks.iter().enumerate() {
        let ranges: Vec<_> = block.ranges().map(|range| (range.family(), range.numbers())).collect();
        let better = ranges.iter().find_map(|(family, (first, last))| {
            let (_, (end, other)) = counting.range((*family, 0)..=(*family, *last)).next_back()?;
            (*end >= *first).then_some(*other)
        });
        match better {
            Some(other) => found.push((place, other)),
            None => counting.extend(ranges.into_iter().map(|(f, (first, last))| ((f, first), (last, place)))),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block() -> impl Strategy<Value = Block> {
        let part = || proptest::option::of((0_u32..64, 26_u8..=32));
        (part(), part()).prop_filter_map("a block has a range", |(v4, v6)| {
            let v4 = v4.map(|(n, len)| ipnet::Ipv4Net::new((0x0a4d_0000 + n).into(), len).expect("a range"));
            let v6 = v6.map(|(n, len)| {
                ipnet::Ipv6Net::new(((0xfd77 << 112) + u128::from(n)).into(), len + 96).expect("a range")
            });
            Block::from_ranges("blue", "n", v4.map(|r| r.trunc()), v6.map(|r| r.trunc())).ok()
        })
    }

    proptest! {
        #[test]
        fn what_counts_is_disjoint_and_nothing_is_left_out_for_nothing(
            blocks in prop::collection::vec(block(), 0..12)
        ) {
            let found = outranked(&blocks);
            let counts = |place: usize| found.iter().all(|(loser, _)| *loser != place);
            for (i, block) in blocks.iter().enumerate() {
                let before = blocks[..i].iter().enumerate().find(|(j, other)|
                    counts(*j) && other.overlaps(block));
                prop_assert_eq!(counts(i), before.is_none());
            }
            for (loser, winner) in found.iter().copied() {
                prop_assert!(counts(winner) && blocks[winner].overlaps(&blocks[loser]));
            }
        }
    }
}
