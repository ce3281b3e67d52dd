//! What is there of one kind, for many readers. Reading takes a short lock and never waits for the source;
//! whoever must wait waits for a change, not for a time.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use jiff::Timestamp;
use knit_types::sync::{Locked, ReadWrite};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::health::Connection;
use crate::key::Key;
use crate::watch::Event;

/// The objects of one watch. Clones share it; the watch ends with the last one.
pub struct Cache<T> {
    shared: Arc<Shared<T>>,
}

/// How far a [`Cache`] is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Progress {
    /// Counts changes.
    pub changes: u64,
    /// When everything that was there at the start had arrived.
    pub synced: Option<Timestamp>,
}

struct Shared<T> {
    store: Arc<Store<T>>,
    connection: watch::Receiver<Connection>,
    task: AbortHandle,
}

pub(crate) struct Store<T> {
    kind: String,
    objects: RwLock<HashMap<Key, Arc<T>>>,
    progress: watch::Sender<Progress>,
    /// Says that what came says nothing new.
    same: Option<fn(&T, &T) -> bool>,
    /// What has changed since somebody last asked, if somebody does.
    changed: Mutex<Option<HashSet<Key>>>,
}

// === impl Cache ===

impl<T> Cache<T> {
    pub(crate) fn new(
        store: Arc<Store<T>>,
        connection: watch::Receiver<Connection>,
        task: AbortHandle,
    ) -> Self {
        Self { shared: Arc::new(Shared { store, connection, task }) }
    }

    /// The object, if it is there.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.shared.store.read().get(key).cloned()
    }

    /// Every object, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<(Key, Arc<T>)> {
        self.shared.store.read().iter().map(|(key, value)| (key.clone(), Arc::clone(value))).collect()
    }

    /// Calls `each` for every object, without copying. It runs under the lock: keep it short.
    pub fn for_each(&self, mut each: impl FnMut(&Key, &Arc<T>)) {
        for (key, value) in self.shared.store.read().iter() {
            each(key, value);
        }
    }

    /// Begins to note which objects change, for [`Self::take_changed`]. All that are there count as changed.
    /// One reader can do this; if a second one does, both begin again and each misses what the other takes.
    pub fn track(&self) {
        let objects = self.shared.store.read();
        *self.shared.store.changed.locked() = Some(objects.keys().cloned().collect());
    }

    /// The objects that have changed since the last call, each as it is now, or nothing if it is gone.
    /// However often one changed, it is there once. Objects that say nothing new are among them: their newest
    /// version counts for writes.
    #[must_use]
    pub fn take_changed(&self) -> Vec<(Key, Option<Arc<T>>)> {
        let objects = self.shared.store.read();
        let changed = self.shared.store.changed.locked().as_mut().map(std::mem::take).unwrap_or_default();
        changed.into_iter().map(|key| (objects.get(&key).cloned(), key)).map(|(o, k)| (k, o)).collect()
    }

    /// How many objects there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.store.read().len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether everything that was there at the start has arrived.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.shared.store.progress.borrow().synced.is_some()
    }

    /// Tells of every change: wait with [`watch::Receiver::changed`].
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Progress> {
        self.shared.store.progress.subscribe()
    }

    /// Whether the source is there, now and on changes.
    #[must_use]
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.shared.connection.clone()
    }

    /// Waits until everything that was there at the start has arrived.
    pub async fn wait_synced(&self, deadline: Instant) -> Result<()> {
        let what = || format!("the list of {} objects", self.shared.store.kind);
        self.wait(deadline, what, |cache| cache.is_synced().then_some(())).await
    }

    /// Waits until this object is there.
    pub async fn wait_for(&self, key: &Key, deadline: Instant) -> Result<Arc<T>> {
        let what = || format!("{} {key}", self.shared.store.kind);
        self.wait(deadline, what, |cache| cache.get(key)).await
    }

    /// Waits until `check` finds what it looks for. It is called now and after each change; `what` names it
    /// for the error.
    pub async fn wait_until<U>(
        &self,
        what: &str,
        deadline: Instant,
        mut check: impl FnMut(&Self) -> Option<U>,
    ) -> Result<U> {
        self.wait(deadline, || what.to_owned(), &mut check).await
    }

    async fn wait<U>(
        &self,
        deadline: Instant,
        what: impl Fn() -> String,
        mut check: impl FnMut(&Self) -> Option<U>,
    ) -> Result<U> {
        let start = Instant::now();
        let mut changes = self.changes();
        loop {
            // Marked before the look: a change during it wakes us again.
            changes.mark_unchanged();
            if let Some(found) = check(self) {
                return Ok(found);
            }
            // The store outlives this wait, so a change can be waited for as long as the deadline allows.
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                let connection = self.shared.connection.borrow();
                let because = if connection.is_connected() {
                    String::new()
                } else {
                    format!(" (the source is {})", *connection)
                };
                return Err(Error::Timeout { what: what(), waited: start.elapsed(), because });
            }
        }
    }
}

