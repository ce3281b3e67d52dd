//! What slices are made of: policies of every kind that the cluster serves; pods and attachments while some
//! policy asks for pods; and what the controller knows anyway.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use knit_api::{NetworkAttachment, PolicyEnforcement};
use knit_model::Network;
use knit_objects::{Cache, Event, EventNote, EventRecorder, Key, Object, Objects, Progress, Write, jitter};
use knit_policy::kubernetes::{
    AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy, Converted, MultiNetworkPolicy,
    NetworkPolicy, admin_network_policy, baseline_admin_network_policy, cluster_network_policy,
    multi_network_policy, network_policy, pod,
};
use knit_policy::model::{Kind, Name, PodKey, Policy, PolicyName};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::concerns::{Concerns, Topic};
use super::conditions::{self, StatusFacts};
use super::needs::Kept;
use super::plan::{AttachmentFacts, BlockFacts, LeftToOthers, NetworkFacts, Peers, PodFacts};
use crate::cluster::{AttachmentView, BlockView, NamespaceView};
use crate::plan::primaries;

/// How often it is looked whether the cluster serves a kind that it did not serve before.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);
/// Events that wait before a watch is held up.
const EVENT_QUEUE: usize = 1024;
/// So many problems of one policy are told.
const MAX_PROBLEMS: usize = 3;
/// So many statuses are written at once: a thousand policies that come together take a few minutes.
const MAX_STATUS_WRITES: usize = 20;
/// After this time a status that could not be written is tried again.
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(60);

/// What the controller keeps anyway, and is small.
#[derive(Clone, Debug)]
pub(crate) struct SharedCaches {
    pub(crate) namespaces: Cache<NamespaceView>,
    pub(crate) networks: Cache<Network>,
    pub(crate) blocks: Cache<BlockView>,
}

/// All watches.
pub(super) struct Feed {
    objects: Objects,
    small: SharedCaches,
    changes: Vec<watch::Receiver<Progress>>,
    seen: ToldFacts,
    recorder: EventRecorder,
    /// The policies that there are, as events name them.
    policies: BTreeMap<PolicyName, ObjectReference>,
    /// Those that have a status.
    statuses: BTreeMap<PolicyName, StatusFacts>,
    /// Those whose status could not be written, and when it is tried again.
    status_retries: BTreeMap<PolicyName, Duration>,
    concerns: Concerns,
    /// The watches of policies, which end with it.
    _watches: JoinSet<()>,
    /// The watches of pods and attachments, while they are needed.
    pods: Option<JoinSet<()>>,
    pods_kept: Kept,
    /// Counts those watches.
    epoch: u64,
    sender: mpsc::Sender<PolicyNews>,
    inbox: mpsc::Receiver<PolicyNews>,
    known: [bool; 5],
    pods_known: bool,
    attachments_known: bool,
}

/// What was told of the small things last.
#[derive(Default)]
struct ToldFacts {
    namespaces: BTreeMap<Name, (Arc<NamespaceView>, Option<Name>)>,
    networks: BTreeMap<Name, NetworkFacts>,
    blocks: BTreeMap<Name, Arc<BlockView>>,
}

enum PolicyNews {
    Policy(PolicyName, Option<Box<SeenPolicy>>),
    KindKnown(usize),
    /// Of the watch with this number: what one that has ended said is not looked at.
    OfPods(u64, OfPods),
}

/// An object of a kind of policies.
struct SeenPolicy {
    /// Nothing if it cannot be used.
    policy: Option<Policy>,
    reference: ObjectReference,
    /// Nothing if its kind has no status.
    status: Option<StatusFacts>,
}

enum OfPods {
    Pod(PodKey, Option<Box<PodFacts>>),
    PodsKnown,
    Attachment(PodKey, Option<Box<AttachmentFacts>>),
    AttachmentsKnown,
}

