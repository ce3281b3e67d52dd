//! Why somebody does not get a place, in words.

use std::fmt;

use knit_proxy::model::Protocol;

/// Why a claim does not count, whoever else wants the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Objection {
    /// Pods and Services have such addresses.
    InCluster,
    /// A node has it.
    OfNode,
    /// A node has it, and the Service's Network could allow that to load balancers.
    OfNodeDenied,
    /// This node has it, and no Node lists it. The Service's Network could allow that, if it says so.
    Unlisted { allowable: bool },
    /// The tunnels have it; said of a node port, or of a Service's own port.
    Tunnel { protocol: Protocol, port: u16, node_port: bool },
}

/// Why somebody does not get a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub why: String,
    /// It is so on this node, and others may not know.
    pub only_here: bool,
}

impl From<Objection> for Refusal {
    fn from(objection: Objection) -> Self {
        let only_here = matches!(objection, Objection::Unlisted { .. });
        Self { why: objection.to_string(), only_here }
    }
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (protocol, port, node_port) = match self {
            Self::InCluster => {
                return f.write_str("the address is inside a Network or a range of service addresses");
            }
            Self::OfNode => return f.write_str("it is an address of a node"),
            Self::OfNodeDenied => {
                return f.write_str(
                    "it is an address of a node, which the Service's Network does not allow \
                     (spec.services.nodeAddresses)",
                );
            }
            Self::Unlisted { allowable } => {
                f.write_str(
                    "an interface of this node has the address, although its Node does not list it; \
                    remove it there",
                )?;
                let allow = ", or set spec.services.nodeAddresses: Allow of the Service's Network";
                return f.write_str(if *allowable { allow } else { "" });
            }
            Self::Tunnel { protocol, port, node_port } => (protocol, port, *node_port),
        };
        let what = if node_port { "nodePort" } else { "port" };
        write!(
            f,
            "{protocol} port {port} is reserved for the VXLAN tunnels between nodes; give the Service \
             another {what}"
        )
    }
}
