//! Why a call to a runtime failed, in the words that the protocol has for it.

use std::error::Error as StdError;

use knit_types::{InvalidInterfaceName, InvalidNetworkName, InvalidSandboxId, NetworkName};
use thiserror::Error as ThisError;

/// The result of a call to a runtime.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A call that failed: why, about what, and what to do.
#[derive(Debug, ThisError)]
#[error("{message}")]
pub struct Error {
    /// The reason, as a code.
    pub reason: Reason,
    /// What happened and what to do, for people.
    pub message: String,
    /// The Network it is about, if it is about one.
    pub network: Option<NetworkName>,
    /// The interface it is about, if it is about one.
    pub interface: Option<String>,
    /// What caused it.
    #[source]
    pub source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Why a call failed. Every reason has one gRPC status code; see the protocol.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Reason {
    /// The request cannot be right, however often it is repeated.
    Invalid,
    /// The Network is not set up here.
    NetworkNotFound,
    /// The attachment is not there.
    AttachmentNotFound,
    /// The pod's network namespace is not there, or is another one than before.
    NamespaceGone,
    /// Something with that name, address or interface is there already, and is different.
    Conflict,
    /// Somebody else on the segment has an address that was asked for. With another address it may work at
    /// once.
    AddressInUse,
    /// No address is left.
    AddressesExhausted,
    /// Not ready yet: the same request may succeed later.
    NotReady,
    /// The pod's namespace may not use the Network.
    NotAllowed,
    /// Still in use.
    InUse,
    /// The runtime does not have this feature.
    Unsupported,
    /// The attachment is not as it was made.
    Damaged,
    /// Anything else.
    Internal,
}

// === impl Error ===

impl Error {
    /// An error of this reason.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), network: None, interface: None, source: None }
    }

    /// The same error, about this Network.
    #[must_use]
    pub fn on(mut self, network: impl Into<NetworkName>) -> Self {
        self.network = Some(network.into());
        self
    }

    /// The same error, about this interface.
    #[must_use]
    pub fn at(mut self, interface: impl Into<String>) -> Self {
        self.interface = Some(interface.into());
        self
    }

    /// The same error, with its cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(cause.into());
        self
    }

    /// Whether the same request may succeed later, unchanged.
    #[must_use]
    pub fn retryable(&self) -> bool {
        self.reason.retryable()
    }
}

// === impl Reason ===

impl Reason {
    /// Whether the same request may succeed later, unchanged.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(
            self,
            Self::NotReady
                | Self::AddressInUse
                | Self::AddressesExhausted
                | Self::NetworkNotFound
                | Self::Internal
        )
    }
}

// === What cannot be right ===

impl From<InvalidInterfaceName> for Error {
    fn from(error: InvalidInterfaceName) -> Self {
        Self::new(Reason::Invalid, error.to_string())
    }
}

impl From<InvalidNetworkName> for Error {
    fn from(error: InvalidNetworkName) -> Self {
        Self::new(Reason::Invalid, error.to_string())
    }
}

impl From<InvalidSandboxId> for Error {
    fn from(error: InvalidSandboxId) -> Self {
        Self::new(Reason::Invalid, error.to_string())
    }
}
