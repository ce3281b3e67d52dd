//! What the agent knows of the cluster: one immutable snapshot at a time, so that a decision is made on one
//! state of things, and made by pure functions.

pub mod announced;
pub mod blocks;
pub mod boot;
mod boot_json;
pub mod feed;
pub mod own;
mod services;
mod slices;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_api::{NetworkClass, names};
use knit_model::{AddressBlock, Network};
use knit_types::NetworkName;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::claims::PodClaim;
use crate::request::Wishes;

pub use knit_model::Labels;
pub use users::UserObjects;

/// One state of things.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// Networks by name.
    pub networks: Arc<BTreeMap<NetworkName, Arc<Network>>>,
    /// NetworkClasses by name.
    pub classes: Arc<BTreeMap<String, Arc<NetworkClass>>>,
    /// The labels of namespaces.
    pub namespaces: Arc<BTreeMap<String, Arc<Labels>>>,
    /// AddressBlocks that count, by name: this node's, and all of each Network in [`Self::block_lists`].
    pub blocks: Arc<BTreeMap<String, Arc<AddressBlock>>>,
    /// What the controller wants back of this node's AddressBlocks, by name, with the value that it wrote.
    pub reclaimed: Arc<BTreeMap<String, String>>,
    /// All nodes by name.
    pub nodes: Arc<BTreeMap<String, Arc<NodeView>>>,
    /// The cluster's service ranges, by the object that names them.
    pub service_cidrs: Arc<BTreeMap<String, Vec<IpNet>>>,
    /// ClusterIPs of the Services that some Network lists, by namespace and name.
    pub services: Arc<BTreeMap<(String, String), Vec<IpAddr>>>,
    /// This node's pods by namespace and name.
    pub pods: Arc<BTreeMap<(String, String), Arc<PodView>>>,
    /// Interfaces that nobody can derive from blocks, by their NetworkAttachment's namespace and name.
    pub announced: Arc<BTreeMap<(String, String), Arc<announced::AnnouncedView>>>,
    /// The Networks of which all nodes' blocks are followed. Nothing where one list has those of all.
    pub block_lists: Option<Arc<BTreeMap<NetworkName, BlockList>>>,
    /// Which kinds have arrived completely.
    pub synced: Synced,
    /// What may be believed of kinds that have not.
    pub before: Before,
    /// Counts changes of what Networks are made of.
    pub networks_revision: u64,
}

/// How far the list of one Network's blocks is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct BlockList {
    /// It has arrived, and the controller says that it is complete.
    pub whole: bool,
    /// It was whole when it was kept on disk, and what was kept is part of this snapshot.
    pub kept: bool,
    /// Nobody answers who could say which blocks there are now.
    pub away: bool,
}

/// What the agent needs to know of a node.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeView {
    /// Its own addresses, by which other nodes reach it.
    pub addresses: Vec<IpAddr>,
    /// Addresses of any other type that lead to it, such as `ExternalIP`.
    #[serde(default)]
    pub others: Vec<IpAddr>,
    /// Its uid, by which what belongs to it goes when it goes.
    #[serde(default)]
    pub uid: Option<String>,
    /// Its labels; only of this node, since nobody asks for others'.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// What the agent needs to know of a pod of this node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PodView {
    /// Its uid.
    pub uid: Option<String>,
    /// Whether it only shows a static pod of this node, whose uid is another.
    pub mirror: bool,
    /// What its annotations ask for.
    pub wishes: Wishes,
    /// Whether it uses the node's own network.
    pub host_network: bool,
    /// Whether it is on its way out, or done.
    pub ending: bool,
    /// Its labels, which policies select by.
    pub labels: Labels,
    /// The ports of its containers that have a name.
    pub ports: Vec<PodPort>,
    /// When it was made, in seconds.
    pub created: i64,
    /// The addresses by which others reach it, as its kubelet tells them.
    pub addresses: Vec<IpAddr>,
    /// Its claims, of whichever driver.
    pub claims: Vec<PodClaim>,
}

/// A port of a container that has a name.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PodPort {
    /// The name.
    pub name: String,
    /// The protocol.
    pub protocol: knit_types::Protocol,
    /// The number.
    pub number: u16,
}

