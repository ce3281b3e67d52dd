//! Cluster services that Networks reach over their uplinks (rule 38): translated in the node, behind the
//! router that judges, so that policies need to know what they lead to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_api::names::DEFAULT_NETWORK;
use knit_node::world::World;
use knit_objects::{Event, Key, Objects};
use knit_policy::kubernetes::aliases;
use knit_policy::model::{Alias, Name};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::feed::Shared;
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
    _tasks: JoinSet<()>,
}

enum News {
    Service(Reference, Option<Box<Service>>),
    Slice(Reference, Key, Option<Box<EndpointSlice>>),
}

/// Follows the Services that Networks list, once there are policies, for ever.
pub(crate) async fn follow(shared: Arc<Shared>, objects: Objects) {
    let mut summary = shared.summary.clone();
    if summary.wait_for(|summary| summary.policies > 0).await.is_err() {
        return;
    }
    let (sender, mut inbox) = mpsc::channel(QUEUE);
    let mut followed: BTreeMap<Reference, Followed> = BTreeMap::new();
    let mut told: BTreeMap<Name, Vec<Alias>> = BTreeMap::new();
    let mut world = shared.core.world().subscribe();
    loop {
        let listed = listed(&world.borrow_and_update().clone());
        let wanted: BTreeSet<&Reference> = listed.values().flatten().collect();
        followed.retain(|reference, _| wanted.contains(reference));
        for reference in wanted {
            followed.entry(reference.clone()).or_insert_with(|| Followed {
                _tasks: watch(&objects, reference, &sender),
                ..Followed::default()
            });
        }
        let gone: Vec<Name> = told.keys().filter(|network| !listed.contains_key(*network)).cloned().collect();
        for network in gone {
            told.remove(&network);
            shared.tell(Told::Aliases(network, Vec::new()));
        }
        for (network, services) in &listed {
            let now: Vec<Alias> =
                services.iter().filter_map(|s| followed.get(s)).flat_map(Followed::aliases).collect();
            if told.get(network) != Some(&now) {
                told.insert(network.clone(), now.clone());
                shared.tell(Told::Aliases(network.clone(), now));
            }
        }
        tokio::select! {
            news = inbox.recv() => match news {
                Some(News::Service(reference, service)) => {
                    if let Some(of) = followed.get_mut(&reference) {
                        of.service = service.map(|service| *service);
                    }
                }
                Some(News::Slice(reference, key, slice)) => {
                    if let Some(of) = followed.get_mut(&reference) {
                        match slice {
                            Some(slice) => drop(of.slices.insert(key, *slice)),
                            None => drop(of.slices.remove(&key)),
                        }
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

impl Followed {
    fn aliases(&self) -> Vec<Alias> {
        let slices: Vec<&EndpointSlice> = self.slices.values().collect();
        self.service.iter().flat_map(|service| aliases(service, &slices)).collect()
    }
}

/// The Services that each Network reaches over its uplink.
fn listed(world: &World) -> BTreeMap<Name, BTreeSet<Reference>> {
    let others = world.networks.iter().filter(|(name, _)| *name != DEFAULT_NETWORK);
    let services = others.map(|(name, network)| {
        let all = network.cluster_services();
        let all = all.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())).collect();
        (Name::from(name.as_str()), all)
    });
    services.filter(|(_, all): &(Name, BTreeSet<Reference>)| !all.is_empty()).collect()
}

/// Follows one Service and its endpoints, and nothing else.
fn watch(objects: &Objects, reference: &Reference, sender: &mpsc::Sender<News>) -> JoinSet<()> {
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
    let (Ok(mut services), Ok(mut slices)) = (services, slices) else { return tasks };
    let (reference, sender) = (reference.clone(), sender.clone());
    let (of_slices, to) = (reference.clone(), sender.clone());
    tasks.spawn(async move {
        while let Some(event) = services.next().await {
            let news = match event {
                Event::Applied(_, service) => News::Service(reference.clone(), Some(Box::new(service))),
                Event::Deleted(_) => News::Service(reference.clone(), None),
                Event::Synced => continue,
            };
            if sender.send(news).await.is_err() {
                return;
            }
        }
    });
    tasks.spawn(async move {
        while let Some(event) = slices.next().await {
            let news = match event {
                Event::Applied(key, slice) => News::Slice(of_slices.clone(), key, Some(Box::new(slice))),
                Event::Deleted(key) => News::Slice(of_slices.clone(), key, None),
                Event::Synced => continue,
            };
            if to.send(news).await.is_err() {
                return;
            }
        }
    });
    tasks
}
