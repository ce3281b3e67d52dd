//! NRI, the Node Resource Interface, as a plugin speaks it that connects to the container runtime's socket.
//!
//! | module | what it is |
//! |---|---|
//! | [`mux`] | several byte streams over one socket; bytes in, bytes out |
//! | [`ttrpc`] | requests and responses in such a stream; bytes in, bytes out |
//! | [`wire`] | the messages |
//! | [`version`] | what is known of the runtime that asks, and which mistakes it has |
//! | [`plugin`] | what a plugin implements |
//! | [`session`] | one connection: registered, configured, synchronized, and then served |
//! | [`client`] | connects again for as long as it runs |
//!
//! The first three have no socket in them and take no more memory than a limit says, whatever comes in. What
//! a runtime gets to hear is decided by [`plugin::Plugin`]: an error refuses a pod, while an answer that does
//! not come lets it start without its networks in most runtimes. A session therefore answers every request
//! before the runtime stops waiting.

pub mod client;
pub mod mux;
pub mod plugin;
pub mod session;
pub mod ttrpc;
pub mod version;
pub mod wire;

pub use client::{Client, Identity, IdentityError};
pub use plugin::{Deadline, Plugin, Refusal};
pub use version::Runtime;
