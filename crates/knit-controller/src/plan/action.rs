//! What a plan consists of: typed, printable, and turned into a write in one place.

use std::fmt;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Taint};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use knit_api::names::{CONTROLLER_MANAGER, RECLAIM_ANNOTATION};
use knit_api::{
    AddressBlock, Network, NetworkAttachment, NetworkAttachmentStatus, NetworkClass, NetworkClassStatus,
    NetworkStatus,
};
use knit_objects::{Key, Write};
use serde_json::{Value, json};

use crate::cluster::{HIGHEST_NUMBER, Memory, Now};

/// Everything that is to be done, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What to write.
    pub actions: Vec<Action>,
    /// What to tell people.
    pub notes: Vec<Note>,
    /// When to plan again at the latest, because then something is over; by the steady clock.
    pub again: Option<Duration>,
    /// So many nodes whose agents seem to be away were not closed, because most of them seem to be.
    pub held_back: usize,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "few are made in a plan, and none is kept")]
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
        /// The only version that may be taken, if only one may.
        resource_version: Option<String>,
        /// The reason, in words.
        why: String,
    },
    /// Tell a node that one of its blocks is wanted back, or is not any more.
    WantBlock {
        /// The block's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// What the node repeats once it has given it up; nothing if it may keep it.
        reclaim: Option<String>,
        /// The reason, in words.
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
        /// The NetworkAttachment's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// What is known.
        status: NetworkAttachmentStatus,
    },
    /// Let a NetworkAttachment go that no agent lets go.
    AttachmentFinalizers {
        /// Its namespace.
        namespace: String,
        /// The NetworkAttachment's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// All that it should have.
        finalizers: Vec<String>,
        /// The reason, in words.
        why: String,
    },
    /// Say of a user's NetworkAttachment that nobody has it any more, and nothing else.
    ForgetAttachment {
        /// Its namespace.
        namespace: String,
        /// The NetworkAttachment's name.
        name: String,
        /// The version that this was made for.
        resource_version: String,
        /// What is known.
        condition: Condition,
    },
    /// Remove a NetworkAttachment that an agent made and can remove no longer.
    DeleteAttachment {
        /// Its namespace.
        namespace: String,
        /// The NetworkAttachment's name.
        name: String,
        /// Which one of that name.
        uid: String,
        /// The reason, in words.
        why: String,
    },
    /// Keep the highest number of any Network that is gone, so that it is not given again.
    KeepNumber(Lease),
    /// Tell the author of a NetworkPolicy something.
    Tell {
        /// The event.
        event: Box<Event>,
        /// The policy's uid.
        policy: String,
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
        /// The reason, in words.
        why: String,
    },
}

/// Writes that wait for each other, when there are many.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lane {
    /// Of objects that users make: there may be any number of them.
    Users,
    /// Of Networks and classes.
    Networks,
    /// Of what nodes need: blocks, taints.
    Nodes,
}

/// What an action writes, by kind and name.
pub(super) fn subject(kind: &str, name: &str) -> String {
    format!("{kind} {name}")
}

/// All that an agent says in the status of a NetworkAttachment, besides its conditions.
const STATUS_FIELDS: &[&str] =
    &["node", "sandboxId", "interface", "addresses", "mac", "mtu", "routes", "hostInterface", "podNamespace"];

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

// === impl Action ===

impl Action {
    /// What it writes: never is one of these written twice at the same time. A status is an object of its
    /// own.
    #[must_use]
    pub fn subject(&self) -> String {
        let name = |metadata: &ObjectMeta| metadata.name.clone().unwrap_or_default();
        match self {
            Self::MakeClass(class) => subject("networkclasses", &name(&class.metadata)),
            Self::MakeNetwork(network) => subject("networks", &name(&network.metadata)),
            Self::GiveBlock(block) => subject("addressblocks", &name(&block.metadata)),
            Self::ReleaseBlock { name, .. } | Self::WantBlock { name, .. } => subject("addressblocks", name),
            Self::NetworkStatus { name, .. } => subject("networks/status", name),
            Self::ClassStatus { name, .. } => subject("networkclasses/status", name),
            Self::AttachmentStatus { namespace, name, .. }
            | Self::AttachmentFinalizers { namespace, name, .. }
            | Self::ForgetAttachment { namespace, name, .. }
            | Self::DeleteAttachment { namespace, name, .. } => {
                subject("networkattachments", &format!("{namespace}/{name}"))
            }
            Self::KeepNumber(lease) => subject("leases", &name(&lease.metadata)),
            Self::Tell { policy, .. } => subject("events", policy),
            Self::Finalizers { name, .. } => subject("networks", name),
            Self::Taints { node, .. } => subject("nodes", node),
        }
    }

    /// With what it waits for its turn: what is slow, such as a webhook of a user on one kind, delays its own
    /// lane only.
    pub(crate) fn lane(&self) -> Lane {
        match self {
            Self::AttachmentStatus { .. }
            | Self::AttachmentFinalizers { .. }
            | Self::ForgetAttachment { .. }
            | Self::DeleteAttachment { .. }
            | Self::Tell { .. } => Lane::Users,
            Self::MakeClass(_)
            | Self::MakeNetwork(_)
            | Self::NetworkStatus { .. }
            | Self::ClassStatus { .. }
            | Self::KeepNumber(_)
            | Self::Finalizers { .. } => Lane::Networks,
            Self::GiveBlock(_) | Self::ReleaseBlock { .. } | Self::WantBlock { .. } | Self::Taints { .. } => {
                Lane::Nodes
            }
        }
    }

