//! One thing at a time per owner: two ADDs for one sandbox, or a DEL while an ADD runs, wait for each other,
//! and so do two requests for one claim.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use knit_types::Owner;
use knit_types::sync::Locked;
use tokio::sync::OwnedMutexGuard;

/// The locks of all owners that something is being done for.
#[derive(Debug, Default)]
pub struct OwnerLocks {
    locks: Arc<Mutex<Map>>,
}

/// Held while something is done for an owner.
#[derive(Debug)]
pub struct OwnerGuard {
    owner: Owner,
    locks: Arc<Mutex<Map>>,
    guard: Option<OwnedMutexGuard<()>>,
}

// === impl OwnerLocks ===

impl OwnerLocks {
    /// Waits for an owner.
    pub async fn lock(&self, owner: impl Into<Owner>) -> OwnerGuard {
        let owner = owner.into();
        let lock = Arc::clone(lock_map(&self.locks).entry(owner.clone()).or_default());
        let guard = lock.lock_owned().await;
        OwnerGuard { owner, locks: Arc::clone(&self.locks), guard: Some(guard) }
    }

    /// Takes an owner if nothing is being done for it.
    #[must_use]
    pub fn try_lock(&self, owner: impl Into<Owner>) -> Option<OwnerGuard> {
        let owner = owner.into();
        let lock = Arc::clone(lock_map(&self.locks).entry(owner.clone()).or_default());
        let guard = lock.try_lock_owned().ok()?;
        Some(OwnerGuard { owner, locks: Arc::clone(&self.locks), guard: Some(guard) })
    }

    /// How many owners have a lock, held or waited for.
    #[must_use]
    pub fn len(&self) -> usize {
        lock_map(&self.locks).len()
    }

    /// Whether nothing is being done for anybody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for OwnerGuard {
    fn drop(&mut self) {
        let mut locks = lock_map(&self.locks);
        self.guard = None;
        // Only the map still has it: nobody waits.
        if locks.get(&self.owner).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.owner);
        }
    }
}

type Map = HashMap<Owner, Arc<tokio::sync::Mutex<()>>>;

fn lock_map(map: &Mutex<Map>) -> MutexGuard<'_, Map> {
    map.locked()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_nothing_left() {
        let locks = OwnerLocks::default();
        let id = Owner::from(knit_runtime::SandboxId::new("a").expect("an id"));
        let held = locks.lock(id.clone()).await;
        assert!(locks.try_lock(id.clone()).is_none());
        {
            let waiting = locks.lock(id.clone());
            tokio::pin!(waiting);
            assert!(futures::poll!(&mut waiting).is_pending());
            drop(held);
            let next = waiting.await;
            assert!(locks.try_lock(id.clone()).is_none());
            drop(next);
        }
        assert!(locks.try_lock(id.clone()).is_some());
        assert!(locks.is_empty());
    }
}
