//! How long requests by NRI may wait, all of them together.
//!
//! A container runtime holds one lock for the events of all pods of its node: what one tenant's pod waits
//! for, every pod that starts waits for. But a pod that is refused comes back ten seconds later or more,
//! although what it lacks (the first set-up of its Network here, a block of addresses) is often there in one.
//! So waiting is paid from an account that fills slowly: a pod that waits now and then gets its Network at
//! the first try, and pods that wait for what never comes cost the others no more than a share of the time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_types::sync::Locked as _;
use tokio::time::Instant;

/// Of this many parts of the time, one may be waited.
const PARTS: u32 = 10;
/// The most that is saved up.
const MAX_SAVED: Duration = Duration::from_secs(3);

/// What all requests may wait together.
#[derive(Debug)]
pub(crate) struct NriPatience {
    saved: Mutex<Saved>,
}

#[derive(Clone, Copy, Debug)]
struct Saved {
    time: Duration,
    at: Instant,
}

/// What one request may wait. What it does not use is given back when this is dropped; what it takes beyond
/// that is paid for by those that come next.
#[derive(Debug)]
pub(crate) struct Granted {
    from: Arc<NriPatience>,
    wait: Duration,
    /// What was taken from the account for it.
    paid: Duration,
    /// A request that takes no longer than this has not waited.
    free: Duration,
    began: Instant,
}

// === impl Saved ===

impl Saved {
    fn now(self, now: Instant) -> Self {
        let more = now.saturating_duration_since(self.at) / PARTS;
        Self { time: self.time.saturating_add(more).min(MAX_SAVED), at: now }
    }
}

// === impl NriPatience ===

impl Default for NriPatience {
    fn default() -> Self {
        Self { saved: Mutex::new(Saved { time: MAX_SAVED, at: Instant::now() }) }
    }
}

impl NriPatience {
    /// What a request may wait: at least `free`, which it may always, and otherwise what is saved up to
    /// `most`.
    pub(crate) fn take(self: &Arc<Self>, free: Duration, most: Duration) -> Granted {
        let now = Instant::now();
        let mut saved = self.saved.locked();
        let have = saved.now(now);
        let wait = have.time.min(most).max(free);
        let paid = wait.min(have.time);
        *saved = Saved { time: have.time - paid, ..have };
        Granted { from: Arc::clone(self), wait, paid, free, began: now }
    }
}

// === impl Granted ===

impl Granted {
    /// How long the request may wait.
    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        let used = if took <= self.free { Duration::ZERO } else { took };
        let mut saved = self.from.saved.locked();
        let have = saved.now(Instant::now());
        let left = have.time.saturating_add(self.paid).saturating_sub(used);
        *saved = Saved { time: left.min(MAX_SAVED), ..have };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::time::advance;

    use super::*;

    const FREE: Duration = Duration::from_millis(100);
    const MOST: Duration = Duration::from_millis(1200);

    #[tokio::test(start_paused = true)]
    async fn one_that_waits_now_and_then_waits_long_and_the_others_hardly() {
        let account = Arc::new(NriPatience::default());
        let mut waits = Vec::new();
        for _ in 0..5 {
            let granted = account.take(FREE, MOST);
            advance(granted.wait()).await;
            waits.push(granted.wait());
        }
        assert_eq!(waits[..2], [MOST, MOST]);
        assert!(waits[3] < FREE * 3, "{waits:?}");
        advance(MAX_SAVED * PARTS).await;
        assert_eq!(account.take(FREE, MOST).wait(), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_do_not_wait_cost_nothing() {
        let account = Arc::new(NriPatience::default());
        for _ in 0..1000 {
            let granted = account.take(FREE, MOST);
            assert_eq!(granted.wait(), MOST);
            advance(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_took_longer_than_it_might_cost_the_others_nothing() {
        let account = Arc::new(NriPatience::default());
        let granted = account.take(FREE, MOST);
        advance(MOST * 2).await;
        drop(granted);
        let next = account.take(FREE, MOST);
        assert_eq!(next.wait(), MAX_SAVED - MOST * 2 + MOST * 2 / PARTS);
        assert_eq!(account.take(FREE, MOST).wait(), FREE);
    }

    proptest! {
        /// However long requests take and whatever is between them.
        #[test]
        fn all_waiting_is_a_share_of_the_time(
            requests in prop::collection::vec((0_u64..3000, 0_u64..2000), 1..200),
        ) {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_time().start_paused(true).build().expect("a runtime").block_on(async {
                let (account, begin) = (Arc::new(NriPatience::default()), Instant::now());
                let mut waited = Duration::ZERO;
                for (wants, pause) in requests {
                    let granted = account.take(FREE, MOST);
                    let wait = Duration::from_millis(wants).min(granted.wait());
                    advance(wait).await;
                    drop(granted);
                    waited += wait.saturating_sub(FREE);
                    advance(Duration::from_millis(pause)).await;
                }
                assert!(waited <= MAX_SAVED + begin.elapsed() / PARTS, "{waited:?} of {:?}", begin.elapsed());
            });
        }
    }
}
