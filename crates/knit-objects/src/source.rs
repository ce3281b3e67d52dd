//! What the two sources have in common: a stream of deltas that is either a whole set or a change.

use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::api::ApiReader;
use crate::folder::FolderReader;
use crate::health::Health;
use crate::key::Key;

/// One step of a source. It begins with a whole set, and may send a whole set again at any time: what is not
/// in it is gone.
#[derive(Debug)]
pub(crate) enum Delta {
    /// A whole set begins.
    Begin,
    /// An object of the set that has begun, or a change.
    Object {
        key: Key,
        /// Another text means another object.
        version: Box<str>,
        object: Lean,
    },
    /// An object is gone.
    Gone(Key),
    /// The whole set was sent.
    Complete,
}

/// An object's JSON without `metadata.managedFields`, which nobody reads and which can be most of an object:
/// it is skipped while the text is read.
#[derive(Clone, Debug)]
pub(crate) enum Lean {
    Owned(Value),
    Shared(Arc<Value>),
}

/// Either source, from one reader's view.
#[derive(Debug)]
pub(crate) enum Reader {
    Api(Box<ApiReader>),
    Folder(FolderReader),
}

// === impl Reader ===

impl Reader {
    pub(crate) async fn next(&mut self) -> Delta {
        match self {
            Self::Api(reader) => reader.next().await,
            Self::Folder(reader) => reader.next().await,
        }
    }

    pub(crate) fn health(&self) -> Arc<Health> {
        match self {
            Self::Api(reader) => reader.health(),
            Self::Folder(reader) => reader.health(),
        }
    }
}

// === impl Lean ===

impl Lean {
    pub(crate) fn shared(value: Arc<Value>) -> Self {
        Self::Shared(value)
    }

    pub(crate) fn value(&self) -> &Value {
        match self {
            Self::Owned(value) => value,
            Self::Shared(value) => value,
        }
    }

    /// The object as its type.
    pub(crate) fn decode<K: DeserializeOwned>(self) -> serde_json::Result<K> {
        match self {
            Self::Owned(value) => serde_json::from_value(value),
            Self::Shared(value) => K::deserialize(&*value),
        }
    }
}

impl<'de> Deserialize<'de> for Lean {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor).map(Self::Owned)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value =
                if key == "metadata" { access.next_value::<Metadata>()?.0 } else { access.next_value()? };
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

struct Metadata(Value);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MetadataVisitor)
    }
}

struct MetadataVisitor;

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("metadata of a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Metadata, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if key == "managedFields" {
                access.next_value::<IgnoredAny>()?;
            } else {
                map.insert(key, access.next_value()?);
            }
        }
        Ok(Metadata(Value::Object(map)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn managed_fields_are_never_kept() {
        let text = r#"{"kind":"Pod","metadata":{"managedFields":[{"a":{"b":[1,2]}}],"name":"x"},
            "spec":{"metadata":{"managedFields":1}}}"#;
        let lean: Lean = serde_json::from_str(text).expect("an object");
        let expected = json!({"kind":"Pod","metadata":{"name":"x"},"spec":{"metadata":{"managedFields":1}}});
        assert_eq!(lean.value(), &expected);
        assert!(serde_json::from_str::<Lean>("[]").is_err());
    }
}
