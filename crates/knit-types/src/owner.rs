//! Whom a reservation, a record and what was made belong to.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::name::SandboxId;

/// Whom something belongs to. It is removed when its owner is gone.
///
/// What a claim or an object reserved before there was a sandbox moves to the sandbox when that comes. Inside
/// of another value (`#[serde(flatten)]`) an owner is one field: `sandbox`, `claim` or `object`.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// A pod's sandbox.
    Sandbox(SandboxId),
    /// A claim that was prepared for a pod whose sandbox is not there yet, or no longer.
    Claim(Box<ObjectRef>),
    /// Another object, such as a NetworkAttachment that a user wrote.
    Object(Box<ObjectRef>),
}

/// One object of the Kubernetes API. Another one of the same name has another uid, and is another object.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ObjectRef {
    /// Its namespace.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// Its uid; empty where there is none, as of an object in a folder.
    pub uid: String,
}

// === impl Owner ===

impl Owner {
    /// A claim.
    #[must_use]
    pub fn claim(claim: ObjectRef) -> Self {
        Self::Claim(Box::new(claim))
    }

    /// Another object.
    #[must_use]
    pub fn object(object: ObjectRef) -> Self {
        Self::Object(Box::new(object))
    }

    /// The sandbox, if it is one.
    #[must_use]
    pub fn sandbox(&self) -> Option<&SandboxId> {
        match self {
            Self::Sandbox(id) => Some(id),
            Self::Claim(_) | Self::Object(_) => None,
        }
    }

    /// One word for each owner, the same whenever it is asked for: a sandbox's id, or what no sandbox is
    /// called.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Sandbox(id) => id.to_string(),
            Self::Claim(claim) => format!("claim:{}", claim.key()),
            Self::Object(object) => format!("object:{}", object.key()),
        }
    }
}

impl From<SandboxId> for Owner {
    fn from(id: SandboxId) -> Self {
        Self::Sandbox(id)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox(id) => write!(f, "sandbox {id}"),
            Self::Claim(claim) => write!(f, "claim {claim}"),
            Self::Object(object) => write!(f, "object {object}"),
        }
    }
}

// === impl ObjectRef ===

impl ObjectRef {
    /// One word for each object: its uid, or else its name.
    fn key(&self) -> String {
        if self.uid.is_empty() { self.to_string() } else { self.uid.clone() }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(uid: &str) -> ObjectRef {
        ObjectRef { namespace: "shop".into(), name: "more".into(), uid: uid.into() }
    }

    #[test]
    fn no_claim_and_no_object_has_the_key_of_a_sandbox() {
        let keys = [Owner::claim(object("u")), Owner::object(object("u"))].map(|owner| owner.key());
        assert_ne!(keys[0], keys[1]);
        for key in keys {
            SandboxId::new(&key).expect_err("a sandbox could have that id");
        }
        assert_eq!(Owner::object(object("")).key(), "object:shop/more");
        assert_ne!(Owner::claim(object("u1")).key(), Owner::claim(object("u2")).key());
    }

    #[test]
    fn a_flattened_sandbox_is_the_field_that_ledgers_always_had() {
        #[derive(Debug, Deserialize, PartialEq, Serialize)]
        struct Key {
            #[serde(flatten)]
            owner: Owner,
            interface: String,
        }
        let owner = Owner::Sandbox(SandboxId::new("s1").expect("an id"));
        let key = Key { owner, interface: "eth0".into() };
        let text = serde_json::to_string(&key).expect("JSON");
        assert_eq!(text, r#"{"sandbox":"s1","interface":"eth0"}"#);
        assert_eq!(serde_json::from_str::<Key>(&text).expect("a key"), key);

        let key = Key { owner: Owner::claim(object("u1")), interface: "net1".into() };
        let text = serde_json::to_string(&key).expect("JSON");
        assert_eq!(serde_json::from_str::<Key>(&text).expect("a key"), key);
        serde_json::from_str::<Key>(r#"{"sandbox":"../x","interface":"eth0"}"#).expect_err("not an id");
    }
}
