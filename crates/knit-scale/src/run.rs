//! Carries a scenario out: a cluster of each size, phase by phase.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node;
use knit_api::AddressBlock;
use knit_api::names::{DEFAULT_NETWORK, UNSCHEDULABLE_TAINT};
use knit_objects::{Cache, Key, Write};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::{Api, Cluster, write};
use crate::controller;
use crate::joins;
use crate::meter::{self, Group};
use crate::node::{self, WholeNode};
use crate::pods::{Found, Nodes};
use crate::probe::Probe;
use crate::process;
use crate::report::{Load, Phase, Report, Size};
use crate::scenario::{Churn, Scenario};

/// How a scenario is carried out.
#[derive(Clone)]
pub struct Options {
    /// Against which API.
    pub api: Api,
    /// The `knit` whose controller runs as a process of its own, so that its processor time and memory can be
    /// told; without one it runs here.
    pub controller: Option<PathBuf>,
    /// The `knit` that runs the agent of one node as a process of its own, for the same reason; without one
    /// that node only writes.
    pub agent: Option<PathBuf>,
}

/// Why a scenario could not be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The API refused something.
    #[error("the API did not do what the simulation asked for")]
    Api(#[from] Box<knit_objects::Error>),
    /// Something of this machine.
    #[error("the simulation cannot use this machine as it needs to")]
    Io(#[from] std::io::Error),
    /// A program did not start.
    #[error("cannot start {}", program.display())]
    Program {
        /// Which one.
        program: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The process of an agent did not start, or ended.
    #[error("{} lab simulated-node: it ended before its agent was up: {how}", program.display())]
    Probe {
        /// Which one.
        program: PathBuf,
        /// How the process ended.
        how: String,
    },
    /// An API that should be there does not answer as it should.
    #[error("cannot list the Nodes of the API at {origin}: check --kubeconfig or --api-url")]
    Given {
        /// Which API.
        origin: String,
        /// The cause.
        #[source]
        source: Box<knit_objects::Error>,
    },
    /// There is a cluster already.
    #[error(
        "the API at {origin} has {nodes} Nodes: simulated nodes must not be written beside others; give an \
         API without Nodes, or leave it out to use an embedded one"
    )]
    InUse {
        /// Which API.
        origin: String,
        /// How many Nodes it has.
        nodes: usize,
    },
    /// Pods that are there all the time could not be attached.
    #[error("the permanent pods could not be attached")]
    Pods(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An agent did not start.
    #[error("the agent of a simulated node did not start")]
    Agent(#[from] knit_node::agent::StartError),
    /// Something else.
    #[error("the simulation did not start")]
    Other(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub(crate) fn other(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Other(Box::new(error))
    }
}

impl From<knit_objects::Error> for Error {
    fn from(error: knit_objects::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

/// How long everything may take to stop changing at the start, for each thousand nodes and at least.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Nothing has arrived for this long: it has.
const STILL: Duration = Duration::from_secs(2);
/// So many events in that time are heartbeats.
const EVENTS_AT_REST: u64 = 40;
/// How long it is looked at least what comes after an outage, if that was not shorter.
const AFTERWARDS_SECONDS: u32 = 30;
/// Carries a scenario out. `tell` hears how far it is.
///
/// # Errors
/// When the API or this machine does not do what is needed.
pub async fn run(scenario: &Scenario, options: &Options, tell: &dyn Fn(&str)) -> Result<Report, Error> {
    let mut sizes = Vec::new();
    for nodes in &scenario.nodes {
        sizes.push(of_size(scenario, options, *nodes, tell).await?);
    }
    Ok(Report { scenario: scenario.clone(), sizes })
}

/// A run of one size, while it goes on.
struct Run<'a> {
    scenario: &'a Scenario,
    cluster: Arc<Cluster>,
    whole: Vec<Arc<WholeNode>>,
    controller: controller::Running,
    probe: Option<Probe>,
    tainted: Cache<()>,
    most_tainted: usize,
    /// Which nodes there are.
    there: watch::Sender<std::ops::Range<u32>>,
    /// What is missing in the report, and why.
    errors: Vec<String>,
    /// Which processes are known to have ended.
    ended: [bool; 2],
}

async fn of_size(
    scenario: &Scenario,
    options: &Options,
    nodes: u32,
    tell: &dyn Fn(&str),
) -> Result<Size, Error> {
    let started = Instant::now();
    let whole = scenario.whole_of(nodes);
    let directory = directory()?;
    let cluster = Arc::new(Cluster::open(&options.api).await?);
    tell(&format!("{nodes} nodes: creating objects"));
    cluster.make_objects(scenario, nodes).await?;
    let url = cluster.meter.open(Group::Controller).await?;
    let controller = controller::Running::start(options.controller.as_deref(), &url).await?;
    let blocks: Cache<()> = cluster
        .others
        .watch::<AddressBlock>()
        .map(|b| (b.spec.network == DEFAULT_NETWORK).then_some(()))
        .cache()?;
    let tainted: Cache<()> =
        cluster.others.watch::<Node>().map(|node| is_tainted(&node).then_some(())).cache()?;
    // One more node has an agent if that can have a process of its own.
    let agents = if options.agent.is_some() { scenario.served_of(nodes) } else { whole };
    cluster.join_all(scenario, nodes, agents).await?;
    let (there, mut living) = (watch::Sender::new(0..nodes), JoinSet::new());
    let (background, live, receiver) = (Arc::clone(&cluster), scenario.clone(), there.subscribe());
    living.spawn(async move { background.live(&live, receiver, agents).await });
    tell(&format!("{nodes} nodes: starting {agents} agents"));
    let url = cluster.meter.open(Group::Agents).await?;
    let start = |number| WholeNode::start(number, &url, directory.path());
    let starting = futures::stream::iter((0..whole).map(start));
    let whole_nodes: Vec<_> = starting.buffered(8).map_ok(Arc::new).try_collect().await?;
    let patience = START_TIMEOUT * (1 + nodes / 1000);
    let probe = match &options.agent {
        Some(program) => {
            let url = cluster.meter.open(Group::Probe).await?;
            Some(Probe::start(program, whole, &url, directory.path(), patience).await?)
        }
        None => None,
    };
    tell(&format!("{nodes} nodes: waiting for blocks"));
    let has_all = |cache: &Cache<()>| (cache.len() >= nodes as usize).then_some(());
    blocks
        .wait_until("a block of the default Network for every node", Instant::now() + patience, has_all)
        .await?;
    drop(blocks);
    let (errors, ended, most_tainted) = (Vec::new(), [false; 2], 0);
    let whole = whole_nodes;
    let mut run =
        Run { scenario, cluster, whole, controller, probe, tainted, most_tainted, there, errors, ended };
    if scenario.pods > 0 {
        tell(&format!("{nodes} nodes: starting {} pods", scenario.pods));
        run.nodes().fill(scenario.standing(nodes)).await.map_err(Error::Pods)?;
    }
    tell(&format!("{nodes} nodes: waiting until nothing changes"));
    run.settle(patience).await;
    let start_seconds = started.elapsed().as_secs_f64();
    let start_plan_seconds = run.controller.take_seen().slowest_plan;
    run.look_for_ends("the start").await;
    let phases = run.phases(nodes, tell).await?;
    living.shutdown().await;
    if matches!(options.api, Api::Given(_)) {
        tell("removing what was created");
        run.cluster.remove(scenario, nodes + scenario.joins).await?;
    }
    let (whole, tainted, errors) =
        (run.whole.len() as u32, run.most_tainted, std::mem::take(&mut run.errors));
    run.stop().await;
    Ok(Size { nodes, whole, start_seconds, phases, tainted, start_plan_seconds, errors })
}

/// Where agents work: in memory if there is such a place, so that no disk is measured.
fn directory() -> std::io::Result<tempfile::TempDir> {
    let memory = PathBuf::from("/dev/shm");
    let builder = || tempfile::Builder::new().prefix("knit-scale-").to_owned();
    if memory.is_dir() { builder().tempdir_in(memory) } else { builder().tempdir() }
}

fn seconds(n: u32) -> Duration {
    Duration::from_secs(u64::from(n))
}

fn is_tainted(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == UNSCHEDULABLE_TAINT))
}

impl Run<'_> {
    async fn phases(&mut self, nodes: u32, tell: &dyn Fn(&str)) -> Result<Vec<Phase>, Error> {
        let (scenario, mut phases) = (self.scenario, Vec::new());
        let stays = seconds(scenario.pod_seconds);
        let say = |phase: &str, n: u32| tell(&format!("{nodes} nodes: {phase}, {n} s"));
        if scenario.quiet_seconds > 0 {
            say("nothing happens", scenario.quiet_seconds);
            phases.push(self.measure("quiet", tokio::time::sleep(seconds(scenario.quiet_seconds))).await.0);
        }
        let pods = scenario.coming(nodes, Churn::Alone);
        if !pods.is_empty() {
            say("pods come and go", scenario.busy_seconds);
            let found = Arc::new(Found::default());
            let working = self.nodes().churn(pods, stays, Arc::clone(&found));
            let (mut phase, ()) = self.measure("busy", working).await;
            found.fill(&mut phase);
            phases.push(phase);
        }
        let all = nodes + scenario.joins;
        if scenario.joins > 0 {
            say("nodes join", scenario.join_seconds);
            let (found, here) = (Arc::new(Found::default()), self.nodes());
            let pods = scenario.coming(nodes, Churn::Joining);
            let churning = here.clone().churn(pods, stays, Arc::clone(&found));
            let joining = joins::join(&here, nodes..all, seconds(scenario.join_seconds));
            let working = async { tokio::join!(joining, churning).0 };
            let (mut phase, joined) = self.measure("join", working).await;
            found.fill(&mut phase);
            joined.fill(&mut phase);
            phases.push(phase);
            self.there.send_replace(0..all);
        }
        if scenario.failures > 0 {
            say("nodes fail", scenario.fail_seconds);
            let keep = all - scenario.failures;
            self.there.send_replace(0..keep);
            let (cluster, time) = (Arc::clone(&self.cluster), seconds(scenario.fail_seconds));
            let failing = async move {
                for n in keep..all {
                    let gone = Write::delete::<Node>(Key::cluster(node::name(n)));
                    if let Err(error) = write(&cluster.others, &gone).await {
                        tracing::warn!(error = &error as &dyn std::error::Error, "a node was not deleted");
                    }
                }
                tokio::time::sleep(time).await;
            };
            phases.push(self.measure("fail", failing).await.0);
        }
        if scenario.outage_seconds > 0 {
            say("the API is down", scenario.outage_seconds);
            let (meter, time) = (self.cluster.meter.clone(), seconds(scenario.outage_seconds));
            let away = async move {
                meter.be_away(true);
                tokio::time::sleep(time).await;
                meter.be_away(false);
            };
            phases.push(self.measure("outage", away).await.0);
            let after = scenario.quiet_seconds.max(scenario.outage_seconds.min(AFTERWARDS_SECONDS));
            say("the API is up again", after);
            phases.push(self.measure("afterwards", tokio::time::sleep(seconds(after))).await.0);
        }
        Ok(phases)
    }

    /// Where pods are put.
    fn nodes(&self) -> Nodes {
        let probe = self.probe.as_ref().map(Probe::listener);
        Nodes { cluster: Arc::clone(&self.cluster), whole: self.whole.clone(), probe }
    }

    async fn measure<T>(&mut self, name: &'static str, work: impl Future<Output = T>) -> (Phase, T) {
        let (before, usage, start) = (self.cluster.meter.counts(), self.usage(), Instant::now());
        let set_ups = self.set_ups();
        let done = work.await;
        let seconds = start.elapsed().as_secs_f64();
        let counts = meter::since(&self.cluster.meter.counts(), &before);
        self.most_tainted = self.most_tainted.max(self.tainted.len());
        let (after, seen) = (self.usage(), self.controller.take_seen());
        self.look_for_ends(name).await;
        let load = |before: Option<process::Usage>, after: Option<process::Usage>| {
            Some(Load::between(before?, after?, seconds))
        };
        let phase = Phase {
            name,
            seconds,
            counts,
            set_ups: self.set_ups() - set_ups,
            slowest_plan_seconds: seen.slowest_plan,
            ceased_to_lead: seen.ceased,
            controller: load(usage.0, after.0),
            agent: load(usage.1, after.1),
            ..Phase::default()
        };
        (phase.with_rates(self.whole.len() as u32), done)
    }

    /// A process that has ended is an error of the report: its figures are missing from now on.
    async fn look_for_ends(&mut self, phase: &str) {
        let controller = self.controller.end();
        let probe = match &mut self.probe {
            Some(probe) => probe.end().await,
            None => None,
        };
        let found = [("the controller", controller), ("the agent in its own process", probe)];
        for ((who, end), known) in found.into_iter().zip(&mut self.ended) {
            if let Some(how) = end
                && !std::mem::replace(known, true)
            {
                self.errors.push(format!(
                    "{phase}: {who} ended ({how}): its processor time and memory are missing from here on"
                ));
            }
        }
    }

    fn set_ups(&self) -> usize {
        self.whole.iter().map(|node| node.set_ups()).sum()
    }

    /// What the processes of controller and agent use, where they have one.
    fn usage(&self) -> (Option<process::Usage>, Option<process::Usage>) {
        (self.controller.usage(), self.probe.as_ref().and_then(Probe::usage))
    }

    /// Waits until nothing arrives at agents any more.
    async fn settle(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let heard = || meter::sum(&self.cluster.meter.counts(), Group::Agents);
        let mut last = heard();
        while Instant::now() < end {
            tokio::time::sleep(STILL).await;
            let now = heard();
            // Heartbeats go on; lists, and what a list brings, do not.
            let few = EVENTS_AT_REST * self.whole.len() as u64;
            if now.lists == last.lists && now.events - last.events <= few {
                return;
            }
            last = now;
        }
        tracing::warn!("agents are still changing");
    }

    async fn stop(self) {
        drop((self.controller, self.probe));
        for node in self.whole {
            if let Ok(node) = Arc::try_unwrap(node).map_err(drop) {
                node.stop().await;
            }
        }
    }
}