impl Feed {
    /// Begins to watch. Where all policies are left to others, their authors are told and nothing else; those
    /// of NetworkPolicies by `plan::policies`.
    pub(super) fn start(
        objects: &Objects,
        small: SharedCaches,
        left: LeftToOthers,
        recorder: &EventRecorder,
    ) -> Self {
        let (sender, inbox) = mpsc::channel(EVENT_QUEUE);
        let mut policies = JoinSet::new();
        let each = PolicyKindWatch {
            objects: objects.clone(),
            sender: sender.clone(),
            recorder: (!left.cluster).then(|| recorder.clone()),
        };
        if !left.cluster {
            policies.spawn(each.clone().served::<NetworkPolicy>(0, Kind::Network, network_policy));
        }
        policies.spawn(each.clone().of_crd::<ClusterNetworkPolicy>(1, Kind::Cluster, cluster_network_policy));
        policies.spawn(each.clone().of_crd::<AdminNetworkPolicy>(2, Kind::Admin, admin_network_policy));
        policies.spawn(each.clone().of_crd::<BaselineAdminNetworkPolicy>(
            3,
            Kind::BaselineAdmin,
            baseline_admin_network_policy,
        ));
        policies.spawn(each.of_crd::<MultiNetworkPolicy>(4, Kind::Multi, multi_network_policy));
        let mut changes = vec![small.namespaces.changes(), small.networks.changes(), small.blocks.changes()];
        changes.iter_mut().for_each(watch::Receiver::mark_changed);
        Self {
            objects: objects.clone(),
            small,
            changes,
            seen: ToldFacts::default(),
            recorder: recorder.clone(),
            policies: BTreeMap::new(),
            statuses: BTreeMap::new(),
            status_retries: BTreeMap::new(),
            concerns: Concerns::default(),
            _watches: policies,
            pods: None,
            pods_kept: Kept::default(),
            epoch: 0,
            sender,
            inbox,
            known: [left.cluster, false, false, false, false],
            pods_known: false,
            attachments_known: false,
        }
    }

    /// Takes in the next thing that is told; false if nobody is left to tell anything.
    pub(super) async fn next(&mut self, peers: &mut Peers) -> bool {
        let [namespaces, networks, blocks] = &mut self.changes[..] else { return false };
        tokio::select! {
            told = self.inbox.recv() => match told {
                Some(told) => self.take(told, peers),
                None => return false,
            },
            _ = namespaces.changed() => self.look(peers),
            _ = networks.changed() => self.look(peers),
            _ = blocks.changed() => self.look(peers),
        }
        true
    }

    /// Takes in all that has been told so far.
    pub(super) fn drain(&mut self, peers: &mut Peers) {
        while let Ok(told) = self.inbox.try_recv() {
            self.take(told, peers);
        }
        self.look(peers);
    }

    /// Whether everything that slices depend on has arrived.
    pub(super) fn is_complete(&self) -> bool {
        let small = &self.small;
        self.known.iter().all(|known| *known)
            && small.namespaces.is_synced()
            && small.networks.is_synced()
            && small.blocks.is_synced()
            && (self.pods.is_none() || (self.pods_known && self.attachments_known))
    }

    /// Watches pods and attachments while they are needed, and for a while after that: to list them again
    /// costs far more than to follow them.
    pub(super) fn watch_pods_if(&mut self, needed: bool, now: Duration, peers: &mut Peers) {
        let needed = self.pods_kept.keeps(needed, now);
        if needed == self.pods.is_some() {
            return;
        }
        (self.pods_known, self.attachments_known) = (false, false);
        self.epoch += 1;
        peers.forget_pods();
        if !needed {
            self.pods = None;
            return;
        }
        let (mut tasks, epoch) = (JoinSet::new(), self.epoch);
        tasks.spawn(follow_pods(self.objects.clone(), epoch, self.sender.clone()));
        tasks.spawn(follow_attachments(self.objects.clone(), epoch, self.sender.clone()));
        self.pods = Some(tasks);
    }

