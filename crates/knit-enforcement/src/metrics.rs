//! What is counted of policies.

use knit_policy::model::{Direction, Name};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// The numbers, and the registry that shows them.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    /// Policies that are known.
    pub(crate) policies: Gauge,
    /// Addresses of this node's pods that policies act on, by Network.
    pub(crate) subjects: Family<Of, Gauge>,
    /// Elements in force, by Network.
    pub(crate) elements: Family<Of, Gauge>,
    /// From the arrival of an object to its effect in the kernel.
    pub(crate) commits: Histogram,
    /// Batches that could not be put in force.
    pub(crate) failures: Counter,
    /// Repairs of what others had changed.
    pub(crate) repairs: Counter,
    /// Live connections that were cut.
    pub(crate) cut: Counter,
    /// Packets that were denied, by Network and direction.
    pub(crate) denied: Family<Side, Counter>,
}

/// A Network.
#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
pub(crate) struct Of {
    network: String,
}

/// The side whose policies decided, in a Network.
#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
pub(crate) struct Side {
    network: String,
    direction: &'static str,
}

impl Side {
    pub(crate) fn of(network: &Name, direction: Direction) -> Self {
        let direction = match direction {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        };
        Self { network: network.as_ref().to_owned(), direction }
    }
}

impl Of {
    pub(crate) fn network(name: &Name) -> Self {
        Self { network: name.as_ref().to_owned() }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From half a millisecond to 16 seconds.
        let commits = Histogram::new((0..16).map(|n| 0.0005 * f64::from(1_u32 << n)));
        let mut metrics = Self {
            registry: Registry::default(),
            policies: Gauge::default(),
            subjects: Family::default(),
            elements: Family::default(),
            commits,
            failures: Counter::default(),
            repairs: Counter::default(),
            cut: Counter::default(),
            denied: Family::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("knit_policies", "Policies that the agent knows", metrics.policies.clone());
        registry.register(
            "knit_policy_subjects",
            "Addresses of this node's pods that policies act on, once for each direction",
            metrics.subjects.clone(),
        );
        registry.register(
            "knit_policy_elements",
            "Set elements that policies expand to in a router",
            metrics.elements.clone(),
        );
        registry.register(
            "knit_policy_commit_seconds",
            "Time from the arrival of a change to its effect in the kernel",
            metrics.commits.clone(),
        );
        registry.register(
            "knit_policy_commit_failures",
            "Batches of policy changes that could not be applied",
            metrics.failures.clone(),
        );
        registry.register(
            "knit_policy_repairs",
            "Repairs of changes made to policy rules by other programs",
            metrics.repairs.clone(),
        );
        registry.register(
            "knit_policy_connections_cut",
            "Live connections that were cut because policies no longer allow them",
            metrics.cut.clone(),
        );
        registry.register(
            "knit_policy_denied_packets",
            "Packets that policies denied to pods of this node, by the kernel's count, up to the last pass",
            metrics.denied.clone(),
        );
        metrics
    }
}

impl Metrics {
    /// The text form of OpenMetrics, without its end.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // A string takes everything.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text.strip_suffix("# EOF\n").map(str::to_owned).unwrap_or(text)
    }
}
