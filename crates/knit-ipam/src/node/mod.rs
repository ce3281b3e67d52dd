//! The node's side: it owns this node's blocks of every Network and leases addresses to pods, asking nobody.
//!
//! Leases are the truth. Which indexes are in use follows from them, so a block that goes away and comes
//! back, or that becomes known only after a restart, never makes an address free that a pod has.

mod block_state;
mod counts;
mod held;
mod plan;
mod restore;
mod spare;
mod withheld;

use std::collections::BTreeMap;
use std::net::IpAddr;

use self::block_state::BlockState;
pub use self::counts::{Counts, FamilyCounts, WantsMore};
pub use self::restore::Restored;
pub use self::spare::Spare;
use self::withheld::Withheld;
use knit_types::{Addresses, Mac, NetworkName, Owner, PodRef};

use crate::address::AddressRange;
use crate::block::Block;
use crate::error::{BlockError, LeaseError};
use crate::lease::{Cooling, Lease, LeaseKey, Millis, Request};
use crate::pool::Pool;

/// How a node gives out addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NodeConfig {
    /// How long a freed address is kept from other pods.
    pub quarantine: Millis,
    /// Below which share of free addresses a further block is asked for.
    pub low_percent: u8,
}

/// The addresses of one node.
#[derive(Clone, Debug)]
pub struct NodeAllocator {
    node: String,
    config: NodeConfig,
    networks: BTreeMap<NetworkName, NetworkState>,
    leases: BTreeMap<LeaseKey, Lease>,
    /// Who has an address; several only where Networks overlap.
    holders: BTreeMap<IpAddr, Vec<LeaseKey>>,
    /// Addresses that nobody gets, though no lease has them.
    withheld: BTreeMap<IpAddr, Vec<Withheld>>,
    /// Freed indexes by Network and first address. Kept apart from the blocks, so that it outlives them.
    cooling: BTreeMap<(NetworkName, IpAddr), Cooling>,
    /// From when on it is known what was freed when; any address that nobody has may have been freed just
    /// before.
    known_from: Option<Millis>,
}

/// What became of a block that was taken back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Removal {
    /// It is gone.
    Removed,
    /// Pods have addresses of it: nothing new is leased from it, and it goes with the last of them.
    Draining {
        /// Indexes that are still leased.
        leased: u64,
    },
    /// This node has no such block.
    Unknown,
}

/// One Network on this node.
#[derive(Clone, Debug)]
struct NetworkState {
    pool: Pool,
    /// In the order in which they came.
    blocks: Vec<BlockState>,
    /// Addresses that pods of other nodes asked for and have, with a word on who.
    elsewhere: BTreeMap<IpAddr, String>,
}

// === impl NodeConfig ===

impl Default for NodeConfig {
    /// A quarantine of 30 s, a further block at three quarters of use.
    fn default() -> Self {
        Self { quarantine: Millis(30_000), low_percent: 25 }
    }
}

// === impl NetworkState ===

impl NetworkState {
    /// The block and index of an address.
    fn slot_of(&self, address: IpAddr) -> Option<(usize, u32)> {
        self.blocks.iter().enumerate().find_map(|(n, b)| Some((n, b.block.index_of(address)?)))
    }
}

// === impl NodeAllocator ===

impl NodeAllocator {
    /// A node with no Network.
    pub fn new(node: impl Into<String>, config: NodeConfig) -> Self {
        Self {
            node: node.into(),
            config,
            networks: BTreeMap::new(),
            leases: BTreeMap::new(),
            holders: BTreeMap::new(),
            withheld: BTreeMap::new(),
            cooling: BTreeMap::new(),
            known_from: None,
        }
    }

    /// What was freed before now is not known: every address that nobody has rests from now on.
    pub fn rest_all(&mut self, now: Millis) {
        self.known_from = Some(now);
        for block in self.networks.values_mut().flat_map(|state| &mut state.blocks) {
            block.rest_all(now);
        }
    }

