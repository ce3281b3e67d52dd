//! The sandboxes of this node: what is recorded for each, which addresses they have, and one thing at a time
//! for each of them.

pub mod books;
pub mod locks;

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use knit_runtime::{Attachment, Pod, SandboxId};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

use crate::clock;
use books::{Books, Store, made, pod_of};
use locks::SandboxLocks;

/// All of them.
#[derive(Debug)]
pub struct Sandboxes {
    books: Mutex<Books>,
    locks: SandboxLocks,
    /// Interfaces whose attach was given up, and still runs.
    late: Mutex<BTreeSet<(SandboxId, String)>>,
    /// Told when addresses may have become free.
    freed: Notify,
    /// Counts changes of what NodeNetwork shows.
    shown: watch::Sender<u64>,
}

// === impl Sandboxes ===

impl Sandboxes {
    /// Those of a node, as they were recorded. Changes are counted in `shown`.
    pub(crate) fn open(node: &str, store: Box<dyn Store>, shown: watch::Sender<u64>) -> Self {
        Self {
            books: Mutex::new(Books::open(node, store, clock::now())),
            locks: SandboxLocks::default(),
            late: Mutex::default(),
            freed: Notify::new(),
            shown,
        }
    }

    /// All attachments, or those of one sandbox, as they are recorded.
    #[must_use]
    pub fn list(&self, sandbox: Option<&SandboxId>) -> Vec<Attachment> {
        let books = self.books();
        let wanted = books.records().filter(|r| sandbox.is_none_or(|s| s.as_str() == r.sandbox()));
        wanted.flat_map(|r| r.attachments().iter().filter_map(made)).collect()
    }

    /// The pod of a sandbox, as it is recorded.
    #[must_use]
    pub fn pod(&self, sandbox: &SandboxId) -> Option<Pod> {
        self.books().get(sandbox).and_then(|record| pod_of(record).ok())
    }

    /// Allocator and ledger. Never held over an await.
    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One thing at a time for each.
    pub(crate) fn locks(&self) -> &SandboxLocks {
        &self.locks
    }

    /// Interfaces whose attach was given up, and still runs. Never held over an await.
    pub(crate) fn late(&self) -> MutexGuard<'_, BTreeSet<(SandboxId, String)>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Addresses may have become free, or attachments changed.
    pub(crate) fn changed(&self) {
        self.freed.notify_waiters();
        self.shown.send_modify(|n| *n += 1);
    }

    /// Waits until addresses may have become free.
    pub(crate) fn freed(&self) -> Notified<'_> {
        self.freed.notified()
    }
}
