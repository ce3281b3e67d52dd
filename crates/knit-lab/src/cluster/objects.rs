//! The lab's own way to its API: in process, with the few writes that its parts need.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::select_all;
use serde_json::{Value, json};
use tokio::time::Instant;

use knit_apiserver::admission::Part;
use knit_apiserver::object::Object;
use knit_apiserver::patch::PatchType;
use knit_apiserver::watch::{WatchParams, Watcher};
use knit_apiserver::{ApiError, ListParams, Store, WriteOptions};

/// Kinds that parts of the lab follow, as (apiVersion, kind).
pub(crate) type KindName = (&'static str, &'static str);

pub(crate) const POD: KindName = ("v1", "Pod");
pub(crate) const NODE: KindName = ("v1", "Node");
pub(crate) const SERVICE: KindName = ("v1", "Service");
pub(crate) const DEPLOYMENT: KindName = ("apps/v1", "Deployment");
pub(crate) const NETWORK: KindName = ("knit.dev/v1alpha1", "Network");
pub(crate) const SLICE: KindName = ("discovery.k8s.io/v1", "EndpointSlice");

/// All objects of a kind.
pub(crate) fn list(store: &Store, kind: KindName) -> Vec<Arc<Object>> {
    let Ok(kind) = store.kind(kind.0, kind.1) else { return Vec::new() };
    store.list(&kind, &ListParams::default()).map(|list| list.items).unwrap_or_default()
}

/// One object.
pub(crate) fn get(store: &Store, kind: KindName, namespace: &str, name: &str) -> Option<Arc<Object>> {
    let kind = store.kind(kind.0, kind.1).ok()?;
    store.get(&kind, namespace, name).ok()
}

/// Merges into the status of an object.
pub(crate) fn set_status(
    store: &Store,
    kind: KindName,
    namespace: &str,
    name: &str,
    status: &Value,
) -> Result<(), ApiError> {
    let kind = store.kind(kind.0, kind.1)?;
    let options = WriteOptions { part: Part::Status, ..WriteOptions::default() };
    let patch = json!({ "status": status });
    store.patch(&kind, namespace, name, &patch, PatchType::Merge, &options).map(drop)
}

/// Deletes an object; one that is gone already is fine.
pub(crate) fn delete(store: &Store, kind: KindName, object: &Object, grace: Option<i64>) {
    let Ok(kind) = store.kind(kind.0, kind.1) else { return };
    let options = knit_apiserver::DeleteOptions {
        grace,
        uid: Some(object.uid().to_owned()),
        ..knit_apiserver::DeleteOptions::default()
    };
    if let Err(error) = store.delete(&kind, object.namespace(), object.name(), &options)
        && error.reason != "NotFound"
    {
        tracing::warn!(%error, name = object.name(), "cannot delete an object");
    }
}

/// Whether labels match a plain selector, where none matches nothing.
pub(crate) fn selects(selector: &Value, labels: &Value) -> bool {
    let Some(selector) = selector.as_object().filter(|map| !map.is_empty()) else { return false };
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Waits for changes of some kinds. Who uses it looks at everything again after each.
pub(crate) struct Changes {
    store: Store,
    kinds: Vec<KindName>,
    watchers: Vec<Watcher>,
    /// When the last change was handed on.
    returned: Instant,
}

/// How long who follows changes rests after it has looked, as a multiple of the time that took.
const REST: u32 = 10;
/// The longest rest.
const LONGEST: Duration = Duration::from_millis(100);

impl Changes {
    pub(crate) fn of(store: &Store, kinds: &[KindName]) -> Self {
        let (store, kinds) = (store.clone(), kinds.to_vec());
        let mut changes = Self { store, kinds, watchers: Vec::new(), returned: Instant::now() };
        changes.watch_again();
        changes
    }

    fn watch_again(&mut self) {
        let watch = |kind: &KindName| {
            let kind = self.store.kind(kind.0, kind.1).ok()?;
            self.store.watch(&kind, WatchParams::default()).ok()
        };
        self.watchers = self.kinds.iter().filter_map(watch).collect();
    }

    /// Returns when something has changed since the last call; at first, at once if there is anything.
    pub(crate) async fn wait(&mut self) {
        // Who has many objects to look at after each change gathers changes, and leaves the time to others.
        let looked = self.returned.elapsed();
        let waits = self.watchers.iter_mut().map(|watcher| watcher.next().boxed());
        let (first, _, _) = select_all(waits).await;
        if first.is_err() {
            // Fallen behind the log: from the beginning, which whoever waits looks at anyway.
            self.watch_again();
        }
        tokio::time::sleep((looked * REST).min(LONGEST)).await;
        self.returned = Instant::now();
    }
}
