//! What the CNI shim and the node agent share: CNI's own types, and the protocol between the two.
//!
//! A container runtime runs the shim once per call. The shim reads the call from its environment and its
//! standard input ([`call`]), sends it to the agent as one frame ([`protocol`]), and prints the one frame
//! that comes back. It decides nothing; only when the agent is away does it act by itself: a DEL is noted in
//! the [`spool`], and STATUS follows the [`paths::READY_MARKER`].
//!
//! No async runtime here: the shim is a small static program that lives for a millisecond.

mod agent;
mod args;
pub mod call;
mod config;
mod error;
pub mod paths;
pub mod protocol;
mod result;
pub mod shim;
pub mod spool;
mod version;

pub use args::Args;
pub use config::{AttachmentKey, DnsConfig, NetworkConfig, PortMapping, RuntimeConfig};
pub use error::{CniError, code};
pub use result::{CniResult, Dns, Interface, Ip, Route};
pub use version::{UnsupportedVersion, Version};
