//! The trait that every network runtime is seen through.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;

use crate::error::{Error, Reason, Result};
use crate::routers::Routers;
use crate::{AttachRequest, Attachment, InterfaceName, Network, NetworkName, Pod, SandboxId};

/// Something that can join pods to Networks.
///
/// # Guarantees that a runtime gives
/// - Every call may be repeated; what was done already is success.
/// - When [`attach`](Self::attach) answers, packets flow; when it fails, nothing of that attachment stays.
/// - [`detach`](Self::detach) of what is gone is success, also when the pod's namespace is.
/// - Calls for different pods run at the same time.
///
/// # What it may rely on
/// - Addresses are the caller's: no two attachments of a Network have the same one.
/// - A Network is set up before pods are attached to it, and the caller keeps calls for one pod apart.
#[async_trait]
pub trait Runtime: Send + Sync {
    /// Who it is and what it can do.
    async fn info(&self) -> Result<Info>;

    /// Makes this node ready for pods of a Network, or brings it to a changed configuration.
    async fn setup_network(&self, network: &Network) -> Result<()>;

    /// Takes away what [`setup_network`](Self::setup_network) made. Fails with `InUse` while pods are
    /// attached.
    async fn remove_network(&self, name: &NetworkName) -> Result<()>;

    /// Makes one interface.
    async fn attach(&self, request: &AttachRequest) -> Result<Attachment>;

    /// Takes one interface away, or, without a name, all of the sandbox.
    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()>;

    /// Changes an attachment in place.
    async fn update(&self, request: &AttachRequest) -> Result<Attachment> {
        Err(Error::new(
            Reason::Unsupported,
            "this runtime cannot change an attachment in place: detach and attach again",
        )
        .on(&request.network))
    }

    /// Looks whether an attachment is still as it was made: `Damaged` says what is not. The pod's namespace
    /// is looked into where the caller, or an earlier call, says where it is.
    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()>;

    /// All attachments, or those of one sandbox.
    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>>;

    /// First every attachment, then `Synced`, then each change as it happens.
    async fn watch(&self) -> Result<Changes> {
        Err(Error::new(Reason::Unsupported, "this runtime cannot be watched: list instead"))
    }

    /// Removes all attachments whose sandbox is not in the list, and says which.
    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>>;

    /// Whether it can serve, and each of its Networks.
    async fn status(&self) -> Result<Status>;

    /// Compares all that it made on this node with what it should be, and says what is not. Nothing is
    /// changed, and no other call waits for it: the caller sets a damaged Network up again, and attaches
    /// again what is damaged.
    ///
    /// A runtime that cannot do that says `Unsupported`; the caller then sets up each Network and checks each
    /// attachment from time to time.
    async fn survey(&self) -> Result<Survey> {
        Err(Error::new(Reason::Unsupported, "this runtime cannot compare its state: check instead"))
    }

    /// The same, with [all attachments](Self::list) where these are read along with it: listing them again
    /// would cost as much as the comparison.
    async fn survey_and_list(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        Ok((self.survey().await?, None))
    }

    /// Returns when somebody else changed, or may have changed, what this runtime made, at once if that has
    /// happened since the last call: time for a [`survey`](Self::survey). A runtime that is not told of such
    /// things never returns.
    async fn disturbed(&self) -> Disturbance {
        std::future::pending().await
    }

    /// What its Networks use on this node of what they share with others, and what they were refused of it;
    /// asked for each time that metrics are read, so it must be cheap. Networks for which that is not known
    /// are left out.
    async fn usage(&self) -> Result<Vec<NetworkUsage>> {
        Ok(Vec::new())
    }

    /// Its routers on this node, for the agent's services. None: it has none that the agent could serve
    /// Services in, and does that itself or not at all.
    fn routers(&self) -> Option<Arc<dyn Routers>> {
        None
    }
}

/// What a Network uses on this node of what it shares with others, and what it was refused of it. Counts
/// begin again at 0 when what counts is made again.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NetworkUsage {
    /// The Network's name.
    pub network: NetworkName,
    /// How many connections its router has in its table: those between its pods, too.
    pub connections: u64,
    /// From how many on that table takes no more.
    pub connections_limit: u64,
    /// Connections that were refused because the Network had as many as one may have.
    pub refused_connections: u64,
    /// Connections that were refused because all Networks together had as many as they may have.
    pub refused_connections_together: u64,
    /// Questions who has an address that were refused because a pod asked too many of them.
    pub refused_questions: u64,
}

