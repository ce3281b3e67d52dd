//! Reading a kind and following its changes: the builder, and the stream it gives.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::cache::Cache;
use crate::error::Result;
use crate::health::{Connection, Health};
use crate::key::{Key, Object};
use crate::objects::Objects;
use crate::problem::Problem;
use crate::selector::Selection;
use crate::source::{Delta, Lean, Reader};

/// What a subscription yields: first every object there is, then [`Event::Synced`] once, then changes.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<T> {
    /// The object is there, new or changed.
    Applied(Key, T),
    /// The object is gone, or is no longer of interest.
    Deleted(Key),
    /// Everything that was there at the start has been told.
    Synced,
}

/// How to read a kind `K` and what to keep of each object. Made by [`Objects::watch`].
#[must_use = "a watch does nothing before subscribe() or cache()"]
pub struct Watch<K, T = K> {
    objects: Objects,
    selection: Selection,
    seed: Vec<(Key, T)>,
    map: Map<K, T>,
    kind: PhantomData<fn() -> K>,
}

/// A stream of events about one kind. Dropping it ends the watch.
#[derive(Debug)]
pub struct Subscription<T> {
    events: mpsc::Receiver<Event<T>>,
    connection: watch::Receiver<Connection>,
    away: watch::Receiver<bool>,
    task: AbortHandle,
}

type Map<K, T> = Box<dyn FnMut(K) -> Option<T> + Send>;

/// The same as a [`Subscription`], but what belongs together comes together. Dropping it ends the watch.
#[derive(Debug)]
pub struct BatchSubscription<T> {
    batches: mpsc::Receiver<Vec<Event<T>>>,
    away: watch::Receiver<bool>,
    task: AbortHandle,
}

/// Events that wait for a slow reader before the source is held up.
const QUEUE: usize = 256;

// === impl Watch ===

impl<K: Object> Watch<K, K> {
    pub(crate) fn new(objects: Objects) -> Self {
        Self {
            objects,
            selection: Selection::default(),
            seed: Vec::new(),
            map: Box::new(Some),
            kind: PhantomData,
        }
    }
}

