//! Why a pod did not get what it was promised, in words for its events and a reason for its caller.

use std::error::Error as StdError;

use thiserror::Error as ThisError;

/// The result of what the agent was asked to do.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What happened, to which pod, and what to do.
#[derive(Debug, ThisError)]
#[error("{message}")]
pub struct Error {
    /// The reason, as a code.
    pub reason: Reason,
    /// What happened and what to do, for people.
    pub message: String,
    /// What caused it.
    #[source]
    pub source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Reason {
    /// The request itself cannot be right.
    Invalid,
    /// The pod's namespace may not use a Network that the pod asks for.
    NotAllowed,
    /// The pod asks for something that it cannot have.
    Refused,
    /// The same request may succeed later.
    NotReady,
    /// No address is free.
    AddressesExhausted,
    /// Somebody else on the segment has the address that was chosen; another one will be.
    AddressInUse,
    /// The sandbox, or its namespace, is not known or not there.
    UnknownSandbox,
    /// An interface is not as it was made.
    Damaged,
    /// A runtime failed.
    AttachFailed,
    /// The agent itself failed.
    Internal,
}

// === impl Error ===

impl Error {
    /// An error of this reason.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), source: None }
    }

    /// The same error, with its cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(cause.into());
        self
    }

    /// What a runtime said, about an interface on a Network.
    #[must_use]
    pub fn from_runtime(doing: &str, network: &str, interface: &str, error: knit_runtime::Error) -> Self {
        use knit_runtime::Reason as R;
        let reason = match error.reason {
            R::Invalid | R::Conflict | R::Unsupported | R::InUse => Reason::Refused,
            R::NotAllowed => Reason::NotAllowed,
            R::NetworkNotFound | R::NotReady => Reason::NotReady,
            R::AddressesExhausted => Reason::AddressesExhausted,
            R::AddressInUse => Reason::AddressInUse,
            R::AttachmentNotFound | R::NamespaceGone => Reason::UnknownSandbox,
            R::Damaged => Reason::Damaged,
            R::Internal => Reason::AttachFailed,
        };
        Self::new(reason, format!("{doing} interface {interface} on Network {network} failed")).because(error)
    }

    /// Whether the same request may succeed later, unchanged.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self.reason,
            Reason::NotReady
                | Reason::AddressesExhausted
                | Reason::AddressInUse
                | Reason::AttachFailed
                | Reason::Internal
        )
    }

    /// The message with those of its causes behind it.
    #[must_use]
    pub fn chain(&self) -> String {
        knit_types::chain(self)
    }
}

impl Reason {
    /// The reason as one word, for metrics and events.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "Invalid",
            Self::NotAllowed => "NotAllowed",
            Self::Refused => "RequestRefused",
            Self::NotReady => "NotReady",
            Self::AddressesExhausted => "AddressesExhausted",
            Self::AddressInUse => "AddressInUse",
            Self::UnknownSandbox => "UnknownSandbox",
            Self::Damaged => "Damaged",
            Self::AttachFailed => "AttachFailed",
            Self::Internal => "Internal",
        }
    }
}
