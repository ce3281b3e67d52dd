//! Writes reports to the API: NetworkAttachments, events, NodeNetwork, the node's condition, the agent's
//! Lease. All of it may fail and is tried again; nothing of it is on a pod's way.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, Node, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use knit_api::{
    AddressCounts, Family, HeldRanges, NetworkAttachment, NodeNetwork, NodeNetworkPolicies, NodeNetworkSpec,
    NodeNetworkStatus, NodeNetworkStatusNetwork, conditions, names,
};
use knit_ipam::{Millis, NodeAllocator};
use knit_objects::{EventLimits, EventNote, EventRecorder, Key, Objects, Reporter, Selection, Write, jitter};
use knit_runtime::SandboxId;
use knit_types::NetworkName;
use tokio::time::Instant;

use super::again::{Retries, WriteRetry};
use super::{PodEvent, attachments};
use crate::clock;
use crate::config::MainInterfaces;
use crate::core::Core;
use crate::metrics::NetworkNumbers;
use crate::policy::PoliciesState;
use crate::proxy::ServicesState;

/// The reason of the Node's condition while its network is there.
const READY_REASON: &str = "KnitIsReady";
/// How often the Lease is renewed, and how long it holds: a write of every node, so not more often than
/// needed. The controller closes a node to new pods when its Lease was not renewed for so long.
const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(25);
const LEASE_DURATION: Duration = Duration::from_secs(100);
/// How long changes of NodeNetwork are gathered.
const NODE_NETWORK_DELAY: Duration = Duration::from_millis(500);
/// How often it is written where nothing but counts changed: they do with every pod of every node, and each
/// write is work for the API server and the controller. The first change after so long is written when it has
/// been gathered, later ones when this time is over.
const COUNTS_WRITE_INTERVAL: Duration = Duration::from_secs(60);
/// The same where objects are in a folder: nobody else has work with it.
const FOLDER_COUNTS_WRITE_INTERVAL: Duration = Duration::from_secs(5);
/// How long changes of counts are gathered: the pods of one Deployment come together.
const COUNTS_GATHER_DELAY: Duration = Duration::from_secs(1);
/// How often it is looked whether counts still may wait: somebody may delete a Network that no pod uses any
/// more, and nothing else tells of that here.
const COUNTS_LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// How long a report lets pods go first, at most: what is being attached wants the same processors.
const ATTACH_FIRST_DELAY: Duration = Duration::from_millis(20);
/// The longest pause after failures to write what is said of the node.
const WRITE_RETRY_MAX_DELAY: Duration = Duration::from_secs(30);
/// How often the addresses are counted while some Network has none: freed ones rest a while, and nothing
/// tells when one can be given out again.
const EXHAUSTED_COUNT_INTERVAL: Duration = Duration::from_secs(5);

