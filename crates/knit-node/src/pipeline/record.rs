//! The whole plan in the ledger before anything is made; and that it was made, before anybody is told. What
//! was a claim's is the sandbox's by the very write that plans it.

use knit_ledger::{Reservation, SandboxRecord};
use knit_runtime::{Attachment, InterfaceName};

use super::reserve::{ForClaim, ForSandbox, Reserved, Target as _};
use super::verify::Verified;
use super::{Attached, Pipeline, answer};
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::request::pod_name;
use crate::sandboxes::books::{ledger_error, plan_of};

/// What is in the ledger, and of which some may be made from now on.
#[derive(Debug)]
pub(super) struct Recorded {
    record: SandboxRecord,
    /// The interfaces that this request is about.
    planned: Vec<InterfaceName>,
}

/// What was made, and recorded as such.
#[derive(Debug)]
pub(super) struct Made {
    record: SandboxRecord,
    planned: Vec<InterfaceName>,
}

impl Pipeline {
    /// Records what is reserved, or gives it back.
    pub(super) fn record(&self, reserved: Reserved<ForSandbox>) -> Result<Recorded> {
        let Reserved { resolved, leases } = reserved;
        let each = resolved.wanted.iter().zip(&leases);
        let plans: Vec<_> =
            each.map(|(wanted, lease)| plan_of(wanted, &resolved.target.door, lease)).collect();
        let mut books = self.sandboxes.books();
        match books.plan(&resolved.target.pod, &resolved.target.netns, &plans, clock::now()) {
            Ok(record) => {
                drop(books);
                self.sandboxes.changed();
                let planned = resolved.wanted.into_iter().map(|wanted| wanted.interface).collect();
                Ok(Recorded { record, planned })
            }
            Err(error) => {
                books.cancel(&resolved.target.owner(), &leases);
                Err(error)
            }
        }
    }

    /// Records what is reserved for a claim, or gives it back.
    pub(super) fn record_claim(&self, reserved: Reserved<ForClaim>) -> Result<Reservation> {
        let Reserved { resolved, leases } = reserved;
        let owner = resolved.target.owner();
        let mut books = self.sandboxes.books();
        let recorded =
            books.record_reservation(&owner, resolved.target.pod, &resolved.wanted, &leases, clock::now());
        if recorded.is_err() {
            books.cancel(&owner, &leases);
        }
        drop(books);
        self.sandboxes.changed();
        recorded
    }

    /// Records that all of it is there.
    pub(super) fn acknowledge(&self, recorded: &Recorded, verified: Vec<Verified>) -> Result<Made> {
        let mut record = recorded.record.clone();
        for attachment in verified.into_iter().map(Attachment::from) {
            let interface = attachment.interface.clone();
            record.attached(&interface, attachment).map_err(|e| {
                Error::new(Reason::Internal, "the record does not match what was created").because(e)
            })?;
        }
        let who = pod_name(&record.runtime_pod());
        self.sandboxes.books().put(record.clone()).map_err(|e| ledger_error(&who, e))?;
        self.sandboxes.changed();
        Ok(Made { record, planned: recorded.planned.clone() })
    }
}

// === impl Recorded ===

impl Recorded {
    pub(super) fn record(&self) -> &SandboxRecord {
        &self.record
    }

    pub(super) fn planned(&self) -> &[InterfaceName] {
        &self.planned
    }
}

// === impl Made ===

impl Made {
    /// What the sandbox got by this request.
    pub(super) fn attached(self) -> Attached {
        let mut attached = answer(&self.record);
        attached.attachments.retain(|a| self.planned.contains(&a.interface));
        attached
    }
}
