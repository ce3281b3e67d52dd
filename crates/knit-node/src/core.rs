//! The core: a small handle on the parts of the agent, and what every front door calls.
//!
//! | part | owns |
//! |---|---|
//! | [`Sandboxes`] | ledger, allocator, and a lock for each owner |
//! | [`Networks`] | what this node has of each Network |
//! | `Pipeline` | nothing: it carries out requests |
//! | `Reconciler` | how often what was repaired |
//! | [`Report`] | what is to be told |
//! | [`WorldStore`] | what is known of the cluster |

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use knit_ledger::{Reservation, SandboxRecord};
use knit_runtime::routers::Routers;
use knit_runtime::{Attachment, InterfaceName, Runtime, SandboxId};
use knit_types::sync::Locked as _;
use knit_types::{NetworkName, ObjectRef};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::claims::{ClaimSource, Claims, DeviceFiles, Prepared, Problem};
use crate::clock;
use crate::config::{CoreConfig, MainInterfaces};
use crate::cri::Cri;
use crate::error::{Error, Reason, Result};
use crate::front_door::nri;
use crate::level::{Known, Repairs};
use crate::metrics::{Metrics, Operation};
use crate::netns::Processes;
use crate::networks::Networks;
use crate::pipeline::{Attached, Occasion, Pipeline, Waits};
use crate::policy::PolicyEnforcer;
use crate::proxy::{ServiceProxy, Stopped};
use crate::readiness::{self, Readiness};
use crate::reconcile::{Outcome, Pass, Reconciler};
use crate::report::Report;
use crate::request::{ClaimRequest, Door, PodRequest, Wish, Wishes};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::books::Store;
use crate::world::{World, WorldStore};

/// How long a scrape waits for what one runtime's Networks use.
const USAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// A handle on the parts of an agent. Clones are the same one.
#[derive(Clone)]
pub struct Core {
    inner: Arc<Inner>,
}

struct Inner {
    /// With what all parts share: configuration, cluster, sandboxes, runtimes, Networks, reports.
    pipeline: Pipeline,
    reconciler: Reconciler,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    proxy: Option<Arc<dyn ServiceProxy>>,
    /// Claims of pods, where they are served.
    claims: OnceLock<Arc<Claims>>,
    /// Why a door that requests are expected by is closed.
    closed_door: Mutex<Option<String>>,
    /// Counts changes of what NodeNetwork shows.
    shown: watch::Sender<u64>,
    /// Requests that are being worked on.
    busy: watch::Sender<usize>,
}

/// What is known of a sandbox before a request about it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum History {
    /// Nothing.
    Unknown,
    /// Containers have run in it.
    Started,
}

/// What a core is made of.
pub struct Parts {
    /// Names, paths and limits.
    pub config: CoreConfig,
    /// What is known of the cluster so far.
    pub world: World,
    /// Where records are kept.
    pub store: Box<dyn Store>,
    /// Service proxies, if there are any.
    pub proxy: Option<Arc<dyn ServiceProxy>>,
    /// Who enforces policies, if anybody here does.
    pub policies: Option<Arc<dyn PolicyEnforcer>>,
}

// === impl Core ===