    fn take(&mut self, told: PolicyNews, peers: &mut Peers) {
        match told {
            PolicyNews::Policy(name, seen) => {
                let mut policy = None;
                match seen.map(|seen| *seen) {
                    Some(seen) => {
                        self.policies.insert(name.clone(), seen.reference);
                        if let Some(status) = seen.status {
                            self.statuses.insert(name.clone(), status);
                        }
                        policy = seen.policy;
                    }
                    None => {
                        self.policies.remove(&name);
                        self.statuses.remove(&name);
                        self.status_retries.remove(&name);
                    }
                }
                peers.set_policy(&name, policy);
            }
            PolicyNews::KindKnown(place) => self.known[place] = true,
            PolicyNews::OfPods(epoch, _) if epoch != self.epoch => {}
            PolicyNews::OfPods(_, OfPods::Pod(key, facts)) => peers.set_pod(&key, facts.map(|facts| *facts)),
            PolicyNews::OfPods(_, OfPods::PodsKnown) => self.pods_known = true,
            PolicyNews::OfPods(_, OfPods::Attachment(name, facts)) => {
                peers.set_attachment(&name, facts.map(|facts| *facts));
            }
            PolicyNews::OfPods(_, OfPods::AttachmentsKnown) => self.attachments_known = true,
        }
    }

    /// Tells whoever wrote policies what is wrong with them in the light of everything else.
    pub(super) fn tell_concerns(&mut self, peers: &Peers, now: Duration) {
        for (name, topic, what) in self.concerns.news(peers, now) {
            let Some(reference) = self.policies.get(&name) else { continue };
            match topic {
                Topic::NotEnforced => {
                    let note = EventNote::warning(reference.clone(), "NotEnforced", "Enforce", what);
                    self.recorder.tell(note);
                }
                _ => tell_narrowed(&self.recorder, reference.clone(), &what),
            }
        }
    }

    /// What is to be written into the status of policies, of some of them.
    pub(super) fn status_writes(
        &self,
        peers: &Peers,
        now: Duration,
        wall: Timestamp,
    ) -> Vec<(PolicyName, Write)> {
        let is_off = peers.left_to_others().cluster;
        let due = |name: &PolicyName| self.status_retries.get(name).is_none_or(|at| *at <= now);
        let writes = self.statuses.iter().filter(|(name, _)| due(name)).filter_map(|(name, facts)| {
            let condition = facts.wanted(&self.concerns.about(name), is_off, wall)?;
            Some((name.clone(), conditions::write(name, &condition)?))
        });
        writes.take(MAX_STATUS_WRITES).collect()
    }

    /// A status could not be written, or could be.
    pub(super) fn status_written(&mut self, name: PolicyName, done: bool, now: Duration) {
        match done {
            true => drop(self.status_retries.remove(&name)),
            false => drop(self.status_retries.insert(name, now + STATUS_RETRY_DELAY)),
        }
    }

    /// Looks at what the controller keeps anyway, and passes on what has changed.
    fn look(&mut self, peers: &mut Peers) {
        let mut any = false;
        for change in &mut self.changes {
            any |= change.has_changed().unwrap_or(false);
            change.mark_unchanged();
        }
        if !any {
            return;
        }
        let networks = self.small.networks.list().into_iter();
        let networks: BTreeMap<_, _> =
            networks.map(|(_, network)| (network.name().clone(), network)).collect();
        let facts: BTreeMap<Name, NetworkFacts> =
            networks.iter().map(|(name, network)| (name.as_str().into(), network_facts(network))).collect();
        for (name, facts) in changed(&self.seen.networks, &facts) {
            peers.set_network(name, facts.cloned());
        }
        self.seen.networks = facts;
        let namespaces = by_name(&self.small.namespaces);
        let primaries = primaries(&networks, &namespaces).of_namespace;
        let views: BTreeMap<Name, (Arc<NamespaceView>, Option<Name>)> = namespaces
            .into_iter()
            .map(|(name, view)| {
                let primary = primaries.get(&name).map(|network| network.as_str().into());
                (name.as_str().into(), (view, primary))
            })
            .collect();
        for (name, view) in changed(&self.seen.namespaces, &views) {
            let labels =
                view.map(|(view, _)| view.labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect());
            peers.set_namespace(name, labels, view.and_then(|(_, primary)| primary.clone()));
        }
        self.seen.namespaces = views;
        let blocks = by_name(&self.small.blocks).into_iter();
        let blocks: BTreeMap<Name, Arc<BlockView>> =
            blocks.map(|(name, block)| (name.as_str().into(), block)).collect();
        for (name, block) in changed(&self.seen.blocks, &blocks) {
            peers.set_block(name, block.and_then(|block| block_facts(block)));
        }
        self.seen.blocks = blocks;
    }
}

