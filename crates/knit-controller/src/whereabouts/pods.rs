//! The nodes of pods, in the namespaces that ask: a watch for each of them, or one of the whole cluster where
//! they are many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use knit_objects::{Event, Key, Objects};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::plan::Place;

/// More namespaces than these have one watch in common. A client has a limited number of watches.
const APART: usize = 32;
/// Events that wait before their watches are held up.
const QUEUE: usize = 256;

/// A namespace, or all of them.
pub(super) type Scope = Option<Arc<str>>;

/// News of pods, from the watch with this number.
pub(super) struct News {
    scope: Scope,
    generation: u64,
    pub(super) event: PodEvent,
}

/// What became of a pod.
pub(super) enum PodEvent {
    /// It is on this node, or on none.
    Pod(Place, Option<Arc<str>>),
    /// All pods of the scope have been told.
    Synced,
}

/// The watches.
pub(super) struct PodFeed {
    objects: Objects,
    watches: BTreeMap<Scope, Follower>,
    tasks: JoinSet<()>,
    sender: mpsc::Sender<News>,
    generation: u64,
}

struct Follower {
    generation: u64,
    synced: bool,
    task: AbortHandle,
}

// === impl PodFeed ===

impl PodFeed {
    pub(super) fn new(objects: Objects) -> (Self, mpsc::Receiver<News>) {
        let (sender, news) = mpsc::channel(QUEUE);
        (Self { objects, watches: BTreeMap::new(), tasks: JoinSet::new(), sender, generation: 0 }, news)
    }

    /// Follows the pods of these namespaces. `known` are those that are known of a scope: what became of them
    /// meanwhile is told. Whether a namespace is followed no more.
    pub(super) fn follow(
        &mut self,
        namespaces: &BTreeSet<Arc<str>>,
        known: impl Fn(Option<&str>) -> Vec<(Place, Arc<str>)>,
    ) -> bool {
        let together = self.watches.contains_key(&None);
        let most = if together { APART / 2 } else { APART };
        let wanted: BTreeSet<Scope> = if namespaces.len() > most {
            BTreeSet::from([None])
        } else {
            namespaces.iter().map(|namespace| Some(Arc::clone(namespace))).collect()
        };
        for scope in &wanted {
            if !self.watches.contains_key(scope) {
                self.begin(scope.clone(), known(scope.as_deref()));
            }
        }
        // Those that others take the place of go on until these know as much.
        let ready = wanted.iter().all(|scope| self.watches.get(scope).is_some_and(|watch| watch.synced));
        let covered = |scope: &Scope| match scope {
            None => !wanted.is_empty(),
            Some(_) => wanted.contains(&None),
        };
        let gone: Vec<Scope> =
            self.watches.keys().filter(|scope| !wanted.contains(*scope)).cloned().collect();
        let mut ended = false;
        for scope in gone {
            if covered(&scope) && !ready {
                continue;
            }
            if let Some(watch) = self.watches.remove(&scope) {
                watch.task.abort();
                ended = true;
            }
        }
        ended
    }

    /// Whether the pods of a namespace are followed.
    pub(super) fn follows(&self, namespace: &str) -> bool {
        self.watches.contains_key(&None)
            || self.watches.keys().any(|scope| scope.as_deref() == Some(namespace))
    }

    /// Takes news; nothing if they are of a watch that was ended.
    pub(super) fn take(&mut self, news: News) -> Option<PodEvent> {
        let watch = self.watches.get_mut(&news.scope).filter(|watch| watch.generation == news.generation)?;
        if matches!(news.event, PodEvent::Synced) {
            watch.synced = true;
        }
        Some(news.event)
    }

    fn begin(&mut self, scope: Scope, known: Vec<(Place, Arc<str>)>) {
        let seed =
            known.into_iter().map(|((namespace, name), node)| (Key::namespaced(namespace, name), node));
        let mut watch = self.objects.watch::<Pod>();
        if let Some(namespace) = &scope {
            watch = watch.namespace(&**namespace);
        }
        let events = watch.map(|pod| pod.spec?.node_name.map(Arc::<str>::from)).seed(seed).subscribe();
        // Without selectors, a watch starts.
        let Ok(mut events) = events else { return };
        self.generation += 1;
        let (generation, sender, name) = (self.generation, self.sender.clone(), scope.clone());
        let task = self.tasks.spawn(async move {
            while let Some(event) = events.next().await {
                let event = match event {
                    Event::Applied(key, node) => PodEvent::Pod(place_of(&key), Some(node)),
                    Event::Deleted(key) => PodEvent::Pod(place_of(&key), None),
                    Event::Synced => PodEvent::Synced,
                };
                if sender.send(News { scope: name.clone(), generation, event }).await.is_err() {
                    return;
                }
            }
        });
        self.watches.insert(scope, Follower { generation, synced: false, task });
    }
}

pub(super) fn place_of(key: &Key) -> Place {
    (key.namespace().unwrap_or_default().into(), key.name().into())
}
