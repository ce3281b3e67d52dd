//! What the runtime notices while nobody asks: changes by others, and calls that are changing things themselves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use knit_kernel::netns::NsId;
use knit_kernel::nft::Generation;
use knit_kernel::watch::{Listen, News, Watcher};
use knit_runtime::Disturbance;
use tokio::sync::Notify;

use crate::fail::chain;
use crate::rules::TABLE;
use crate::space::{Seen, Space};

/// Listens in the namespaces that this runtime works in.
#[derive(Debug)]
pub(crate) struct Senses {
    /// None where it could not be started: then what others change is found by comparing from time to time.
    watcher: Option<Watcher>,
    heard: Arc<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    spaces: Mutex<HashMap<NsId, Seen>>,
    /// Two of them, so that what is grave does not wait with what may be nothing.
    rules: Notify,
    rest: Notify,
}

/// Counts calls that change things.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Moving<'a>(&'a Moves);

impl Senses {
    /// Listens nowhere yet.
    pub fn start() -> Self {
        let heard = Arc::new(Heard::default());
        let told = Arc::clone(&heard);
        let watcher = Watcher::start(move |namespace, news| told.hear(namespace, &news));
        if let Err(error) = &watcher {
            tracing::warn!(%error, "what others change is noticed late: there is no thread to listen");
        }
        Self { watcher: watcher.ok(), heard }
    }

    /// Listens there.
    pub fn listen(&self, space: &Space) {
        let namespace = space.namespace();
        let seen = space.rules_seen.clone();
        self.heard.spaces.lock().unwrap_or_else(PoisonError::into_inner).insert(namespace.id(), seen);
        let Some(watcher) = &self.watcher else { return };
        if let Err(error) = watcher.add(namespace, Listen::Everything) {
            let error = chain(&error);
            tracing::warn!(error, %namespace, "what others change there is noticed late");
        }
    }

    /// Listens there no more.
    pub fn ignore(&self, space: &Space) {
        let id = space.namespace().id();
        self.heard.spaces.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(watcher) = &self.watcher {
            watcher.remove(id);
        }
    }

    /// The newest state of a namespace's rules up to which every change by others was heard.
    pub fn heard(&self, space: &Space) -> Option<Generation> {
        self.watcher.as_ref().and_then(|watcher| watcher.heard(space.namespace().id()))
    }

    /// Returns when others may have changed something since the last call.
    pub async fn disturbed(&self) -> Disturbance {
        tokio::select! {
            biased;
            () = self.heard.rules.notified() => Disturbance::Rules,
            () = self.heard.rest.notified() => Disturbance::Something,
        }
    }
}

impl Heard {
    fn hear(&self, namespace: NsId, news: &News) {
        let rules = match news {
            News::Table(table) if &*table.name == TABLE => true,
            // Of somebody else, or of a service proxy of ours, which listens for itself.
            News::Table(_) => return,
            News::Network => false,
            News::Lost => true,
        };
        let spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = spaces.get(&namespace).filter(|_| rules) {
            seen.touch();
        }
        drop(spaces);
        if rules {
            self.rules.notify_one();
        } else {
            self.rest.notify_one();
        }
    }
}

impl Moves {
    /// Something is being changed, until this is dropped.
    pub fn begin(&self) -> Moving<'_> {
        self.begun.fetch_add(1, Ordering::AcqRel);
        Moving(self)
    }

    /// How many have begun, if all of them have ended.
    pub fn at_rest(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire) == ended).then_some(ended)
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}
