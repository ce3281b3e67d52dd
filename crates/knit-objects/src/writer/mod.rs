//! Writes off the path: the latest value per object is written in its own time, however long the API is away.

mod queue;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use queue::QueueFull;

use crate::backoff::jitter;
use crate::error::{Error, Result, chain};
use crate::key::Target;
use crate::objects::Objects;
use crate::write::Write;
use queue::{Next, Queue};

/// Writes what objects should look like, behind the caller's back. Clones share the queue; it ends with the
/// last one, and what is not written by then is dropped: [`StatusWriter::flush`] first.
///
/// Each object has one place in the queue. Setting it again replaces what waits, so a caller that says the
/// same object's state a hundred times while the API is away causes one write when it is back. Writes to one
/// object happen in order, those to different objects side by side. What can succeed later is tried again
/// with growing waits; what cannot (the object is gone, the API refuses it) is logged and dropped: the next
/// value is a new chance. Use [`Write::apply`], [`Write::status`] and [`Write::delete`], which may be
/// repeated.
#[derive(Clone, Debug)]
pub struct StatusWriter {
    shared: Arc<Shared>,
    _workers: Arc<JoinSet<()>>,
}

/// How a [`StatusWriter`] is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WriterState {
    /// Objects that wait or are being written.
    pub waiting: usize,
    /// Writes that succeeded.
    pub written: u64,
    /// Attempts that failed and were, or will be, repeated.
    pub retried: u64,
    /// Values that were dropped because no repetition can help.
    pub refused: u64,
    /// Why the last attempt that failed did. None after one that succeeded.
    pub last_error: Option<String>,
}

#[derive(Debug)]
struct Shared {
    objects: Objects,
    queue: Mutex<Queue>,
    wake: Notify,
    state: watch::Sender<WriterState>,
}

/// So many objects may wait.
const CAPACITY: usize = 10_000;
/// So many are written at once.
const WORKERS: usize = 4;

// === impl StatusWriter ===

impl StatusWriter {
    /// Starts. Needs a tokio runtime.
    #[must_use]
    pub fn start(objects: &Objects) -> Self {
        Self::with_capacity(objects, CAPACITY)
    }

    /// Starts, with room for so many different objects. Needs a tokio runtime.
    #[must_use]
    pub fn with_capacity(objects: &Objects, capacity: usize) -> Self {
        let shared = Arc::new(Shared {
            objects: objects.clone(),
            queue: Mutex::new(Queue::new(capacity)),
            wake: Notify::new(),
            state: watch::Sender::default(),
        });
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            workers.spawn(Arc::clone(&shared).work());
        }
        Self { shared, _workers: Arc::new(workers) }
    }

    /// This is what should be written of this object now. Returns at once.
    pub fn set(&self, write: Write) -> std::result::Result<(), QueueFull> {
        self.set_all(write.target().clone(), vec![write])
    }

    /// These, in this order, are what should be written of this object now; for example the object, and then
    /// its status. If one fails, all are repeated. Returns at once.
    pub fn set_all(&self, target: Target, writes: Vec<Write>) -> std::result::Result<(), QueueFull> {
        self.shared.change(|queue| queue.set(target, writes))?;
        self.shared.wake.notify_one();
        Ok(())
    }

    /// How it is doing, now and on changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<WriterState> {
        self.shared.state.subscribe()
    }

    /// Waits until nothing waits any more.
    pub async fn flush(&self, deadline: Instant) -> Result<()> {
        let start = Instant::now();
        let mut state = self.state();
        let empty = state.wait_for(|state| state.waiting == 0);
        match tokio::time::timeout_at(deadline, empty).await {
            Ok(_) => Ok(()),
            Err(_) => {
                let state = self.shared.state.borrow();
                let because = state.last_error.as_ref().map(|e| format!(" ({e})")).unwrap_or_default();
                let what = format!("the end of {} writes", state.waiting);
                Err(Error::Timeout { what, waited: start.elapsed(), because })
            }
        }
    }
}

// === impl Shared ===

impl Shared {
    async fn work(self: Arc<Self>) {
        loop {
            match self.change(|queue| queue.next(Instant::now())) {
                Next::Write(target, writes) => {
                    // There may be more to do for another worker.
                    self.wake.notify_one();
                    self.write(target, writes).await;
                    self.wake.notify_one();
                }
                Next::Wait(None) => self.wake.notified().await,
                Next::Wait(Some(until)) => {
                    tokio::select! {
                        () = self.wake.notified() => {}
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    async fn write(&self, target: Target, writes: Vec<Write>) {
        for write in &writes {
            let Err(error) = self.objects.write(write).await else {
                self.state.send_modify(|state| {
                    state.written += 1;
                    state.last_error = None;
                });
                continue;
            };
            let text = chain(&error);
            if error.retryable() {
                tracing::debug!(object = %target, error = %text, "not written; it is tried again");
                self.state.send_modify(|state| {
                    state.retried += 1;
                    state.last_error = Some(text);
                });
                let at_least = error.retry_after().unwrap_or(Duration::ZERO);
                self.change(|queue| {
                    queue.failed(&target, writes.clone(), jitter(), at_least, Instant::now());
                });
                return;
            }
            tracing::warn!(object = %target, error = %text, "cannot be written; the next value is a new \
                chance");
            self.state.send_modify(|state| {
                state.refused += 1;
                state.last_error = Some(text);
            });
            break;
        }
        self.change(|queue| queue.done(&target));
    }

    /// Changes the queue, and tells how many wait afterwards.
    fn change<T>(&self, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut queue);
        let waiting = queue.len();
        // Under the lock, so that the last number told is the last that was true.
        self.state.send_if_modified(|state| std::mem::replace(&mut state.waiting, waiting) != waiting);
        result
    }
}
