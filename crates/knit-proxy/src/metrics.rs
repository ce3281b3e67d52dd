//! kube-proxy's metrics, under its names (rule 61), so that dashboards and alerts go on working.
//!
//! A [`Metrics`] is an [`Observer`] of the engine; what only a backend or a server knows, it counts there
//! itself.
//!
//! Names and labels are those of kube-proxy 1.37 in its nftables mode. kube-proxy has one proxier for each
//! family; here one call serves both, and counts for each of them. What only other modes have (`iptables_*`)
//! is not there.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family as Labelled;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets, linear_buckets};
use prometheus_client::registry::Registry;

use crate::backend::Outcome;
use crate::engine::{Observer, Run};
use crate::model::{Family, PerFamily};
use crate::view::ListKind;

type Seconds = Gauge<f64, AtomicU64>;
/// A histogram for each family.
type Histograms = Labelled<IpFamily, Histogram, fn() -> Histogram>;

/// The metrics; clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    sync_duration: Histograms,
    full_duration: Histograms,
    partial_duration: Histograms,
    last_timestamp: Labelled<IpFamily, Seconds>,
    last_queued_timestamp: Labelled<IpFamily, Seconds>,
    programming_duration: Histograms,
    endpoint_changes: Counter,
    endpoint_changes_pending: Gauge,
    service_changes: Counter,
    service_changes_pending: Gauge,
    no_local_endpoints: Labelled<Policy, Gauge>,
    /// Health probes answered, by status code.
    pub healthz: Labelled<Code, Counter>,
    /// Liveness probes answered, by status code.
    pub livez: Labelled<Code, Counter>,
    sync_failures: Labelled<IpFamily, Counter>,
    cleanup_failures: Labelled<IpFamily, Counter>,
    conntrack_duration: Histograms,
    conntrack_deleted: Labelled<IpFamily, Counter>,
    /// The families that are served, as far as is known; the others have no metrics.
    families: PerFamily<bool>,
    /// Changes that were triggered before this are not measured: nobody was there to make them true.
    started: Arc<SystemTime>,
}

/// The label of the metric for frontends without local endpoints.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Policy {
    traffic_policy: &'static str,
    ip_family: &'static str,
}

/// A family as a label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct IpFamily {
    ip_family: &'static str,
}

impl IpFamily {
    fn of(family: Family) -> Self {
        Self {
            ip_family: match family {
                Family::V4 => "IPv4",
                Family::V6 => "IPv6",
            },
        }
    }
}

/// A status code as a label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Code {
    /// The status code.
    pub code: u16,
}

