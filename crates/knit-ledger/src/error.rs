//! What can go wrong, each with what to do about it.

use std::io;
use std::path::PathBuf;

/// What is wrong with a ledger's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The file does not begin as a ledger does.
    #[error("the file does not start with a ledger header")]
    Header,
    /// The length or checksum fields of a batch are damaged.
    #[error("the frame at byte {at} is damaged")]
    Frame {
        /// Where the frame begins.
        at: u64,
    },
    /// The content of a batch is damaged.
    #[error("the content of the frame at byte {at} does not match its checksum")]
    Checksum {
        /// Where the frame begins.
        at: u64,
    },
    /// The content of a batch is whole, but no list of records.
    #[error("the content of the frame at byte {at} cannot be parsed as records")]
    Content {
        /// Where the frame begins.
        at: u64,
    },
}

/// The ledger could not be opened or written. Nothing in memory has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// Another process has it.
    #[error(
        "ledger {path} is in use by another agent{}: stop that one first",
        holder.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    Locked {
        /// The ledger.
        path: PathBuf,
        /// Who has it, if it left its id.
        holder: Option<u32>,
    },
    /// A newer agent wrote it.
    #[error(
        "ledger {path} has format {found}, this agent supports up to {ours}: run the newer version again, \
        or drain the node and remove the file"
    )]
    NewerVersion {
        /// The ledger.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format known here.
        ours: u32,
    },
    /// No room for a record: nothing may be made that is not recorded.
    #[error(
        "no space left for ledger {path} while {doing}: free some space on that file system, then try \
    again"
    )]
    NoSpace {
        /// The ledger.
        path: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another failure of the file system.
    #[error("ledger {path}: {doing} failed")]
    Io {
        /// The ledger.
        path: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A record that cannot be written down.
    #[error("cannot encode a record for ledger {path} as JSON")]
    Encode {
        /// The ledger.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A batch beyond all measure.
    #[error("a batch of {bytes} bytes is too large for ledger {path}: at most {most}")]
    TooLarge {
        /// The ledger.
        path: PathBuf,
        /// How large it is.
        bytes: usize,
        /// How large it may be.
        most: usize,
    },
}

/// A durable file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DurableError {
    /// A failure of the file system. What was stored before is still there.
    #[error("{path}: {doing} failed; {}", if is_full(source) { "free some space there, then try \
        again" } else { "the previous value is kept" })]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A value that cannot be written down.
    #[error("cannot encode the value for {path} as JSON")]
    Encode {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
}

// === impl LedgerError ===

impl LedgerError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Locked { .. } | Self::NoSpace { .. } | Self::Io { .. })
    }
}

/// Whether an error means that there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
