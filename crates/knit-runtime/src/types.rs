//! The nouns that a runtime works with, in forms that cannot be wrong.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_ipam::Mac;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Reason};
use crate::request::{Dns, Pod};

/// The container runtime's name for a pod's sandbox.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

/// The name of a network interface: 1 to 15 bytes, nothing that a path or the kernel would take for something else.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct InterfaceName(String);

/// A Network's number, 1 to 2^24 - 1: its VNI.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct NetworkId(NonZeroU32);

/// How pods of a Network reach each other.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Topology {
    /// Each pod is a routed host.
    Layer3,
    /// All pods are on one switched segment.
    Layer2,
}

/// A Network as a node needs to know it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Network {
    /// Its name, unique in the cluster.
    pub name: String,
    /// Its number.
    pub id: NetworkId,
    /// How its pods reach each other.
    pub topology: Topology,
    /// Its address ranges, at most one per family.
    pub subnets: Vec<Subnet>,
    /// The largest packet of a pod's interface; the runtime decides if it is left out.
    pub mtu: Option<u16>,
    /// Whether some namespaces have it as their primary Network.
    pub primary: bool,
    /// Whether pods reach the outside, behind their node's address.
    pub outside: bool,
    /// Ranges that are not the outside: nodes, services, other Networks' addresses.
    pub not_outside: Vec<IpNet>,
    /// Service addresses (of the kube API, DNS) that its pods reach on the default Network.
    pub cluster_service_ips: Vec<IpAddr>,
    /// Routes that each pod gets besides the default one.
    pub routes: Vec<Route>,
    /// All blocks of the Network, on this node and on others.
    pub blocks: Vec<Block>,
    /// The own addresses of this node's router, one per family, out of this node's blocks.
    pub router_addresses: Vec<IpAddr>,
    /// Interfaces of pods on other nodes that do not follow from blocks.
    #[serde(default)]
    pub announced: Vec<Announced>,
    /// The parameters of its NetworkClass.
    pub parameters: serde_json::Map<String, serde_json::Value>,
}

/// An address range of a Network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Subnet {
    /// The range.
    pub cidr: IpNet,
    /// The pods' gateway, the same on every node.
    pub gateway: IpAddr,
}

/// A range of addresses that one node owns in a Network.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Block {
    /// The node's name.
    pub node: String,
    /// The node's addresses, which tunnels and direct routes end at.
    pub node_addresses: Vec<IpAddr>,
    /// The IPv4 range.
    pub ipv4: Option<Ipv4Net>,
    /// The IPv6 range.
    pub ipv6: Option<Ipv6Net>,
}

/// An interface on another node, told one by one: its address is outside of the node's blocks, or its MAC is its own.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Announced {
    /// The node's name.
    pub node: String,
    /// The node's addresses, which tunnels and direct routes end at.
    pub node_addresses: Vec<IpAddr>,
    /// The interface's addresses.
    pub addresses: Vec<IpAddr>,
    /// Its MAC address.
    pub mac: Mac,
}

/// A route inside a pod.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Route {
    /// Where packets are to go.
    pub destination: IpNet,
    /// The next hop; the gateway of the family if it is left out.
    pub via: Option<IpAddr>,
}

/// An address with what an interface needs to know about it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Address {
    /// The address, with the prefix length that the interface has it with.
    pub net: IpNet,
    /// The gateway of its family.
    pub gateway: Option<IpAddr>,
}

/// One interface of a pod, as it is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Attachment {
    /// The pod.
    pub pod: Pod,
    /// The Network's name.
    pub network: String,
    /// The interface's name in the pod.
    pub interface: InterfaceName,
    /// Its addresses.
    pub addresses: Vec<Address>,
    /// Its MAC address.
    pub mac: Mac,
    /// Its largest packet.
    pub mtu: u32,
    /// The routes that go out by it.
    pub routes: Vec<Route>,
    /// Name servers for the pod.
    pub dns: Dns,
    /// Its other end.
    pub host: HostEnd,
    /// The inode of the pod's network namespace.
    pub pod_netns_inode: u64,
}

