//! One thing at a time per sandbox: two ADDs for one sandbox, or a DEL while an ADD runs, wait for each
//! other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use knit_runtime::SandboxId;
use tokio::sync::OwnedMutexGuard;

/// The locks of all sandboxes that something is being done for.
#[derive(Debug, Default)]
pub struct SandboxLocks {
    locks: Arc<Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>>,
}

/// Held while something is done for a sandbox.
#[derive(Debug)]
pub struct SandboxGuard {
    sandbox: SandboxId,
    locks: Arc<Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>>,
    guard: Option<OwnedMutexGuard<()>>,
}

// === impl SandboxLocks ===

impl SandboxLocks {
    /// Waits for a sandbox.
    pub async fn lock(&self, sandbox: &SandboxId) -> SandboxGuard {
        let lock = Arc::clone(lock_map(&self.locks).entry(sandbox.clone()).or_default());
        let guard = lock.lock_owned().await;
        SandboxGuard { sandbox: sandbox.clone(), locks: Arc::clone(&self.locks), guard: Some(guard) }
    }

    /// Takes a sandbox if nothing is being done for it.
    #[must_use]
    pub fn try_lock(&self, sandbox: &SandboxId) -> Option<SandboxGuard> {
        let lock = Arc::clone(lock_map(&self.locks).entry(sandbox.clone()).or_default());
        let guard = lock.try_lock_owned().ok()?;
        Some(SandboxGuard { sandbox: sandbox.clone(), locks: Arc::clone(&self.locks), guard: Some(guard) })
    }

    /// How many sandboxes have a lock, held or waited for.
    #[must_use]
    pub fn len(&self) -> usize {
        lock_map(&self.locks).len()
    }

    /// Whether nothing is being done for any sandbox.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for SandboxGuard {
    fn drop(&mut self) {
        let mut locks = lock_map(&self.locks);
        self.guard = None;
        // Only the map still has it: nobody waits.
        if locks.get(&self.sandbox).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.sandbox);
        }
    }
}

type Map = HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>;

fn lock_map(map: &Mutex<Map>) -> MutexGuard<'_, Map> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_nothing_left() {
        let locks = SandboxLocks::default();
        let id = SandboxId::new("a").expect("an id");
        let held = locks.lock(&id).await;
        assert!(locks.try_lock(&id).is_none());
        {
            let waiting = locks.lock(&id);
            tokio::pin!(waiting);
            assert!(futures::poll!(&mut waiting).is_pending());
            drop(held);
            let next = waiting.await;
            assert!(locks.try_lock(&id).is_none());
            drop(next);
        }
        assert!(locks.try_lock(&id).is_some());
        assert!(locks.is_empty());
    }
}
