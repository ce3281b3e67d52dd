//! What the agent's services have of a runtime's routers: where they are reached, what is the runtime's own
//! there, and the way from the node into them.
//!
//! A Network's services are balanced in its router, by a proxy of the agent's. Clients outside do not know
//! routers: they come to an address of the node, or to one of a load balancer, and those arrive in the node's
//! own namespace. Who leads them on is the runtime, because its rules decide who may enter a router at all:
//! [`Steering`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use ipnet::IpNet;

use crate::error::Result;
use crate::{IfName, Protocol};

/// The routers of one runtime on this node.
pub trait Routers: Debug + Send + Sync {
    /// The router's own addresses at its end of the link to the node, at most one per family; `router` is its
    /// network namespace.
    ///
    /// # Errors
    /// When the system does not say.
    fn uplink(&self, router: BorrowedFd<'_>) -> Result<Vec<IpAddr>>;

    /// Where the addresses of such links come from: nobody else may have them.
    fn uplink_ranges(&self) -> Vec<IpNet>;

    /// What such a link is called in the router.
    fn uplink_in_router(&self) -> IfName;

    /// How the names of such links begin, in the node's namespace.
    fn uplink_prefix(&self) -> String;

    /// Ports of the node that are the runtime's, such as that of its tunnels: no Service has them, on no
    /// address but its cluster IP.
    fn reserved_ports(&self) -> Vec<(Protocol, u16)>;

    /// Opens the way into routers. What an agent before this one wrote is in force until the first
    /// [`set`](Steering::set).
    ///
    /// # Errors
    /// When the system does not let it.
    fn steering(&self) -> Result<Box<dyn Steering>>;
}

/// The way from the node's own namespace into routers: a table of entrances.
pub trait Steering: Send {
    /// Makes true what is wanted, of which these entrances may lead elsewhere than at the last call. After a
    /// failure the next call looks at all of it.
    ///
    /// # Errors
    /// When the system refuses.
    fn set(&mut self, wanted: &BTreeMap<Entrance, Steered>, changed: &BTreeSet<Entrance>) -> Result<()>;

    /// Listens to changes by others: `tell` is called at each.
    fn watch(&mut self, tell: Box<dyn Fn() + Send>);

    /// Whether all is certainly as the last call of [`set`](Self::set) left it, by a look that costs little.
    fn is_intact(&mut self) -> bool;

    /// Somebody else may have changed something: the next call of [`set`](Self::set) looks at all, and puts
    /// it right.
    fn look_again(&mut self);

    /// How many changes it took to repair what others had changed, since the last call of this.
    fn take_repairs(&mut self) -> usize;
}

/// Where clients come to: an address and a port that lead into a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entrance {
    /// The address, the node's own or one that somebody routes to it.
    pub address: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// What becomes of those who come to an entrance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steered {
    /// Where it leads.
    pub to: Way,
    /// Other nodes to which the node itself and its own pods are led instead: they are inside the cluster
    /// already, and not bound to what this node has. They are [`Way::Nodes`]; none: no difference.
    pub near: Option<Box<[SocketAddr]>>,
    /// Who may come; `None`: anyone. Others are dropped.
    pub sources: Option<Box<[IpNet]>>,
    /// Who chose the address, and so whose traffic is taken.
    pub chosen: Chosen,
}

/// Where an entrance leads. All addresses are of the entrance's family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Into a router of this node: the router's own address, and a port of it.
    Router(SocketAddr),
    /// To one of these other nodes, which lead on into a router of theirs. They see this node as the client,
    /// so that answers come back through it. What arrives like that from another node is never led on again.
    /// There is at least one; [`Way::MOST_NODES`] are used.
    Nodes(Box<[SocketAddr]>),
    /// Nowhere, and the client is told at once.
    Rejected,
    /// Nowhere, silently: other nodes would answer.
    Dropped,
}

/// Who chose the address of an entrance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Chosen {
    /// The operator: a node port. Taken from the outside, the node and its pods, unless a pod has that port
    /// of the node.
    ByOperator,
    /// A load balancer that the operator lets have addresses of nodes. Taken like a node port, and also where
    /// a pod has that port of the node: the pods of k3s' ServiceLB have the ports of the Services that they
    /// are there for.
    OnNode,
    /// A load balancer. Taken like a node port, but never where the address is one of the node's own.
    ByProvider,
    /// A tenant. Taken only from the outside, and never where the address is one of the node's own.
    ByTenant,
}

// === impl Way ===

impl Way {
    /// How many nodes one entrance leads to: each connection goes to one of them.
    pub const MOST_NODES: usize = 4;
}

// === impl Steered ===

impl Steered {
    /// Whether a connection may have been led there.
    #[must_use]
    pub fn leads_to(&self, address: SocketAddr) -> bool {
        let nodes = |nodes: &[SocketAddr]| nodes.iter().take(Way::MOST_NODES).any(|node| *node == address);
        let near = self.near.as_deref().is_some_and(nodes);
        near || match &self.to {
            Way::Router(router) => *router == address,
            Way::Nodes(all) => nodes(all),
            Way::Rejected | Way::Dropped => false,
        }
    }
}
