//! Netlink: a small blocking socket, messages and attributes, shared by rtnetlink and nfnetlink code.
//!
//! The kernel handles a netlink request inside the `sendmsg` that carries it: when that call returns, every
//! ack and reply is queued (a dump's further parts are made as they are read). So nothing in here waits for
//! an answer with a timer, and a missing one is an error at once. Only [`Socket::receive`], for multicast,
//! waits.

pub mod attr;
mod error;
mod message;
mod own;
mod socket;

pub use error::{Errno, Error, Refusal, Result};
pub use message::{Batch, Message, Messages, flags};
#[cfg(feature = "testing")]
pub(crate) use own::as_stranger;
pub(crate) use own::{doom, is_doomed, is_own};
pub use socket::{Answers, Changed, Protocol, Socket};
