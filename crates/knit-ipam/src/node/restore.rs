//! Writing the allocator's memory down and building it again.

use super::{NodeAllocator, NodeConfig};
use crate::block::Block;
use crate::error::BlockError;
use crate::lease::{Lease, Millis, Snapshot};
use crate::pool::Pool;

/// An allocator built again, with what did not fit together.
#[derive(Clone, Debug)]
pub struct Restored {
    /// The allocator.
    pub allocator: NodeAllocator,
    /// Leases that share an address, or their key, with one that was restored before them.
    pub clashing: Vec<Lease>,
    /// Blocks that cannot be added.
    pub refused: Vec<BlockError>,
}

impl NodeAllocator {
    /// All that is remembered besides Networks and blocks; what left quarantine is left out.
    #[must_use]
    pub fn snapshot(&self, now: Millis) -> Snapshot {
        let cooling =
            self.cooling.values().filter(|c| self.is_quarantined(Some(c.freed_at), now)).cloned().collect();
        Snapshot { leases: self.leases.values().cloned().collect(), cooling }
    }

    /// Builds an allocator from what was written down. Leases of Networks and blocks that are not known (yet)
    /// are kept: the pods are there. What does not fit together is left out and told.
    pub fn restore(
        node: impl Into<String>,
        config: NodeConfig,
        pools: impl IntoIterator<Item = Pool>,
        blocks: impl IntoIterator<Item = Block>,
        snapshot: Snapshot,
    ) -> Restored {
        let mut allocator = Self::new(node, config);
        for pool in pools {
            allocator.set_network(pool);
        }
        let mut clashing = Vec::new();
        for lease in snapshot.leases {
            if let Err(lease) = allocator.adopt(lease) {
                clashing.push(*lease);
            }
        }
        for cooling in snapshot.cooling {
            allocator.cooling.insert((cooling.network.clone(), cooling.address), cooling);
        }
        let refused = blocks.into_iter().filter_map(|block| allocator.add_block(block).err()).collect();
        Restored { allocator, clashing, refused }
    }

    /// Takes a lease that exists already, such as one found in the ledger or in the kernel. Gives it back if
    /// another interface has one of its addresses in the same Network, or its own has something else.
    pub fn adopt(&mut self, lease: Lease) -> Result<(), Box<Lease>> {
        match self.get(&lease.key) {
            Some(known) if *known == lease => return Ok(()),
            Some(_) => return Err(Box::new(lease)),
            None => {}
        }
        if lease.addresses.iter().any(|address| self.holder(&lease.network, address).is_some()) {
            return Err(Box::new(lease));
        }
        self.insert_lease(lease);
        Ok(())
    }
}
