//! What other nodes have, from slices: their addresses from NodeSlices, their blocks and what does not follow
//! from them from the BlockSlices of the Networks that this node has. Of Nodes and AddressBlocks themselves
//! only this node's own are followed, so that what an agent receives grows with its node and not with the
//! cluster.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use knit_api::{AddressBlock, AddressBlockSpec, BlockSlice, NodeSlice, SliceInterface, SliceNode, names};
use knit_model::Network;
use knit_model::slices::Slices;
use knit_objects::{Event, Key, Objects, Subscription};
use knit_types::NetworkName;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use super::announced::AnnouncedView;
use super::blocks::{Blocks, KnownBlock};
use super::feed::{EventNews, apply, follow_away, name_of, node_view};
use super::{BlockList, NodeView, World, WorldStore, is_by_blocks};
use crate::core::Core;

/// What one slice says.
struct Part<V> {
    index: u32,
    complete: bool,
    items: BTreeMap<String, V>,
}

/// A set of slices, as it arrives.
struct Arriving<V> {
    slices: Slices<String, V>,
    /// The number of each slice, by its object.
    index_of: HashMap<Key, u32>,
}

type Changes<V> = Vec<(String, Option<V>)>;

/// What one BlockSlice says.
struct NetworkPart {
    blocks: Part<KnownBlock>,
    /// Nothing where the controller is of an earlier version: what is known stays as it is.
    announced: Option<Part<Arc<AnnouncedView>>>,
}

/// Starts to follow Nodes and blocks.
pub(super) fn start(core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) -> knit_objects::Result<()> {
    let known = core.world().get();
    let node = core.node().to_owned();
    let named = |name: &str| Key::cluster(name);

    let view = node.clone();
    let seed = known.nodes.get(&node).map(|view| (named(&node), Arc::clone(view)));
    let own = objects
        .watch::<Node>()
        .fields(format!("metadata.name={node}"))
        .map(move |n| {
            let is_own = n.metadata.name.as_deref() == Some(&view);
            is_own.then(|| Arc::new(node_view(&n, &view)))
        })
        .seed(seed)
        .subscribe()?;
    let slices = objects.watch::<NodeSlice>().map(|slice| node_part(&slice)).subscribe()?;
    tasks.spawn(follow_away(core.clone(), slices.away(), |before| &mut before.nodes_away));
    tasks.spawn(follow_nodes(core.clone(), own, slices));

    let before = |(name, block): (&String, &Arc<knit_model::AddressBlock>)| {
        let reclaim = known.reclaimed.get(name).cloned();
        (named(name), KnownBlock { block: Arc::clone(block), created: None, reclaim })
    };
    let seed: Vec<_> = known.blocks.iter().filter(|(_, b)| b.node() == node).map(before).collect();
    let own = objects
        .watch::<AddressBlock>()
        .fields(format!("spec.node={node}"))
        .map(move |block| KnownBlock::of(block).filter(|given| given.block.node() == node))
        .seed(seed)
        .subscribe()?;
    tasks.spawn(follow_away(core.clone(), own.away(), |before| &mut before.blocks_away));
    let (feed, arriving) = BlockFeed::new(core.clone(), objects.clone());
    tasks.spawn(feed.run(own, arriving));
    tasks.spawn(tell_if_missing(core.clone()));
    Ok(())
}

/// How long slices may take after the agent's start before it says that there are none.
const SLICES_TIMEOUT: Duration = Duration::from_secs(60);

/// Says so, in the log and on the Node, if nobody writes slices: until somebody does, this node knows of no
/// others but what it knew at an earlier start.
async fn tell_if_missing(core: Core) {
    while let Some(message) = missing(core.world(), SLICES_TIMEOUT).await {
        tracing::error!("{message}");
        core.report().say_of_node("SlicesMissing", message);
        // Said once. Who repairs it sees that it helped.
        while core.world().wait(Instant::now() + SLICES_TIMEOUT, arrived).await.is_err() {}
        tracing::info!("slices have arrived");
    }
}

fn arrived(world: &World) -> Result<(), bool> {
    if world.synced.nodes { Ok(()) } else { Err(world.before.nodes_away) }
}