/// Which kinds have arrived completely since the start.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Synced {
    /// Networks.
    pub networks: bool,
    /// NetworkClasses.
    pub classes: bool,
    /// Namespaces.
    pub namespaces: bool,
    /// AddressBlocks.
    pub blocks: bool,
    /// Nodes: this one, and what is said of all others.
    pub nodes: bool,
    /// ServiceCIDRs.
    pub service_cidrs: bool,
    /// This node's pods.
    pub pods: bool,
}

/// What is known from an earlier run, and whether that is all there is to know.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Before {
    /// What was known when everything had arrived was kept on disk, and is part of this snapshot.
    pub kept: bool,
    /// Nobody answers who could say which Networks there are now.
    pub networks_away: bool,
    /// Nobody answers who could say which namespaces there are now.
    pub namespaces_away: bool,
    /// Nobody answers who could say which AddressBlocks there are now.
    pub blocks_away: bool,
    /// Nobody answers who could say which Nodes there are now.
    pub nodes_away: bool,
    /// Nobody answers who could say which ServiceCIDRs there are now.
    pub service_cidrs_away: bool,
}

/// Holds the newest snapshot and tells of changes.
#[derive(Debug)]
pub struct WorldStore {
    current: watch::Sender<Arc<World>>,
    /// The Networks of which this node must know all blocks.
    wanted: watch::Sender<BTreeSet<NetworkName>>,
    /// Not part of a snapshot: they change as often as tenants like, and one front door reads them.
    users: UserObjects,
    /// What may be on disk of this node's blocks.
    kept: own::KeptBlocks,
    own: own::Found,
}

/// Whether a Network's blocks say which addresses are its pods', because it has no subnets or is on a segment
/// outside.
fn is_by_blocks(network: &Network) -> bool {
    !network.has_subnets() || !network.topology().has_router()
}

// === impl World ===

impl World {
    /// The runtime of a Network's class, with the class.
    #[must_use]
    pub fn class_of(&self, network: &Network) -> Option<&Arc<NetworkClass>> {
        self.classes.get(network.class())
    }

    /// The name of the runtime that serves a Network. Knit's own class is known even where nobody wrote it
    /// down.
    #[must_use]
    pub fn runtime_of(&self, network: &Network) -> Option<String> {
        match self.class_of(network) {
            Some(class) => Some(class.spec.runtime.clone()),
            None if network.class() == names::DEFAULT_CLASS => Some(names::LINUX_RUNTIME.to_owned()),
            None => None,
        }
    }

    /// Whether it can be told which Network is a namespace's primary one. While lists are on their way it
    /// cannot: the Network that selects the namespace may be the next to arrive. What was known before counts
    /// while nobody can say more.
    #[must_use]
    pub fn knows_primaries(&self) -> bool {
        self.knows(self.synced.networks, self.before.networks_away)
            && self.knows(self.synced.namespaces, self.before.namespaces_away)
    }

    /// The lists of which it is not known yet what is in them, of those that say what is not the outside of a
    /// Network: whoever is set up without one reaches what the rest of it would have closed. Where what was
    /// kept is in force already, it counts whatever the API answers.
    #[must_use]
    pub fn missing_of_the_inside(&self, network: &NetworkName, in_force: bool) -> Vec<&'static str> {
        let (synced, before) = (self.synced, self.before);
        let lists = [
            ("Networks", synced.networks, before.networks_away),
            ("Nodes", synced.nodes, before.nodes_away),
            ("AddressBlocks", synced.blocks, before.blocks_away),
            ("ServiceCIDRs", synced.service_cidrs, before.service_cidrs_away),
        ];
        let missing = lists.into_iter().filter(|(_, synced, away)| !self.knows(*synced, *away || in_force));
        let mut missing: Vec<&'static str> = missing.map(|(list, ..)| list).collect();
        let is_known = |lists: &BTreeMap<NetworkName, BlockList>, name: &NetworkName| {
            let list = lists.get(name).copied().unwrap_or_default();
            list.whole || (list.kept && (list.away || in_force))
        };
        if self.block_lists.as_ref().is_some_and(|lists| {
            !is_known(lists, network) || self.blocks_of_the_inside().any(|name| !is_known(lists, name))
        }) {
            missing.push("BlockSlices");
        }
        missing
    }

    /// The Networks of which the blocks say what is inside the cluster. One that has no number yet has pods
    /// nowhere: nobody waits for a controller that has not seen it.
    fn blocks_of_the_inside(&self) -> impl Iterator<Item = &NetworkName> {
        let numbered = self.networks.iter().filter(|(_, network)| network.id().is_some());
        let counts =
            |(name, network): &(&NetworkName, &Arc<Network>)| name.is_default() || is_by_blocks(network);
        numbered.filter(counts).map(|(name, _)| name)
    }

    /// Whether a list is whole: it has arrived, or was kept when it had and nobody can say more now.
    fn knows(&self, synced: bool, away: bool) -> bool {
        synced || (away && self.before.kept)
    }

    /// Whether all that a pod's way needs has arrived.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        let mut lists = self.block_lists.iter().flat_map(|lists| lists.values());
        self.has_own_lists() && self.synced.nodes && lists.all(|list| list.whole)
    }

    /// Whether Services can be served: everything has arrived, or only slices have not, of which the last
    /// ones were kept. What was kept is in force already; without it Services would stay as they were at the
    /// agent's start until some controller writes slices.
    #[must_use]
    pub fn can_serve(&self) -> bool {
        let mut lists = self.block_lists.iter().flat_map(|lists| lists.values());
        let nodes = self.synced.nodes || (self.before.kept && self.block_lists.is_some());
        self.has_own_lists() && nodes && lists.all(|list| list.whole || list.kept)
    }

    /// Whether all lists have arrived that this node reads itself, and not from slices.
    fn has_own_lists(&self) -> bool {
        let s = self.synced;
        s.networks && s.classes && s.namespaces && s.blocks && s.service_cidrs
    }
}

