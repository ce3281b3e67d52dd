//! Is the proxy well, and has this node endpoints of a service? What load balancers ask (rules 54 to 56).
//!
//! [`Health`] is the pure part: it is told what the engine does, as its [`Observer`], and answers. The feature `server`
//! has HTTP servers for it.

#[cfg(feature = "server")]
mod server;
#[cfg(all(test, feature = "server"))]
mod tests;

#[cfg(feature = "server")]
pub use server::{CheckPlaces, Probe, serve_checks, serve_checks_at, serve_metrics, serve_proxy};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::Outcome;
use crate::engine::{Observer, Run};
use crate::model::{Family, ServiceName};
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
    /// The oldest change that is not done yet.
    queued: Option<Instant>,
    updated: Option<Instant>,
    node: Arc<NodeSettings>,
    checks: BTreeMap<ServiceName, HealthCheck>,
}

/// The answer to /healthz and /livez (rule 55).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyStatus {
    /// No change has been waiting for too long.
    pub healthy: bool,
    /// The node is not about to go.
    pub node_eligible: bool,
    /// When the backend last did all it was asked.
    pub updated: Option<Instant>,
}

/// The answer on a health check node port (rule 54).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckStatus {
    /// How many distinct addresses of local ready endpoints there are.
    pub local_endpoints: usize,
    /// The proxy itself is well. Whether the node is about to go does not count (rule 56).
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
    /// A proxy is unwell when a change has been waiting for this long; kube-proxy takes twice its sync period.
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
        // One that has not started yet is not late.
        let late = state
            .updated
            .and(state.queued)
            .is_some_and(|at| now.saturating_duration_since(at) >= self.timeout);
        ProxyStatus { healthy: !late, node_eligible: !state.node.leaving, updated: state.updated }
    }

    /// How a service's health check stands; `None` if it has none.
    #[must_use]
    pub fn check(&self, service: &str, family: Family, now: Instant) -> Option<CheckStatus> {
        let local_endpoints = *self.lock().checks.get(service)?.local_ready.get(family);
        Some(CheckStatus { local_endpoints, proxy_healthy: self.proxy(now).healthy })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Health {
    fn queued(&mut self, now: Instant) {
        self.lock().queued.get_or_insert(now);
    }

    fn ran(&mut self, run: &Run<'_>) {
        let mut state = self.lock();
        if !matches!(run.outcome, Outcome::Failed(_)) {
            state.queued = None;
            state.updated = Some(run.ended);
        }
        state.node = Arc::clone(&run.state.node);
        if run.full {
            state.checks.clone_from(&run.state.health_checks);
        }
        for name in &run.changes.health_checks {
            match run.state.health_checks.get(name) {
                Some(check) => state.checks.insert(name.clone(), check.clone()),
                None => state.checks.remove(name),
            };
        }
        #[cfg(feature = "server")]
        if run.full || run.changes.node || !run.changes.health_checks.is_empty() {
            self.changed.send_replace(());
        }
    }
}
