//! The agent as a whole: opened, started, and stopped again.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use knit_ledger::{LedgerError, Recovery};
use knit_objects::{Objects, Source};
use knit_runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::claims::DeviceFiles;
use crate::config::{CoreConfig, MainInterfaces};
use crate::core::{Core, Parts};
use crate::files::Files;
use crate::front_door::dra::{DraConfig, ServeClaims};
use crate::front_door::nri::NriConfig;
use crate::front_door::{Doors, DoorsError};
use crate::http::HttpServer;
use crate::level::Followers;
use crate::policy::PolicyEnforcer;
use crate::proxy::ServiceProxy;
use crate::reconcile::{Outcome, Pass};
use crate::report::{claims, policy, published, writer};
use crate::world::World;
use crate::world::boot::{BootLog, OpenedLog};
use crate::world::feed;

/// The pause before what a pass could not do is tried again; it grows to the usual one.
const PASS_RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long the cache of Networks may be another agent's, at least.
const BOOT_LOG_TIMEOUT: Duration = Duration::from_secs(5);

/// All that an agent is told.
pub struct AgentConfig {
    /// Names, paths and limits of the core.
    pub core: CoreConfig,
    /// The socket for the CNI shim.
    pub socket: PathBuf,
    /// Where objects come from.
    pub source: Source,
    /// This node's addresses; if there is none, its Node object says them.
    pub node_addresses: Vec<IpAddr>,
    /// Where health and numbers are served, if anywhere.
    pub http: Option<SocketAddr>,
    /// How long to wait for an agent that is being replaced.
    pub lock_wait: Duration,
    /// Where the namespaces of pods are mounted.
    pub netns_dirs: Vec<PathBuf>,
    /// Makes the runtime inside the agent, once the node's addresses are known.
    pub runtime: MakeRuntime,
    /// The door of the container runtime, where another CNI plugin gives pods their main interface. Without
    /// it the agent is the node's CNI plugin.
    pub nri: Option<NriConfig>,
    /// Service proxies, if there are any.
    pub proxy: Option<Arc<dyn ServiceProxy>>,
    /// Who enforces policies, if anybody here does.
    pub policies: Option<Arc<dyn PolicyEnforcer>>,
    /// The door of claims, if it may be open.
    pub dra: Option<DraConfig>,
}

/// Makes the runtime inside the agent for a node with these addresses.
pub type MakeRuntime = Box<dyn FnOnce(Vec<IpAddr>) -> knit_runtime::Result<Arc<dyn Runtime>> + Send>;

/// A running agent.
#[derive(Debug)]
pub struct Agent {
    core: Core,
    objects: Objects,
    tasks: JoinSet<()>,
    http: Option<SocketAddr>,
}

