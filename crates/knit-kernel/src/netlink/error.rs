//! What can go wrong on a netlink socket, with the kernel's own words where it has any.

use std::io;

use knit_netlink::{Errno, Malformed, Refusal};

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong on a netlink socket.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be made.
    #[error("cannot open a {protocol:?} netlink socket{}", hint(.source))]
    Open {
        /// Which netlink family.
        protocol: super::Protocol,
        /// What the system said.
        source: io::Error,
    },
    /// A socket option or subscription was refused.
    #[error("cannot {what} on a netlink socket")]
    Option {
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Sending failed; nothing of the batch was carried out.
    #[error("cannot send {bytes} bytes in one netlink message{}", send_hint(.source))]
    Send {
        /// How long the batch was.
        bytes: usize,
        /// What the system said.
        source: io::Error,
    },
    /// Receiving failed.
    #[error("cannot receive from a netlink socket")]
    Receive(#[source] io::Error),
    /// The receive buffer overflowed: answers or notifications were lost, so list the state again.
    #[error("the kernel dropped netlink messages for this socket; list the state again")]
    Overrun,
    /// The kernel returned from a request without an answer.
    #[error("the kernel did not answer a netlink request")]
    NoAnswer,
    /// The kernel refused a request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A dump was interrupted by changes more often than we are willing to repeat it.
    #[error("the listing changed while it was read, {0} times in a row; try again")]
    Inconsistent(u32),
    /// An attribute was too long to be written.
    #[error(transparent)]
    TooLong(#[from] knit_netlink::attr::TooLong),
    /// What the kernel sent does not parse.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Entering the namespace that the socket was to be opened in failed.
    #[error("cannot open a netlink socket in another namespace")]
    Namespace(#[source] Box<crate::netns::Error>),
}

impl Error {
    /// The errno behind this error, if the system gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused(refusal) => Some(refusal.errno),
            Self::Open { source, .. } | Self::Option { source, .. } | Self::Send { source, .. } => {
                source.raw_os_error().map(Errno)
            }
            Self::Receive(source) => source.raw_os_error().map(Errno),
            _ => None,
        }
    }

    /// What was named is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.is_not_found())
    }

    /// What was to be made is there already.
    pub fn is_exists(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.is_exists())
    }

    /// The same request may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.is_retryable(),
            Self::Overrun | Self::NoAnswer | Self::Inconsistent(_) => true,
            _ => self
                .errno()
                .is_some_and(|errno| matches!(errno.0, libc::EINTR | libc::ENOBUFS | libc::ENOMEM)),
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPROTONOSUPPORT) => "; this kernel was built without it",
        Some(libc::EMFILE | libc::ENFILE) => "; raise the limit of open files",
        _ => "",
    }
}

fn send_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EMSGSIZE) => {
            "; raise the send buffer (needs CAP_NET_ADMIN in the initial namespace) or send less at once"
        }
        _ => "",
    }
}
