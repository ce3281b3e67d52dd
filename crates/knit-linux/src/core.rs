//! What the runtime holds while it runs: the node's namespace, its Networks, and what it knows of attachments.
//!
//! Locks: a Network's gate is held shared by calls for pods and alone by calls for the Network, so pods never wait for
//! each other. `layout` is held while the node's tables may change their shape or a Network's part of them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use knit_kernel::link::Link;
use knit_kernel::netns::{self, NetNs};
use knit_runtime::{Attachment, Change, Error, Reason, Result};
use tokio::sync::broadcast;

use crate::config::Config;
use crate::fail::internal;
use crate::mark::Mark;
use crate::moves::Moves;
use crate::neighbours::Room;
use crate::node_tables::NodeTables;
use crate::senses::Senses;
use crate::setup::ports;
use crate::shape::{Facts, Home, Shape};
use crate::space::Space;

/// How many changes a slow watcher may be behind.
const BACKLOG: usize = 1024;

/// Everything that calls share.
#[derive(Debug)]
pub(crate) struct Core {
    pub config: Config,
    pub node: Arc<Space>,
    /// Whether this kernel has IPv6.
    pub ipv6: bool,
    networks: RwLock<HashMap<String, Arc<Net>>>,
    /// What is known of attachments, by the host end's name. The kernel's marks are what counts; this has what does not
    /// fit there, and what is to be taken away when a link went without us.
    known: Mutex<HashMap<String, Known>>,
    /// Host ends that are being made: their rules are there before they are.
    making: Mutex<HashSet<String>>,
    layout: Mutex<NodeTables>,
    /// Room in the machine's tables of neighbours.
    pub room: Room,
    /// Calls that change things, while they do: what is compared meanwhile may be half made.
    pub moves: Moves,
    /// Hears of what others change.
    pub senses: Senses,
    pub changes: broadcast::Sender<Change>,
}

/// What is known of one attachment.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub network: String,
    pub mark: Mark,
    /// What was answered, if this runtime made it.
    pub answer: Option<Attachment>,
    /// Where the pod's namespace was, if this runtime was told.
    pub netns: Option<PathBuf>,
    /// The MTU that its host end was made with: a Network may have another one since.
    pub mtu: u32,
}

/// A Network on this node.
#[derive(Debug)]
pub(crate) struct Net {
    pub name: String,
    pub home: Home,
    pub space: Arc<Space>,
    /// Shared by calls for pods, alone by calls for the Network.
    pub gate: RwLock<()>,
    /// What it was set up as, and what the node was then.
    shape: RwLock<Option<(Arc<Shape>, Arc<Facts>)>>,
    /// The rules inside its router that are in force: what they follow from, and how often others had changed them before.
    pub rules: Mutex<Option<(u64, Arc<Shape>)>>,
}

impl Core {
    /// A runtime that knows nothing yet but what the kernel has.
    pub fn new(config: Config) -> Result<Self> {
        let open = config.namespace.try_clone();
        let node = Arc::new(Space::new(open.map_err(internal("open the node's network namespace"))?));
        let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let room = Room::default();
        room.make(&node);
        let senses = Senses::start();
        senses.listen(&node);
        Ok(Self {
            config,
            node,
            ipv6,
            networks: RwLock::default(),
            known: Mutex::default(),
            making: Mutex::default(),
            layout: Mutex::default(),
            room,
            moves: Moves::default(),
            senses,
            changes: broadcast::channel(BACKLOG).0,
        })
    }

    /// Where a Network's router is.
    pub fn home(&self, network: &str) -> Home {
        if network == self.config.default_network { Home::Node } else { Home::Own }
    }

    /// Where the namespace of a Network's router is mounted.
    pub fn router_path(&self, network: &str) -> PathBuf {
        self.config.router_directory.join(network)
    }

    /// A Network that is set up, or that the kernel has from before this runtime began.
    pub fn net(&self, network: &str) -> Result<Option<Arc<Net>>> {
        let known = self.networks.read().unwrap_or_else(PoisonError::into_inner).get(network).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let space = match self.home(network) {
            Home::Node => Arc::clone(&self.node),
            Home::Own => match NetNs::open(self.router_path(network)) {
                Ok(namespace) => Arc::new(Space::new(namespace)),
                // An empty file is where a mount was that ended with its mount namespace: the router has gone with it.
                Err(netns::Error::NotFound { .. } | netns::Error::NotANamespace { .. }) => return Ok(None),
                Err(error) => return Err(internal("open a router's namespace")(error).on(network)),
            },
        };
        Ok(Some(self.adopt(network, space)))
    }