/// Writes NetworkAttachments and events, forever.
pub async fn write_reports(core: Core, objects: Objects) {
    let mut written = Written::default();
    let reporter = Reporter { controller: names::AGENT_MANAGER.into(), instance: core.node().to_owned() };
    let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
    // What an earlier run wrote and is no longer true goes away; where nothing can be listed, it goes with
    // its pods.
    let selection = Selection {
        labels: Some(format!("{}={}", names::NODE_LABEL, attachments::label_value(core.node()))),
        ..Selection::default()
    };
    if let Ok(found) = objects.written::<NetworkAttachment>(&selection).await {
        for object in found {
            let sandbox = object.status.as_ref().and_then(|s| s.sandbox_id.clone()).unwrap_or_default();
            let managed = object.metadata.labels.as_ref().and_then(|l| l.get(names::MANAGED_BY_LABEL));
            if let (Ok(sandbox), Some(names::MANAGED_BY)) =
                (SandboxId::new(sandbox), managed.map(String::as_str))
            {
                let key = Key::of(&object);
                written.objects.entry(sandbox.clone()).or_default().insert(key.clone());
                written.found.insert(key, object);
                core.report().changed(&sandbox);
            }
        }
    }
    let all: Vec<SandboxId> = core.sandboxes().books().records().map(|r| r.sandbox().clone()).collect();
    for sandbox in all {
        core.report().changed(&sandbox);
    }
    let mut retries: Retries<SandboxId> = Retries::new();
    loop {
        let (mut sandboxes, events) = match retries.next() {
            None => core.report().take().await,
            Some(next) => tokio::time::timeout_at(next, core.report().take()).await.unwrap_or_default(),
        };
        for note in events.iter().filter_map(|event| note(&core, event)) {
            recorder.tell(note);
        }
        for event in core.report().take_of_node() {
            let (node, uid) = (core.node().to_owned(), uid_of(&core));
            let node = ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Node".into()),
                name: Some(node),
                uid,
                ..ObjectReference::default()
            };
            recorder.tell(EventNote::warning(node, event.reason, "Repair", &event.message));
        }
        sandboxes.extend(retries.due(Instant::now()));
        for sandbox in sandboxes {
            let done = written.sandbox(&core, &objects, &sandbox).await;
            retries.tried(sandbox, done);
        }
    }
}

/// Writes NodeNetwork and the node's condition whenever they change, and keeps the numbers up to date, for
/// ever.
pub async fn write_node(core: Core, objects: Objects) {
    let mut shown = core.shown();
    let mut last: Option<NodeNetworkStatus> = None;
    let mut counts = CountsPace::of(&objects);
    // Where another CNI plugin is the node's network, whether there is one is not the agent's to say.
    let ours = core.config().main_interfaces == MainInterfaces::Ours;
    let mut available = if ours { is_shown_ready(&core, &objects).await.then_some(true) } else { None };
    let mut made: Option<Option<String>> = None;
    let mut object_again = WriteRetry::new("NodeNetwork", WRITE_RETRY_MAX_DELAY);
    let mut status_again = WriteRetry::new("the status of NodeNetwork", WRITE_RETRY_MAX_DELAY);
    let mut condition_again = WriteRetry::new("the condition of the Node", WRITE_RETRY_MAX_DELAY);
    loop {
        shown.borrow_and_update();
        core.assess();
        let status = node_status(&core);
        let numbers: Vec<NetworkNumbers> = status.networks.iter().map(numbers).collect();
        core.metrics().networks(&numbers);
        core.metrics().services(&core.networks().states());
        let out = status.networks.iter().any(|n| n.addresses.iter().any(|a| a.free == 0));
        let mut complete = true;
        let news = last.as_ref().map_or(WriteNews::Content, |last| difference(last, &status, &ending(&core)));
        let counts_wait = match news {
            WriteNews::Counts => counts.wait(Instant::now()),
            WriteNews::None | WriteNews::Content => {
                counts.since = None;
                Duration::ZERO
            }
        };
        let waiting = !counts_wait.is_zero();
        if news != WriteNews::None && !waiting {
            let key = Key::cluster(core.node());
            let object = NodeNetwork::new(core.node(), NodeNetworkSpec {});
            let node = uid_of(&core);
            if made.as_ref() != Some(&node) {
                let write = owned(Write::apply(&object, names::AGENT_MANAGER), core.node(), node.as_deref());
                made = object_again.wrote(objects.write(&write).await).then_some(node);
            }
            let write = Write::status::<NodeNetwork>(key, &status, names::AGENT_MANAGER);
            if made.is_some() && status_again.wrote(objects.write(&write).await) {
                last = Some(status);
                counts.written(Instant::now());
            } else {
                // Somebody may have deleted it.
                made = None;
                complete = false;
            }
        }
        let now_available = core.status().is_ok();
        if ours && available != Some(now_available) {
            let (reason, message) = match core.status() {
                Ok(()) => (READY_REASON, "the node agent is ready to attach pods".to_owned()),
                Err(error) => ("KnitIsNotReady", error.chain()),
            };
            let now = Timestamp::now();
            let manager = names::AGENT_MANAGER;
            let write =
                Write::node_network_unavailable(core.node(), !now_available, reason, &message, now, manager);
            if condition_again.wrote(objects.write(&write).await) {
                available = Some(now_available);
            } else {
                complete = false;
            }
        }
        let pause = match complete {
            false => object_again.pause().max(status_again.pause()).max(condition_again.pause()),
            true if waiting => counts_wait.min(COUNTS_LOOK_INTERVAL),
            true if out => EXHAUSTED_COUNT_INTERVAL,
            true => Duration::from_secs(60),
        };
        match tokio::time::timeout(pause, shown.changed()).await {
            Ok(Err(_)) => return,
            Ok(Ok(())) => tokio::time::sleep(NODE_NETWORK_DELAY).await,
            Err(_) => {}
        }
    }
}

