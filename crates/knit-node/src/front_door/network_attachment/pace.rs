//! When something that failed is tried again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use knit_types::NetworkName;

use crate::world::Labels;

/// The first pause.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// The pause while what a refusal depends on has changed.
const CHANGED_RETRY_DELAY: Duration = Duration::from_secs(5);
/// The longest pause where waiting may help.
const RETRY_MAX_DELAY: Duration = Duration::from_secs(30);
/// The longest pause where only somebody's change helps.
const HOPELESS_RETRY_MAX_DELAY: Duration = Duration::from_secs(300);

/// What a refusal depends on.
#[derive(Clone, Debug, Default)]
pub(super) struct RefusalFacts {
    /// Counts changes of the Networks.
    pub(super) networks: u64,
    /// The labels of the namespace.
    pub(super) labels: Option<Arc<Labels>>,
    /// The pod's interfaces and their Networks.
    pub(super) has: Vec<(String, NetworkName)>,
}

/// How often something failed, and what the last attempt was made on.
#[derive(Clone, Debug)]
pub(super) struct AttemptPace {
    pub(super) attempts: u32,
    last: Instant,
    pause: Duration,
    facts: RefusalFacts,
}

// === impl AttemptPace ===

impl AttemptPace {
    /// One more failure. `hopeless` if only somebody's change helps.
    pub(super) fn failed(before: Option<&Self>, facts: RefusalFacts, hopeless: bool, now: Instant) -> Self {
        let attempts = before.map_or(0, |pace| pace.attempts).saturating_add(1);
        let longest = if hopeless { HOPELESS_RETRY_MAX_DELAY } else { RETRY_MAX_DELAY };
        let pause = RETRY_DELAY.saturating_mul(1 << (attempts - 1).min(16)).min(longest);
        Self { attempts, last: now, pause, facts }
    }

    /// When it may be tried again.
    pub(super) fn ready(&self, facts: &RefusalFacts) -> Instant {
        self.last + if self.facts == *facts { self.pause } else { self.pause.min(CHANGED_RETRY_DELAY) }
    }
}

impl PartialEq for RefusalFacts {
    fn eq(&self, other: &Self) -> bool {
        let labels = match (&self.labels, &other.labels) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs) || ours == theirs,
            (None, None) => true,
            _ => false,
        };
        labels && self.networks == other.networks && self.has == other.has
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_double_and_a_change_shortens_them() {
        let (now, facts) = (Instant::now(), RefusalFacts::default());
        let mut pace = AttemptPace::failed(None, facts.clone(), true, now);
        let mut pauses = Vec::new();
        for _ in 0..11 {
            pauses.push((pace.ready(&facts) - now).as_secs());
            pace = AttemptPace::failed(Some(&pace), facts.clone(), true, now);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        let changed = RefusalFacts { networks: 1, ..facts.clone() };
        assert_eq!((pace.ready(&changed) - now).as_secs(), 5, "somebody may have allowed it");
        let labelled = RefusalFacts { labels: Some(Arc::default()), ..facts.clone() };
        assert_eq!((pace.ready(&labelled) - now).as_secs(), 5);
        let starved = AttemptPace::failed(Some(&pace), facts.clone(), false, now);
        assert_eq!((starved.ready(&facts) - now).as_secs(), 30, "an address may become free");
    }
}
