//! What a pod interface asks for and what it gets.

use std::fmt;
use std::net::IpAddr;

use knit_types::{AddressList, InterfaceName, Mac, NetworkName, Owner, PodRef};
use serde::{Deserialize, Serialize};

/// Milliseconds of a clock that never steps back: the time since boot is the right one, because leases live
/// as long as the kernel objects do.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

/// What a lease belongs to: one interface of one owner. There is no lease without one.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct LeaseKey {
    /// The owner: a sandbox, or a claim or an object that has none yet.
    #[serde(flatten)]
    pub owner: Owner,
    /// The interface's name inside the pod.
    pub interface: InterfaceName,
}

/// How an interface came to its addresses.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseKind {
    /// Chosen by the allocator: other nodes know address and MAC from the AddressBlock.
    Dynamic,
    /// An address or the MAC was asked for: other nodes must be told.
    Static,
}

/// The addresses and the MAC of one pod interface.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Lease {
    /// Whose it is.
    #[serde(flatten)]
    pub key: LeaseKey,
    /// The pod, where the caller said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// The Network.
    pub network: NetworkName,
    /// At least one address of each family of the Network.
    #[serde(flatten)]
    pub addresses: AddressList,
    /// The MAC.
    pub mac: Mac,
    /// How it came to them.
    pub kind: LeaseKind,
}

/// One interface that a pod wants.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Want {
    /// The interface's name inside the pod.
    pub interface: InterfaceName,
    /// The Network.
    pub network: NetworkName,
    /// Addresses that it must have, any number of each family: these or none. For a family that is left out
    /// the allocator chooses one.
    pub addresses: Vec<IpAddr>,
    /// An address that it had before and gets again if that is free: its whole index is preferred.
    pub prefer: Option<IpAddr>,
    /// The MAC that it must have.
    pub mac: Option<Mac>,
}

/// All interfaces that one owner wants at once: all of them are leased, or none.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Request {
    /// The owner.
    pub owner: Owner,
    /// The pod, where the caller knows it.
    pub pod: Option<PodRef>,
    /// The interfaces.
    pub wants: Vec<Want>,
}

/// An index that was freed and is not given to another pod for a while.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Cooling {
    /// The Network.
    pub network: NetworkName,
    /// The first address of the index (IPv4 where there is one).
    pub address: IpAddr,
    /// When it was freed.
    pub freed_at: Millis,
    /// Who had it, who may have it again at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

/// All that an allocator remembers besides Networks and blocks.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Snapshot {
    /// The leases, in the order of their keys.
    pub leases: Vec<Lease>,
    /// What is in quarantine.
    #[serde(default)]
    pub cooling: Vec<Cooling>,
}

// === impl Millis ===

impl Millis {
    /// Later by some milliseconds.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

// === impl LeaseKey ===

impl LeaseKey {
    /// The key of an interface of an owner.
    pub fn new(owner: impl Into<Owner>, interface: InterfaceName) -> Self {
        Self { owner: owner.into(), interface }
    }
}

impl fmt::Display for LeaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {} of {}", self.interface, self.owner)
    }
}

// === impl Lease ===

impl Lease {
    /// Who has it, for a message: the pod where it is known, and the key.
    #[must_use]
    pub fn holder(&self) -> String {
        match &self.pod {
            Some(pod) => format!("pod {pod} ({})", self.key),
            None => self.key.to_string(),
        }
    }
}

// === impl Want ===

impl Want {
    /// An interface on a Network, with addresses that the allocator chooses.
    pub fn new(interface: InterfaceName, network: impl Into<NetworkName>) -> Self {
        Self { interface, network: network.into(), addresses: Vec::new(), prefer: None, mac: None }
    }

    /// Whether a lease is what is wanted here.
    #[must_use]
    pub fn is_met_by(&self, lease: &Lease) -> bool {
        self.network == lease.network
            && self.addresses.iter().all(|wanted| lease.addresses.contains(*wanted))
            && self.mac.is_none_or(|wanted| wanted == lease.mac)
    }
}
