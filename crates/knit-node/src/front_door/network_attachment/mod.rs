//! The door of NetworkAttachments that users make: a Network is plugged into a running pod, and out of it.
//! What an object asks for is the same request that other doors make, and is carried out by the same
//! pipeline.
//!
//! One pass looks at the objects of namespaces in which something has changed, and decides, without waiting
//! for anything, what is to be done for which pod; workers do it, one per pod and direction. So nobody's
//! objects hold up another's, what is to go never waits for what is to come, and what one tenant does is no
//! work for the objects of others. What fails is tried again after a pause that doubles each time, and is
//! told and logged when it changes only.

mod pace;
mod work;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use knit_api::{NetworkAttachment, NetworkAttachmentStatus, conditions, names};
use knit_ledger::{AttachmentState, SandboxRecord};
use knit_objects::Objects;
use knit_runtime::{Pod, SandboxId};
use knit_types::sync::Locked;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::Core;
use crate::netns;
use crate::request::{Door, ObjectDoor};
use crate::world::{Labels, World};
use pace::{AttemptPace, RefusalFacts};
use work::{ReportedStatus, Worker, says_the_same};

/// The shortest time between two passes.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// All namespaces are looked at this often.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);
/// How many pods of one namespace are plugged into at the same time.
const PODS_AT_ONCE: usize = 4;
/// How many objects a worker takes at most before others of its pod have their turn.
const OBJECTS_PER_TURN: usize = 16;
/// How many objects of one namespace a node works on.
pub const PER_NAMESPACE: usize = 256;
/// How many interfaces a pod gets by objects.
pub const PER_POD: usize = 32;

/// The namespace and name of an object, or of a pod.
type ObjectKey = (String, String);

/// An object that is not plugged in yet, and the sandbox that it is for.
type Waiting<'w> = (&'w ObjectKey, &'w Arc<NetworkAttachment>, &'w SandboxRecord);

/// Follows users' NetworkAttachments.
#[derive(Debug)]
pub struct ObjectsDoor {
    core: Core,
    objects: Objects,
    state: Arc<Mutex<State>>,
    workers: JoinSet<Lane>,
    running: BTreeSet<Lane>,
    /// Namespaces that are to be looked at.
    dirty: BTreeSet<String>,
    /// When others are to be looked at again.
    later: BTreeMap<String, Instant>,
    seen: Seen,
    /// Counts namespaces that were looked at, and objects in them.
    looks: Looks,
}

/// What was seen of the rest of the cluster.
#[derive(Debug)]
struct Seen {
    world: Arc<World>,
    /// Counts changes of the Networks.
    networks: u64,
    /// Whether it was known which Networks are primary ones.
    primaries: bool,
    /// Whether all objects had arrived.
    objects: bool,
    /// When all namespaces were looked at last.
    all: Option<Instant>,
}

/// How much was looked at.
#[derive(Clone, Debug, Default)]
pub struct Looks(Arc<Mutex<(u64, u64)>>);

/// Which worker does something: one for what comes to a pod, and another one for what goes.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Lane {
    pod: ObjectKey,
    leaving: bool,
}

/// What workers leave behind for the next pass.
#[derive(Debug, Default)]
struct State {
    /// What was said last in the status of each object.
    told: BTreeMap<Item, WrittenStatus>,
    /// When each may be tried again.
    pace: BTreeMap<(bool, Item), AttemptPace>,
    /// Objects that have our finalizer, as far as we wrote it.
    held: BTreeSet<Item>,
    /// Objects that we have let go, in this version: what comes of it has not arrived yet.
    let_go: BTreeMap<Item, Option<String>>,
}

/// What was said in the status of an object, and what that said before: while it still does, ours has not
/// arrived. Whatever else it says was written by somebody else meanwhile.
#[derive(Debug)]
struct WrittenStatus {
    told: ReportedStatus,
    before: Option<NetworkAttachmentStatus>,
}

/// An object: another one of the same name is another object.
#[derive(Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
struct Item {
    place: ObjectKey,
    uid: Option<String>,
}

/// Something to do for one object.
#[derive(Clone, Debug)]
struct Job {
    item: Item,
    /// None for one that is gone.
    object: Option<Arc<NetworkAttachment>>,
    task: Task,
    facts: RefusalFacts,
}

