//! What was wrong with an object: named by object and field, and never a reason to leave the rest aside.

use std::fmt;

use super::{Kind, Name};

/// Something in an object that could not be used as it stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Problem {
    /// `NetworkPolicy`, `Pod`, …
    pub kind: &'static str,
    /// `namespace/name`, or just the name.
    pub object: Name,
    /// The field, as a path: `spec.ingress[0].from[1].ipBlock.cidr`.
    pub field: String,
    /// What is wrong, and what is done about it.
    pub message: String,
}

impl Problem {
    pub(crate) fn of_policy(name: &super::PolicyName, field: &str, message: String) -> Self {
        Self { kind: Kind::as_str(name.kind), object: name.full().into(), field: field.to_owned(), message }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}: {}", self.kind, self.object, self.field, self.message)
    }
}
