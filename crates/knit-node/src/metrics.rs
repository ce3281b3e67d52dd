//! What the agent counts, as Prometheus shows it.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use knit_runtime::NetworkUsage;
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
    used: Family<NetworkLabels, Gauge>,
    free: Family<NetworkLabels, Gauge>,
    ready: Family<NetworkLabels, Gauge>,
    services_ready: Family<NetworkLabels, Gauge>,
    service_ports: Family<NetworkLabels, Gauge>,
    garbage: Counter,
    repairs: Family<RepairLabels, Counter>,
    table_entries: Family<TableLabels, Gauge>,
    table_limit: Family<TableLabels, Gauge>,
    refused: Counter,
    connections: Family<NetworkLabels, Gauge>,
    connections_limit: Family<NetworkLabels, Gauge>,
    refused_connections: Family<LimitLabels, Counter>,
    refused_questions: Family<NetworkLabels, Counter>,
    unreadable: Gauge,
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
    /// Reserve what a claim asks for.
    Prepare,
    /// Free it.
    Unprepare,
}

/// How a Network is, for its gauges.
#[derive(Clone, Debug, Default)]
pub struct NetworkNumbers {
    /// The Network's name.
    pub name: String,
    /// How many attachments it has here.
    pub attachments: i64,
    /// How many addresses pods and the router have here, of the family of which they have more.
    pub used: i64,
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
struct LimitLabels {
    network: String,
    limit: &'static str,
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
        registry.register("requests", "Requests by operation and result", requests.clone());
        // 0.25 ms to 4 s.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(0.000_25, 2.0, 15));
        let duration = Family::new_with_constructor(buckets);
        registry.register_with_unit(
            "request_duration",
            "Duration of requests",
            Unit::Seconds,
            duration.clone(),
        );
        let attachments = Family::default();
        registry.register("attachments", "Attachments of each Network on this node", attachments.clone());
        let used = Family::default();
        let free = Family::default();
        registry.register(
            "used_addresses",
            "Addresses that pods and routers have on this node",
            used.clone(),
        );
        registry.register("free_addresses", "Addresses available to pods on this node", free.clone());
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
        registry.register("repairs", "Repairs of changes made by other programs, by kind", repairs.clone());
        let table_entries = Family::default();
        registry.register(
            "kernel_table_entries",
            "Entries of a kernel table shared by the whole node",
            table_entries.clone(),
        );
        let table_limit = Family::default();
        registry.register(
            "kernel_table_limit",
            "Number of entries at which a shared kernel table accepts no more",
            table_limit.clone(),
        );
        let refused = Counter::default();
        registry.register(
            "http_refused_connections",
            "Connections to this port refused because of the limits per client or in total",
            refused.clone(),
        );
        let connections = Family::default();
        registry.register(
            "network_connections",
            "Entries in the connection table of a Network's router on this node, including those between its \
             own pods",
            connections.clone(),
        );
        let connections_limit = Family::default();
        registry.register(
            "network_connections_limit",
            "Maximum number of entries in the connection table of a Network's router",
            connections_limit.clone(),
        );
        let refused_connections = Family::default();
        registry.register(
            "network_refused_connections",
            "Connections out of a Network that were dropped because the limit of the Network (network) or of \
             all Networks (all) was exceeded",
            refused_connections.clone(),
        );
        let refused_questions = Family::default();
        registry.register(
            "network_refused_neighbour_requests",
            "ARP requests and neighbor solicitations dropped because a pod of a Network sent too many",
            refused_questions.clone(),
        );
        let unreadable = Gauge::default();
        registry.register(
            "unreadable_records",
            "Unreadable ledger records: their addresses stay reserved until their pods are deleted",
            unreadable.clone(),
        );
        Self {
            connections,
            connections_limit,
            refused_connections,
            refused_questions,
            registry,
            requests,
            duration,
            attachments,
            used,
            free,
            ready,
            services_ready,
            service_ports,
            garbage,
            repairs,
            table_entries,
            table_limit,
            refused,
            unreadable,
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

    /// Counts what was repaired.
    pub fn repaired(&self, what: &'static str, count: u64) {
        self.repairs.get_or_create(&RepairLabels { what }).inc_by(count);
    }

    /// Counts connections that were refused.
    #[must_use]
    pub fn refused_connections(&self) -> Counter {
        self.refused.clone()
    }

    /// Says how many records of the ledger cannot be read.
    pub fn unreadable(&self, records: usize) {
        self.unreadable.set(i64::try_from(records).unwrap_or(i64::MAX));
    }

    /// Says how the Networks are.
    pub fn networks(&self, networks: &[NetworkNumbers]) {
        self.attachments.clear();
        self.used.clear();
        self.free.clear();
        self.ready.clear();
        for numbers in networks {
            let labels = NetworkLabels { network: numbers.name.clone() };
            self.attachments.get_or_create(&labels).set(numbers.attachments);
            self.used.get_or_create(&labels).set(numbers.used);
            self.free.get_or_create(&labels).set(numbers.free);
            self.ready.get_or_create(&labels).set(i64::from(numbers.ready));
        }
    }

    /// Says how the Services of the Networks are.
    pub fn services(&self, networks: &[NetworkState]) {
        self.services_ready.clear();
        self.service_ports.clear();
        for (name, state) in networks.iter().filter_map(|n| Some((&n.name, n.services.as_ref()?))) {
            let labels = NetworkLabels { network: name.to_string() };
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

    /// Says what Networks use, and were refused. The kernel counts; these are its numbers.
    pub fn usage(&self, networks: &[NetworkUsage]) {
        self.connections.clear();
        self.connections_limit.clear();
        self.refused_connections.clear();
        self.refused_questions.clear();
        for usage in networks {
            let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
            let labels = NetworkLabels { network: usage.network.to_string() };
            self.connections.get_or_create(&labels).set(number(usage.connections));
            self.connections_limit.get_or_create(&labels).set(number(usage.connections_limit));
            self.refused_questions.get_or_create(&labels).inc_by(usage.refused_questions);
            for (limit, count) in
                [("network", usage.refused_connections), ("all", usage.refused_connections_together)]
            {
                let labels = LimitLabels { network: usage.network.to_string(), limit };
                self.refused_connections.get_or_create(&labels).inc_by(count);
            }
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
            Self::Prepare => "prepare",
            Self::Unprepare => "unprepare",
        })
    }
}