/// Whether the Node says already that its network is there: an agent that was restarted has nothing new to
/// say then, and each change of a Node is sent to every node. If it cannot be read, it is written.
async fn is_shown_ready(core: &Core, objects: &Objects) -> bool {
    let fields = Some(format!("metadata.name={}", core.node()));
    let found = objects.list::<Node>(&Selection { fields, ..Selection::default() }).await;
    let nodes = found.unwrap_or_else(|error| {
        tracing::debug!(error = &error as &dyn std::error::Error, "the Node cannot be read");
        Vec::new()
    });
    let status = nodes.into_iter().find_map(|node| node.status);
    let conditions = status.and_then(|status| status.conditions).unwrap_or_default();
    conditions.iter().any(|c| {
        c.type_ == "NetworkUnavailable" && c.status == "False" && c.reason.as_deref() == Some(READY_REASON)
    })
}

/// How a status differs from the one that was written last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum WriteNews {
    None,
    /// In counts, which can wait.
    Counts,
    Content,
}

/// When counts are written of which nothing but themselves has changed.
#[derive(Debug)]
struct CountsPace {
    interval: Duration,
    /// When anything was written last.
    written: Option<Instant>,
    /// Since when other counts wait.
    since: Option<Instant>,
}

// === impl CountsPace ===

impl CountsPace {
    fn of(objects: &Objects) -> Self {
        let of_api = objects.client().is_some();
        let interval = if of_api { COUNTS_WRITE_INTERVAL } else { FOLDER_COUNTS_WRITE_INTERVAL };
        Self { interval, written: None, since: None }
    }

    fn written(&mut self, now: Instant) {
        (self.written, self.since) = (Some(now), None);
    }

    /// Counts have changed, now or earlier: how long they still wait.
    fn wait(&mut self, now: Instant) -> Duration {
        let gathered = *self.since.get_or_insert(now) + COUNTS_GATHER_DELAY;
        let next = self.written.map_or(gathered, |written| gathered.max(written + self.interval));
        next.saturating_duration_since(now)
    }
}

/// Networks that are being deleted: whether pods use them is waited for.
fn ending(core: &Core) -> BTreeSet<NetworkName> {
    let world = core.world().get();
    let ending = world.networks.iter().filter(|(_, network)| network.is_being_deleted());
    ending.map(|(name, _)| name.clone()).collect()
}

fn difference(
    last: &NodeNetworkStatus,
    status: &NodeNetworkStatus,
    ending: &BTreeSet<NetworkName>,
) -> WriteNews {
    if last == status {
        WriteNews::None
    } else if without_counts(last, ending) == without_counts(status, ending) {
        WriteNews::Counts
    } else {
        WriteNews::Content
    }
}

/// A status without its counts. That addresses are out, or are no longer, is more than a count, and so is
/// that nobody uses a Network any more that is being deleted.
fn without_counts(status: &NodeNetworkStatus, ending: &BTreeSet<NetworkName>) -> NodeNetworkStatus {
    let mut rest = status.clone();
    for network in &mut rest.networks {
        network.attachments =
            if ending.contains(network.name.as_str()) { network.attachments.min(1) } else { 0 };
        for addresses in &mut network.addresses {
            (addresses.used, addresses.free) = (0, addresses.free.min(1));
        }
    }
    rest
}