impl Metrics {
    /// Makes the metrics and registers them, all beginning with `kubeproxy_`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            sync_duration: Labelled::new_with_constructor(fast),
            full_duration: Labelled::new_with_constructor(fast),
            partial_duration: Labelled::new_with_constructor(fast),
            last_timestamp: Labelled::default(),
            last_queued_timestamp: Labelled::default(),
            programming_duration: Labelled::new_with_constructor(slow),
            endpoint_changes: Counter::default(),
            endpoint_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            no_local_endpoints: Labelled::default(),
            healthz: Labelled::default(),
            livez: Labelled::default(),
            sync_failures: Labelled::default(),
            cleanup_failures: Labelled::default(),
            conntrack_duration: Labelled::new_with_constructor(fast),
            conntrack_deleted: Labelled::default(),
            families: PerFamily { v4: false, v6: false },
            started: Arc::new(SystemTime::now()),
        };
        let m = metrics.clone();
        let r = registry.sub_registry_with_prefix("kubeproxy");
        r.register("sync_proxy_rules_duration_seconds", "Time to apply changes", m.sync_duration);
        r.register("sync_full_proxy_rules_duration_seconds", "Duration of full syncs", m.full_duration);
        r.register(
            "sync_partial_proxy_rules_duration_seconds",
            "Duration of partial \
        syncs",
            m.partial_duration,
        );
        r.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When rules were last in sync",
            m.last_timestamp,
        );
        r.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When a change was last queued",
            m.last_queued_timestamp,
        );
        r.register(
            "network_programming_duration_seconds",
            "Time from a change of a pod or service until it was applied on this node",
            m.programming_duration,
        );
        // The library adds `_total` to the name of a counter.
        r.register("sync_proxy_rules_endpoint_changes", "Endpoint changes seen", m.endpoint_changes);
        r.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "Endpoint changes not yet applied",
            m.endpoint_changes_pending,
        );
        r.register("sync_proxy_rules_service_changes", "Service changes seen", m.service_changes);
        r.register(
            "sync_proxy_rules_service_changes_pending",
            "Service changes not yet applied",
            m.service_changes_pending,
        );
        r.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports with a Local traffic policy and no local endpoints",
            m.no_local_endpoints,
        );
        r.register("proxy_healthz", "Answers to /healthz", m.healthz);
        r.register("proxy_livez", "Answers to /livez", m.livez);
        r.register("sync_proxy_rules_nftables_sync_failures", "Syncs that failed", m.sync_failures);
        r.register("sync_proxy_rules_nftables_cleanup_failures", "Cleanups that failed", m.cleanup_failures);
        r.register(
            "conntrack_reconciler_sync_duration_seconds",
            "Time to find stale flows",
            m.conntrack_duration,
        );
        r.register("conntrack_reconciler_deleted_entries", "Stale flows deleted", m.conntrack_deleted);
        metrics
    }

    /// Counts a look at stale flows of one family: how long it took, how many were deleted, whether all of it
    /// was done.
    pub fn cleaned(&self, family: Family, took: Duration, deleted: usize, complete: bool) {
        let family = IpFamily::of(family);
        self.conntrack_duration.get_or_create(&family).observe(took.as_secs_f64());
        self.conntrack_deleted.get_or_create(&family).inc_by(u64::try_from(deleted).unwrap_or(u64::MAX));
        if !complete {
            self.cleanup_failures.get_or_create(&family).inc();
        }
    }

    /// Counts an answer to /healthz or /livez.
    #[cfg(feature = "server")]
    pub fn probed(&self, probe: crate::health::Probe) {
        use crate::health::Probe;
        let (family, code) = match probe {
            Probe::Healthz(code) => (&self.healthz, code),
            Probe::Livez(code) => (&self.livez, code),
        };
        family.get_or_create(&Code { code }).inc();
    }

    /// The families that are served, with their labels.
    fn labels_of(&self) -> impl Iterator<Item = (Family, IpFamily)> + use<> {
        let families = self.families;
        let served = Family::ALL.into_iter().filter(move |family| *families.get(*family));
        served.map(|family| (family, IpFamily::of(family)))
    }

    /// What counts an engine's work.
    #[must_use]
    pub fn observer(&self) -> Box<dyn Observer + Send> {
        Box::new(self.clone())
    }
}

impl Observer for Metrics {
    fn event(&mut self, kind: Option<ListKind>, _: Instant) {
        match kind {
            Some(ListKind::Services) => {
                self.service_changes.inc();
                self.service_changes_pending.inc();
            }
            Some(ListKind::Groups) => {
                self.endpoint_changes.inc();
                self.endpoint_changes_pending.inc();
            }
            Some(ListKind::ServiceRanges) | None => {}
        }
    }

    fn queued(&mut self, _: Instant) {
        let now = unix_seconds(SystemTime::now());
        for (_, family) in self.labels_of() {
            self.last_queued_timestamp.get_or_create(&family).set(now);
        }
    }

    fn ran(&mut self, run: &Run<'_>) {
        self.families = run.state.node.families;
        let seconds = run.took.as_secs_f64();
        let kind = if run.full { &self.full_duration } else { &self.partial_duration };
        for (of, family) in self.labels_of() {
            self.sync_duration.get_or_create(&family).observe(seconds);
            kind.get_or_create(&family).observe(seconds);
            // They are there from the beginning, so that an alert can tell "none" from "not known".
            let failures = self.sync_failures.get_or_create(&family);
            if run.outcome.broken(of).is_some() {
                failures.inc();
            }
            let _ = self.cleanup_failures.get_or_create(&family);
            let _ = self.conntrack_deleted.get_or_create(&family);
        }
        self.service_changes_pending.set(0);
        self.endpoint_changes_pending.set(0);
        if let Outcome::Failed(_) = run.outcome {
            return;
        }
        let now = unix_seconds(SystemTime::now());
        let started = unix_seconds(*self.started);
        let triggered = run.changes.triggered_ms.iter().map(|ms| Duration::from_millis(*ms).as_secs_f64());
        let triggered: Vec<f64> = triggered.filter(|at| *at >= started).collect();
        for (_, family) in self.labels_of().filter(|(of, _)| run.outcome.broken(*of).is_none()) {
            self.last_timestamp.get_or_create(&family).set(now);
            let programming = self.programming_duration.get_or_create(&family);
            triggered.iter().for_each(|at| programming.observe((now - at).max(0.0)));
        }
        for family in Family::ALL.into_iter().filter(|family| *self.families.get(*family)) {
            let count = run.state.no_local.get(family);
            let ip_family = IpFamily::of(family).ip_family;
            for (traffic_policy, n) in [("internal", count.internal), ("external", count.external)] {
                let gauge = self.no_local_endpoints.get_or_create(&Policy { traffic_policy, ip_family });
                gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
            }
        }
    }
}

