//! Carries a scenario out: a cluster of each size, phase by phase.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Node, Pod as PodObject};
use knit_api::names::{DEFAULT_NETWORK, UNSCHEDULABLE_TAINT};
use knit_api::{AddressBlock, NetworkAttachment};
use knit_objects::{Cache, Key, Write};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::{Api, Cluster, Running, write};
use crate::meter::{self, Group};
use crate::node::{self, NAMESPACE, WholeNode};
use crate::process;
use crate::report::{Load, Phase, Quantiles, Report, Size};
use crate::scenario::{Pod, Scenario};

/// How a scenario is carried out.
#[derive(Clone)]
pub struct Options {
    /// Against which API.
    pub api: Api,
    /// The `knit` whose controller and agent run as processes of their own, so that their processor time and
    /// memory can be told; without one they run here.
    pub program: Option<PathBuf>,
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
        /// Why.
        #[source]
        source: std::io::Error,
    },
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
/// How long a pod's address may take to be known elsewhere before it counts as not reachable.
const REACH_TIMEOUT: Duration = Duration::from_secs(30);

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
    controller: Running,
    probe: Option<tokio::process::Child>,
    tainted: Cache<()>,
    most_tainted: usize,
    /// Which nodes there are.
    there: watch::Sender<std::ops::Range<u32>>,
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
    tell(&format!("{nodes} nodes: making objects"));
    cluster.make_objects(scenario).await?;
    let controller = cluster.start_controller(options.program.as_deref()).await?;
    let blocks: Cache<()> = cluster
        .others
        .watch::<AddressBlock>()
        .map(|b| (b.spec.network == DEFAULT_NETWORK).then_some(()))
        .cache()?;
    let tainted: Cache<()> =
        cluster.others.watch::<Node>().map(|node| is_tainted(&node).then_some(())).cache()?;
    // With a process of its own for one agent, that node only looks like one that writes.
    let probe_node = options.program.as_ref().and((nodes > whole).then_some(whole));
    cluster.join_all(0..nodes, whole).await?;
    let (there, mut living) = (watch::Sender::new(0..nodes), JoinSet::new());
    let (background, live, receiver) = (Arc::clone(&cluster), scenario.clone(), there.subscribe());
    living.spawn(async move { background.live(&live, receiver, whole).await });
    tell(&format!("{nodes} nodes: starting {whole} agents"));
    let url = cluster.meter.open(Group::Agents).await?;
    let agents: Vec<WholeNode> =
        futures::stream::iter((0..whole).map(|number| WholeNode::start(number, &url, directory.path())))
            .buffered(8)
            .try_collect()
            .await?;
    let probe = match (&options.program, probe_node) {
        (Some(program), Some(number)) => Some(cluster.start_probe(program, number, directory.path()).await?),
        _ => None,
    };
    let patience = START_TIMEOUT * (1 + nodes / 1000);
    tell(&format!("{nodes} nodes: waiting for blocks"));
    let has_all = |cache: &Cache<()>| (cache.len() >= nodes as usize).then_some(());
    blocks
        .wait_until("a block of the default Network for every node", Instant::now() + patience, has_all)
        .await?;
    drop(blocks);
    let whole_nodes = agents.into_iter().map(Arc::new).collect();
    let mut run =
        Run { scenario, cluster, whole: whole_nodes, controller, probe, tainted, most_tainted: 0, there };
    run.settle(patience).await;
    let start_seconds = started.elapsed().as_secs_f64();
    let phases = run.phases(nodes, tell).await?;
    living.shutdown().await;
    let (tainted, slowest) = (run.most_tainted, run.slowest_plan());
    if matches!(options.api, Api::Given(_)) {
        tell("removing what was made");
        run.cluster.remove(scenario, nodes + scenario.joins).await?;
    }
    run.stop().await;
    Ok(Size { nodes, whole, start_seconds, phases, tainted, slowest_plan_seconds: slowest })
}

/// Where agents work: in memory if there is such a place, so that no disk is measured.
fn directory() -> std::io::Result<tempfile::TempDir> {
    let memory = PathBuf::from("/dev/shm");
    let builder = || tempfile::Builder::new().prefix("knit-scale-").to_owned();
    if memory.is_dir() { builder().tempdir_in(memory) } else { builder().tempdir() }
}

fn is_tainted(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == UNSCHEDULABLE_TAINT))
}

