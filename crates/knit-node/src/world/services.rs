//! The few Services that Networks list: each is followed by its name, and no other is read.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use knit_objects::{Event, Key, Objects};
use tokio::task::{AbortHandle, JoinSet};

use super::World;
use super::feed::{EventNews, apply, pair_of};
use crate::core::Core;

type Name = (String, String);

/// Follows the Services that Networks list.
pub(super) async fn follow(core: Core, objects: Objects) {
    let mut changes = core.world().subscribe();
    let mut tasks = JoinSet::new();
    let mut followed: BTreeMap<Name, AbortHandle> = BTreeMap::new();
    let mut networks = None;
    loop {
        let world = Arc::clone(&changes.borrow_and_update());
        if networks.as_ref().is_none_or(|known| !Arc::ptr_eq(known, &world.networks)) {
            networks = Some(Arc::clone(&world.networks));
            let wanted = listed_services(&world);
            followed.retain(|name, task| {
                let stays = wanted.contains(name);
                if !stays {
                    task.abort();
                }
                stays
            });
            forget_others(&core, &wanted);
            for name in wanted {
                followed
                    .entry(name.clone())
                    .or_insert_with(|| tasks.spawn(follow_one(core.clone(), objects.clone(), name)));
            }
        }
        drop(world);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn forget_others(core: &Core, wanted: &BTreeSet<Name>) {
    core.world().update_if(|world| {
        let changed = world.services.keys().any(|name| !wanted.contains(name));
        if changed {
            Arc::make_mut(&mut world.services).retain(|name, _| wanted.contains(name));
        }
        world.networks_revision += u64::from(changed);
        changed
    });
}

async fn follow_one(core: Core, objects: Objects, (namespace, name): Name) {
    // With what is known from before the start: if it is not there when the list has arrived it is gone, and
    // its address may be another Service's.
    let known = core.world().get().services.get(&(namespace.clone(), name.clone())).cloned();
    let key = Key::namespaced(namespace.as_str(), name.as_str());
    let events = objects
        .watch::<Service>()
        .namespace(namespace)
        .fields(format!("metadata.name={name}"))
        .map(|service: Service| Some(cluster_ips(&service)))
        .seed(known.map(|ips| (key, ips)))
        .subscribe();
    let mut events = match events {
        Ok(events) => events,
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            return tracing::error!(service = name, error, "cannot follow a Service of clusterServices");
        }
    };
    while let Some(event) = events.next().await {
        if event != Event::Synced {
            core.world().update_if(|world| {
                let changed = apply(&mut world.services, event, pair_of) == EventNews::Changed;
                world.networks_revision += u64::from(changed);
                changed
            });
        }
    }
}

fn listed_services(world: &World) -> BTreeSet<(String, String)> {
    let listed = world.networks.values().flat_map(|network| network.cluster_services());
    listed.map(|(namespace, name)| (namespace.to_owned(), name.to_owned())).collect()
}

fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let ips = spec.and_then(|s| s.cluster_ips.as_ref()).into_iter().flatten();
    ips.chain(spec.and_then(|s| s.cluster_ip.as_ref()))
        .filter_map(|ip| ip.parse().ok())
        .collect::<BTreeSet<IpAddr>>()
        .into_iter()
        .collect()
}
