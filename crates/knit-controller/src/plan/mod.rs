//! The plan: the cluster as it is goes in, what to write comes out. Pure.

mod accept;
mod action;
mod attachments;
mod blocks;
mod classes;
mod counts;
mod departed;
pub mod devices;
mod ids;
mod index;
mod kept;
mod lifecycle;
mod nodes;
mod policies;
mod primary;
mod reclaim;
mod share;
mod status;
mod taints;
mod turn;
mod worked_out;

pub(crate) use action::Lane;
pub use action::{Action, Note, Plan};
pub(crate) use blocks::REMEMBER;
pub use kept::{Change, Indexed};
pub use primary::{Primaries, primaries};
pub(crate) use status::condition;

use std::collections::HashSet;

use crate::cluster::{Cluster, Memory, Now};
use crate::config::Config;
use index::Index;
use turn::Turn;

/// Works out everything that is to be written so that the cluster is as it should be. A cluster that is as it
/// should be gives an empty plan. `memory` is what the caches do not show yet; numbers and blocks that are
/// planned are added to it.
#[must_use]
pub fn plan(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Now) -> Plan {
    Indexed::new(cluster.clone()).plan(memory, config, now)
}

impl Indexed {
    /// The same as [`plan()`], without turning the cluster round again.
    #[must_use]
    pub fn plan(&mut self, memory: &mut Memory, config: &Config, now: Now) -> Plan {
        self.refresh();
        let mut plan = Plan::default();
        memory.writes.begin_plan(now);
        let nobody = HashSet::new();
        let heard = memory.agents.listen(&self.cluster, config, now);
        let known = (&self.cluster, Index::new(self, &nobody));
        let departed = departed::nodes(known, memory, config, (now, heard), &mut plan);
        let (cluster, index) = (&self.cluster, Index::new(self, &departed));
        lifecycle::make_defaults(cluster, config, now, &mut plan);
        lifecycle::finalizers(cluster, &index, memory, config, now, &mut plan);
        classes::statuses(cluster, &index, now.wall, &mut plan);
        let ids = ids::assign(cluster, memory);
        let verdicts = accept::verdicts(cluster, &index, &ids);
        blocks::give(cluster, &index, memory, &verdicts, now, &mut plan);
        blocks::release(cluster, &index, &departed, memory, now, &mut plan);
        reclaim::blocks(cluster, &index, &verdicts, memory, now, &mut plan);
        status::networks(
            &status::Known { cluster, index: &index, ids: &ids, verdicts: &verdicts },
            memory,
            config,
            now,
            &mut plan,
        );
        nodes::warn(cluster, &mut plan);
        taints::on_nodes(cluster, config, memory, (now, heard), &mut plan);
        let mut turn = Turn::new(memory, now);
        attachments::answer(&index, memory, now, &mut turn, &mut plan);
        let mut turn = Turn::new(memory, now);
        departed::attachments(cluster, &index, &departed, memory, config, (now, &mut turn), &mut plan);
        policies::warn(cluster, memory, config, now, &mut plan);
        // What has a budget was asked before it took of it.
        let all = std::mem::take(&mut plan.actions);
        plan.actions =
            all.into_iter().filter(|action| !plan.leaves_out(memory, &action.subject(), now)).collect();
        plan
    }
}

#[cfg(test)]
mod tests;
