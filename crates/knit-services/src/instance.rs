//! The proxy of one router: how it is configured, and what it says about itself.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use knit_kernel::NetNs;
use knit_kernel::netns::NsId;
use knit_node::proxy::ServicesState;
use knit_proxy::backend::Outcome;
use knit_proxy::engine::{EngineConfig, Observer, Run};
use knit_proxy::model::{NetworkName, NodeInfo, Problem};
use knit_proxy::source::{Event, Stopped};
use knit_proxy::view::{LocalTraffic, ViewConfig};
use knit_proxy_nft::{Options, StartError};
use knit_runtime::Network;
use tokio::sync::watch;

/// The proxy of one router, whether or not it runs.
pub(crate) struct Instance {
    /// Where its router is; none for the node's own namespace.
    pub router: Option<PathBuf>,
    pub network: Network,
    pub state: Arc<watch::Sender<ServicesState>>,
    pub running: Option<Proxy>,
}

/// One that runs.
pub(crate) struct Proxy {
    running: knit_proxy_nft::Running,
    /// The namespace it runs in: one that was made anew under the same path is another one.
    pub namespace: NsId,
}

/// Is called when a state changes that people see.
pub(crate) type Changed = Arc<dyn Fn() + Send + Sync>;

/// Why a proxy does not start.
#[derive(Debug)]
pub(crate) enum Trouble {
    Namespace(knit_kernel::netns::Error),
    Start(StartError),
    Look(knit_kernel::nft::Error),
    Links(knit_kernel::Error),
}

/// Turns what an engine does into a state and a log.
struct Watcher {
    network: String,
    state: Arc<watch::Sender<ServicesState>>,
    changed: Changed,
}

impl Instance {
    pub(crate) fn name(&self) -> NetworkName {
        NetworkName::from(self.network.name.as_str())
    }

    /// Says how it stands.
    pub(crate) fn set_state(&self, state: ServicesState, changed: &Changed) {
        show(&self.network.name, &self.state, state, changed);
    }

    /// Whether the same settings hold for another version of its Network. The addresses to leave alone may change at
    /// any time.
    pub(crate) fn same_settings(&self, network: &Network) -> bool {
        self.network.subnets == network.subnets
    }

    /// The node as this instance is to know it. Only the default Network's router has the node's addresses.
    pub(crate) fn node(&self, node: &NodeInfo) -> NodeInfo {
        if self.router.is_none() {
            return node.clone();
        }
        NodeInfo { addresses: Vec::new(), host_addresses: Vec::new(), ..node.clone() }
    }

    /// The addresses to leave alone: those that go up the uplink.
    pub(crate) fn exempt(&self) -> Vec<IpAddr> {
        self.network.cluster_service_ips.clone()
    }

    pub(crate) fn options(&self, changed: &Changed) -> Options {
        let subnets = self.network.subnets.iter().map(|subnet| subnet.cidr.trunc()).collect();
        let view = ViewConfig {
            network: self.name(),
            local_traffic: LocalTraffic::Sources(subnets),
            exempt_vips: self.exempt(),
            ..ViewConfig::default()
        };
        let watcher = Watcher {
            network: self.network.name.clone(),
            state: Arc::clone(&self.state),
            changed: Arc::clone(changed),
        };
        Options {
            engine: EngineConfig { view, ..EngineConfig::default() },
            observer: Some(Box::new(watcher)),
            ..Options::default()
        }
    }
}

impl Proxy {
    /// Starts it in a namespace.
    pub(crate) fn start(namespace: &NetNs, node: NodeInfo, options: Options) -> Result<Self, Trouble> {
        let running = knit_proxy_nft::start(Some(namespace), node, options).map_err(Trouble::Start)?;
        Ok(Self { running, namespace: namespace.id() })
    }

    pub(crate) fn send(&self, event: Event) -> Result<(), Stopped> {
        self.running.handle().send(event)
    }

    pub(crate) fn all_listed(&self) -> Result<(), Stopped> {
        self.running.handle().all_listed()
    }
}

/// Opens the namespace of a router, or the node's own.
pub(crate) fn namespace(router: Option<&Path>, node: &NetNs) -> Result<NetNs, Trouble> {
    router.map_or_else(|| node.try_clone(), NetNs::open).map_err(Trouble::Namespace)
}

fn show(network: &str, sender: &watch::Sender<ServicesState>, state: ServicesState, changed: &Changed) {
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
            ServicesState::Broken(why) => tracing::error!(network, "Services are not in force: {why}"),
            ServicesState::Off(who) => tracing::warn!(network, "{who}"),
            ServicesState::Serving { ports, failed: 0 } => {
                tracing::info!(network, ports, "Services are in force");
            }
            ServicesState::Serving { ports, failed } => {
                tracing::error!(network, ports, failed, "not all Services are in force");
            }
            ServicesState::Waiting => {}
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
            Outcome::Failed(why) => ServicesState::Broken(why.clone()),
        };
        show(&self.network, &self.state, state, &self.changed);
    }

    fn problem(&mut self, problem: &Problem) {
        tracing::warn!(network = %self.network, "{problem}");
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Namespace(_) => "the router's namespace cannot be opened",
            Self::Start(_) => "the service proxy does not start",
            Self::Look(_) => "the tables of the node cannot be read",
            Self::Links(_) => "the links of the node cannot be read",
        })
    }
}

impl std::error::Error for Trouble {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Namespace(error) => error,
            Self::Start(error) => error,
            Self::Look(error) => error,
            Self::Links(error) => error,
        })
    }
}
