//! What can go wrong on a netlink socket, with the kernel's own words where it has any.

use std::fmt;
use std::io;

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error number of the kernel, always positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = io::Error::from_raw_os_error(self.0).to_string();
        // The standard library appends " (os error N)"; the number adds nothing for a reader.
        f.write_str(text.split(" (os error").next().unwrap_or(&text))
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

/// The kernel's answer to a request that it did not carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub errno: Errno,
    /// The kernel's own text (extended ack), if it gave one.
    pub message: Option<String>,
    /// Where in the request (from its netlink header on) the attribute begins that the kernel did not like.
    pub offset: Option<u32>,
    /// The type of that attribute, if the request that was sent has one at this place.
    pub attribute: Option<u16>,
}

impl Refusal {
    /// What was named is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self.errno.0, libc::ENOENT | libc::ENODEV | libc::ESRCH | libc::EADDRNOTAVAIL | libc::ENXIO)
    }

    /// What was to be made is there already.
    pub fn is_exists(&self) -> bool {
        self.errno.0 == libc::EEXIST
    }

    /// The same request may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        matches!(self.errno.0, libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ENOBUFS | libc::ENOMEM)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.errno)?;
        if let Some(message) = &self.message {
            write!(f, ": {message}")?;
        }
        match (self.attribute, self.offset) {
            (Some(kind), Some(offset)) => write!(f, " (attribute {kind} at byte {offset} of the request)"),
            (None, Some(offset)) => write!(f, " (at byte {offset} of the request)"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Refusal {}

/// Bytes from the kernel that do not read as what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A message header that is cut, or claims more or less than there is.
    #[error("a netlink message claims {claimed} bytes where {available} are left")]
    Message {
        /// The length in the header.
        claimed: usize,
        /// What was received.
        available: usize,
    },
    /// An attribute's value has another length than its type needs.
    #[error("attribute {kind} has {found} bytes, {wanted} were expected")]
    Attribute {
        /// The attribute's type.
        kind: u16,
        /// Bytes that the type needs.
        wanted: usize,
        /// Bytes that were there.
        found: usize,
    },
    /// The fixed header after the netlink header is cut.
    #[error("a message of type {kind} ends inside its fixed header")]
    Header {
        /// The message type.
        kind: u16,
    },
}

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
    TooLong(#[from] super::attr::TooLong),
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
