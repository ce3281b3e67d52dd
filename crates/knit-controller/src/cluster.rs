//! The cluster as the planner sees it: Knit's own objects whole, of the others only what counts.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Taint};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use knit_api::names::{MANAGED_BY, MANAGED_BY_LABEL};
use knit_api::{AddressBlock, Network, NetworkAttachment, NetworkClass, NodeNetwork};

/// Everything that is known, by name.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// The classes.
    pub classes: BTreeMap<String, Arc<NetworkClass>>,
    /// The Networks.
    pub networks: BTreeMap<String, Arc<Network>>,
    /// The blocks.
    pub blocks: BTreeMap<String, Arc<AddressBlock>>,
    /// What nodes say of themselves.
    pub node_networks: BTreeMap<String, Arc<NodeNetwork>>,
    /// The nodes.
    pub nodes: BTreeMap<String, Arc<NodeView>>,
    /// The namespaces.
    pub namespaces: BTreeMap<String, Arc<NamespaceView>>,
    /// The attachments that are published.
    pub attachments: Vec<Arc<AttachmentView>>,
    /// Where Services have their addresses.
    pub service_ranges: Vec<IpNet>,
    /// The agents' Leases, by node.
    pub leases: BTreeMap<String, AgentLease>,
}

/// What counts of a Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// The version that was read: a change of the taints is made to this one only.
    pub resource_version: String,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// The ranges that the cluster gave it for its pods.
    pub pod_ranges: Vec<IpNet>,
    /// All its taints.
    pub taints: Vec<Taint>,
    /// Since when it is there.
    pub created: Option<Timestamp>,
}

/// What counts of a Namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamespaceView {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// What counts of a NetworkAttachment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttachmentView {
    /// Its Network.
    pub network: String,
    /// Its node, once it has one.
    pub node: Option<String>,
    /// Addresses that it asked for.
    pub wanted: Vec<IpAddr>,
    /// A user's object about which nobody has said anything yet.
    pub unanswered: Option<Unanswered>,
}

/// A NetworkAttachment that no agent has taken up.
#[derive(Clone, Debug, PartialEq)]
pub struct Unanswered {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The pod that it names.
    pub pod: String,
    /// The version that was read: it is answered in this one only.
    pub resource_version: String,
    /// Since when it is there.
    pub created: Timestamp,
}

/// When an agent was last heard of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AgentLease {
    /// When it was to be taken for gone.
    pub expires: Timestamp,
}

/// What the controller has done or seen and the caches do not show (yet).
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Numbers that were given, by the Network's uid. They are never given again while this controller leads.
    pub ids: HashMap<String, u32>,
    /// Blocks that were made, by name.
    pub blocks: BTreeMap<String, Remembered>,
    /// Since when nodes that have blocks are missing.
    pub gone: HashMap<String, Timestamp>,
}

/// A block that was made and is not seen yet.
#[derive(Clone, Debug)]
pub struct Remembered {
    /// The block.
    pub block: Arc<AddressBlock>,
    /// Until when it counts if it is never seen: somebody may have deleted it at once.
    pub until: Timestamp,
}

// === impl NodeView ===

impl NodeView {
    /// What counts of this Node.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let spec = node.spec.clone().unwrap_or_default();
        let ranges = spec.pod_cidrs.unwrap_or_else(|| spec.pod_cidr.into_iter().collect());
        let addresses = node.status.as_ref().and_then(|s| s.addresses.as_ref());
        Self {
            resource_version: node.metadata.resource_version.clone().unwrap_or_default(),
            addresses: addresses.into_iter().flatten().filter_map(|a| a.address.parse().ok()).collect(),
            pod_ranges: ranges.iter().filter_map(|r| r.parse().ok()).collect(),
            taints: spec.taints.unwrap_or_default(),
            created: node.metadata.creation_timestamp.as_ref().map(|time| time.0),
        }
    }
}

// === impl NamespaceView ===

impl NamespaceView {
    /// What counts of this Namespace.
    #[must_use]
    pub fn of(namespace: Namespace) -> Self {
        Self { labels: namespace.metadata.labels.unwrap_or_default() }
    }
}

// === impl AttachmentView ===

impl AttachmentView {
    /// What counts of this NetworkAttachment.
    #[must_use]
    pub fn of(attachment: NetworkAttachment) -> Self {
        Self {
            unanswered: Unanswered::of(&attachment),
            network: attachment.spec.network,
            node: attachment.status.and_then(|s| s.node),
            wanted: attachment.spec.addresses.iter().filter_map(|a| a.parse().ok()).collect(),
        }
    }
}

// === impl Unanswered ===

impl Unanswered {
    fn of(attachment: &NetworkAttachment) -> Option<Self> {
        let metadata = &attachment.metadata;
        let managed = metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY_LABEL));
        let answered = attachment.status.as_ref().is_some_and(|status| !status.conditions.is_empty());
        if answered || managed.is_some_and(|by| by == MANAGED_BY) || metadata.deletion_timestamp.is_some() {
            return None;
        }
        Some(Self {
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
            pod: attachment.spec.pod.clone(),
            resource_version: metadata.resource_version.clone()?,
            created: metadata.creation_timestamp.as_ref()?.0,
        })
    }
}

// === impl AgentLease ===

impl AgentLease {
    /// When this Lease expires; nothing if it was never renewed.
    #[must_use]
    pub fn of(lease: &Lease) -> Option<Self> {
        let spec = lease.spec.as_ref()?;
        let renewed = spec.renew_time.as_ref()?.0;
        let seconds = spec.lease_duration_seconds.unwrap_or(0).max(0);
        let expires = renewed.saturating_add(jiff::SignedDuration::from_secs(seconds.into())).ok()?;
        Some(Self { expires })
    }
}

/// The ranges of a ServiceCIDR.
#[must_use]
pub(crate) fn service_ranges(service_cidr: &ServiceCIDR) -> Vec<IpNet> {
    let cidrs = service_cidr.spec.as_ref().and_then(|s| s.cidrs.as_ref());
    cidrs.into_iter().flatten().filter_map(|c| c.parse().ok()).collect()
}
