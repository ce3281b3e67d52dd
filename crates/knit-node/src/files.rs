//! What the agent keeps in its run-time directory: the ledger, and beside it the addresses that rest.

use std::path::Path;

use knit_ipam::{Cooling, Millis};
use knit_ledger::{Batch, Ledger, LedgerError, Recovery, Resting, SandboxRecord};

use crate::record::Store;

/// Both files.
#[derive(Debug)]
pub struct Files {
    ledger: Ledger<SandboxRecord>,
    resting: Ledger<Resting>,
}

// === impl Files ===

impl Files {
    /// Opens the ledger at this path, and what rests beside it; with what was found of the ledger.
    ///
    /// # Errors
    /// When one cannot be opened, or another agent has them.
    pub fn open(path: &Path) -> Result<(Self, Recovery), LedgerError> {
        let opened = Ledger::open(path)?;
        let resting = Ledger::open(path.with_file_name("resting"))?.ledger;
        Ok((Self { ledger: opened.ledger, resting }, opened.recovery))
    }
}

impl Store for Files {
    fn put(&mut self, record: SandboxRecord) -> Result<(), LedgerError> {
        self.ledger.put(record)
    }

    fn remove(&mut self, sandbox: &str) -> Result<(), LedgerError> {
        self.ledger.remove(sandbox)
    }

    fn get(&self, sandbox: &str) -> Option<&SandboxRecord> {
        self.ledger.get(sandbox)
    }

    fn records(&self) -> Box<dyn Iterator<Item = &SandboxRecord> + '_> {
        Box::new(self.ledger.records())
    }

    fn rest(&mut self, freed: Vec<Cooling>, rested: Millis) -> Result<(), LedgerError> {
        let mut batch = Batch::new();
        // Those that have rested go with the next that come: the file holds no more than what was freed a moment ago.
        for old in self.resting.records().filter(|r| r.cooling().freed_at <= rested) {
            batch = batch.remove(knit_ledger::Record::key(old));
        }
        let batch = freed.into_iter().fold(batch, |batch, cooling| batch.put(Resting::new(cooling)));
        self.resting.commit(batch)
    }

    fn resting(&self) -> Vec<Cooling> {
        self.resting.records().map(|r| r.cooling().clone()).collect()
    }
}
