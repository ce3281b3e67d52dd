//! Watches: each reads the log of its table at its own pace, and is told when it has fallen behind too far.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::watch;

use super::event::{Change, ChangeType};
use super::kinds::Kind;
use super::object::Object;
use super::selector::Selector;
use super::state::State;
use super::status::{ApiError, Result};
use super::store::Store;

/// How many changes are handed on at once, so that no watch holds the lock for long.
const BATCH: usize = 512;

/// What a watch sees.
#[derive(Debug, Clone)]
pub struct WatchEvent {
    /// What happened, as seen through the selector.
    pub change: ChangeType,
    /// The object.
    pub object: Arc<Object>,
    /// The logged change, if it is handed on as it is: its bytes are shared.
    pub logged: Option<Arc<Change>>,
}

/// What to watch.
#[derive(Debug, Clone, Default)]
pub struct WatchParams {
    /// One namespace, or all.
    pub namespace: Option<String>,
    /// Which objects.
    pub selector: Selector,
    /// The version after which to start; none or 0: what is there first, as added.
    pub resource_version: Option<u64>,
    /// Whether what is there comes first, whatever the version.
    pub send_initial_events: bool,
}

/// A running watch.
#[derive(Debug)]
pub struct Watcher {
    store: Store,
    table: usize,
    namespace: Option<String>,
    selector: Selector,
    initial: VecDeque<Arc<Object>>,
    last: u64,
    changed: watch::Receiver<u64>,
}

impl Watcher {
    pub(super) fn start(store: &Store, kind: &Kind, params: WatchParams) -> Result<Self> {
        let state = store.lock();
        let table = &state.tables[kind.table];
        let wanted = params.resource_version.unwrap_or(0);
        let from_state = params.send_initial_events || wanted == 0;
        if !from_state && wanted < table.floor {
            return Err(too_old(wanted, table.floor));
        }
        if wanted > state.rv {
            // A server that has started again knows nothing of that version; the reader must list again.
            return Err(ApiError::expired(format!(
                "resourceVersion {wanted} is of another time; list again"
            )));
        }
        let mut initial = VecDeque::new();
        if from_state {
            let objects = state.range(kind.table, params.namespace.as_deref(), None);
            initial.extend(
                objects.filter(|(_, object)| params.selector.matches(object)).map(|(_, o)| Arc::clone(o)),
            );
        }
        Ok(Self {
            store: store.clone(),
            table: kind.table,
            namespace: params.namespace,
            selector: params.selector,
            initial,
            last: if from_state { state.rv } else { wanted },
            changed: table.changed.subscribe(),
        })
    }

    /// The version up to which everything has been handed on.
    pub fn resource_version(&self) -> u64 {
        self.last
    }

    /// What was there at the start and has not been handed on yet.
    pub fn initial(&mut self) -> Vec<WatchEvent> {
        self.initial
            .drain(..)
            .map(|object| WatchEvent { change: ChangeType::Added, object, logged: None })
            .collect()
    }

    /// Waits for changes. Fails with 410 if this watch has fallen behind the log.
    pub async fn next(&mut self) -> Result<Vec<WatchEvent>> {
        if !self.initial.is_empty() {
            return Ok(self.initial());
        }
        loop {
            self.changed.mark_unchanged();
            let events = self.poll()?;
            if !events.is_empty() {
                return Ok(events);
            }
            if self.changed.changed().await.is_err() {
                return Err(ApiError::expired("the server is shutting down"));
            }
        }
    }

    /// The changes that are there now, at most a batch.
    pub fn poll(&mut self) -> Result<Vec<WatchEvent>> {
        loop {
            let batch = {
                let state = self.store.lock();
                let batch = self.read(&state)?;
                if batch.is_empty() {
                    self.last = state.rv;
                    return Ok(Vec::new());
                }
                batch
            };
            if let Some(newest) = batch.last() {
                self.last = newest.object.rv;
            }
            let events: Vec<WatchEvent> = batch.into_iter().filter_map(|change| self.seen(change)).collect();
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    fn read(&self, state: &State) -> Result<Vec<Arc<Change>>> {
        let table = &state.tables[self.table];
        if self.last < table.floor {
            return Err(too_old(self.last, table.floor));
        }
        let from = table.log.partition_point(|change| change.object.rv <= self.last);
        Ok(table.log.range(from..).take(BATCH).cloned().collect())
    }

    /// A change as it looks through namespace and selector.
    fn seen(&self, change: Arc<Change>) -> Option<WatchEvent> {
        if self.namespace.as_deref().is_some_and(|namespace| namespace != change.object.namespace()) {
            return None;
        }
        if self.selector.is_empty() {
            return Some(WatchEvent {
                change: change.change,
                object: Arc::clone(&change.object),
                logged: Some(change),
            });
        }
        let before = change.before.as_ref().is_some_and(|object| self.selector.matches(object));
        let after = change.change != ChangeType::Deleted && self.selector.matches(&change.object);
        let seen = match (before, after) {
            (false, false) => return None,
            (false, true) => ChangeType::Added,
            (true, true) => ChangeType::Modified,
            (true, false) => ChangeType::Deleted,
        };
        let logged = (seen == change.change).then(|| Arc::clone(&change));
        Some(WatchEvent { change: seen, object: Arc::clone(&change.object), logged })
    }
}

fn too_old(wanted: u64, floor: u64) -> ApiError {
    ApiError::expired(format!("too old resource version: {wanted} ({floor})"))
}
