//! This node's own AddressBlocks: as they are known, and as they may be found at the next start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use ipnet::IpNet;
use knit_model::AddressBlock;
use knit_types::sync::Locked as _;
use knit_types::{Family, NetworkName};

use super::World;

/// AddressBlocks of this node by name.
pub type OwnBlocks = BTreeMap<String, OwnBlock>;

/// An AddressBlock of this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OwnBlock {
    /// What it says.
    pub block: Arc<AddressBlock>,
    /// The controller wants it back: the value that it wrote.
    pub reclaim: Option<String>,
}

/// What an agent that starts now may find on disk of this node's blocks. While the API is away it would
/// give out addresses of them, so no other node may have one of these.
#[derive(Debug, Default)]
pub struct KeptBlocks {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// One of these is on disk.
    either: Vec<Arc<OwnBlocks>>,
    /// What is on disk could not be found out.
    is_unknown: bool,
}

/// What was last found among all blocks, and among which.
#[derive(Debug, Default)]
pub(super) struct Found {
    last: Mutex<Option<FoundIn>>,
}

#[derive(Debug)]
struct FoundIn {
    // Whoever holds these keeps nobody from changing the maps in place.
    blocks: Weak<BTreeMap<String, Arc<AddressBlock>>>,
    reclaimed: Weak<BTreeMap<String, String>>,
    own: Arc<OwnBlocks>,
}

// === impl Found ===

impl Found {
    /// The blocks of a node in a snapshot, looked for only if there are others by now.
    pub(super) fn in_world(&self, world: &World, node: &str) -> Arc<OwnBlocks> {
        let (blocks, reclaimed) = (Arc::downgrade(&world.blocks), Arc::downgrade(&world.reclaimed));
        let mut last = self.last.locked();
        match &*last {
            Some(found) if found.blocks.ptr_eq(&blocks) && found.reclaimed.ptr_eq(&reclaimed) => {
                Arc::clone(&found.own)
            }
            _ => {
                let own = Arc::new(world.own_blocks(node));
                *last = Some(FoundIn { blocks, reclaimed, own: Arc::clone(&own) });
                own
            }
        }
    }
}

// === impl World ===

impl World {
    /// The AddressBlocks of a node that count.
    #[must_use]
    pub fn own_blocks(&self, node: &str) -> OwnBlocks {
        let own = self.blocks.iter().filter(|(_, block)| block.node() == node);
        let with_reclaim = own.map(|(name, block)| {
            let reclaim = self.reclaimed.get(name).cloned();
            (name.clone(), OwnBlock { block: Arc::clone(block), reclaim })
        });
        with_reclaim.collect()
    }
}

// === impl OwnBlock ===

impl OwnBlock {
    /// What the node gives out of it, with its Network.
    pub(crate) fn ranges(&self) -> Vec<(NetworkName, IpNet)> {
        let prefixes = Family::ALL.into_iter().filter_map(|family| self.block.block().prefix(family));
        prefixes.map(|range| (self.block.network().clone(), range)).collect()
    }
}

// === impl KeptBlocks ===

impl KeptBlocks {
    /// What is on disk cannot be found out.
    pub fn is_unknown(&self) {
        self.state.locked().is_unknown = true;
    }

    /// This is on disk, or will be, besides what is already, or instead of it.
    pub fn may_be(&self, blocks: Arc<OwnBlocks>) {
        let mut state = self.state.locked();
        if !state.either.contains(&blocks) {
            state.either.push(blocks);
        }
    }

    /// This is on disk. Whether anything else was thought possible.
    pub fn is(&self, blocks: Arc<OwnBlocks>) -> bool {
        let mut state = self.state.locked();
        let news = state.either.iter().any(|known| *known != blocks);
        state.either = vec![blocks];
        news
    }

    /// The ranges that an agent may find there, with their Networks.
    #[must_use]
    pub fn ranges(&self) -> Vec<(NetworkName, IpNet)> {
        let state = self.state.locked();
        state.either.iter().flat_map(|blocks| blocks.values()).flat_map(OwnBlock::ranges).collect()
    }

    /// Whether an agent that finds this block there will know as well that it is wanted back, by this value.
    #[must_use]
    pub fn knows_reclaim(&self, name: &str, value: &str) -> bool {
        let state = self.state.locked();
        let knows = |blocks: &Arc<OwnBlocks>| {
            blocks.get(name).is_none_or(|own| own.reclaim.as_deref() == Some(value))
        };
        !state.is_unknown && state.either.iter().all(knows)
    }
}
