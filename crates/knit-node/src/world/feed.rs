//! From objects to snapshots: one task per kind follows it and brings the [`super::World`] up to date.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, PodSpec};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use knit_api::{AddressBlock, NetworkAttachment, NetworkClass, NetworkStatus, conditions};
use knit_model::{Network, NodeAddresses, service_ranges};
use knit_objects::{Event, Key, Objects, Subscription};
use knit_types::NetworkName;
use knit_types::Protocol;
use tokio::task::JoinSet;

use super::announced::AnnouncedView;
use super::blocks::{Blocks, KnownBlock};
use super::boot::BootLog;
use super::{Before, NodeView, PodPort, PodView, Synced, World, services, slices, users};
use crate::claims::PodClaim;
use crate::core::Core;
use crate::front_door::annotation::wishes;

/// How long changes are gathered before they are written to disk.
const BOOT_CACHE_DELAY: Duration = Duration::from_secs(2);

/// The annotation of a pod that kubelet made to show a static one.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Starts to follow all kinds. What is known from before counts as there until the source says otherwise.
///
/// # Errors
/// Only for a selector that is none.
pub fn start(core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) -> knit_objects::Result<()> {
    let known = core.world().get();
    let named = |k: &String| Key::cluster(k.as_str());

    let seed: Vec<_> =
        known.networks.iter().map(|(k, v)| (Key::cluster(k.as_str()), Arc::clone(v))).collect();
    let networks =
        objects.watch::<knit_api::Network>().map(|n| network_view(n).map(Arc::new)).seed(seed).subscribe()?;
    tasks.spawn(follow_away(core.clone(), networks.away(), |before| &mut before.networks_away));
    tasks.spawn(follow(core.clone(), networks, |world, event| {
        let news = apply(&mut world.networks, event, network_of);
        news.of_networks(|synced| &mut synced.networks, world)
    }));

    let seed: Vec<_> = known.classes.iter().map(|(k, v)| (named(k), Arc::clone(v))).collect();
    let classes = objects.watch::<NetworkClass>().map(|c| Some(Arc::new(c))).seed(seed).subscribe()?;
    tasks.spawn(follow(core.clone(), classes, |world, event| {
        let news = apply(&mut world.classes, event, name_of);
        news.of_networks(|synced| &mut synced.classes, world)
    }));

    let seed: Vec<_> = known.namespaces.iter().map(|(k, v)| (named(k), Arc::clone(v))).collect();
    let namespaces = objects
        .watch::<Namespace>()
        .map(|n| Some(Arc::new(n.metadata.labels.unwrap_or_default())))
        .seed(seed)
        .subscribe()?;
    tasks.spawn(follow_away(core.clone(), namespaces.away(), |before| &mut before.namespaces_away));
    tasks.spawn(follow(core.clone(), namespaces, |world, event| {
        apply(&mut world.namespaces, event, name_of).note(&mut world.synced.namespaces)
    }));

    // A folder has Nodes, AddressBlocks and NetworkAttachments themselves, and no controller that writes
    // slices of them.
    if objects.client().is_some() {
        slices::start(core, objects, tasks)?;
    } else {
        core.world().update(|world| world.block_lists = None);
        follow_objects(core, objects, tasks)?;
    }

    let seed: Vec<_> = known.service_cidrs.iter().map(|(k, v)| (named(k), v.clone())).collect();
    let cidrs = objects.watch::<ServiceCIDR>().map(|c| Some(service_ranges(&c))).seed(seed).subscribe()?;
    tasks.spawn(follow_away(core.clone(), cidrs.away(), |before| &mut before.service_cidrs_away));
    tasks.spawn(follow(core.clone(), cidrs, |world, event| {
        let news = apply(&mut world.service_cidrs, event, name_of);
        news.of_networks(|synced| &mut synced.service_cidrs, world)
    }));

    let pods = objects
        .watch::<Pod>()
        .fields(format!("spec.nodeName={}", core.node()))
        .map(|p| Some(Arc::new(pod_view(p))))
        .subscribe()?;
    tasks.spawn(follow(core.clone(), pods, |world, event| {
        apply(&mut world.pods, event, pair_of).note(&mut world.synced.pods)
    }));

    users::start(core, objects, tasks)?;
    tasks.spawn(services::follow(core.clone(), objects.clone()));
    Ok(())
}

