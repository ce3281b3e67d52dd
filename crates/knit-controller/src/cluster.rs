//! The cluster as the planner sees it: Knit's own objects whole, of the others only what counts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Taint};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_api::conditions::network_attachment;
use knit_api::names::{ATTACHMENT_FINALIZER, MANAGED_BY, MANAGED_BY_LABEL, RECLAIM_ANNOTATION};
use knit_api::{NetworkAttachment, NetworkClass, NodeNetwork};
use knit_ipam::Block;
use knit_model::{AddressBlock, Labels, Network, NodeAddresses, attached_addresses, pod_ranges};

use knit_objects::Backoff;
use knit_types::NetworkName;

use crate::rate::Rates;

/// Namespace and name.
pub type NamespacedName = (String, String);

/// Everything that is known, by name.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// The classes.
    pub classes: BTreeMap<String, Arc<NetworkClass>>,
    /// The Networks.
    pub networks: BTreeMap<NetworkName, Arc<Network>>,
    /// The blocks.
    pub blocks: BTreeMap<String, Arc<BlockView>>,
    /// What nodes say of themselves.
    pub node_networks: BTreeMap<String, Arc<NodeNetwork>>,
    /// The nodes.
    pub nodes: BTreeMap<String, Arc<NodeView>>,
    /// The namespaces.
    pub namespaces: BTreeMap<String, Arc<NamespaceView>>,
    /// The attachments that are published.
    pub attachments: BTreeMap<NamespacedName, Arc<AttachmentView>>,
    /// Where Services have their addresses.
    pub service_ranges: Vec<IpNet>,
    /// The agents' Leases, by node.
    pub leases: BTreeMap<String, AgentLease>,
    /// Whether news of Leases arrive now.
    pub hears_agents: bool,
    /// The NetworkPolicies.
    pub policies: BTreeMap<NamespacedName, Arc<PolicyView>>,
}

/// What time it is, by two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// As the API server writes it. It may step, and differs from that of others: for people, and for what
    /// has its beginning in an object.
    pub wall: Timestamp,
    /// Since some moment in the past, by a clock that never steps: for how long something has lasted here.
    pub steady: Duration,
}

/// What counts of a Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// The version that was read: a change of the taints is made to this one only.
    pub resource_version: String,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// What is written as an address of it and is none.
    pub unreadable: Vec<String>,
    /// The ranges that the cluster gave it for its pods.
    pub pod_ranges: Vec<IpNet>,
    /// All its taints.
    pub taints: Vec<Taint>,
    /// Its labels: which Networks are for it.
    pub labels: Labels,
    /// Since when it is there.
    pub created: Option<Timestamp>,
    /// How many pods it may run, as its kubelet says.
    pub pods: Option<u32>,
}

/// What counts of an AddressBlock.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockView {
    /// Which one of that name.
    pub uid: String,
    /// Its Network.
    pub network: String,
    /// Its node.
    pub node: String,
    /// Since when it is there: of two that overlap the older counts.
    pub created: Option<Timestamp>,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// The version that was read.
    pub resource_version: String,
    /// It is wanted back from its node: the value that was written.
    pub reclaim: Option<String>,
    /// What it says; nothing if it cannot be used.
    pub block: Option<AddressBlock>,
}

/// What counts of a Namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamespaceView {
    /// Its labels.
    pub labels: Labels,
}

/// What counts of a NetworkAttachment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttachmentView {
    /// Its namespace.
    pub namespace: String,
    /// The NetworkAttachment's name.
    pub name: String,
    /// Which one of that name.
    pub uid: String,
    /// The version that was read: it is changed in this one only.
    pub resource_version: String,
    /// The pod that it names.
    pub pod: String,
    /// Its Network.
    pub network: String,
    /// Its node, once it has one.
    pub node: Option<String>,
    /// Whether its interface is there. What an object only asks for costs nobody anything.
    pub ready: bool,
    /// The addresses that its status names.
    pub addresses: Vec<IpAddr>,
    /// Whether an agent made it.
    pub managed: bool,
    /// A user's object about which nobody has said anything yet, and since when it is there.
    pub unanswered: Option<Timestamp>,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// All its finalizers, if it is being deleted and one of them is ours.
    pub leaving: Option<Vec<String>>,
}

