//! What is asked of a runtime for one pod.

use std::path::PathBuf;

use knit_types::{Address, Dns, InterfaceName, Mac, NetworkName, Pod, PortMapping, Route};
use serde::{Deserialize, Serialize};

/// One interface to make.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachRequest {
    /// The pod.
    pub pod: Pod,
    /// Where the pod's network namespace can be opened.
    pub netns: PathBuf,
    /// The Network's name; it was set up before.
    pub network: NetworkName,
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