/// Why an agent did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The objects cannot be had.
    #[error("the node agent cannot read its objects")]
    Objects(#[source] Box<knit_objects::Error>),
    /// The ledger cannot be opened.
    #[error("the node agent cannot open its ledger")]
    Ledger(#[source] LedgerError),
    /// A directory cannot be made.
    #[error("cannot create directory {path}: check that its parent exists and is writable",
        path = path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The port cannot be opened.
    #[error("cannot listen on {address} for health and metrics: free the address, or set another one")]
    Http {
        /// The address.
        address: SocketAddr,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The runtime inside the agent does not start.
    #[error("the built-in network runtime did not start")]
    Runtime(#[source] Box<knit_runtime::Error>),
    /// A front door cannot be opened.
    #[error(transparent)]
    Door(DoorsError),
}

// === impl Agent ===

impl Agent {
    /// Starts an agent. When this returns, requests are served. It waits for the node's addresses as long as
    /// it takes.
    ///
    /// # Errors
    /// When something is wrong with what it was told, or another agent has the ledger.
    pub async fn start(config: AgentConfig) -> Result<Self, StartError> {
        let AgentConfig {
            mut core,
            socket,
            source,
            node_addresses,
            http,
            lock_wait,
            netns_dirs,
            runtime,
            nri,
            proxy,
            policies,
            dra,
        } = config;
        if nri.is_some() {
            core.main_interfaces = MainInterfaces::Foreign;
        }
        for path in [core.run_dir.clone(), core.state_dir.clone(), core.runtimes_dir()] {
            make_directory(&path).map_err(|source| StartError::Directory { path, source })?;
        }
        let (files, recovery) = open_ledger(&core, lock_wait).await.map_err(StartError::Ledger)?;
        let (boot, world) = open_boot_log(&core, lock_wait).await;
        let core = Core::new(Parts {
            config: core,
            world,
            store: Box::new(files),
            proxy: proxy.clone(),
            policies: policies.clone(),
        });
        let node = core.node().to_owned();
        for kept in [Some(&*core.world().get()), boot.as_ref().and_then(|boot| boot.other.as_ref())] {
            kept.into_iter().for_each(|kept| core.world().kept().may_be(Arc::new(kept.own_blocks(&node))));
        }
        if boot.is_none() {
            core.world().kept().is_unknown();
        }
        let mut tasks = JoinSet::new();
        let http = match http {
            Some(address) => {
                let failed = |source| StartError::Http { address, source };
                match HttpServer::open(address).await {
                    Ok(server) => {
                        let bound = server.address().map_err(failed)?;
                        tasks.spawn(server.serve(core.clone()));
                        Some(bound)
                    }
                    // The node's address may come late, or be a cloud's and on no interface: pods do not wait
                    // for that.
                    Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                        tracing::warn!(%address, "no interface has the address for health and metrics yet: \
                        they are served once one has it");
                        tasks.spawn(HttpServer::serve_once_there(address, core.clone()));
                        Some(address)
                    }
                    Err(error) => return Err(failed(error)),
                }
            }
            None => None,
        };
        let objects_failed = |error| StartError::Objects(Box::new(error));
        let objects = Objects::open(source).await.map_err(objects_failed)?;
        feed::start(&core, &objects, &mut tasks).map_err(objects_failed)?;
        if let Some(boot) = boot {
            tasks.spawn(feed::keep(core.clone(), boot.log));
        }

        let addresses = wait_for_addresses(&core, node_addresses).await;
        let runtime_failed = |error| StartError::Runtime(Box::new(error));
        let runtime = runtime(addresses).map_err(runtime_failed)?;
        core.runtimes().add(runtime).await.map_err(runtime_failed)?;
        let adopt = recovery != Recovery::Clean;
        core.sandboxes().set_whole(!adopt);
        // Services are served in the routers of a runtime: after it, and before the first Network is set up.
        if let Some(proxy) = proxy {
            proxy.follow(&core, &objects, &mut tasks);
        }
        if let Some(policies) = &policies {
            policies.follow(&core, &objects, &mut tasks);
        }
        let limit = core.config().runtime_deadline;
        core.runtimes().refresh(&core.config().runtimes_dir(), limit).await;
        wait_for_objects(&core).await;

        let first = core.begin(&Pass { first: true, adopt, netns_dirs: netns_dirs.clone() }).await;
        let dra = dra.filter(|dra| dra.serve == ServeClaims::All || has_claims_left(&core));
        if let Some(dra) = &dra {
            let doubtful = match recovery {
                Recovery::Clean => false,
                // Nothing runs after a reboot; what runs without a record had a ledger that is gone, and
                // kubelet still takes its claims for prepared.
                Recovery::Fresh => first.adopted > 0,
                Recovery::TornTailCut { .. } | Recovery::SetAside { .. } => true,
            };
            let files = dra.cdi_dir.clone().map(|cdi_dir| DeviceFiles::new(&dra.kubelet_dir, cdi_dir));
            core.use_claims_with(Arc::new(objects.clone()), files, doubtful);
            let sweeping = core.clone();
            tasks.spawn(async move { sweeping.keep_claims_swept().await });
            let telling = core.clone();
            tasks.spawn(async move { telling.keep_host_pods_told().await });
            tasks.spawn(claims::write_claims(core.clone(), objects.clone()));
        }
        let doors =
            Doors::open(&socket, &core.config().run_dir, dra.as_ref(), nri).map_err(StartError::Door)?;
        doors.serve(&core, &objects, &mut tasks);
        // Shims that found nobody between the first pass and now have left notes.
        let late = core.clone();
        tasks.spawn(async move { late.take_spooled().await });
        spawn_loops(&core, &objects, netns_dirs, first, &mut tasks);
        Ok(Self { core, objects, tasks, http })
    }

    /// The core, for further front doors.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Where objects come from and go to.
    #[must_use]
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Where health and numbers are served.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Stops: takes no further requests, and ends those that run within the deadline. Pods keep their
    /// networks.
    pub async fn stop(mut self, deadline: Duration) {
        self.tasks.abort_all();
        if tokio::time::timeout(deadline, self.core.idle()).await.is_err() {
            tracing::warn!(
                "stopping while requests are still running: the next start finishes them or rolls them back"
            );
        }
        while self.tasks.join_next().await.is_some() {}
        tracing::info!("stopped");
    }
}

fn spawn_loops(
    core: &Core,
    objects: &Objects,
    netns_dirs: Vec<PathBuf>,
    first: Outcome,
    tasks: &mut JoinSet<()>,
) {
    let following = core.clone();
    tasks.spawn(async move { following.networks().follow().await });
    tasks.spawn(writer::write_reports(core.clone(), objects.clone()));
    tasks.spawn(published::follow(core.clone(), objects.clone()));
    tasks.spawn(writer::write_node(core.clone(), objects.clone()));
    tasks.spawn(writer::renew_lease(core.clone(), objects.clone()));
    if core.networks().policies().is_none() {
        tasks.spawn(policy::warn_of_policies(core.clone(), objects.clone()));
    }
    let reconciling = core.clone();
    tasks.spawn(async move {
        let every = reconciling.config().reconcile_every;
        // What could not be done is tried again soon: a namespace that ends, say, takes its links with it a
        // moment later.
        let mut again = PASS_RETRY_DELAY;
        let mut outcome = first;
        loop {
            let pause = if outcome.failed == 0 { every } else { again.min(every) };
            again = if outcome.failed == 0 { PASS_RETRY_DELAY } else { (again * 2).min(every) };
            tokio::time::sleep(pause).await;
            let pass = Pass { netns_dirs: netns_dirs.clone(), ..Pass::default() };
            outcome = reconciling.reconcile(&pass).await;
        }
    });
    for (_, runtime) in core.runtimes().all() {
        let keeping = core.clone();
        tasks.spawn(async move { keeping.keep_right(runtime).await });
    }
    let looking = core.clone();
    tasks.spawn(async move {
        let (directory, limit) = (looking.config().runtimes_dir(), looking.config().runtime_deadline);
        let mut followers = Followers::default();
        loop {
            followers.keep_up(&looking);
            tokio::time::sleep(Duration::from_secs(5)).await;
            if looking.runtimes().refresh(&directory, limit).await {
                looking.networks().look_again();
                looking.networks_changed();
            }
        }
    });
}

/// Opens the ledger; an agent that is being replaced gives it up when it stops.
async fn open_ledger(config: &CoreConfig, patience: Duration) -> Result<(Files, Recovery), LedgerError> {
    let deadline = Instant::now() + patience;
    let mut told = false;
    loop {
        match Files::open(&config.ledger()) {
            Ok((files, recovery)) => {
                match &recovery {
                    Recovery::Fresh | Recovery::Clean => {}
                    found => tracing::warn!(?found, "the ledger was damaged"),
                }
                return Ok((files, recovery));
            }
            Err(error @ LedgerError::Locked { .. }) if Instant::now() < deadline => {
                if !told {
                    tracing::info!("waiting for the agent that holds the ledger: {error}");
                    told = true;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Opens what is kept for starts without the API. Without it pods wait for the API; nothing else does.
async fn open_boot_log(config: &CoreConfig, patience: Duration) -> (Option<OpenedLog>, World) {
    let deadline = Instant::now() + patience.max(BOOT_LOG_TIMEOUT);
    loop {
        match BootLog::open(&config.state_dir) {
            Ok(mut opened) => {
                let world = std::mem::take(&mut opened.world);
                return (Some(opened), world);
            }
            // A write of the agent that is being replaced ends after its last request.
            Err(LedgerError::Locked { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    error,
                    "cannot open the cache of Networks: while the API is away, an agent that \
                    starts knows of no Network; free its directory of what is in the way, and restart the \
                    agent"
                );
                return (None, World::default());
            }
        }
    }
}

/// Whether an earlier agent left claims, which is told: without the door kubelet cannot end their pods, and
/// nobody would ever free what they have.
fn has_claims_left(core: &Core) -> bool {
    if !core.sandboxes().books().has_claims() {
        return false;
    }
    let message = "serving claims although --dra is off: some claims are still prepared on this node, and \
        kubelet cannot terminate their pods otherwise; delete those pods, and restart the agent once they \
        are gone";
    tracing::warn!("{message}");
    core.report().say_of_node("ClaimsLeft", message.to_owned());
    true
}

async fn wait_for_addresses(core: &Core, given: Vec<IpAddr>) -> Vec<IpAddr> {
    if !given.is_empty() {
        return given;
    }
    let node = core.node().to_owned();
    let far = Instant::now() + Duration::from_secs(60 * 60 * 24 * 365);
    loop {
        let look = |world: &World| {
            let addresses = world.nodes.get(&node).map(|n| n.addresses.clone()).filter(|a| !a.is_empty());
            addresses.ok_or(())
        };
        let soon = Instant::now() + Duration::from_secs(5);
        if let Ok(addresses) = core.world().wait(soon, look).await {
            return addresses;
        }
        tracing::warn!(%node, "waiting for InternalIP addresses in the status of this Node; --node-ip sets \
        them directly");
        if let Ok(addresses) = core.world().wait(far, look).await {
            return addresses;
        }
    }
}

/// Waits a little for all objects, unless some are known from before.
async fn wait_for_objects(core: &Core) {
    let known = !core.world().get().networks.is_empty();
    let patience = if known { Duration::from_secs(1) } else { Duration::from_secs(5) };
    let arrived =
        core.world().wait(Instant::now() + patience, |world| world.is_synced().then_some(()).ok_or(()));
    if arrived.await.is_err() {
        tracing::warn!("not all objects have arrived; continuing with what was known before");
    }
}

fn make_directory(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