impl<T> Clone for Cache<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T> fmt::Debug for Cache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("kind", &self.shared.store.kind)
            .field("objects", &self.len())
            .field("synced", &self.is_synced())
            .finish_non_exhaustive()
    }
}

// === impl Shared ===

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Store ===

impl<T> Store<T> {
    pub(crate) fn new(kind: String, same: Option<fn(&T, &T) -> bool>) -> Arc<Self> {
        let (objects, changed) = (RwLock::default(), Mutex::default());
        Arc::new(Self { kind, objects, progress: watch::Sender::default(), same, changed })
    }

    pub(crate) fn take(&self, event: Event<T>, now: Timestamp) {
        let mut synced = None;
        match event {
            Event::Applied(key, value) => {
                let mut objects = self.objects.writing();
                let known = objects.get(&key).zip(self.same);
                let same = known.is_some_and(|(known, same)| same(known, &value));
                self.note(&key);
                objects.insert(key, Arc::new(value));
                if same {
                    return;
                }
            }
            Event::Deleted(key) => {
                let mut objects = self.objects.writing();
                self.note(&key);
                objects.remove(&key);
            }
            Event::Synced => synced = Some(now),
        }
        self.progress.send_modify(|progress| {
            progress.changes += 1;
            progress.synced = progress.synced.or(synced);
        });
    }

    /// Under the lock of the objects, so that whoever takes what changed sees it as it is.
    fn note(&self, key: &Key) {
        if let Some(changed) = &mut *self.changed.locked() {
            changed.insert(key.clone());
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<Key, Arc<T>>> {
        self.objects.reading()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_nothing_new_wakes_nobody_and_is_kept_all_the_same() {
        let store = Store::<(&str, u64)>::new("Node".into(), Some(|a, b| a.0 == b.0));
        let key = || Key::cluster("a");
        for version in 0..1000 {
            store.take(Event::Applied(key(), ("ready", version)), Timestamp::UNIX_EPOCH);
        }
        assert_eq!(store.progress.borrow().changes, 1);
        assert_eq!(store.read().get(&key()).map(|kept| kept.1), Some(999), "writes refer to the newest");
        store.take(Event::Applied(key(), ("closed", 1000)), Timestamp::UNIX_EPOCH);
        assert_eq!(store.progress.borrow().changes, 2);
    }

    #[tokio::test]
    async fn what_has_changed_is_told_once_with_its_newest_version() {
        let store = Store::<u64>::new("Node".into(), Some(PartialEq::eq));
        let connection = Connection::Connected { since: Timestamp::UNIX_EPOCH };
        let (_, connection) = watch::channel(connection);
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        let cache = Cache::new(Arc::clone(&store), connection, task);
        let take = |event| store.take(event, Timestamp::UNIX_EPOCH);
        take(Event::Applied(Key::cluster("a"), 1));
        assert!(cache.take_changed().is_empty(), "nobody asked yet");
        cache.track();
        take(Event::Applied(Key::cluster("b"), 1));
        take(Event::Applied(Key::cluster("b"), 2));
        let mut changed = cache.take_changed();
        changed.sort_by_key(|(key, _)| key.name().to_owned());
        let a = (Key::cluster("a"), Some(Arc::new(1)));
        assert_eq!(changed, [a, (Key::cluster("b"), Some(Arc::new(2)))]);
        take(Event::Deleted(Key::cluster("a")));
        take(Event::Applied(Key::cluster("b"), 2));
        let mut changed = cache.take_changed();
        changed.sort_by_key(|(key, _)| key.name().to_owned());
        assert_eq!(changed, [(Key::cluster("a"), None), (Key::cluster("b"), Some(Arc::new(2)))]);
        assert!(cache.take_changed().is_empty());
    }

    #[test]
    fn what_is_not_kept_of_an_object_was_a_change_to_all_readers() {
        let store = Store::<(&str, bool)>::new("Pod".into(), Some(PartialEq::eq));
        let take = |event| {
            store.take(event, Timestamp::UNIX_EPOCH);
            store.progress.borrow().changes
        };
        let key = || Key::namespaced("shop", "web");
        for _ in 0..1000 {
            assert_eq!(take(Event::Applied(key(), ("10.0.0.3", true))), 1);
        }
        assert_eq!(take(Event::Applied(key(), ("10.0.0.3", false))), 2);
        assert_eq!(take(Event::Synced), 3);
        assert_eq!(take(Event::Deleted(key())), 4);
        assert_eq!(take(Event::Applied(key(), ("10.0.0.3", false))), 5, "another one of its name");
    }
}
