//! The plan: the cluster as it is goes in, what to write comes out. Pure.

mod accept;
mod action;
mod attachments;
mod blocks;
mod classes;
mod counts;
mod departed;
mod ids;
mod index;
mod lifecycle;
mod policies;
mod primary;
mod share;
mod status;
mod taints;
mod turn;

pub use action::{Action, Note, Plan};
pub(crate) use blocks::REMEMBER;
pub use primary::{Primaries, primaries};

use crate::cluster::{Cluster, Memory, Now};
use crate::config::Config;
use index::Index;
use turn::Turn;

/// Works out everything that is to be written so that the cluster is as it should be. A cluster that is as it
/// should be gives an empty plan. `memory` is what the caches do not show yet; numbers and blocks that are
/// planned are added to it.
#[must_use]
pub fn plan(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Now) -> Plan {
    let mut plan = Plan::default();
    let departed = departed::nodes(cluster, memory, config, now, &mut plan);
    let index = Index::new(cluster, &departed);
    lifecycle::make_defaults(cluster, config, now, &mut plan);
    lifecycle::finalizers(cluster, &index, memory, config, &mut plan);
    classes::statuses(cluster, now.wall, &mut plan);
    let ids = ids::assign(cluster, memory);
    let verdicts = accept::verdicts(cluster, &index, &ids);
    blocks::give(cluster, &index, memory, &verdicts, now, &mut plan);
    blocks::release(cluster, &index, &departed, memory, &mut plan);
    status::networks(
        &status::Known { cluster, index: &index, ids: &ids, verdicts: &verdicts },
        memory,
        config,
        now,
        &mut plan,
    );
    taints::on_nodes(cluster, memory, now, &mut plan);
    let mut turn = Turn::new(memory, now);
    attachments::answer(cluster, memory, now, &mut turn, &mut plan);
    let mut turn = Turn::new(memory, now);
    departed::attachments(cluster, &departed, memory, config, (now, &mut turn), &mut plan);
    policies::warn(cluster, memory, config, now, &mut plan);
    plan
}

#[cfg(test)]
mod tests;
