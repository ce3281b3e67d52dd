//! Where records are kept.

use knit_ipam::{Cooling, Millis};
use knit_ledger::{Batch, Entry, LedgerError, Unreadable};

/// The ledger: [`crate::files::Files`], or something that stands in for it.
pub trait Store: Send {
    /// Writes changes, all of them at once: after a crash, either all of them are there or none.
    ///
    /// # Errors
    /// When they cannot be written; then nothing changed.
    fn commit(&mut self, changes: Batch<Entry>) -> Result<(), LedgerError>;
    /// The record with this key.
    fn get(&self, key: &str) -> Option<&Entry>;
    /// All records.
    fn entries(&self) -> Box<dyn Iterator<Item = &Entry> + '_>;
    /// Those that cannot be read.
    fn unreadable(&self) -> Box<dyn Iterator<Item = &Unreadable> + '_>;
    /// Keeps addresses that were freed, so that the next agent lets them rest, too. What was freed at
    /// `rested` or before need not be kept any longer.
    ///
    /// # Errors
    /// When it cannot be written; then nothing changed.
    fn rest(&mut self, freed: Vec<Cooling>, rested: Millis) -> Result<(), LedgerError>;
    /// The addresses that were kept; nothing if it is not known any more which those were.
    fn resting(&self) -> Option<Vec<Cooling>>;
}
