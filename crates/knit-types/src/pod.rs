//! Which pod.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Who a pod is, where the caller knows.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// Its uid, where the caller sends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl PodRef {
    /// Whether both mean a pod of the same namespace and name, though perhaps another incarnation of it.
    #[must_use]
    pub fn same_name(&self, other: &Self) -> bool {
        self.namespace == other.namespace && self.name == other.name
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
