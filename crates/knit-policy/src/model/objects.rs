//! Pods, namespaces and nodes: what policies need to know of them, and nothing else.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::{Labels, NAMESPACE_NAME_LABEL, Name, Protocol};

/// A pod's namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodKey {
    /// The namespace.
    pub namespace: Name,
    /// The name.
    pub name: Name,
    /// Of an older pod whose sandbox is still there while another pod has its name: its uid.
    pub older: Option<Name>,
}

/// A pod that runs, or is about to.
///
/// Pods that have come to their end are not told of (rule 35), and those in the network namespace of their
/// node are the node (rule 27): [`Pod::counts`] is false for both, and nothing is made of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub key: PodKey,
    /// What tells it from an earlier pod of that name, and from one that had its address.
    pub uid: Name,
    /// When it was made, in seconds: of two pods with one address, the younger has it (rule 35).
    pub created: i64,
    /// The node that it runs on; empty before that is decided.
    pub node: Name,
    /// Its labels.
    pub labels: Labels,
    /// The keys of those that are known, sorted; none if all are.
    pub known_labels: Option<Arc<[Name]>>,
    /// The ports that have a name.
    pub ports: Box<[NamedPort]>,
    /// Its interfaces.
    pub attachments: Box<[Attachment]>,
    /// It is in the node's network namespace.
    pub host_network: bool,
    /// It has succeeded or failed, and its addresses may be another pod's by now.
    pub finished: bool,
}

/// A port of a container that has a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedPort {
    /// The name.
    pub name: Name,
    /// The protocol.
    pub protocol: Protocol,
    /// The number.
    pub number: u16,
}

/// One interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attachment {
    /// The Network.
    pub network: Name,
    /// Whether it is the pod's primary one, where core policies act (rule 37).
    pub primary: bool,
    /// Its addresses, of both families.
    pub addresses: Box<[IpAddr]>,
}

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// The namespace's name.
    pub name: Name,
    /// Its labels, [`NAMESPACE_NAME_LABEL`] among them.
    pub labels: Labels,
}

/// What is known of the labels of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownNamespace<'a> {
    /// Its labels; before they are known only [`NAMESPACE_NAME_LABEL`], which every namespace has.
    pub labels: Cow<'a, Labels>,
    /// Whether they are known.
    pub known: bool,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The node's name.
    pub name: Name,
    /// Its labels.
    pub labels: Labels,
    /// Its addresses.
    pub addresses: Box<[IpAddr]>,
}

/// A cluster service that a Network other than the default one reaches over the uplink: translated in the
/// node, behind the router that judges (rule 38), so that the router sees the service's own address and port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alias {
    /// The service's address.
    pub address: IpAddr,
    /// Protocol and port of the service.
    pub protocol: Protocol,
    /// The service's port.
    pub port: u16,
    /// Where it leads, in the default Network.
    pub endpoints: Box<[AliasEndpoint]>,
}

/// Where an [`Alias`] leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AliasEndpoint {
    /// The address.
    pub address: IpAddr,
    /// The port there.
    pub port: u16,
}

// === impl PodKey ===

impl PodKey {
    /// A pod by its namespace and name.
    #[must_use]
    pub fn new(namespace: impl Into<Name>, name: impl Into<Name>) -> Self {
        Self { namespace: namespace.into(), name: name.into(), older: None }
    }

    /// An older pod of this name.
    #[must_use]
    pub fn of_older(self, uid: Name) -> Self {
        Self { older: Some(uid), ..self }
    }

    /// Whether both have one namespace and name.
    #[must_use]
    pub fn is_namesake(&self, other: &Self) -> bool {
        (&self.namespace, &self.name) == (&other.namespace, &other.name)
    }
}

impl fmt::Display for PodKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)?;
        self.older.iter().try_for_each(|uid| write!(f, " (uid {uid})"))
    }
}

// === impl Pod ===

impl Pod {
    /// A pod without labels and addresses.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            key: PodKey::new(namespace, name),
            uid: Name::default(),
            created: 0,
            node: Name::default(),
            labels: Labels::default(),
            known_labels: None,
            ports: Box::default(),
            attachments: Box::default(),
            host_network: false,
            finished: false,
        }
    }

    /// Whether it is known if it has a label, and which value.
    #[must_use]
    pub fn knows_label(&self, key: &Name) -> bool {
        self.known_labels.as_ref().is_none_or(|known| known.binary_search(key).is_ok())
    }

    /// Whether another is the same but for what is known of its labels.
    pub(crate) fn is_same_but_for_known_labels(&self, other: &Self) -> bool {
        let Self {
            key,
            uid,
            created,
            node,
            labels,
            known_labels: _,
            ports,
            attachments,
            host_network,
            finished,
        } = self;
        (key, uid, created, node) == (&other.key, &other.uid, &other.created, &other.node)
            && (labels, ports, attachments) == (&other.labels, &other.ports, &other.attachments)
            && (host_network, finished) == (&other.host_network, &other.finished)
    }

    /// Whether policies act on it and by it at all (rules 27 and 35).
    #[must_use]
    pub fn counts(&self) -> bool {
        !self.host_network && !self.finished
    }

    /// What a port's name means on this pod (rule 21); of two with one name and protocol, the first counts.
    pub fn named<'a>(
        &'a self,
        name: &'a str,
        protocol: Option<Protocol>,
    ) -> impl Iterator<Item = (Protocol, u16)> + 'a {
        Protocol::ALL.into_iter().filter(move |p| protocol.is_none_or(|wanted| wanted == *p)).filter_map(
            move |protocol| {
                let found = self.ports.iter().find(|p| p.protocol == protocol && *p.name == *name)?;
                Some((protocol, found.number))
            },
        )
    }

    /// The attachment that has this address in this Network.
    #[must_use]
    pub fn attachment(&self, network: &str, address: IpAddr) -> Option<&Attachment> {
        self.attachments.iter().find(|a| *a.network == *network && a.addresses.contains(&address))
    }
}

// === impl KnownNamespace ===

impl KnownNamespace<'_> {
    /// Whether it is known if it has a label, and which value.
    #[must_use]
    pub fn knows_label(&self, key: &str) -> bool {
        self.known || *key == *NAMESPACE_NAME_LABEL
    }
}

// === impl Namespace ===

impl Namespace {
    /// A namespace with these labels, and the one that every namespace has (rule 15).
    #[must_use]
    pub fn new(name: &str, labels: Labels) -> Self {
        Self { name: name.into(), labels: labels.with(NAMESPACE_NAME_LABEL, name) }
    }
}
