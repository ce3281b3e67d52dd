//! What the agent keeps in its run-time directory: the ledger, and beside it the addresses that rest.
//!
//! Without the ledger an agent does not start: nothing may be made that is not recorded. What rests is worth
//! less: if it cannot be read it is set aside, and all free addresses rest for a while instead.

use std::path::{Path, PathBuf};

use knit_ipam::{Cooling, Millis};
use knit_ledger::{Batch, Entry, Ledger, LedgerError, Recovery, Resting, Unreadable};

use crate::sandboxes::books::Store;

/// Both files.
#[derive(Debug)]
pub struct Files {
    ledger: Ledger<Entry>,
    /// None if it can be neither read nor made: then what rests is known as long as this agent lives.
    resting: Option<Ledger<Resting>>,
    /// Whether it is known what rests.
    resting_known: bool,
}

// === impl Files ===

impl Files {
    /// Opens the ledger at this path, and what rests beside it; with what was found of the ledger.
    ///
    /// # Errors
    /// When the ledger cannot be opened, or another agent has either.
    pub fn open(path: &Path) -> Result<(Self, Recovery), LedgerError> {
        let opened = Ledger::open(path)?;
        let (resting, resting_known) = open_resting(&path.with_file_name("resting"))?;
        Ok((Self { ledger: opened.ledger, resting, resting_known }, opened.recovery))
    }
}

/// Opens the file of what rests, or another one in its place; and whether it says all that rests.
fn open_resting(path: &Path) -> Result<(Option<Ledger<Resting>>, bool), LedgerError> {
    let why = match Ledger::open(path) {
        Ok(opened) => match opened.recovery {
            // A record that was cut off is the last one, of an agent that was killed before it gave the
            // address up.
            Recovery::Fresh | Recovery::Clean | Recovery::TornTailCut { .. } => {
                let mut ledger = opened.ledger;
                let known = drop_unreadable(&mut ledger, path);
                return Ok((Some(ledger), known));
            }
            Recovery::SetAside { to, why, .. } => {
                tracing::error!(
                    file = %to.display(),
                    "the list of recently freed addresses is damaged ({why:?}) and was set aside: free \
                    addresses are held back for their full time"
                );
                return Ok((Some(opened.ledger), false));
            }
        },
        Err(error @ LedgerError::Locked { .. }) => return Err(error),
        Err(error) => error,
    };
    let aside = set_aside(path);
    tracing::error!(
        file = %path.display(),
        set_aside = aside.as_ref().map(|to| tracing::field::display(to.display())),
        error = &why as &dyn std::error::Error,
        "cannot open the list of recently freed addresses: free addresses are held back for their full time"
    );
    match Ledger::open(path) {
        Ok(opened) => Ok((Some(opened.ledger), false)),
        Err(error) => {
            tracing::error!(
                file = %path.display(),
                error = &error as &dyn std::error::Error,
                "cannot create a new list of recently freed addresses either: the next agent will not know \
                 them; remove the file at this path"
            );
            Ok((None, false))
        }
    }
}

/// Drops what cannot be read of what rests; false if there was something: any address may be one of those.
fn drop_unreadable(ledger: &mut Ledger<Resting>, path: &Path) -> bool {
    let unreadable: Vec<String> = ledger.unreadable().map(|record| record.key().to_owned()).collect();
    if unreadable.is_empty() {
        return true;
    }
    tracing::error!(
        file = %path.display(), records = unreadable.len(),
        "the list of recently freed addresses has records that cannot be read: free addresses are held back \
         for their full time"
    );
    let dropped = ledger.commit(unreadable.into_iter().fold(Batch::new(), Batch::remove));
    if let Err(error) = dropped {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cannot remove them yet; this warning repeats at the next start"
        );
    }
    false
}

/// Gives what cannot be opened another name; nothing if that fails, too.
fn set_aside(path: &Path) -> Option<PathBuf> {
    let names = (1..=16).map(|n| path.with_file_name(format!("resting.unreadable-{n}")));
    let free = names.into_iter().find(|to| std::fs::symlink_metadata(to).is_err())?;
    std::fs::rename(path, &free).ok().map(|()| free)
}

impl Store for Files {
    fn commit(&mut self, changes: Batch<Entry>) -> Result<(), LedgerError> {
        self.ledger.commit(changes)
    }

    fn get(&self, key: &str) -> Option<&Entry> {
        self.ledger.get(key)
    }

    fn entries(&self) -> Box<dyn Iterator<Item = &Entry> + '_> {
        Box::new(self.ledger.records())
    }

    fn unreadable(&self) -> Box<dyn Iterator<Item = &Unreadable> + '_> {
        Box::new(self.ledger.unreadable())
    }

    fn rest(&mut self, freed: Vec<Cooling>, rested: Millis) -> Result<(), LedgerError> {
        let Some(resting) = &mut self.resting else { return Ok(()) };
        let mut batch = Batch::new();
        // Those that have rested go with the next that come: the file holds no more than what was freed a
        // moment ago.
        for old in resting.records().filter(|r| r.cooling().freed_at <= rested) {
            batch = batch.remove(knit_ledger::Record::key(old));
        }
        let batch = freed.into_iter().fold(batch, |batch, cooling| batch.put(Resting::new(cooling)));
        resting.commit(batch)
    }

    fn resting(&self) -> Option<Vec<Cooling>> {
        let kept = self.resting.iter().flat_map(Ledger::records).map(|r| r.cooling().clone());
        self.resting_known.then(|| kept.collect())
    }
}
