//! `knit controller`: what only one place in the cluster can decide.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use knit_api::{Subnet, names};
use knit_controller::{Config, Controller, ControllerState, PlanTimes};
use knit_http::{Answer, Guests, Limits};
use knit_objects::{Objects, Source};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::http;
use super::log::LogArgs;
use super::node::Policies;
use super::stop::Stop;

/// Run the controller: it numbers Networks, assigns addresses to nodes, and reports the status of Networks
///
/// Several may run at once: one of them is the leader, and another takes over when it stops. At its first
/// start it creates the NetworkClass knit and the Network default, if they are missing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # In a pod of the cluster, as the manifests start it
  knit controller --identity $(POD_NAME) --metrics-addr :9470

  # A cluster whose Nodes have no podCIDRs: the default Network gets these subnets
  knit controller --default-subnets 10.244.0.0/16,fd44::/48

  # From elsewhere, with a kubeconfig
  knit controller --kubeconfig ~/.kube/config --identity by-hand")]
pub struct Args {
    /// Use the cluster of this kubeconfig [default: the usual kubeconfig, or the cluster of this pod]
    #[arg(long, env = "KNIT_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// URL of an API server that needs no credentials, such as the lab's
    #[arg(long, env = "KNIT_API_URL", value_name = "URL", conflicts_with = "kubeconfig")]
    api_url: Option<String>,

    /// The namespace of the agents' Leases and of the controller's own Lease
    #[arg(long, env = "KNIT_NAMESPACE", value_name = "NAME", default_value = names::SYSTEM_NAMESPACE)]
    namespace: String,

    /// Identity of this controller among several: its pod's name [default: the host name and the process id]
    #[arg(long, env = "KNIT_IDENTITY", value_name = "NAME")]
    identity: Option<String>,

    /// Subnets of the Network default if it is created here and Nodes have no podCIDRs: one per family
    #[arg(long, env = "KNIT_DEFAULT_SUBNETS", value_name = "CIDR,...", value_delimiter = ',',
        value_parser = range)]
    default_subnets: Vec<IpNet>,

    /// Do not create the Network default and the NetworkClass knit
    #[arg(long, env = "KNIT_NO_DEFAULTS")]
    no_defaults: bool,

    /// Whether Knit enforces NetworkPolicies; must match the agents' --policies. With `off`, an event on each
    /// NetworkPolicy says that Knit does not enforce it
    #[arg(long, env = "KNIT_POLICIES", value_name = "WHO", value_enum, default_value_t = Policies::On)]
    policies: Policies,

    /// Run beside another CNI plugin: do not create the Network default, and do not taint Nodes
    #[arg(long, env = "KNIT_SECONDARY")]
    secondary: bool,

    /// Seconds after a Node was deleted until its addresses may be assigned to another Node
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    node_gone_grace: u64,

    /// Seconds to wait for a leader that does not renew its Lease
    #[arg(long, value_name = "SECONDS", default_value_t = 15,
        value_parser = clap::value_parser!(u64).range(3..=300))]
    lease_duration: u64,

    /// Publish Networks as devices for ResourceClaims, as ResourceSlices and DeviceClasses
    #[arg(long, env = "KNIT_DRA")]
    dra: bool,

    /// Serve /healthz, /readyz and /metrics here, such as 127.0.0.1:9470 or :9470 [default: not served]
    #[arg(long, env = "KNIT_METRICS_ADDR", value_name = "ADDRESS:PORT", value_parser = super::http::address)]
    metrics_addr: Option<SocketAddr>,

    #[command(flatten)]
    log: LogArgs,
}

/// How long a Node may be there before it counts as one that gets no podCIDRs.
const POD_CIDR_WAIT: Duration = Duration::from_secs(20);

pub fn run(args: Args) -> Result<ExitCode> {
    args.log.start()?;
    // Two threads: while one reads what arrives, the other renews the Lease. Plans have a thread of their
    // own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(serve(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(args: Args) -> Result<()> {
    let mut stop = Stop::listen()?;
    let config = config(&args);
    let source = if let Some(url) = args.api_url {
        Source::Url(url)
    } else if let Some(path) = args.kubeconfig {
        Source::Kubeconfig { path, context: None }
    } else {
        Source::Infer
    };
    let listener = match args.metrics_addr {
        Some(address) => Some(http::listen(address).await?),
        None => None,
    };
    let objects = Objects::open(source).await.context("the controller cannot reach a cluster")?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        identity = config.identity,
        namespace = config.namespace,
        objects = %objects.origin(),
        "starting"
    );
    let controller = Controller::new(objects, config)?;
    if let Some(listener) = listener {
        let refused = Counter::default();
        let answer = knit_http::only_get(answers(controller.state(), refused.clone()));
        let guests = Arc::new(Guests::new(Limits::PROBES, move || _ = refused.inc()));
        tokio::spawn(async move {
            let error = knit_http::serve(listener, guests, answer).await;
            tracing::error!(%error, "health and metrics are no longer served: restart the controller");
        });
    }
    let shutdown = async move {
        stop.asked().await;
        tracing::info!("stopping");
    };
    controller.run(shutdown).await;
    Ok(())
}

