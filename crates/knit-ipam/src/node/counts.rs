//! How many addresses a node has, and when it should ask for more.

use std::collections::BTreeSet;
use std::fmt;

use super::NodeAllocator;
use super::block_state::{BlockState, Role};
use knit_types::{Addresses, Family, NetworkName};

use crate::lease::Millis;

/// Addresses of one family of one Network on this node. The first is the sum of all others but the last.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FamilyCounts {
    /// In blocks of this node.
    pub total: u64,
    /// Of indexes that pods have. An index counts in both families, even where a pod asked for another
    /// address of one of them.
    pub used: u64,
    /// Of routers.
    pub router: u64,
    /// Never given out by themselves.
    pub reserved: u64,
    /// Freed a short time ago.
    pub quarantined: u64,
    /// Given to nobody for now: a pod of another primary Network has the address, or the block is being
    /// emptied.
    pub blocked: u64,
    /// Free now.
    pub free: u64,
    /// Addresses outside this node's blocks that pods of this node have: static ones.
    pub outside: u64,
}

/// The counts of one Network on this node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counts {
    /// IPv4, if the Network has it.
    pub v4: Option<FamilyCounts>,
    /// IPv6, if the Network has it.
    pub v6: Option<FamilyCounts>,
}

/// A Network of which this node should ask for a further block.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct WantsMore {
    /// The Network.
    pub network: NetworkName,
    /// Indexes that are free now.
    pub free: u64,
    /// Indexes that pods could have, free or not.
    pub usable: u64,
}

// === impl FamilyCounts ===

impl FamilyCounts {
    /// What pods have or could have.
    pub(super) fn usable(&self) -> u64 {
        self.used + self.quarantined + self.free
    }
}

impl fmt::Display for FamilyCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "of {} addresses, {} are used, {} held back, {} reserved, {} used by the router, {} blocked",
            self.total, self.used, self.quarantined, self.reserved, self.router, self.blocked
        )
    }
}

// === impl Counts ===

impl Counts {
    /// The counts of a family.
    #[must_use]
    pub fn get(&self, family: Family) -> Option<FamilyCounts> {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }
}

// === impl NodeAllocator ===

impl NodeAllocator {
    /// The exact counts of a Network; `None` if this node does not know it.
    #[must_use]
    pub fn counts(&self, network: &str, now: Millis) -> Option<Counts> {
        let state = self.networks.get(network)?;
        let mut counts = Counts::default();
        for family in state.pool.families() {
            let mut sum = FamilyCounts::default();
            for block in state.blocks.iter().filter(|b| b.block.start().get(family).is_some()) {
                self.count_block(network, block, now, &mut sum);
            }
            sum.outside = self
                .leases
                .values()
                .filter(|lease| lease.network == network)
                .flat_map(|lease| lease.addresses.of_family(family))
                .filter(|address| state.slot_of(*address).is_none())
                .count() as u64;
            match family {
                Family::V4 => counts.v4 = Some(sum),
                Family::V6 => counts.v6 = Some(sum),
            }
        }
        Some(counts)
    }

    /// Networks that have less than the configured share of their addresses free (or no block at all): a
    /// further block should be asked for now, before they run out.
    #[must_use]
    pub fn wants_more(&self, now: Millis) -> Vec<WantsMore> {
        let networks = self.networks.iter().filter_map(|(network, state)| {
            let mut live = FamilyCounts::default();
            for block in state.blocks.iter().filter(|b| b.is_live()) {
                self.count_block(network, block, now, &mut live);
            }
            let low = live.free * 100 < live.usable() * u64::from(self.config.low_percent);
            (low || live.free == 0).then(|| WantsMore {
                network: network.clone(),
                free: live.free,
                usable: live.usable(),
            })
        });
        networks.collect()
    }

    pub(super) fn count_block(&self, network: &str, block: &BlockState, now: Millis, sum: &mut FamilyCounts) {
        sum.total += u64::from(block.block.size().addresses());
        sum.used += block.leased();
        sum.router += block.unleased(Role::Router);
        sum.reserved += block.unleased(Role::Reserved) + block.unleased(Role::Never);
        let quarantined = block.idle_since(|freed_at| self.is_quarantined(freed_at, now));
        let idle = block.idle().len() as u64 - quarantined;
        let blocked = if block.is_live() { self.blocked(network, block, now) } else { idle };
        sum.quarantined += quarantined;
        sum.blocked += blocked;
        sum.free += idle - blocked;
    }

    /// How many indexes are free but for somebody who has one of their addresses: looked for among the
    /// addresses that somebody has, because a block has many more of its own.
    fn blocked(&self, network: &str, block: &BlockState, now: Millis) -> u64 {
        let Some(state) = self.networks.get(network) else { return 0 };
        let last = block.block.at(block.block.size().addresses() - 1);
        let ranges =
            block.block.start().iter().zip(last.iter().flat_map(Addresses::iter)).collect::<Vec<_>>();
        let taken = ranges.iter().flat_map(|(first, last)| {
            let here = self.holders.range(first..=last).map(|(address, _)| *address);
            let elsewhere = state.elsewhere.range(first..=last).map(|(address, _)| *address);
            here.chain(elsewhere).chain(self.withheld.range(first..=last).map(|(address, _)| *address))
        });
        let indexes: BTreeSet<u32> = taken.filter_map(|address| block.block.index_of(address)).collect();
        let is_blocked = |index: &&u32| {
            let addresses = block.block.at(**index).expect("an index of this block");
            block.is_idle(**index)
                && !self.is_quarantined(block.freed_at(**index), now)
                && self.obstacle(network, &addresses).is_some()
        };
        indexes.iter().filter(is_blocked).count() as u64
    }
}
