//! The plan: the cluster as it is goes in, what to write comes out. Pure.

mod accept;
mod action;
mod attachments;
mod blocks;
mod classes;
mod counts;
mod ids;
mod index;
mod lifecycle;
mod primary;
mod status;
mod taints;

use jiff::Timestamp;

pub use action::{Action, Note, Plan};
pub(crate) use blocks::REMEMBER;
pub use primary::{Primaries, primaries};

use crate::cluster::{Cluster, Memory};
use crate::config::Config;
use index::Index;

/// Works out everything that is to be written so that the cluster is as it should be. A cluster that is as it
/// should be gives an empty plan. `memory` is what the caches do not show yet; numbers and blocks that are planned
/// are added to it.
#[must_use]
pub fn plan(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let index = Index::new(cluster);
    lifecycle::make_defaults(cluster, config, now, &mut plan);
    lifecycle::finalizers(cluster, &index, &mut plan);
    classes::statuses(cluster, now, &mut plan);
    let ids = ids::assign(cluster, memory);
    let verdicts = accept::verdicts(cluster, &index, &ids);
    blocks::give(cluster, &index, memory, &verdicts, now, &mut plan);
    blocks::release(cluster, &index, memory, config, now, &mut plan);
    status::networks(cluster, &index, &ids, &verdicts, now, &mut plan);
    attachments::answer(cluster, now, &mut plan);
    taints::on_nodes(cluster, now, &mut plan);
    plan
}

#[cfg(test)]
mod tests;