#[derive(Clone, Debug)]
enum Task {
    /// Plug it into this pod, in this sandbox.
    Plug(Pod),
    /// Say something in its status.
    Tell(ReportedStatus),
    /// Unplug it from this sandbox, if there is anything to unplug, and let it go.
    Leave(Option<SandboxId>),
    /// Unplug it from this sandbox, if its object is really gone, or another node's.
    LeaveUnseen(SandboxId),
}

// === impl ObjectsDoor ===

impl ObjectsDoor {
    /// Ready to follow.
    #[must_use]
    pub fn new(core: Core, objects: Objects) -> Self {
        let seen =
            Seen { world: core.world().get(), networks: 0, primaries: false, objects: false, all: None };
        Self {
            core,
            objects,
            state: Arc::default(),
            workers: JoinSet::new(),
            running: BTreeSet::new(),
            dirty: BTreeSet::new(),
            later: BTreeMap::new(),
            seen,
            looks: Looks::default(),
        }
    }

    /// Counts what is looked at.
    #[must_use]
    pub fn looks(&self) -> Looks {
        self.looks.clone()
    }

    /// Follows forever.
    pub async fn serve(mut self) {
        let core = self.core.clone();
        let (mut worlds, mut users) = (core.world().subscribe(), core.world().users().subscribe());
        let mut sandboxes = core.shown();
        let mut next = Instant::now();
        loop {
            // The first change is taken at once; those that come right behind it are taken together.
            tokio::time::sleep_until(next).await;
            next = Instant::now() + PASS_INTERVAL;
            worlds.borrow_and_update();
            users.borrow_and_update();
            sandboxes.borrow_and_update();
            let again = self.pass(Instant::now());
            tokio::select! {
                changed = worlds.changed() => if changed.is_err() { return },
                changed = users.changed() => if changed.is_err() { return },
                // A pod that comes later may be the one that is waited for.
                changed = sandboxes.changed() => if changed.is_err() { return },
                Some(done) = self.workers.join_next() => self.finished(done),
                () = tokio::time::sleep_until(again) => {}
            }
        }
    }

    /// One pass over the namespaces in which something has changed: workers begin what is to be done. Gives
    /// the time of the next one, if nothing changes.
    fn pass(&mut self, now: Instant) -> Instant {
        while let Some(done) = self.workers.try_join_next() {
            self.finished(done);
        }
        let world = self.core.world().get();
        self.notice(&world, now);
        for namespace in std::mem::take(&mut self.dirty) {
            match self.look_at(&world, &namespace, now) {
                Some(again) => drop(self.later.insert(namespace, again)),
                None => drop(self.later.remove(&namespace)),
            }
        }
        let all = self.seen.all.map_or(now, |all| all + FULL_PASS_INTERVAL);
        self.later.values().copied().min().map_or(all, |again| again.min(all))
    }

    /// Finds out which namespaces are to be looked at.
    fn notice(&mut self, world: &Arc<World>, now: Instant) {
        let core = self.core.clone();
        let users = core.world().users();
        self.dirty.extend(users.take_changed());
        self.dirty.extend(self.core.sandboxes().books().take_touched());
        self.dirty.extend(self.later.extract_if(.., |_, at| *at <= now).map(|(namespace, _)| namespace));
        let before = std::mem::replace(&mut self.seen.world, Arc::clone(world));
        let networks =
            !Arc::ptr_eq(&world.networks, &before.networks) || !Arc::ptr_eq(&world.classes, &before.classes);
        self.seen.networks += u64::from(networks);
        let primaries = std::mem::replace(&mut self.seen.primaries, world.knows_primaries());
        let synced = std::mem::replace(&mut self.seen.objects, users.is_synced());
        let due = self.seen.all.is_none_or(|all| all + FULL_PASS_INTERVAL <= now);
        if networks || due || primaries != self.seen.primaries || synced != self.seen.objects {
            self.seen.all = Some(now);
            self.dirty.extend(users.namespaces());
            self.dirty.extend(self.core.sandboxes().books().namespaces());
            return;
        }
        if Arc::ptr_eq(&world.namespaces, &before.namespaces) && Arc::ptr_eq(&world.pods, &before.pods) {
            return;
        }
        // What objects wait for: who their namespaces are, and whether their pods are there.
        for namespace in users.namespaces() {
            if world.namespaces.get(&namespace) != before.namespaces.get(&namespace)
                || !same_pods(world, &before, &namespace)
            {
                self.dirty.insert(namespace);
            }
        }
    }

