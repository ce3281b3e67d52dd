//! What the agent holds: starts instances, and tells how they stand.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use knit_kernel::NetNs;
use knit_node::Core;
use knit_node::proxy::{ProxyError, Running, ServiceProxy, ServicesState, Stopped};
use knit_objects::Objects;
use knit_proxy::backends::Backends;
use knit_proxy::metrics::{merge_texts, text};
use knit_runtime::{Network, NetworkName, Protocol};
use knit_types::sync::Locked;
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
    /// Whether all Services have been listed; closed when nobody is left who lists them.
    listed: watch::Receiver<bool>,
    listed_by: Mutex<Option<watch::Sender<bool>>>,
    /// Whether a supervisor was started.
    ran: AtomicBool,
}

/// What each instance counts.
pub(crate) type Registries = Arc<Mutex<BTreeMap<u64, Registry>>>;

/// What the supervisor shares with the agent.
pub(crate) struct Shared {
    pub registries: Registries,
    pub node_ports: Arc<Mutex<NodePorts>>,
    /// Whether all Services have been listed.
    pub listed: watch::Sender<bool>,
}

/// What the supervisor is asked for.
#[derive(Debug)]
pub(crate) enum Command {
    Start { id: u64, router: Option<PathBuf>, network: Network, state: Arc<watch::Sender<ServicesState>> },
    Update { id: u64, network: Network },
    Stop { id: u64 },
    Compare,
}

/// One instance, as the agent holds it. Only the supervisor has the other end of its state: when that is
/// gone, the state says so.
struct Held {
    id: u64,
    network: NetworkName,
    commands: mpsc::UnboundedSender<Command>,
    state: watch::Receiver<ServicesState>,
}

impl Services {
    /// For one node. Nothing runs before the agent asks for it.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let (listed_by, listed) = watch::channel(false);
        Self {
            listed,
            listed_by: Mutex::new(Some(listed_by)),
            ran: AtomicBool::new(false),
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
        let start = self.start.locked().take();
        let listed = self.listed_by.locked().take();
        let Some(((config, inbox), listed)) = start.zip(listed) else { return };
        let Some(routers) = core.routers() else {
            tracing::error!("no network runtime of this node has routers in which Services could be served");
            return;
        };
        let shared = Shared {
            registries: Arc::clone(&self.registries),
            node_ports: Arc::clone(&self.node_ports),
            listed,
        };
        match Supervisor::new(config, core.clone(), routers, objects, shared) {
            Ok(supervisor) => {
                self.ran.store(true, Ordering::Relaxed);
                let core = core.clone();
                tasks.spawn(async move {
                    // Also where it panics.
                    let _ended = Ended(core);
                    supervisor.run(inbox).await;
                    tracing::error!("the service proxies of this node have stopped: restart the agent");
                });
            }
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "cannot watch Services");
            }
        }
    }

    async fn start(
        &self,
        router: Option<PathBuf>,
        network: &Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let (sender, state) = watch::channel(ServicesState::Waiting);
        let held = Held { id, network: network.name.clone(), commands: self.commands.clone(), state };
        let state = Arc::new(sender);
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
        let ports = self.node_ports.locked();
        ports.owner(protocol, port).map(|name| (name.namespace().to_owned(), name.name().to_owned()))
    }

    async fn node_ports_known(&self) -> bool {
        self.listed.clone().wait_for(|listed| *listed).await.is_ok()
    }

    fn stopped(&self) -> Option<Stopped> {
        let ran = self.ran.load(Ordering::Relaxed);
        self.commands.is_closed().then(|| Stopped {
            why: "the service proxies of this node have stopped: see the agent's log and restart the agent"
                .to_owned(),
            ran,
        })
    }
}

/// Tells the agent that the supervisor has ended.
struct Ended(Core);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.networks_changed();
    }
}

/// The text of all that instances count.
pub(crate) fn metrics(registries: &Registries) -> String {
    let registries = registries.locked();
    let texts: Vec<String> = registries.values().map(text).collect();
    merge_texts(texts.iter().map(String::as_str))
}

impl Running for Held {
    fn update(&self, network: &Network) {
        // Without a supervisor the agent is stopping.
        let _ = self.commands.send(Command::Update { id: self.id, network: network.clone() });
    }

    fn watch(&self) -> watch::Receiver<ServicesState> {
        self.state.clone()
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

#[cfg(test)]
mod tests {
    use knit_proxy_nft::NftBackends;

    use super::*;

    #[tokio::test]
    async fn an_instance_whose_supervisor_ended_waited_for_ever() {
        let config = Config {
            node: "n1".into(),
            namespace: NetNs::current().expect("a namespace"),
            mode: Mode::On,
            healthz: None,
            metrics: None,
            backends: Arc::new(NftBackends),
        };
        let services = Services::new(config);
        let network = Network {
            name: "blue".into(),
            id: knit_runtime::NetworkId::new(2).expect("a number"),
            topology: knit_runtime::Topology::Layer3,
            subnets: Vec::new(),
            mtu: None,
            primary: true,
            outside: false,
            not_outside: Vec::new(),
            cluster_service_ips: Vec::new(),
            routes: Vec::new(),
            blocks: Vec::new(),
            router_addresses: Vec::new(),
            announced: Vec::new(),
            underlay: None,
            parameters: serde_json::Map::new(),
        };
        let running = services.start(None, &network).await.expect("it is asked for");
        assert_eq!((services.stopped(), running.state()), (None, ServicesState::Waiting));
        let waiting = tokio::spawn(async move {
            let settled = running.watch().wait_for(|state| state.holds_up_pods().is_none()).await.is_ok();
            (settled, running.state())
        });
        // As when its task ends: all that it had is dropped.
        drop(services.start.lock().expect("nobody panicked").take());
        drop(services.listed_by.lock().expect("nobody panicked").take());
        let (settled, state) = waiting.await.expect("it does not wait forever");
        assert!(!settled && matches!(state, ServicesState::Broken(_)), "{state:?}");
        assert!(services.stopped().is_some_and(|stopped| !stopped.ran));
        assert!(!services.node_ports_known().await);
        assert!(services.start(None, &network).await.is_err());
    }
}
