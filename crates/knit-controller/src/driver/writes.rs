//! How the writes of plans are carried out, beside further plans, and what each that is over means for the
//! next one.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use k8s_openapi::api::coordination::v1::Lease;
use knit_objects::{Error, EventNote, jitter};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::Controller;
use crate::cluster::{BlockView, Memory, Numbers, WriteFailure};
use crate::leader::Leading;
use crate::plan::{Action, Lane, Plan, REMEMBER};

/// So often in a row the name of a block is found taken before its range is left alone.
const TAKEN_AFTER: u32 = 3;
/// So many writes of each lane are under way at once.
const CONCURRENT_WRITES: usize = 8;

/// Writes that are under way or wait for their turn. They end with this.
#[derive(Debug)]
pub(super) struct Writers {
    tasks: JoinSet<Done>,
    of_users: Arc<Semaphore>,
    of_networks: Arc<Semaphore>,
    of_nodes: Arc<Semaphore>,
}

/// One write that is to be begun.
pub(super) struct Attempt {
    pub(super) lane: Lane,
    pub(super) work: BoxFuture<'static, Done>,
}

/// A write that is over.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) action: Action,
    /// Nothing if it was not begun, or broken off.
    pub(super) result: Option<Result<(), Error>>,
    /// The highest number as it is kept now, if it was about that.
    pub(super) numbers: Option<Result<Numbers, Error>>,
}

impl Controller {
    /// Begins the writes of a plan. They go on beside the next plans, which leave out what is being written.
    pub(super) fn begin(
        &self,
        plan: Plan,
        memory: &mut Memory,
        leading: &watch::Receiver<Leading>,
        writers: &mut Writers,
    ) {
        for note in plan.notes {
            self.recorder.tell(EventNote::warning(note.regarding, note.reason, "GiveAddresses", note.text));
        }
        for action in plan.actions {
            if memory.writes.begin(action.subject()) {
                writers.begin(self.attempt(action, leading.clone()));
            } else {
                undo(&action, memory);
            }
        }
        self.state.send_modify(|state| {
            state.passes += 1;
            if plan.held_back > 0 && state.held_back == 0 {
                tracing::warn!(
                    nodes = plan.held_back,
                    "most agents appear to be down: no more nodes are tainted; check the API server and the \
                     agents' pods"
                );
            }
            state.held_back = plan.held_back;
            // Nothing is being written, and nothing waits for another attempt.
            state.settled = memory.writes.is_idle() && memory.writes.left_out == 0;
            if !memory.writes.has_errors() {
                state.last_error = None;
            }
        });
    }

    /// What a write that is over means for the next plan.
    pub(super) fn finish(&self, done: Done, memory: &mut Memory) {
        let Done { action, result, numbers } = done;
        let (subject, now) = (action.subject(), self.started.elapsed());
        // One that was refused was not made. Of any other it is not known, and until it is, its range is
        // nobody else's.
        let is_refused = matches!(&result, Some(Err(error)) if error.is_refusal());
        match result {
            Some(Ok(())) => {
                memory.writes.done(&subject);
                self.state.send_modify(|state| state.written += 1);
            }
            // An earlier controller, or an earlier run, has told it.
            Some(Err(Error::AlreadyExists { .. })) if matches!(action, Action::Tell { .. }) => {
                memory.writes.done(&subject);
            }
            // Refused for good, as in a namespace that is being deleted: it is not told again, and holds
            // up nothing.
            Some(Err(error @ (Error::Invalid { .. } | Error::Forbidden { .. } | Error::NotFound { .. })))
                if matches!(action, Action::Tell { .. }) =>
            {
                tracing::debug!(%action, error = &error as &dyn std::error::Error, "not told");
                memory.writes.done(&subject);
            }
            Some(Err(Error::AlreadyExists { .. })) if matches!(action, Action::GiveBlock(_)) => {
                self.name_is_taken(&action, memory, now);
            }
            // The cache was behind: what it shows next decides again.
            Some(Err(Error::Conflict { .. } | Error::AlreadyExists { .. } | Error::NotFound { .. })) => {
                tracing::debug!(%action, "out of date");
                memory.writes.failed(&subject, WriteFailure::OutOfDate, None, (now, jitter()));
                undo_refused(&action, memory, is_refused);
            }
            Some(Err(error)) => {
                self.failed(&error);
                match action.attachment() {
                    Some(place) => {
                        memory.writes.done(&subject);
                        memory.failed.insert(place, now);
                    }
                    None => {
                        let after = error.retry_after();
                        memory.writes.failed(&subject, WriteFailure::Error, after, (now, jitter()));
                    }
                }
                undo_refused(&action, memory, is_refused);
            }
            // The Lease was lost before it.
            None => {
                memory.writes.failed(&subject, WriteFailure::OutOfDate, None, (now, jitter()));
                undo(&action, memory);
            }
        }
        match numbers {
            Some(Ok(numbers)) => memory.numbers = numbers,
            Some(Err(error)) => {
                self.failed(&error);
                let after = error.retry_after();
                memory.writes.failed(&subject, WriteFailure::Error, after, (now, jitter()));
            }
            None => {}
        }
    }