    /// Looks at the objects of a namespace; when that is to be done again, if nothing changes.
    fn look_at(&mut self, world: &World, namespace: &str, now: Instant) -> Option<Instant> {
        let of_namespace = self.core.world().users().of_namespace(namespace);
        let named = |(name, object)| ((namespace.to_owned(), name), object);
        let objects: BTreeMap<ObjectKey, Arc<NetworkAttachment>> =
            of_namespace.into_iter().map(named).collect();
        self.looks.count(objects.len());
        let mut jobs: BTreeMap<Lane, Vec<Job>> = BTreeMap::new();
        self.look(world, &objects, &mut jobs);
        if self.seen.objects {
            self.look_for_vanished(namespace, &objects, &mut jobs);
            lock(&self.state).retain(namespace, |item| {
                objects.get(&item.place).is_some_and(|object| uid_of(object) == item.uid)
            });
        }
        jobs.into_iter().filter_map(|(lane, jobs)| self.begin(lane, jobs, now)).min()
    }

    /// Lets a worker begin with what is due; gives the time when the rest is.
    fn begin(&mut self, lane: Lane, jobs: Vec<Job>, now: Instant) -> Option<Instant> {
        // When it ends, its namespace is looked at again.
        if self.running.contains(&lane) {
            return None;
        }
        let mut again: Option<Instant> = None;
        let mut due: Vec<(u32, Job)> = Vec::new();
        let state = lock(&self.state);
        for job in jobs {
            let pace = state.pace.get(&(lane.leaving, job.item.clone()));
            let ready = pace.map_or(now, |pace| pace.ready(&job.facts));
            if ready <= now {
                due.push((pace.map_or(0, |pace| pace.attempts), job));
            } else {
                again = Some(again.map_or(ready, |again| again.min(ready)));
            }
        }
        drop(state);
        let busy = self.running.iter().filter(|l| !l.leaving && l.pod.0 == lane.pod.0).count();
        if due.is_empty() || (!lane.leaving && busy >= PODS_AT_ONCE) {
            return again;
        }
        // Who failed least comes first: what is new does not wait for what never works.
        due.sort_by_key(|(attempts, _)| *attempts);
        due.truncate(OBJECTS_PER_TURN);
        let worker = Worker::new(self.core.clone(), self.objects.clone(), Arc::clone(&self.state));
        self.running.insert(lane.clone());
        self.workers.spawn(async move {
            for (_, job) in due {
                worker.work(job).await;
            }
            lane
        });
        again
    }

    fn finished(&mut self, done: Result<Lane, tokio::task::JoinError>) {
        match done {
            Ok(lane) => {
                self.running.remove(&lane);
                // Those that waited for it are of its namespace.
                self.dirty.insert(lane.pod.0);
            }
            Err(error) => {
                tracing::error!(%error, "internal error while attaching");
                // Nobody says which one it was; those that run are not begun twice, since each pod has its
                // lock.
                let lanes = std::mem::take(&mut self.running);
                self.dirty.extend(lanes.into_iter().map(|lane| lane.pod.0));
            }
        }
    }