    /// The node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Adds a Network, or changes what is set aside in one that is known. Its leases and blocks stay.
    pub fn set_network(&mut self, pool: Pool) {
        let name = pool.network().to_owned();
        let Some(state) = self.networks.get_mut(&name) else {
            self.networks.insert(name, NetworkState { pool, blocks: Vec::new(), elsewhere: BTreeMap::new() });
            return;
        };
        if state.pool == pool {
            return;
        }
        state.pool = pool;
        let blocks: Vec<BlockState> = state.blocks.drain(..).collect();
        for BlockState { block, withdrawn, wanted_back, .. } in blocks {
            self.insert_block(block, withdrawn);
            let rebuilt = self.networks.get_mut(&name).and_then(|state| state.blocks.last_mut());
            rebuilt.into_iter().for_each(|block| block.wanted_back = wanted_back);
        }
    }

    /// Forgets a Network and its blocks. Refused, with the number of leases, while pods have some.
    pub fn remove_network(&mut self, network: &str) -> Result<(), u64> {
        let leases = self.leases.values().filter(|lease| lease.network == network).count();
        let leases = (leases + self.withheld_of(network)) as u64;
        if leases > 0 {
            return Err(leases);
        }
        self.networks.remove(network);
        self.cooling.retain(|(name, _), _| name != network);
        Ok(())
    }

    /// The pool of a Network that this node knows.
    #[must_use]
    pub fn pool(&self, network: &str) -> Option<&Pool> {
        self.networks.get(network).map(|state| &state.pool)
    }

    /// The Networks that this node knows.
    pub fn networks(&self) -> impl Iterator<Item = &NetworkName> {
        self.networks.keys()
    }

    /// Takes a block of this node. The same block again changes nothing, except that it is no longer being
    /// emptied.
    pub fn add_block(&mut self, block: Block) -> Result<(), BlockError> {
        let network = block.network().to_owned();
        if block.node() != self.node {
            let owner = block.node().to_owned();
            return Err(BlockError::OtherNode { block: block.to_string(), network, owner });
        }
        let Some(state) = self.networks.get_mut(&network) else {
            return Err(BlockError::UnknownNetwork { block: block.to_string(), network });
        };
        let inside = |range: &AddressRange| {
            state.pool.subnet(range.family()).is_some_and(|subnet| subnet.range().covers(range))
        };
        if !block.ranges().all(|range| inside(&range)) {
            return Err(BlockError::OutsideSubnet { block: block.to_string(), network });
        }
        if let Some(other) = state.blocks.iter_mut().find(|b| b.block.overlaps(&block)) {
            if other.block == block {
                other.withdrawn = false;
                return Ok(());
            }
            let other = other.block.to_string();
            return Err(BlockError::Overlaps { block: block.to_string(), network, other });
        }
        self.insert_block(block, false);
        Ok(())
    }

    /// Gives a block up, named by its first addresses. While pods use it, nothing new is leased from it.
    pub fn remove_block(&mut self, network: &str, start: &Addresses) -> Removal {
        let Some(state) = self.networks.get_mut(network) else { return Removal::Unknown };
        let Some(n) = state.blocks.iter().position(|b| b.block.start() == *start) else {
            return Removal::Unknown;
        };
        let leased = state.blocks[n].leased();
        if leased == 0 {
            state.blocks.remove(n);
            return Removal::Removed;
        }
        state.blocks[n].withdrawn = true;
        Removal::Draining { leased }
    }

    /// Says whether whoever gave a block, named by its first addresses, wants it back: then nothing new is
    /// leased from it, and what pods have of it stays theirs. Whether that is news.
    pub fn set_wanted_back(&mut self, network: &str, start: &Addresses, wanted_back: bool) -> bool {
        let blocks = self.networks.get_mut(network).into_iter().flat_map(|state| &mut state.blocks);
        let mut news = false;
        for block in blocks.filter(|b| b.block.start() == *start) {
            news |= std::mem::replace(&mut block.wanted_back, wanted_back) != wanted_back;
        }
        news
    }

    /// This node's blocks of a Network, in the order in which they came.
    pub fn blocks(&self, network: &str) -> impl Iterator<Item = &Block> {
        self.networks.get(network).into_iter().flat_map(|state| state.blocks.iter().map(|b| &b.block))
    }

    /// The own address and MAC of this node's router, where the Network wants one and the node has a block.
    #[must_use]
    pub fn router(&self, network: &str) -> Option<(Addresses, Mac)> {
        let state = self.networks.get(network)?;
        // The oldest; one that is being emptied still serves where there is no other. Where the Network came
        // to want routers only later, a pod may have that index.
        let free = |b: &BlockState| b.router().is_some_and(|index| !b.is_leased(index));
        let complete = || state.blocks.iter().filter(|b| b.is_complete() && free(b));
        let block = complete().find(|b| b.is_live()).or_else(|| complete().next())?;
        let addresses = block.block.at(block.router()?)?;
        Some((addresses, state.pool.mac(&addresses)))
    }