    /// There is an AddressBlock of that name already. Usually the cache is behind, or an attempt before this
    /// one went through without an answer. If it does not show that soon, the name is somebody else's, and
    /// the range is left alone for a while: other ranges are free.
    fn name_is_taken(&self, action: &Action, memory: &mut Memory, now: Duration) {
        let Action::GiveBlock(block) = action else { return };
        let times = memory.writes.failed(&action.subject(), WriteFailure::NameTaken, None, (now, jitter()));
        undo_refused(action, memory, true);
        if times < TAKEN_AFTER {
            tracing::debug!(%action, "out of date");
            return;
        }
        let name = block.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(
            address_block = name,
            node = block.spec.node,
            "an AddressBlock of this name exists, with other contents: its range is left alone for {} s; \
             delete the AddressBlock if nobody needs it",
            REMEMBER.as_secs()
        );
        if let Some(range) = BlockView::of(block.clone()).block {
            memory.taken.push((range.block().clone(), now.saturating_add(REMEMBER)));
        }
    }

    /// One write. It is not begun if the Lease was lost before it: whoever does not lead any more stops in
    /// the middle.
    fn attempt(&self, action: Action, leading: watch::Receiver<Leading>) -> Attempt {
        let (objects, write, text) = (self.objects.clone(), action.write(), action.to_string());
        let numbers = matches!(action, Action::KeepNumber(_)).then(|| self.numbers_key());
        let lane = action.lane();
        let work = async move {
            let leading = *leading.borrow();
            let writing = async {
                tracing::info!(action = text, "write");
                objects.write(&write).await.map(|_| ())
            };
            let result = leading.fence(writing).await;
            let numbers = match numbers {
                Some(key) => Some(objects.get::<Lease>(&key).await.map(Numbers::of)),
                None => None,
            };
            Done { action, result, numbers }
        };
        Attempt { lane, work: work.boxed() }
    }

    pub(super) fn failed(&self, error: &Error) {
        let text = error.with_causes();
        tracing::warn!(error = %text, "a write failed; retrying");
        self.state.send_modify(|state| {
            state.failed += 1;
            state.last_error = Some(text);
        });
    }
}

/// What the planner noted for a write that was not made, or of which that is not known.
fn undo(action: &Action, memory: &mut Memory) {
    undo_refused(action, memory, false);
}

/// The same, if it may be known that it was not made.
fn undo_refused(action: &Action, memory: &mut Memory, is_refused: bool) {
    match action {
        Action::GiveBlock(block) => {
            let name = block.metadata.name.as_deref().unwrap_or_default();
            if is_refused {
                memory.blocks.remove(name);
            } else if let Some(known) = memory.blocks.get_mut(name) {
                known.again = Some(block.clone());
            }
        }
        Action::Tell { policy, .. } => {
            memory.told.remove(policy);
        }
        _ => {}
    }
}

// === impl Writers ===

impl Default for Writers {
    fn default() -> Self {
        let lane = || Arc::new(Semaphore::new(CONCURRENT_WRITES));
        Self { tasks: JoinSet::new(), of_users: lane(), of_networks: lane(), of_nodes: lane() }
    }
}

impl Writers {
    pub(super) fn begin(&mut self, attempt: Attempt) {
        let lane = match attempt.lane {
            Lane::Users => &self.of_users,
            Lane::Networks => &self.of_networks,
            Lane::Nodes => &self.of_nodes,
        };
        let lane = Arc::clone(lane);
        self.tasks.spawn(async move {
            // It is never closed.
            let _turn = lane.acquire_owned().await;
            attempt.work.await
        });
    }

    /// The next write that is over; never, while there is none.
    pub(super) async fn next(&mut self) -> Done {
        match self.tasks.join_next().await {
            Some(Ok(done)) => done,
            Some(Err(error)) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is being shut down, and with it this task.
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}
