//! The one internal request that every front door makes.

use std::net::IpAddr;
use std::path::PathBuf;

use knit_ipam::Mac;
use knit_runtime::{Dns, InterfaceName, Pod, PortMapping};
use serde::{Deserialize, Serialize};

/// This pod, in this sandbox, is to have these interfaces.
#[derive(Clone, Debug)]
pub struct PodRequest {
    /// The pod and its sandbox.
    pub pod: Pod,
    /// What a sandbox gets that starts. None for one that runs, which gets more of what it has.
    pub start: Option<Start>,
    /// What the pod asks for.
    pub wishes: Wishes,
    /// Who asks.
    pub door: Door,
}

/// What a sandbox gets when it starts: its namespace gets its main interface, whatever else it asks for.
#[derive(Clone, Debug)]
pub struct Start {
    /// Where its network namespace can be opened.
    pub netns: PathBuf,
    /// The name of its main interface.
    pub interface: InterfaceName,
    /// Ports of the node that lead to the main interface.
    pub ports: Vec<PortMapping>,
    /// Addresses that the main interface must have.
    pub addresses: Vec<IpAddr>,
    /// The MAC that the main interface must have.
    pub mac: Option<Mac>,
    /// Name servers, for the answer.
    pub dns: Dns,
}

/// What a pod asks for, as far as whoever calls knows. A door parses; what is wrong is answered where
/// everything else is that a pod cannot have, so that its events say so.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Wishes {
    /// This.
    Said(Wish),
    /// Something that cannot be understood, and what to write instead.
    Wrong(String),
    /// The caller does not know: the pod's own object says it.
    AsThePodSays,
}

/// Networks that a pod asks for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Wish {
    /// The Network of its main interface, in place of its namespace's primary one.
    pub primary: Option<String>,
    /// Further ones.
    pub further: Vec<Asked>,
}

/// One further Network that a pod asks for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Asked {
    /// The Network's name.
    pub network: String,
    /// The interface's name, if the pod cares.
    pub interface: Option<InterfaceName>,
    /// Addresses that the interface must have.
    pub addresses: Vec<IpAddr>,
    /// The MAC that the interface must have.
    pub mac: Option<Mac>,
    /// Whether the pod's default route goes out here.
    pub default_route: bool,
}

// === impl Wishes ===

impl Wishes {
    /// These further Networks, and the namespace's primary one.
    #[must_use]
    pub fn further(asked: Vec<Asked>) -> Self {
        Self::Said(Wish { primary: None, further: asked })
    }
}

impl Default for Wishes {
    /// Nothing beyond what its namespace has.
    fn default() -> Self {
        Self::Said(Wish::default())
    }
}

/// A way a request reaches the agent.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Door {
    /// A CNI client, with the name of its configuration: GC is about that one only.
    Cni(String),
    /// A KNI client.
    Kni,
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

impl From<RawObject> for ObjectDoor {
    fn from(raw: RawObject) -> Self {
        match raw {
            RawObject::Name(name) => Self { name, uid: None },
            RawObject::Whole { name, uid } => Self { name, uid },
        }
    }
}

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
            (_, Self::Cni(_)) if self.is_forgotten() => true,
            _ => self == door,
        }
    }
}

/// How errors and logs call a pod.
#[must_use]
pub fn pod_name(pod: &Pod) -> String {
    match (&pod.namespace, &pod.name) {
        (Some(namespace), Some(name)) => format!("pod {namespace}/{name}"),
        _ => format!("sandbox {}", pod.sandbox),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_of_an_earlier_version_is_read() {
        let old: Door = serde_json::from_str(r#"{"Object":"shop/more"}"#).expect("a door");
        assert_eq!(old, Door::Object(ObjectDoor { name: "shop/more".into(), uid: None }));
        let new = Door::Object(ObjectDoor { name: "shop/more".into(), uid: Some("u1".into()) });
        let text = serde_json::to_string(&new).expect("text");
        assert_eq!(serde_json::from_str::<Door>(&text).expect("a door"), new);
    }
}
