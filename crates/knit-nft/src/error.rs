//! What can go wrong with a transaction or a listing.

use std::fmt;

use knit_netlink::Refusal;

use crate::data::Data;

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `ERESTART`: what the kernel says when the rule set has changed since the generation that was asked for.
const ERESTART: i32 = 85;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a change; nothing of its batch was carried out.
    #[error("cannot {operation}{}", hint(.source))]
    Refused {
        /// The change, and the object that it is about.
        operation: String,
        /// Its place in the transaction; none if the kernel refused the batch as a whole.
        index: Option<usize>,
        /// The key of the element that was refused, if it was about one and the kernel told which.
        element: Option<Box<Data>>,
        /// What the kernel said.
        source: Refusal,
    },
    /// A change cannot be said to the kernel at all; nothing was sent.
    #[error("cannot {operation}: the request is not valid")]
    Invalid {
        /// The change, and the object that it is about.
        operation: String,
        /// What is wrong with it.
        source: Invalid,
    },
    /// The transaction is larger than what one batch may carry here; nothing was sent.
    #[error(
        "a transaction of {bytes} bytes is more than the {limit} that this socket may send at once: \
         give CAP_NET_ADMIN in the initial user namespace, or commit in chunks"
    )]
    TooBig {
        /// How large it is.
        bytes: usize,
        /// How large it may be.
        limit: usize,
    },
    /// A transaction in chunks stopped in the middle: the first chunks are in force.
    #[error("a transaction in chunks stopped after {done} of {total} changes")]
    Partial {
        /// How many changes are in force.
        done: usize,
        /// How many there are.
        total: usize,
        /// The cause.
        source: Box<Error>,
    },
    /// A listing failed.
    #[error("cannot list {what}")]
    List {
        /// What was asked for.
        what: String,
        /// The cause.
        source: ChannelError,
    },
    /// The rule set changed while it was listed, again and again.
    #[error("the rule set changed {0} times while it was listed; try again")]
    Unstable(u32),
    /// The socket failed.
    #[error("cannot {attempted}")]
    Socket {
        /// What was attempted.
        attempted: &'static str,
        /// The cause.
        source: ChannelError,
    },
}

/// What went wrong on the way to nftables and back, in the words of whoever brings the socket.
#[derive(Debug)]
pub struct ChannelError {
    errno: Option<i32>,
    error: Box<dyn std::error::Error + Send + Sync>,
}

/// What cannot be said to the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// A name that is empty, longer than 255 bytes, or has a NUL in it.
    #[error("{0:?} is not a name of 1 to 255 bytes without NUL")]
    Name(String),
    /// A comment that is longer than 128 bytes or has a NUL in it.
    #[error("{0:?} is not a comment of at most 128 bytes without NUL")]
    Comment(String),
    /// A rule that the builder could not make.
    #[error("{0}")]
    Rule(&'static str),
}

impl ChannelError {
    /// An error of a socket, with the system's error number if it gave one.
    pub fn new(errno: Option<i32>, error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { errno, error: Box::new(error) }
    }

    /// The system's error number, if it gave one.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    /// The socket's own error.
    pub fn inner(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.error
    }
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ChannelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl Error {
    fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { source, .. } => Some(source),
            Self::Partial { source, .. } => source.refusal(),
            _ => None,
        }
    }

    /// The kernel's error number, if it gave one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::List { source, .. } | Self::Socket { source, .. } => source.errno(),
            _ => self.refusal().map(|refusal| refusal.errno.0),
        }
    }

    /// The place in the transaction of the change that was refused.
    pub fn index(&self) -> Option<usize> {
        match self {
            Self::Refused { index, .. } => *index,
            Self::Partial { source, .. } => source.index(),
            _ => None,
        }
    }

    /// The key of the element that was refused, if it was about one.
    pub fn element(&self) -> Option<&Data> {
        match self {
            Self::Refused { element, .. } => element.as_deref(),
            Self::Partial { source, .. } => source.element(),
            _ => None,
        }
    }

    /// What was named is not there.
    pub fn is_not_found(&self) -> bool {
        self.errno() == Some(libc::ENOENT)
    }

    /// What was to be made is there already.
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// What was to be deleted is in use.
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    /// The same transaction may succeed when it is tried again: the rule set changed in between, or the
    /// kernel was short of something. After [`Error::is_stale`], list and plan again first.
    pub fn is_retryable(&self) -> bool {
        let transient = [libc::EBUSY, libc::EINTR, libc::EAGAIN, libc::ENOBUFS, libc::ENOMEM, ERESTART];
        matches!(self, Self::Unstable(_)) || self.errno().is_some_and(|errno| transient.contains(&errno))
    }

    /// Somebody else changed the rule set since the state that the transaction was planned for.
    pub fn is_stale(&self) -> bool {
        self.errno() == Some(ERESTART)
    }
}

fn hint(refusal: &Refusal) -> &'static str {
    match refusal.errno.0 {
        libc::EPERM => ": CAP_NET_ADMIN is needed in the user namespace that owns the network namespace",
        libc::EOPNOTSUPP => ": this kernel lacks an expression or hook, or a jump leads to a base chain",
        libc::EMLINK | libc::ELOOP => ": chains lead back to themselves, or are nested more than 16 deep",
        _ => "",
    }
}
