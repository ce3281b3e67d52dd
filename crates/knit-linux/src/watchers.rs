//! Who watches the attachments of this node, and what they are told.

use knit_runtime::Change;
use tokio::sync::broadcast;

/// How many changes a slow watcher may be behind.
const CHANGES_BACKLOG: usize = 1024;

/// The watchers of this node's attachments.
#[derive(Debug)]
pub(crate) struct Watchers(broadcast::Sender<Change>);

impl Default for Watchers {
    fn default() -> Self {
        Self(broadcast::channel(CHANGES_BACKLOG).0)
    }
}

impl Watchers {
    /// Tells all of them.
    pub fn tell(&self, change: Change) {
        // Without watchers there is nobody to tell.
        let _ = self.0.send(change);
    }

    /// One more.
    pub fn subscribe(&self) -> broadcast::Receiver<Change> {
        self.0.subscribe()
    }
}
