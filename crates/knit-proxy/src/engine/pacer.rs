//! When to work: at once after a quiet time, and not too often after that (rule 59).
//!
//! Sans-IO: it is told the time and says when it wants to be asked again.

use std::time::{Duration, Instant};

/// How often to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The least time between two calls to the backend. A change after a quieter time is sent at once; what comes in
    /// between waits, and goes together.
    pub min_interval: Duration,
    /// The longest time without a full sync (rule 57).
    pub full_interval: Duration,
    /// How long to wait after a failure. It doubles with each further one.
    pub retry_first: Duration,
    /// The longest wait after a failure.
    pub retry_max: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            min_interval: Duration::from_secs(1),
            full_interval: Duration::from_secs(3600),
            retry_first: Duration::from_secs(1),
            retry_max: Duration::from_secs(30),
        }
    }
}

impl Pace {
    /// How long to wait after the n-th failure in a row, counting from one.
    #[must_use]
    pub fn backoff(&self, failures: u32) -> Duration {
        let doubled = self.retry_first.saturating_mul(1 << failures.saturating_sub(1).min(20));
        doubled.min(self.retry_max)
    }
}

/// Says when it is time to call the backend, and whether for a full sync.
#[derive(Debug, Clone)]
pub struct Pacer {
    pace: Pace,
    /// The end of the last call.
    last: Option<Instant>,
    last_full: Option<Instant>,
    requested: Option<Instant>,
    need_full: bool,
    failures: u32,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Nothing before this time; nothing at all without a request if there is none.
    At(Option<Instant>),
    /// Send the changes.
    Changes,
    /// Send everything.
    Full,
}

impl Pacer {
    /// A pacer that starts with a full sync as soon as one is requested.
    #[must_use]
    pub fn new(pace: Pace) -> Self {
        Self { pace, last: None, last_full: None, requested: None, need_full: true, failures: 0 }
    }

    /// How often it works.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Something changed.
    pub fn request(&mut self, now: Instant) {
        self.requested.get_or_insert(now);
    }

    /// Since when something has been waiting to be done.
    #[must_use]
    pub fn waiting_since(&self) -> Option<Instant> {
        self.requested
    }

    /// What to do now.
    #[must_use]
    pub fn due(&self, now: Instant) -> Due {
        let after_last = |wait: Duration| self.last.map_or(now, |last| last + wait);
        let full_at = self.last_full.map(|at| at + self.pace.full_interval);
        let at = match self.requested {
            _ if self.failures > 0 => Some(after_last(self.pace.backoff(self.failures))),
            Some(_) => Some(after_last(self.pace.min_interval)),
            None => full_at,
        };
        match at {
            Some(at) if at <= now => {
                let full = self.need_full || full_at.is_some_and(|at| at <= now);
                if full { Due::Full } else { Due::Changes }
            }
            at => Due::At(at.into_iter().chain(full_at).min()),
        }
    }

    /// A call to the backend went well.
    pub fn done(&mut self, now: Instant, full: bool) {
        self.last = Some(now);
        self.requested = None;
        self.failures = 0;
        if full {
            self.last_full = Some(now);
            self.need_full = false;
        }
    }

    /// A call to the backend failed: the next one is a full sync, after a while.
    pub fn failed(&mut self, now: Instant) {
        self.last = Some(now);
        self.failures += 1;
        self.need_full = true;
    }
}