/// Follows all Nodes, AddressBlocks and NetworkAttachments themselves.
fn follow_objects(core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) -> knit_objects::Result<()> {
    let known = core.world().get();
    let named = |k: &String| Key::cluster(k.as_str());
    let before = |block: &Arc<knit_model::AddressBlock>| KnownBlock {
        block: Arc::clone(block),
        created: None,
        reclaim: None,
    };
    let mut right = Blocks::default();
    for (name, block) in &*known.blocks {
        right.change(name, Some(before(block)));
    }
    let seed: Vec<_> = known.blocks.iter().map(|(k, v)| (named(k), before(v))).collect();
    let blocks = objects.watch::<AddressBlock>().map(KnownBlock::of).seed(seed).subscribe()?;
    tasks.spawn(follow_away(core.clone(), blocks.away(), |before| &mut before.blocks_away));
    tasks.spawn(follow(core.clone(), blocks, move |world, event| {
        let news = apply_blocks(&mut world.blocks, &mut right, event);
        news.of_networks(|synced| &mut synced.blocks, world)
    }));

    let own = core.node().to_owned();
    let seed: Vec<_> = known.nodes.iter().map(|(k, v)| (named(k), Arc::clone(v))).collect();
    let nodes =
        objects.watch::<Node>().map(move |n| Some(Arc::new(node_view(&n, &own)))).seed(seed).subscribe()?;
    tasks.spawn(follow_away(core.clone(), nodes.away(), |before| &mut before.nodes_away));
    tasks.spawn(follow(core.clone(), nodes, |world, event| {
        let news = apply(&mut world.nodes, event, name_of);
        news.of_networks(|synced| &mut synced.nodes, world)
    }));

    let named = |((namespace, name), view): (&(String, String), &Arc<AnnouncedView>)| {
        (Key::namespaced(namespace.as_str(), name.as_str()), Arc::clone(view))
    };
    let seed: Vec<_> = known.announced.iter().map(named).collect();
    let announced = objects.watch::<NetworkAttachment>();
    let announced = announced.map(|a| AnnouncedView::of(&a).map(Arc::new)).seed(seed).subscribe()?;
    tasks.spawn(follow(core.clone(), announced, |world, event| {
        let changed = apply(&mut world.announced, event, pair_of) == EventNews::Changed;
        world.networks_revision += u64::from(changed);
        changed
    }));
    Ok(())
}

/// Writes what must be known at the next start to disk, whenever it changed.
pub async fn keep(core: Core, log: BootLog) {
    let mut log = Some(log);
    let mut changes = core.world().subscribe();
    loop {
        let world = Arc::clone(&changes.borrow_and_update());
        if world.is_synced() {
            let own = Arc::new(world.own_blocks(core.node()));
            core.world().kept().may_be(Arc::clone(&own));
            let Some(mut writer) = log.take() else { return };
            let written = tokio::task::spawn_blocking(move || {
                let result = writer.store(&world);
                (writer, result)
            });
            let Ok((writer, result)) = written.await else { return };
            log = Some(writer);
            match result {
                Ok(_) => {
                    if core.world().kept().is(own) {
                        core.networks().changed();
                    }
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "cannot write the cache of Networks");
                }
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(BOOT_CACHE_DELAY).await;
    }
}

async fn follow<T: Send + 'static>(
    core: Core,
    mut events: Subscription<T>,
    mut change: impl FnMut(&mut World, Event<T>) -> bool + Send + 'static,
) {
    while let Some(event) = events.next().await {
        core.world().update_if(|world| change(world, event));
    }
}

/// Notes whether nobody answers.
pub(super) async fn follow_away(
    core: Core,
    mut away: tokio::sync::watch::Receiver<bool>,
    place: impl Fn(&mut Before) -> &mut bool + Send + 'static,
) {
    loop {
        let now = *away.borrow_and_update();
        core.world().update_if(|world| std::mem::replace(place(&mut world.before), now) != now);
        if away.changed().await.is_err() {
            return;
        }
    }
}

