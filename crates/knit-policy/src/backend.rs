//! The seam to what makes the sets of [`sets`](crate::sets) true in a router, such as the crate
//! `knit-policy-nft`. Who enforces policies on a node is handed a [`Backends`] and knows none by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use knit_types::IfName;

use crate::model::{Direction, Name};
use crate::sets::{Change, Key, Value};

/// Why something was not done.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Makes live connections follow, and says how many were cut.
pub type Follow = Box<dyn FnOnce() -> Result<usize, Failure> + Send>;

/// Packets that were denied, by direction and address of the pod.
pub type Denied = BTreeMap<(Direction, IpAddr), u64>;

/// Opens the backends of routers.
pub trait Backends: fmt::Debug + Send + Sync {
    /// For one router. Nothing is changed by it.
    ///
    /// # Errors
    /// When the system does not let it.
    fn open(&self, router: &RouterPlace<'_>) -> Result<Box<dyn Backend>, Failure>;
}

/// A router, and what tells the node's own traffic from that of others in it.
#[derive(Debug)]
pub struct RouterPlace<'a> {
    /// The Network.
    pub network: Name,
    /// The router's network namespace.
    pub namespace: BorrowedFd<'a>,
    /// Its end of the link to the node; none if it is the node's own.
    pub uplink: Option<IfName>,
    /// Whether pods of one bridge reach each other in it, without being routed.
    pub is_bridged: bool,
    /// The node's addresses: what comes from them over the uplink always reaches pods.
    pub node: Vec<IpNet>,
}

/// Makes elements true in one router. Used by one thread, but for what [`Self::follow`] returns.
pub trait Backend: Send {
    /// Makes exactly these true, from whatever is there; what is right stays.
    ///
    /// # Errors
    /// When the system refuses: then nothing has changed.
    fn sync(&mut self, wanted: &BTreeMap<Key, Value>) -> Result<(), Failure>;

    /// Carries out changes, all of them or none.
    ///
    /// # Errors
    /// When the system refuses. What they come to is remembered, and brought by the next call of this or of
    /// [`Self::restore`].
    fn apply(&mut self, changes: &[Change]) -> Result<(), Failure>;

    /// Makes true again what was last asked for, if anybody else may have changed it or it could not be done.
    /// Says how much had to be changed for that.
    ///
    /// # Errors
    /// When the system refuses.
    fn restore(&mut self) -> Result<usize, Failure>;

    /// The node's addresses are these now.
    ///
    /// # Errors
    /// When the system refuses.
    fn set_node(&mut self, node: &[IpNet]) -> Result<(), Failure>;

    /// Has `tell` called when somebody else changes what was made.
    fn watch(&mut self, tell: Box<dyn Fn() + Send>);

    /// How many packets were denied to each address of a pod that policies act on, by direction, since they
    /// do or since its rules were made.
    ///
    /// # Errors
    /// When the system does not say.
    fn denied(&mut self) -> Result<Denied, Failure>;

    /// What of all that was asked for is not enforced although all of it is written, and why; none if there
    /// is nothing of the kind.
    fn gap(&mut self) -> Option<String>;

    /// The next [`Self::follow`] is about all live connections.
    fn touch_all(&mut self);

    /// Whether calls since the last [`Self::follow`] were about live connections.
    fn has_touched(&self) -> bool;

    /// What makes live connections follow what is in force: those that changes since
    /// [`Self::leave_connections`] are about. It is done on another thread while other calls go on; if the
    /// system refuses it, it can be tried again.
    fn follow(&mut self) -> Follow;

    /// Live connections are left as they are, but for those of these addresses.
    fn leave_connections(&mut self, but: &BTreeSet<IpAddr>);
}