/// Renews the agent's Lease, forever.
pub async fn renew_lease(core: Core, objects: Objects) {
    let mut again = WriteRetry::new("the agent's Lease", LEASE_RENEW_INTERVAL);
    loop {
        let node = core.node();
        let (namespace, now) = (&core.config().namespace, Timestamp::now());
        let write = Write::lease(namespace, node, node, LEASE_DURATION, now, names::AGENT_MANAGER);
        let write = owned(write, node, uid_of(&core).as_deref());
        let pause =
            if again.wrote(objects.write(&write).await) { LEASE_RENEW_INTERVAL } else { again.pause() };
        // Agents that were started together do not renew, or try again, together forever.
        tokio::time::sleep(pause.mul_f64(0.9 + 0.2 * jitter())).await;
    }
}

/// The uid of this Node, once its object has arrived.
fn uid_of(core: &Core) -> Option<String> {
    core.world().get().nodes.get(core.node()).and_then(|node| node.uid.clone())
}

/// What goes when the Node goes.
fn owned(write: Write, node: &str, uid: Option<&str>) -> Write {
    match uid {
        Some(uid) => write.owned_by_node(node, uid),
        None => write,
    }
}

/// How many addresses of a Network this node uses and has free.
fn address_counts(allocator: &NodeAllocator, network: &str, now: Millis) -> Vec<AddressCounts> {
    let counts = allocator.counts(network, now).unwrap_or_default();
    // Each block keeps an address for a router, and the router has that of one block.
    let router = u64::from(allocator.router(network).is_some());
    let families = [(Family::V4, counts.v4), (Family::V6, counts.v6)].into_iter();
    let shown = families.filter_map(|(family, counts)| {
        let counts = counts?;
        Some(AddressCounts {
            family,
            used: i64::try_from(counts.used + router).unwrap_or(i64::MAX),
            free: i64::try_from(counts.free).unwrap_or(i64::MAX),
        })
    });
    shown.collect()
}

/// What NodeNetwork shows now.
pub(crate) fn node_status(core: &Core) -> NodeNetworkStatus {
    let now = clock::now();
    let books = core.sandboxes().books();
    let wants: BTreeSet<NetworkName> =
        books.allocator.wants_more(now).into_iter().map(|w| w.network).collect();
    let mut networks = Vec::new();
    for state in core.networks().states() {
        let addresses = address_counts(&books.allocator, &state.name, now);
        let starved = state.starved && addresses.iter().any(|a| a.free == 0);
        let (ready, reason, message) = match &state.problem {
            Some(problem) => (false, problem.reason, Some(problem.message.clone())),
            None if starved => (
                false,
                conditions::node_network::REASON_NO_ADDRESS,
                Some("no address is free: another block was requested".to_owned()),
            ),
            None => {
                let message = state.services.as_ref().and_then(ServicesState::message);
                (true, conditions::node_network::REASON_READY, message)
            }
        };
        networks.push(NodeNetworkStatusNetwork {
            ready,
            reason: reason.to_owned(),
            message,
            attachments: i32::try_from(books.attachments_of(&state.name)).unwrap_or(i32::MAX),
            blocks: i32::try_from(books.allocator.blocks(&state.name).count()).unwrap_or(i32::MAX),
            addresses,
            // Before the allocator knows the Network, a block is what is missing.
            wants_block: state.starved
                || wants.contains(&state.name)
                || state
                    .problem
                    .as_ref()
                    .is_some_and(|p| p.reason == conditions::node_network::REASON_NO_ADDRESS),
            policies: state.policies.as_ref().and_then(policies),
            name: state.name.into(),
        });
    }
    let blocks = core.networks().blocks(&books.allocator, now);
    let held_ranges = blocks
        .held
        .into_iter()
        .map(|(network, ranges)| HeldRanges {
            network: network.into(),
            ranges: ranges.iter().map(ToString::to_string).collect(),
        })
        .collect();
    drop(books);
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    NodeNetworkStatus {
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        runtimes: core.runtimes().describe(),
        held_ranges,
        spare_blocks: blocks.spare,
        network_count: count(networks.len()),
        not_ready_count: count(networks.iter().filter(|n| !n.ready).count()),
        networks,
    }
}

