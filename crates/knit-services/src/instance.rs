//! The proxy of one router: how it is configured, and what it says about itself.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::netns::NsId;
use knit_node::proxy::ServicesState;
use knit_proxy::backend::Outcome;
use knit_proxy::backends::{BackendSetup, Backends, Limits, MasqueradeAs, OpenError};
use knit_proxy::engine::{EngineConfig, Observer, Run};
use knit_proxy::health;
use knit_proxy::model::{Family, NetworkName, NodeInfo, Problem};
use knit_proxy::source::{Event, Stopped};
use knit_proxy::start::{Options, Running, start};
use knit_proxy::view::{LocalTraffic, NodePorts, PortKey, PortView, ViewConfig};
use knit_proxy::vitals::{Bind, Checks, ServerError, ServerNews, Servers, Vitals};
use knit_runtime::Network;
use knit_runtime::routers::Routers;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::entrances::Ends;
use crate::internal_ports::reserved;
use crate::services::Registries;

/// The proxy of one router, whether or not it runs.
pub(crate) struct Instance {
    pub id: u64,
    /// Where its router is; none for the node's own namespace.
    pub router: Option<PathBuf>,
    pub network: Network,
    pub state: Arc<watch::Sender<ServicesState>>,
    pub running: Option<Proxy>,
    vitals: Vitals,
    /// All that it serves was once in force.
    pub reported: bool,
    /// Keeps the limits of the kernel that it needs; none while they were not looked at yet.
    pub limits: Option<Box<dyn Limits>>,
}

/// One that runs.
pub(crate) struct Proxy {
    running: Running,
    /// The namespace it runs in: one that was made again under the same path is another one.
    pub namespace: NsId,
    /// What it was told about where it is.
    pub facts: InstanceFacts,
    /// They end with it.
    _servers: JoinSet<Result<(), ServerError>>,
}

/// Where an instance is, and what it may have there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct InstanceFacts {
    pub ends: Ends,
    /// Sources that are as good as the node itself: what answers them must come back through this router.
    pub near: Vec<IpNet>,
    /// External IPs may be addresses of the node's own.
    pub takes_own: bool,
}

/// What the default Network's instance answers over HTTP, and the node on which all do.
pub(crate) struct Answers {
    pub node: Arc<NetNs>,
    pub healthz: Option<SocketAddr>,
    pub metrics: Option<SocketAddr>,
    pub registries: Registries,
    /// What makes Services true, as kube-proxy would call it.
    pub mode: &'static str,
}

/// A proxy that was started just now, and where.
pub(crate) struct Started {
    pub running: Running,
    pub namespace: NsId,
    pub facts: InstanceFacts,
    /// What an agent before this one made there is in force.
    pub left_over: bool,
}

/// What is needed to start an instance.
pub(crate) struct Setup {
    network: Network,
    own: bool,
    observers: Vec<Box<dyn Observer + Send>>,
    vitals: Vitals,
    repaired: Box<dyn Fn() + Send>,
}

/// These ports are in force in a router; none: no longer.
pub(crate) struct PortNews {
    pub id: u64,
    /// These are all.
    pub full: bool,
    pub ports: Vec<(PortKey, Option<Arc<PortView>>)>,
}

/// A change waits this long at most, or the proxy is unwell (rule 55).
const UNHEALTHY_DELAY: Duration = Duration::from_secs(60);

/// Is called when a state changes that people see.
pub(crate) type Changed = Arc<dyn Fn() + Send + Sync>;

/// Why a proxy does not start.
#[derive(Debug)]
pub(crate) enum StartError {
    Namespace(knit_kernel::netns::Error),
    Objects(knit_objects::Error),
    Open(OpenError),
    Start(std::io::Error),
    Look(OpenError),
    GiveWay(OpenError),
    Uplink(knit_runtime::Error),
}

/// Turns what an engine does into a state and a log.
struct Watcher {
    network: NetworkName,
    state: Arc<watch::Sender<ServicesState>>,
    changed: Changed,
}

/// Tells which ports are in force.
struct PortTeller {
    id: u64,
    news: mpsc::UnboundedSender<PortNews>,
}