    /// Says which addresses of a Network pods of other nodes asked for and have, with a word on who: nobody
    /// gets one of these here.
    pub fn set_elsewhere(&mut self, network: &str, addresses: BTreeMap<IpAddr, String>) {
        if let Some(state) = self.networks.get_mut(network) {
            state.elsewhere = addresses;
        }
    }

    /// Leases all that a sandbox wants, or nothing. What it has already, and asks for again, it gets again:
    /// the same request twice is one.
    pub fn lease(&mut self, request: &Request, now: Millis) -> Result<Vec<Lease>, LeaseError> {
        let planned = self.plan(request, now)?;
        for lease in &planned {
            if !self.leases.contains_key(&lease.key) {
                self.insert_lease(lease.clone());
            } else if let Some(known) = self.leases.get_mut(&lease.key) {
                known.pod.clone_from(&lease.pod);
            }
        }
        Ok(planned)
    }

    /// Frees what an interface has; its addresses go into quarantine.
    pub fn free(&mut self, key: &LeaseKey, now: Millis) -> Option<Lease> {
        self.remove_lease(key, Some(now))
    }

    /// Takes a lease back that no packet ever saw, because what came after it failed: no quarantine.
    pub fn cancel(&mut self, key: &LeaseKey) -> Option<Lease> {
        self.remove_lease(key, None)
    }

    /// Frees all that an owner has.
    pub fn free_owner(&mut self, owner: &Owner, now: Millis) -> Vec<Lease> {
        let keys: Vec<LeaseKey> = self.of_owner(owner).map(|lease| lease.key.clone()).collect();
        keys.iter().filter_map(|key| self.free(key, now)).collect()
    }

    /// Gives what one owner has to another, with nothing free in between; `pod` is who uses it from now on.
    /// False, and nothing changed, if the first does not have it or the second has something by that name.
    pub fn transfer(&mut self, from: &LeaseKey, to: &LeaseKey, pod: Option<&PodRef>) -> bool {
        if self.leases.contains_key(to) {
            return false;
        }
        let Some(mut lease) = self.leases.remove(from) else { return false };
        for address in lease.addresses.iter() {
            let holders = self.holders.get_mut(&address).into_iter().flatten();
            holders.filter(|holder| *holder == from).for_each(|holder| holder.clone_from(to));
        }
        lease.key.clone_from(to);
        lease.pod = pod.cloned();
        self.leases.insert(to.clone(), lease);
        true
    }

    /// The lease of an interface.
    #[must_use]
    pub fn get(&self, key: &LeaseKey) -> Option<&Lease> {
        self.leases.get(key)
    }

    /// The leases of an owner.
    pub fn of_owner(&self, owner: &Owner) -> impl Iterator<Item = &Lease> {
        self.leases.values().filter(move |lease| lease.key.owner == *owner)
    }