/// What somebody else may have changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Disturbance {
    /// Rules that keep Networks apart were changed.
    Rules,
    /// Something else may have been.
    Something,
}

/// What is not as it was made.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Survey {
    /// What is not as it should be, for each Network.
    pub networks: BTreeMap<NetworkName, Vec<Damage>>,
    /// Attachments of which something is missing that only attaching again can make.
    pub attachments: BTreeSet<(SandboxId, InterfaceName)>,
    /// Networks of which something could not be compared. That is not damage; the rest of them was compared.
    pub unknown: BTreeMap<NetworkName, NotKnown>,
    /// What somebody changed inside a pod of what was made there, in words for the pod's author. It is told
    /// and not repaired: a pod's interface is the pod's own.
    pub noticed: BTreeMap<(SandboxId, InterfaceName), String>,
}

/// Why something of a Network was not compared.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NotKnown {
    /// It was being changed by the runtime itself: the next comparison sees it.
    Moving,
    /// It could not be read, or what it follows from could not.
    Failed(String),
}

/// Something that is not as it should be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Damage {
    /// What kind of thing: a word of few, such as `rules` or `links`.
    pub kind: &'static str,
    /// What it is, for people.
    pub message: String,
}

/// A stream of changes.
pub type Changes = BoxStream<'static, Result<Change>>;

/// Who a runtime is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Info {
    /// Its name as NetworkClasses name it, for example `knit.dev/linux`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// What it has beyond the core; see [`feature`].
    pub features: Vec<String>,
}

/// One change of one attachment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Change {
    /// There before, or new.
    Added(Attachment),
    /// Changed in place.
    Modified(Attachment),
    /// Gone; as it was before.
    Removed(Attachment),
    /// All that was there before has been told.
    Synced,
}

/// Whether a runtime can serve.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Status {
    /// Whether it can serve at all.
    pub ready: bool,
    /// What is wrong and what to do, if it cannot.
    pub message: String,
    /// Its Networks.
    pub networks: Vec<NetworkStatus>,
}

/// How one Network is on this node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NetworkStatus {
    /// The Network's name.
    pub name: NetworkName,
    /// Whether pods can be attached.
    pub ready: bool,
    /// What is wrong and what to do, if not.
    pub message: String,
    /// How many attachments it has here.
    pub attachments: u32,
}

/// The names of features.
pub mod feature {
    use knit_types::Topology;

    /// All of them.
    pub fn all() -> impl Iterator<Item = &'static str> {
        let others = [
            NETWORK_SETUP,
            IPV4,
            IPV6,
            STATIC_ADDRESS,
            STATIC_MAC,
            MTU,
            ROUTES,
            HOST_PORTS,
            UPDATE,
            WATCH,
            COLLECT_GARBAGE,
        ];
        others.into_iter().chain(topologies())
    }

    /// Those of topologies, which are called like them.
    pub fn topologies() -> impl Iterator<Item = &'static str> {
        Topology::ALL.into_iter().map(Topology::as_str)
    }

    /// Networks are set up and removed by calls.
    pub const NETWORK_SETUP: &str = "NetworkSetup";
    /// Switched Networks.
    pub const LAYER2: &str = Topology::Layer2.as_str();
    /// Routed Networks.
    pub const LAYER3: &str = Topology::Layer3.as_str();
    /// Networks on a link of the node.
    pub const UNDERLAY: &str = Topology::Underlay.as_str();
    /// IPv4 addresses.
    pub const IPV4: &str = "IPv4";
    /// IPv6 addresses.
    pub const IPV6: &str = "IPv6";
    /// A wanted address is given.
    pub const STATIC_ADDRESS: &str = "StaticAddress";
    /// A wanted MAC address is given.
    pub const STATIC_MAC: &str = "StaticMac";
    /// The Network's MTU is applied.
    pub const MTU: &str = "Mtu";
    /// Extra routes are applied.
    pub const ROUTES: &str = "Routes";
    /// Ports of the node lead into pods.
    pub const HOST_PORTS: &str = "HostPorts";
    /// Attachments change in place.
    pub const UPDATE: &str = "Update";
    /// Changes can be watched.
    pub const WATCH: &str = "Watch";
    /// Attachments of sandboxes that are gone are removed by one call.
    pub const COLLECT_GARBAGE: &str = "CollectGarbage";
}
