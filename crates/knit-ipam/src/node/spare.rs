//! What a node can do without: blocks to give back.

use std::net::IpAddr;

use knit_types::NetworkName;

use super::NodeAllocator;
use super::block_state::BlockState;
use super::counts::FamilyCounts;
use crate::block::Block;
use crate::lease::Millis;

/// A block that its node can do without for now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Spare<'a> {
    /// The block.
    pub block: &'a Block,
    /// When a pod last had an address of it, as far as that is known.
    pub last_used: Option<Millis>,
    /// Whether nothing is leased from it, whatever is asked for.
    pub is_closed: bool,
}

impl NodeAllocator {
    /// Blocks that no pod uses, none of whose addresses is in quarantine, and without which at least half of
    /// the Network's addresses here would still be free. The last one that pods can get addresses from stays,
    /// and so does the one with the router's address. One that is wanted back is spare as long as there is no
    /// need to ask for a further one.
    #[must_use]
    pub fn spare_blocks(&self, now: Millis) -> Vec<Spare<'_>> {
        let short: Vec<NetworkName> = self.wants_more(now).into_iter().map(|wants| wants.network).collect();
        let mut spare = Vec::new();
        for (network, state) in &self.networks {
            let router = self.router(network).map(|(addresses, _)| addresses.first());
            let has_router =
                |b: &BlockState| router.is_some_and(|address| b.block.index_of(address).is_some());
            let mut kept = FamilyCounts::default();
            let mut empty = Vec::new();
            for block in &state.blocks {
                let is_empty = block.leased() == 0 && self.is_cold(block, now) && !has_router(block);
                if block.is_live() {
                    let mut counts = FamilyCounts::default();
                    self.count_block(network, block, now, &mut counts);
                    kept.used += counts.used;
                    kept.quarantined += counts.quarantined;
                    kept.free += counts.free;
                    if is_empty {
                        empty.push((block, counts));
                    }
                } else if is_empty && !(block.wanted_back && short.contains(network)) {
                    spare.push(spare_of(block));
                }
            }
            let live = state.blocks.iter().filter(|b| b.is_live()).count();
            // The youngest first: they are the largest, and addresses are leased from the oldest, so that the
            // others become empty.
            for (block, counts) in empty.into_iter().rev().take(live.saturating_sub(1)) {
                let free = kept.free - counts.free;
                if free * 2 >= kept.usable() - counts.free && free > 0 {
                    kept.free = free;
                    spare.push(spare_of(block));
                }
            }
        }
        spare
    }

    /// Whether nobody has, had a moment ago, or is promised an address of a Network that is not known here,
    /// within a block: whatever is leased of it may be within it.
    #[must_use]
    pub fn is_unused(&self, block: &Block, now: Millis) -> bool {
        let network = block.network();
        let inside = |address: IpAddr| block.index_of(address).is_some();
        let leased = self.leases.values().any(|lease| lease.network == network);
        let withheld = self.withheld.iter().any(|(address, entries)| {
            inside(*address) && entries.iter().any(|entry| entry.network().is_none_or(|own| own == network))
        });
        let mut cooling = self.cooling.values().filter(|c| c.network == network && inside(c.address));
        let rests = self.is_quarantined(self.known_from, now)
            || cooling.any(|c| self.is_quarantined(Some(c.freed_at), now));
        !self.networks.contains_key(network) && !leased && !withheld && !rests
    }

    fn is_cold(&self, block: &BlockState, now: Millis) -> bool {
        !self.is_quarantined(block.last_freed(), now)
    }
}

fn spare_of(block: &BlockState) -> Spare<'_> {
    Spare { block: &block.block, last_used: block.last_freed(), is_closed: !block.is_live() }
}
