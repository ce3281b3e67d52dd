//! The sandboxes of this node, and claims that are to have one: what is recorded for each, which addresses
//! they have, and one thing at a time for each of them.

pub mod books;
mod by_pod;
pub mod locks;
mod releases;
mod reservations;
mod store;
pub(crate) mod unreadable;

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use knit_ledger::{SandboxRecord, Unreadable};
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use knit_types::sync::Locked;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

use crate::clock;
use books::{Books, Store};
use locks::OwnerLocks;
pub(crate) use releases::Began;
use releases::Releases;

/// All of them.
#[derive(Debug)]
pub struct Sandboxes {
    books: Mutex<Books>,
    locks: OwnerLocks,
    releases: Releases,
    /// Interfaces whose attach was given up, and still runs.
    late: Mutex<BTreeSet<(SandboxId, InterfaceName)>>,
    /// Interfaces whose address somebody else was found to have.
    in_use: Mutex<BTreeSet<(SandboxId, InterfaceName)>>,
    /// Told when addresses may have become free.
    freed: Notify,
    /// Counts changes of what NodeNetwork shows.
    shown: watch::Sender<u64>,
    /// Whether what is recorded is all there is: not after the ledger was lost, before what is in the kernel
    /// has been taken into it.
    whole: watch::Sender<bool>,
}

// === impl Sandboxes ===

impl Sandboxes {
    /// Those of a node, as they were recorded. Changes are counted in `shown`.
    pub(crate) fn open(node: &str, store: Box<dyn Store>, shown: watch::Sender<u64>) -> Self {
        Self {
            books: Mutex::new(Books::open(node, store, clock::now())),
            locks: OwnerLocks::default(),
            releases: Releases::default(),
            late: Mutex::default(),
            in_use: Mutex::default(),
            freed: Notify::new(),
            shown,
            whole: watch::Sender::new(true),
        }
    }

    /// Notes whether what is recorded is all there is.
    pub(crate) fn set_whole(&self, whole: bool) {
        self.whole.send_replace(whole);
    }

    /// Returns when what is recorded is all there is.
    pub async fn until_whole(&self) {
        // The sender lives as long as we do.
        let _ = self.whole.subscribe().wait_for(|whole| *whole).await;
    }

    /// All attachments, or those of one sandbox, as they are recorded.
    #[must_use]
    pub fn list(&self, sandbox: Option<&SandboxId>) -> Vec<Attachment> {
        let books = self.books();
        let wanted = books.records().filter(|r| sandbox.is_none_or(|s| s == r.sandbox()));
        let attachments = wanted.flat_map(SandboxRecord::attachments);
        attachments.filter_map(knit_ledger::Attachment::made).cloned().collect()
    }

    /// Everything that is recorded of sandboxes.
    #[must_use]
    pub fn records(&self) -> Vec<SandboxRecord> {
        self.books().records().cloned().collect()
    }

    /// What is recorded of the sandboxes of one pod; several while one goes and another comes.
    #[must_use]
    pub fn records_of(&self, namespace: &str, name: &str) -> Vec<SandboxRecord> {
        self.books().records_of(namespace, name).cloned().collect()
    }

    /// What is recorded and cannot be read.
    #[must_use]
    pub fn unreadable(&self) -> Vec<Unreadable> {
        self.books().unreadable().cloned().collect()
    }

    /// The pod of a sandbox, as it is recorded.
    #[must_use]
    pub fn pod(&self, sandbox: &SandboxId) -> Option<Pod> {
        self.books().get(sandbox).map(SandboxRecord::runtime_pod)
    }

    /// Allocator and ledger. Never held over an await.
    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.locked()
    }

    /// One thing at a time for each.
    pub(crate) fn locks(&self) -> &OwnerLocks {
        &self.locks
    }

    /// Which claims were released of late.
    pub(crate) fn releases(&self) -> &Releases {
        &self.releases
    }

    /// Interfaces whose attach was given up, and still runs. Never held over an await.
    pub(crate) fn late(&self) -> MutexGuard<'_, BTreeSet<(SandboxId, InterfaceName)>> {
        self.late.locked()
    }

    /// Interfaces whose address somebody else was found to have, until they are taken back: the next one to
    /// be chosen must be another. Never held over an await.
    pub(crate) fn in_use(&self) -> MutexGuard<'_, BTreeSet<(SandboxId, InterfaceName)>> {
        self.in_use.locked()
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
