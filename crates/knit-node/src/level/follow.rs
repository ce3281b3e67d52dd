//! Runtimes behind a socket: what one of them tells that it has lost is made again at once, and one that was
//! away, or does not have its Networks any more, is told again what it is to have.
//!
//! Passes compare all of that, too; this is what need not wait for the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use knit_objects::{Backoff, jitter};
use knit_runtime::{Change, Error, Reason, Runtime, SandboxId, feature};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::COMPARE_RETRY_DELAY;
use crate::core::Core;
use crate::reconcile::{Outcome, Reconciler};

/// The longest pause before a runtime that does not answer is asked again.
const RETRY_MAX_DELAY: Duration = Duration::from_secs(30);

/// Since when a runtime is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Known {
    /// Since before the first pass, which compared what it has.
    FromStart,
    /// It came, or came back, later.
    Later,
}

/// The runtimes that are being followed. Dropping it ends that.
#[derive(Default)]
pub struct Followers {
    begun: bool,
    tasks: JoinSet<()>,
    followed: BTreeMap<String, (Arc<dyn Runtime>, AbortHandle)>,
}

// === impl Followers ===

impl Followers {
    /// Begins to follow runtimes that were found, and leaves those that are gone.
    pub fn keep_up(&mut self, core: &Core) {
        let foreign = core.runtimes().foreign();
        let known = if std::mem::replace(&mut self.begun, true) { Known::Later } else { Known::FromStart };
        self.followed.retain(|name, (runtime, task)| {
            let same = foreign.get(name).is_some_and(|now| Arc::ptr_eq(now, runtime));
            if !same {
                task.abort();
            }
            same
        });
        while self.tasks.try_join_next().is_some() {}
        for (name, runtime) in foreign {
            self.followed.entry(name.clone()).or_insert_with(|| {
                let (core, following) = (core.clone(), Arc::clone(&runtime));
                let watched = core.runtimes().has(&name, feature::WATCH);
                let task = self.tasks.spawn(async move {
                    let watch = async {
                        if watched {
                            core.follow(&name, &following).await;
                        }
                    };
                    tokio::join!(core.attend(&name, &following, known), watch);
                });
                (runtime, task)
            });
        }
    }
}

// === impl Reconciler ===

impl Reconciler {
    /// Looks after one runtime, forever: when it is back after it was away, or no longer has what it was
    /// told, it is told again, and its attachments are checked.
    pub(crate) async fn attend(&self, name: &str, runtime: &Arc<dyn Runtime>, known: Known) {
        let mut asked = self.runtimes.asked();
        // How often it had been away when it was told last.
        let mut told = (known == Known::FromStart).then(|| self.runtimes.absences(name));
        // Whether it says which Networks it has. From one that does not, nothing can be learned about that.
        let mut lists = true;
        let mut pause = Backoff::new(COMPARE_RETRY_DELAY, RETRY_MAX_DELAY);
        loop {
            asked.borrow_and_update();
            let absences = self.runtimes.absences(name);
            let lacks = self.lacks_networks(name).await;
            lists |= !lacks;
            let is_told = told == Some(absences) && !(lists && lacks);
            if self.runtimes.is_well(name) && !is_told {
                tracing::info!(runtime = name, "telling a network runtime that was away what it is to have");
                let mut outcome = Outcome::default();
                let damaged = self.compare_foreign(name, runtime, &mut outcome).await;
                // An interface that was made again too often of late has to wait.
                let later = self.attach_again(&damaged, &mut outcome).await;
                if later.is_some() || outcome.failed > 0 {
                    told = None;
                    let at = later.unwrap_or_else(|| Instant::now() + pause.next(jitter()));
                    tokio::time::sleep_until(at).await;
                    continue;
                }
                told = Some(absences);
                pause.reset();
                lists = !self.lacks_networks(name).await;
                if !lists {
                    tracing::warn!(
                        runtime = name,
                        "a network runtime does not list in its Status the Networks that it has: if it is \
                         started again, it is told at the next pass only"
                    );
                }
            }
            // The sender lives as long as we do.
            let _ = asked.changed().await;
        }
    }

    /// Whether a runtime does not have a Network that it was told of.
    async fn lacks_networks(&self, name: &str) -> bool {
        let told = self.networks.of_runtime(name);
        if !self.runtimes.lacks(name, &told) {
            return false;
        }
        // When it was asked last, it may not have been told yet.
        self.runtimes.ask_again(name).await;
        self.runtimes.lacks(name, &told)
    }

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