/// What counts of a NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyView {
    /// Its namespace.
    pub namespace: String,
    /// The NetworkPolicy's name.
    pub name: String,
    /// Which one of that name.
    pub uid: String,
}

/// The sign of life of an agent.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentLease {
    /// Changes with every renewal. The time in it is the node's own, whose clock may be wrong, and is not
    /// looked at.
    pub version: String,
    /// How long an agent may be silent before it is taken for gone.
    pub holds: Duration,
}

/// What the controller has done or seen and the caches do not show (yet).
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Numbers that were given, by the Network's uid. They are never given again while this controller leads.
    pub ids: HashMap<String, u32>,
    /// Blocks that were made, by name.
    pub blocks: BTreeMap<String, Remembered>,
    /// The highest number of any Network that is gone, as it is kept in the API.
    pub numbers: Numbers,
    /// Nodes that are missing and have blocks or attachments, or say that they still hold ranges.
    pub gone: HashMap<String, Gone>,
    /// Since when attachments without a node are leaving, by namespace and name.
    pub leaving: HashMap<NamespacedName, Duration>,
    /// NetworkAttachments about which something could not be written, by namespace and name, and when that
    /// was.
    pub failed: HashMap<NamespacedName, Duration>,
    /// When counts of a Network were last written, by its uid.
    pub counted: HashMap<String, Duration>,
    /// What was heard of agents.
    pub agents: Agents,
    /// How much was written lately, by kind.
    pub rates: Rates,
    /// Ranges whose names were taken when they were given: until when they are nobody's. What the caches show
    /// of them decides after that.
    pub taken: Vec<(Block, Duration)>,
    /// Nodes that asked for a block of a Network and could not have one, and when that was, by Network.
    pub refused: BTreeMap<String, BTreeMap<String, Duration>>,
    /// The Network after which the next block is given: they take turns.
    pub last_given: Option<String>,
    /// The uids of NetworkPolicies whose authors were told that nobody enforces them.
    pub told: HashSet<String>,
    /// Objects that are being written, or could not be written a moment ago.
    pub writes: Writes,
}

/// Objects that are being written, and such that could not be written a moment ago: each waits for itself,
/// and nothing else waits for it. They are named as [`crate::plan::Action::subject`] does.
#[derive(Clone, Debug, Default)]
pub struct Writes {
    under_way: HashSet<String>,
    failed: HashMap<String, Failed>,
    /// How often the last plan left something out because of it.
    pub left_out: usize,
}

/// An object that could not be written.
#[derive(Clone, Debug)]
struct Failed {
    /// Not before then.
    until: Duration,
    backoff: Backoff,
    /// How often in a row, for the same reason.
    times: u32,
    why: WriteFailure,
}

/// Why a write is tried again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WriteFailure {
    /// It was made for another version than the one that is there.
    OutOfDate,
    /// Another object has its name, or so it seems.
    NameTaken,
    /// It did not go through.
    Error,
}

/// What was heard of agents, by the controller's own clock.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    /// When the last pass was.
    pub last_pass: Option<Duration>,
    /// The controller's own Lease: its version, and since when it has been like that. It comes by the same
    /// watch as those of agents.
    pub own: Option<(String, Duration)>,
    /// The Leases, by node.
    pub leases: HashMap<String, SeenLease>,
}

/// A node of which there is no object.
#[derive(Clone, Debug)]
pub struct Gone {
    /// Since when.
    pub since: Duration,
    /// The version of its agent's Lease, and since when it has been like that.
    pub lease: Option<(String, Duration)>,
}

/// A Lease as it was last seen.
#[derive(Clone, Debug)]
pub struct SeenLease {
    /// Its version.
    pub version: String,
    /// Since when it has been like that and news would have arrived.
    pub since: Duration,
    /// Whether a renewal was seen. If not, nothing is known of the agent yet.
    pub renewed: bool,
}

/// The highest number of any Network that is gone.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    /// The number.
    pub highest: u32,
    /// The object that keeps it, if it is there.
    pub kept_in: Option<Lease>,
}

