//! When to work: at once after a quiet time, and not too often after that (rule 59).
//!
//! Sans-IO: it is told the time and says when it wants to be asked again.

use std::time::{Duration, Instant};

/// How often to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The least time between two calls to the backend. A change after a quieter time is sent at once; what
    /// comes in between waits, and goes together.
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
    /// When everything is to be looked at because somebody else may have changed it.
    look_at: Option<Instant>,
    /// The least time between two such looks.
    look_gap: Duration,
}

/// The least time between two looks at what somebody else may have changed, and the most that it doubles to.
const LOOK_FIRST: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(60);

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
        Self {
            pace,
            last: None,
            last_full: None,
            requested: None,
            need_full: true,
            failures: 0,
            look_at: None,
            look_gap: LOOK_FIRST,
        }
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

    /// Somebody else may have changed what is there: everything is looked at, at once after a quiet time.
    /// Whoever does it again and again has it looked at ever more seldom: it is work that grows with what is
    /// served.
    pub fn look_again(&mut self, now: Instant) {
        if self.look_at.is_some() {
            return;
        }
        // Before the first sync there is nothing that could have been changed.
        let Some(last) = self.last_full else { return };
        let soon = now < last + self.look_gap * 4;
        self.look_gap = if soon { (self.look_gap * 2).min(LOOK_MAX) } else { LOOK_FIRST };
        self.look_at = Some(if soon { (last + self.look_gap / 2).max(now) } else { now });
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
        if self.failures == 0 && self.look_at.is_some_and(|at| at <= now) {
            return Due::Full;
        }
        match at {
            Some(at) if at <= now => {
                let full = self.need_full || full_at.is_some_and(|at| at <= now);
                if full { Due::Full } else { Due::Changes }
            }
            at => Due::At(at.into_iter().chain(full_at).chain(self.look_at).min()),
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
            self.look_at = None;
        }
    }

    /// A call to the backend failed: the next one is a full sync, after a while.
    pub fn failed(&mut self, now: Instant) {
        self.last = Some(now);
        self.failures += 1;
        self.need_full = true;
        self.look_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_else_changed_is_looked_at_at_once_and_a_fight_ever_more_seldom() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Pace::default());
        pacer.request(start);
        pacer.done(start, true);
        let mut now = start + Duration::from_secs(600);
        pacer.look_again(now);
        assert_eq!(pacer.due(now), Due::Full);
        pacer.done(now, true);
        let (begin, mut looks) = (now, 0);
        while now < begin + Duration::from_secs(600) {
            pacer.look_again(now);
            match pacer.due(now) {
                Due::Full => {
                    looks += 1;
                    pacer.done(now, true);
                }
                Due::At(at) => now = at.expect("a time"),
                Due::Changes => panic!("nothing has changed"),
            }
        }
        assert!((15..40).contains(&looks), "{looks} looks in ten minutes");
    }
}