/// All that a registry has, as OpenMetrics text.
#[must_use]
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // A string takes everything.
    let _ = prometheus_client::encoding::text::encode(&mut text, registry);
    text
}

/// Puts the texts of several registries together, as one text of OpenMetrics without its end: those of
/// proxies for several Networks have the same metrics with other labels, and a metric may be described only
/// once.
#[must_use]
pub fn merge_texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut metrics: HashMap<&str, (String, String)> = HashMap::new();
    for text in texts {
        let (mut current, mut known) = ("", false);
        for line in text.lines().filter(|line| *line != "# EOF") {
            let described = line.strip_prefix("# ").and_then(|rest| rest.split(' ').nth(1));
            if let Some(name) = described
                && name != current
            {
                current = name;
                known = metrics.contains_key(name);
                if !known {
                    order.push(name);
                }
            }
            let (head, body) = metrics.entry(current).or_default();
            let to = match (described, known) {
                (Some(_), true) => continue,
                (Some(_), false) => head,
                (None, _) => body,
            };
            to.push_str(line);
            to.push('\n');
        }
    }
    let parts = order.iter().filter_map(|name| metrics.get(name));
    parts.flat_map(|(head, body)| [head.as_str(), body.as_str()]).collect()
}

fn fast() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

fn slow() -> Histogram {
    let seconds = linear_buckets(0.25, 0.25, 2).chain(linear_buckets(1.0, 1.0, 59));
    Histogram::new(seconds.chain(linear_buckets(60.0, 5.0, 12)).chain(linear_buckets(120.0, 30.0, 7)))
}

fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::engine::{Clock, Engine, EngineConfig, Pace, SystemClock};
    use crate::model::{Endpoint, EndpointGroup, NodeInfo, Protocol, Service, TrafficPolicy};
    use crate::source::Event;
    use crate::view::NodeView;

    struct Answering(Outcome);

    impl Backend for Answering {
        fn sync(&mut self, _: &NodeView) -> Outcome {
            self.0.clone()
        }
    }

    fn line(registry: &Registry, name: &str) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let found = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        found.unwrap_or_else(|| panic!("{name} is not in\n{text}")).rsplit(' ').next().unwrap().to_owned()
    }

    #[test]
    fn several_proxies_describe_a_metric_once() {
        let text = |network: &'static str| {
            let labels = [("network".into(), network.into())];
            let mut registry = Registry::with_labels(labels.into_iter());
            Metrics::register(&mut registry).sync_failures.get_or_create(&IpFamily::of(Family::V4)).inc();
            text(&registry)
        };
        let merged = merge_texts([&*text("blue"), &*text("green")]);
        let lines = |begin: &str| merged.lines().filter(|line| line.starts_with(begin)).count();
        assert_eq!(lines("# TYPE kubeproxy_sync_proxy_rules_nftables_sync_failures "), 1, "{merged}");
        let name = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total";
        let line = &format!("{name}{{network=\"green\",ip_family=\"IPv4\"}} 1");
        let at = |wanted: &str| merged.lines().position(|line| line == wanted);
        assert_eq!(at(line), at(&line.replace("green", "blue")).map(|blue| blue + 1), "{merged}");
        assert!(!merged.contains("# EOF"));
        let types = merged.lines().filter(|line| line.starts_with("# TYPE")).collect::<Vec<_>>();
        assert_eq!(types.len(), types.iter().collect::<std::collections::HashSet<_>>().len());
    }

    #[test]
    fn rule_61_names_and_counts() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let pace = Pace { min_interval: Duration::ZERO, retry_first: Duration::ZERO, ..Pace::default() };
        let config = EngineConfig { pace, ..EngineConfig::default() };
        let mut engine = Engine::new(config, NodeInfo::new("here"), Answering(Outcome::Done))
            .observed_by(metrics.observer());
        let mut send = |event: Event, outcome: Outcome| {
            engine.backend().0 = outcome;
            engine.handle(event, SystemClock.now());
            engine.poll(&SystemClock);
        };
        let mut service = Service::new("ns/svc").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80);
        service.internal_policy = TrafficPolicy::Local;
        send(Event::SetService(Box::new(service)), Outcome::Done);
        assert_eq!(line(&registry, "kubeproxy_sync_proxy_rules_service_changes_pending"), "1");
        send(Event::ListDone(ListKind::Services), Outcome::Done);
        send(Event::ListDone(ListKind::Groups), Outcome::Done);
        assert_eq!(line(&registry, "kubeproxy_sync_proxy_rules_service_changes_pending"), "0");
        assert_eq!(line(&registry, "kubeproxy_sync_proxy_rules_service_changes_total"), "1");
        assert_eq!(
            line(&registry, "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}"),
            "1"
        );

        // An endpoint elsewhere: traffic to the cluster IP is dropped here. It was triggered just now.
        let group = |node: &str, triggered_ms| {
            let mut group = EndpointGroup::of_addresses("ns/svc-1", "ns/svc", Protocol::Tcp, 8080, &[]);
            group.endpoints = Box::new([Endpoint::new([10, 1, 0, 1].into()).on(node)]);
            Event::SetGroup(Box::new(EndpointGroup { triggered_ms, ..group }))
        };
        let now = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
        send(group("there", Some(now + 1)), Outcome::Done);
        let internal = "kubeproxy_sync_proxy_rules_no_local_endpoints_total\
                        {traffic_policy=\"internal\",ip_family=\"IPv4\"}";
        assert_eq!(line(&registry, internal), "1");
        assert_eq!(
            line(&registry, "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}"),
            "1"
        );
        assert_eq!(
            line(&registry, "kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}"),
            "1"
        );
        // Triggered before the proxy started: not measured.
        send(group("here", Some(1000)), Outcome::Done);
        assert_eq!(line(&registry, internal), "0");
        assert_eq!(
            line(&registry, "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}"),
            "1"
        );
        assert_eq!(line(&registry, "kubeproxy_sync_proxy_rules_endpoint_changes_total"), "2");

        let failed = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv6\"}";
        assert_eq!(line(&registry, failed), "0");
        send(group("there", None), Outcome::Failed("no".into()));
        assert_eq!(line(&registry, failed), "1");

        metrics.cleaned(Family::V6, Duration::from_millis(3), 7, true);
        metrics.cleaned(Family::V6, Duration::from_millis(3), 0, false);
        for (name, v4, v6) in [
            ("conntrack_reconciler_deleted_entries_total", "0", "7"),
            ("sync_proxy_rules_nftables_cleanup_failures_total", "0", "1"),
        ] {
            assert_eq!(line(&registry, &format!("kubeproxy_{name}{{ip_family=\"IPv4\"}}")), v4);
            assert_eq!(line(&registry, &format!("kubeproxy_{name}{{ip_family=\"IPv6\"}}")), v6);
        }
        let looks = "kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family=\"IPv6\"}";
        assert_eq!(line(&registry, looks), "2");

        metrics.healthz.get_or_create(&Code { code: 200 }).inc();
        assert_eq!(line(&registry, "kubeproxy_proxy_healthz_total{code=\"200\"}"), "1");
        for name in [
            "sync_proxy_rules_duration_seconds_count",
            "sync_proxy_rules_last_timestamp_seconds",
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "sync_proxy_rules_nftables_cleanup_failures_total",
            "conntrack_reconciler_sync_duration_seconds_count",
        ] {
            line(&registry, &format!("kubeproxy_{name}{{ip_family=\"IPv6\"}}"));
        }
        line(&registry, "kubeproxy_sync_proxy_rules_endpoint_changes_pending");
    }
}
