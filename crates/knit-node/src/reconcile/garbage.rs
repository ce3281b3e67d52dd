//! What nobody owns any more is removed: what a container runtime no longer lists, what nobody recorded, and
//! what was never whole.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use knit_ipam::Millis;
use knit_ledger::SandboxRecord;
use knit_runtime::{Reason as RuntimeReason, Runtime, SandboxId};
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

    /// Has each runtime remove what is not even whole enough to be listed. Only while no request is being
    /// served: all pods of the node wait for this, so one that hangs costs them one timeout.
    pub(super) async fn collect_leftovers(&self, lists: &Lists, outcome: &mut Outcome) {
        let keep: Vec<SandboxId> = {
            let books = self.sandboxes.books();
            if books.has_unreadable_of_unknown() {
                return;
            }
            let unreadable = books.unreadable().filter_map(knit_ledger::Unreadable::sandbox);
            books.records().map(|r| r.sandbox().clone()).chain(unreadable).collect()
        };
        self.of_each(lists, outcome, Leftovers::Attachments(&keep)).await;
    }

    /// Has each runtime remove Networks that nobody knows: they were deleted while no agent ran. Once, as
    /// soon as it is known which ones there are.
    pub(super) async fn remove_unknown_networks(&self, lists: &Lists, outcome: &mut Outcome) {
        // Without the API's word a Network that is not known may well exist.
        if self.no_unknown_networks.load(Ordering::Relaxed) || !self.world.get().synced.networks {
            return;
        }
        // A record that cannot be read may be of any of them.
        if self.sandboxes.books().unreadable().next().is_some() {
            return;
        }
        let mut did = Outcome::default();
        self.of_each(lists, &mut did, Leftovers::Networks).await;
        self.no_unknown_networks.store(did.failed == 0, Ordering::Relaxed);
        outcome.add(&did);
    }

    /// Has something removed by each runtime, side by side, and each within the time of one answer.
    async fn of_each(&self, lists: &Lists, outcome: &mut Outcome, what: Leftovers<'_>) {
        let all = self.runtimes.all();
        let each = all.iter().map(|(name, runtime)| async move {
            let failed = Outcome { failed: 1, ..Outcome::default() };
            // One that did not even list what it has would only be waited for again.
            if !lists.by_runtime.contains_key(name) || lists.is_silent(&self.runtimes, name) {
                return failed;
            }
            let limit = self.answer_limit(name);
            let removing = async {
                match what {
                    Leftovers::Attachments(keep) => collect_garbage(name, runtime, keep).await,
                    Leftovers::Networks => self.remove_networks(name, runtime).await,
                }
            };
            tokio::time::timeout(limit, removing).await.unwrap_or_else(|_| {
                tracing::warn!(
                    runtime = %name,
                    "cannot remove leftovers: the network runtime did not answer within {} s",
                    limit.as_secs()
                );
                self.runtimes.has_answered(name, false);
                failed
            })
        });
        for did in futures::future::join_all(each).await {
            outcome.add(&did);
        }
    }

    async fn remove_networks(&self, name: &str, runtime: &Arc<dyn Runtime>) -> Outcome {
        let mut outcome = Outcome::default();
        let Ok(status) = runtime.status().await else {
            outcome.failed += 1;
            return outcome;
        };
        for network in status.networks.iter().map(|network| &network.name) {
            match self.networks.remove_unknown(runtime, network).await {
                Err(error) if error.reason != RuntimeReason::NetworkNotFound => {
                    tracing::warn!(
                        %network,
                        error = &error as &dyn std::error::Error,
                        "cannot remove a deleted Network yet"
                    );
                    outcome.failed += 1;
                }
                Ok(false) => {}
                Ok(true) | Err(_) => {
                    tracing::info!(%network, runtime = %name, "removed a deleted Network");
                }
            }
        }
        outcome
    }
}

/// What runtimes have of which nobody knows.
#[derive(Clone, Copy, Debug)]
enum Leftovers<'a> {
    /// What is not whole enough to be listed, of other sandboxes than these.
    Attachments(&'a [SandboxId]),
    /// Networks that are not there any more.
    Networks,
}

async fn collect_garbage(name: &str, runtime: &Arc<dyn Runtime>, keep: &[SandboxId]) -> Outcome {
    match runtime.collect_garbage(keep).await {
        Ok(removed) => Outcome { strays: removed.len(), ..Outcome::default() },
        Err(error) => {
            tracing::warn!(
                runtime = %name, error = &error as &dyn std::error::Error,
                "cannot remove leftovers: they stay until the agent is restarted"
            );
            Outcome { failed: 1, ..Outcome::default() }
        }
    }
}
