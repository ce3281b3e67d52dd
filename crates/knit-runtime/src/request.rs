//! What is asked of a runtime for one pod.

use std::net::IpAddr;
use std::path::PathBuf;

use knit_ipam::Mac;
use serde::{Deserialize, Serialize};

use crate::types::{Address, InterfaceName, Route, SandboxId};

/// The pod that an attachment is for. A plain CNI client knows only its sandbox.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Pod {
    /// The container runtime's name for its sandbox.
    pub sandbox: SandboxId,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: Option<String>,
    /// Its uid.
    pub uid: Option<String>,
}

/// One interface to make.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachRequest {
    /// The pod.
    pub pod: Pod,
    /// Where the pod's network namespace can be opened.
    pub netns: PathBuf,
    /// The Network's name; it was set up before.
    pub network: String,
    /// The interface's name in the pod.
    pub interface: InterfaceName,
    /// Its addresses, one per family of the Network, chosen by the agent.
    pub addresses: Vec<Address>,
    /// Its MAC address, chosen by the agent; the runtime chooses if it is left out.
    pub mac: Option<Mac>,
    /// Whether the pod's default route goes out here.
    pub default_route: bool,
    /// Ports of the node that lead to this interface.
    pub ports: Vec<PortMapping>,
    /// Routes besides those of the Network.
    pub routes: Vec<Route>,
    /// Name servers, for the answer.
    pub dns: Dns,
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

/// A transport protocol.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
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
