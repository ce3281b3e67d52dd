//! What the ledger keeps for others and does not look into: JSON as text, so that a copy costs nothing.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// Something of somebody else's, or nothing.
///
/// Records are copied at each step of an attachment, and there may be hundreds on a node: as text this takes
/// one allocation, which all copies share, where a tree of values has dozens.
#[derive(Clone, Debug, Default)]
pub struct Opaque(Option<Arc<RawValue>>);

impl Opaque {
    /// Nothing.
    pub const NONE: Self = Self(None);

    /// This, as JSON.
    ///
    /// # Errors
    /// When it has no form in JSON.
    pub fn of(thing: &impl Serialize) -> Result<Self, serde_json::Error> {
        let text = serde_json::value::to_raw_value(thing)?;
        Ok(Self((text.get() != "null").then(|| text.into())))
    }

    /// Whether it is nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// As what it was put in.
    ///
    /// # Errors
    /// When it is something else, or nothing.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0.as_ref().map_or("null", |text| text.get()))
    }
}

/// The same values are the same, in whichever order an object has its fields.
impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.get() == b.get()
                    || matches!((self.read::<Value>(), other.read::<Value>()), (Ok(a), Ok(b)) if a == b)
            }
            _ => false,
        }
    }
}

impl Eq for Opaque {}

impl Serialize for Opaque {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_deref().serialize(serializer)
    }
}

/// By way of a tree: inside of a flattened struct there is no text to be had any more. It happens at start
/// only.
impl<'de> Deserialize<'de> for Opaque {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::of(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}
