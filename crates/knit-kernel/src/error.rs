//! What can go wrong with an object in a namespace: which one, what was attempted, what to do.

use std::fmt;
use std::io;

use knit_types::{InvalidInterfaceName, ParseMacError};

use crate::netlink::Refusal;
use crate::{netlink, netns};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with links, addresses, routes, rules, neighbours, forwarding entries and sysctls.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The input cannot work. Nothing was sent.
    #[error("{object}: {problem}; {advice}")]
    Invalid {
        /// What the input is for.
        object: String,
        /// What is wrong with it.
        problem: String,
        /// What to write instead.
        advice: String,
    },
    /// A name that no interface can have. Nothing was sent.
    #[error(transparent)]
    Name(#[from] InvalidInterfaceName),
    /// A text that is not a MAC address.
    #[error(transparent)]
    Mac(#[from] ParseMacError),
    /// The object is there, with other properties than wanted. Nothing was changed.
    #[error("{object} exists in {namespace} with other properties ({}); delete it or choose another name",
        list(.differences))]
    Conflict {
        /// The object.
        object: String,
        /// The network namespace.
        namespace: String,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// The object is not there.
    #[error("{object} does not exist in {namespace}; it may have been removed meanwhile, list again")]
    NotFound {
        /// The object.
        object: String,
        /// The network namespace.
        namespace: String,
    },
    /// The kernel refused operations. The others of the same batch were carried out.
    #[error("in {namespace}, {} of {of} operations failed; first: cannot {}{}", .failures.len(),
        first(.failures), advice(.failures))]
    Refused {
        /// The network namespace.
        namespace: String,
        /// How many operations there were.
        of: usize,
        /// Those that failed, in order, each with the kernel's answer. Never empty.
        failures: Vec<Failure>,
        /// The first failure's answer again, as the source of this error.
        source: Refusal,
    },
    /// Talking to the kernel failed.
    #[error("cannot {attempted} in {namespace}")]
    Netlink {
        /// What was attempted.
        attempted: String,
        /// The network namespace.
        namespace: String,
        /// The cause.
        source: netlink::Error,
    },
    /// The namespace is the problem: it vanished, or cannot be entered.
    #[error(transparent)]
    Namespace(#[from] netns::Error),
    /// A sysctl could not be read or written.
    #[error("cannot {attempted} in {namespace}{}", sysctl_advice(.source))]
    Sysctl {
        /// What was attempted, with the sysctl's name.
        attempted: String,
        /// The network namespace.
        namespace: String,
        /// The cause.
        source: io::Error,
    },
}

/// One operation that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its place in the batch.
    pub index: usize,
    /// The operation and its object, in words.
    pub operation: String,
    /// The kernel's answer.
    pub refusal: Refusal,
}

/// One property that is not as wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The property that differs.
    pub property: &'static str,
    /// What was wanted.
    pub wanted: String,
    /// What is there.
    pub found: String,
}

impl Difference {
    /// Adds a difference if the two are not the same.
    pub(crate) fn check<T: PartialEq + fmt::Debug>(
        into: &mut Vec<Difference>,
        property: &'static str,
        wanted: &T,
        found: &T,
    ) {
        if wanted != found {
            into.push(Self { property, wanted: format!("{wanted:?}"), found: format!("{found:?}") });
        }
    }
}

impl Error {
    pub(crate) fn invalid(
        object: impl fmt::Display,
        problem: impl fmt::Display,
        advice: impl fmt::Display,
    ) -> Self {
        Self::Invalid { object: object.to_string(), problem: problem.to_string(), advice: advice.to_string() }
    }

    pub(crate) fn netlink(
        attempted: impl fmt::Display,
        namespace: impl fmt::Display,
        source: netlink::Error,
    ) -> Self {
        let (attempted, namespace) = (attempted.to_string(), namespace.to_string());
        match source {
            netlink::Error::Refused(refusal) => Self::refused(namespace, 1, vec![(0, attempted, refusal)]),
            netlink::Error::Namespace(error) => Self::Namespace(*error),
            source => Self::Netlink { attempted, namespace, source },
        }
    }

    /// `failures` must not be empty.
    pub(crate) fn refused(namespace: String, of: usize, failures: Vec<(usize, String, Refusal)>) -> Self {
        let source = failures[0].2.clone();
        let failures = failures
            .into_iter()
            .map(|(index, operation, refusal)| Failure { index, operation, refusal })
            .collect();
        Self::Refused { namespace, of, failures, source }
    }

    /// What was named is not there (any more): the object, its link, or its namespace.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::NotFound { .. } => true,
            Self::Refused { failures, .. } => failures.iter().all(|failure| failure.refusal.is_not_found()),
            Self::Namespace(error) => error.is_not_found(),
            Self::Sysctl { source, .. } => source.kind() == io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// What was to be made is there already, as wanted or not.
    pub fn is_exists(&self) -> bool {
        match self {
            Self::Conflict { .. } => true,
            Self::Refused { failures, .. } => failures.iter().all(|failure| failure.refusal.is_exists()),
            Self::Namespace(error) => error.is_exists(),
            _ => false,
        }
    }

    /// Something else has what the request needs: a link that is a bridge's port cannot be a parent.
    pub fn is_busy(&self) -> bool {
        let busy = |failure: &Failure| failure.refusal.errno.0 == libc::EBUSY;
        matches!(self, Self::Refused { failures, .. } if failures.iter().all(busy))
    }

    /// The same request may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused { failures, .. } => failures.iter().all(|failure| failure.refusal.is_retryable()),
            Self::Netlink { source, .. } => source.is_retryable(),
            Self::Namespace(error) => error.is_retryable(),
            _ => false,
        }
    }
}

fn list(differences: &[Difference]) -> String {
    let words: Vec<_> = differences
        .iter()
        .map(|d| format!("{}: {} found, {} wanted", d.property, d.found, d.wanted))
        .collect();
    words.join("; ")
}

fn first(failures: &[Failure]) -> &str {
    failures.first().map_or("", |failure| &failure.operation)
}

/// What to do, where the kernel's answer tells.
fn advice(failures: &[Failure]) -> &'static str {
    match failures.first().map(|failure| failure.refusal.errno.0) {
        Some(libc::EPERM | libc::EACCES) => {
            "; CAP_NET_ADMIN is needed in the user namespace that owns the network"
        }
        Some(libc::EEXIST) => "; such an object already exists, delete it or choose another name",
        Some(libc::ENODEV | libc::ENXIO) => "; the link is gone, list again",
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => {
            "; no route leads to the gateway, add one or set onlink"
        }
        Some(libc::ENETDOWN) => "; set the link up first",
        Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) => {
            "; this kernel was built without it, or the family is disabled"
        }
        _ => "",
    }
}

fn sysctl_advice(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT) => "; this kernel lacks it, or the link is gone",
        Some(libc::EROFS) => "; /proc/sys is mounted read-only, mount it writable",
        Some(libc::EACCES | libc::EPERM) => {
            "; CAP_NET_ADMIN is needed in the user namespace that owns the network"
        }
        Some(libc::EINVAL) => "; the value is out of range",
        _ => "",
    }
}