    /// Remembers a Network; if it is remembered already, that one.
    pub fn adopt(&self, network: &str, space: Arc<Space>) -> Arc<Net> {
        let mut networks = self.networks.write().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            self.senses.listen(&space);
            Arc::new(Net {
                name: network.to_owned(),
                home: self.home(network),
                space,
                gate: RwLock::default(),
                shape: RwLock::default(),
                rules: Mutex::default(),
            })
        };
        Arc::clone(networks.entry(network.to_owned()).or_insert_with(new))
    }

    /// Forgets a Network.
    pub fn forget(&self, network: &str) {
        let gone = self.networks.write().unwrap_or_else(PoisonError::into_inner).remove(network);
        if let Some(net) = gone.filter(|net| net.home == Home::Own) {
            self.senses.ignore(&net.space);
        }
    }

    /// The Networks that this runtime has set up.
    pub fn set_up(&self) -> Vec<(Arc<Net>, Arc<Shape>, Arc<Facts>)> {
        let networks = self.networks.read().unwrap_or_else(PoisonError::into_inner);
        let set_up = |net: &Arc<Net>| net.set_up().map(|(shape, facts)| (Arc::clone(net), shape, facts));
        networks.values().filter_map(set_up).collect()
    }

    /// All Networks that the kernel has, whether set up by this runtime or before.
    pub fn nets(&self) -> Result<Vec<Arc<Net>>> {
        let listed = NetNs::list(&self.config.router_directory).map_err(internal("list routers"))?;
        let mut names: BTreeSet<String> = listed.into_iter().map(|(name, _)| name).collect();
        // One whose mount somebody took away is there all the same.
        names.extend(self.networks.read().unwrap_or_else(PoisonError::into_inner).keys().cloned());
        names.remove(&self.config.default_network);
        let names = std::iter::once(self.config.default_network.clone()).chain(names);
        names.filter_map(|name| self.net(&name).transpose()).collect()
    }

    /// A Network that is set up.
    pub fn ready(&self, network: &str) -> Result<(Arc<Net>, Arc<Shape>)> {
        let net = self.net(network)?;
        let ready = net.and_then(|net| net.shape().map(|shape| (net, shape)));
        ready.ok_or_else(|| {
            let message = format!(
                "Network {network} is not set up on node {}: wait for the agent to set it up, or see its status",
                self.config.node
            );
            Error::new(Reason::NetworkNotFound, message).on(network)
        })
    }

    /// Alone with the node's tables.
    pub fn layout(&self) -> MutexGuard<'_, NodeTables> {
        self.layout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of attachments, by host end.
    pub fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host ends that are being made.
    pub fn making(&self) -> MutexGuard<'_, HashSet<String>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns what an earlier runtime made.
    pub fn recall(&self) -> Result<()> {
        for net in self.nets()? {
            let ports = ports(&*net.space.links()?)?;
            let known = |(link, mark): (Link, Mark)| {
                let (network, mtu) = (net.name.clone(), link.mtu);
                (link.name.to_string(), Known { network, mark, answer: None, netns: None, mtu })
            };
            self.known().extend(ports.into_iter().map(known));
        }
        Ok(())
    }

    /// Tells watchers.
    pub fn tell(&self, change: Change) {
        // Without watchers there is nobody to tell.
        let _ = self.changes.send(change);
    }
}

impl Net {
    /// What it was set up as.
    pub fn shape(&self) -> Option<Arc<Shape>> {
        self.set_up().map(|(shape, _)| shape)
    }

    /// What it was set up as, and for what node.
    pub fn set_up(&self) -> Option<(Arc<Shape>, Arc<Facts>)> {
        self.shape.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers what it is set up as.
    pub fn set_shape(&self, shape: Arc<Shape>, facts: &Facts) {
        let set_up = Some((shape, Arc::new(facts.clone())));
        *self.shape.write().unwrap_or_else(PoisonError::into_inner) = set_up;
    }
}