impl<K: Object, T: Send + Sync + 'static> Watch<K, T> {
    /// Only objects of this namespace.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.selection.namespace = Some(namespace.into());
        self
    }

    /// Only objects whose labels match, in kubectl's words: `app=web,tier in (a,b)`.
    pub fn labels(mut self, selector: impl Into<String>) -> Self {
        self.selection.labels = Some(selector.into());
        self
    }

    /// Only objects whose fields match, in kubectl's words: `spec.nodeName=node-1`.
    pub fn fields(mut self, selector: impl Into<String>) -> Self {
        self.selection.fields = Some(selector.into());
        self
    }

    /// Keeps only what this makes of each object; one for which it makes nothing counts as not there. No
    /// whole object is kept behind it. What was seeded before is dropped.
    pub fn map<U: Send + Sync + 'static>(
        self,
        mut map: impl FnMut(T) -> Option<U> + Send + 'static,
    ) -> Watch<K, U> {
        let mut first = self.map;
        Watch {
            objects: self.objects,
            selection: self.selection,
            seed: Vec::new(),
            map: Box::new(move |object| first(object).and_then(&mut map)),
            kind: PhantomData,
        }
    }

    /// Objects known from an earlier run. They count as there until the source says otherwise; so a restart
    /// while the source is away goes on with what was known.
    pub fn seed(mut self, known: impl IntoIterator<Item = (Key, T)>) -> Self {
        self.seed.extend(known);
        self
    }

    /// Starts, and yields events. Needs a tokio runtime. Fails only for a selector that is none.
    pub fn subscribe(self) -> Result<Subscription<T>> {
        let (events, receiver) = mpsc::channel(QUEUE);
        let (health, task) = self.start(Sink::Channel(events))?;
        let (connection, away) = (health.subscribe(), health.subscribe_away());
        Ok(Subscription { events: receiver, connection, away, task })
    }

    /// The same in batches: all that a list says is one, which ends with [`Event::Synced`] the first time;
    /// what was seeded is one; and so is each change. For objects of which one says something about others:
    /// between two batches, everything is as it was at some moment.
    pub fn subscribe_batches(self) -> Result<BatchSubscription<T>> {
        let (batches, receiver) = mpsc::channel(QUEUE);
        let (health, task) = self.start(Sink::Batches { batches, batch: Vec::new() })?;
        Ok(BatchSubscription { batches: receiver, away: health.subscribe_away(), task })
    }

    /// Starts, and keeps what is there for many readers. Needs a tokio runtime. Fails only for a selector
    /// that is none.
    pub fn cache(self) -> Result<Cache<T>> {
        self.cache_with(None)
    }

    /// The same, and an object of which the same is kept as before is no change: what else changes in it
    /// wakes nobody.
    pub fn cache_of_news(self) -> Result<Cache<T>>
    where
        T: PartialEq,
    {
        self.cache_with(Some(T::eq))
    }

    /// The same, where `same` says whether an object says nothing new. Its newest version is kept in any
    /// case, for writes that refer to it.
    pub fn cache_of_news_by(self, same: fn(&T, &T) -> bool) -> Result<Cache<T>> {
        self.cache_with(Some(same))
    }

    fn cache_with(self, same: Option<fn(&T, &T) -> bool>) -> Result<Cache<T>> {
        let kind = K::kind(&()).into_owned();
        let store = crate::cache::Store::new(kind, same);
        let (health, task) = self.start(Sink::Store(Arc::clone(&store)))?;
        Ok(Cache::new(store, health.subscribe(), task))
    }

    fn start(self, sink: Sink<T>) -> Result<(Arc<Health>, AbortHandle)> {
        let reader = self.objects.reader::<K>(&self.selection)?;
        let health = reader.health();
        let pump = Pump {
            reader,
            map: self.map,
            sink,
            known: HashMap::new(),
            whole_set: None,
            synced: false,
            objects: self.objects,
        };
        let task = tokio::spawn(pump.run(self.seed)).abort_handle();
        Ok((health, task))
    }
}

impl<K, T> fmt::Debug for Watch<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("selection", &self.selection).finish_non_exhaustive()
    }
}

// === impl Subscription ===

impl<T> Subscription<T> {
    /// The next event. The watch mends itself forever; `None` comes only when the runtime shuts down.
    pub async fn next(&mut self) -> Option<Event<T>> {
        self.events.recv().await
    }

    /// Whether the source is there, now and on changes.
    #[must_use]
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.clone()
    }

    /// Whether nobody is there: the last attempt got no answer at all, not even an error. False while that is
    /// not known.
    #[must_use]
    pub fn away(&self) -> watch::Receiver<bool> {
        self.away.clone()
    }
}

impl<T> BatchSubscription<T> {
    /// The next batch. The watch mends itself forever; `None` comes only when the runtime shuts down.
    pub async fn next(&mut self) -> Option<Vec<Event<T>>> {
        self.batches.recv().await
    }

    /// Whether nobody is there; see [`Subscription::away`].
    #[must_use]
    pub fn away(&self) -> watch::Receiver<bool> {
        self.away.clone()
    }
}

impl<T> Drop for BatchSubscription<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<T> futures::Stream for Subscription<T> {
    type Item = Event<T>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Event<T>>> {
        self.events.poll_recv(cx)
    }
}

impl<T> Drop for Subscription<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where events go.
enum Sink<T> {
    Channel(mpsc::Sender<Event<T>>),
    Batches {
        batches: mpsc::Sender<Vec<Event<T>>>,
        /// What the next one has so far.
        batch: Vec<Event<T>>,
    },
    Store(Arc<crate::cache::Store<T>>),
}

