//! The gRPC form of a runtime: [`RemoteRuntime`] speaks to one in another process, [`serve`] makes one of
//! ours speak.

mod authority;
mod client;
mod convert;
mod error;
mod server;
mod socket;

pub use authority::Client;
#[cfg(feature = "testing")]
pub use authority::filtered;
pub use client::RemoteRuntime;
pub use convert::{attachment_from_wire, attachment_to_wire, network_from_wire, network_to_wire};
pub use error::{error_detail, error_from_status, status_from_error};
pub use server::service;
pub use socket::{Clients, bind_private, listen, serve};

/// The version of the protocol that this crate speaks.
pub const PROTOCOL_VERSION: &str = "v1alpha1";