    /// The namespace and name of the NetworkAttachment that it is about, if it is about one.
    pub(crate) fn attachment(&self) -> Option<(String, String)> {
        match self {
            Self::AttachmentStatus { namespace, name, .. }
            | Self::AttachmentFinalizers { namespace, name, .. }
            | Self::ForgetAttachment { namespace, name, .. }
            | Self::DeleteAttachment { namespace, name, .. } => Some((namespace.clone(), name.clone())),
            _ => None,
        }
    }
}

// === impl Plan ===

impl Plan {
    /// Whether something cannot be written now, because it is being written, or could not be a moment ago.
    pub(super) fn leaves_out(&mut self, memory: &mut Memory, subject: &str, now: Now) -> bool {
        let waits = memory.writes.waits(subject, now);
        if let Some(Some(until)) = waits {
            self.again_at(until);
        }
        waits.is_some()
    }

    pub(super) fn again_at(&mut self, when: Duration) {
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
            writeln!(f, "event on {kind} {name}: {}: {}", note.reason, note.text)?;
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
            Self::ReleaseBlock { name, uid, resource_version, .. } => {
                let write = Write::delete_uid::<AddressBlock>(Key::cluster(name.as_str()), uid.clone());
                match resource_version {
                    Some(version) => write.if_version(version),
                    None => write,
                }
            }
            Self::WantBlock { name, resource_version, reclaim, .. } => {
                let patch = json!({ "metadata": { "annotations": { RECLAIM_ANNOTATION: reclaim } } });
                Write::merge::<AddressBlock>(Key::cluster(name.as_str()), patch).if_version(resource_version)
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
            Self::AttachmentFinalizers { namespace, name, resource_version, finalizers, .. } => {
                let key = Key::namespaced(namespace.as_str(), name.as_str());
                let patch = json!({ "metadata": { "finalizers": finalizers } });
                Write::merge::<NetworkAttachment>(key, patch).if_version(resource_version)
            }
            Self::ForgetAttachment { namespace, name, resource_version, condition } => {
                let key = Key::namespaced(namespace.as_str(), name.as_str());
                // Another agent's fields, which an apply would leave.
                let mut status: serde_json::Map<String, Value> =
                    STATUS_FIELDS.iter().map(|field| ((*field).to_owned(), Value::Null)).collect();
                status.insert("conditions".into(), json!([condition]));
                let patch = json!({ "status": status });
                Write::merge_status::<NetworkAttachment>(key, patch).if_version(resource_version)
            }
            Self::DeleteAttachment { namespace, name, uid, .. } => {
                let key = Key::namespaced(namespace.as_str(), name.as_str());
                Write::delete_uid::<NetworkAttachment>(key, uid.clone())
            }
            Self::KeepNumber(lease) if lease.metadata.resource_version.is_some() => Write::replace(lease),
            Self::KeepNumber(lease) => Write::create(lease),
            Self::Tell { event, .. } => Write::create(&**event),
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
            Self::MakeClass(class) => write!(f, "create NetworkClass {}", name(&class.metadata.name)),
            Self::MakeNetwork(network) => write!(f, "create Network {}", name(&network.metadata.name)),
            Self::GiveBlock(block) => {
                let spec = &block.spec;
                write!(f, "assign to {} in Network {}:", spec.node, spec.network)?;
                for range in [&spec.ipv4, &spec.ipv6].into_iter().flatten() {
                    write!(f, " {range}")?;
                }
                write!(f, " as {}", name(&block.metadata.name))
            }
            Self::ReleaseBlock { name, why, .. } => write!(f, "release {name}: {why}"),
            Self::WantBlock { name, reclaim: Some(_), why, .. } => write!(f, "ask for {name} back: {why}"),
            Self::WantBlock { name, reclaim: None, why, .. } => write!(f, "leave {name} to its node: {why}"),
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
            Self::AttachmentFinalizers { namespace, name, why, .. } => {
                write!(f, "remove the finalizer of NetworkAttachment {namespace}/{name}: {why}")
            }
            Self::ForgetAttachment { namespace, name, condition, .. } => {
                let (status, reason) = (&condition.status, &condition.reason);
                write!(
                    f,
                    "reset the status of NetworkAttachment {namespace}/{name}: {}={status}/{reason}",
                    condition.type_
                )
            }
            Self::DeleteAttachment { namespace, name, why, .. } => {
                write!(f, "delete NetworkAttachment {namespace}/{name}: {why}")
            }
            Self::KeepNumber(lease) => {
                let annotations = lease.metadata.annotations.as_ref();
                let number = annotations.and_then(|a| a.get(HIGHEST_NUMBER)).map_or("", String::as_str);
                write!(f, "keep {number} as the highest ID of a deleted Network")
            }
            Self::Tell { event, .. } => {
                let about = event.regarding.clone().unwrap_or_default();
                let (namespace, reason) = (name(&about.namespace), name(&event.reason));
                write!(f, "event on {} {namespace}/{}: {reason}", name(&about.kind), name(&about.name))
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
