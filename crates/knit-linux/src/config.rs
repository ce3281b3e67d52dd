//! What the runtime is told about its node.

use std::net::IpAddr;
use std::path::PathBuf;

use knit_kernel::netns::NetNs;
use knit_types::NetworkName;

/// What the runtime is told about its node. All of it is about the network namespace `namespace`: in a
/// cluster that is the machine's own, in tests and in the lab any other.
#[derive(Debug)]
pub struct Config {
    /// The node's name, as blocks name it.
    pub node: String,
    /// The node's addresses, at most one per family is used: tunnels and direct routes of other nodes end
    /// there.
    pub addresses: Vec<IpAddr>,
    /// The node's network namespace.
    pub namespace: NetNs,
    /// Where the namespaces of routers are mounted.
    pub router_directory: PathBuf,
    /// The UDP port of tunnels.
    pub vxlan_port: u16,
    /// The name of the Network whose router is the node itself.
    pub default_network: NetworkName,
    /// The most connections, about, that the pods of one Network with a router of its own may have through
    /// the node at once, so that one Network leaves others room in the node's table; 0 is as many as there is
    /// room for.
    pub uplink_connections: u32,
    /// The most, about, that all these Networks may have together, so that they leave the node room; 0 is as
    /// many as there is room for.
    pub uplinks_together: u32,
}

impl Config {
    /// The place of routers unless another one is given.
    pub const ROUTER_DIRECTORY: &str = "/run/knit/netns";

    /// The most connections of one Network through the node unless another number is given: a quarter of the
    /// kernel's own limit on a machine of some size.
    pub const UPLINK_CONNECTIONS: u32 = 65_536;

    /// A node with the usual directory, port and default Network.
    #[must_use]
    pub fn new(node: impl Into<String>, addresses: Vec<IpAddr>, namespace: NetNs) -> Self {
        Self {
            node: node.into(),
            addresses,
            namespace,
            router_directory: Self::ROUTER_DIRECTORY.into(),
            vxlan_port: knit_kernel::link::Vxlan::PORT,
            default_network: NetworkName::default(),
            uplink_connections: Self::UPLINK_CONNECTIONS,
            uplinks_together: 0,
        }
    }
}
