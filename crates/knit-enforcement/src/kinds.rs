//! Policies of every kind that the cluster serves. The kinds of CRDs are looked for until they are there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use knit_objects::{Event, Kinds, Objects, Scope, jitter};
use knit_policy::kubernetes::{
    AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy, Converted, MultiNetworkPolicy,
    NetworkPolicy, admin_network_policy, baseline_admin_network_policy, cluster_network_policy,
    multi_network_policy, network_policy,
};
use knit_policy::model::{Kind, Policy, PolicyName};
use kube::Resource;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::feed::Shared;
use crate::worker::Told;

/// How often it is looked whether the cluster serves a kind that it did not serve before: until then its
/// policies are not enforced.
const MIN_DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);

/// And how often in a large cluster, whose agents all ask.
const MAX_DISCOVERY_INTERVAL: Duration = Duration::from_secs(60);

/// So much of it is for each node: all agents together ask 20 times a second, for each kind.
const DISCOVERY_PER_NODE: Duration = Duration::from_millis(50);

/// How often that is tried while nobody answers.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// The kinds of a folder, and those of policies that come as CRDs.
#[must_use]
pub fn folder_kinds(kinds: Kinds) -> Kinds {
    kinds
        .with::<ClusterNetworkPolicy>(Scope::Cluster)
        .with::<AdminNetworkPolicy>(Scope::Cluster)
        .with::<BaselineAdminNetworkPolicy>(Scope::Cluster)
        .with::<MultiNetworkPolicy>(Scope::Namespaced)
}

/// Whether policies of each kind are known.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Arrived {
    known: [bool; 5],
    /// Nobody answers, and what the last run left counts.
    pub(crate) away: bool,
}

impl Arrived {
    /// All of them.
    pub(crate) fn all(&self) -> bool {
        self.known.iter().all(|known| *known)
    }
}

/// Follows all kinds.
pub(crate) fn follow(shared: &Arc<Shared>, objects: &Objects, tasks: &mut JoinSet<()>) {
    let each = Each { shared: Arc::clone(shared), objects: objects.clone() };
    let core = each.clone();
    tasks.spawn(async move { core.served::<NetworkPolicy>(0, Kind::Network, network_policy).await });
    tasks.spawn(each.clone().of_crd::<ClusterNetworkPolicy>(1, Kind::Cluster, cluster_network_policy));
    tasks.spawn(each.clone().of_crd::<AdminNetworkPolicy>(2, Kind::Admin, admin_network_policy));
    tasks.spawn(each.clone().of_crd::<BaselineAdminNetworkPolicy>(
        3,
        Kind::BaselineAdmin,
        baseline_admin_network_policy,
    ));
    tasks.spawn(each.of_crd::<MultiNetworkPolicy>(4, Kind::Multi, multi_network_policy));
}

#[derive(Clone)]
struct Each {
    shared: Arc<Shared>,
    objects: Objects,
}

/// An object, as it is told and as it is kept.
struct Seen {
    policy: Option<Policy>,
    version: Option<u64>,
    raw: Value,
}

