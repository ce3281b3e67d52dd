//! What was wrong with an object: named by object and field, and never a reason to stop serving the rest.

use std::fmt;
use std::sync::Arc;

/// The object a [`Problem`] is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    /// `Service`, `EndpointSlice`, `Node`, `ServiceCIDR`.
    pub kind: &'static str,
    /// `namespace/name`, or just the name.
    pub name: Arc<str>,
}

/// Something in an object that could not be used. The rest of the object is served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Problem {
    /// The object.
    pub object: ObjectRef,
    /// The field, as a path: `spec.ports[0].port`.
    pub field: String,
    /// What is wrong, and what is done about it.
    pub message: String,
}

impl Problem {
    /// A problem of a service.
    #[must_use]
    pub fn service(name: &str, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            object: ObjectRef { kind: "Service", name: name.into() },
            field: field.into(),
            message: message.into(),
        }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.object, self.field, self.message)
    }
}
