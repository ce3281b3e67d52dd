//! Cluster services that Networks reach over their uplinks (rule 38): translated in the node, behind the
//! router that judges, so that policies need to know what they lead to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_api::names::DEFAULT_NETWORK;
use knit_node::world::World;
use knit_objects::{Event, Key, Objects, Subscription};
use knit_policy::kubernetes::aliases;
use knit_policy::model::{Alias, Name};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cache::KeptAlias;
use crate::feed::Shared;
use crate::kinds::now_away;
use crate::worker::Told;

/// A Service's namespace and name.
type Reference = (String, String);

/// Events that wait before a watch is held up.
const QUEUE: usize = 64;

/// One listed Service, with the tasks that follow it.
#[derive(Default)]
struct Followed {
    service: Option<Service>,
    slices: BTreeMap<Key, EndpointSlice>,
    /// Whether the Service has arrived, or is not there, and its endpoints.
    synced: (bool, bool),
    /// Nobody answers, and what the last run knew counts.
    away: bool,
    /// What the last run knew.
    before: Option<Vec<Alias>>,
    _tasks: JoinSet<()>,
}

enum News {
    Service(Option<Box<Service>>),
    Slice(Key, Option<Box<EndpointSlice>>),
    ServiceSynced,
    SlicesSynced,
    Away,
}

/// Follows the Services that Networks list, once there are policies, forever.
pub(crate) async fn follow(shared: Arc<Shared>, objects: Objects) {
    let mut summary = shared.summary.clone();
    if summary.wait_for(|summary| summary.policies > 0).await.is_err() {
        return;
    }
    let (sender, mut inbox) = mpsc::channel(QUEUE);
    let mut followed: BTreeMap<Reference, Followed> = BTreeMap::new();
    let mut told: BTreeMap<Name, Vec<Alias>> = BTreeMap::new();
    let mut known: BTreeSet<Name> = BTreeSet::new();
    let mut world = shared.core.world().subscribe();
    loop {
        let listed = listed(&world.borrow_and_update().clone());
        let wanted: BTreeSet<&Reference> = listed.values().flatten().collect();
        followed.retain(|reference, _| wanted.contains(reference));
        for reference in wanted {
            followed.entry(reference.clone()).or_insert_with(|| Followed {
                before: before(&shared, reference),
                _tasks: watch(&objects, reference, &sender),
                ..Followed::default()
            });
        }
        known.retain(|network| listed.contains_key(network));
        let gone: Vec<Name> = told.keys().filter(|network| !listed.contains_key(*network)).cloned().collect();
        for network in gone {
            told.remove(&network);
            shared.tell(Told::Aliases(network, Vec::new()));
        }
        for (network, services) in &listed {
            let all = || services.iter().filter_map(|service| followed.get(service));
            let now: Vec<Alias> = all().flat_map(Followed::aliases).collect();
            if told.get(network).map_or(&[][..], Vec::as_slice) != now {
                told.insert(network.clone(), now.clone());
                shared.tell(Told::Aliases(network.clone(), now));
            }
            if all().all(Followed::is_known) && known.insert(network.clone()) {
                shared.tell(Told::AliasesKnown(network.clone()));
            }
        }
        tokio::select! {
            news = inbox.recv() => match news {
                Some((reference, news)) => {
                    if let Some(of) = followed.get_mut(&reference) {
                        of.take(news);
                        of.keep(&shared, &reference);
                    }
                }
                None => return,
            },
            changed = world.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// What the last run knew of a Service.
fn before(shared: &Shared, (namespace, name): &Reference) -> Option<Vec<Alias>> {
    let kept = shared.kept.before.as_ref()?.aliases.get(&format!("{namespace}/{name}"))?;
    Some(kept.iter().filter_map(KeptAlias::alias).collect())
}

impl Followed {
    fn take(&mut self, news: News) {
        match news {
            News::Service(service) => self.service = service.map(|service| *service),
            News::Slice(key, Some(slice)) => drop(self.slices.insert(key, *slice)),
            News::Slice(key, None) => drop(self.slices.remove(&key)),
            News::ServiceSynced => self.synced.0 = true,
            News::SlicesSynced => self.synced.1 = true,
            News::Away => self.away = true,
        }
    }

    /// For the next start.
    fn keep(&self, shared: &Shared, (namespace, name): &Reference) {
        if self.is_synced() {
            let aliases = self.aliases().iter().map(KeptAlias::of).collect();
            shared.kept.update(|cache| drop(cache.aliases.insert(format!("{namespace}/{name}"), aliases)));
        }
    }

    fn is_synced(&self) -> bool {
        self.synced == (true, true)
    }

    /// Whether it is known what it leads to, also from the last run while nobody answers.
    fn is_known(&self) -> bool {
        self.is_synced() || (self.away && self.before.is_some())
    }

    /// What it leads to: a half of that allows nothing, and would take away what is in force.
    fn aliases(&self) -> Vec<Alias> {
        if !self.is_synced() {
            return self.before.clone().unwrap_or_default();
        }
        let slices: Vec<&EndpointSlice> = self.slices.values().collect();
        self.service.iter().flat_map(|service| aliases(service, &slices)).collect()
    }
}

/// The Services that each Network reaches over its uplink; none of them for most.
fn listed(world: &World) -> BTreeMap<Name, BTreeSet<Reference>> {
    let others = world.networks.iter().filter(|(name, _)| *name != DEFAULT_NETWORK);
    let services = others.map(|(name, network)| {
        let all = network.cluster_services();
        let all = all.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())).collect();
        (Name::from(name.as_str()), all)
    });
    services.collect()
}

/// Follows one Service and its endpoints, and nothing else.
fn watch(objects: &Objects, reference: &Reference, sender: &mpsc::Sender<(Reference, News)>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let (namespace, name) = reference;
    let services =
        objects.watch::<Service>().namespace(namespace).fields(format!("metadata.name={name}")).subscribe();
    let slices = objects
        .watch::<EndpointSlice>()
        .namespace(namespace)
        .labels(format!("kubernetes.io/service-name={name}"))
        .subscribe();
    // Names of Services are fit for selectors.
    let (Ok(services), Ok(slices)) = (services, slices) else { return tasks };
    tasks.spawn(pass_on(services, reference.clone(), sender.clone(), |event| match event {
        Event::Applied(_, service) => News::Service(Some(Box::new(service))),
        Event::Deleted(_) => News::Service(None),
        Event::Synced => News::ServiceSynced,
    }));
    tasks.spawn(pass_on(slices, reference.clone(), sender.clone(), |event| match event {
        Event::Applied(key, slice) => News::Slice(key, Some(Box::new(slice))),
        Event::Deleted(key) => News::Slice(key, None),
        Event::Synced => News::SlicesSynced,
    }));
    tasks
}

async fn pass_on<T: Send>(
    mut events: Subscription<T>,
    reference: Reference,
    sender: mpsc::Sender<(Reference, News)>,
    news: fn(Event<T>) -> News,
) {
    let mut away = events.away();
    loop {
        let news = tokio::select! {
            event = events.next() => match event {
                Some(event) => news(event),
                None => return,
            },
            () = now_away(&mut away) => {
                // Once is enough.
                away = tokio::sync::watch::channel(false).1;
                News::Away
            }
        };
        if sender.send((reference.clone(), news)).await.is_err() {
            return;
        }
    }
}
