//! The NetworkAttachments of users that this node has to do with, as the API has them. Of a cluster those are
//! the ones in whose status the controller has named this node: what tenants do with theirs is no event on
//! any other. A folder has no controller; there, all are read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use knit_api::{NetworkAttachment, names};
use knit_objects::{Event, Objects};
use knit_types::sync::Locked;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::feed::pair_of;
use crate::core::Core;

/// The objects, with what has changed in them.
#[derive(Debug, Default)]
pub struct UserObjects {
    known: Mutex<Known>,
    /// Counts what somebody is to be woken for.
    news: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Known {
    /// By namespace and name.
    objects: BTreeMap<String, BTreeMap<String, Arc<NetworkAttachment>>>,
    synced: bool,
    /// The namespaces in which something has changed since somebody asked.
    changed: BTreeSet<String>,
}

/// Starts to follow them.
pub(super) fn start(core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) -> knit_objects::Result<()> {
    let label = format!("{}!={}", names::MANAGED_BY_LABEL, names::MANAGED_BY);
    let mut watch = objects.watch::<NetworkAttachment>().labels(label);
    if objects.client().is_some() {
        watch = watch.fields(format!("status.node={}", core.node()));
    }
    let mut events = watch.map(|object| Some(Arc::new(object))).subscribe()?;
    let core = core.clone();
    tasks.spawn(async move {
        while let Some(event) = events.next().await {
            core.world().users().take(event);
        }
    });
    Ok(())
}

// === impl UserObjects ===

impl UserObjects {
    /// Takes an event. The newest version is kept in any case, since writes refer to it; but nobody is woken
    /// for labels and annotations, which their users may change as often as they like.
    pub fn take(&self, event: Event<Arc<NetworkAttachment>>) {
        let mut known = self.known.locked();
        let news = match event {
            Event::Applied(key, object) => {
                let (namespace, name) = pair_of(&key);
                let of_namespace = known.objects.entry(namespace.clone()).or_default();
                let before = of_namespace.insert(name, Arc::clone(&object));
                let news = before.is_none_or(|before| !says_the_same(&before, &object));
                if news {
                    known.changed.insert(namespace);
                }
                news
            }
            Event::Deleted(key) => {
                let (namespace, name) = pair_of(&key);
                let of_namespace = known.objects.get_mut(&namespace);
                let was_there = of_namespace.is_some_and(|objects| objects.remove(&name).is_some());
                if was_there {
                    known.objects.retain(|_, objects| !objects.is_empty());
                    known.changed.insert(namespace);
                }
                was_there
            }
            Event::Synced => !std::mem::replace(&mut known.synced, true),
        };
        drop(known);
        if news {
            self.news.send_modify(|news| *news += 1);
        }
    }

    /// Tells of news.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Whether all that there were at the start have arrived.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.known.locked().synced
    }

    /// The namespaces in which something has changed since the last call. It has one caller.
    pub fn take_changed(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.known.locked().changed)
    }

    /// Whether this one is there.
    #[must_use]
    pub fn has(&self, namespace: &str, name: &str) -> bool {
        self.known.locked().objects.get(namespace).is_some_and(|objects| objects.contains_key(name))
    }

    /// Those of a namespace, by name.
    #[must_use]
    pub fn of_namespace(&self, namespace: &str) -> BTreeMap<String, Arc<NetworkAttachment>> {
        self.known.locked().objects.get(namespace).cloned().unwrap_or_default()
    }

    /// The namespaces that have some.
    #[must_use]
    pub fn namespaces(&self) -> BTreeSet<String> {
        self.known.locked().objects.keys().cloned().collect()
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<NetworkAttachment>> {
        self.known.locked().objects.values().flat_map(BTreeMap::values).cloned().collect()
    }
}

/// Whether two versions of an object are the same in all that is read of it.
fn says_the_same(known: &NetworkAttachment, now: &NetworkAttachment) -> bool {
    let (a, b) = (&known.metadata, &now.metadata);
    a.uid == b.uid
        && a.deletion_timestamp == b.deletion_timestamp
        && a.finalizers == b.finalizers
        && known.spec == now.spec
        && known.status == now.status
}

#[cfg(test)]
mod tests {
    use knit_objects::Key;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_tenants_patches_of_one_attachment_were_work_for_every_node() {
        let users = UserObjects::default();
        let mut news = users.subscribe();
        let object = |patch: usize| -> NetworkAttachment {
            serde_json::from_value(json!({
                "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
                "metadata": {"name": "more", "namespace": "shop", "uid": "u1",
                    "resourceVersion": patch.to_string(), "annotations": {"patch": patch.to_string()}},
                "spec": {"pod": "web", "network": "blue"},
            }))
            .expect("a NetworkAttachment")
        };
        let key = || Key::namespaced("shop", "more");
        let mut woken = 0;
        for patch in 0..1000 {
            users.take(Event::Applied(key(), Arc::new(object(patch))));
            woken += usize::from(news.has_changed().expect("it is there"));
            news.mark_unchanged();
        }
        assert_eq!(woken, 1, "the object itself, and none of its patches");
        assert_eq!(users.take_changed().len(), 1);
        let kept = &users.of_namespace("shop")["more"];
        assert_eq!(kept.metadata.resource_version.as_deref(), Some("999"), "writes refer to the newest");
        let mut leaving = object(1000);
        leaving.metadata.finalizers = Some(vec![names::ATTACHMENT_FINALIZER.into()]);
        users.take(Event::Applied(key(), Arc::new(leaving)));
        assert!(news.has_changed().expect("it is there"), "what is read of it is news");
        users.take(Event::Deleted(key()));
        assert!(users.namespaces().is_empty());
        assert_eq!(users.take_changed().len(), 1);
    }
}
