//! Plain types: pods, namespaces, nodes and policies, already parsed and checked.

mod labels;
mod objects;
mod policy;
mod ports;
mod problem;
mod ranges;

use std::fmt;
use std::sync::Arc;

pub use knit_types::{Family, Protocol};

pub use labels::{Labels, Operator, Requirement, Selector};
pub use objects::{
    Alias, AliasEndpoint, Attachment, KnownNamespace, NamedPort, Namespace, Node, Pod, PodKey,
};
pub(crate) use policy::sort as policy_sort;
pub use policy::{
    Action, Direction, Kind, NamespaceMatch, Peer, Policy, PolicyName, PortMatch, Rule, Scope, Subject, Tier,
};
pub use ports::{PortRanges, Ports};
pub use problem::Problem;
pub use ranges::AddressRanges;
pub(crate) use ranges::{next as address_after, previous as address_before};

/// A name that many objects share: cheap to clone.
pub type Name = Arc<str>;

/// The Network that a pod has when nothing says otherwise.
pub const DEFAULT_NETWORK: &str = "default";

/// The label that every namespace carries, with its name as the value (rule 15).
pub const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// What a packet carries, as far as a policy looks at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    /// To a port, after the translation of service addresses (rule 19).
    Port(Protocol, u16),
    /// ICMPv6 of this type.
    Icmpv6(u8),
    /// Any other IP protocol, ICMP included: nothing that a list of ports could name (rule 23).
    Other,
}

// === impl Traffic ===

impl Traffic {
    /// Whether no policy may ever hold it up: neighbour discovery and multicast listener discovery, without
    /// which an IPv6 address does not work at all (rule 24). ARP is not IP and never gets here.
    #[must_use]
    pub fn always_passes(self) -> bool {
        matches!(self, Self::Icmpv6(130..=137 | 143))
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(protocol, port) => write!(f, "{protocol} {port}"),
            Self::Icmpv6(kind) => write!(f, "ICMPv6 type {kind}"),
            Self::Other => f.write_str("ICMP or another protocol without ports"),
        }
    }
}