/// The other end of a pod's interface.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct HostEnd {
    /// Its name.
    pub name: String,
    /// Its index in the namespace that it lives in.
    pub index: u32,
    /// Where that namespace can be opened; the node's own if it is left out.
    pub netns_path: Option<PathBuf>,
    /// The inode of that namespace.
    pub netns_inode: u64,
}

// === impl SandboxId ===

impl SandboxId {
    /// A sandbox's id: 1 to 253 letters, digits and `._-`, since it becomes part of file names and owner marks.
    ///
    /// # Errors
    /// When it is anything else.
    pub fn new(id: impl Into<String>) -> Result<Self, Error> {
        let id = id.into();
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if id.is_empty() || id.len() > 253 || !id.bytes().all(fits) || id.starts_with('.') {
            let message = format!("{id:?} cannot be a sandbox id: give 1 to 253 letters, digits and ._-");
            return Err(Error::new(Reason::Invalid, message));
        }
        Ok(Self(id))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl InterfaceName ===

impl InterfaceName {
    /// An interface name.
    ///
    /// # Errors
    /// When the kernel would refuse it, or it would be mistaken for something else.
    pub fn new(name: impl Into<String>) -> Result<Self, Error> {
        let name = name.into();
        let fits = |b: u8| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%');
        if name.is_empty()
            || name.len() > 15
            || !name.bytes().all(fits)
            || matches!(&*name, "." | ".." | "lo")
        {
            let message = format!(
                "{name:?} cannot be an interface's name: give 1 to 15 letters, digits and signs without / : % and blanks, and not lo"
            );
            return Err(Error::new(Reason::Invalid, message));
        }
        Ok(Self(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl NetworkId ===

impl NetworkId {
    /// A Network's number.
    ///
    /// # Errors
    /// When it is 0 or does not fit into the 24 bits of a VNI.
    pub fn new(id: u32) -> Result<Self, Error> {
        match NonZeroU32::new(id) {
            Some(n) if id < 1 << 24 => Ok(Self(n)),
            _ => {
                let message = format!("{id} cannot be a Network's number: give 1 to 16777215");
                Err(Error::new(Reason::Invalid, message))
            }
        }
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

macro_rules! text {
    ($($type:ident),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $type {
            type Error = Error;

            fn try_from(text: String) -> Result<Self, Error> {
                Self::new(text)
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.0
            }
        }
    )*};
}

text!(SandboxId, InterfaceName);

impl TryFrom<u32> for NetworkId {
    type Error = Error;

    fn try_from(id: u32) -> Result<Self, Error> {
        Self::new(id)
    }
}

impl From<NetworkId> for u32 {
    fn from(id: NetworkId) -> Self {
        id.get()
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Network ===

impl Network {
    /// The gateway of an address's family.
    #[must_use]
    pub fn gateway_for(&self, address: IpAddr) -> Option<IpAddr> {
        self.subnets.iter().map(|s| s.gateway).find(|g| g.is_ipv4() == address.is_ipv4())
    }

    /// The blocks of one node.
    pub fn blocks_of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Block> {
        self.blocks.iter().filter(move |b| b.node == node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_refused() {
        for name in ["", "sixteen-characte", "a/b", "a b", "..", "lo", "eth0:1", "\u{7f}", "ü"] {
            let error = InterfaceName::new(name).expect_err(name);
            assert_eq!(error.reason, Reason::Invalid);
        }
        InterfaceName::new("fifteen-charact").expect("15 characters fit");
        for id in ["", "../../etc", ".hidden", "a b", &"x".repeat(254)] {
            SandboxId::new(id).expect_err(id);
        }
        SandboxId::new("f0e1.d2_c3-b4").expect("a sandbox id");
    }

    #[test]
    fn network_ids_fit_a_vni() {
        NetworkId::new(0).expect_err("0");
        NetworkId::new(1 << 24).expect_err("2^24");
        assert_eq!(NetworkId::new((1 << 24) - 1).expect("the last one").get(), 16_777_215);
    }
}
