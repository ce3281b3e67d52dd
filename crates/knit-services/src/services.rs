//! What the agent holds: starts instances, and tells how they stand.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use knit_kernel::NetNs;
use knit_node::Core;
use knit_node::proxy::{ProxyError, Running, ServiceProxy, ServicesState};
use knit_objects::Objects;
use knit_proxy::backends::Backends;
use knit_proxy::metrics::merge_texts;
use knit_runtime::{Network, Protocol};
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::node_ports::NodePorts;
use crate::supervisor::Supervisor;

/// Which Networks have their Services served by this agent.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Mode {
    /// All, but the default one only where kube-proxy does not serve it.
    #[default]
    Auto,
    /// All.
    On,
}

/// What the proxies of a node are told.
#[derive(Debug)]
pub struct Config {
    /// The node's name.
    pub node: String,
    /// The node's own network namespace: the default Network's router.
    pub namespace: NetNs,
    /// Which Networks are served.
    pub mode: Mode,
    /// Where /healthz and /livez are answered as kube-proxy does, while this agent serves the default
    /// Network: load balancers outside ask there whether to use this node. Nowhere if there is none.
    pub healthz: Option<SocketAddr>,
    /// Where /metrics and /proxyMode are answered as kube-proxy does, at the same times. Nowhere if there is
    /// none.
    pub metrics: Option<SocketAddr>,
    /// What makes Services true in a router.
    pub backends: Arc<dyn Backends>,
}

/// Where kube-proxy answers /healthz unless told otherwise.
pub const HEALTHZ: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 10256);

/// Where kube-proxy answers /metrics and /proxyMode unless told otherwise.
pub const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);

/// The service proxies of a node.
#[derive(Debug)]
pub struct Services {
    commands: mpsc::UnboundedSender<Command>,
    start: Mutex<Option<(Config, mpsc::UnboundedReceiver<Command>)>>,
    ids: AtomicU64,
    registries: Registries,
    node_ports: Arc<Mutex<NodePorts>>,
}

/// What each instance counts.
pub(crate) type Registries = Arc<Mutex<BTreeMap<u64, Registry>>>;

/// What the supervisor is asked for.
#[derive(Debug)]
pub(crate) enum Command {
    Start { id: u64, router: Option<PathBuf>, network: Network, state: Arc<watch::Sender<ServicesState>> },
    Update { id: u64, network: Network },
    Stop { id: u64 },
    Compare,
}

/// One instance, as the agent holds it.
struct Held {
    id: u64,
    network: String,
    commands: mpsc::UnboundedSender<Command>,
    state: Arc<watch::Sender<ServicesState>>,
}

impl Services {
    /// For one node. Nothing runs before the agent asks for it.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        Self {
            commands,
            start: Mutex::new(Some((config, inbox))),
            ids: AtomicU64::new(0),
            registries: Registries::default(),
            node_ports: Arc::default(),
        }
    }
}

#[async_trait]
impl ServiceProxy for Services {
    fn follow(&self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((config, inbox)) = start else { return };
        let Some(routers) = core.routers() else {
            tracing::error!("no network runtime of this node has routers that Services could be served in");
            return;
        };
        let shared = (Arc::clone(&self.registries), Arc::clone(&self.node_ports));
        match Supervisor::new(config, core.clone(), routers, objects, shared) {
            Ok(supervisor) => drop(tasks.spawn(supervisor.run(inbox))),
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "Services cannot be followed");
            }
        }
    }

    async fn start(
        &self,
        router: Option<PathBuf>,
        network: &Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new(watch::Sender::new(ServicesState::Waiting));
        let held = Held {
            id,
            network: network.name.clone(),
            commands: self.commands.clone(),
            state: Arc::clone(&state),
        };
        let command = Command::Start { id, router, network: network.clone(), state };
        let stopped = |error: mpsc::error::SendError<Command>| ProxyError {
            network: network.name.clone(),
            source: error.to_string().into(),
        };
        self.commands.send(command).map_err(stopped)?;
        Ok(Box::new(held))
    }

    fn compare(&self) {
        // Without a supervisor the agent is stopping.
        let _ = self.commands.send(Command::Compare);
    }

    fn metrics(&self) -> String {
        metrics(&self.registries)
    }

    fn owner_of_node_port(&self, protocol: Protocol, port: u16) -> Option<(String, String)> {
        let ports = self.node_ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.owner(protocol, port).map(|name| (name.namespace().to_owned(), name.name().to_owned()))
    }
}

/// The text of all that instances count.
pub(crate) fn metrics(registries: &Registries) -> String {
    let registries = registries.lock().unwrap_or_else(PoisonError::into_inner);
    let text = |registry: &Registry| {
        let mut text = String::new();
        // A string takes everything.
        let _ = prometheus_client::encoding::text::encode(&mut text, registry);
        text
    };
    let texts: Vec<String> = registries.values().map(text).collect();
    merge_texts(texts.iter().map(String::as_str))
}

impl Running for Held {
    fn update(&self, network: &Network) {
        // Without a supervisor the agent is stopping.
        let _ = self.commands.send(Command::Update { id: self.id, network: network.clone() });
    }

    fn watch(&self) -> watch::Receiver<ServicesState> {
        self.state.subscribe()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop { id: self.id });
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services")
            .field("network", &self.network)
            .field("state", &*self.state.borrow())
            .finish()
    }
}
