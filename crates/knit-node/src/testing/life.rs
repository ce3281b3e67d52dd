//! A life that ends where it is told to, and a ledger that ends with it.

use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use knit_ipam::{Cooling, Millis};
use knit_ledger::{Batch, Entry, LedgerError, Unreadable};
use knit_types::sync::Locked;
use tokio::sync::watch;

use crate::sandboxes::books::Store;

/// A process that can be killed at a step. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Life {
    state: Arc<Mutex<LifeState>>,
    killed: watch::Sender<bool>,
}

#[derive(Debug)]
struct LifeState {
    steps: usize,
    kill_at: Option<usize>,
}

/// A ledger that ends with its life.
pub struct MortalStore {
    store: Box<dyn Store>,
    life: Life,
}

// === impl Life ===

impl Default for Life {
    fn default() -> Self {
        Self::new(None)
    }
}

impl Life {
    /// A life that ends at a step, counted from 0, or does not.
    #[must_use]
    pub fn new(kill_at: Option<usize>) -> Self {
        Self {
            state: Arc::new(Mutex::new(LifeState { steps: 0, kill_at })),
            killed: watch::Sender::new(false),
        }
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        *self.killed.borrow()
    }

    /// Waits for its end.
    pub async fn over(&self) {
        // The sender lives as long as we do.
        let _ = self.killed.subscribe().wait_for(|killed| *killed).await;
    }

    /// One step; false if life ends here or has ended.
    fn step(&self) -> bool {
        let mut state = self.state.locked();
        let step = state.steps;
        state.steps += 1;
        if state.kill_at == Some(step) {
            self.killed.send_replace(true);
        }
        !*self.killed.borrow()
    }

    /// One step of something that never returns if life ends here.
    pub(super) async fn live(&self) {
        if !self.step() {
            pending::<()>().await;
        }
    }
}

// === impl MortalStore ===

impl MortalStore {
    /// A ledger that ends with a life: before or after any write.
    #[must_use]
    pub fn new(store: Box<dyn Store>, life: &Life) -> Self {
        Self { store, life: life.clone() }
    }

    fn step(&self) -> Result<(), LedgerError> {
        if self.life.step() {
            return Ok(());
        }
        let source = io::Error::other("the process was killed");
        Err(LedgerError::Io { path: PathBuf::from("ledger"), doing: "living", source })
    }
}

impl Store for MortalStore {
    fn commit(&mut self, changes: Batch<Entry>) -> Result<(), LedgerError> {
        self.step()?;
        self.store.commit(changes)?;
        self.step()
    }

    fn get(&self, key: &str) -> Option<&Entry> {
        self.store.get(key)
    }

    fn entries(&self) -> Box<dyn Iterator<Item = &Entry> + '_> {
        self.store.entries()
    }

    fn unreadable(&self) -> Box<dyn Iterator<Item = &Unreadable> + '_> {
        self.store.unreadable()
    }

    fn rest(&mut self, freed: Vec<Cooling>, rested: Millis) -> Result<(), LedgerError> {
        self.step()?;
        self.store.rest(freed, rested)?;
        self.step()
    }

    fn resting(&self) -> Option<Vec<Cooling>> {
        self.store.resting()
    }
}
