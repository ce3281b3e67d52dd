//! One interface of a pod as it is, and what belongs to it. A runtime answers with it, and the ledger keeps
//! it.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::family::{Family, HasFamily};
use crate::mac::Mac;
use crate::name::{InterfaceName, NetworkName, SandboxId};
use crate::protocol::Protocol;

/// The pod that an attachment is for. A plain CNI client knows only its sandbox.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Pod {
    /// The container runtime's name for its sandbox.
    pub sandbox: SandboxId,
    /// Its namespace.
    pub namespace: Option<String>,
    /// The pod's name.
    pub name: Option<String>,
    /// Its uid.
    pub uid: Option<String>,
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
    pub network: NetworkName,
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
    /// The ports of the node that lead to it, as far as the runtime can tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortMapping>,
}

/// The other end of a pod's interface.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct HostEnd {
    /// The interface's name.
    pub name: String,
    /// Its index in the namespace that it lives in.
    pub index: u32,
    /// Where that namespace can be opened; the node's own if it is left out.
    pub netns_path: Option<PathBuf>,
    /// The inode of that namespace.
    pub netns_inode: u64,
}

/// Name servers for a pod.
#[derive(Clone, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Dns {
    /// Name servers' addresses.
    pub servers: Vec<String>,
    /// Search domains.
    pub searches: Vec<String>,
    /// Resolver options.
    pub options: Vec<String>,
}

/// A port of the node that leads into the pod.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct PortMapping {
    /// The protocol.
    pub protocol: Protocol,
    /// The node's port.
    pub host_port: u16,
    /// The pod's port.
    pub container_port: u16,
    /// The node's address that it holds for; all of them if it is left out.
    pub host_ip: Option<IpAddr>,
}

impl HasFamily for Address {
    fn family(&self) -> Family {
        self.net.family()
    }
}