/// What an event says that was not known.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum EventNews {
    /// Nothing: most of what changes in pods, nodes and statuses is not for us, and nobody is woken for it.
    None,
    /// Something else than before.
    Changed,
    /// Everything has arrived.
    Synced,
}

impl EventNews {
    /// Notes that everything has arrived; whether there is news.
    fn note(self, synced: &mut bool) -> bool {
        *synced |= self == Self::Synced;
        self != Self::None
    }

    /// The same, of something that Networks are made of.
    fn of_networks(self, place: impl Fn(&mut Synced) -> &mut bool, world: &mut World) -> bool {
        let news = self.note(place(&mut world.synced));
        world.networks_revision += u64::from(news);
        news
    }
}

/// Brings a map up to date. What has no key is not in it.
pub(super) fn apply<K: Clone + Ord, T: Clone + PartialEq, O: Into<Option<K>>>(
    map: &mut Arc<BTreeMap<K, T>>,
    event: Event<T>,
    key_of: impl Fn(&Key) -> O,
) -> EventNews {
    let key_of = |key: &Key| key_of(key).into();
    let changed = match event {
        Event::Applied(key, value) => {
            let Some(key) = key_of(&key) else { return EventNews::None };
            let new = map.get(&key) != Some(&value);
            if new {
                Arc::make_mut(map).insert(key, value);
            }
            new
        }
        Event::Deleted(key) => {
            let Some(key) = key_of(&key) else { return EventNews::None };
            map.contains_key(&key) && Arc::make_mut(map).remove(&key).is_some()
        }
        Event::Synced => return EventNews::Synced,
    };
    if changed { EventNews::Changed } else { EventNews::None }
}

/// The same for blocks, of which those that overlap an older one do not count.
fn apply_blocks(
    map: &mut Arc<BTreeMap<String, Arc<knit_model::AddressBlock>>>,
    right: &mut Blocks,
    event: Event<KnownBlock>,
) -> EventNews {
    let (key, given) = match event {
        Event::Applied(key, given) => (key, Some(given)),
        Event::Deleted(key) => (key, None),
        Event::Synced => return EventNews::Synced,
    };
    let mut news = EventNews::None;
    for (name, block) in right.change(key.name(), given) {
        let event = match block {
            Some(block) => Event::Applied(Key::cluster(name), block),
            None => Event::Deleted(Key::cluster(name)),
        };
        if apply(map, event, name_of) == EventNews::Changed {
            news = EventNews::Changed;
        }
    }
    news
}

fn network_of(key: &Key) -> Option<NetworkName> {
    key.name().parse().ok()
}

pub(super) fn name_of(key: &Key) -> String {
    key.name().to_owned()
}

pub(super) fn pair_of(key: &Key) -> (String, String) {
    (key.namespace().unwrap_or_default().to_owned(), key.name().to_owned())
}

/// What is needed to know of a node; more of the one called `own`.
pub(super) fn node_view(node: &Node, own: &str) -> NodeView {
    let NodeAddresses { internal, others, unreadable: _ } = NodeAddresses::of(node);
    let is_own = node.metadata.name.as_deref() == Some(own);
    let labels = node.metadata.labels.clone().filter(|_| is_own).unwrap_or_default();
    NodeView { addresses: internal, others, uid: node.metadata.uid.clone(), labels }
}

/// A Network without what nodes have no use for: the cluster's counts of addresses change with every pod, and
/// each change would be one for every node, down to what it keeps on disk for the next boot.
fn network_view(network: knit_api::Network) -> Option<Network> {
    let mut view = knit_api::Network::new("", network.spec);
    let metadata = network.metadata;
    view.metadata.name = metadata.name;
    view.metadata.uid = metadata.uid;
    view.metadata.generation = metadata.generation;
    // Of those that select a namespace the oldest has it.
    view.metadata.creation_timestamp = metadata.creation_timestamp;
    view.metadata.deletion_timestamp = metadata.deletion_timestamp;
    view.status = network.status.map(|status| NetworkStatus {
        conditions: status
            .conditions
            .into_iter()
            .filter(|c| c.type_ == conditions::network::ACCEPTED)
            .collect(),
        id: status.id,
        ..NetworkStatus::default()
    });
    let view = Network::try_from(view);
    view.inspect_err(|error| tracing::warn!(%error, "a Network cannot be read and is left out")).ok()
}

