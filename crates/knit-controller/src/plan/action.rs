//! What a plan consists of: typed, printable, and turned into a write in one place.

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Taint};
use knit_api::names::CONTROLLER_MANAGER;
use knit_api::{
    AddressBlock, Network, NetworkAttachment, NetworkAttachmentStatus, NetworkClass, NetworkClassStatus,
    NetworkStatus,
};
use knit_objects::{Key, Write};
use serde_json::json;

/// Everything that is to be done, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What to write.
    pub actions: Vec<Action>,
    /// What to tell people.
    pub notes: Vec<Note>,
    /// When to plan again at the latest, because then something is over.
    pub again: Option<Timestamp>,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make a class.
    MakeClass(NetworkClass),
    /// Make a Network.
    MakeNetwork(Network),
    /// Give a node a range of addresses.
    GiveBlock(AddressBlock),
    /// Take a block back.
    ReleaseBlock {
        /// The block's name.
        name: String,
        /// Which one of that name.
        uid: String,
        /// Why.
        why: String,
    },
    /// Say what is known of a Network; its number is part of it.
    NetworkStatus {
        /// The Network's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// What is known.
        status: NetworkStatus,
    },
    /// Say what is known of a class.
    ClassStatus {
        /// The class's name.
        name: String,
        /// What is known.
        status: NetworkClassStatus,
    },
    /// Say of a user's NetworkAttachment what no agent says.
    AttachmentStatus {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// What is known.
        status: NetworkAttachmentStatus,
    },
    /// Keep a Network while it is in use, or let it go.
    Finalizers {
        /// The Network's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// All that it should have.
        finalizers: Vec<String>,
    },
    /// Keep new pods away from a node, or no longer.
    Taints {
        /// The node's name.
        node: String,
        /// The version that this was made for.
        resource_version: String,
        /// All that it should have.
        taints: Vec<Taint>,
        /// Why.
        why: String,
    },
}

/// Something to tell people about a Network.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// The object that it is about.
    pub regarding: ObjectReference,
    /// Why, in one word.
    pub reason: &'static str,
    /// What happened and what to do.
    pub text: String,
}

// === impl Plan ===

impl Plan {
    pub(super) fn again_at(&mut self, when: Timestamp) {
        self.again = Some(self.again.map_or(when, |known| known.min(when)));
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for action in &self.actions {
            writeln!(f, "{action}")?;
        }
        for note in &self.notes {
            let name = note.regarding.name.as_deref().unwrap_or_default();
            let kind = note.regarding.kind.as_deref().unwrap_or_default();
            writeln!(f, "tell {kind} {name}: {}: {}", note.reason, note.text)?;
        }
        Ok(())
    }
}

// === impl Action ===

impl Action {
    /// How it is carried out.
    #[must_use]
    pub fn write(&self) -> Write {
        match self {
            Self::MakeClass(class) => Write::create(class),
            Self::MakeNetwork(network) => Write::create(network),
            Self::GiveBlock(block) => Write::create(block),
            Self::ReleaseBlock { name, uid, .. } => {
                Write::delete_uid::<AddressBlock>(Key::cluster(name.as_str()), uid.clone())
            }
            Self::NetworkStatus { name, resource_version, status } => {
                Write::status::<Network>(Key::cluster(name.as_str()), status, CONTROLLER_MANAGER)
                    .if_version(resource_version)
            }
            Self::ClassStatus { name, status } => {
                Write::status::<NetworkClass>(Key::cluster(name.as_str()), status, CONTROLLER_MANAGER)
            }
            Self::AttachmentStatus { namespace, name, resource_version, status } => {
                let key = Key::namespaced(namespace.as_str(), name.as_str());
                Write::status::<NetworkAttachment>(key, status, CONTROLLER_MANAGER)
                    .if_version(resource_version)
            }
            Self::Finalizers { name, resource_version, finalizers } => {
                let patch = json!({ "metadata": { "finalizers": finalizers } });
                Write::merge::<Network>(Key::cluster(name.as_str()), patch).if_version(resource_version)
            }
            Self::Taints { node, resource_version, taints, .. } => {
                let patch = json!({ "spec": { "taints": taints } });
                Write::merge::<Node>(Key::cluster(node.as_str()), patch).if_version(resource_version)
            }
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        match self {
            Self::MakeClass(class) => write!(f, "make NetworkClass {}", name(&class.metadata.name)),
            Self::MakeNetwork(network) => write!(f, "make Network {}", name(&network.metadata.name)),
            Self::GiveBlock(block) => {
                let spec = &block.spec;
                write!(f, "give {} of {}", spec.node, spec.network)?;
                for range in [&spec.ipv4, &spec.ipv6].into_iter().flatten() {
                    write!(f, " {range}")?;
                }
                write!(f, " as {}", name(&block.metadata.name))
            }
            Self::ReleaseBlock { name, why, .. } => write!(f, "release {name}: {why}"),
            Self::NetworkStatus { name, status, .. } => {
                write!(f, "status of Network {name}:")?;
                if let Some(id) = status.id {
                    write!(f, " id={id}")?;
                }
                for condition in &status.conditions {
                    let (type_, status, reason) = (&condition.type_, &condition.status, &condition.reason);
                    write!(f, " {type_}={status}/{reason}({})", condition.message)?;
                }
                for counts in &status.addresses {
                    write!(f, " {}={}+{}", counts.family, counts.used, counts.free)?;
                }
                status.primary_namespaces.map_or(Ok(()), |n| write!(f, " primary-in={n}"))
            }
            Self::ClassStatus { name, status } => {
                write!(f, "status of NetworkClass {name}:")?;
                for condition in &status.conditions {
                    write!(f, " {}={}/{}", condition.type_, condition.status, condition.reason)?;
                }
                write!(f, " features=[{}]", status.supported_features.join(","))
            }
            Self::AttachmentStatus { namespace, name, status, .. } => {
                write!(f, "status of NetworkAttachment {namespace}/{name}:")?;
                for condition in &status.conditions {
                    write!(f, " {}={}/{}", condition.type_, condition.status, condition.reason)?;
                }
                Ok(())
            }
            Self::Finalizers { name, finalizers, .. } => {
                write!(f, "finalizers of Network {name}: [{}]", finalizers.join(","))
            }
            Self::Taints { node, taints, why, .. } => {
                let keys: Vec<_> = taints.iter().map(|t| format!("{}:{}", t.key, t.effect)).collect();
                write!(f, "taints of {node}: [{}]: {why}", keys.join(","))
            }
        }
    }
}