impl Each {
    /// Follows a kind that may not be served: as soon as it is.
    async fn of_crd<K>(self, place: usize, kind: Kind, convert: fn(&K) -> Converted<Policy>)
    where
        K: Resource<DynamicType = ()>
            + DeserializeOwned
            + Serialize
            + Clone
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        loop {
            match self.objects.serves::<K>().await {
                Some(true) => return self.served::<K>(place, kind, convert).await,
                Some(false) => {
                    self.is_gone(place, kind);
                    let interval = discovery_interval(self.shared.core.world().get().nodes.len());
                    tokio::time::sleep(interval.mul_f64(0.5 + jitter())).await;
                }
                None if self.shared.kept.before.is_some() => {
                    // What the last run knew counts while nobody answers: the watch seeds itself with it. A
                    // kind that is not there is never listed, so that discovery is asked until it answers.
                    tokio::select! {
                        () = self.served::<K>(place, kind, convert) => return,
                        () = self.is_not_served::<K>() => {}
                    }
                }
                None => tokio::time::sleep(RETRY_DELAY.mul_f64(0.5 + jitter())).await,
            }
        }
    }

    /// Returns when the cluster says that it does not serve a kind; never if it does.
    async fn is_not_served<K: Resource<DynamicType = ()>>(&self) {
        loop {
            tokio::time::sleep(RETRY_DELAY.mul_f64(0.5 + jitter())).await;
            match self.objects.serves::<K>().await {
                Some(false) => return,
                Some(true) => std::future::pending::<()>().await,
                None => {}
            }
        }
    }

    /// Nothing is left of a kind that the cluster does not serve, whatever the last run knew of it.
    fn is_gone(&self, place: usize, kind: Kind) {
        let mut known = BTreeMap::new();
        self.shared.kept.update(|cache| known = cache.policies.remove(kind.as_str()).unwrap_or_default());
        for key in known.keys() {
            let (namespace, name) = key.split_once('/').unwrap_or(("", key));
            let name = PolicyName { kind, namespace: namespace.into(), name: name.into() };
            self.shared.tell(Told::DeletePolicy(name));
        }
        self.shared.arrived(|arrived| arrived.known[place] = true);
    }

    /// Follows a kind that is served.
    async fn served<K>(&self, place: usize, kind: Kind, convert: fn(&K) -> Converted<Policy>)
    where
        K: Resource<DynamicType = ()>
            + DeserializeOwned
            + Serialize
            + Clone
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        let seen = move |object: K| -> Option<Seen> {
            let converted = convert(&object);
            for problem in &converted.problems {
                match converted.object {
                    Some(_) => tracing::debug!("part of a policy is ignored: {problem}"),
                    None => tracing::warn!("a policy is ignored: {problem}"),
                }
            }
            let version = object.meta().resource_version.as_ref().and_then(|v| v.parse().ok());
            let raw = trimmed(&object)?;
            Some(Seen { policy: converted.object, version, raw })
        };
        let before = self.shared.kept.before.as_ref();
        let known = before.and_then(|before| before.policies.get(kind.as_str())).into_iter().flatten();
        let seed: Vec<_> = known
            .filter_map(|(_, raw)| {
                let object: K = serde_json::from_value(raw.clone()).ok()?;
                Some((knit_objects::Key::of(&object), seen(object)?))
            })
            .collect();
        let watch = self.objects.watch::<K>().map(seen).seed(seed).subscribe();
        let Ok(mut events) = watch else { return };
        let mut away = events.away();
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = now_away(&mut away), if self.shared.kept.before.is_some() => {
                    self.shared.arrived(|arrived| {
                        arrived.known[place] = true;
                        arrived.away = true;
                    });
                    // Once is enough: what arrives later is told as it comes.
                    away = watch::channel(false).1;
                    continue;
                }
            };
            let Some(event) = event else { return };
            self.take(place, kind, event);
        }
    }

    fn take(&self, place: usize, kind: Kind, event: Event<Seen>) {
        let name = |key: &knit_objects::Key| PolicyName {
            kind,
            namespace: key.namespace().unwrap_or_default().into(),
            name: key.name().into(),
        };
        let at = Instant::now();
        match event {
            Event::Applied(key, seen) => {
                self.shared.tell_at(
                    at,
                    match seen.policy {
                        Some(policy) => Told::SetPolicy(Box::new(policy), seen.version),
                        None => Told::DeletePolicy(name(&key)),
                    },
                );
                self.shared.kept.update(|cache| {
                    cache
                        .policies
                        .entry(kind.as_str().to_owned())
                        .or_default()
                        .insert(key.to_string(), seen.raw);
                });
            }
            Event::Deleted(key) => {
                self.shared.tell_at(at, Told::DeletePolicy(name(&key)));
                self.shared.kept.update(|cache| {
                    if let Some(of_kind) = cache.policies.get_mut(kind.as_str()) {
                        of_kind.remove(&key.to_string());
                    }
                });
            }
            Event::Synced => self.shared.arrived(|arrived| arrived.known[place] = true),
        }
    }
}

/// How often it is looked for kinds that are not served, in a cluster of so many nodes.
fn discovery_interval(nodes: usize) -> Duration {
    let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
    DISCOVERY_PER_NODE.saturating_mul(nodes).clamp(MIN_DISCOVERY_INTERVAL, MAX_DISCOVERY_INTERVAL)
}

/// Returns when nobody answers; never if somebody does.
pub(crate) async fn now_away(away: &mut watch::Receiver<bool>) {
    if away.wait_for(|away| *away).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// An object without what nobody here reads, as it is kept for the next start.
fn trimmed<K: Serialize>(object: &K) -> Option<Value> {
    let mut raw = serde_json::to_value(object).ok()?;
    if let Some(object) = raw.as_object_mut() {
        object.remove("status");
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    }
    Some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_of_a_new_kind_were_not_noticed_for_a_minute_and_a_half() {
        assert_eq!(discovery_interval(0), Duration::from_secs(5));
        assert_eq!(discovery_interval(100), Duration::from_secs(5));
        assert_eq!(discovery_interval(500), Duration::from_secs(25));
        assert_eq!(discovery_interval(5000), Duration::from_secs(60));
    }
}
