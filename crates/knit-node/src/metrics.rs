//! What the agent counts, as Prometheus shows it.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::error::Reason;
use crate::kernel_tables;
use crate::networks::NetworkState;
use crate::proxy::ServicesState;

/// All counters.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    duration: Family<OperationLabels, Histogram, fn() -> Histogram>,
    attachments: Family<NetworkLabels, Gauge>,
    free: Family<NetworkLabels, Gauge>,
    ready: Family<NetworkLabels, Gauge>,
    services_ready: Family<NetworkLabels, Gauge>,
    service_ports: Family<NetworkLabels, Gauge>,
    garbage: Counter,
    repairs: Family<RepairLabels, Counter>,
    table_entries: Family<TableLabels, Gauge>,
    table_limit: Family<TableLabels, Gauge>,
    refused: Counter,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Operation {
    /// Give a pod its Networks.
    Attach,
    /// Take them away.
    Detach,
    /// Look at them.
    Check,
    /// Remove what nobody owns.
    Gc,
    /// Plug one Network into a running pod.
    Plug,
    /// Unplug one.
    Unplug,
}

/// How a Network is, for its gauges.
#[derive(Clone, Debug, Default)]
pub struct NetworkNumbers {
    /// Its name.
    pub name: String,
    /// How many attachments it has here.
    pub attachments: i64,
    /// How many addresses are free here.
    pub free: i64,
    /// Whether it is ready.
    pub ready: bool,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct RequestLabels {
    operation: Operation,
    result: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct OperationLabels {
    operation: Operation,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct NetworkLabels {
    network: String,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct TableLabels {
    table: &'static str,
}

#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
struct RepairLabels {
    what: &'static str,
}

// === impl Metrics ===

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("knit_node");
        let requests = Family::default();
        registry.register("requests", "Requests by what was asked for and what came of it", requests.clone());
        // 0.25 ms to 4 s.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(0.000_25, 2.0, 15));
        let duration = Family::new_with_constructor(buckets);
        registry.register_with_unit(
            "request_duration",
            "How long requests took",
            Unit::Seconds,
            duration.clone(),
        );
        let attachments = Family::default();
        registry.register("attachments", "Attachments of each Network on this node", attachments.clone());
        let free = Family::default();
        registry.register("free_addresses", "Addresses that a pod of this node could get", free.clone());
        let ready = Family::default();
        registry.register(
            "network_ready",
            "Whether pods can be attached to a Network on this node",
            ready.clone(),
        );
        let services_ready = Family::default();
        registry.register(
            "services_ready",
            "Whether the Services of a Network are in force on this node, by this agent",
            services_ready.clone(),
        );
        let service_ports = Family::default();
        registry.register(
            "service_ports",
            "Ports of Services in force in a Network on this node",
            service_ports.clone(),
        );
        let garbage = Counter::default();
        registry.register(
            "garbage_collected",
            "Attachments removed because their owner was gone",
            garbage.clone(),
        );
        let repairs = Family::default();
        registry.register(
            "repairs",
            "What was put right because somebody else had changed it, by what it was",
            repairs.clone(),
        );
        let table_entries = Family::default();
        registry.register(
            "kernel_table_entries",
            "Entries of a table of the kernel's that everybody on this node shares",
            table_entries.clone(),
        );
        let table_limit = Family::default();
        registry.register(
            "kernel_table_limit",
            "From how many entries on a table of the kernel's takes no more",
            table_limit.clone(),
        );
        let refused = Counter::default();
        registry.register(
            "http_refused_connections",
            "Connections to this port that were refused because there were too many of one client or of all",
            refused.clone(),
        );
        Self {
            registry,
            requests,
            duration,
            attachments,
            free,
            ready,
            services_ready,
            service_ports,
            garbage,
            repairs,
            table_entries,
            table_limit,
            refused,
        }
    }
}

impl Metrics {
    /// Counts a request.
    pub fn request(&self, operation: Operation, outcome: Result<(), Reason>, took: Duration) {
        let result = outcome.err().map_or("ok", Reason::as_str);
        self.requests.get_or_create(&RequestLabels { operation, result }).inc();
        self.duration.get_or_create(&OperationLabels { operation }).observe(took.as_secs_f64());
    }

    /// Counts attachments that were removed because their owner was gone.
    pub fn garbage(&self, attachments: u64) {
        self.garbage.inc_by(attachments);
    }

    /// Counts what was put right.
    pub fn repaired(&self, what: &'static str, count: u64) {
        self.repairs.get_or_create(&RepairLabels { what }).inc_by(count);
    }

    /// Counts connections that were refused.
    #[must_use]
    pub fn refused_connections(&self) -> Counter {
        self.refused.clone()
    }

    /// Says how the Networks are.
    pub fn networks(&self, networks: &[NetworkNumbers]) {
        self.attachments.clear();
        self.free.clear();
        self.ready.clear();
        for numbers in networks {
            let labels = NetworkLabels { network: numbers.name.clone() };
            self.attachments.get_or_create(&labels).set(numbers.attachments);
            self.free.get_or_create(&labels).set(numbers.free);
            self.ready.get_or_create(&labels).set(i64::from(numbers.ready));
        }
    }

    /// Says how the Services of the Networks are.
    pub fn services(&self, networks: &[NetworkState]) {
        self.services_ready.clear();
        self.service_ports.clear();
        for (name, state) in networks.iter().filter_map(|n| Some((&n.name, n.services.as_ref()?))) {
            let labels = NetworkLabels { network: name.clone() };
            let (ready, ports) = match state {
                ServicesState::Serving { ports, failed } => (*failed == 0, ports - failed),
                ServicesState::Waiting
                | ServicesState::Kept
                | ServicesState::Off(_)
                | ServicesState::Broken(_) => (false, 0),
            };
            self.services_ready.get_or_create(&labels).set(i64::from(ready));
            self.service_ports.get_or_create(&labels).set(i64::try_from(ports).unwrap_or(i64::MAX));
        }
    }

    /// Says how full the kernel's tables are.
    fn kernel_tables(&self) {
        for found in kernel_tables::read(Path::new("/proc")) {
            let labels = TableLabels { table: found.name };
            let set = |gauge: &Family<TableLabels, Gauge>, value: u64| {
                gauge.get_or_create(&labels).set(i64::try_from(value).unwrap_or(i64::MAX));
            };
            set(&self.table_entries, found.entries);
            set(&self.table_limit, found.limit);
        }
    }

    /// All of it, in the text form of OpenMetrics.
    #[must_use]
    pub fn text(&self) -> String {
        self.kernel_tables();
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            text.clear();
            let _ = writeln!(text, "# EOF");
        }
        text
    }
}

impl EncodeLabelValue for Operation {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::LabelValueEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        encoder.write_str(match self {
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::Check => "check",
            Self::Gc => "gc",
            Self::Plug => "plug",
            Self::Unplug => "unplug",
        })
    }
}