/// What is said of policies; nothing where there are none, so that they cost no write there.
fn policies(state: &PoliciesState) -> Option<NodeNetworkPolicies> {
    (state.acting > 0).then(|| NodeNetworkPolicies {
        acting: i32::try_from(state.acting).unwrap_or(i32::MAX),
        newest_resource_version: state.newest.clone(),
        message: state.problem.clone(),
    })
}

/// What was written so far.
#[derive(Debug, Default)]
struct Written {
    /// The objects of each sandbox.
    objects: BTreeMap<SandboxId, BTreeSet<Key>>,
    /// What an earlier run wrote, until it was looked at once.
    found: BTreeMap<Key, NetworkAttachment>,
    /// Why an object could not be written last time: the same reason is not logged again.
    problems: BTreeMap<Key, String>,
}

// === impl Written ===

impl Written {
    /// Brings the objects of a sandbox up to date; false if it is to be tried again.
    async fn sandbox(&mut self, core: &Core, objects: &Objects, sandbox: &SandboxId) -> bool {
        let mut desired = {
            let books = core.sandboxes().books();
            // What is written of it is all that others know of a pod that may well run.
            if books.unreadable_of(sandbox).is_some() {
                return true;
            }
            let record = books.get(sandbox);
            record.map(|r| attachments::desired(&core.world().get(), core.node(), r)).unwrap_or_default()
        };
        let mut complete = true;
        let mut keys = BTreeSet::new();
        for object in &mut desired {
            let key = Key::of(object);
            keys.insert(key.clone());
            self.objects.entry(sandbox.clone()).or_default().insert(key.clone());
            // A start of the agent is no news: what an earlier run wrote and is still true is left alone.
            if self.found.remove(&key).is_some_and(|found| attachments::is_told(object, &found)) {
                continue;
            }
            // Too long a time is no reason to tell less.
            let _ = tokio::time::timeout(ATTACH_FIRST_DELAY, core.idle()).await;
            match objects.publish(object, &object.status, names::AGENT_MANAGER).await {
                Ok(_) => drop(self.problems.remove(&key)),
                Err(error) => {
                    complete = false;
                    self.not_published(core, objects, sandbox, object, &error).await;
                }
            }
        }
        let before = self.objects.get(sandbox).cloned().unwrap_or_default();
        // A pod's next sandbox may have taken the name over.
        let elsewhere =
            |key: &Key| self.objects.iter().any(|(other, keys)| other != sandbox && keys.contains(key));
        let mut left = keys.clone();
        for key in before.difference(&keys) {
            if !elsewhere(key) && !remove(objects, core.node(), key).await {
                left.insert(key.clone());
                complete = false;
            }
        }
        self.problems.retain(|key, _| !before.contains(key) || left.contains(key));
        if left.is_empty() {
            self.objects.remove(sandbox);
        } else {
            self.objects.insert(sandbox.clone(), left);
        }
        complete
    }

