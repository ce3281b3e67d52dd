//! The ledger: the agent's crash-safe local record of what it made for whom, written before it is made.
//!
//! - [`Ledger`] is an append-only log of keyed records with a checksum on each batch. It lives on a run-time
//!   path (tmpfs) and dies with the kernel objects that it describes, so nothing is synced on a pod's way;
//!   what it must survive is the agent being killed at any instruction, a full disk, and a file that somebody
//!   else damaged.
//! - [`Entry`] is what the agent keeps in it, typed and with the form that it has: a [`SandboxRecord`] (one
//!   sandbox, its attachments, and how far each has come) or a [`Reservation`] (what a claim or an object has
//!   before there is a sandbox). Each belongs to an owner, and there is no lease outside of one.
//! - [`Unreadable`] is a record that is whole and cannot be read: it is kept, and holds its addresses.
//! - [`DurableFile`] is for what must outlive a reboot (the cache of Networks and namespaces): one whole
//!   value, synced, with the one before it kept.
//!
//! Everything is blocking and small. Files are reached through [`Fs`], so that tests can stop or fail any
//! step.

mod details;
mod durable;
mod entry;
mod error;
mod frame;
mod fs;
mod ledger;
mod lock;
mod record;
mod shared;
#[cfg(feature = "testing")]
pub mod testing;
mod unreadable;

pub use details::{Details, Door, ObjectDoor};
pub use durable::{DurableFile, Loaded, Source};
pub use entry::{Entry, Reservation, ReservedLease};
pub use error::{Corruption, DurableError, LedgerError};
pub use frame::{Change, Found, Scan, VERSION, scan};
pub use fs::{Fs, FsFile, RealFs};
pub use ledger::{Batch, Content, Ledger, Opened, Options, Record, Recovery, read};
pub use lock::LockFile;
pub use record::{
    Attachment, AttachmentPlan, AttachmentState, Leased, Loan, NetnsRef, Resting, SandboxRecord,
    TransitionError,
};
pub use shared::Shared;
pub use unreadable::{HeldInterface, Holding, Unreadable};
