//! What is kept of an attachment beyond its plan: who asked for it, and what it takes to make it again.

use knit_types::{Dns, ObjectRef, PortMapping};
use serde::{Deserialize, Serialize};

/// What is kept of an attachment besides its Network, its addresses and its runtime: enough to make it again.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Details {
    /// Who asked for it.
    pub door: Door,
    /// Whether it is the pod's main interface.
    #[serde(default)]
    pub main: bool,
    /// Whether the pod's default route goes out there.
    #[serde(default)]
    pub default_route: bool,
    /// Ports of the node that lead there.
    #[serde(default)]
    pub ports: Vec<PortMapping>,
    /// Name servers.
    #[serde(default)]
    pub dns: Dns,
}

/// A way a request reaches the agent.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Door {
    /// A CNI client, with the name of its configuration: GC is about that one only.
    Cni(String),
    /// A KNI client.
    Kni,
    /// The container runtime, by NRI: another CNI plugin made the main interface.
    Nri,
    /// A NetworkAttachment object.
    Object(ObjectDoor),
}

/// Which NetworkAttachment asks. Another one of the same name is another object.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(from = "RawObject")]
pub struct ObjectDoor {
    /// Its namespace and name, with a slash between them.
    pub name: String,
    /// Its uid, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// As it may be recorded: earlier versions kept the name alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawObject {
    Name(String),
    Whole {
        name: String,
        #[serde(default)]
        uid: Option<String>,
    },
}

// === impl ObjectDoor ===

impl ObjectDoor {
    /// The object that asks.
    #[must_use]
    pub fn object(&self) -> ObjectRef {
        let (namespace, name) = self.name.split_once('/').unwrap_or(("", &self.name));
        ObjectRef {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: self.uid.clone().unwrap_or_default(),
        }
    }
}

impl From<RawObject> for ObjectDoor {
    fn from(raw: RawObject) -> Self {
        match raw {
            RawObject::Name(name) => Self { name, uid: None },
            RawObject::Whole { name, uid } => Self { name, uid },
        }
    }
}

// === impl Door ===

impl Door {
    /// Whether nobody knows who asked: it was found running after the ledger was lost.
    #[must_use]
    pub fn is_forgotten(&self) -> bool {
        matches!(self, Self::Cni(name) if name.is_empty())
    }

    /// Whether a garbage collection through `door` is about what this one made. What was found after the
    /// ledger was lost has no configuration's name: it may be any one's.
    #[must_use]
    pub fn is_served_by(&self, door: &Self) -> bool {
        match (self, door) {
            (_, Self::Cni(_) | Self::Nri) if self.is_forgotten() => true,
            _ => self == door,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_of_an_earlier_version_is_read() {
        let old: Door = serde_json::from_str(r#"{"Object":"shop/more"}"#).expect("a door");
        assert_eq!(old, Door::Object(ObjectDoor { name: "shop/more".into(), uid: None }));
        let new = Door::Object(ObjectDoor { name: "shop/more".into(), uid: Some("u1".into()) });
        let text = serde_json::to_string(&new).expect("text");
        assert_eq!(serde_json::from_str::<Door>(&text).expect("a door"), new);
    }
}
