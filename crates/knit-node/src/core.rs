//! The core: what every front door calls. One request is resolve, reserve, record, attach, verify, reply.

mod steps;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use knit_ledger::SandboxRecord;
use knit_runtime::routers::Routers;
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::clock;
use crate::config::CoreConfig;
use crate::cri::Cri;
use crate::error::{Error, Reason, Result};
use crate::level::Repairs;
use crate::locks::SandboxLocks;
use crate::metrics::{Metrics, Operation};
use crate::netns::Processes;
use crate::networks::Networks;
use crate::proxy::{Foreign, Running, ServiceProxy};
use crate::readiness::Readiness;
use crate::record::{Books, Store, details, made, pod_of};
use crate::report::Report;
use crate::request::{Door, PodRequest};
use crate::runtimes::Runtimes;
use crate::world::{World, WorldStore};

/// A handle on the core. Clones are the same one.
#[derive(Clone)]
pub struct Core {
    inner: Arc<Inner>,
}

struct Inner {
    config: CoreConfig,
    world: WorldStore,
    books: Mutex<Books>,
    runtimes: Runtimes,
    networks: Networks,
    locks: SandboxLocks,
    repairs: Repairs,
    readiness: Readiness,
    metrics: Metrics,
    report: Report,
    proxy: Option<Arc<dyn ServiceProxy>>,
    /// The container runtime, if it is to be asked.
    cri: Option<Cri>,
    /// Told when addresses may have become free.
    addresses: Notify,
    /// Counts changes of what NodeNetwork shows.
    shown: watch::Sender<u64>,
    /// Requests that are being worked on.
    busy: watch::Sender<usize>,
    /// Interfaces whose attach was given up, and still runs.
    late: Mutex<BTreeSet<(SandboxId, String)>>,
}

/// What a pod got: its main interface first.
#[derive(Clone, Debug, PartialEq)]
pub struct Attached {
    /// The interfaces.
    pub attachments: Vec<Attachment>,
    /// The pod's network namespace.
    pub netns: std::path::PathBuf,
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
}

// === impl Core ===