/// A block that was made and is not seen yet.
#[derive(Clone, Debug)]
pub struct Remembered {
    /// The block.
    pub block: Arc<BlockView>,
    /// Until when it counts if it is never seen: somebody may have deleted it at once.
    pub until: Duration,
    /// It is not known whether it was made: it is asked for again.
    pub again: Option<knit_api::AddressBlock>,
}

/// The annotation of the Lease that keeps the highest number.
pub(crate) const HIGHEST_NUMBER: &str = "knit.dev/highest-network-number";

/// What is not tried again for so long needs no memory.
const FORGET_FAILURE: Duration = Duration::from_secs(60);

// === impl Writes ===

impl Writes {
    /// Whether an object cannot be written now; if it can later, when.
    pub(crate) fn waits(&mut self, subject: &str, now: Now) -> Option<Option<Duration>> {
        let until = self.failed.get(subject).map(|failed| failed.until).filter(|until| now.steady < *until);
        let waits = self.under_way.contains(subject) || until.is_some();
        self.left_out += usize::from(waits);
        waits.then_some(until)
    }

    /// Whether an object is being written.
    #[must_use]
    pub fn is_under_way(&self, subject: &str) -> bool {
        self.under_way.contains(subject)
    }

    /// A plan begins.
    pub(crate) fn begin_plan(&mut self, now: Now) {
        self.left_out = 0;
        self.failed.retain(|_, failed| now.steady < failed.until.saturating_add(FORGET_FAILURE));
    }

    /// Whether something is tried again because of an error.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.failed.values().any(|failed| failed.why == WriteFailure::Error)
    }

    /// Whether nothing is being written.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// How many objects of a kind are being written.
    pub(crate) fn count_of(&self, kind: &str) -> usize {
        let of_kind = |subject: &&String| subject.split(' ').next() == Some(kind);
        self.under_way.iter().filter(of_kind).count()
    }

    /// A write begins. False if that object is being written already.
    pub(crate) fn begin(&mut self, subject: String) -> bool {
        self.under_way.insert(subject)
    }

    /// A write is over, and went through or need not be repeated.
    pub(crate) fn done(&mut self, subject: &str) {
        self.under_way.remove(subject);
        self.failed.remove(subject);
    }

    /// A write is over, and is tried again after a while: not before the API server wants it to be. How
    /// often it failed in a row for this reason; the wait doubles whatever the reason.
    pub(crate) fn failed(
        &mut self,
        subject: &str,
        why: WriteFailure,
        retry_after: Option<Duration>,
        (now, jitter): (Duration, f64),
    ) -> u32 {
        self.under_way.remove(subject);
        let new = || Failed { until: now, backoff: Backoff::default(), times: 0, why };
        let failed = self.failed.entry(subject.to_owned()).or_insert_with(new);
        let wait = failed.backoff.next(jitter).max(retry_after.unwrap_or_default());
        let times = if failed.why == why { failed.times + 1 } else { 1 };
        (failed.until, failed.why, failed.times) = (now.saturating_add(wait), why, times);
        times
    }
}

// === impl Now ===

impl Now {
    /// When it is that time on the wall, by the steady clock; now, if that is over.
    #[must_use]
    pub fn when(&self, wall: Timestamp) -> Duration {
        let wait = Duration::try_from(wall.duration_since(self.wall)).unwrap_or_default();
        self.steady.saturating_add(wait)
    }
}

// === impl Numbers ===

impl Numbers {
    /// What the object says, if it is there.
    #[must_use]
    pub fn of(lease: Option<Lease>) -> Self {
        let annotations = lease.as_ref().and_then(|lease| lease.metadata.annotations.as_ref());
        let text = annotations.and_then(|annotations| annotations.get(HIGHEST_NUMBER));
        Self { highest: text.and_then(|text| text.parse().ok()).unwrap_or(0), kept_in: lease }
    }
}

// === impl NodeView ===

