//! What a network runtime is, and what one knows: the [`Runtime`] trait with its plain types.
//!
//! The node agent resolves which Networks a pod gets, reserves the addresses and records the plan; a runtime
//! makes the interfaces. Node set-up ([`Runtime::setup_network`]) is apart from pod set-up
//! ([`Runtime::attach`]). A runtime in another process is reached by gRPC ([`wire`] translates); what the
//! agent sees is the same trait.

mod error;
mod request;
pub mod routers;
mod runtime;
mod types;
pub mod wire;

pub use error::{Error, Reason, Result};
pub use request::AttachRequest;
pub use runtime::{
    Change, Changes, Damage, Disturbance, Info, NetworkStatus, NetworkUsage, NotKnown, Runtime, Status,
    Survey, feature,
};
pub use types::{Announced, Block, Network, NetworkId, Subnet, Underlay};

pub use knit_types::{
    Address, Attachment, Dns, HostEnd, IfName, InterfaceName, Mac, NetworkName, Pod, PortMapping, Protocol,
    Route, SandboxId, Topology, UnderlayKind, UnderlayMode,
};
