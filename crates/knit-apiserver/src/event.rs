//! The log of changes of one table, which watches read, and the two forms of Events.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Map, Value};

use super::object::Object;

/// What happened to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeType {
    /// It is new, or new to this watch.
    Added,
    /// It changed.
    Modified,
    /// It is gone, or no longer matches.
    Deleted,
}

impl ChangeType {
    /// As watches name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// One change. Its encoded bytes are made once and shared among all watches.
#[derive(Debug)]
pub struct Change {
    /// What happened.
    pub change: ChangeType,
    /// The object after it; for a deletion, the last version with the deletion's resourceVersion.
    pub object: Arc<Object>,
    /// The object before it, from which a watch with a selector knows what its reader has seen.
    pub before: Option<Arc<Object>>,
    line: OnceLock<Bytes>,
    table_line: OnceLock<Bytes>,
}

impl Change {
    /// A change whose bytes are not yet made.
    pub fn new(change: ChangeType, object: Arc<Object>, before: Option<Arc<Object>>) -> Self {
        Self { change, object, before, line: OnceLock::new(), table_line: OnceLock::new() }
    }

    /// The line of a watch in plain JSON.
    pub fn line(&self) -> Bytes {
        self.line.get_or_init(|| line(self.change.name(), self.object.json())).clone()
    }

    /// The line of a watch that asked for tables without whole objects, made by `make` at the first call.
    pub fn table_line(&self, make: impl FnOnce() -> Bytes) -> Bytes {
        self.table_line.get_or_init(make).clone()
    }
}

/// One line of a watch.
pub fn line(change: &str, object: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(object.len() + 40);
    out.put_slice(b"{\"type\":\"");
    out.put_slice(change.as_bytes());
    out.put_slice(b"\",\"object\":");
    out.put_slice(object);
    out.put_slice(b"}\n");
    out.freeze()
}

/// The fields that core Events and events.k8s.io Events name differently.
const EVENT_NAMES: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

fn rename(value: &Value, api_version: &str, names: impl Fn(&str) -> Option<&'static str>) -> Value {
    let mut out = Map::new();
    for (key, child) in value.as_object().into_iter().flatten() {
        out.insert(names(key).map_or_else(|| key.clone(), str::to_owned), child.clone());
    }
    out.insert("apiVersion".to_owned(), api_version.into());
    Value::Object(out)
}

/// A core Event as one of events.k8s.io.
pub fn to_events_v1(value: &Value) -> Value {
    rename(value, "events.k8s.io/v1", |key| {
        EVENT_NAMES.iter().find(|(core, _)| *core == key).map(|(_, new)| *new)
    })
}

/// An Event of events.k8s.io as a core one.
pub fn to_core_v1(value: &Value) -> Value {
    rename(value, "v1", |key| EVENT_NAMES.iter().find(|(_, new)| *new == key).map(|(core, _)| *core))
}
