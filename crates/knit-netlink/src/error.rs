//! What the kernel says when it refuses, and what is wrong with bytes that do not parse.

use std::fmt;
use std::io;

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
    /// The error number.
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
