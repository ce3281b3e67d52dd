//! What counts of the objects that slices are made of.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_policy::model::{Labels, Name, NamedPort, PodKey};

/// What counts of a pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PodFacts {
    pub(crate) uid: String,
    pub(crate) created: i64,
    pub(crate) node: Name,
    pub(crate) labels: Labels,
    pub(crate) ports: Vec<NamedPort>,
    /// Its addresses in its primary Network, as its own status says.
    pub(crate) addresses: Vec<IpAddr>,
    /// It is in its node's namespace, or has come to its end: nobody's peer.
    pub(crate) is_no_peer: bool,
}

/// What counts of a NetworkAttachment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttachmentFacts {
    pub(crate) pod: PodKey,
    pub(crate) network: Name,
    pub(crate) node: Name,
    pub(crate) addresses: Vec<IpAddr>,
}

/// What policies are about that Knit leaves to others, whatever Networks say.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct LeftToOthers {
    /// All of the cluster.
    pub(crate) cluster: bool,
    /// The default Network: it is another CNI plugin's.
    pub(crate) default_network: bool,
}

/// What counts of a Network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NetworkFacts {
    /// Whether Knit enforces policies in it.
    pub(crate) enforced: bool,
    /// Whether it leaves them to somebody else.
    pub(crate) left_to_others: bool,
    pub(crate) ranges: Vec<IpNet>,
    /// The namespaces of the cluster services that its pods reach in the default Network.
    pub(crate) services: BTreeSet<Name>,
}
