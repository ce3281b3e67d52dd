//! The cluster's side: which range a node gets next.
//!
//! Ranges are searched as numbers over the sorted ranges that are taken, so an IPv6 subnet costs no more than
//! an IPv4 one, and a dense beginning costs one step.

use std::net::IpAddr;

use knit_types::{Addresses, Family};

use crate::address::{AddressRange, merged, to_address, to_number};
use crate::block::{Block, BlockSize};
use crate::error::NextBlockError;
use crate::pool::Pool;

/// How large the next block of a node is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Growth {
    /// The first one.
    pub first: BlockSize,
    /// The most that is given at once.
    pub largest: BlockSize,
    /// No block is larger than the subnet divided by this (but never smaller than the first one), so that a
    /// few nodes do not take a small subnet away from the others.
    pub share: u32,
}

/// What is known when a block is chosen.
#[derive(Clone, Copy, Debug)]
pub struct BlockQuery<'a> {
    /// The Network's pool.
    pub pool: &'a Pool,
    /// Who gets it.
    pub node: &'a str,
    /// All blocks of this Network, of all nodes. Those of other Networks are not looked at.
    pub existing: &'a [Block],
    /// This node's blocks of other primary Networks: kept apart from, if this one is primary too.
    pub other_primaries: &'a [Block],
    /// Addresses that pods of other primary Networks have on this node.
    pub avoid: &'a [IpAddr],
    /// The policy for its size.
    pub growth: Growth,
}

/// The search in one family.
struct Search {
    family: Family,
    window: AddressRange,
    /// Sorted and disjoint: nothing of a block may lie here.
    occupied: Vec<(u128, u128)>,
    /// Sorted and disjoint: no pod gets these, but a block may hold some.
    set_aside: Vec<(u128, u128)>,
}

// === impl Growth ===

impl Default for Growth {
    /// 8, 8, 16, 32, 64, 128, 256, 256, …; at most a sixteenth of the subnet.
    fn default() -> Self {
        Self { first: BlockSize::SMALL, largest: BlockSize::LARGE, share: 16 }
    }
}

impl Growth {
    /// The size of the next block for a node that has blocks of these sizes: as much as it has already,
    /// within the limits.
    #[must_use]
    pub fn next_size(&self, pool: &Pool, owned: impl IntoIterator<Item = BlockSize>) -> BlockSize {
        let has: u32 = owned.into_iter().fold(0_u32, |sum, size| sum.saturating_add(size.addresses()));
        // The largest power of two not above: a node may hold a block that somebody else cut.
        let size = has.clamp(self.first.addresses(), self.largest_in(pool));
        BlockSize::new(1 << size.ilog2()).unwrap_or(self.first)
    }

    /// The most addresses that a block of a pool has.
    #[must_use]
    pub fn largest_in(&self, pool: &Pool) -> u32 {
        let share = pool.room() / u128::from(self.share.max(1));
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.largest.addresses().min(share).max(self.first.addresses())
    }
}

/// The next block for a node: the lowest free range of each family, of the size that the policy says or,
/// where there is no room for it, of a smaller one.
///
/// It overlaps no block of its Network; if the Network is primary, nothing that this node has of other
/// primary Networks; and it has at least one index for a pod (besides the router's, if there is one).
pub fn next_block(query: &BlockQuery<'_>) -> Result<Block, NextBlockError> {
    let mine = || query.existing.iter().filter(|b| b.network() == query.pool.network());
    let owned = mine().filter(|b| b.node() == query.node).map(Block::size);
    let wanted = query.growth.next_size(query.pool, owned);
    let searches: Vec<Search> =
        query.pool.families().filter_map(|family| Search::new(query, family)).collect();

    // Down to the first size, or further where the subnet itself is smaller than that.
    let mut size = Some(wanted);
    while let Some(now) = size {
        if let Some(start) = find(query, &searches, now) {
            let block = Block::new(query.pool.network(), query.node, start, now);
            return Ok(block.expect("the search gives multiples of the size"));
        }
        let fits = searches.iter().all(|s| s.room() >= u128::from(now.addresses()));
        size = if now > query.growth.first || !fits { now.half() } else { None };
    }

    let family = searches
        .iter()
        .find(|s| s.next(s.window.numbers().0, query.growth.first, 1).is_none())
        .or(searches.first())
        .map_or(Family::V4, |s| s.family);
    let window = searches.iter().find(|s| s.family == family).map_or(0, Search::room);
    let of_family = || mine().filter(|b| b.start().get(family).is_some());
    Err(NextBlockError::Exhausted {
        network: query.pool.network().to_owned(),
        node: query.node.to_owned(),
        family,
        blocks: mine().count(),
        in_blocks: of_family().map(|b| u128::from(b.size().addresses())).sum(),
        addresses: window,
    })
}