    /// What is to be done for the objects of a namespace that are there.
    fn look(
        &self,
        world: &World,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
        jobs: &mut BTreeMap<Lane, Vec<Job>>,
    ) {
        let records = self.records(objects);
        let mut waiting: BTreeMap<&str, Vec<Waiting<'_>>> = BTreeMap::new();
        let mut plugged: BTreeMap<&str, usize> = BTreeMap::new();
        let mut add = |place: &ObjectKey,
                       object: &Arc<NetworkAttachment>,
                       leaving: bool,
                       task: Task,
                       facts: RefusalFacts| {
            let item = Item { place: place.clone(), uid: uid_of(object) };
            let lane = Lane { pod: (place.0.clone(), object.spec.pod.clone()), leaving };
            jobs.entry(lane).or_default().push(Job { item, object: Some(Arc::clone(object)), task, facts });
        };
        for (place, object) in objects {
            let record = records.get(&(place.0.clone(), object.spec.pod.clone()));
            let own = record.and_then(|record| find(record, place, object));
            if object.metadata.deletion_timestamp.is_some() {
                if own.is_some()
                    || (self.is_held(place, object) && self.is_ours(world, place, object, record.is_some()))
                {
                    let sandbox = record.filter(|_| own.is_some()).map(|r| r.sandbox().clone());
                    add(place, object, true, Task::Leave(sandbox), RefusalFacts::default());
                }
                continue;
            }
            let told = match (record, own) {
                // What an earlier object of this name asked for goes first.
                (Some(record), None) if has_name(record, place) => continue,
                (Some(record), None) => {
                    waiting.entry(&place.0).or_default().push((place, object, record));
                    continue;
                }
                // The ledger was damaged, and forgot what it was made for.
                (Some(record), Some(own)) if is_forgotten(own) => {
                    *plugged.entry(&place.0).or_default() += 1;
                    let facts = self.facts(world, &place.0, record);
                    add(place, object, false, Task::Plug(record.runtime_pod()), facts);
                    continue;
                }
                (Some(_), Some(own)) => {
                    *plugged.entry(&place.0).or_default() += 1;
                    own.made().map(|attachment| ReportedStatus::attached(world, self.core.node(), attachment))
                }
                (None, _) => self.without_pod(world, place, object),
            };
            if let Some(told) = told
                && !self.was_told(place, object, &told)
            {
                add(place, object, false, Task::Tell(told), RefusalFacts::default());
            }
        }
        if !world.knows_primaries() {
            return;
        }
        for (namespace, mut objects) in waiting {
            // The oldest first, so that it is always the same ones that are too many.
            objects.sort_by_key(|(place, object, _)| (object.metadata.creation_timestamp.clone(), &place.1));
            let room = PER_NAMESPACE.saturating_sub(plugged.get(namespace).copied().unwrap_or_default());
            for (n, (place, object, record)) in objects.into_iter().enumerate() {
                let has = by_objects(record);
                let refusal = if n >= room {
                    Some(format!(
                        "namespace {namespace} has more than {PER_NAMESPACE} NetworkAttachments for pods of \
                         node {}: \
                         delete some of them",
                        self.core.node()
                    ))
                } else if has >= PER_POD {
                    Some(format!(
                        "pod {namespace}/{} already has {PER_POD} interfaces from NetworkAttachments: \
                        delete one of them",
                        object.spec.pod
                    ))
                } else {
                    None
                };
                let facts = self.facts(world, namespace, record);
                match refusal {
                    None => add(place, object, false, Task::Plug(record.runtime_pod()), facts),
                    Some(message) => {
                        let told =
                            ReportedStatus::Failed(conditions::network_attachment::REASON_REFUSED, message);
                        if !self.was_told(place, object, &told) {
                            add(place, object, false, Task::Tell(told), facts);
                        }
                    }
                }
            }
        }
    }

    /// What is to be unplugged because its object is gone, or another one has its name.
    fn look_for_vanished(
        &self,
        namespace: &str,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
        jobs: &mut BTreeMap<Lane, Vec<Job>>,
    ) {
        let books = self.core.sandboxes().books();
        for record in books.records_in(namespace) {
            let (Some(pod), sandbox) = (record.pod(), record.sandbox()) else { continue };
            for entry in record.attachments() {
                // What is leaving already, the periodic pass takes away.
                if matches!(entry.state(), AttachmentState::Detaching(_)) {
                    continue;
                }
                let Door::Object(door) = &entry.details().door else { continue };
                let Some((namespace, name)) = door.name.split_once('/') else { continue };
                let place = (namespace.to_owned(), name.to_owned());
                let there = objects.get(&place);
                if there.is_some_and(|object| is_of(door, entry.plan(), &place, object)) {
                    continue;
                }
                let lane = Lane { pod: (pod.namespace.clone(), pod.name.clone()), leaving: true };
                let item = Item { place, uid: door.uid.clone() };
                let task = match there {
                    Some(_) => Task::Leave(Some(sandbox.clone())),
                    None => Task::LeaveUnseen(sandbox.clone()),
                };
                let job = Job { item, object: None, task, facts: RefusalFacts::default() };
                jobs.entry(lane).or_default().push(job);
            }
        }
    }

