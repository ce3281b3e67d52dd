//! A stored object: its JSON value, the parts of it that are asked for often, and its encoded bytes, made
//! once.

use std::sync::OnceLock;

use bytes::Bytes;
use serde_json::{Map, Value};

/// One version of one object. Never changed: a write stores a new one.
#[derive(Debug)]
pub struct Object {
    /// The object as JSON, `apiVersion`, `kind` and `metadata` included.
    pub value: Value,
    /// Its resourceVersion.
    pub rv: u64,
    json: OnceLock<Bytes>,
}

impl Object {
    /// Stamps the resourceVersion into the value.
    pub fn new(mut value: Value, rv: u64) -> Self {
        value["metadata"]["resourceVersion"] = Value::String(rv.to_string());
        Self { value, rv, json: OnceLock::new() }
    }

    /// An object that was not stored.
    pub fn unversioned(value: Value) -> Self {
        Self { value, rv: 0, json: OnceLock::new() }
    }

    /// `metadata.name`.
    pub fn name(&self) -> &str {
        meta(&self.value, "name")
    }

    /// `metadata.namespace`, empty for cluster-scoped objects.
    pub fn namespace(&self) -> &str {
        meta(&self.value, "namespace")
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &str {
        meta(&self.value, "uid")
    }

    /// The object as JSON text, encoded at the first call.
    pub fn json(&self) -> &Bytes {
        self.json.get_or_init(|| Bytes::from(serde_json::to_vec(&self.value).unwrap_or_default()))
    }

    /// Whether its deletion has begun.
    pub fn is_deleting(&self) -> bool {
        is_deleting(&self.value)
    }
}

/// A string of the metadata, empty where it is missing.
pub fn meta<'a>(value: &'a Value, field: &str) -> &'a str {
    value["metadata"][field].as_str().unwrap_or("")
}

/// Whether `metadata.deletionTimestamp` is set.
pub fn is_deleting(value: &Value) -> bool {
    value["metadata"]["deletionTimestamp"].is_string()
}

/// The metadata as a map, made if it is missing.
pub fn meta_mut(value: &mut Value) -> &mut Map<String, Value> {
    child_map(value, "metadata")
}

/// The map at a key, made if it is missing or of another type.
pub fn child_map<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let child = &mut value[key];
    if !child.is_object() {
        *child = Value::Object(Map::new());
    }
    match child {
        Value::Object(map) => map,
        _ => unreachable!("made an object just above"),
    }
}

/// The value at a dotted path of field names.
pub fn at<'a>(value: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').filter(|part| !part.is_empty()).try_fold(value, |value, part| value.get(part))
}

/// A string at a dotted path.
pub fn str_at<'a>(value: &'a Value, path: &str) -> Option<&'a str> {
    at(value, path).and_then(Value::as_str)
}

/// The elements of a list at a dotted path; none where there is no list.
pub fn list_at<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    at(value, path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The finalizers of an object.
pub fn finalizers(value: &Value) -> impl Iterator<Item = &str> {
    list_at(value, "metadata.finalizers").iter().filter_map(Value::as_str)
}