    /// All leases, by their keys.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values()
    }

    /// Who has an address of a Network on this node.
    #[must_use]
    pub fn holder(&self, network: &str, address: IpAddr) -> Option<&Lease> {
        self.holders_of(address).find(|lease| lease.network == network)
    }

    fn holders_of(&self, address: IpAddr) -> impl Iterator<Item = &Lease> {
        self.holders.get(&address).into_iter().flatten().filter_map(|key| self.leases.get(key))
    }

    /// Whether an index that was freed then is still kept from other pods.
    fn is_quarantined(&self, freed_at: Option<Millis>, now: Millis) -> bool {
        freed_at.is_some_and(|at| now < at.plus(self.config.quarantine))
    }

    /// Whether a Network's addresses must be unique on this node; one that is not known any more may be one
    /// of those.
    fn is_primary(&self, network: &str) -> bool {
        self.networks.get(network).is_none_or(|state| state.pool.is_primary())
    }

    /// The first of these addresses that a pod of this Network must not have, and who has it.
    fn obstacle(&self, network: &str, addresses: &Addresses) -> Option<(IpAddr, String)> {
        let primary = self.is_primary(network);
        addresses.iter().find_map(|address| {
            let here = self
                .holders_of(address)
                .find(|lease| lease.network == network || (primary && self.is_primary(&lease.network)));
            if let Some(lease) = here {
                return Some((address, format!("{} on Network {}", lease.holder(), lease.network)));
            }
            if let Some(holder) = self.withholder(network, address) {
                return Some((address, holder.to_owned()));
            }
            let elsewhere = &self.networks.get(network)?.elsewhere;
            elsewhere.get(&address).map(|who| (address, who.clone()))
        })
    }

    fn insert_block(&mut self, block: Block, withdrawn: bool) {
        let network = block.network().to_owned();
        let Some(state) = self.networks.get(&network) else { return };
        let mut new = BlockState::new(block, &state.pool, withdrawn);
        if let Some(known_from) = self.known_from {
            new.rest_all(known_from);
        }
        for lease in self.leases.values().filter(|lease| lease.network == network) {
            for address in lease.addresses.iter() {
                if let Some(index) = new.block.index_of(address) {
                    new.take(index);
                }
            }
        }
        for address in self.withheld.keys().filter(|address| self.withholder(&network, **address).is_some()) {
            if let Some(index) = new.block.index_of(*address) {
                new.withhold(index);
            }
        }
        for cooling in self.cooling.values().filter(|c| c.network == network) {
            if let Some(index) = new.block.index_of(cooling.address) {
                new.set_freed_at(index, cooling.freed_at);
            }
        }
        if let Some(state) = self.networks.get_mut(&network) {
            state.blocks.push(new);
        }
    }

    fn insert_lease(&mut self, lease: Lease) {
        for address in lease.addresses.iter() {
            self.holders.entry(address).or_default().push(lease.key.clone());
            let Some(state) = self.networks.get_mut(&lease.network) else { continue };
            if let Some((n, index)) = state.slot_of(address) {
                state.blocks[n].take(index);
            }
        }
        self.leases.insert(lease.key.clone(), lease);
    }

    fn remove_lease(&mut self, key: &LeaseKey, freed_at: Option<Millis>) -> Option<Lease> {
        let lease = self.leases.remove(key)?;
        for address in lease.addresses.iter() {
            if let Some(holders) = self.holders.get_mut(&address) {
                holders.retain(|holder| holder != key);
                if holders.is_empty() {
                    self.holders.remove(&address);
                }
            }
        }
        for address in lease.addresses.iter() {
            self.give_slot_back(&lease, address, freed_at);
        }
        if let Some(state) = self.networks.get_mut(&lease.network) {
            state.blocks.retain(|b| !b.withdrawn || b.leased() > 0);
        }
        Some(lease)
    }

    /// Whether somebody has an address of a Network here, or nobody may have it.
    fn is_held(&self, network: &str, address: IpAddr) -> bool {
        self.holder(network, address).is_some() || self.withholder(network, address).is_some()
    }

    /// Makes the index of an address idle, unless another lease has an address of it.
    fn give_slot_back(&mut self, lease: &Lease, address: IpAddr, freed_at: Option<Millis>) {
        let slot = self.networks.get(&lease.network).and_then(|state| {
            let (n, index) = state.slot_of(address)?;
            Some((n, index, state.blocks[n].block.at(index)?))
        });
        let Some((n, index, pair)) = slot else {
            // Its block may become known later: remember the address itself.
            self.cool(lease, address, freed_at);
            return;
        };
        let held = pair.iter().any(|a| self.is_held(&lease.network, a));
        self.cool(lease, pair.first(), freed_at);
        if let Some(state) = self.networks.get_mut(&lease.network) {
            let block = &mut state.blocks[n];
            if let Some(freed_at) = freed_at {
                block.set_freed_at(index, freed_at);
            }
            if !held {
                block.give_back(index);
            }
        }
    }

    fn cool(&mut self, lease: &Lease, address: IpAddr, freed_at: Option<Millis>) {
        let Some(freed_at) = freed_at else { return };
        let network = lease.network.clone();
        let cooling = Cooling { network: network.clone(), address, freed_at, pod: lease.pod.clone() };
        self.cooling.insert((network, address), cooling);
        // What has cooled down is only needed for its order of age, which the blocks have too: forget it now
        // and then.
        if self.cooling.len() >= 1024 && self.cooling.len().is_power_of_two() {
            let quarantine = self.config.quarantine;
            self.cooling.retain(|_, c| freed_at < c.freed_at.plus(quarantine));
        }
    }
}
