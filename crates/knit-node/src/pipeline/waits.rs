//! How long a request waits for what is not there yet: a list, an object, a block, a Network that is set up.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::patience::{Granted, NriPatience};
use crate::config::CoreConfig;
use crate::request::{Door, PodRequest};

/// How many times as long it may wait for policies: they are a pod's own work, but may also wait for a list.
const POLICY_WAIT_FACTOR: u32 = 5;

/// How much of the time that a container runtime gives a request by NRI may be spent waiting.
const NRI_WAITING: f64 = 0.6;

/// The limits of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    deadline: Instant,
    /// Where it is not to wait as long as its caller does: who asks comes again.
    soon: Option<Instant>,
    nri_wait: Duration,
}

// === impl Waits ===

impl Waits {
    /// Those of a request whose caller waits until `deadline`, and what it has of the time that all of its
    /// kind may wait, for as long as it runs.
    pub(crate) fn of(
        request: &PodRequest,
        deadline: Instant,
        config: &CoreConfig,
        patience: &Arc<NriPatience>,
    ) -> (Self, Option<Granted>) {
        let nri_wait = config.nri_wait;
        let granted = (request.door == Door::Nri).then(|| {
            let now = Instant::now();
            // The work itself needs its time, too.
            let most = deadline.saturating_duration_since(now).mul_f64(NRI_WAITING);
            (now, patience.take(nri_wait, most))
        });
        let soon = granted.as_ref().map(|(now, granted)| deadline.min(*now + granted.wait()));
        (Self { deadline, soon, nri_wait }, granted.map(|(_, granted)| granted))
    }

    /// When its caller stops waiting: by then all work must be done.
    pub(crate) fn deadline(self) -> Instant {
        self.deadline
    }

    /// Until when it waits for something that others wait for no longer than `usual`.
    pub(crate) fn at_most(self, usual: Duration) -> Instant {
        let usual = self.deadline.min(Instant::now() + usual);
        self.soon.map_or(usual, |soon| soon.min(usual))
    }

    /// The end of all its waiting, where it must not wait: what takes longer goes on without it.
    pub(crate) fn soon(self) -> Option<Instant> {
        self.soon
    }

    /// Until when it waits for policies.
    pub(crate) fn admitted_by(self) -> Instant {
        match self.soon {
            Some(_) => self.deadline.min(Instant::now() + self.nri_wait * POLICY_WAIT_FACTOR),
            None => self.deadline,
        }
    }
}