/// Waits for slices, and says what to do if there are none after this time although the API server answers.
/// Nothing once they are there.
async fn missing(world: &WorldStore, patience: Duration) -> Option<String> {
    loop {
        match world.wait(Instant::now() + patience, arrived).await {
            Ok(()) => return None,
            // Nobody answers: that is told elsewhere, and says nothing about slices.
            Err(true) => {}
            Err(false) => {
                return Some(format!(
                    "no complete set of NodeSlices has arrived for {} s, although the API server \
                     answers: until it does, this node learns of no other nodes. Check that a controller is \
                     running that is not older than this agent, and that the CRDs and roles of deploy/ are \
                     applied",
                    patience.as_secs()
                ));
            }
        }
    }
}

// === impl Arriving ===

impl<V: Clone + PartialEq> Arriving<V> {
    fn known(known: impl IntoIterator<Item = (String, V)>) -> Self {
        Self { slices: Slices::known(known), index_of: HashMap::new() }
    }

    fn take(&mut self, event: Event<Part<V>>) -> Changes<V> {
        match event {
            Event::Applied(key, part) => {
                self.index_of.insert(key, part.index);
                self.slices.change(part.index, Some((part.items, part.complete)))
            }
            Event::Deleted(key) => match self.index_of.remove(&key) {
                Some(index) => self.slices.change(index, None),
                None => Vec::new(),
            },
            Event::Synced => self.slices.synced(),
        }
    }
}

/// What a NodeSlice says. One whose name is not that of its number is nobody's.
fn node_part(slice: &NodeSlice) -> Option<Part<Arc<NodeView>>> {
    let spec = &slice.spec;
    if slice.metadata.name.as_deref() != Some(&format!("nodes-{}", spec.index)) {
        return None;
    }
    let view = |node: &SliceNode| {
        let read = |list: &[String]| -> Vec<IpAddr> { list.iter().filter_map(|a| a.parse().ok()).collect() };
        let (addresses, others) = (read(&node.addresses), read(&node.others));
        Arc::new(NodeView { addresses, others, uid: node.uid.clone(), ..NodeView::default() })
    };
    let items = spec.nodes.iter().map(|node| (node.name.clone(), view(node))).collect();
    Some(Part { index: spec.index, complete: spec.complete, items })
}

/// What a BlockSlice says.
fn block_part(slice: BlockSlice) -> Option<NetworkPart> {
    let spec = slice.spec;
    if slice.metadata.name.as_deref() != Some(&format!("{}-{}", spec.network, spec.index)) {
        return None;
    }
    let network = NetworkName::new(&spec.network).ok()?;
    let mut items = BTreeMap::new();
    for block in spec.blocks {
        let written = AddressBlockSpec {
            network: spec.network.clone(),
            node: block.node,
            ipv4: block.ipv4,
            ipv6: block.ipv6,
        };
        match knit_model::AddressBlock::of(&written) {
            Ok(read) => {
                let created = block.created.map(|time| time.0);
                items.insert(block.name, KnownBlock { block: Arc::new(read), created, reclaim: None });
            }
            Err(error) => tracing::warn!(
                address_block = block.name,
                error = &error as &dyn std::error::Error,
                "cannot use an AddressBlock"
            ),
        }
    }
    let (index, complete) = (spec.index, spec.complete);
    let view =
        |interface: SliceInterface| Some((interface.attachment.clone(), announced(&network, interface)?));
    let announced = spec.announced.map(|announced| {
        let items = announced.into_iter().filter_map(view).collect();
        Part { index, complete, items }
    });
    Some(NetworkPart { blocks: Part { index, complete, items }, announced })
}

/// What is told of an interface; nothing if it cannot be used. Agents wrote that, each of its own node.
fn announced(network: &NetworkName, interface: SliceInterface) -> Option<Arc<AnnouncedView>> {
    let (namespace, _) = interface.attachment.split_once('/')?;
    let addresses: Vec<IpAddr> = interface.addresses.iter().filter_map(|a| a.parse().ok()).collect();
    Some(Arc::new(AnnouncedView {
        network: network.clone(),
        pod: format!("pod {namespace}/{}", interface.pod),
        node: interface.node,
        addresses: Some(addresses).filter(|addresses| !addresses.is_empty())?,
        mac: interface.mac.parse().ok()?,
    }))
}

