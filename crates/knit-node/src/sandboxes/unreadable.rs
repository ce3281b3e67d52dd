//! Records that cannot be read: their addresses stay reserved, nothing is attached for their sandboxes or
//! prepared for their claims, and nothing of theirs is taken for a stray, until those are detached or
//! released.

use knit_ipam::Millis;
use knit_ledger::{Batch, LedgerError, Unreadable};
use knit_runtime::SandboxId;
use knit_types::Owner;

use super::books::Books;
use crate::error::{Error, Reason};

impl Books {
    /// The records that cannot be read.
    pub fn unreadable(&self) -> impl Iterator<Item = &Unreadable> {
        self.store().unreadable()
    }

    /// The record of a sandbox, if it cannot be read.
    #[must_use]
    pub fn unreadable_of(&self, sandbox: &SandboxId) -> Option<&Unreadable> {
        self.unreadable_by(sandbox.as_str())
    }

    /// The record with this key, if it cannot be read.
    pub(super) fn unreadable_by(&self, key: &str) -> Option<&Unreadable> {
        self.unreadable().find(|record| record.key() == key)
    }

    /// What a claim or an object has reserved, if that cannot be read.
    #[must_use]
    pub fn unreadable_reservation(&self, owner: &Owner) -> Option<&Unreadable> {
        self.unreadable_by(&owner.key())
    }

    /// Whether there is a record of which not even the owner can be made out: whatever nobody recorded may be
    /// its.
    #[must_use]
    pub fn has_unreadable_of_unknown(&self) -> bool {
        self.unreadable().any(|record| record.key().starts_with("unknown:"))
    }

    /// Keeps back what records hold that cannot be read, and says so.
    pub(super) fn withhold_unreadable(&mut self) {
        let held: Vec<_> = self.unreadable().map(|r| (holder(r), r.holds())).collect();
        for (holder, parts) in held {
            for part in parts {
                for address in part.addresses {
                    self.allocator.withhold(&holder, part.network.as_ref(), address);
                }
            }
        }
        for record in self.unreadable() {
            tracing::error!(
                record = record.key(),
                why = record.why(),
                "a record of the ledger cannot be read: it is kept, its addresses stay reserved, and nothing \
                 is attached or prepared for it until its pod or its claim is deleted"
            );
        }
    }

    /// Removes a record that cannot be read, once nothing of its sandbox is left. Its addresses rest.
    ///
    /// # Errors
    /// When that cannot be written: a later pass tries again.
    pub(crate) fn discard(&mut self, sandbox: &SandboxId, now: Millis) -> Result<(), LedgerError> {
        self.discard_by(sandbox.as_str(), now)
    }

    /// The same, by the record's key.
    pub(super) fn discard_by(&mut self, key: &str, now: Millis) -> Result<(), LedgerError> {
        let Some(holder) = self.unreadable_by(key).map(holder) else { return Ok(()) };
        self.commit(Batch::new().remove(key))?;
        let rests = self.allocator.release(&holder, now);
        self.keep_at_rest(rests, now);
        Ok(())
    }
}

/// What is said to whoever asks for something of a sandbox whose record cannot be read.
pub(crate) fn error(who: &str, record: &Unreadable) -> Error {
    let message = format!(
        "{who}: the agent's record of sandbox {} cannot be read ({}): delete the pod; its addresses are kept \
         until then",
        record.key(),
        record.why()
    );
    Error::new(Reason::Damaged, message)
}

/// What is said to whoever asks for something of a claim whose record cannot be read.
pub(crate) fn error_of_claim(owner: &Owner, record: &Unreadable) -> Error {
    let message = format!(
        "the agent's record of {owner} cannot be read ({}): delete the pods that use it, and a claim that \
         was not made from a template; its addresses are kept until then",
        record.why()
    );
    Error::new(Reason::Damaged, message)
}

fn holder(record: &Unreadable) -> String {
    match record.sandbox() {
        Some(sandbox) => format!("a record that cannot be read (sandbox {sandbox})"),
        None => format!("a record that cannot be read ({})", record.key()),
    }
}