impl NodeView {
    /// What counts of this Node.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
        let addresses = NodeAddresses::of(node);
        Self {
            resource_version: node.metadata.resource_version.clone().unwrap_or_default(),
            addresses: addresses.all().collect(),
            unreadable: addresses.unreadable,
            pod_ranges: pod_ranges(node),
            taints: node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            created: node.metadata.creation_timestamp.as_ref().map(|time| time.0),
            pods: allocatable.and_then(|all| all.get("pods")).and_then(|pods| pods.0.parse().ok()),
        }
    }

    /// Whether nothing that a plan goes by is another in a newer version. Every field is named, so that a
    /// new one is not forgotten.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        let Self { resource_version: _, addresses, unreadable, pod_ranges, taints, labels, created, pods } =
            self;
        (addresses, unreadable) == (&other.addresses, &other.unreadable)
            && (pod_ranges, taints) == (&other.pod_ranges, &other.taints)
            && (labels, created, pods) == (&other.labels, &other.created, &other.pods)
    }
}

// === impl BlockView ===

impl BlockView {
    /// What counts of this AddressBlock.
    #[must_use]
    pub fn of(object: knit_api::AddressBlock) -> Self {
        let (metadata, spec) = (object.metadata, object.spec);
        Self {
            uid: metadata.uid.unwrap_or_default(),
            created: metadata.creation_timestamp.map(|time| time.0),
            deleting: metadata.deletion_timestamp.is_some(),
            resource_version: metadata.resource_version.unwrap_or_default(),
            reclaim: metadata.annotations.and_then(|mut all| all.remove(RECLAIM_ANNOTATION)),
            block: AddressBlock::of(&spec).ok(),
            network: spec.network,
            node: spec.node,
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
        let (metadata, status) = (attachment.metadata, attachment.status.unwrap_or_default());
        let managed = metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY_LABEL));
        let managed = managed.is_some_and(|by| by == MANAGED_BY);
        let deleting = metadata.deletion_timestamp.is_some();
        let ready = |c: &&Condition| c.type_ == network_attachment::READY && c.status == "True";
        let created = metadata.creation_timestamp.map(|time| time.0);
        let ours = |finalizers: &Vec<String>| finalizers.iter().any(|f| f == ATTACHMENT_FINALIZER);
        Self {
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            resource_version: metadata.resource_version.unwrap_or_default(),
            pod: attachment.spec.pod,
            network: attachment.spec.network,
            ready: status.conditions.iter().find(ready).is_some(),
            addresses: attached_addresses(&status),
            // One that names a node is its agent's to answer.
            unanswered: created
                .filter(|_| status.conditions.is_empty() && status.node.is_none() && !managed && !deleting),
            leaving: metadata.finalizers.filter(|finalizers| deleting && ours(finalizers)),
            node: status.node,
            managed,
            deleting,
        }
    }

    /// Whether nothing that a plan goes by is another in a newer version: their users may change labels and
    /// annotations as often as they like.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        let Self {
            resource_version: _,
            namespace,
            name,
            uid,
            pod,
            network,
            node,
            ready,
            addresses,
            managed,
            unanswered,
            deleting,
            leaving,
        } = self;
        *uid == other.uid
            && (namespace, name) == (&other.namespace, &other.name)
            && (pod, network, node) == (&other.pod, &other.network, &other.node)
            && (ready, addresses, unanswered) == (&other.ready, &other.addresses, &other.unanswered)
            && (managed, deleting, leaving) == (&other.managed, &other.deleting, &other.leaving)
    }
}

// === impl PolicyView ===

impl PolicyView {
    /// What counts of this NetworkPolicy; nothing if the API has not made it yet.
    #[must_use]
    pub fn of(policy: NetworkPolicy) -> Option<Self> {
        let metadata = policy.metadata;
        Some(Self { namespace: metadata.namespace?, name: metadata.name?, uid: metadata.uid? })
    }
}

/// The longest that a Lease is believed to hold: its node wrote that.
const LONGEST_HOLD: Duration = Duration::from_secs(600);

// === impl AgentLease ===

impl AgentLease {
    /// The sign of life in this Lease; nothing if it was never renewed.
    #[must_use]
    pub fn of(lease: &Lease) -> Option<Self> {
        let spec = lease.spec.as_ref()?;
        spec.renew_time.as_ref()?;
        let seconds = u64::try_from(spec.lease_duration_seconds?).ok()?;
        Some(Self {
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            holds: Duration::from_secs(seconds).min(LONGEST_HOLD),
        })
    }
}