/// Follows this node's Node, and the others' in slices.
async fn follow_nodes(
    core: Core,
    mut own: Subscription<Arc<NodeView>>,
    mut slices: Subscription<Part<Arc<NodeView>>>,
) {
    let node = core.node().to_owned();
    let known = core.world().get();
    let others = known.nodes.iter().filter(|(name, _)| **name != node);
    let mut arriving = Arriving::known(others.map(|(name, view)| (name.clone(), Arc::clone(view))));
    drop(known);
    let mut own_arrived = false;
    loop {
        let changes: Changes<Arc<NodeView>> = tokio::select! {
            event = own.next() => match event {
                None => return,
                Some(Event::Applied(key, view)) => vec![(name_of(&key), Some(view))],
                Some(Event::Deleted(key)) => vec![(name_of(&key), None)],
                Some(Event::Synced) => { own_arrived = true; Vec::new() }
            },
            event = slices.next() => match event {
                None => return,
                // Of this node the Node itself says more, and earlier.
                Some(event) => arriving.take(event).into_iter().filter(|(name, _)| *name != node).collect(),
            },
        };
        let arrived = own_arrived && arriving.slices.is_whole();
        core.world().update_if(|world| {
            let mut news = false;
            for (name, view) in changes {
                let event = match view {
                    Some(view) => Event::Applied(Key::cluster(name), view),
                    None => Event::Deleted(Key::cluster(name)),
                };
                news |= apply(&mut world.nodes, event, name_of) == EventNews::Changed;
            }
            news |= arrived && !std::mem::replace(&mut world.synced.nodes, true);
            world.networks_revision += u64::from(news);
            news
        });
    }
}

/// The blocks of this node, and those of all nodes in the Networks that this node has.
struct BlockFeed {
    core: Core,
    objects: Objects,
    /// Which of all that are known count.
    right: Blocks,
    own: BTreeMap<String, KnownBlock>,
    own_synced: bool,
    networks: BTreeMap<NetworkName, Followed>,
    /// What is known from before of Networks that are not followed yet.
    before: BTreeMap<NetworkName, Before>,
    /// Networks of which everything was kept.
    kept: Option<BTreeSet<NetworkName>>,
    watching: JoinSet<()>,
    events: mpsc::Sender<Arrived>,
    generation: u64,
}

/// What is known of a Network from before.
#[derive(Default)]
struct Before {
    blocks: BTreeMap<String, KnownBlock>,
    announced: BTreeMap<String, Arc<AnnouncedView>>,
}

struct Followed {
    blocks: Arriving<KnownBlock>,
    announced: Arriving<Arc<AnnouncedView>>,
    state: BlockList,
    generation: u64,
    task: AbortHandle,
}

/// News of a Network's slices, from the watch with this number.
type Arrived = (NetworkName, u64, FromSlices);

enum FromSlices {
    Event(Event<NetworkPart>),
    Away(bool),
}

/// What slices change of one Network.
#[derive(Default)]
struct Touched {
    blocks: BTreeSet<String>,
    /// With the Network: another one may have an object of that name by now.
    announced: Vec<(NetworkName, String, Option<Arc<AnnouncedView>>)>,
}

/// Events of slices that wait before their watches are held up.
const EVENT_QUEUE: usize = 64;

// === impl Followed ===