impl Run<'_> {
    async fn phases(&mut self, nodes: u32, tell: &dyn Fn(&str)) -> Result<Vec<Phase>, Error> {
        let (scenario, mut phases) = (self.scenario, Vec::new());
        let seconds = |n: u32| Duration::from_secs(u64::from(n));
        let say = |phase: &str, n: u32| tell(&format!("{nodes} nodes: {phase}, {n} s"));
        if scenario.quiet_seconds > 0 {
            say("quiet", scenario.quiet_seconds);
            let time = seconds(scenario.quiet_seconds);
            phases.push(self.measure("quiet", async { tokio::time::sleep(time).await }).await);
        }
        let pods = scenario.pods(nodes);
        if !pods.is_empty() {
            say("pods come and go", scenario.busy_seconds);
            let found = Arc::new(Found::default());
            let working = self.churn(pods, Arc::clone(&found));
            let mut phase = self.measure("busy", working).await;
            found.fill(&mut phase);
            phases.push(phase);
        }
        if scenario.joins > 0 {
            say("nodes join", scenario.join_seconds);
            let cluster = Arc::clone(&self.cluster);
            let (joins, time) = (scenario.joins, seconds(scenario.join_seconds));
            let joining = async move {
                let start = Instant::now();
                for n in 0..joins {
                    tokio::time::sleep_until(start + time * n / joins).await;
                    // A node that cannot join is missing in what is counted, and the log says so.
                    if let Err(error) = cluster.join(nodes + n, false).await {
                        tracing::warn!(%error, "a node did not join");
                    }
                }
                tokio::time::sleep_until(start + time + STILL).await;
            };
            phases.push(self.measure("join", joining).await);
            self.there.send_replace(0..nodes + joins);
        }
        if scenario.failures > 0 {
            say("nodes fail", 10);
            let keep = nodes + scenario.joins - scenario.failures;
            self.there.send_replace(0..keep);
            let cluster = Arc::clone(&self.cluster);
            let failing = async move {
                for n in keep..nodes + scenario.joins {
                    let gone = Write::delete::<Node>(Key::cluster(node::name(n)));
                    if let Err(error) = write(&cluster.others, &gone).await {
                        tracing::warn!(%error, "a node was not deleted");
                    }
                }
                tokio::time::sleep(Duration::from_secs(10)).await;
            };
            phases.push(self.measure("fail", failing).await);
        }
        if scenario.outage_seconds > 0 {
            say("the API is away", scenario.outage_seconds);
            let (meter, time) = (self.cluster.meter.clone(), seconds(scenario.outage_seconds));
            let away = async move {
                meter.be_away(true);
                tokio::time::sleep(time).await;
                meter.be_away(false);
            };
            phases.push(self.measure("outage", away).await);
            say("afterwards", scenario.quiet_seconds.max(30));
            let time = seconds(scenario.quiet_seconds.max(30));
            phases.push(self.measure("afterwards", async { tokio::time::sleep(time).await }).await);
        }
        Ok(phases)
    }

    /// Pods come and go.
    fn churn(&self, pods: Vec<Pod>, found: Arc<Found>) -> impl Future<Output = ()> + Send + use<> {
        let (cluster, whole) = (Arc::clone(&self.cluster), self.whole.clone());
        let stays = Duration::from_secs(u64::from(self.scenario.pod_seconds));
        async move {
            let (start, mut tasks) = (Instant::now(), JoinSet::new());
            for pod in pods {
                tokio::time::sleep_until(start + pod.at).await;
                let (cluster, whole, found) = (Arc::clone(&cluster), whole.clone(), Arc::clone(&found));
                tasks.spawn(async move { live(&cluster, &whole, pod, stays, &found).await });
            }
            while tasks.join_next().await.is_some() {}
        }
    }

    async fn measure(&mut self, name: &'static str, work: impl Future<Output = ()>) -> Phase {
        let (before, usage, start) = (self.cluster.meter.counts(), self.usage(), Instant::now());
        let set_ups = self.set_ups();
        work.await;
        let seconds = start.elapsed().as_secs_f64();
        let counts = meter::since(&self.cluster.meter.counts(), &before);
        self.most_tainted = self.most_tainted.max(self.tainted.len());
        let after = self.usage();
        let load = |before: Option<process::Usage>, after: Option<process::Usage>| {
            Some(Load::between(before?, after?, seconds))
        };
        Phase {
            name,
            seconds,
            counts,
            pods: 0,
            failed: 0,
            attached: None,
            reachable: None,
            set_ups: self.set_ups() - set_ups,
            controller: load(usage.0, after.0),
            agent: load(usage.1, after.1),
        }
    }

    fn set_ups(&self) -> usize {
        self.whole.iter().map(|node| node.set_ups()).sum()
    }

    /// What the processes of controller and agent use, where they have one.
    fn usage(&self) -> (Option<process::Usage>, Option<process::Usage>) {
        let controller = match &self.controller {
            Running::Process(child) => child.id().and_then(process::usage),
            Running::Task(..) => None,
        };
        let probe = self.probe.as_ref().and_then(tokio::process::Child::id).and_then(process::usage);
        (controller, probe)
    }

    fn slowest_plan(&self) -> Option<f64> {
        match &self.controller {
            Running::Task(_, state) => Some(state.borrow().slowest_plan.as_secs_f64()),
            Running::Process(_) => None,
        }
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
        tracing::warn!("agents do not come to rest");
    }

    async fn stop(self) {
        if let Running::Task(task, _) = &self.controller {
            task.abort();
        }
        for node in self.whole {
            if let Ok(node) = Arc::try_unwrap(node).map_err(drop) {
                node.stop().await;
            }
        }
    }
}

