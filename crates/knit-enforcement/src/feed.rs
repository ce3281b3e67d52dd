//! What the agent knows anyway, passed on to the worker: namespaces, pods of this node, Networks, addresses.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use ipnet::IpNet;
use knit_api::{LiveConnections, PolicyEnforcement};
use knit_node::Core;
use knit_node::world::World;
use knit_policy::model::{Name, PodKey};
use knit_types::sync::Locked as _;
use tokio::sync::watch;

use crate::cache::Kept;
use crate::kinds::Arrived;
use crate::local::Remembered;
use crate::worker::{Message, Settings, Summary, Told};

/// What all parts of the enforcement share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) core: Core,
    pub(crate) kept: Kept,
    pub(crate) remembered: Remembered,
    pub(crate) summary: watch::Receiver<Summary>,
    arrived: watch::Sender<Arrived>,
    sender: Sender<Message>,
    /// Held from when pods of this node are read until they have been told.
    reading: Mutex<()>,
}

impl Shared {
    pub(crate) fn new(core: Core, sender: Sender<Message>, summary: watch::Receiver<Summary>) -> Self {
        let kept = Kept::open(&core.config().state_dir);
        let remembered = Remembered::new(kept.pods());
        Self {
            core,
            kept,
            remembered,
            summary,
            arrived: watch::Sender::default(),
            sender,
            reading: Mutex::default(),
        }
    }

    /// Tells the worker something that was noticed now.
    pub(crate) fn tell(&self, told: Told) {
        self.tell_at(Instant::now(), told);
    }

    /// Tells the worker something that was noticed at this time.
    pub(crate) fn tell_at(&self, at: Instant, told: Told) {
        // Whoever waits for an answer of a worker that has ended is told that there is none.
        let _ = self.sender.send(Message { told, at });
    }

    /// Notes that policies of a kind are known.
    pub(crate) fn arrived(&self, change: impl FnOnce(&mut Arrived)) {
        self.arrived.send_modify(change);
    }

    /// Pods of this node are told in the order in which they were read: what was read before a pod was
    /// recorded, and is told after it was admitted, would take away what is in force about it.
    pub(crate) fn reading(&self) -> MutexGuard<'_, ()> {
        self.reading.locked()
    }

    /// Everything that the agent knows, and that this is all of it.
    fn tell_complete(&self) {
        let _reading = self.reading();
        let world = self.core.world().get();
        // Of one snapshot: who is told that this is all must not find a part of it missing.
        world.namespaces.keys().for_each(|name| self.tell_namespace(&world, name));
        world.networks.keys().for_each(|name| self.tell_settings(&world, name));
        // What is made of records is compared with the kernel.
        self.tell_locals_of(&world);
        self.tell(Told::Complete);
    }

    /// The labels of a namespace, or that it is gone. Under the lock, as all that is told of a snapshot: what
    /// an older one says is not told after a newer one.
    fn tell_namespace(&self, world: &World, name: &str) {
        let labels = world.namespaces.get(name).map(|labels| labels_of(labels));
        self.tell(Told::Namespace(name.into(), labels));
    }

    /// What an operator says about policies in a Network.
    fn tell_settings(&self, world: &World, name: &str) {
        let network = world.networks.get(name).map(|network| network.object());
        let spec = network.and_then(|network| network.spec.policy.as_ref());
        let settings = Settings {
            enforced: spec.is_none_or(|policy| policy.enforcement == PolicyEnforcement::Knit),
            cut_connections: spec.is_none_or(|policy| policy.live_connections == LiveConnections::Cut),
            has_router: network.is_none_or(|network| network.spec.topology.has_router()),
        };
        self.tell(Told::Settings(Name::from(name), settings));
    }

    /// All pods of this node, as they are recorded and known.
    pub(crate) fn tell_locals(&self) {
        let _reading = self.reading();
        self.tell_locals_of(&self.core.world().get());
    }

    fn tell_locals_of(&self, world: &World) {
        let (pods, strangers) = self.remembered.locals(&self.core, world);
        self.tell(Told::Locals(pods, strangers));
        self.kept.pods_changed();
    }

    /// The pods of this node that have a name.
    pub(crate) fn tell_local(&self, namespace: &str, name: &str) {
        let _reading = self.reading();
        let locals = self.remembered.named(&self.core, &self.core.world().get(), namespace, name);
        let pods = locals.into_iter().map(|local| local.pod).collect();
        self.tell(Told::Local(PodKey::new(namespace, name), pods));
        self.kept.pods_changed();
    }

    /// Returns when everything that policies depend on has arrived, or that of the last run counts; false if
    /// that will never be.
    async fn complete(&self) -> bool {
        // After the ledger was lost, what is in force is of pods that nobody has recorded yet.
        self.core.sandboxes().until_whole().await;
        let mut arrived = self.arrived.subscribe();
        let Ok(away) = arrived.wait_for(Arrived::all).await.map(|arrived| arrived.away) else { return false };
        let mut world = self.core.world().subscribe();
        let kept = self.kept.before.is_some();
        let known = |world: &Arc<World>| {
            let (synced, before) = (world.synced, world.before);
            let namespaces = synced.namespaces || (before.namespaces_away && before.kept);
            // Pods come from where policies come from. The last run may have ended before it had written what
            // it knew of the newest ones: taken for pods without labels, they would lose what is in force.
            // Where there were no policies, what pods are was not kept, and nobody asks for it.
            let pods_known = || self.kept.had_no_policies() || self.remembered.knows_all(&self.core);
            let as_before = || (away || before.namespaces_away) && kept && pods_known();
            namespaces && (synced.pods || as_before())
        };
        world.wait_for(known).await.is_ok()
    }
}