fn pod_view(pod: Pod) -> PodView {
    let claims = PodClaim::of(&pod);
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let done = matches!(phase, Some("Succeeded" | "Failed"));
    let annotations = pod.metadata.annotations.as_ref();
    let ips = pod.status.iter().flat_map(|s| s.pod_ips.iter().flatten());
    PodView {
        addresses: ips.filter_map(|ip| ip.ip.parse().ok()).collect(),
        uid: pod.metadata.uid.clone(),
        mirror: annotations.is_some_and(|annotations| annotations.contains_key(MIRROR)),
        wishes: annotations.map(wishes).unwrap_or_default(),
        host_network: pod.spec.as_ref().and_then(|s| s.host_network).unwrap_or_default(),
        ending: done || pod.metadata.deletion_timestamp.is_some(),
        ports: pod.spec.as_ref().map(named_ports).unwrap_or_default(),
        created: pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        labels: pod.metadata.labels.unwrap_or_default(),
        claims,
    }
}

/// The ports with names, of containers and of init containers that go on running.
fn named_ports(spec: &PodSpec) -> Vec<PodPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let containers = spec.containers.iter().chain(sidecars);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(PodPort {
                name: port.name.clone().filter(|name| !name.is_empty())?,
                protocol: Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"))?,
                number: u16::try_from(port.container_port).ok().filter(|number| *number != 0)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn network(free: i64, id: u32) -> Event<Arc<Network>> {
        let network: knit_api::Network = serde_json::from_value(json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network",
            "metadata": {"name": "blue", "resourceVersion": free.to_string()},
            "spec": {"topology": "Layer3", "subnets": [{"cidr": "10.1.0.0/16"}]},
            "status": {"id": id, "addresses": [{"family": "IPv4", "used": 9, "free": free}]},
        }))
        .expect("a Network");
        Event::Applied(Key::cluster("blue"), Arc::new(network_view(network).expect("a name")))
    }

    #[test]
    fn counts_of_addresses_are_no_news_to_nodes() {
        let mut world = World::default();
        let mut after = |event| {
            let news = apply(&mut world.networks, event, network_of);
            (news.of_networks(|synced| &mut synced.networks, &mut world), world.networks_revision)
        };
        assert_eq!(after(network(5, 1)), (true, 1));
        assert_eq!(after(network(4, 1)), (false, 1));
        assert_eq!(after(network(4, 2)), (true, 2), "its number is");
        assert_eq!(after(Event::Synced), (true, 3));
        assert_eq!(after(Event::Deleted(Key::cluster("blue"))), (true, 4));
        assert_eq!(after(Event::Deleted(Key::cluster("blue"))), (false, 4));
        assert!(world.synced.networks);
    }

    #[test]
    fn a_pod_that_only_gets_on_wakes_nobody() {
        let store = super::super::WorldStore::default();
        let mut changes = store.subscribe();
        let mut pods = |phase: &str, ip: &str| {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": {"containers": []},
                "status": {"phase": phase, "podIP": ip},
            }))
            .expect("a pod");
            let event = Event::Applied(Key::namespaced("shop", "web"), Arc::new(pod_view(pod)));
            store.update_if(|world| apply(&mut world.pods, event, pair_of).note(&mut world.synced.pods));
            let woken = changes.has_changed().expect("the store is there");
            changes.mark_unchanged();
            woken
        };
        assert!(pods("Pending", ""));
        assert!(!pods("Pending", "10.0.0.3"));
        assert!(!pods("Running", "10.0.0.3"));
        assert!(pods("Succeeded", "10.0.0.3"), "it is ending");
    }
}
