//! The ledger: the agent's crash-safe local record of what it made for whom, written before it is made.
//!
//! - [`Ledger`] is an append-only log of keyed records with a checksum on each batch. It lives on a run-time
//!   path (tmpfs) and dies with the kernel objects that it describes, so nothing is synced on a pod's way;
//!   what it must survive is the agent being killed at any instruction, a full disk, and a file that somebody
//!   else damaged.
//! - [`SandboxRecord`] is what the agent keeps in it: one sandbox, its attachments, and how far each has
//!   come.
//! - [`DurableFile`] is for what must outlive a reboot (the cache of Networks and namespaces): one whole
//!   value, synced, with the one before it kept.
//!
//! Everything is blocking and small. Files are reached through [`Fs`], so that tests can stop or fail any
//! step.

mod durable;
mod error;
mod frame;
mod fs;
mod ledger;
mod lock;
mod opaque;
mod record;
#[cfg(feature = "testing")]
pub mod testing;

pub use durable::{DurableFile, Loaded, Source};
pub use error::{Corruption, DurableError, LedgerError};
pub use frame::{Change, Scan, VERSION, scan};
pub use fs::{Fs, FsFile, RealFs};
pub use ledger::{Batch, Ledger, Opened, Options, Record, Recovery, read};
pub use lock::LockFile;
pub use opaque::Opaque;
pub use record::{
    Attachment, AttachmentPlan, AttachmentState, Leased, NetnsRef, Resting, SandboxRecord, TransitionError,
};