/// Passes on what the agent's snapshot of the cluster says, forever.
pub(crate) async fn follow_world(shared: Arc<Shared>) {
    let mut changes = shared.core.world().subscribe();
    let mut seen: Option<Arc<World>> = None;
    loop {
        // Let go of before it is looked at: that reads it again, and would wait for a writer that waits for
        // us.
        let now = changes.borrow_and_update().clone();
        look(&shared, seen.as_deref(), &now);
        seen = Some(now);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Tells the worker when everything has arrived, and keeps what is known on disk from then on.
pub(crate) async fn complete(shared: Arc<Shared>) {
    let arrived = async {
        let complete = shared.complete().await;
        if complete {
            shared.tell_complete();
        }
        complete
    };
    shared.kept.write(&shared.remembered, arrived).await;
}

fn look(shared: &Shared, seen: Option<&World>, now: &World) {
    let empty = World::default();
    let before = seen.unwrap_or(&empty);
    if !Arc::ptr_eq(&before.namespaces, &now.namespaces) {
        for (name, _) in changed(&before.namespaces, &now.namespaces) {
            let _reading = shared.reading();
            shared.tell_namespace(&shared.core.world().get(), name);
        }
    }
    if !Arc::ptr_eq(&before.pods, &now.pods) {
        for ((namespace, name), _) in changed(&before.pods, &now.pods) {
            shared.tell_local(namespace, name);
        }
    }
    if !Arc::ptr_eq(&before.networks, &now.networks) {
        for (name, _) in changed(&before.networks, &now.networks) {
            let _reading = shared.reading();
            shared.tell_settings(&shared.core.world().get(), name);
        }
    }
    let own = |world: &World| world.nodes.get(shared.core.node()).cloned();
    if seen.is_none() || own(before) != own(now) {
        shared.tell(Told::NodeAddresses(node_addresses(&shared.core, now)));
    }
}

/// Labels as policies know them.
pub(crate) fn labels_of(labels: &BTreeMap<String, String>) -> knit_policy::model::Labels {
    labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// What in a router is the node's own: its addresses, and those of the links to routers.
pub(crate) fn node_addresses(core: &Core, world: &World) -> Vec<IpNet> {
    let own = world.nodes.get(core.node());
    let own = own.iter().flat_map(|node| node.addresses.iter().chain(&node.others));
    let links = core.routers().map(|routers| routers.uplink_ranges()).unwrap_or_default();
    own.copied().map(IpNet::from).chain(links).collect()
}

/// What differs between two maps: with what it is now, or nothing where it is gone.
fn changed<'a, K: Ord, T: PartialEq>(
    before: &'a BTreeMap<K, T>,
    now: &'a BTreeMap<K, T>,
) -> impl Iterator<Item = (&'a K, Option<&'a T>)> {
    let gone = before.keys().filter(|key| !now.contains_key(*key)).map(|key| (key, None));
    let other = now.iter().filter(|(key, value)| before.get(*key) != Some(*value));
    gone.chain(other.map(|(key, value)| (key, Some(value))))
}
