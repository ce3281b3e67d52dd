//! Runtimes behind a socket that tell what happens to what they made: what one of them has lost is made again
//! at once, and one that was away is told again what it is to have.
//!
//! Passes compare all of that, too; this is what need not wait for the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use knit_objects::{Backoff, jitter};
use knit_runtime::{Change, Error, Reason, Runtime, SandboxId};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::COMPARE_RETRY_DELAY;
use crate::core::Core;
use crate::reconcile::{Outcome, Reconciler};

/// The longest pause before a runtime that does not answer is asked again.
const RETRY_MAX_DELAY: Duration = Duration::from_secs(30);

/// The runtimes that are being followed. Dropping it ends that.
#[derive(Default)]
pub struct Followers {
    tasks: JoinSet<()>,
    followed: BTreeMap<String, (Arc<dyn Runtime>, AbortHandle)>,
}

// === impl Followers ===

impl Followers {
    /// Begins to follow runtimes that were found, and leaves those that are gone.
    pub fn keep_up(&mut self, core: &Core) {
        let watchable = core.runtimes().watchable();
        self.followed.retain(|name, (runtime, task)| {
            let same = watchable.get(name).is_some_and(|now| Arc::ptr_eq(now, runtime));
            if !same {
                task.abort();
            }
            same
        });
        while self.tasks.try_join_next().is_some() {}
        for (name, runtime) in watchable {
            self.followed.entry(name.clone()).or_insert_with(|| {
                let (core, following) = (core.clone(), Arc::clone(&runtime));
                let task = self.tasks.spawn(async move { core.follow(&name, &following).await });
                (runtime, task)
            });
        }
    }
}

// === impl Reconciler ===

impl Reconciler {
    /// Follows what one runtime tells, forever; when its stream ends, it is asked for another one.
    pub(crate) async fn follow(&self, name: &str, runtime: &Arc<dyn Runtime>) {
        let mut pause = Backoff::new(COMPARE_RETRY_DELAY, RETRY_MAX_DELAY);
        loop {
            let error = self.follow_once(name, runtime, &mut pause).await;
            tracing::debug!(
                runtime = name,
                error = &error as &dyn std::error::Error,
                "cannot watch a network runtime; retrying"
            );
            tokio::time::sleep(pause.next(jitter())).await;
        }
    }

    /// Follows one stream. Says why it ended.
    async fn follow_once(&self, name: &str, runtime: &Arc<dyn Runtime>, pause: &mut Backoff) -> Error {
        let mut changes = match runtime.watch().await {
            Ok(changes) => changes,
            Err(error) => return error,
        };
        let mut synced = false;
        // When something is to be made again that was made again too often of late.
        let mut later: Option<Instant> = None;
        loop {
            let due = async {
                match later {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let change = tokio::select! {
                change = changes.next() => change,
                () = due => {
                    later = self.look_at(name, runtime, None).await;
                    continue;
                }
            };
            let again = match change {
                None => return Error::new(Reason::NotReady, "the stream has ended"),
                Some(Err(error)) => return error,
                Some(Ok(Change::Synced)) => {
                    // It may have been away, and have begun with nothing.
                    synced = true;
                    pause.reset();
                    let mut outcome = Outcome::default();
                    let damaged = self.compare_foreign(name, runtime, &mut outcome).await;
                    self.attach_again(&damaged, &mut outcome).await
                }
                Some(Ok(Change::Removed(gone) | Change::Modified(gone))) if synced => {
                    self.look_at(name, runtime, Some(&gone.pod.sandbox)).await
                }
                // What it has is compared as a whole, and what nobody asked for goes in a pass.
                Some(Ok(_)) => None,
            };
            later = later.into_iter().chain(again).min();
        }
    }

    /// Has the attachments of one sandbox, or all, checked by their runtime, and makes damaged ones again.
    /// What the agent itself takes away is no longer recorded as attached, or its sandbox is locked. Says
    /// when to look again, if that is known.
    async fn look_at(
        &self,
        name: &str,
        runtime: &Arc<dyn Runtime>,
        sandbox: Option<&SandboxId>,
    ) -> Option<Instant> {
        let mut outcome = Outcome::default();
        let damaged = self.check_foreign(name, runtime, sandbox, &mut outcome).await;
        self.attach_again(&damaged, &mut outcome).await
    }
}