/// What was found about pods.
#[derive(Default)]
struct Found {
    attached: Mutex<Vec<f64>>,
    reachable: Mutex<Vec<f64>>,
    pods: Mutex<(u32, u32)>,
}

impl Found {
    fn fill(&self, phase: &mut Phase) {
        fn take<T: Default>(cell: &Mutex<T>) -> T {
            std::mem::take(&mut *cell.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
        }
        (phase.pods, phase.failed) = take(&self.pods);
        phase.attached = Quantiles::of(take(&self.attached));
        phase.reachable = Quantiles::of(take(&self.reachable));
    }
}

fn push<T>(cell: &Mutex<Vec<T>>, value: T) {
    cell.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(value);
}

/// The life of one pod.
async fn live(cluster: &Cluster, whole: &[Arc<WholeNode>], pod: Pod, stays: Duration, found: &Found) {
    let on = whole.get(pod.node as usize);
    let born = comes(cluster, whole, on, pod, found).await;
    {
        let mut pods = found.pods.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        pods.0 += 1;
        pods.1 += u32::from(born.is_err());
    }
    if let Err(error) = born {
        tracing::warn!(%error, pod = pod.number, "a pod was not attached");
    }
    tokio::time::sleep(stays).await;
    if let Err(error) = goes(cluster, on, pod).await {
        tracing::warn!(%error, pod = pod.number, "a pod did not go as it should");
    }
}

type Anything = Box<dyn std::error::Error + Send + Sync>;

async fn comes(
    cluster: &Cluster,
    whole: &[Arc<WholeNode>],
    on: Option<&Arc<WholeNode>>,
    pod: Pod,
    found: &Found,
) -> Result<(), Anything> {
    write(&cluster.others, &Write::create(&node::pod(pod.number, pod.node, pod.network))).await?;
    let scheduled = Instant::now();
    let Some(on) = on else {
        if let Some(network) = pod.network {
            let published = node::published(pod.number, pod.node, network);
            let status = published.status.clone().unwrap_or_default();
            let object = NetworkAttachment { status: None, ..published };
            write(&cluster.writers, &Write::create(&object)).await?;
            let write_status =
                Write::status::<NetworkAttachment>(attachment(pod), &status, knit_api::names::AGENT_MANAGER);
            write(&cluster.writers, &write_status).await?;
        }
        cluster.dirty.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(pod.node);
        return Ok(());
    };
    let attached = on.add(pod.number, pod.network).await?;
    push(&found.attached, scheduled.elapsed().as_secs_f64());
    // Another whole node that has the Network: when does it know the way?
    for interface in &attached.attachments {
        let network = interface.network.as_str();
        let elsewhere = whole.iter().find(|other| other.number != on.number && other.has(network));
        let (Some(elsewhere), Some(address)) = (elsewhere, interface.addresses.first()) else { continue };
        while !elsewhere.reaches(network, address.net.addr()) {
            if scheduled.elapsed() > REACH_TIMEOUT {
                return Err(
                    format!("{} knows no way to {}", node::name(elsewhere.number), address.net).into()
                );
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        push(&found.reachable, scheduled.elapsed().as_secs_f64());
    }
    Ok(())
}

async fn goes(cluster: &Cluster, on: Option<&Arc<WholeNode>>, pod: Pod) -> Result<(), Anything> {
    match (on, pod.network) {
        (Some(on), _) => on.del(pod.number).await?,
        (None, Some(_)) => {
            write(&cluster.writers, &Write::delete::<NetworkAttachment>(attachment(pod))).await?;
        }
        (None, None) => {}
    }
    if on.is_none() {
        cluster.dirty.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(pod.node);
    }
    let key = Key::namespaced(NAMESPACE, format!("pod-{}", pod.number));
    Ok(write(&cluster.others, &Write::delete::<PodObject>(key)).await?)
}

fn attachment(pod: Pod) -> Key {
    Key::namespaced(NAMESPACE, format!("pod-{}-net1", pod.number))
}
