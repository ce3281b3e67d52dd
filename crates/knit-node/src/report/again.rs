//! Writes that fail are tried again after a pause that doubles, and are logged when that changes only: an API
//! server that is away for an hour is two lines of log, and not a line every two seconds from every node.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// The pause after the first failure.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// The longest pause after failures of one of many.
const RETRY_MAX_DELAY: Duration = Duration::from_secs(300);

/// One thing that is written again and again.
#[derive(Debug)]
pub(super) struct WriteRetry {
    what: &'static str,
    longest: Duration,
    problem: Option<String>,
    failures: u32,
}

/// Those of many, such as sandboxes, of which something failed: each waits for its own turn, and holds up
/// nobody else's.
#[derive(Debug)]
pub(super) struct Retries<K>(BTreeMap<K, (Instant, Duration)>);

/// What is to be logged.
#[derive(Debug, Eq, PartialEq)]
enum WriteNews {
    None,
    Fails,
    FailsOtherwise,
    Works,
}

// === impl WriteRetry ===

impl WriteRetry {
    pub(super) fn new(what: &'static str, longest: Duration) -> Self {
        Self { what, longest, problem: None, failures: 0 }
    }

    /// Takes the result of a write; whether it went through.
    pub(super) fn wrote<T>(&mut self, result: knit_objects::Result<T>) -> bool {
        let what = self.what;
        let problem = result.err().map(|error| error.with_causes());
        let works = problem.is_none();
        match self.note(problem) {
            WriteNews::None => {}
            WriteNews::Works => tracing::info!("{what} can be written again"),
            WriteNews::Fails | WriteNews::FailsOtherwise => {
                let problem = self.problem.as_deref().unwrap_or_default();
                tracing::warn!("cannot write {what} yet, retrying: {problem}");
            }
        }
        works
    }

    /// How long to wait after a failure.
    pub(super) fn pause(&self) -> Duration {
        let doublings = self.failures.saturating_sub(1).min(16);
        RETRY_DELAY.saturating_mul(1 << doublings).min(self.longest)
    }

    fn note(&mut self, problem: Option<String>) -> WriteNews {
        let before = std::mem::replace(&mut self.problem, problem);
        self.failures = if self.problem.is_some() { self.failures.saturating_add(1) } else { 0 };
        match (before, &self.problem) {
            (None, None) => WriteNews::None,
            (Some(_), None) => WriteNews::Works,
            (None, Some(_)) => WriteNews::Fails,
            (Some(before), Some(now)) if before == *now => WriteNews::None,
            (Some(_), Some(_)) => WriteNews::FailsOtherwise,
        }
    }
}

// === impl Retries ===

impl<K: Clone + Ord> Retries<K> {
    /// None yet.
    pub(super) fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|(at, _)| *at).min()
    }

    /// Those that are due.
    pub(super) fn due(&self, now: Instant) -> impl Iterator<Item = K> {
        self.0.iter().filter(move |(_, (at, _))| *at <= now).map(|(key, _)| key.clone())
    }

    /// Takes what became of one: whether it is done.
    pub(super) fn tried(&mut self, key: K, done: bool) {
        if done {
            self.0.remove(&key);
            return;
        }
        let before = self.0.get(&key);
        let pause = before.map_or(RETRY_DELAY, |(_, pause)| (*pause * 2).min(RETRY_MAX_DELAY));
        self.0.insert(key, (Instant::now() + pause, pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_that_fails_waits_longer_each_time_and_holds_up_no_other() {
        let mut retries = Retries::new();
        assert_eq!(retries.next(), None);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            retries.tried("a", false);
            let next = retries.next().expect("it is due again");
            pauses.push((next - Instant::now()).as_secs());
            assert_eq!(retries.due(Instant::now()).count(), 0);
            tokio::time::advance(next - Instant::now()).await;
            assert_eq!(retries.due(Instant::now()).collect::<Vec<_>>(), ["a"]);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 128, 256, 300]);
        retries.tried("b", false);
        assert_eq!(retries.due(Instant::now()).collect::<Vec<_>>(), ["a"]);
        retries.tried("a", true);
        let next = retries.next().expect("the other one");
        assert_eq!((next - Instant::now()).as_secs(), 2);
    }

    #[test]
    fn a_lease_that_cannot_be_renewed_was_logged_every_two_seconds() {
        let mut again = WriteRetry::new("the Lease", Duration::from_secs(25));
        let away = || Some("connection refused".to_owned());
        let mut pauses = Vec::new();
        let mut lines = 0;
        for _ in 0..8 {
            lines += u32::from(again.note(away()) != WriteNews::None);
            pauses.push(again.pause().as_secs());
        }
        assert_eq!(pauses, [2, 4, 8, 16, 25, 25, 25, 25], "in time for a Lease that holds for 100 s");
        assert_eq!(lines, 1);
        assert_eq!(again.note(Some("forbidden".into())), WriteNews::FailsOtherwise);
        assert_eq!(again.note(None), WriteNews::Works);
        assert_eq!(again.note(None), WriteNews::None);
        assert_eq!((again.note(away()), again.pause().as_secs()), (WriteNews::Fails, 2));
    }
}