/// Turns deltas of a source into events for one reader.
struct Pump<K, T> {
    reader: Reader,
    map: Map<K, T>,
    sink: Sink<T>,
    /// What the reader was told of, and in which version.
    known: HashMap<Key, Known>,
    /// Inside a whole set: what it has named so far.
    whole_set: Option<HashSet<Key>>,
    synced: bool,
    objects: Objects,
}

struct Known {
    version: Box<str>,
    /// Whether the map made something of it.
    told: bool,
}

/// The reader is gone.
struct Closed;

// === impl Pump ===

impl<K: Object, T: Send + Sync + 'static> Pump<K, T> {
    async fn run(mut self, seed: Vec<(Key, T)>) {
        for (key, value) in seed {
            self.known.insert(key.clone(), Known { version: "".into(), told: true });
            if self.send(Event::Applied(key, value)).await.is_err() {
                return;
            }
        }
        loop {
            if self.whole_set.is_none() && self.send_batch().await.is_err() {
                return;
            }
            let delta = self.reader.next().await;
            if self.take(delta).await.is_err() {
                return;
            }
        }
    }

    async fn take(&mut self, delta: Delta) -> Result<(), Closed> {
        match delta {
            Delta::Begin => {
                self.whole_set = Some(HashSet::new());
                Ok(())
            }
            Delta::Object { key, version, object } => {
                if let Some(seen) = &mut self.whole_set {
                    seen.insert(key.clone());
                }
                if self.known.get(&key).is_some_and(|known| known.version == version) {
                    return Ok(());
                }
                self.object(key, version, object).await
            }
            Delta::Gone(key) => self.gone(key).await,
            Delta::Complete => {
                let seen = self.whole_set.take().unwrap_or_default();
                let gone: Vec<Key> = self.known.keys().filter(|key| !seen.contains(*key)).cloned().collect();
                for key in gone {
                    self.gone(key).await?;
                }
                if !self.synced {
                    self.synced = true;
                    self.send(Event::Synced).await?;
                }
                Ok(())
            }
        }
    }

    async fn object(&mut self, key: Key, version: Box<str>, object: Lean) -> Result<(), Closed> {
        let mapped = match object.decode::<K>() {
            Ok(object) => {
                self.objects.solve(&K::kind(&()), &key);
                (self.map)(object)
            }
            Err(error) => {
                // Its last good version stays.
                let problem = Problem::error(error.to_string()).about(format!("{} {key}", K::kind(&())));
                self.objects.report(&K::kind(&()), &key, problem);
                let told = self.known.get(&key).is_some_and(|known| known.told);
                self.known.insert(key, Known { version, told });
                return Ok(());
            }
        };
        let told_before = self.known.get(&key).is_some_and(|known| known.told);
        self.known.insert(key.clone(), Known { version, told: mapped.is_some() });
        match mapped {
            Some(value) => self.send(Event::Applied(key, value)).await,
            None if told_before => self.send(Event::Deleted(key)).await,
            None => Ok(()),
        }
    }

    async fn gone(&mut self, key: Key) -> Result<(), Closed> {
        self.objects.solve(&K::kind(&()), &key);
        match self.known.remove(&key) {
            Some(Known { told: true, .. }) => self.send(Event::Deleted(key)).await,
            _ => Ok(()),
        }
    }

    /// Sends what was gathered, if it is for a reader of batches.
    async fn send_batch(&mut self) -> Result<(), Closed> {
        match &mut self.sink {
            Sink::Batches { batches, batch } if !batch.is_empty() => {
                batches.send(std::mem::take(batch)).await.map_err(|_| Closed)
            }
            _ => Ok(()),
        }
    }

    async fn send(&mut self, event: Event<T>) -> Result<(), Closed> {
        match &mut self.sink {
            Sink::Channel(events) => events.send(event).await.map_err(|_| Closed),
            Sink::Batches { batch, .. } => {
                batch.push(event);
                Ok(())
            }
            Sink::Store(store) => {
                store.take(event, Timestamp::now());
                Ok(())
            }
        }
    }
}