fn network_facts(network: &Network) -> NetworkFacts {
    let spec = &network.object().spec;
    let policy = spec.policy.unwrap_or_default();
    NetworkFacts {
        enforced: policy.enforcement == PolicyEnforcement::Knit && spec.topology.has_router(),
        left_to_others: policy.enforcement == PolicyEnforcement::Others,
        ranges: network.ranges().to_vec(),
        services: network.cluster_services().map(|(namespace, _)| namespace.into()).collect(),
    }
}

fn block_facts(view: &BlockView) -> Option<BlockFacts> {
    let block = view.block.as_ref()?;
    let ranges = block.ranges().collect();
    Some(BlockFacts { network: view.network.as_str().into(), node: view.node.as_str().into(), ranges })
}

fn by_name<T>(cache: &Cache<T>) -> BTreeMap<String, Arc<T>> {
    cache.list().into_iter().map(|(key, object)| (key.name().to_owned(), object)).collect()
}

/// What differs between two maps: with what it is now, or nothing where it is gone.
fn changed<'a, T: PartialEq>(
    before: &'a BTreeMap<Name, T>,
    now: &'a BTreeMap<Name, T>,
) -> impl Iterator<Item = (&'a Name, Option<&'a T>)> {
    let gone = before.keys().filter(|key| !now.contains_key(*key)).map(|key| (key, None));
    let other = now.iter().filter(|(key, value)| before.get(*key) != Some(*value));
    gone.chain(other.map(|(key, value)| (key, Some(value))))
}

fn pod_key(key: &Key) -> PodKey {
    PodKey::new(key.namespace().unwrap_or_default(), key.name())
}

async fn follow_pods(objects: Objects, epoch: u64, sender: mpsc::Sender<PolicyNews>) {
    let facts = |object: Pod| {
        let found = pod(&object, None).object?;
        let is_no_peer = !found.counts();
        let facts = PodFacts {
            uid: found.uid.as_ref().to_owned(),
            created: found.created,
            node: found.node,
            labels: found.labels,
            ports: found.ports.into_vec(),
            addresses: found.attachments.iter().flat_map(|a| a.addresses.iter().copied()).collect(),
            is_no_peer,
        };
        (!facts.is_no_peer).then_some(facts)
    };
    let Ok(mut events) = objects.watch::<Pod>().map(facts).subscribe() else { return };
    while let Some(event) = events.next().await {
        let told = match event {
            Event::Applied(key, facts) => OfPods::Pod(pod_key(&key), Some(Box::new(facts))),
            Event::Deleted(key) => OfPods::Pod(pod_key(&key), None),
            Event::Synced => OfPods::PodsKnown,
        };
        if sender.send(PolicyNews::OfPods(epoch, told)).await.is_err() {
            return;
        }
    }
}