    /// The newest sandbox of each pod of this node that some object names.
    fn records(
        &self,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
    ) -> BTreeMap<ObjectKey, SandboxRecord> {
        let named: BTreeSet<(&str, &str)> =
            objects.iter().map(|(place, o)| (place.0.as_str(), o.spec.pod.as_str())).collect();
        let mut found: Vec<SandboxRecord> = {
            let books = self.core.sandboxes().books();
            let of_pod = |(namespace, name): (&str, &str)| -> Vec<SandboxRecord> {
                books.records_of(namespace, name).cloned().collect()
            };
            named.into_iter().flat_map(of_pod).collect()
        };
        found.retain(|record| !netns::is_gone(record.netns()));
        found.sort_by_key(|record| Reverse(record.created_at()));
        let mut newest = BTreeMap::new();
        for record in found {
            if let Some(pod) = record.pod() {
                newest.entry((pod.namespace.clone(), pod.name.clone())).or_insert(record);
            }
        }
        newest
    }

    /// Whether it is for this node to let an object go.
    fn is_ours(
        &self,
        world: &World,
        place: &ObjectKey,
        object: &NetworkAttachment,
        has_record: bool,
    ) -> bool {
        let node = self.core.node();
        has_record
            || object.status.as_ref().and_then(|s| s.node.as_deref()) == Some(node)
            || world.pods.contains_key(&(place.0.clone(), object.spec.pod.clone()))
    }

    /// Whether an object has our finalizer.
    fn is_held(&self, place: &ObjectKey, object: &NetworkAttachment) -> bool {
        let item = Item { place: place.clone(), uid: uid_of(object) };
        let state = lock(&self.state);
        let done =
            state.let_go.get(&item).is_some_and(|version| *version == object.metadata.resource_version);
        !done && (has_finalizer(object) || state.held.contains(&item))
    }

    /// What is said of an object whose pod has no sandbox here: it is another node's, or gone, or has no
    /// network of its own.
    fn without_pod(
        &self,
        world: &World,
        place: &ObjectKey,
        object: &NetworkAttachment,
    ) -> Option<ReportedStatus> {
        let message = match world.pods.get(&(place.0.clone(), object.spec.pod.clone())) {
            Some(pod) if pod.host_network => {
                "the pod uses its node's network (hostNetwork): only a pod with its own network can have \
                an additional one"
            }
            Some(_) => return None,
            None if object.status.as_ref().and_then(|s| s.node.as_deref()) == Some(self.core.node()) => {
                "the pod is gone"
            }
            None => return None,
        };
        Some(ReportedStatus::Failed(conditions::network_attachment::REASON_NO_POD, message.to_owned()))
    }

    /// Whether an object's status says this already.
    fn was_told(&self, place: &ObjectKey, object: &NetworkAttachment, told: &ReportedStatus) -> bool {
        let item = Item { place: place.clone(), uid: uid_of(object) };
        let state = lock(&self.state);
        state.told.get(&item).is_some_and(|said| said.holds(told, object, self.core.node()))
    }

    /// What a refusal depends on.
    fn facts(&self, world: &World, namespace: &str, record: &SandboxRecord) -> RefusalFacts {
        let labels: Option<Arc<Labels>> = world.namespaces.get(namespace).cloned();
        let has = record.attachments().iter().map(|a| {
            let plan = a.plan();
            (plan.interface.to_string(), plan.network.clone())
        });
        RefusalFacts { networks: self.seen.networks, labels, has: has.collect() }
    }
}

// === impl Looks ===

impl Looks {
    fn count(&self, objects: usize) {
        let mut counts = self.0.locked();
        counts.0 += 1;
        counts.1 += u64::try_from(objects).unwrap_or(u64::MAX);
    }

    /// How often some namespace was looked at, and how many objects that were.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        *self.0.locked()
    }
}

// === impl State ===