impl Followed {
    fn take(&mut self, network: &NetworkName, event: FromSlices) -> Touched {
        let (blocks, announced) = match event {
            FromSlices::Event(Event::Applied(key, part)) => {
                let announced = part.announced.map(|part| Event::Applied(key.clone(), part));
                (
                    self.blocks.take(Event::Applied(key, part.blocks)),
                    announced.map(|event| self.announced.take(event)).unwrap_or_default(),
                )
            }
            FromSlices::Event(Event::Deleted(key)) => {
                (self.blocks.take(Event::Deleted(key.clone())), self.announced.take(Event::Deleted(key)))
            }
            FromSlices::Event(Event::Synced) => {
                (self.blocks.take(Event::Synced), self.announced.take(Event::Synced))
            }
            FromSlices::Away(away) => {
                self.state.away = away;
                Default::default()
            }
        };
        // While the set is incomplete nothing is forgotten: what was whole stays so when somebody deletes
        // slice 0, and pods start whether or not a controller is there to write it again.
        self.state.whole |= self.blocks.slices.is_whole();
        let blocks = blocks.into_iter().map(|(name, _)| name).collect();
        let announced = announced.into_iter().map(|(name, view)| (network.to_owned(), name, view)).collect();
        Touched { blocks, announced }
    }
}

// === impl BlockFeed ===

impl BlockFeed {
    fn new(core: Core, objects: Objects) -> (Self, mpsc::Receiver<Arrived>) {
        let known = core.world().get();
        let (mut right, mut own, mut before) = (Blocks::default(), BTreeMap::new(), BTreeMap::new());
        for (name, block) in &*known.blocks {
            let reclaim = known.reclaimed.get(name).cloned();
            let given = KnownBlock { block: Arc::clone(block), created: None, reclaim };
            right.change(name, Some(given.clone()));
            if block.node() == core.node() {
                own.insert(name.clone(), given);
            } else {
                let of_network: &mut Before = before.entry(block.network().to_owned()).or_default();
                of_network.blocks.insert(name.clone(), given);
            }
        }
        for ((namespace, name), view) in &*known.announced {
            let of_network = before.entry(view.network.clone()).or_default();
            of_network.announced.insert(format!("{namespace}/{name}"), Arc::clone(view));
        }
        let kept = known.block_lists.as_ref().map(|lists| lists.keys().cloned().collect());
        let (events, arriving) = mpsc::channel(EVENT_QUEUE);
        let (networks, watching) = (BTreeMap::new(), JoinSet::new());
        let (own_synced, generation) = (false, 0);
        let feed = Self {
            core,
            objects,
            right,
            own,
            own_synced,
            networks,
            before,
            kept,
            watching,
            events,
            generation,
        };
        (feed, arriving)
    }