async fn follow_attachments(objects: Objects, epoch: u64, sender: mpsc::Sender<PolicyNews>) {
    let facts = |object: NetworkAttachment| {
        let view = AttachmentView::of(object);
        let node = view.node.filter(|_| view.ready)?;
        let pod = PodKey::new(view.namespace.as_str(), view.pod.as_str());
        let network = view.network.as_str().into();
        Some(AttachmentFacts { pod, network, node: node.as_str().into(), addresses: view.addresses })
    };
    let Ok(mut events) = objects.watch::<NetworkAttachment>().map(facts).subscribe() else { return };
    while let Some(event) = events.next().await {
        let told = match event {
            Event::Applied(key, facts) => OfPods::Attachment(pod_key(&key), Some(Box::new(facts))),
            Event::Deleted(key) => OfPods::Attachment(pod_key(&key), None),
            Event::Synced => OfPods::AttachmentsKnown,
        };
        if sender.send(PolicyNews::OfPods(epoch, told)).await.is_err() {
            return;
        }
    }
}

/// Watches one kind of policies.
#[derive(Clone)]
struct PolicyKindWatch {
    objects: Objects,
    sender: mpsc::Sender<PolicyNews>,
    /// Tells what is wrong with a policy, unless it is another component's to do that.
    recorder: Option<EventRecorder>,
}

impl PolicyKindWatch {
    async fn of_crd<K: Object + Serialize>(
        self,
        place: usize,
        kind: Kind,
        convert: fn(&K) -> Converted<Policy>,
    ) {
        loop {
            match self.objects.serves::<K>().await {
                Some(true) => return self.served::<K>(place, kind, convert).await,
                Some(false) if self.sender.send(PolicyNews::KindKnown(place)).await.is_err() => return,
                Some(false) | None => {}
            }
            tokio::time::sleep(DISCOVERY_INTERVAL.mul_f64(0.5 + jitter())).await;
        }
    }

    async fn served<K: Object + Serialize>(
        self,
        place: usize,
        kind: Kind,
        convert: fn(&K) -> Converted<Policy>,
    ) {
        let recorder = self.recorder.clone();
        let has_status = matches!(kind, Kind::Cluster | Kind::Admin | Kind::BaselineAdmin);
        let read = move |object: K| -> Option<Box<SeenPolicy>> {
            let converted = convert(&object);
            for problem in converted.problems.iter().take(MAX_PROBLEMS) {
                if let Some(recorder) = &recorder {
                    tell_narrowed(recorder, reference(&object), problem);
                }
            }
            let status = has_status.then(|| {
                let problems = converted.problems.iter().take(MAX_PROBLEMS).map(ToString::to_string);
                let (generation, is_used) = (object.meta().generation, converted.object.is_some());
                StatusFacts::new(generation, status_of(&object).as_ref(), is_used, problems.collect())
            });
            Some(Box::new(SeenPolicy { policy: converted.object, reference: reference(&object), status }))
        };
        let Ok(mut events) = self.objects.watch::<K>().map(read).subscribe() else { return };
        while let Some(event) = events.next().await {
            let name = |key: &Key| PolicyName {
                kind,
                namespace: key.namespace().unwrap_or_default().into(),
                name: key.name().into(),
            };
            let told = match event {
                Event::Applied(key, policy) => PolicyNews::Policy(name(&key), Some(policy)),
                Event::Deleted(key) => PolicyNews::Policy(name(&key), None),
                Event::Synced => PolicyNews::KindKnown(place),
            };
            if self.sender.send(told).await.is_err() {
                return;
            }
        }
    }
}

fn tell_narrowed(recorder: &EventRecorder, policy: ObjectReference, what: &impl std::fmt::Display) {
    let note = format!("Part of this policy is ignored: {what}.");
    recorder.tell(EventNote::warning(policy, "PolicyNarrowed", "Enforce", note));
}

/// The status of an object of a kind that has one.
fn status_of<K: Serialize>(object: &K) -> Option<Value> {
    serde_json::to_value(object).ok()?.get_mut("status").map(Value::take)
}

fn reference<K: Object>(object: &K) -> ObjectReference {
    let meta = object.meta();
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        namespace: meta.namespace.clone(),
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        ..ObjectReference::default()
    }
}
