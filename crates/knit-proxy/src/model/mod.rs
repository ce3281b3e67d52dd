//! What a service proxy is told: services, where their traffic may go, and the node it runs on.
//!
//! Nothing here is a Kubernetes type. A [`Service`] is a set of addresses and ports that clients connect to; an
//! [`EndpointGroup`] is a list of places that answer for one service; a [`NodeInfo`] says where this proxy runs.
//! They can be written by hand, and the `kubernetes` feature makes them from API objects.
//!
//! The types are small on purpose (boxed slices, shared strings, no maps): a proxy holds all of them for as long as
//! it runs, and keeps no other copy of the objects they were made from.

mod endpoints;
mod names;
mod node;
mod problem;
mod service;

pub use endpoints::{Conditions, Endpoint, EndpointGroup, GroupPort, Hints};
pub use names::{GroupName, Interner, NetworkName, ServiceName};
pub use node::NodeInfo;
pub use problem::{ObjectRef, Problem};
pub use service::{Affinity, Service, ServicePort, TrafficPolicy};

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// A transport protocol that services use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, IP protocol 6.
    Tcp,
    /// UDP, IP protocol 17.
    Udp,
    /// SCTP, IP protocol 132.
    Sctp,
}

impl Protocol {
    /// The IP protocol number, as it stands in packets.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

/// An address family. The two are served apart from each other (rule 18).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The family of a range.
    #[must_use]
    pub fn of_net(range: IpNet) -> Self {
        Self::of(range.network())
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One value for each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct PerFamily<T> {
    /// The value for IPv4.
    pub v4: T,
    /// The value for IPv6.
    pub v6: T,
}

impl<T> PerFamily<T> {
    /// Computes both values.
    pub fn from_fn(mut f: impl FnMut(Family) -> T) -> Self {
        Self { v4: f(Family::V4), v6: f(Family::V6) }
    }

    /// The value for one family.
    pub fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The value for one family, to change it.
    pub fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}
