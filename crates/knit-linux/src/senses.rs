//! What the runtime notices while nobody asks: changes by others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_kernel::netns::NsId;
use knit_kernel::watch::{Listen, News, Watcher};
use knit_runtime::{Disturbance, Result};
use knit_types::sync::Locked;
use tokio::sync::Notify;

use crate::fail::{chain, internal};
use crate::rules::TABLE;
use crate::space::{NamespaceSockets, RulesSeen};

/// The kernel tells of a transaction before it ends; so long may the thread take that listens, on a busy
/// machine.
const CATCH_UP_TIMEOUT: Duration = Duration::from_millis(100);

/// Listens in the namespaces that this runtime works in.
#[derive(Debug)]
pub(crate) struct Senses {
    /// None where it could not be started: then what others change is found by comparing from time to time.
    watcher: Option<Watcher>,
    heard: Arc<HeardChanges>,
}

#[derive(Debug, Default)]
struct HeardChanges {
    spaces: Mutex<HashMap<NsId, RulesSeen>>,
    /// Two of them, so that what is grave does not wait with what may be nothing.
    rules: Notify,
    rest: Notify,
}

impl Senses {
    /// Listens nowhere yet.
    pub fn start() -> Self {
        let heard = Arc::new(HeardChanges::default());
        let told = Arc::clone(&heard);
        let watcher = Watcher::start(move |namespace, news| told.hear(namespace, &news));
        if let Err(error) = &watcher {
            tracing::warn!(%error, "changes by other programs will be noticed late: cannot start a thread to \
                listen");
        }
        Self { watcher: watcher.ok(), heard }
    }

    /// Listens there.
    pub fn listen(&self, space: &NamespaceSockets) {
        let namespace = space.namespace();
        let seen = space.rules_seen.clone();
        self.heard.spaces.locked().insert(namespace.id(), seen);
        let Some(watcher) = &self.watcher else { return };
        if let Err(error) = watcher.add(namespace, Listen::Everything) {
            let error = chain(&error);
            tracing::warn!(error, %namespace, "changes by other programs will be noticed late");
        }
    }

    /// Listens there no more.
    pub fn ignore(&self, space: &NamespaceSockets) {
        let id = space.namespace().id();
        self.heard.spaces.locked().remove(&id);
        if let Some(watcher) = &self.watcher {
            watcher.remove(id);
        }
    }

    /// Whether nobody else has changed the rules of a namespace since this count of changes; none is never.
    pub fn is_untouched(&self, space: &NamespaceSockets, since: Option<u64>) -> Result<bool> {
        let (Some(since), Some(watcher)) = (since, &self.watcher) else { return Ok(false) };
        // What is known to be touched is read at once: until it is repaired, Networks may not be apart.
        if space.rules_seen.now() != since {
            return Ok(false);
        }
        let now = space.rules()?.generation().map_err(internal("read the state of the rules"))?;
        // All that was done up to now has been told, and counted, before the two are compared.
        Ok(watcher.catch_up(space.namespace().id(), now, CATCH_UP_TIMEOUT) && space.rules_seen.now() == since)
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

impl HeardChanges {
    fn hear(&self, namespace: NsId, news: &News) {
        let rules = match news {
            News::Table(table) if &*table.name == TABLE => true,
            // Of somebody else, or of a service proxy of ours, which listens for itself.
            News::Table(_) => return,
            News::Network => false,
            News::Lost => true,
        };
        let spaces = self.spaces.locked();
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
