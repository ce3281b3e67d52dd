//! What nobody owns any more is removed: what a container runtime no longer lists, what nobody recorded, and
//! what was never whole.

use std::collections::BTreeSet;

use knit_ipam::Millis;
use knit_ledger::SandboxRecord;
use knit_runtime::{Reason as RuntimeReason, SandboxId};
use knit_types::NetworkName;
use tokio::time::Instant;

use super::{Lists, Outcome, Reconciler};
use crate::error::{Error, Reason, Result};
use crate::netns::Processes;
use crate::pipeline::DetachLimits;
use crate::request::Door;

impl Reconciler {
    /// Removes what belongs to a door and to no sandbox in the list.
    pub(crate) async fn gc(
        &self,
        door: &Door,
        keep: &BTreeSet<String>,
        before: Millis,
        processes: &Processes,
    ) -> Result<()> {
        let of_door =
            |r: &&SandboxRecord| r.attachments().iter().any(|a| a.details().door.is_served_by(door));
        let unused: Vec<SandboxId> = self
            .sandboxes
            .books()
            .records()
            .filter(of_door)
            .filter(|r| r.created_at() <= before.0 && !keep.contains(r.sandbox().as_str()))
            .map(|r| r.sandbox().clone())
            .collect();
        let mut left = 0_usize;
        let limits = DetachLimits::of_pass(self.config.detach_deadline, Instant::now());
        for sandbox in unused {
            let _guard = self.sandboxes.locks().lock(sandbox.clone()).await;
            let record = self.sandboxes.books().get(&sandbox).filter(|r| r.created_at() <= before.0).cloned();
            if let Some(record) = record {
                if let Some(why) = self.spared(&record, processes) {
                    tracing::warn!(
                        %sandbox,
                        "it is not in the list of a garbage collection, but {why}: keeping it"
                    );
                    continue;
                }
                tracing::info!(%sandbox, "removing what its runtime no longer lists");
                left += usize::from(self.pipeline.remove_with(&record, limits).await.is_err());
            }
        }
        if left == 0 {
            return Ok(());
        }
        let message = format!("{left} sandboxes could not be removed completely; the agent retries");
        Err(Error::new(Reason::NotReady, message))
    }

    /// Removes what runtimes have and nobody recorded.
    pub(super) async fn remove_strays(&self, lists: &Lists, outcome: &mut Outcome) {
        if self.sandboxes.books().has_unreadable_of_unknown() {
            // Whatever nobody recorded may be that sandbox's.
            return;
        }
        for (name, by_key) in &lists.by_runtime {
            let Some(runtime) = self.runtimes.get(name) else { continue };
            for ((sandbox, interface), attachment) in by_key {
                let recorded = |core: &Self| {
                    let books = core.sandboxes.books();
                    books.unreadable_of(sandbox).is_some()
                        || books.get(sandbox).is_some_and(|r| r.attachment(interface).is_some())
                };
                if recorded(self) {
                    continue;
                }
                let Some(_guard) = self.sandboxes.locks().try_lock(sandbox.clone()) else { continue };
                if recorded(self) {
                    continue;
                }
                tracing::info!(
                    %sandbox, %interface, runtime = %name,
                    "removing an interface without a record"
                );
                if lists.is_silent(&self.runtimes, name) {
                    outcome.failed += 1;
                    break;
                }
                let limit = self.config.detach_deadline;
                let detach = runtime.detach(&attachment.pod, Some(interface));
                let detached = tokio::time::timeout(limit, detach).await;
                self.runtimes.has_answered(name, detached.is_ok());
                let detached = detached.unwrap_or_else(|_| {
                    let message =
                        format!("network runtime {name} did not detach it within {} s", limit.as_secs());
                    Err(knit_runtime::Error::new(RuntimeReason::NotReady, message))
                });
                match detached {
                    Ok(()) => {
                        self.metrics.garbage(1);
                        outcome.strays += 1;
                    }
                    Err(error) => {
                        tracing::warn!(
                            %sandbox, %interface, error = &error as &dyn std::error::Error,
                            "it cannot be removed yet"
                        );
                        outcome.failed += 1;
                    }
                }
            }
        }
    }

    /// Has each runtime remove what is not even whole enough to be listed, and Networks that nobody knows.
    /// Only while no request is being served.
    pub(super) async fn collect_leftovers(&self, outcome: &mut Outcome) {
        let (keep, in_use): (Vec<SandboxId>, BTreeSet<NetworkName>) = {
            let books = self.sandboxes.books();
            if books.has_unreadable_of_unknown() {
                return;
            }
            let unreadable = books.unreadable().filter_map(knit_ledger::Unreadable::sandbox);
            let known = books.records().map(|r| r.sandbox().clone());
            (known.chain(unreadable).collect(), books.networks_in_use())
        };
        let world = self.world.get();
        for (name, runtime) in self.runtimes.all() {
            match runtime.collect_garbage(&keep).await {
                Ok(removed) => outcome.strays += removed.len(),
                Err(error) => {
                    tracing::warn!(
                        runtime = %name, error = &error as &dyn std::error::Error,
                        "cannot remove leftovers yet"
                    );
                    outcome.failed += 1;
                }
            }
            let Ok(status) = runtime.status().await else { continue };
            // Without the API's word a Network that is not known may well exist.
            let unknown =
                |n: &str| world.synced.networks && !world.networks.contains_key(n) && !in_use.contains(n);
            for network in status.networks.iter().filter(|n| unknown(&n.name)) {
                match runtime.remove_network(&network.name).await {
                    Err(error) if error.reason != RuntimeReason::NetworkNotFound => {
                        tracing::warn!(
                            network = %network.name, error = &error as &dyn std::error::Error,
                            "cannot remove a deleted Network yet"
                        );
                        outcome.failed += 1;
                    }
                    _ => {
                        tracing::info!(
                            network = %network.name, runtime = %name,
                            "removed a deleted Network"
                        );
                    }
                }
            }
        }
    }
}