fn config(args: &Args) -> Config {
    let identity = args.identity.clone().unwrap_or_else(own_name);
    let lease_duration = Duration::from_secs(args.lease_duration);
    let subnet = |cidr: &IpNet| Subnet { cidr: cidr.trunc().to_string(), ..Subnet::default() };
    Config {
        namespace: args.namespace.clone(),
        lease_duration,
        renew_every: lease_duration / 5,
        make_defaults: !args.no_defaults,
        serves_default: !args.secondary,
        default_subnets: args.default_subnets.iter().map(subnet).collect(),
        pod_cidr_wait: POD_CIDR_WAIT,
        node_gone_grace: Duration::from_secs(args.node_gone_grace),
        show_devices: args.dra,
        enforce_policies: args.policies == Policies::On,
        ..Config::new(identity)
    }
}

fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

fn range(text: &str) -> Result<IpNet, String> {
    text.parse().map_err(|_| format!("{text:?} is not a valid CIDR: write one such as 10.244.0.0/16"))
}

/// What the controller says of itself over HTTP.
fn answers(
    state: watch::Receiver<ControllerState>,
    refused: Counter,
) -> impl Fn(&str) -> Answer + Send + Sync + 'static {
    let mut registry = Registry::default();
    registry.register(
        "knit_controller_http_refused_connections",
        "Connections to this port refused because of the limits per client or in total",
        refused,
    );
    registry.register_collector(Box::new(Numbers(state.clone())));
    let registry = Arc::new(registry);
    move |path| match path {
        "/healthz" => Answer::ok("ok\n"),
        "/readyz" => ready(&state.borrow()),
        "/metrics" => {
            let mut text = String::new();
            match prometheus_client::encoding::text::encode(&mut text, &registry) {
                Ok(()) => Answer::metrics(text),
                Err(error) => Answer::unavailable(format!("{error}\n")),
            }
        }
        _ => Answer::not_found("not found; available: /healthz, /readyz and /metrics\n"),
    }
}

fn ready(state: &ControllerState) -> Answer {
    if !state.in_touch {
        return Answer::unavailable("the API server does not answer\n");
    }
    let doing = if state.leading { "leading" } else { "standing by" };
    match &state.last_error {
        Some(error) => Answer::ok(format!("ok, {doing}; the last write failed: {error}\n")),
        None => Answer::ok(format!("ok, {doing}\n")),
    }
}

/// The controller's state, as numbers.
#[derive(Debug)]
struct Numbers(watch::Receiver<ControllerState>);

impl Collector for Numbers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let state = self.0.borrow().clone();
        for (name, help, value) in [
            (
                "knit_controller_leading",
                "1 if this controller is the leader, 0 if it is on \
            standby",
                state.leading,
            ),
            ("knit_controller_in_touch", "1 if the API server answers", state.in_touch),
            ("knit_controller_settled", "1 if the last pass found nothing to do", state.settled),
        ]
        .map(|(name, help, value)| (name, help, i64::from(value)))
        .into_iter()
        .chain([(
            "knit_controller_taints_held_back",
            "Nodes without a running agent that are not tainted, because most agents appear to be down",
            i64::try_from(state.held_back).unwrap_or(i64::MAX),
        )]) {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, value) in [
            ("knit_controller_plan_seconds", "How long the last plan took", state.last_plan),
            ("knit_controller_slowest_plan_seconds", "How long the slowest plan took", state.slowest_plan),
        ] {
            let gauge = ConstGauge::new(value.as_secs_f64());
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let PlanTimes { counts, sum } = state.plans;
        let limits = PlanTimes::LIMITS.iter().map(Duration::as_secs_f64).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = limits.zip(counts).collect();
        let (name, help) = ("knit_controller_plan_duration_seconds", "How long plans took");
        encoder.encode_descriptor(name, help, None, MetricType::Histogram)?.encode_histogram::<NoLabelSet>(
            sum.as_secs_f64(),
            counts.iter().sum(),
            &buckets,
            None,
        )?;
        for (name, help, value) in [
            ("knit_controller_passes", "Number of passes over the cluster", state.passes),
            ("knit_controller_writes", "Writes that succeeded", state.written),
            ("knit_controller_failed_writes", "Writes that failed", state.failed),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_and_numbers_follow_the_state() {
        let (state, watched) = watch::channel(ControllerState::default());
        let answer = answers(watched, Counter::default());
        assert_eq!(answer("/readyz").body(), "the API server does not answer\n");
        state.send_modify(|state| {
            (state.leading, state.in_touch, state.passes, state.written) = (true, true, 3, 5);
            (state.plans.counts[5], state.plans.counts[10]) = (2, 1);
        });
        assert_eq!(answer("/readyz").body(), "ok, leading\n");
        let metrics = answer("/metrics");
        for line in [
            "knit_controller_leading 1",
            "knit_controller_passes_total 3",
            "knit_controller_writes_total 5",
            "knit_controller_plan_duration_seconds_bucket{le=\"0.02\"} 0",
            "knit_controller_plan_duration_seconds_bucket{le=\"0.05\"} 2",
            "knit_controller_plan_duration_seconds_bucket{le=\"+Inf\"} 3",
            "knit_controller_plan_duration_seconds_count 3",
        ] {
            assert!(metrics.body().lines().any(|l| l == line), "{line} in:\n{}", metrics.body());
        }
        assert!(!answer("/").is_ok());
    }
}
