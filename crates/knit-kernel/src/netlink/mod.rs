//! Netlink: a small blocking socket, shared by rtnetlink and nfnetlink code; messages and attributes are
//! those of [`knit_netlink`].
//!
//! The kernel handles a netlink request inside the `sendmsg` that carries it: when that call returns, every
//! ack and reply is queued (a dump's further parts are made as they are read). So nothing in here waits for
//! an answer with a timer, and a missing one is an error at once. Only [`Socket::receive`], for multicast,
//! waits.

mod error;
mod own;
mod socket;

use netlink_packet_core::Emitable;

pub use error::{Error, Result};
pub use knit_netlink::{Batch, Errno, Message, Messages, Refusal, attr, flags};
#[cfg(feature = "testing")]
pub(crate) use own::as_stranger;
pub(crate) use own::{doom, is_doomed, is_own};
pub use socket::{Answers, Changed, Protocol, Socket};

/// Message bodies that types of netlink-packet-route write.
pub(crate) trait Emit {
    /// A whole message body.
    fn emit(&mut self, body: &impl Emitable) -> &mut Self;
}

impl Emit for attr::Writer<'_> {
    fn emit(&mut self, body: &impl Emitable) -> &mut Self {
        self.raw(body.buffer_len(), |buffer| body.emit(buffer))
    }
}