    /// Says why an object cannot be written, if that is news: in the log, and on the pod if somebody can do
    /// something about it.
    async fn not_published(
        &mut self,
        core: &Core,
        objects: &Objects,
        sandbox: &SandboxId,
        object: &NetworkAttachment,
        error: &knit_objects::Error,
    ) {
        let (key, problem) = (Key::of(object), error.with_causes());
        if self.problems.get(&key) == Some(&problem) {
            return;
        }
        tracing::warn!(attachment = %key, "cannot write a NetworkAttachment yet: {problem}");
        // One that a user made beforehand cannot become ours.
        let managed =
            |o: &NetworkAttachment| o.metadata.labels.as_ref()?.get(names::MANAGED_BY_LABEL).cloned();
        use knit_objects::Error::{Conflict, Forbidden, Invalid};
        if matches!(error, Invalid { .. } | Conflict { .. } | Forbidden { .. })
            && let Ok(Some(there)) = objects.get::<NetworkAttachment>(&key).await
            && managed(&there).as_deref() != Some(names::MANAGED_BY)
            && let Some(pod) = core.sandboxes().pod(sandbox)
        {
            let message = format!(
                "the interface {} cannot be published as NetworkAttachment {key}: another client created an \
                 object with that name; delete it",
                object.spec.interface.as_deref().unwrap_or("eth0")
            );
            core.report().say(PodEvent { pod, reason: "NameTaken", message });
        }
        self.problems.insert(key, problem);
    }
}

/// What is said on a pod's own events.
fn note(core: &Core, event: &PodEvent) -> Option<EventNote> {
    let (namespace, name) = (event.pod.namespace.as_ref()?, event.pod.name.as_ref()?);
    let known = core.world().get().pods.get(&(namespace.clone(), name.clone())).and_then(|p| p.uid.clone());
    let pod = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(namespace.clone()),
        name: Some(name.clone()),
        uid: known.or_else(|| event.pod.uid.clone()),
        ..ObjectReference::default()
    };
    Some(EventNote::warning(pod, event.reason, "Attach", &event.message))
}

/// Deletes a NetworkAttachment of ours; false if it is to be tried again.
async fn remove(objects: &Objects, node: &str, key: &Key) -> bool {
    // A pod of the same name may be on another node by now, whose agent writes the same object.
    let there = match objects.get::<NetworkAttachment>(key).await {
        Ok(there) => there,
        Err(error) => return log(Err::<(), _>(error), "a NetworkAttachment"),
    };
    let mut delete = Write::delete::<NetworkAttachment>(key.clone());
    // A folder is not asked for what was written to it: there is nothing to compare with.
    if let Some(object) = there {
        // One that a user made under this name is the user's.
        let managed = object.metadata.labels.as_ref().and_then(|labels| labels.get(names::MANAGED_BY_LABEL));
        let elsewhere = object.status.and_then(|status| status.node).is_some_and(|owner| owner != node);
        if elsewhere || managed.is_none_or(|by| by != names::MANAGED_BY) {
            return true;
        }
        if let Some(uid) = &object.metadata.uid {
            delete = delete.if_uid(uid);
        }
    }
    log(objects.write(&delete).await, "a NetworkAttachment")
}

/// A warning about an object.
pub(crate) fn warning(
    node: &str,
    about: ObjectReference,
    reason: &str,
    message: &str,
    suffix: &str,
) -> Event {
    let now = Time(Timestamp::now());
    let mut event = Event {
        reason: Some(reason.to_owned()),
        message: Some(message.chars().take(1024).collect()),
        type_: Some("Warning".to_owned()),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        source: Some(EventSource {
            component: Some(names::AGENT_MANAGER.into()),
            host: Some(node.to_owned()),
        }),
        ..Event::default()
    };
    let name: String = about.name.clone().unwrap_or_default().chars().take(220).collect();
    event.metadata.name = Some(format!("{name}.{suffix}"));
    event.metadata.namespace.clone_from(&about.namespace);
    event.involved_object = about;
    event
}

fn numbers(network: &NodeNetworkStatusNetwork) -> NetworkNumbers {
    NetworkNumbers {
        name: network.name.clone(),
        attachments: i64::from(network.attachments),
        used: network.addresses.iter().map(|a| a.used).max().unwrap_or_default(),
        free: network.addresses.iter().map(|a| a.free).min().unwrap_or_default(),
        ready: network.ready,
    }
}