// === impl WorldStore ===

impl Default for WorldStore {
    fn default() -> Self {
        Self::new(World::default())
    }
}

impl WorldStore {
    /// Starts with what is known.
    #[must_use]
    pub fn new(world: World) -> Self {
        Self {
            current: watch::Sender::new(Arc::new(world)),
            wanted: watch::Sender::default(),
            users: UserObjects::default(),
            kept: own::KeptBlocks::default(),
            own: own::Found::default(),
        }
    }

    /// This node's AddressBlocks in the newest snapshot. The store is of one node.
    #[must_use]
    pub fn own_blocks(&self, node: &str) -> Arc<own::OwnBlocks> {
        self.own.in_world(&self.get(), node)
    }

    /// What an agent that starts now may find on disk of this node's blocks.
    #[must_use]
    pub fn kept(&self) -> &own::KeptBlocks {
        &self.kept
    }

    /// This node has a Network, or will have it: all blocks of it are to be known.
    pub fn want(&self, network: &NetworkName) {
        let new = |wanted: &mut BTreeSet<NetworkName>| {
            !wanted.contains(network) && wanted.insert(network.to_owned())
        };
        self.wanted.send_if_modified(new);
    }

    /// This node has a Network no more.
    pub fn unwant(&self, network: &NetworkName) {
        self.wanted.send_if_modified(|wanted| wanted.remove(network));
    }

    /// The Networks that this node has or will have.
    #[must_use]
    pub fn wanted(&self) -> watch::Receiver<BTreeSet<NetworkName>> {
        self.wanted.subscribe()
    }

    /// The NetworkAttachments of users that this node has to do with.
    #[must_use]
    pub fn users(&self) -> &UserObjects {
        &self.users
    }

    /// The newest snapshot.
    #[must_use]
    pub fn get(&self) -> Arc<World> {
        Arc::clone(&self.current.borrow())
    }

    /// Tells of every new snapshot.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<World>> {
        self.current.subscribe()
    }

    /// Makes a new snapshot.
    pub fn update(&self, change: impl FnOnce(&mut World)) {
        self.current.send_modify(|world| change(Arc::make_mut(world)));
    }

    /// Makes a new snapshot, if `change` says that it changed something.
    pub fn update_if(&self, change: impl FnOnce(&mut World) -> bool) {
        self.current.send_if_modified(|world| change(Arc::make_mut(world)));
    }

    /// Makes a new snapshot in which Networks, or what they are made of, changed.
    pub fn update_networks(&self, change: impl FnOnce(&mut World)) {
        self.update(|world| {
            change(world);
            world.networks_revision += 1;
        });
    }

    /// Waits until `look` finds what it looks for, or gives what it says last when the time is over.
    pub async fn wait<T, E>(
        &self,
        deadline: Instant,
        mut look: impl FnMut(&World) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut changes = self.current.subscribe();
        loop {
            let world = Arc::clone(&changes.borrow_and_update());
            let missing = match look(&world) {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            if !matches!(tokio::time::timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                return Err(missing);
            }
        }
    }
}
