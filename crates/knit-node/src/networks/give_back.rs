//! Which AddressBlocks this node can do without, and which of them it has given up.
//!
//! An address is never in two places, and no block goes while a pod has an address of it, wherever the
//! agent or the controller are killed:
//!
//! 1. A block that no pod has used for a while is said to be spare. Pods may still get addresses of it.
//! 2. The controller writes that it wants it back. From then on nothing is leased from it, and once that is
//!    on disk (an agent that starts without the API goes by the same), it is said to be given up, for this
//!    very wish.
//! 3. The controller deletes the AddressBlock, in the version that has the wish. It gives none of its
//!    addresses to anybody before this node no longer says that it holds them, which it does while the
//!    block is known or on disk.
//!
//! A node that needs the block again says that it is not spare; the controller takes its wish back, and
//! only then are addresses leased again.

use std::collections::BTreeMap;
use std::sync::Mutex;

use ipnet::IpNet;
use knit_api::SpareBlock;
use knit_ipam::{Millis, NodeAllocator};
use knit_types::NetworkName;
use knit_types::sync::Locked as _;

use crate::world::own::{KeptBlocks, OwnBlock, OwnBlocks};
use crate::world::{World, WorldStore};

/// Since when blocks are spare, by name.
#[derive(Debug, Default)]
pub struct SpareSince {
    known: Mutex<BTreeMap<String, Millis>>,
}

/// What is said of this node's blocks.
#[derive(Clone, Debug)]
pub struct BlocksSaid {
    /// Those that it can do without.
    pub spare: Vec<SpareBlock>,
    /// The ranges that nobody else may have, with their Networks.
    pub held: BTreeMap<NetworkName, Vec<IpNet>>,
}

// === impl SpareSince ===

impl SpareSince {
    /// What is to be said of this node's blocks. The allocator must not change while this looks at the newest
    /// snapshot: what is leased is leased under the same lock.
    pub fn look(
        &self,
        store: &WorldStore,
        allocator: &NodeAllocator,
        node: &str,
        (delay, now): (Millis, Millis),
    ) -> BlocksSaid {
        let world = store.get();
        let own = store.own_blocks(node);
        let mut held = allocator.held_ranges();
        for (network, range) in own.values().flat_map(OwnBlock::ranges).chain(store.kept().ranges()) {
            held.entry(network).or_default().push(range);
        }
        for ranges in held.values_mut() {
            ranges.sort_unstable();
            ranges.dedup();
        }
        BlocksSaid { spare: self.spare(&world, &own, allocator, store.kept(), (delay, now)), held }
    }

    fn spare(
        &self,
        world: &World,
        own: &OwnBlocks,
        allocator: &NodeAllocator,
        kept: &KeptBlocks,
        (delay, now): (Millis, Millis),
    ) -> Vec<SpareBlock> {
        let of_allocator = allocator.spare_blocks(now);
        // Whether a block is one, when it was last used, and whether nothing is leased from it.
        let look = |own: &OwnBlock| -> Option<(Option<Millis>, bool)> {
            let (network, block) = (own.block.network(), own.block.block());
            // Nodes' podCIDRs are not the controller's to give.
            if !world.networks.get(network)?.has_subnets() {
                return None;
            }
            if allocator.pool(network).is_some() {
                let spare = of_allocator.iter().find(|spare| spare.block == block)?;
                return Some((spare.last_used, spare.is_closed));
            }
            // Whoever sets the Network up here goes by the wish from the beginning. A node has its block of
            // the default Network whether or not it has pods.
            let is_unused = !network.is_default() && allocator.is_unused(block, now);
            is_unused.then_some((None, own.reclaim.is_some()))
        };
        let mut since = self.known.locked();
        let mut still = BTreeMap::new();
        let mut spare = Vec::new();
        for (name, own) in own {
            let Some((last_used, is_closed)) = look(own) else { continue };
            let at = since.get(name).copied().unwrap_or(now).max(last_used.unwrap_or_default());
            still.insert(name.clone(), at);
            if own.reclaim.is_none() && now < at.plus(delay) {
                continue;
            }
            let given_up = own.reclaim.clone();
            let given_up = given_up.filter(|wish| is_closed && kept.knows_reclaim(name, wish));
            spare.push(SpareBlock { name: name.clone(), given_up });
        }
        *since = still;
        spare
    }
}
