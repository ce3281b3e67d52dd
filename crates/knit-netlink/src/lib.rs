//! Netlink messages and attributes as bytes: no socket, no system call, no `unsafe`.
//!
//! A [`Batch`] is what one `sendmsg` carries: requests one after the other, whose attributes are written by
//! [`attr::Writer`]. [`Messages`] reads what was received, [`attr::Reader`] the attributes in it; neither
//! ever panics, whatever the bytes are. A [`Refusal`] is the kernel's answer to a request that it did not
//! carry out, with its own words where it has any.
#![forbid(unsafe_code)]

pub mod attr;
mod error;
mod message;

pub use error::{Errno, Malformed, Refusal};
pub use message::{Batch, Message, Messages, flags, kind};