impl State {
    /// Forgets what is known of a namespace's objects that are not there.
    fn retain(&mut self, namespace: &str, exists: impl Fn(&Item) -> bool) {
        let first = Item { place: (namespace.to_owned(), String::new()), uid: None };
        let is_of = |item: &Item| item.place.0 == namespace;
        fn gone<'a, V: 'a>(
            items: impl Iterator<Item = (&'a Item, V)>,
            is_of: impl Fn(&Item) -> bool,
            exists: impl Fn(&Item) -> bool,
        ) -> Vec<Item> {
            let of = items.map(|(item, _)| item).take_while(|item| is_of(item));
            of.filter(|item| !exists(item)).cloned().collect()
        }
        for item in gone(self.told.range(first.clone()..), is_of, &exists) {
            self.told.remove(&item);
        }
        for item in gone(self.held.range(first.clone()..).map(|item| (item, ())), is_of, &exists) {
            self.held.remove(&item);
        }
        for item in gone(self.let_go.range(first.clone()..), is_of, &exists) {
            self.let_go.remove(&item);
        }
        let coming = self.pace.range((false, first)..(true, Item::default()));
        for item in gone(coming.map(|((_, item), pace)| (item, pace)), is_of, &exists) {
            self.pace.remove(&(false, item));
        }
    }
}

// === impl WrittenStatus ===

impl WrittenStatus {
    /// Whether an object says this, or will as soon as it arrives.
    fn holds(&self, told: &ReportedStatus, object: &NetworkAttachment, node: &str) -> bool {
        self.told == *told
            && (object.status == self.before
                || object.status.as_ref().is_some_and(|status| says_the_same(status, &told.status(node))))
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.locked()
}

fn uid_of(object: &NetworkAttachment) -> Option<String> {
    object.metadata.uid.clone()
}

fn has_finalizer(object: &NetworkAttachment) -> bool {
    object.metadata.finalizers.iter().flatten().any(|f| f == names::ATTACHMENT_FINALIZER)
}

/// How many interfaces a sandbox has by objects.
fn by_objects(record: &SandboxRecord) -> usize {
    let objects = |a: &&knit_ledger::Attachment| matches!(a.details().door, Door::Object(_));
    record.attachments().iter().filter(objects).count()
}

/// Whether a sandbox has an interface that an object of this name asked for.
fn has_name(record: &SandboxRecord, place: &ObjectKey) -> bool {
    let (namespace, name) = place;
    let mut doors = record.attachments().iter().map(|a| &a.details().door);
    doors.any(|door| matches!(door, Door::Object(door) if door.name == format!("{namespace}/{name}")))
}

/// The interface that this very object asked for.
fn find<'r>(
    record: &'r SandboxRecord,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> Option<&'r knit_ledger::Attachment> {
    record.attachments().iter().find(|entry| belongs(record, entry, place, object))
}

/// Whether an interface was made for this very object. Where the ledger was damaged and forgot that, what the
/// object's status says counts.
fn belongs(
    record: &SandboxRecord,
    entry: &knit_ledger::Attachment,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> bool {
    let (plan, status) = (entry.plan(), object.status.as_ref());
    let details = entry.details();
    match &details.door {
        Door::Object(door) => is_of(door, plan, place, object),
        door if !details.main && door.is_forgotten() => {
            plan.network == object.spec.network
                && status.and_then(|s| s.sandbox_id.as_deref()) == Some(record.sandbox().as_str())
                && status.and_then(|s| s.interface.as_deref()) == Some(plan.interface.as_str())
        }
        _ => false,
    }
}

/// Whether nobody knows any more what an interface was made for.
fn is_forgotten(entry: &knit_ledger::Attachment) -> bool {
    entry.details().door.is_forgotten()
}

/// Whether an interface was made for this very object, and not for one that had its name before. Where no uid
/// is known (a folder's objects have none, and earlier versions did not record it) it is what the object asks
/// for that counts.
fn is_of(
    door: &ObjectDoor,
    plan: &knit_ledger::AttachmentPlan,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> bool {
    let (namespace, name) = place;
    door.name == format!("{namespace}/{name}")
        && (door.uid.is_none() || door.uid == object.metadata.uid)
        && plan.network == object.spec.network
        && object.spec.interface.as_ref().is_none_or(|interface| plan.interface == interface.as_str())
}

/// Whether the pods of a namespace are the same ones in all that objects depend on.
fn same_pods(world: &World, before: &World, namespace: &str) -> bool {
    let of = |world: &World| -> Vec<(String, bool)> {
        let from = (namespace.to_owned(), String::new());
        let of_namespace = world.pods.range(from..).take_while(|((of, _), _)| of == namespace);
        of_namespace.map(|((_, name), pod)| (name.clone(), pod.host_network)).collect()
    };
    of(world) == of(before)
}
