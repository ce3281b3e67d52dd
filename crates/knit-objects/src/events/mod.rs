//! Telling people what happened, on the object it happened to (`events.k8s.io/v1`).

mod series;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::backoff::{Backoff, jitter};
use crate::error::chain;
use crate::objects::Objects;
use series::{Collector, Due, Outcome};

/// Something that happened to an object, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct EventNote {
    /// The object.
    pub regarding: ObjectReference,
    /// Whether something is wrong.
    pub warning: bool,
    /// Why, in one word: `AttachFailed`.
    pub reason: String,
    /// What was being done, in one word: `Attach`.
    pub action: String,
    /// What happened and what to do.
    pub note: String,
}

/// Who tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Reporter {
    /// The program, for example `knit.dev/node`.
    pub controller: String,
    /// Which one of them, for example the node's name.
    pub instance: String,
}

/// How much may be told. Repeats are always counted, and the count is written when there is room again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EventLimits {
    /// So many writes about one object at once,
    pub burst: u32,
    /// and one more after each such time.
    pub refill: Duration,
    /// The same note within this time after the last one is a repeat.
    pub window: Duration,
    /// So many different events are remembered.
    pub series: usize,
}

/// Writes events in its own time. Clones share it; it ends with the last one.
#[derive(Clone, Debug)]
pub struct EventRecorder {
    notes: mpsc::Sender<EventNote>,
    lost: Arc<AtomicU64>,
    _task: Arc<AbortOnDrop>,
}

#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

/// Notes that wait before one is dropped.
const QUEUE: usize = 1024;

// === impl EventNote ===

impl EventNote {
    /// Something that went as it should.
    #[must_use]
    pub fn normal(regarding: ObjectReference, reason: &str, action: &str, note: impl Into<String>) -> Self {
        let (reason, action) = (reason.to_owned(), action.to_owned());
        Self { regarding, warning: false, reason, action, note: note.into() }
    }

    /// Something that is wrong.
    #[must_use]
    pub fn warning(regarding: ObjectReference, reason: &str, action: &str, note: impl Into<String>) -> Self {
        Self { warning: true, ..Self::normal(regarding, reason, action, note) }
    }
}

// === impl EventLimits ===

impl Default for EventLimits {
    fn default() -> Self {
        Self { burst: 25, refill: Duration::from_secs(60), window: Duration::from_secs(360), series: 4096 }
    }
}

// === impl EventRecorder ===

impl EventRecorder {
    /// Starts. Needs a tokio runtime.
    #[must_use]
    pub fn start(objects: &Objects, reporter: Reporter, limits: EventLimits) -> Self {
        let (notes, receiver) = mpsc::channel(QUEUE);
        let collector = Collector::new(reporter, limits);
        let task = tokio::spawn(run(objects.clone(), collector, receiver)).abort_handle();
        Self { notes, lost: Arc::default(), _task: Arc::new(AbortOnDrop(task)) }
    }

    /// Tells. Returns at once; if far too much is told, notes are dropped and counted.
    pub fn tell(&self, note: EventNote) {
        tracing::debug!(
            object = note.regarding.name.as_deref().unwrap_or_default(),
            reason = note.reason,
            note = note.note,
            "event"
        );
        if self.notes.try_send(note).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many notes were dropped.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn run(objects: Objects, mut collector: Collector, mut notes: mpsc::Receiver<EventNote>) {
    let mut backoff = Backoff::default();
    // Nothing is written before this time, after the API did not answer.
    let mut paused_until = None::<Instant>;
    loop {
        let (due, again) =
            if paused_until.is_some() { (Vec::new(), None) } else { collector.due(Timestamp::now()) };
        for due in due {
            let outcome = write(&objects, &due).await;
            collector.outcome(&due, outcome);
            match outcome {
                Outcome::TryAgain => paused_until = Some(Instant::now() + backoff.next(jitter())),
                Outcome::Written | Outcome::Drop => backoff.reset(),
            }
        }
        let wake = paused_until.or_else(|| {
            let wait = again?.duration_since(Timestamp::now());
            Some(Instant::now() + Duration::try_from(wait).unwrap_or_default())
        });
        tokio::select! {
            note = notes.recv() => match note {
                Some(note) => collect(&mut collector, note, &mut notes),
                None => return,
            },
            () = sleep_until(wake) => paused_until = None,
        }
    }
}

/// Takes this note and all that wait with it, so that repeats become one write.
fn collect(collector: &mut Collector, first: EventNote, notes: &mut mpsc::Receiver<EventNote>) {
    let mut next = Some(first);
    while let Some(note) = next {
        let now = Timestamp::now();
        let nanoseconds = u64::try_from(now.as_nanosecond()).unwrap_or_default();
        // Two processes may tell in the same instant.
        let unique = nanoseconds ^ (u64::from(std::process::id()) << 40);
        collector.note(note, now, unique);
        next = notes.try_recv().ok();
    }
}

async fn write(objects: &Objects, due: &Due) -> Outcome {
    match objects.write(&due.write).await {
        Ok(_) => Outcome::Written,
        Err(error) if error.retryable() => Outcome::TryAgain,
        Err(error) => {
            tracing::warn!(error = %chain(&error), "an event was not written");
            Outcome::Drop
        }
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
