//! Tells people what the proxy does and what is wrong with objects: in the log, and as events on Services.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use knit_proxy::backend::Outcome;
use knit_proxy::engine::{self, Inspect, Level, Observer, Run};
use knit_proxy::model::Problem;
use tokio::sync::watch;

/// An observer of the engine that writes the log.
pub struct Log {
    lines: engine::Log<fn(Level, &str)>,
    /// Becomes true once everything was in force for the first time.
    in_force: watch::Sender<bool>,
    event: Box<dyn Fn(&Problem) + Send>,
}

/// Endpoint groups without a Service, told once each, and only when their Service had time to come.
#[derive(Default)]
pub struct Orphans {
    seen: HashSet<Arc<str>>,
    told: HashSet<Arc<str>>,
}

impl Log {
    /// `event` is called for each problem besides the log.
    pub fn new(event: impl Fn(&Problem) + Send + 'static) -> (Self, watch::Receiver<bool>) {
        let (in_force, receiver) = watch::channel(false);
        (Self { lines: engine::Log::new(log as fn(Level, &str)), in_force, event: Box::new(event) }, receiver)
    }
}

impl Observer for Log {
    fn ran(&mut self, run: &Run<'_>) {
        self.lines.ran(run);
        if matches!(run.outcome, Outcome::Failed(_)) {
            return;
        }
        if run.full {
            // The first lists and a full transaction need more than what stays, and an allocator keeps it.
            knit_kernel::release_memory();
        }
        self.in_force.send_replace(true);
    }

    fn problem(&mut self, problem: &Problem) {
        self.lines.problem(problem);
        (self.event)(problem);
    }
}

/// Writes a line of the engine's.
fn log(level: Level, line: &str) {
    match level {
        Level::Debug => tracing::debug!("{line}"),
        Level::Info => tracing::info!("{line}"),
        Level::Warn => tracing::warn!("{line}"),
        Level::Error => tracing::error!("{line}"),
    }
}

impl Orphans {
    /// What to tell of now: groups that had no Service at the last look either, and were not told of since
    /// they lost it. `found` has the group's name and its Service's.
    pub fn look(&mut self, found: &[(Arc<str>, Arc<str>)]) -> Vec<String> {
        let now: HashSet<Arc<str>> = found.iter().map(|(group, _)| Arc::clone(group)).collect();
        self.told.retain(|group| now.contains(group));
        let stale = found.iter().filter(|(group, _)| self.seen.contains(group) && !self.told.contains(group));
        let told: Vec<_> = stale.map(|(group, service)| orphan(group, service)).collect();
        self.told.extend(now.iter().filter(|group| self.seen.contains(*group)).cloned());
        self.seen = now;
        told
    }
}

/// What is to be said of an endpoint group without a Service.
pub fn orphan(group: &str, service: &str) -> String {
    format!(
        "EndpointSlice {group}: metadata.labels[kubernetes.io/service-name]: Service {service} does \
        not exist or is not served here; its endpoints are not used"
    )
}

/// Every endpoint group without a Service, with the name of that.
pub fn orphans(engine: Inspect<'_>) -> Vec<(Arc<str>, Arc<str>)> {
    let all = engine.view.orphans().map(|g| (g.name.as_str().into(), g.service.as_str().into()));
    all.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orphan_is_told_once_and_only_after_a_while() {
        let pair = |group: &str| (Arc::from(group), Arc::from("shop/web"));
        let mut orphans = Orphans::default();
        assert!(orphans.look(&[pair("a")]).is_empty(), "its Service may be on its way");
        assert_eq!(orphans.look(&[pair("a"), pair("b")]).len(), 1);
        let second = orphans.look(&[pair("a"), pair("b")]);
        assert_eq!(second.len(), 1);
        assert!(second[0].starts_with("EndpointSlice b: "), "{second:?}");
        assert!(orphans.look(&[pair("a"), pair("b")]).is_empty());
        // Its Service came and went again.
        assert!(orphans.look(&[pair("b")]).is_empty());
        assert!(orphans.look(&[pair("a"), pair("b")]).is_empty());
        assert_eq!(orphans.look(&[pair("a"), pair("b")]).len(), 1);
    }
}