impl Core {
    /// A core with no runtime yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { config, world, store, proxy, policies } = parts;
        let shown = watch::Sender::new(0);
        let readiness = Readiness::new(&config.run_dir);
        let repairs = Repairs::new(config.reconcile_every);
        let cri = config.cri_socket.as_deref().and_then(|socket| match Cri::new(socket) {
            Ok(cri) => Some(cri),
            Err(error) => {
                tracing::error!(%error, "cannot ask the container runtime for its sandboxes");
                None
            }
        });
        let sandboxes = Arc::new(Sandboxes::open(&config.node, store, shown.clone()));
        let (config, world) = (Arc::new(config), Arc::new(WorldStore::new(world)));
        // Before anything arrives: what is known of their blocks must not be forgotten meanwhile.
        sandboxes.books().networks_in_use().iter().for_each(|network| world.want(network));
        let (runtimes, report) = (Arc::new(Runtimes::default()), Arc::new(Report::default()));
        let metrics = Arc::new(Metrics::default());
        let networks = Arc::new(Networks::new(
            Arc::clone(&config),
            Arc::clone(&world),
            Arc::clone(&sandboxes),
            Arc::clone(&runtimes),
            proxy.clone(),
            policies,
            shown.clone(),
        ));
        let nri_patience = Arc::default();
        let pipeline = Pipeline { config, world, sandboxes, runtimes, networks, report, nri_patience };
        let reconciler = Reconciler {
            config: Arc::clone(&pipeline.config),
            world: Arc::clone(&pipeline.world),
            sandboxes: Arc::clone(&pipeline.sandboxes),
            runtimes: Arc::clone(&pipeline.runtimes),
            networks: Arc::clone(&pipeline.networks),
            report: Arc::clone(&pipeline.report),
            pipeline: pipeline.clone(),
            metrics: Arc::clone(&metrics),
            repairs,
            cri,
            no_unknown_networks: AtomicBool::new(false),
        };
        let busy = watch::Sender::new(0);
        let claims = OnceLock::new();
        let foreign = pipeline.config.main_interfaces == MainInterfaces::Foreign;
        let closed_door = Mutex::new(foreign.then(|| nri::NOT_CONNECTED.to_owned()));
        let inner =
            Inner { pipeline, reconciler, readiness, metrics, proxy, claims, closed_door, shown, busy };
        Self { inner: Arc::new(inner) }
    }

    /// Gives a pod what a request is about. The same request again gives the same answer.
    ///
    /// The work goes on when the caller stops waiting: it ends with everything made, or with nothing.
    ///
    /// # Errors
    /// When one of its interfaces cannot be had: then it gets none of them.
    pub async fn attach(&self, request: PodRequest, deadline: Instant) -> Result<Attached> {
        self.attach_one(request, History::Unknown, deadline).await
    }

    /// The same for a sandbox that containers have run in. It started with what it needs, or without what
    /// nobody knew of: where it cannot be told which claims its pod has, its containers start again.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn attach_started(&self, request: PodRequest, deadline: Instant) -> Result<Attached> {
        self.attach_one(request, History::Started, deadline).await
    }

    async fn attach_one(
        &self,
        mut request: PodRequest,
        history: History,
        deadline: Instant,
    ) -> Result<Attached> {
        let core = self.clone();
        let operation = if request.start.is_some() { Operation::Attach } else { Operation::Plug };
        let patience = &self.inner.pipeline.nri_patience;
        let (waits, waiting) = Waits::of(&request, deadline, self.config(), patience);
        self.run(operation, async move {
            // Given back when the request is done with.
            let _waiting = waiting;
            let result = match core.claims_of(&mut request, history, waits).await {
                Ok(()) => core.inner.pipeline.attach(&request, waits).await,
                Err(error) => Err(error),
            };
            // Before the answer: its containers start after it.
            if result.is_ok()
                && let Some(claims) = core.inner.claims.get()
            {
                claims.tell_containers(&request.claims).await;
            }
            // What a running pod gets is told by who asked for it.
            if request.start.is_some() {
                match &result {
                    Ok(attached) if attached.attachments.is_empty() => {}
                    Ok(_) => core.report().changed(&request.pod.sandbox),
                    Err(error) => {
                        core.report().failed(&request.pod, error);
                        core.report().not_attached(&request.claims, error);
                    }
                }
            }
            result
        })
        .await
    }

    /// Finds the claims that a pod which starts has, where claims are served.
    async fn claims_of(&self, request: &mut PodRequest, history: History, waits: Waits) -> Result<()> {
        let Some(claims) = self.inner.claims.get().filter(|_| request.start.is_some()) else {
            return Ok(());
        };
        let found = match claims.of_pod(request, waits).await {
            Ok(found) => found,
            // What its sandbox has, it got when its claims were known, and a pod's claims never change: the
            // containers of a pod that runs start again whoever is away.
            Err(Problem::Known(error) | Problem::Unknown(error))
                if error.reason == Reason::NotReady && self.inner.pipeline.has_networks(request) =>
            {
                let sandbox = &request.pod.sandbox;
                tracing::debug!(%sandbox, "using its record, because its claims are not known: {error}");
                Vec::new()
            }
            // One that has run and for which nothing waits has what it was promised, and asks for no more.
            Err(Problem::Unknown(error))
                if history == History::Started
                    && request.wishes == Wishes::Said(Wish::default())
                    && !claims.is_promised(request) =>
            {
                let sandbox = &request.pod.sandbox;
                tracing::debug!(%sandbox, "it has run, and its claims are not known: {error}");
                Vec::new()
            }
            Err(Problem::Known(error) | Problem::Unknown(error)) => return Err(error),
        };
        let new = found.into_iter().filter(|claim| !request.claims.contains(claim)).collect::<Vec<_>>();
        request.claims.extend(new);
        Ok(())
    }

    /// Whether the sandbox of a pod that starts has its networks already, those of its claims among them as
    /// far as they are known.
    pub(crate) async fn has_all(&self, request: &PodRequest) -> bool {
        let mut request = request.clone();
        let config = self.config();
        let patience = &self.inner.pipeline.nri_patience;
        let deadline = Instant::now() + config.request_deadline;
        let (waits, _waiting) = Waits::of(&request, deadline, config, patience);
        // Who has nothing yet needs no look at its claims.
        self.inner.pipeline.has_networks(&request)
            && self.claims_of(&mut request, History::Unknown, waits).await.is_ok()
            && self.inner.pipeline.has_all(&request)
    }

    /// Serves claims from now on, which are read at `source`. What was prepared may have been forgotten if
    /// that is `doubtful`: then no pod starts before its claims are known.
    pub fn use_claims(&self, source: Arc<dyn ClaimSource>, doubtful: bool) {
        self.use_claims_with(source, None, doubtful);
    }

    /// The same, with files by which containers read what their claim has.
    pub fn use_claims_with(&self, source: Arc<dyn ClaimSource>, files: Option<DeviceFiles>, doubtful: bool) {
        self.report().follow_claims();
        let claims = Arc::new(Claims::new(self.inner.pipeline.clone(), source, files, doubtful));
        if self.inner.claims.set(claims).is_err() {
            tracing::error!("claims are served already");
        }
    }

    /// Prepares a claim: what the scheduler gave it is reserved. The same again changes nothing.
    ///
    /// # Errors
    /// When one of its devices cannot be had: then nothing is reserved.
    pub async fn prepare(&self, claim: ObjectRef, deadline: Instant) -> Result<Vec<Prepared>> {
        let core = self.clone();
        let occasion = Occasion { began: self.sandboxes().releases().now(), sandbox: None };
        let work = async move {
            let claims = core.inner.claims.get().ok_or_else(|| {
                Error::new(Reason::NotReady, "claims are not served on this node: start the agent with --dra")
            })?;
            let result = claims.prepare(&claim, &occasion, deadline).await;
            if let Err(error) = &result {
                core.report().not_prepared(&claim, error);
            }
            result
        };
        self.run(Operation::Prepare, work).await
    }

    /// Frees what is reserved for claims that are gone, forever.
    pub(crate) async fn keep_claims_swept(&self) {
        if let Some(claims) = self.inner.claims.get() {
            claims.keep_swept().await;
        }
    }

    /// Says which pods on the node's own network have claims that nobody attaches, forever.
    pub(crate) async fn keep_host_pods_told(&self) {
        if let Some(claims) = self.inner.claims.get() {
            claims.keep_told().await;
        }
    }

    /// Says which pods on the node's own network have claims that nobody attaches, once.
    pub fn tell_host_pods(&self) {
        if let Some(claims) = self.inner.claims.get() {
            claims.tell_host_pods(&mut BTreeSet::new());
        }
    }

    /// Frees what is reserved for claims that are gone, once; how many there were.
    pub async fn sweep_claims(&self) -> usize {
        match self.inner.claims.get() {
            Some(claims) => claims.sweep().await,
            None => 0,
        }
    }

    /// Reserves what a claim asks for, before there is a sandbox: all of it, or nothing. The same request
    /// again changes nothing. Nothing is given where a sandbox has it.
    ///
    /// # Errors
    /// When one of its interfaces cannot be had: then nothing is reserved.
    pub async fn prepare_claim(
        &self,
        request: ClaimRequest,
        deadline: Instant,
    ) -> Result<Option<Reservation>> {
        let core = self.clone();
        let occasion = Occasion { began: self.sandboxes().releases().now(), sandbox: None };
        let work = async move { core.inner.pipeline.prepare_claim(&request, &occasion, deadline).await };
        self.run(Operation::Prepare, work).await
    }

    /// Frees what is reserved for a claim. Nothing reserved is success.
    ///
    /// # Errors
    /// While a sandbox has it: try again once that one is detached.
    pub async fn release_claim(&self, claim: ObjectRef) -> Result<()> {
        let core = self.clone();
        let work = async move {
            match core.inner.claims.get() {
                Some(claims) => claims.release(&claim).await,
                None => core.inner.pipeline.release_claim(&claim).await,
            }
        };
        self.run(Operation::Unprepare, work).await
    }

    /// Whether a pod that runs could get what a request is about, as far as can be told now. Nothing is
    /// changed.
    ///
    /// # Errors
    /// When it could not, with the reason.
    pub fn could_get(&self, request: &PodRequest) -> Result<()> {
        self.inner.pipeline.could_get(request)
    }

    /// Takes a pod's interfaces away. What is gone already is success. A `main` interface that the pod does
    /// not have is another's, and nothing is done.
    ///
    /// # Errors
    /// When something could not be taken away now: try again; the agent does so by itself, too.
    pub async fn detach(&self, sandbox: SandboxId, main: Option<InterfaceName>) -> Result<()> {
        let core = self.clone();
        self.run(Operation::Detach, async move { core.inner.pipeline.detach(&sandbox, main.as_ref()).await })
            .await
    }

    /// Takes some of a pod's further interfaces away. Its main one goes with the pod only, and what an object
    /// asks for goes with that object.
    ///
    /// # Errors
    /// When one of them cannot go alone: then nothing changed. When something could not be taken away now:
    /// try again.
    pub async fn detach_some(&self, sandbox: SandboxId, interfaces: BTreeSet<InterfaceName>) -> Result<()> {
        let core = self.clone();
        let work = async move { core.inner.pipeline.detach_some(&sandbox, &interfaces).await };
        self.run(Operation::Unplug, work).await
    }

    /// Takes the interfaces of a pod away that an object asked for, and that `own` says are its.
    ///
    /// # Errors
    /// When something could not be taken away now: try again.
    pub(crate) async fn unplug(
        &self,
        sandbox: SandboxId,
        own: impl Fn(&SandboxRecord, &knit_ledger::Attachment) -> bool + Send + Sync + 'static,
    ) -> Result<()> {
        let core = self.clone();
        self.run(Operation::Unplug, async move { core.inner.pipeline.unplug(&sandbox, own).await }).await
    }

    /// Looks whether a pod's interfaces are as they were made.
    ///
    /// # Errors
    /// When they are not, or the pod is not known.
    pub async fn check(&self, sandbox: SandboxId) -> Result<Attached> {
        let core = self.clone();
        self.run(Operation::Check, async move { core.inner.pipeline.check(&sandbox).await }).await
    }

    /// Removes what belongs to a door and to no sandbox in the list.
    ///
    /// # Errors
    /// When some of it could not be removed.
    pub async fn gc(&self, door: Door, keep: BTreeSet<String>) -> Result<()> {
        self.gc_among(door, keep, Processes::look()).await
    }

    /// The same, when these processes are to be seen.
    ///
    /// # Errors
    /// When some of it could not be removed.
    pub async fn gc_among(&self, door: Door, keep: BTreeSet<String>, processes: Processes) -> Result<()> {
        let core = self.clone();
        let before = clock::now();
        let work = async move { core.inner.reconciler.gc(&door, &keep, before, &processes).await };
        self.run(Operation::Gc, work).await
    }

    /// Whether containers can be added, in the sense of CNI STATUS: it never fails again once it succeeded
    /// since boot.
    ///
    /// # Errors
    /// When the agent was not ready since boot: with what is missing.
    pub fn status(&self) -> Result<()> {
        self.inner.readiness.since_boot().map_err(|problem| {
            let message = format!("the network of this node is not ready yet: {problem}");
            Error::new(Reason::NotReady, message)
        })
    }

    /// All attachments, or those of one sandbox, from the ledger.
    #[must_use]
    pub fn list(&self, sandbox: Option<&SandboxId>) -> Vec<Attachment> {
        self.sandboxes().list(sandbox)
    }

    /// What comes before the first request: Networks in use are set up, and everything is compared once.
    pub async fn begin(&self, pass: &Pass) -> Outcome {
        self.networks().pass().await;
        let outcome = self.reconcile(pass).await;
        self.assess();
        outcome
    }

    /// One pass that compares ledger, runtimes and what really runs, and repairs or removes the difference.
    pub async fn reconcile(&self, pass: &Pass) -> Outcome {
        self.inner.reconciler.pass(pass).await
    }

    /// Whether pods of this node have a Network, or claims have addresses of it here.
    #[must_use]
    pub fn has_pods_of(&self, network: &NetworkName) -> bool {
        self.sandboxes().books().networks_in_use().contains(network)
    }

    /// Sets a Network up here although no pod wants it, and keeps it for a while: something else does, such
    /// as a Service that clients outside reach by this node.
    pub async fn keep_network(&self, name: &NetworkName) {
        self.networks().keep(name).await;
    }

    /// Carries out the DELs that came while the agent was away.
    pub(crate) async fn take_spooled(&self) {
        self.inner.reconciler.take_spooled().await;
    }

    /// Looks after what one runtime made whenever it says that somebody else may have changed it, forever.
    pub async fn keep_right(&self, runtime: Arc<dyn Runtime>) {
        self.inner.reconciler.keep_right(runtime).await;
    }

    /// Looks after one runtime that may go and come back, forever.
    pub(crate) async fn attend(&self, name: &str, runtime: &Arc<dyn Runtime>, known: Known) {
        self.inner.reconciler.attend(name, runtime, known).await;
    }

    /// Follows what one runtime tells of what it made, forever.
    pub(crate) async fn follow(&self, name: &str, runtime: &Arc<dyn Runtime>) {
        self.inner.reconciler.follow(name, runtime).await;
    }

    /// Whether pods can be attached, as far as it can be told now.
    pub fn assess(&self) {
        let world = self.world().get();
        if self.config().main_interfaces == MainInterfaces::Foreign {
            let closed = self.inner.closed_door.locked().clone();
            self.inner.readiness.set(closed.or_else(|| readiness::missing_beside_another_plugin(&world)));
            return;
        }
        let stopped = || self.services_stopped().or_else(|| self.policies_stopped());
        let problem = readiness::problem_of_default(&world, self.networks());
        self.inner.readiness.set(problem.or_else(|| stopped().map(|stopped| stopped.why)));
    }

    /// Notes that a door by which requests are expected is open, or why it is not.
    pub(crate) fn set_closed_door(&self, problem: Option<String>) {
        *self.inner.closed_door.locked() = problem;
        self.assess();
        self.networks_changed();
    }

    /// Why nobody looks after service proxies any more; none while somebody does.
    #[must_use]
    pub fn services_stopped(&self) -> Option<Stopped> {
        self.inner.proxy.as_ref().and_then(|proxy| proxy.stopped())
    }

    /// Why nobody enforces policies any more; none while somebody does, or nobody is to.
    #[must_use]
    pub fn policies_stopped(&self) -> Option<Stopped> {
        self.networks().policies().and_then(PolicyEnforcer::stopped)
    }

    /// Waits until no request is being worked on.
    pub async fn idle(&self) {
        let mut busy = self.inner.busy.subscribe();
        // The sender lives as long as we do.
        let _ = busy.wait_for(|n| *n == 0).await;
    }

    /// What is known of the cluster.
    #[must_use]
    pub fn world(&self) -> &WorldStore {
        &self.inner.pipeline.world
    }

    /// The sandboxes of this node.
    #[must_use]
    pub fn sandboxes(&self) -> &Sandboxes {
        &self.inner.pipeline.sandboxes
    }

    /// The runtimes of this node.
    #[must_use]
    pub fn runtimes(&self) -> &Runtimes {
        &self.inner.pipeline.runtimes
    }

    /// The Networks of this node.
    #[must_use]
    pub fn networks(&self) -> &Networks {
        &self.inner.pipeline.networks
    }

    /// Whether it is ready.
    #[must_use]
    pub fn readiness(&self) -> &Readiness {
        &self.inner.readiness
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// All that is counted on this node, with what runtimes say of their Networks at this moment.
    pub async fn scrape(&self) -> String {
        let mut usage = Vec::new();
        for (name, runtime) in self.runtimes().all() {
            // A runtime that does not answer costs its own numbers.
            match tokio::time::timeout(USAGE_TIMEOUT, runtime.usage()).await {
                Ok(Ok(found)) => usage.extend(found),
                Ok(Err(error)) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(runtime = %name, error, "cannot read the usage of its Networks");
                }
                Err(_) => tracing::debug!(runtime = %name, "it did not report the usage of its Networks in \
                    time"),
            }
        }
        self.inner.metrics.usage(&usage);
        self.metrics_text()
    }

    /// All that is counted on this node, its service proxies included, in the text form of OpenMetrics.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let own = self.inner.metrics.text();
        let proxies = self.inner.proxy.as_ref().map(|proxy| proxy.metrics()).unwrap_or_default();
        let policies = self.networks().policies().map(PolicyEnforcer::metrics).unwrap_or_default();
        let end = "# EOF\n";
        let body = own.strip_suffix(end).unwrap_or(&own);
        format!("{body}{proxies}{policies}{end}")
    }

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.config().node
    }

    /// Names, paths and limits.
    #[must_use]
    pub fn config(&self) -> &CoreConfig {
        &self.inner.pipeline.config
    }

    /// What is to be told about pods.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.inner.pipeline.report
    }

    /// Tells of every change of what NodeNetwork shows.
    #[must_use]
    pub fn shown(&self) -> watch::Receiver<u64> {
        self.inner.shown.subscribe()
    }

    /// Something that NodeNetwork shows of a Network may have changed.
    pub fn networks_changed(&self) {
        self.inner.shown.send_modify(|n| *n += 1);
    }

    /// The routers of the runtime here that has some which the agent serves Services in.
    #[must_use]
    pub fn routers(&self) -> Option<Arc<dyn Routers>> {
        self.runtimes().all().into_iter().find_map(|(_, runtime)| runtime.routers())
    }

    /// Runs to its end, whether or not the caller still waits.
    async fn run<T: Send + 'static>(
        &self,
        operation: Operation,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let core = self.clone();
        let started = Instant::now();
        core.inner.busy.send_modify(|n| *n += 1);
        let span = tracing::Span::current();
        let task = tokio::spawn(async move {
            let result = tracing::Instrument::instrument(work, span).await;
            let outcome = result.as_ref().map(|_| ()).map_err(|e| e.reason);
            core.inner.metrics.request(operation, outcome, started.elapsed());
            core.inner.busy.send_modify(|n| *n -= 1);
            result
        });
        match task.await {
            Ok(result) => result,
            Err(failed) => {
                self.inner.busy.send_modify(|n| *n = n.saturating_sub(1));
                Err(Error::new(Reason::Internal, "the node agent failed: check its log").because(failed))
            }
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("node", &self.node()).finish_non_exhaustive()
    }
}
