//! One of the node's blocks: which of its indexes are leased, idle, set aside.

use std::collections::BTreeSet;

use crate::block::Block;
use crate::lease::Millis;
use crate::pool::{Pool, Standing};

/// What an index is, whoever uses it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Role {
    /// Given out by itself.
    Ordinary,
    /// Given out to those who ask for it.
    Reserved,
    /// Never given out.
    Never,
    /// The router's own.
    Router,
}

/// A block with the state of its indexes.
#[derive(Clone, Debug)]
pub(super) struct BlockState {
    pub(super) block: Block,
    /// Taken back while pods use it: it goes with the last of them.
    pub(super) withdrawn: bool,
    /// Wanted back by whoever gave it: nothing new is leased from it, but it stays until it is taken.
    pub(super) wanted_back: bool,
    /// Whether it has each family of the pool. A family may have been added to the Network after the block.
    complete: bool,
    slots: Vec<Slot>,
    /// Ordinary indexes that nobody has, longest unused first: those never used come before all others.
    idle: BTreeSet<(Option<Millis>, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    role: Role,
    leased: bool,
    freed_at: Option<Millis>,
}

impl BlockState {
    /// A block of which nothing is leased.
    pub(super) fn new(block: Block, pool: &Pool, withdrawn: bool) -> Self {
        let mut slots = Vec::with_capacity(block.size().addresses() as usize);
        let mut router_wanted = pool.has_router();
        for index in 0..block.size().addresses() {
            let mut role = role_of(&block, pool, index);
            if router_wanted && role == Role::Ordinary {
                role = Role::Router;
                router_wanted = false;
            }
            slots.push(Slot { role, leased: false, freed_at: None });
        }
        let idle = (0..block.size().addresses())
            .filter(|i| slots[*i as usize].role == Role::Ordinary)
            .map(|i| (None, i))
            .collect();
        let complete = pool.gateways().same_families(&block.start());
        Self { block, withdrawn, wanted_back: false, complete, slots, idle }
    }

    /// Whether pods can get addresses from it.
    pub(super) fn is_live(&self) -> bool {
        self.complete && !self.withdrawn && !self.wanted_back
    }

    /// Whether it has each family of the pool.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    pub(super) fn role(&self, index: u32) -> Role {
        self.slots[index as usize].role
    }

    pub(super) fn is_leased(&self, index: u32) -> bool {
        self.slots[index as usize].leased
    }

    /// When an index was last freed, if it ever was.
    pub(super) fn freed_at(&self, index: u32) -> Option<Millis> {
        self.slots[index as usize].freed_at
    }

    /// The index of the router's own addresses.
    pub(super) fn router(&self) -> Option<u32> {
        self.slots.iter().position(|slot| slot.role == Role::Router).map(|i| i as u32)
    }

    /// Marks an index as leased.
    pub(super) fn take(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        self.idle.remove(&(slot.freed_at, index));
        slot.leased = true;
    }

    /// Marks an index that pods could get as leased. One that they cannot get stays what it is.
    pub(super) fn withhold(&mut self, index: u32) {
        if matches!(self.role(index), Role::Ordinary | Role::Reserved) {
            self.take(index);
        }
    }

    /// Marks an index as nobody's.
    pub(super) fn give_back(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.leased = false;
        if slot.role == Role::Ordinary {
            self.idle.insert((slot.freed_at, index));
        }
    }

    /// Notes when an index was last freed.
    pub(super) fn set_freed_at(&mut self, index: u32, freed_at: Millis) {
        let slot = &mut self.slots[index as usize];
        let was_idle = self.idle.remove(&(slot.freed_at, index));
        slot.freed_at = Some(freed_at);
        if was_idle {
            self.idle.insert((slot.freed_at, index));
        }
    }

    /// Notes that any index may have been freed at this time.
    pub(super) fn rest_all(&mut self, freed_at: Millis) {
        for index in 0..self.block.size().addresses() {
            if self.freed_at(index).is_none_or(|before| before < freed_at) {
                self.set_freed_at(index, freed_at);
            }
        }
    }

    /// Ordinary indexes that nobody has, longest unused first, with the time they were freed.
    pub(super) fn idle(&self) -> impl ExactSizeIterator<Item = (Option<Millis>, u32)> + '_ {
        self.idle.iter().copied()
    }

    /// When one of its indexes was freed last, if one ever was.
    pub(super) fn last_freed(&self) -> Option<Millis> {
        self.slots.iter().filter_map(|slot| slot.freed_at).max()
    }

    /// How many of them were freed at such a time. It must hold for all later times, too.
    pub(super) fn idle_since(&self, lately: impl Fn(Option<Millis>) -> bool) -> u64 {
        self.idle.iter().rev().take_while(|(freed_at, _)| lately(*freed_at)).count() as u64
    }

    /// Whether an index is one of them.
    pub(super) fn is_idle(&self, index: u32) -> bool {
        let slot = self.slots[index as usize];
        slot.role == Role::Ordinary && !slot.leased
    }

    /// Indexes that are leased.
    pub(super) fn leased(&self) -> u64 {
        self.slots.iter().filter(|slot| slot.leased).count() as u64
    }

    /// Indexes of a role that nobody leases.
    pub(super) fn unleased(&self, role: Role) -> u64 {
        self.slots.iter().filter(|slot| slot.role == role && !slot.leased).count() as u64
    }
}

/// An index is ordinary only if the addresses of both families are.
fn role_of(block: &Block, pool: &Pool, index: u32) -> Role {
    let addresses = block.at(index).expect("the index is inside the block");
    addresses.iter().fold(Role::Ordinary, |role, address| match (role, pool.standing(address)) {
        (Role::Never, _) | (_, Standing::Never(_) | Standing::Outside) => Role::Never,
        (Role::Reserved, _) | (_, Standing::Reserved) => Role::Reserved,
        (other, Standing::Ordinary) => other,
    })
}
