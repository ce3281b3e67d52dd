//! The Networks of this node: one state for each, which owns what it is set up as and its router's namespace,
//! and has at hand what it shares with the others.
//!
//! Locks: a Network's gate is held shared by calls for pods and alone by calls for the Network, so pods never
//! wait for each other. The node's tables are locked while their shape, or a Network's part of them, may
//! change.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};

use knit_kernel::IfName;
use knit_kernel::link::{Change, Link};
use knit_kernel::netns::{self, NetNs};
use knit_runtime::{Error, NetworkName, Reason, Result};
use knit_types::sync::ReadWrite;

use crate::attachments::{Attachments, Known};
use crate::config::Config;
use crate::fail::internal;
use crate::host_ports;
use crate::mark::Mark;
use crate::moves::Moves;
use crate::node::Node;
use crate::shape::{Facts, RouterHome, Shape};
use crate::space::NamespaceSockets;
use crate::topology::{self, Driver};

/// The Networks that are set up, or that the kernel has from before.
#[derive(Debug)]
pub(crate) struct Networks {
    pub node: Arc<Node>,
    pub attachments: Arc<Attachments>,
    /// Calls that change things, while they do: what is compared meanwhile may be half made.
    pub moves: Arc<Moves>,
    all: RwLock<HashMap<NetworkName, Arc<Net>>>,
}

/// A Network on this node.
#[derive(Debug)]
pub(crate) struct Net {
    pub name: NetworkName,
    pub home: RouterHome,
    /// Its router's namespace.
    pub space: Arc<NamespaceSockets>,
    /// Where that is mounted, if it is one of its own.
    pub path: PathBuf,
    /// The node that it is on.
    pub node: Arc<Node>,
    /// What is known of attachments, its own and others'.
    pub attachments: Arc<Attachments>,
    /// Calls that change things, while they do.
    pub moves: Arc<Moves>,
    /// What its kind is, as far as its namespace shows that.
    found: &'static dyn Driver,
    /// Shared by calls for pods, alone by calls for the Network.
    pub gate: RwLock<()>,
    /// What it was set up as, and what the node was then.
    shape: RwLock<Option<(Arc<Shape>, Arc<Facts>)>>,
    /// The rules inside its router that are in force: what they follow from, and how often others had changed
    /// them before.
    pub rules: Mutex<Option<(u64, Arc<Shape>)>>,
}

impl Networks {
    /// The Networks that the kernel has: what an earlier runtime made is taken over.
    pub fn new(config: Config) -> Result<Self> {
        let networks = Self {
            node: Arc::new(Node::new(config)?),
            attachments: Arc::default(),
            moves: Arc::default(),
            all: RwLock::default(),
        };
        networks.recall()?;
        Ok(networks)
    }

    /// Learns what an earlier runtime made.
    fn recall(&self) -> Result<()> {
        let mut ports = host_ports::by_host(&self.node)?;
        for net in self.all()? {
            let attachments = net.list()?;
            let known = |(link, mark): (Link, Mark)| {
                let (network, mtu, host) = (net.name.clone(), link.mtu, mark.host().to_string());
                let ports = ports.remove(&host).unwrap_or_default();
                (host, Known { network, mark, ports, answer: None, netns: None, mtu, ipv6_on: false })
            };
            self.attachments.known().extend(attachments.into_iter().map(known));
        }
        // Their links went while no runtime ran; what leads to them is about to be taken away.
        self.attachments.had_ports(ports);
        Ok(())
    }

    /// Where a Network's router is.
    pub fn home(&self, network: &NetworkName) -> RouterHome {
        if *network == self.node.config.default_network { RouterHome::Node } else { RouterHome::Own }
    }

    /// Where the namespace of a Network's router is mounted.
    pub fn path(&self, network: &NetworkName) -> PathBuf {
        self.node.config.router_directory.join(network.as_str())
    }

    /// A Network that is set up, or that the kernel has from before this runtime began.
    pub fn get(&self, network: &NetworkName) -> Result<Option<Arc<Net>>> {
        let known = self.all.reading().get(network).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let (space, driver) = match self.home(network) {
            RouterHome::Node => (Arc::clone(&self.node.space), topology::default()),
            RouterHome::Own => match NetNs::open(self.path(network)) {
                Ok(namespace) => {
                    let space = NamespaceSockets::new(namespace);
                    let driver = topology::found_in(&space).map_err(|error| error.on(network))?;
                    (Arc::new(space), driver)
                }
                // An empty file is where a mount was that ended with its mount namespace: the router has gone
                // with it.
                Err(netns::Error::NotFound { .. } | netns::Error::NotANamespace { .. }) => return Ok(None),
                Err(error) => return Err(internal("open a router's namespace")(error).on(network)),
            },
        };
        Ok(Some(self.adopt(network, space, driver)))
    }

    /// A Network that is set up, that the kernel has from before, or for which a namespace is made now.
    pub fn ensure(&self, network: &NetworkName, driver: &'static dyn Driver) -> Result<Arc<Net>> {
        match self.get(network)? {
            Some(net) => Ok(net),
            None => Ok(self.adopt(network, self.make_namespace(network)?, driver)),
        }
    }