impl Core {
    /// A core with no runtime yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { config, world, store, proxy } = parts;
        let books = Books::open(&config.node, store, clock::now());
        let readiness = Readiness::new(&config.run_dir);
        let repairs = Repairs::new(config.reconcile_every);
        let cri = config.cri_socket.as_deref().and_then(|socket| match Cri::new(socket) {
            Ok(cri) => Some(cri),
            Err(error) => {
                tracing::error!(%error, "the container runtime is not asked for its sandboxes");
                None
            }
        });
        Self {
            inner: Arc::new(Inner {
                config,
                world: WorldStore::new(world),
                books: Mutex::new(books),
                runtimes: Runtimes::default(),
                networks: Networks::default(),
                locks: SandboxLocks::default(),
                repairs,
                readiness,
                metrics: Metrics::default(),
                report: Report::default(),
                proxy,
                cri,
                addresses: Notify::new(),
                shown: watch::Sender::new(0),
                busy: watch::Sender::new(0),
                late: Mutex::default(),
            }),
        }
    }

    /// Gives a pod its Networks. The same request again gives the same answer.
    ///
    /// The work goes on when the caller stops waiting: it ends with everything made, or with nothing.
    ///
    /// # Errors
    /// When one of them cannot be had: then the pod has none.
    pub async fn attach(&self, request: PodRequest, deadline: Instant) -> Result<Attached> {
        let core = self.clone();
        self.run(Operation::Attach, async move {
            let result = core.do_attach(&request, deadline).await;
            match &result {
                Ok(attached) => core.inner.report.attached(&request.pod, attached),
                Err(error) => core.inner.report.failed(&request.pod, error),
            }
            result
        })
        .await
    }

    /// Takes a pod's interfaces away. What is gone already is success.
    ///
    /// # Errors
    /// When something could not be taken away now: try again; the agent does so by itself, too.
    pub async fn detach(&self, sandbox: SandboxId, main: Option<InterfaceName>) -> Result<()> {
        let core = self.clone();
        self.run(Operation::Detach, async move {
            let patience = core.inner.config.detach_deadline / 2;
            let _guard =
                tokio::time::timeout(patience, core.inner.locks.lock(&sandbox)).await.map_err(|_| {
                    let message =
                        format!("an earlier request for sandbox {sandbox} still runs: it tries again");
                    Error::new(Reason::NotReady, message)
                })?;
            let Some(record) = core.books().get(&sandbox).cloned() else { return Ok(()) };
            // A DEL for an interface that is not the pod's main one is not for us.
            if let Some(main) = main
                && !steps::is_main(&record, &main)
            {
                return Ok(());
            }
            core.remove_sandbox(&record).await
        })
        .await
    }

    /// Takes some of a pod's further interfaces away. Its main one goes with the pod only, and what an object asks for
    /// goes with that object.
    ///
    /// # Errors
    /// When one of them cannot go alone: then nothing changed. When something could not be taken away now: try again.
    pub async fn detach_some(&self, sandbox: SandboxId, interfaces: BTreeSet<InterfaceName>) -> Result<()> {
        let core = self.clone();
        self.run(Operation::Unplug, async move {
            let _guard = core.inner.locks.lock(&sandbox).await;
            let Some(record) = core.books().get(&sandbox).cloned() else { return Ok(()) };
            let named = |a: &&knit_ledger::Attachment| {
                interfaces.iter().any(|interface| interface.as_str() == a.plan().interface)
            };
            let mut leaving = Vec::new();
            for attachment in record.attachments().iter().filter(named) {
                let interface = attachment.plan().interface.clone();
                let details = details(attachment);
                if details.as_ref().is_none_or(|d| d.main) {
                    let message = format!(
                        "{interface} is the main interface of sandbox {sandbox}: detach the pod as a whole"
                    );
                    return Err(Error::new(Reason::Refused, message));
                }
                if let Some(Door::Object(object)) = details.map(|d| d.door) {
                    let name = object.name;
                    let message =
                        format!("{interface} was asked for by NetworkAttachment {name}: delete that");
                    return Err(Error::new(Reason::Refused, message));
                }
                leaving.push(interface);
            }
            let done = core.take_back(&record, &leaving).await;
            core.inner.report.changed(&sandbox);
            if done {
                return Ok(());
            }
            let message =
                format!("interfaces of sandbox {sandbox} could not be detached; the agent tries again");
            Err(Error::new(Reason::NotReady, message))
        })
        .await
    }

    /// Looks whether a pod's interfaces are as they were made.
    ///
    /// # Errors
    /// When they are not, or the pod is not known.
    pub async fn check(&self, sandbox: SandboxId) -> Result<Attached> {
        let core = self.clone();
        self.run(Operation::Check, async move {
            let _guard = core.inner.locks.lock(&sandbox).await;
            core.do_check(&sandbox).await
        })
        .await
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
        self.run(Operation::Gc, async move {
            let of_door = |r: &&SandboxRecord| {
                r.attachments().iter().filter_map(details).any(|d| d.door.is_served_by(&door))
            };
            let unused: Vec<SandboxId> = core
                .books()
                .records()
                .filter(of_door)
                .filter(|r| r.created_at() <= before.0 && !keep.contains(r.sandbox()))
                .filter_map(|r| SandboxId::new(r.sandbox()).ok())
                .collect();
            let mut left = 0_usize;
            for sandbox in unused {
                let _guard = core.inner.locks.lock(&sandbox).await;
                let record = core.books().get(&sandbox).filter(|r| r.created_at() <= before.0).cloned();
                if let Some(record) = record {
                    if let Some(why) = core.spared(&record, &processes) {
                        tracing::warn!(%sandbox, "it is not in the list of a garbage collection, but {why}: it stays");
                        continue;
                    }
                    tracing::info!(%sandbox, "removing what its runtime no longer lists");
                    left += usize::from(core.remove_sandbox(&record).await.is_err());
                }
            }
            if left == 0 {
                return Ok(());
            }
            let message = format!("{left} sandboxes could not be removed completely; the agent tries again");
            Err(Error::new(Reason::NotReady, message))
        })
        .await
    }

    /// Whether containers can be added, in the sense of CNI STATUS: it never fails again once it succeeded since boot.
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
        let books = self.books();
        let wanted = books.records().filter(|r| sandbox.is_none_or(|s| s.as_str() == r.sandbox()));
        wanted.flat_map(|r| r.attachments().iter().filter_map(made)).collect()
    }

    /// The pod of a sandbox, as the ledger knows it.
    #[must_use]
    pub fn pod_of_sandbox(&self, sandbox: &SandboxId) -> Option<Pod> {
        self.books().get(sandbox).and_then(|record| pod_of(record).ok())
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
        &self.inner.world
    }

    /// The runtimes of this node.
    #[must_use]
    pub fn runtimes(&self) -> &Runtimes {
        &self.inner.runtimes
    }

    /// The Networks of this node.
    #[must_use]
    pub fn networks(&self) -> &Networks {
        &self.inner.networks
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

    /// All that is counted on this node, its service proxies included, in the text form of OpenMetrics.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let own = self.inner.metrics.text();
        let Some(proxies) = self.inner.proxy.as_ref().map(|proxy| proxy.metrics()) else { return own };
        let end = "# EOF\n";
        let body = own.strip_suffix(end).unwrap_or(&own);
        format!("{body}{proxies}{end}")
    }

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.inner.config.node
    }

    /// Names, paths and limits.
    #[must_use]
    pub fn config(&self) -> &CoreConfig {
        &self.inner.config
    }

    /// What is to be told about pods.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.inner.report
    }

    /// Tells of every change of what NodeNetwork shows.
    #[must_use]
    pub fn shown(&self) -> watch::Receiver<u64> {
        self.inner.shown.subscribe()
    }

    /// Allocator and ledger. Never held over an await.
    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.inner.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Interfaces whose attach was given up, and still runs. Never held over an await.
    pub(crate) fn late(&self) -> MutexGuard<'_, BTreeSet<(SandboxId, String)>> {
        self.inner.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn cri(&self) -> Option<&Cri> {
        self.inner.cri.as_ref()
    }

    pub(crate) fn repairs(&self) -> &Repairs {
        &self.inner.repairs
    }

    pub(crate) fn locks(&self) -> &SandboxLocks {
        &self.inner.locks
    }

    /// Something that NodeNetwork shows of a Network may have changed.
    pub fn networks_changed(&self) {
        self.inner.shown.send_modify(|n| *n += 1);
    }

    /// Addresses may have become free, or attachments changed.
    pub(crate) fn books_changed(&self) {
        self.inner.addresses.notify_waiters();
        self.networks_changed();
    }

    /// The routers of the runtime here that has some which the agent serves Services in.
    #[must_use]
    pub fn routers(&self) -> Option<Arc<dyn Routers>> {
        self.runtimes().all().into_iter().find_map(|(_, runtime)| runtime.routers())
    }

    /// Has the service proxies compare what they made, as runtimes do.
    pub(crate) fn compare_services(&self) {
        self.inner.proxy.iter().for_each(|proxy| proxy.compare());
    }

    pub(crate) async fn start_proxy(&self, network: &Arc<knit_runtime::Network>) -> Option<Box<dyn Running>> {
        let proxy = self.inner.proxy.as_ref()?;
        let world = self.world().get();
        let runtime = world.networks.get(&network.name).and_then(|n| world.runtime_of(n));
        let has_routers = |name: &String| self.runtimes().get(name).is_some_and(|r| r.routers().is_some());
        if let Some(runtime) = runtime.filter(|name| !has_routers(name)) {
            return Some(Box::new(Foreign { runtime }));
        }
        let own = network.name == knit_api::names::DEFAULT_NETWORK;
        let router = (!own).then(|| self.inner.config.routers_dir().join(&network.name));
        match proxy.start(router, network).await {
            Ok(running) => Some(running),
            Err(error) => {
                tracing::error!(network = %network.name, error = &error as &dyn std::error::Error, "no Services in this Network");
                None
            }
        }
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
                Err(Error::new(Reason::Internal, "the node agent failed: see its log").because(failed))
            }
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("node", &self.inner.config.node).finish_non_exhaustive()
    }
}
