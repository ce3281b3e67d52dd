//! How fast the controller writes: a bucket of tokens per kind of write, by the steady clock.
//!
//! A burst goes through at once, more than that as fast as tokens come back. One kind that has much to write
//! does not hold up another.

use std::time::Duration;

/// How fast one kind may be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// A token comes back after this time.
    pub(crate) every: Duration,
    /// So many tokens there are at most.
    pub(crate) burst: u32,
}

/// Tokens of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bucket {
    /// When all tokens will be back, if none is taken.
    full_at: Duration,
}

/// The buckets of all kinds that have one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Blocks that are given, and attempts to find one.
    pub blocks: Bucket,
    /// Attempts to find a block for a node that was refused one, of all Networks but the default one, which
    /// take turns.
    pub block_retries: Bucket,
    /// The same of the default Network, which comes before all others.
    pub default_retries: Bucket,
    /// Blocks that are taken back.
    pub releases: Bucket,
    /// Blocks that are asked for, taken or left because their nodes can do without them or not.
    pub reclaims: Bucket,
    /// Statuses of Networks.
    pub statuses: Bucket,
    /// Taints of Nodes: each is an event for everybody who watches Nodes.
    pub taints: Bucket,
}

/// 200 blocks per second: 5,000 nodes that join at once are not served in less than 25 s.
pub(crate) const BLOCKS: Rate = Rate { every: Duration::from_millis(5), burst: 25 };
/// 20 per second.
pub(crate) const BLOCK_RETRIES: Rate = Rate { every: Duration::from_millis(50), burst: 25 };
/// 100 per second.
pub(crate) const RELEASES: Rate = Rate { every: Duration::from_millis(10), burst: 50 };
/// 50 per second.
pub(crate) const RECLAIMS: Rate = Rate { every: Duration::from_millis(20), burst: 50 };
/// 50 per second, and one for each of a hundred Networks at once.
pub(crate) const STATUSES: Rate = Rate { every: Duration::from_millis(20), burst: 100 };
/// 20 per second.
pub(crate) const TAINTS: Rate = Rate { every: Duration::from_millis(50), burst: 20 };

/// 200 per second: as many as pods that come and go in a large cluster ask for.
pub(crate) const PEER_SLICES: Rate = Rate { every: Duration::from_millis(5), burst: 200 };
/// 50 per second: users' NetworkAttachments that are told their node.
pub(crate) const ATTACHMENTS: Rate = Rate { every: Duration::from_millis(20), burst: 50 };
/// 100 per second. Nodes and blocks that come together are in one slice.
pub(crate) const SLICES: Rate = Rate { every: Duration::from_millis(10), burst: 100 };

/// Has those that are not `served` yet come before the others, which stand in front. What changes all the
/// time does not keep the rest waiting when there are not tokens for all.
pub(crate) fn take_turns<T>(due: &mut [T], served: impl Fn(&T) -> bool) {
    let first = due.partition_point(served);
    due.rotate_left(first);
}

// === impl Bucket ===

impl Bucket {
    /// Takes a token.
    ///
    /// # Errors
    /// When there is none: when the next one is back.
    pub(crate) fn take(&mut self, rate: Rate, now: Duration) -> Result<(), Duration> {
        let full_at = self.full_at.max(now).saturating_add(rate.every);
        let latest = now.saturating_add(rate.every * rate.burst);
        if full_at > latest {
            return Err(now.saturating_add(full_at - latest));
        }
        self.full_at = full_at;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_burst_goes_through_and_then_one_per_interval() {
        let rate = Rate { every: Duration::from_millis(10), burst: 3 };
        let (mut bucket, start) = (Bucket::default(), Duration::from_secs(100));
        for _ in 0..3 {
            assert_eq!(bucket.take(rate, start), Ok(()));
        }
        let next = start + rate.every;
        assert_eq!(bucket.take(rate, start), Err(next));
        assert_eq!(bucket.take(rate, next), Ok(()));
        assert_eq!(bucket.take(rate, next), Err(next + rate.every));
    }

    #[test]
    fn who_was_served_waits_for_the_others() {
        let mut due = [1, 2, 4, 7];
        take_turns(&mut due, |one| *one <= 2);
        assert_eq!(due, [4, 7, 1, 2]);
        let mut due = [1, 2];
        take_turns(&mut due, |one| *one <= 7);
        assert_eq!(due, [1, 2]);
    }

    proptest! {
        #[test]
        fn never_more_than_the_burst_and_what_came_back(
            pauses in prop::collection::vec(0_u64..40, 1..100), burst in 1_u32..8
        ) {
            let rate = Rate { every: Duration::from_millis(10), burst };
            let (mut bucket, start) = (Bucket::default(), Duration::from_secs(5));
            let (mut now, mut taken) = (start, 0_u64);
            for pause in pauses {
                now += Duration::from_millis(pause);
                match bucket.take(rate, now) {
                    Ok(()) => taken += 1,
                    Err(next) => prop_assert!(next > now && next <= now + rate.every),
                }
                let back = u64::try_from((now - start).as_millis()).expect("short") / 10;
                prop_assert!(taken <= u64::from(burst) + back);
            }
        }
    }
}