    fn make_namespace(&self, network: &NetworkName) -> Result<Arc<NamespaceSockets>> {
        let directory = &self.node.config.router_directory;
        NetNs::share_directory(directory).map_err(internal("share the directory of routers"))?;
        let namespace =
            NetNs::ensure(self.path(network)).map_err(internal("create the router's namespace"))?;
        let space = NamespaceSockets::new(namespace);
        let lo = IfName::new("lo").expect("lo is a name");
        space
            .links()?
            .apply(&[Change::named(lo).up().into()])
            .map_err(internal("bring the router's lo up"))?;
        Ok(Arc::new(space))
    }

    /// Remembers a Network; if it is remembered already, that one.
    fn adopt(
        &self,
        network: &NetworkName,
        space: Arc<NamespaceSockets>,
        found: &'static dyn Driver,
    ) -> Arc<Net> {
        let mut networks = self.all.writing();
        let new = || {
            self.node.senses.listen(&space);
            Arc::new(Net {
                name: network.clone(),
                home: self.home(network),
                space,
                gate: RwLock::default(),
                shape: RwLock::default(),
                rules: Mutex::default(),
                path: self.path(network),
                node: Arc::clone(&self.node),
                attachments: Arc::clone(&self.attachments),
                moves: Arc::clone(&self.moves),
                found,
            })
        };
        Arc::clone(networks.entry(network.clone()).or_insert_with(new))
    }

    /// Forgets a Network.
    pub fn forget(&self, network: &NetworkName) {
        let gone = self.all.writing().remove(network);
        if let Some(net) = gone.filter(|net| net.home == RouterHome::Own) {
            self.node.senses.ignore(&net.space);
        }
    }

    /// The Networks that this runtime has set up.
    pub fn set_up(&self) -> Vec<(Arc<Net>, Arc<Shape>, Arc<Facts>)> {
        let networks = self.all.reading();
        let set_up = |net: &Arc<Net>| net.set_up().map(|(shape, facts)| (Arc::clone(net), shape, facts));
        networks.values().filter_map(set_up).collect()
    }

    /// All Networks that the kernel has, whether set up by this runtime or before.
    pub fn all(&self) -> Result<Vec<Arc<Net>>> {
        let listed = NetNs::list(&self.node.config.router_directory).map_err(internal("list routers"))?;
        let named = listed.into_iter().filter_map(|(name, _)| name.parse().ok());
        let mut names: BTreeSet<NetworkName> = named.collect();
        // One whose mount somebody took away is there all the same.
        names.extend(self.all.reading().keys().cloned());
        names.remove(&self.node.config.default_network);
        let names = std::iter::once(self.node.config.default_network.clone()).chain(names);
        names.filter_map(|name| self.get(&name).transpose()).collect()
    }

    /// A Network that is set up.
    pub fn ready(&self, network: &NetworkName) -> Result<(Arc<Net>, Arc<Shape>)> {
        let net = self.get(network)?;
        let ready = net.and_then(|net| net.shape().map(|shape| (net, shape)));
        ready.ok_or_else(|| {
            let message = format!(
                "Network {network} is not set up on node {}: wait for the agent to set it up, or \
                check its status",
                self.node.config.node
            );
            Error::new(Reason::NetworkNotFound, message).on(network)
        })
    }
}

impl Net {
    /// What its kind is.
    pub fn driver(&self) -> &'static dyn Driver {
        self.shape().map_or(self.found, |shape| shape.driver())
    }

    /// Its attachments, as the kernel has them.
    pub fn list(&self) -> Result<Vec<(Link, Mark)>> {
        self.driver().attachments(self)
    }

    /// Whether its namespace is mounted where it should be.
    pub fn is_mounted(&self) -> bool {
        let there = NetNs::open(&self.path);
        there.is_ok_and(|there| there.id() == self.space.namespace().id())
    }

    /// Mounts a namespace of its own again that somebody unmounted: it lives as long as this runtime has it
    /// open, and its pods have not noticed; with the runtime it would go.
    pub fn keep_mounted(&self) -> Result<()> {
        if self.home == RouterHome::Node || self.is_mounted() {
            return Ok(());
        }
        let path = &self.path;
        NetNs::share_directory(&self.node.config.router_directory)
            .map_err(internal("share the directory of routers"))?;
        self.space.namespace().mount_at(path).map_err(internal("mount the router's namespace again"))
    }

    /// What it was set up as.
    pub fn shape(&self) -> Option<Arc<Shape>> {
        self.set_up().map(|(shape, _)| shape)
    }

    /// What it was set up as, and for what node.
    pub fn set_up(&self) -> Option<(Arc<Shape>, Arc<Facts>)> {
        self.shape.reading().clone()
    }

    /// Remembers what it is set up as.
    pub fn set_shape(&self, shape: Arc<Shape>, facts: &Facts) {
        let set_up = Some((shape, Arc::new(facts.clone())));
        *self.shape.writing() = set_up;
    }
}
