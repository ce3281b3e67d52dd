//! The vocabulary: what every crate of Knit calls a family, an address, a name, a MAC, a pod and an owner.
//!
//! Each is defined here and nowhere else, checked when it is made, and written down in one way. A value that
//! exists is valid, so that whoever holds one needs no second check. Nothing here acts, and nothing here
//! knows Kubernetes or the kernel; beside the words there is how an error is shown with its causes
//! ([`Chain`]), and how a lock is taken ([`sync`]).

mod address_list;
mod addresses;
mod attachment;
mod chain;
mod family;
mod fnv;
mod label_selector;
mod mac;
mod name;
mod owner;
mod parse;
mod pod;
mod protocol;
pub mod sync;
mod topology;

pub use address_list::AddressList;
pub use addresses::Addresses;
pub use attachment::{Address, Attachment, Dns, HostEnd, Pod, PortMapping, Route};
pub use chain::{Chain, RepeatedCause, chain, chain_messages, repeated_cause};
pub use family::{ByFamily, Family, HasFamily, IPV6_MIN_MTU, PerFamily};
pub use fnv::fnv1a;
pub use label_selector::{LabelRequirement, ParseLabelRequirementError, split_label_selector};
pub use mac::{Mac, ParseMacError};
pub use name::{
    IfName, InterfaceName, InvalidInterfaceName, InvalidNetworkName, InvalidSandboxId, NetworkName, SandboxId,
};
pub use owner::{ObjectRef, Owner};
pub use parse::{parse_ip, parse_net};
pub use pod::PodRef;
pub use protocol::{ParseProtocolError, Protocol};
pub use topology::{ParseTopologyError, Topology, UnderlayKind, UnderlayMode};
