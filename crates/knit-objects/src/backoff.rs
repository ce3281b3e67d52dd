//! How long to wait before the next attempt. Pure: the caller brings the randomness, or takes [`jitter`].

use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// Waits that double, from a first one up to a longest one.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// From `first`, doubling, up to `longest`.
    #[must_use]
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next wait. `jitter` is between 0 and 1, and spreads the wait between its half and its whole, so
    /// that a thousand nodes do not come back in the same instant.
    pub fn next(&mut self, jitter: f64) -> Duration {
        let wait = self.next.min(self.longest);
        self.next = (wait * 2).min(self.longest);
        wait.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
    }

    /// It worked: start again with the first wait.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

impl Default for Backoff {
    /// A tenth of a second up to fifteen seconds.
    fn default() -> Self {
        Self::new(Duration::from_millis(100), Duration::from_secs(15))
    }
}

/// A number between 0 and 1 that nobody can foresee.
#[must_use]
pub fn jitter() -> f64 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    // 53 bits are what a double holds.
    #[expect(clippy::cast_precision_loss, reason = "both numbers fit a double")]
    let fraction = (random >> 11) as f64 / (1_u64 << 53) as f64;
    fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_start_again() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(350));
        let mut waits = || (0..4).map(|_| backoff.next(1.0).as_millis()).collect::<Vec<_>>();
        assert_eq!(waits(), [100, 200, 350, 350]);
        backoff.reset();
        assert_eq!(backoff.next(0.0).as_millis(), 50);
        for _ in 0..100 {
            assert!((0.0..=1.0).contains(&jitter()));
        }
    }
}