/// The start of a block of this size with room for a pod, lowest first.
fn find(query: &BlockQuery<'_>, searches: &[Search], size: BlockSize) -> Option<Addresses> {
    let need = 1 + u32::from(query.pool.has_router());
    match searches {
        [one] => {
            let start = one.next(one.window.numbers().0, size, need)?;
            Some(to_address(one.family, start).into())
        }
        [a, b] => {
            let mut first = a.window.numbers().0;
            while let Some(start_a) = a.next(first, size, need) {
                let mut second = b.window.numbers().0;
                while let Some(start_b) = b.next(second, size, need) {
                    // An index serves a pod only if both of its addresses do.
                    if joint(a, start_a, b, start_b, size) >= need {
                        let pair = [to_address(a.family, start_a), to_address(b.family, start_b)];
                        return Addresses::from_list(&pair);
                    }
                    second = start_b.checked_add(u128::from(size.addresses()))?;
                }
                first = start_a.checked_add(u128::from(size.addresses()))?;
            }
            None
        }
        _ => None,
    }
}

/// How many indexes of a pair of ranges are ordinary in both.
fn joint(a: &Search, start_a: u128, b: &Search, start_b: u128, size: BlockSize) -> u32 {
    let ordinary = |s: &Search, number: u128| {
        let after = s.set_aside.partition_point(|(first, _)| *first <= number);
        after == 0 || s.set_aside[after - 1].1 < number
    };
    let both = |i: &u32| ordinary(a, start_a + u128::from(*i)) && ordinary(b, start_b + u128::from(*i));
    (0..size.addresses()).filter(both).count() as u32
}

// === impl Search ===

impl Search {
    fn new(query: &BlockQuery<'_>, family: Family) -> Option<Self> {
        let subnet = query.pool.subnet(family)?;
        let same = query.existing.iter().filter(|b| b.network() == query.pool.network());
        let others = query.other_primaries.iter().filter(|b| {
            query.pool.is_primary() && b.node() == query.node && b.network() != query.pool.network()
        });
        let mut occupied: Vec<(u128, u128)> = same
            .chain(others)
            .flat_map(Block::ranges)
            .filter(|range| range.family() == family)
            .map(|range| range.numbers())
            .collect();
        if query.pool.is_primary() {
            let avoid = query.avoid.iter().filter(|a| Family::of(**a) == family);
            occupied.extend(avoid.map(|a| (to_number(*a), to_number(*a))));
        }
        Some(Self {
            family,
            window: subnet.window(),
            occupied: merged(occupied),
            set_aside: subnet.set_aside(),
        })
    }

    /// How many addresses there are.
    fn room(&self) -> u128 {
        let (first, last) = self.window.numbers();
        last - first + 1
    }

    /// The first multiple of the size from a number on that is free and has enough addresses for pods.
    fn next(&self, mut from: u128, size: BlockSize, need: u32) -> Option<u128> {
        let size = u128::from(size.addresses());
        let (_, window_last) = self.window.numbers();
        loop {
            let start = from.checked_next_multiple_of(size)?;
            let last = start.checked_add(size - 1)?;
            if last > window_last {
                return None;
            }
            let n = self.occupied.partition_point(|(_, end)| *end < start);
            if let Some((_, end)) = self.occupied.get(n).filter(|(begin, _)| *begin <= last) {
                from = end.checked_add(1)?;
                continue;
            }
            let mut covered = 0;
            let mut covered_to = last;
            let n = self.set_aside.partition_point(|(_, end)| *end < start);
            for (begin, end) in self.set_aside[n..].iter().take_while(|(begin, _)| *begin <= last) {
                covered += (*end).min(last) - (*begin).max(start) + 1;
                covered_to = covered_to.max(*end);
            }
            if size - covered >= u128::from(need) {
                return Some(start);
            }
            // Behind what is set aside, but not behind the multiple that holds its end.
            let behind = covered_to.checked_add(1)?;
            from = (behind - behind % size).max(last.checked_add(1)?);
        }
    }
}
