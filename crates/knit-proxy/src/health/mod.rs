//! Is the proxy well, and has this node endpoints of a service? What load balancers ask (rules 54 to 56).
//!
//! [`Health`] is the pure part: it is told what the engine does, as its [`Observer`], and answers. The
//! feature `server` has HTTP servers for it.

#[cfg(feature = "server")]
mod listen;
#[cfg(feature = "server")]
mod server;
#[cfg(all(test, feature = "server"))]
mod tests;

#[cfg(feature = "server")]
pub use listen::{bind, is_no_family};
#[cfg(feature = "server")]
pub use server::{CheckPlaces, Probe, serve_checks, serve_checks_at, serve_metrics, serve_proxy};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use knit_types::sync::Locked;

use crate::engine::{Observer, Run};
use crate::model::{Family, PerFamily, ServiceName};
use crate::view::{HealthCheck, NodeSettings};

/// How the proxy is; clones share it.
#[derive(Debug, Clone)]
pub struct Health {
    state: Arc<Mutex<State>>,
    timeout: Duration,
    #[cfg(feature = "server")]
    changed: tokio::sync::watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The oldest change of a family that is not done yet.
    queued: PerFamily<Option<Instant>>,
    updated: PerFamily<Option<Instant>>,
    /// What was last done in a family is older than `checks`.
    behind: PerFamily<bool>,
    node: Arc<NodeSettings>,
    checks: BTreeMap<ServiceName, HealthCheck>,
}

/// The answer to /healthz and /livez (rule 55).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyStatus {
    /// No change has been waiting for too long, in any family.
    pub healthy: bool,
    /// The same for each family.
    pub families: PerFamily<FamilyStatus>,
    /// The node is not about to go.
    pub node_eligible: bool,
    /// When the backend last did all it was asked, for the family that has waited longest.
    pub updated: Option<Instant>,
}

/// How one family is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyStatus {
    /// No change has been waiting for too long.
    pub healthy: bool,
    /// When the backend last did all it was asked.
    pub updated: Option<Instant>,
}

/// The answer on a health check node port (rule 54).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckStatus {
    /// How many distinct addresses of local ready endpoints there are.
    pub local_endpoints: usize,
    /// The proxy itself is well in this family. Whether the node is about to go does not count (rule 56).
    pub proxy_healthy: bool,
}

impl CheckStatus {
    /// Whether a load balancer should send traffic here.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.local_endpoints > 0 && self.proxy_healthy
    }
}

impl Health {
    /// A proxy is unwell when a change has been waiting for this long; kube-proxy takes twice its sync
    /// period.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self {
            state: Arc::default(),
            timeout,
            #[cfg(feature = "server")]
            changed: tokio::sync::watch::Sender::new(()),
        }
    }

    /// What tells it of an engine's work.
    #[must_use]
    pub fn observer(&self) -> Box<dyn Observer + Send> {
        Box::new(self.clone())
    }

    /// How the proxy is.
    #[must_use]
    pub fn proxy(&self, now: Instant) -> ProxyStatus {
        let state = self.lock();
        // One that still waits for its lists has nothing queued, and is not late.
        let late = |at: Instant| now.saturating_duration_since(at) >= self.timeout;
        let families = PerFamily::from_fn(|family| FamilyStatus {
            healthy: !state.queued.get(family).is_some_and(late),
            updated: *state.updated.get(family),
        });
        let served = state.served();
        let of_served = || served.iter().map(|family| families.get(*family));
        ProxyStatus {
            healthy: of_served().all(|family| family.healthy),
            families,
            node_eligible: !state.node.leaving,
            updated: of_served().map(|family| family.updated).min().flatten(),
        }
    }

    /// How a service's health check stands; `None` if it has none.
    #[must_use]
    pub fn check(&self, service: &str, family: Family, now: Instant) -> Option<CheckStatus> {
        let local_endpoints = *self.lock().checks.get(service)?.local_ready.get(family);
        let proxy_healthy = self.proxy(now).families.get(family).healthy;
        Some(CheckStatus { local_endpoints, proxy_healthy })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock half-way through a change.
        self.state.locked()
    }
}

impl State {
    /// The families that are served; before that is known, both.
    fn served(&self) -> Vec<Family> {
        let families = self.node.families;
        let all = !families.v4 && !families.v6;
        Family::ALL.into_iter().filter(|family| all || *families.get(*family)).collect()
    }

    /// Takes over what health checks say, but for families whose endpoints are not what was asked for.
    fn take_checks(&mut self, run: &Run<'_>) {
        let broken = PerFamily::from_fn(|family| run.outcome.broken(family).is_some());
        if broken.v4 && broken.v6 {
            return;
        }
        let caught_up = Family::ALL.into_iter().any(|f| *self.behind.get(f) && !*broken.get(f));
        let merged = |known: Option<&HealthCheck>, new: &HealthCheck| {
            let count = |family| match known {
                _ if !*broken.get(family) => *new.local_ready.get(family),
                Some(known) => *known.local_ready.get(family),
                None => 0,
            };
            HealthCheck { local_ready: PerFamily::from_fn(count), ..new.clone() }
        };
        if run.full || caught_up {
            let all = run.state.health_checks.iter();
            self.checks = all.map(|(name, new)| (name.clone(), merged(self.checks.get(name), new))).collect();
        } else {
            for name in &run.changes.health_checks {
                match run.state.health_checks.get(name) {
                    Some(new) => {
                        let check = merged(self.checks.get(name), new);
                        self.checks.insert(name.clone(), check);
                    }
                    None => drop(self.checks.remove(name)),
                }
            }
        }
        self.behind = broken;
    }
}

impl Observer for Health {
    fn queued(&mut self, now: Instant) {
        let mut state = self.lock();
        Family::ALL.into_iter().for_each(|family| {
            state.queued.get_mut(family).get_or_insert(now);
        });
    }

    fn ran(&mut self, run: &Run<'_>) {
        let mut state = self.lock();
        for family in Family::ALL {
            if run.outcome.broken(family).is_none() {
                *state.queued.get_mut(family) = None;
                *state.updated.get_mut(family) = Some(run.ended);
            } else {
                state.queued.get_mut(family).get_or_insert(run.ended);
            }
        }
        state.node = Arc::clone(&run.state.node);
        state.take_checks(run);
        #[cfg(feature = "server")]
        if run.full
            || run.changes.node
            || !run.changes.health_checks.is_empty()
            || run.changes.retry.is_some()
        {
            self.changed.send_replace(());
        }
    }
}
