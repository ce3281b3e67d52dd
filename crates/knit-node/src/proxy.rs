//! The seam to the service proxy: one instance per router, started when a Network is set up.

use std::fmt::Debug;
use std::path::PathBuf;

use async_trait::async_trait;
use knit_objects::Objects;
use knit_runtime::{Network, Protocol, Topology};
use knit_types::NetworkName;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::core::Core;

/// Starts service proxies.
#[async_trait]
pub trait ServiceProxy: Send + Sync {
    /// Called once, when objects can be read: begins to follow what proxies are made of, in these tasks.
    fn follow(&self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>);

    /// Starts the proxy of a Network's router; `router` is the path of its namespace, none for the node's
    /// own.
    ///
    /// # Errors
    /// When it cannot start; the agent logs it, and the Network works without Services.
    async fn start(&self, router: Option<PathBuf>, network: &Network)
    -> Result<Box<dyn Running>, ProxyError>;

    /// Has every proxy compare what it made in the kernel with what it should be, and repair what differs:
    /// called in each pass. It returns at once.
    fn compare(&self) {}

    /// What the proxies count, in the text form of OpenMetrics without its end.
    fn metrics(&self) -> String {
        String::new()
    }

    /// The namespace and name of the Service that has this as its node port, if one is known to.
    fn owner_of_node_port(&self, _protocol: Protocol, _port: u16) -> Option<(String, String)> {
        None
    }

    /// Returns when all Services have been listed since the agent's start, and so the owner of each node port
    /// is known; false if that will never be. What an earlier agent left in force says nothing of owners.
    async fn node_ports_known(&self) -> bool {
        true
    }

    /// Why no proxy is looked after any more; none while they are.
    fn stopped(&self) -> Option<Stopped> {
        None
    }
}

/// Service proxies or policies that nobody looks after: what is in force stays as it is, whatever happens to
/// Services or policies.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stopped {
    /// Why, and what to do.
    pub why: String,
    /// Whether they ran before: then a new start of the agent is likely to help.
    pub ran: bool,
}

/// A proxy that runs until it is dropped.
pub trait Running: Debug + Send + Sync {
    /// The Network is like this now.
    fn update(&self, network: &Network);

    /// How it stands.
    fn state(&self) -> ServicesState {
        let watch = self.watch();
        // It is closed when nobody is left who could change it.
        match watch.has_changed() {
            Ok(_) => watch.borrow().clone(),
            Err(_) => ServicesState::Broken(PROXY_STOPPED.to_owned()),
        }
    }

    /// How it stands, now and from now on: what a pod must find in force is waited for here. It is closed
    /// when nobody looks after the proxy any more.
    fn watch(&self) -> watch::Receiver<ServicesState>;
}

/// In place of a proxy, for a Network without a router: there the agent has nowhere to put one.
#[derive(Debug)]
pub(crate) struct NoRouter {
    /// It never changes. A state without its sender is one that nobody keeps up to date.
    state: watch::Sender<ServicesState>,
}

impl NoRouter {
    /// The runtime of this name makes none that the agent could use.
    pub fn of_runtime(runtime: &str) -> Self {
        Self::because(format!(
            "not served by Knit: whether Services work in this Network depends on its network runtime \
             {runtime}"
        ))
    }

    /// Networks of this kind have none.
    pub fn of_topology(topology: Topology) -> Self {
        Self::because(format!("not served: {topology} Networks have no router"))
    }

    fn because(why: String) -> Self {
        Self { state: watch::Sender::new(ServicesState::Off(why)) }
    }
}

impl Running for NoRouter {
    fn update(&self, _: &Network) {}

    fn watch(&self) -> watch::Receiver<ServicesState> {
        self.state.subscribe()
    }
}

const NOT_ARRIVED: &str = "not all objects have arrived yet";

/// Why Services are not in force if the task of their proxy has ended.
pub(crate) const PROXY_STOPPED: &str = "its service proxy has stopped";

/// How the Services of a Network are on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ServicesState {
    /// Nothing is in force; the objects have not all arrived.
    Waiting,
    /// What an agent before this one made is in force; the objects have not all arrived.
    Kept,
    /// They are in force.
    Serving {
        /// How many ports of Services.
        ports: usize,
        /// How many of them could not be made so.
        failed: usize,
    },
    /// Somebody else serves them, and who.
    Off(String),
    /// They are not in force, and why.
    Broken(String),
}

/// A proxy that did not start.
#[derive(Debug, thiserror::Error)]
#[error("the service proxy of Network {network} did not start")]
pub struct ProxyError {
    /// The Network.
    pub network: NetworkName,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

// === impl ServicesState ===

impl ServicesState {
    /// Why a pod is not answered yet; none if it may be. A proxy that cannot do its work holds up nobody:
    /// that is a matter for the operator, and the pod may not need any Service.
    #[must_use]
    pub fn holds_up_pods(&self) -> Option<&'static str> {
        match self {
            Self::Waiting => Some(NOT_ARRIVED),
            Self::Kept | Self::Serving { .. } | Self::Off(_) | Self::Broken(_) => None,
        }
    }

    /// What people should know; nothing if all is as usual.
    #[must_use]
    pub fn message(&self) -> Option<String> {
        match self {
            Self::Waiting | Self::Kept => Some(format!("Services: {NOT_ARRIVED}")),
            Self::Serving { failed: 0, .. } => None,
            Self::Serving { ports, failed } => {
                Some(format!("Services: {failed} of {ports} ports are not in force; see the agent's log"))
            }
            Self::Off(who) => Some(format!("Services: {who}")),
            Self::Broken(why) => Some(format!("Services are not in force: {why}")),
        }
    }
}