/// Whether a write went through; if not, the log says why.
fn log<T>(result: knit_objects::Result<T>, what: &str) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "{what} cannot be written yet");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(used: i64, free: i64, wants_block: bool) -> NodeNetworkStatus {
        let addresses = vec![AddressCounts { family: Family::V4, used, free }];
        let network = NodeNetworkStatusNetwork {
            name: "default".into(),
            ready: true,
            attachments: i32::try_from(used).unwrap_or(i32::MAX),
            addresses,
            wants_block,
            reason: conditions::node_network::REASON_READY.to_owned(),
            message: None,
            blocks: 1,
            policies: None,
        };
        NodeNetworkStatus { networks: vec![network], ..NodeNetworkStatus::default() }
    }

    #[test]
    fn a_node_that_was_idle_showed_an_address_in_use_for_each_of_its_blocks() {
        let subnet = |cidr: &str| knit_ipam::Subnet::new(cidr.parse().expect("a CIDR"), None, &[]);
        let subnets = ["10.2.0.0/24", "fd02::/64"].map(|cidr| subnet(cidr).expect("a subnet"));
        let pool = knit_ipam::Pool::new("blue", 2, subnets).expect("a pool").with_router(true);
        let mut allocator = NodeAllocator::new("n1", knit_ipam::NodeConfig::default());
        allocator.set_network(pool);
        assert!(address_counts(&allocator, "blue", Millis(0)).iter().all(|counts| counts.used == 0));
        for (v4, v6) in [("10.2.0.0", "fd02::"), ("10.2.0.8", "fd02::8")] {
            let (v4, v6) = (v4.parse().expect("an address"), v6.parse().expect("an address"));
            let start = knit_types::Addresses::Dual { v4, v6 };
            let block = knit_ipam::Block::new("blue", "n1", start, knit_ipam::BlockSize::SMALL);
            allocator.add_block(block.expect("a block")).expect("added");
        }
        let counts = address_counts(&allocator, "blue", Millis(0));
        assert_eq!(counts.iter().map(|counts| counts.used).collect::<Vec<_>>(), [1, 1], "its router's");
    }

    #[test]
    fn counts_can_wait_but_not_that_addresses_are_out() {
        let (before, nothing) = (status(3, 9, false), BTreeSet::new());
        assert_eq!(difference(&before, &before, &nothing), WriteNews::None);
        assert_eq!(difference(&before, &status(11, 1, false), &nothing), WriteNews::Counts);
        assert_eq!(difference(&before, &status(0, 12, false), &nothing), WriteNews::Counts);
        assert_eq!(difference(&before, &status(12, 0, false), &nothing), WriteNews::Content, "none is free");
        assert_eq!(
            difference(&before, &status(3, 9, true), &nothing),
            WriteNews::Content,
            "a block is asked for"
        );
        let ending = BTreeSet::from([NetworkName::default()]);
        assert_eq!(difference(&before, &status(1, 11, false), &ending), WriteNews::Counts);
        assert_eq!(difference(&before, &status(0, 12, false), &ending), WriteNews::Content, "it can go");
    }

    #[test]
    fn each_pod_of_the_default_network_was_a_write_of_its_node() {
        let mut pace = CountsPace { interval: COUNTS_WRITE_INTERVAL, written: None, since: None };
        let (start, mut writes) = (Instant::now(), Vec::new());
        pace.written(start);
        // After two minutes of quiet a pod comes or goes every 2 s, for ten minutes.
        for seconds in (120..720_u64).step_by(2) {
            let now = start + Duration::from_secs(seconds);
            let due = now + pace.wait(now);
            // Nothing else wakes the writer before the next pod.
            if due < now + Duration::from_secs(2) {
                writes.push(due.duration_since(start).as_secs());
                pace.written(due);
            }
        }
        assert_eq!(writes[..3], [121, 181, 241], "the first one at once, later ones within a minute");
        assert_eq!(writes.len(), 10);
    }
}