impl Instance {
    /// A new one, which does not run, and what it counts.
    pub(crate) fn new(
        id: u64,
        router: Option<PathBuf>,
        network: Network,
        state: Arc<watch::Sender<ServicesState>>,
    ) -> (Self, Registry) {
        let labels = [("network".into(), String::from(network.name.clone()).into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        let vitals = Vitals::register(&mut registry, UNHEALTHY_DELAY);
        let (running, reported, limits) = (None, false, None);
        let instance = Self { id, router, network, state, running, vitals, reported, limits };
        (instance, registry)
    }

    pub(crate) fn name(&self) -> NetworkName {
        self.network.name.clone()
    }

    /// Says how it stands.
    pub(crate) fn set_state(&self, state: ServicesState, changed: &Changed) {
        show(&self.network.name, &self.state, state, changed);
    }

    /// Whether the same settings hold for another version of its Network. The addresses to leave alone may
    /// change at any time.
    pub(crate) fn same_settings(&self, network: &Network) -> bool {
        self.network.subnets == network.subnets && self.network.router_addresses == network.router_addresses
    }

    /// The addresses to leave alone: those that go up the uplink.
    pub(crate) fn exempt(&self) -> Vec<IpAddr> {
        self.network.cluster_service_ips.clone()
    }

    /// What is needed to start it.
    pub(crate) fn setup(
        &self,
        changed: &Changed,
        news: &mpsc::UnboundedSender<PortNews>,
        repaired: Box<dyn Fn() + Send>,
    ) -> Setup {
        let watcher = Watcher {
            network: self.network.name.clone(),
            state: Arc::clone(&self.state),
            changed: Arc::clone(changed),
        };
        let mut observers = self.vitals.observers();
        observers.push(Box::new(watcher));
        if self.router.is_some() {
            observers.push(Box::new(PortTeller { id: self.id, news: news.clone() }));
        }
        Setup {
            network: self.network.clone(),
            own: self.router.is_none(),
            observers,
            vitals: self.vitals.clone(),
            repaired,
        }
    }

    /// It was started: its health check ports are served, on the node's addresses, and for the default
    /// Network the health of the proxy and what it counts.
    pub(crate) fn started(
        &mut self,
        Started { running, namespace, facts, .. }: Started,
        Answers { node, healthz, metrics, registries, mode }: Answers,
    ) {
        let own = self.router.is_none();
        let servers = Servers {
            healthz: healthz.filter(|_| own),
            metrics: metrics.filter(|_| own),
            mode,
            text: Arc::new(move || crate::services::metrics(&registries)),
            checks: Some(match own {
                true => Checks::OnNodePorts,
                false => Checks::On(facts.ends.node.clone()),
            }),
            bind: bind_on(node),
            hard_fail: false,
            tell: Arc::new(log_server),
        };
        let servers = self.vitals.serve(&servers);
        self.running = Some(Proxy { running, namespace, facts, _servers: servers });
    }
}

impl InstanceFacts {
    /// Of the node's own namespace.
    pub(crate) fn of_node(takes_own: bool) -> Self {
        Self { takes_own, ..Self::default() }
    }

    /// Looks at a router's namespace; `node` are the addresses of the node, `near` those of its own pods.
    pub(crate) fn of_router(
        routers: &dyn Routers,
        router: &NetNs,
        node: &NodeInfo,
        near: &[IpNet],
    ) -> Result<Self, StartError> {
        let router = routers.uplink(router.as_fd()).map_err(StartError::Uplink)?;
        let node: Vec<IpAddr> = Family::ALL.into_iter().filter_map(|family| node.primary(family)).collect();
        let near = node.iter().copied().map(IpNet::from).chain(near.iter().copied()).collect();
        Ok(Self { ends: Ends { router, node }, near, takes_own: false })
    }

    /// The node as an instance is to know it. Only the default Network's router has the node's addresses; any
    /// other answers for node ports where its node steers to, and where its own pods call the node.
    pub(crate) fn node(&self, own: bool, node: &NodeInfo) -> NodeInfo {
        if own {
            return node.clone();
        }
        let (addresses, host_addresses) = (self.ends.router.clone(), self.ends.node.clone());
        NodeInfo { addresses, host_addresses, ..node.clone() }
    }
}

impl Setup {
    /// Starts the proxy in a namespace.
    pub(crate) fn start(
        self,
        (backends, routers): (&dyn Backends, &dyn Routers),
        namespace: &NetNs,
        node: &NodeInfo,
        facts: &InstanceFacts,
    ) -> Result<Running, StartError> {
        let network = self.network;
        let subnets: Vec<IpNet> = network.subnets.iter().map(|subnet| subnet.cidr.trunc()).collect();
        let mut view = ViewConfig {
            reserved: reserved(routers),
            network: network.name.clone(),
            local_traffic: LocalTraffic::Sources(subnets.clone()),
            exempt_vips: network.cluster_service_ips,
            ..ViewConfig::default()
        };
        let repaired = self.repaired;
        let mut setup = BackendSetup {
            namespace: Some(namespace.as_fd()),
            on_clean: Some(self.vitals.on_clean()),
            on_repair: Some(Box::new(move |_| repaired())),
            ..BackendSetup::default()
        };
        if self.own {
            setup.routers = Some(routers.uplink_prefix());
            setup.keeps_own_addresses = !facts.takes_own;
        } else {
            let ends = facts.ends.router.iter().chain(&facts.ends.node).copied();
            // A family without any range would answer everywhere.
            let nowhere = [IpAddr::from([127, 0, 0, 1]), IpAddr::from(Ipv6Addr::LOCALHOST)];
            view.node_ports = NodePorts::Ranges(ends.chain(nowhere).map(IpNet::from).collect());
            setup.masquerade_as = MasqueradeAs { addresses: network.router_addresses, towards: subnets };
            setup.node_sources = facts.near.clone();
        }
        let backend = backends.open(setup).map_err(StartError::Open)?;
        let engine = EngineConfig { view, ..EngineConfig::default() };
        let options = Options { engine, observers: self.observers, on_end: None };
        start(backend, facts.node(self.own, node), options).map_err(StartError::Start)
    }
}

impl Proxy {
    pub(crate) fn send(&self, event: Event) -> Result<(), Stopped> {
        self.running.handle().send(event)
    }

    pub(crate) fn compare(&self) -> Result<(), Stopped> {
        self.running.handle().compare()
    }

    pub(crate) fn all_listed(&self) -> Result<(), Stopped> {
        self.running.handle().all_listed()
    }
}

impl Observer for PortTeller {
    fn ran(&mut self, run: &Run<'_>) {
        if let Outcome::Failed(_) = run.outcome {
            return;
        }
        let in_force = |key: &PortKey| {
            run.outcome.broken(key.family).is_none()
                && run.outcome.failures().iter().all(|failure| failure.key != *key)
        };
        // A family that was whole again has all of its ports in force, not only those that changed.
        let full = run.full || run.changes.retry.is_some();
        let ports: Vec<_> = if full {
            let all = run.state.ports.iter().filter(|(key, _)| in_force(key));
            all.map(|(key, view)| (key.clone(), Some(Arc::clone(view)))).collect()
        } else {
            let changes = run.changes.ports.iter();
            changes.map(|c| (c.key.clone(), c.new.clone().filter(|_| in_force(&c.key)))).collect()
        };
        if full || !ports.is_empty() {
            // Without a supervisor the agent is stopping.
            let _ = self.news.send(PortNews { id: self.id, full, ports });
        }
    }
}

/// Opens ports on the node, whatever the router.
pub(crate) fn bind_on(node: Arc<NetNs>) -> Bind {
    Arc::new(move |at| node.run(|| health::bind(at)).map_err(std::io::Error::other).flatten())
}

/// Says once what cannot be served.
pub(crate) fn log_server(news: &ServerNews<'_>) {
    match news {
        ServerNews::Listening { .. } | ServerNews::Unavailable { again: true, .. } => {}
        ServerNews::Unavailable { .. } => tracing::warn!("service proxy: {news}"),
        ServerNews::NoCheck { .. } => tracing::warn!("{news}"),
    }
}

/// Opens the namespace of a router, or the node's own.
pub(crate) fn namespace(router: Option<&Path>, node: &NetNs) -> Result<NetNs, StartError> {
    router.map_or_else(|| node.try_clone(), NetNs::open).map_err(StartError::Namespace)
}

fn show(
    network: &NetworkName,
    sender: &watch::Sender<ServicesState>,
    state: ServicesState,
    changed: &Changed,
) {
    let mut news = false;
    sender.send_if_modified(|known| {
        let other = *known != state;
        // The number of ports changes all the time, and is nothing that people wait for.
        news = known.message() != state.message();
        *known = state;
        other
    });
    if news {
        match &*sender.borrow() {
            ServicesState::Broken(why) => tracing::error!(%network, "Services are not in force: {why}"),
            ServicesState::Off(who) => tracing::warn!(%network, "{who}"),
            ServicesState::Serving { ports, failed: 0 } => {
                tracing::info!(%network, ports, "Services are in force");
            }
            ServicesState::Serving { ports, failed } => {
                tracing::error!(%network, ports, failed, "not all Services are in force");
            }
            ServicesState::Waiting | ServicesState::Kept => {}
        }
        changed();
    }
}

impl Observer for Watcher {
    fn ran(&mut self, run: &Run<'_>) {
        let state = match run.outcome {
            Outcome::Done => ServicesState::Serving { ports: run.state.ports.len(), failed: 0 },
            Outcome::Partly(failures) => {
                for failure in failures {
                    tracing::warn!(network = %self.network, "a Service is not in force: {failure}");
                }
                ServicesState::Serving { ports: run.state.ports.len(), failed: failures.len() }
            }
            Outcome::FamilyFailed { family, reason, failures } => {
                tracing::warn!(network = %self.network, "Services of {family} are not in force: {reason}");
                let of_family = run.state.ports.keys().filter(|key| key.family == *family).count();
                let ports = run.state.ports.len();
                ServicesState::Serving { ports, failed: of_family.max(1) + failures.len() }
            }
            Outcome::Failed(why) => ServicesState::Broken(why.clone()),
        };
        show(&self.network, &self.state, state, &self.changed);
    }

    fn problem(&mut self, problem: &Problem) {
        tracing::warn!(network = %self.network, "{problem}");
    }
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Namespace(_) => "cannot open the router's namespace",
            Self::Objects(_) => "cannot read Services",
            Self::Open(_) | Self::Start(_) => "the service proxy did not start",
            Self::Look(_) => "cannot determine whether kube-proxy serves this node",
            Self::GiveWay(_) => {
                "cannot remove the tables of this agent, although kube-proxy serves this node"
            }
            Self::Uplink(_) => "cannot determine the address of a router",
        })
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Namespace(error) => error,
            Self::Objects(error) => error,
            Self::Start(error) => error,
            Self::Open(error) | Self::Look(error) | Self::GiveWay(error) => error,
            Self::Uplink(error) => error,
        })
    }
}
