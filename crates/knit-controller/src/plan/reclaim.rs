//! Blocks that their nodes can do without come back. The node agrees before anything is taken: it says that
//! a block is spare, is told that it is wanted back, gives it up on disk and says so for this very wish,
//! and only then the AddressBlock is deleted, in the version that has the wish. What it holds all the same,
//! because a pod came to it in any other way, it lists in `heldRanges`, and nobody else gets that.

use knit_api::names::DEFAULT_NETWORK;

use super::accept::Verdicts;
use super::action::{Action, Plan, subject};
use super::index::Index;
use crate::cluster::{BlockView, Cluster, Memory, Now};
use crate::rate;

/// Asks for blocks that nodes can do without, takes those that were given up, and leaves to nodes what they
/// need again.
pub(super) fn blocks(
    cluster: &Cluster,
    index: &Index<'_>,
    verdicts: &Verdicts<'_>,
    memory: &mut Memory,
    now: Now,
    plan: &mut Plan,
) {
    let wished = index.reclaimed().filter_map(|name| {
        let block = cluster.blocks.get(name)?;
        let wish = block.reclaim.as_ref()?;
        let uid = block.uid.clone();
        let version = block.resource_version.clone();
        let name = name.to_owned();
        match index.spare(&block.node, &name) {
            Some(spare) if spare.given_up.as_ref() == Some(wish) => {
                let why = format!("node {} has given it up", block.node);
                Some(Action::ReleaseBlock { name, uid, resource_version: Some(version), why })
            }
            // It has not come to it yet.
            Some(_) => None,
            None if !cluster.node_networks.contains_key(&block.node) => None,
            None => {
                let why = format!("node {} needs it", block.node);
                Some(Action::WantBlock { name, resource_version: version, reclaim: None, why })
            }
        }
    });
    let spare = index.with_spare().filter_map(|(node, spare)| {
        let block = cluster.blocks.get(&spare.name).filter(|block| block.node == node)?;
        let may_go = block.reclaim.is_none() && may_be_reclaimed(cluster, index, verdicts, block);
        may_go.then(|| Action::WantBlock {
            name: spare.name.clone(),
            resource_version: block.resource_version.clone(),
            // No other wish for this object is called the same.
            reclaim: Some(block.resource_version.clone()),
            why: format!("node {node} can do without it"),
        })
    });
    for action in wished.chain(spare) {
        let (Action::ReleaseBlock { name, .. } | Action::WantBlock { name, .. }) = &action else { continue };
        let deleting = cluster.blocks.get(name).is_none_or(|block| block.deleting);
        if deleting || plan.leaves_out(memory, &subject("addressblocks", name), now) {
            continue;
        }
        if let Err(next) = memory.rates.reclaims.take(rate::RECLAIMS, now.steady) {
            return plan.again_at(next);
        }
        plan.actions.push(action);
    }
}

/// Whether a node may be asked for a block: it is one of the Network's own subnets, and does not have to be
/// given again at once.
fn may_be_reclaimed(
    cluster: &Cluster,
    index: &Index<'_>,
    verdicts: &Verdicts<'_>,
    block: &BlockView,
) -> bool {
    let network = block.network.as_str();
    let is_cut_up = verdicts.of_network.get(network).is_some_and(|verdict| verdict.pool.is_some());
    let is_there = cluster.networks.get(network).is_some_and(|network| !network.is_being_deleted());
    let others = index.blocks_on(&block.node).filter(|(_, other)| other.network == network);
    let remaining = others.filter(|(_, other)| other.reclaim.is_none() && !other.deleting).count();
    // A node has its block of the default Network before it asks for one.
    let is_needed = network == DEFAULT_NETWORK && remaining < 2;
    is_cut_up && is_there && !is_needed && !index.is_asking(network, &block.node)
}