    async fn run(mut self, mut own: Subscription<KnownBlock>, mut arriving: mpsc::Receiver<Arrived>) {
        let (mut worlds, mut wanted) = (self.core.world().subscribe(), self.core.world().wanted());
        let mut seen = None;
        loop {
            let world = Arc::clone(&worlds.borrow_and_update());
            let names = wanted.borrow_and_update().clone();
            let now = (Arc::clone(&world.networks), world.synced.networks, names);
            let same = |(networks, synced, names): &(Arc<_>, bool, BTreeSet<NetworkName>)| {
                Arc::ptr_eq(networks, &now.0) && (synced, names) == (&now.1, &now.2)
            };
            if !seen.as_ref().is_some_and(same) {
                self.follow(&followed(&now.0, &now.2), world.synced.networks);
                seen = Some(now);
            }
            drop(world);
            tokio::select! {
                event = own.next() => match event {
                    None => return,
                    Some(event) => self.take_own(event),
                },
                Some((network, generation, event)) = arriving.recv() => {
                    self.take_slices(&network, generation, event);
                }
                changed = worlds.changed() => if changed.is_err() { return },
                changed = wanted.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Follows exactly these Networks.
    fn follow(&mut self, wanted: &BTreeSet<NetworkName>, networks_synced: bool) {
        let mut touched = Touched::default();
        let gone: Vec<NetworkName> = self.networks.keys().filter(|n| !wanted.contains(*n)).cloned().collect();
        for network in gone {
            if let Some(followed) = self.networks.remove(&network) {
                followed.task.abort();
                touched.blocks.extend(followed.blocks.slices.all().keys().cloned());
                let announced = followed.announced.slices.all().keys();
                touched.announced.extend(announced.map(|name| (network.clone(), name.clone(), None)));
            }
        }
        for network in wanted {
            if !self.networks.contains_key(network) {
                self.begin(network);
            }
        }
        // What was kept of Networks that this node does not have any more. Until all Networks are known,
        // one of them may be one that it must follow.
        if networks_synced {
            for (network, before) in std::mem::take(&mut self.before) {
                touched.blocks.extend(before.blocks.into_keys());
                let announced = before.announced.into_keys();
                touched.announced.extend(announced.map(|name| (network.clone(), name, None)));
            }
        }
        self.publish(touched);
    }

    fn begin(&mut self, network: &NetworkName) {
        let known = self.before.remove(network).unwrap_or_default();
        let only = network.to_owned();
        let slices = self
            .objects
            .watch::<BlockSlice>()
            .labels(format!("{}={network}", names::NETWORK_LABEL))
            .map(move |slice: BlockSlice| Some(slice).filter(|s| s.spec.network == only).and_then(block_part))
            .subscribe();
        let mut slices = match slices {
            Ok(slices) => slices,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                return tracing::error!(%network, error, "cannot follow the blocks of a Network");
            }
        };
        self.generation += 1;
        let (generation, name, events) = (self.generation, network.to_owned(), self.events.clone());
        let task = self.watching.spawn(async move {
            let mut away = slices.away();
            loop {
                let event = tokio::select! {
                    event = slices.next() => match event {
                        Some(event) => FromSlices::Event(event),
                        None => return,
                    },
                    Ok(()) = away.changed() => FromSlices::Away(*away.borrow_and_update()),
                };
                if events.send((name.clone(), generation, event)).await.is_err() {
                    return;
                }
            }
        });
        let kept = self.core.world().get().before.kept
            && self.kept.as_ref().is_none_or(|kept| kept.contains(network));
        let state = BlockList { kept, ..BlockList::default() };
        let (blocks, announced) = (Arriving::known(known.blocks), Arriving::known(known.announced));
        self.networks.insert(network.to_owned(), Followed { blocks, announced, state, generation, task });
    }

    fn take_own(&mut self, event: Event<KnownBlock>) {
        let touched = match event {
            Event::Applied(key, given) => {
                self.own.insert(name_of(&key), given);
                Some(name_of(&key))
            }
            Event::Deleted(key) => {
                self.own.remove(key.name());
                Some(name_of(&key))
            }
            Event::Synced => {
                self.own_synced = true;
                None
            }
        };
        self.publish(Touched { blocks: touched.into_iter().collect(), ..Touched::default() });
    }

    fn take_slices(&mut self, network: &NetworkName, generation: u64, event: FromSlices) {
        let followed = self.networks.get_mut(network).filter(|f| f.generation == generation);
        let Some(followed) = followed else { return };
        let touched = followed.take(network, event);
        self.publish(touched);
    }

    /// What is known of a block. Of this node's the objects themselves say more, and earlier.
    fn known(&self, name: &str) -> Option<KnownBlock> {
        if let Some(own) = self.own.get(name) {
            return Some(own.clone());
        }
        let of_others = self.networks.values().map(|followed| followed.blocks.slices.all());
        let before = self.before.values().map(|before| &before.blocks);
        let found = of_others.chain(before).find_map(|known| known.get(name));
        found.filter(|given| given.block.node() != self.core.node()).cloned()
    }

    /// Makes a snapshot with what these blocks are now.
    fn publish(&mut self, touched: Touched) {
        let mut changes = Vec::new();
        for name in touched.blocks {
            let known = self.known(&name);
            changes.extend(self.right.change(&name, known));
        }
        let own_synced = self.own_synced;
        let wanted_back = |(name, own): (&String, &KnownBlock)| Some((name.clone(), own.reclaim.clone()?));
        let reclaimed: BTreeMap<String, String> = self.own.iter().filter_map(wanted_back).collect();
        let states = || self.networks.iter().map(|(name, followed)| (name.clone(), followed.state)).collect();
        self.core.world().update_if(|world| {
            let mut news = false;
            for (name, block) in changes {
                let event = match block {
                    Some(block) => Event::Applied(Key::cluster(name), block),
                    None => Event::Deleted(Key::cluster(name)),
                };
                news |= apply(&mut world.blocks, event, name_of) == EventNews::Changed;
            }
            if *world.reclaimed != reclaimed {
                world.reclaimed = Arc::new(reclaimed);
                news = true;
            }
            for (network, name, view) in touched.announced {
                news |= announce(world, &network, &name, view);
            }
            news |= own_synced && !std::mem::replace(&mut world.synced.blocks, true);
            let same = world.block_lists.as_ref().is_some_and(|lists| {
                lists.len() == self.networks.len()
                    && self.networks.iter().all(|(name, f)| lists.get(name) == Some(&f.state))
            });
            if !same {
                world.block_lists = Some(Arc::new(states()));
                news = true;
            }
            world.networks_revision += u64::from(news);
            news
        });
    }
}

/// Takes what is told of an interface of a Network; whether that is news.
fn announce(world: &mut World, network: &NetworkName, name: &str, view: Option<Arc<AnnouncedView>>) -> bool {
    let Some((namespace, name)) = name.split_once('/') else { return false };
    let place = (namespace.to_owned(), name.to_owned());
    let known = world.announced.get(&place);
    if known == view.as_ref() || (view.is_none() && known.is_none_or(|known| known.network != network)) {
        return false;
    }
    let announced = Arc::make_mut(&mut world.announced);
    match view {
        Some(view) => drop(announced.insert(place, view)),
        None => drop(announced.remove(&place)),
    }
    true
}

/// The Networks whose blocks this node must know: those that it has, and those whose blocks say which
/// addresses are pods'.
fn followed(
    networks: &BTreeMap<NetworkName, Arc<Network>>,
    wanted: &BTreeSet<NetworkName>,
) -> BTreeSet<NetworkName> {
    let by_blocks = networks.iter().filter(|(_, network)| is_by_blocks(network));
    let further = by_blocks.map(|(name, _)| name.clone());
    // Beside another CNI plugin there is no default Network, and nobody writes slices of it.
    let default = networks.contains_key(names::DEFAULT_NETWORK).then(NetworkName::default);
    further.chain(wanted.iter().cloned()).chain(default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_agent_without_slices_served_the_default_network_of_its_own_node_and_said_nothing() {
        let world = WorldStore::default();
        let message = missing(&world, Duration::ZERO).await.expect("there are none");
        assert!(message.contains("Check that a controller is running"), "{message}");
        // While nobody answers, slices are not what is missing.
        world.update(|world| world.before.nodes_away = true);
        let waiting = missing(&world, Duration::from_millis(10));
        let come = async {
            world.update(|world| {
                (world.before.nodes_away, world.synced.nodes) = (false, true);
            });
        };
        assert_eq!(tokio::join!(waiting, come).0, None);
    }

    #[tokio::test]
    async fn pods_did_not_start_after_somebody_deleted_a_slice_and_no_controller_was_there() {
        let written = AddressBlockSpec {
            network: "blue".into(),
            node: "b".into(),
            ipv4: Some("10.2.0.16/28".into()),
            ipv6: None,
        };
        let block = Arc::new(knit_model::AddressBlock::of(&written).expect("a block"));
        let items = [("blue-b".to_owned(), KnownBlock { block, created: None, reclaim: None })].into();
        let mut followed = Followed {
            blocks: Arriving::known([]),
            announced: Arriving::known([]),
            state: BlockList::default(),
            generation: 1,
            task: tokio::spawn(async {}).abort_handle(),
        };
        let announced = Some(Part { index: 0, complete: true, items: BTreeMap::new() });
        let part = NetworkPart { blocks: Part { index: 0, complete: true, items }, announced };
        followed.take(&"blue".into(), FromSlices::Event(Event::Applied(Key::cluster("blue-0"), part)));
        assert!(!followed.state.whole, "other slices may follow");
        followed.take(&"blue".into(), FromSlices::Event(Event::Synced));
        assert!(followed.state.whole);
        let touched =
            followed.take(&"blue".into(), FromSlices::Event(Event::Deleted(Key::cluster("blue-0"))));
        assert!(touched.blocks.is_empty() && followed.state.whole, "nothing is forgotten, and nothing waits");
    }
}
