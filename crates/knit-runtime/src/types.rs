//! The nouns that a runtime works with, in forms that cannot be wrong.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_types::{
    Address, ByFamily, Family, HasFamily, Mac, NetworkName, Route, Topology, UnderlayKind, UnderlayMode,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Reason};

/// A Network's number, 1 to 2^24 - 1: its VNI.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct NetworkId(NonZeroU32);

/// A Network as a node needs to know it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Network {
    /// Its name, unique in the cluster.
    pub name: NetworkName,
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
    /// The link of this node that it is on; with [`Topology::Underlay`], and only there.
    #[serde(default)]
    pub underlay: Option<Underlay>,
    /// The parameters of its NetworkClass.
    pub parameters: serde_json::Map<String, serde_json::Value>,
}

/// The link of this node that a Network is on.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Underlay {
    /// The link's name in the node's namespace.
    pub parent: String,
    /// How pods of this node reach each other.
    pub mode: UnderlayMode,
    /// What a pod's interface is.
    #[serde(default)]
    pub kind: UnderlayKind,
    /// How long to ask, before a pod uses its addresses, whether somebody else on the segment has them; zero
    /// does not ask.
    #[serde(default)]
    pub duplicate_check: Duration,
}

/// An address range of a Network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Subnet {
    /// The range.
    pub cidr: IpNet,
    /// The pods' gateway, the same on every node. None only where it is not ours:
    /// with [`Topology::Underlay`].
    pub gateway: Option<IpAddr>,
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

/// An interface on another node, told one by one: its address is outside of the node's blocks, or its MAC is
/// its own.
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
                let message = format!("{id} is not a valid Network number: use 1 to 16777215");
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

// === impl Subnet ===

impl HasFamily for Subnet {
    fn family(&self) -> Family {
        self.cidr.family()
    }
}

// === impl Network ===

impl Network {
    /// The gateway of an address's family, if there is one.
    #[must_use]
    pub fn gateway_for(&self, address: IpAddr) -> Option<IpAddr> {
        self.subnets.first_of(Family::of(address)).and_then(|subnet| subnet.gateway)
    }

    /// An address as a pod's interface has it: with its subnet's prefix where that is on the pod's link, and
    /// alone otherwise. None for an address outside of all subnets.
    #[must_use]
    pub fn pod_address(&self, address: IpAddr) -> Option<Address> {
        let subnet = self.subnets.iter().find(|subnet| subnet.cidr.contains(&address))?;
        let on_link = self.topology.has_subnet_on_link().then_some(subnet.cidr.prefix_len());
        let net = on_link.and_then(|length| IpNet::new(address, length).ok()).unwrap_or(address.into());
        Some(Address { net, gateway: subnet.gateway })
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
    fn a_pods_address_has_the_prefix_of_what_is_on_its_link() {
        let subnet = |cidr: &str, gateway: &str| Subnet {
            cidr: cidr.parse().expect("a range"),
            gateway: Some(gateway.parse().expect("an address")),
        };
        let mut network = Network {
            name: "blue".into(),
            id: NetworkId::new(7).expect("a number"),
            topology: Topology::Layer3,
            subnets: vec![subnet("10.2.0.0/16", "10.2.0.1"), subnet("fd00:2::/64", "fd00:2::1")],
            mtu: None,
            primary: false,
            outside: true,
            not_outside: Vec::new(),
            cluster_service_ips: Vec::new(),
            routes: Vec::new(),
            blocks: Vec::new(),
            router_addresses: Vec::new(),
            announced: Vec::new(),
            underlay: None,
            parameters: serde_json::Map::default(),
        };
        let shown = |network: &Network, address: &str| {
            let found = network.pod_address(address.parse().expect("an address"))?;
            Some(format!("{} by {}", found.net, found.gateway?))
        };
        assert_eq!(shown(&network, "10.2.3.4").as_deref(), Some("10.2.3.4/32 by 10.2.0.1"));
        assert_eq!(shown(&network, "fd00:2::9").as_deref(), Some("fd00:2::9/128 by fd00:2::1"));
        network.topology = Topology::Layer2;
        assert_eq!(shown(&network, "10.2.3.4").as_deref(), Some("10.2.3.4/16 by 10.2.0.1"));
        assert_eq!(shown(&network, "fd00:2::9").as_deref(), Some("fd00:2::9/64 by fd00:2::1"));
        assert_eq!(shown(&network, "10.3.0.1"), None);
    }

    #[test]
    fn network_ids_fit_a_vni() {
        NetworkId::new(0).expect_err("0");
        NetworkId::new(1 << 24).expect_err("2^24");
        assert_eq!(NetworkId::new((1 << 24) - 1).expect("the last one").get(), 16_777_215);
    }
}
