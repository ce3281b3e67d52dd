//! The door of NetworkAttachments that users make: a Network is plugged into a running pod, and out of it.
//! What an object asks for is the same request that other doors make, and is carried out by the same
//! pipeline.
//!
//! One pass looks at the objects of namespaces in which something has changed, and decides, without waiting
//! for anything, what is to be done for which pod; workers do it, one per pod and direction. So nobody's
//! objects hold up another's, what is to go never waits for what is to come, and what one tenant does is no
//! work for the objects of others. What fails is tried again after a pause that doubles each time, and is
//! told and logged when it changes only.

mod look;
mod objects;
mod pace;
mod state;
mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_api::NetworkAttachment;
use knit_ledger::SandboxRecord;
use knit_objects::Objects;
use knit_runtime::{Pod, SandboxId};
use knit_types::sync::Locked;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::Core;
use crate::world::World;
use objects::uid_of;
use pace::RefusalFacts;
use state::{State, lock};
use work::{ReportedStatus, Worker};

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

/// Whether the pods of a namespace are the same ones in all that objects depend on.
fn same_pods(world: &World, before: &World, namespace: &str) -> bool {
    let of = |world: &World| -> Vec<(String, bool)> {
        let from = (namespace.to_owned(), String::new());
        let of_namespace = world.pods.range(from..).take_while(|((of, _), _)| of == namespace);
        of_namespace.map(|((_, name), pod)| (name.clone(), pod.host_network)).collect()
    };
    of(world) == of(before)
}
