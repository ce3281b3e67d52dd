//! The whole plan in the ledger before anything is made; and that it was made, before anybody is told.

use knit_ledger::{Opaque, SandboxRecord};
use knit_runtime::Attachment;

use super::reserve::Reserved;
use super::verify::Verified;
use super::{Attached, Pipeline, answer};
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::request::pod_name;
use crate::sandboxes::books::{ledger_error, plan_of, pod_of};

/// What is in the ledger, and of which some may be made from now on.
#[derive(Debug)]
pub(super) struct Recorded {
    record: SandboxRecord,
    /// The interfaces that this request is about.
    planned: Vec<String>,
}

/// What was made, and recorded as such.
#[derive(Debug)]
pub(super) struct Made {
    record: SandboxRecord,
    planned: Vec<String>,
}

impl Pipeline {
    /// Records what is reserved, or gives it back.
    pub(super) fn record(&self, reserved: Reserved) -> Result<Recorded> {
        let Reserved { resolved, leases } = reserved;
        let each = resolved.wanted.iter().zip(&leases);
        let plans = each.map(|(wanted, lease)| plan_of(wanted, &resolved.door, lease));
        let mut books = self.sandboxes.books();
        match books.plan(&resolved.pod, &resolved.netns, plans, clock::now()) {
            Ok(record) => {
                drop(books);
                self.sandboxes.changed();
                let planned = resolved.wanted.iter().map(|wanted| wanted.interface.to_string()).collect();
                Ok(Recorded { record, planned })
            }
            Err(error) => {
                books.cancel(&leases);
                Err(error)
            }
        }
    }

    /// Records that all of it is there.
    pub(super) fn acknowledge(&self, recorded: &Recorded, verified: Vec<Verified>) -> Result<Made> {
        let mut record = recorded.record.clone();
        for attachment in verified.into_iter().map(Attachment::from) {
            let made = Opaque::of(&attachment).map_err(|e| {
                Error::new(Reason::Internal, "what a runtime made cannot be written down").because(e)
            })?;
            record.attached(attachment.interface.as_str(), made).map_err(|e| {
                Error::new(Reason::Internal, "the record does not fit what was made").because(e)
            })?;
        }
        let who = pod_name(&pod_of(&record)?);
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

    pub(super) fn planned(&self) -> &[String] {
        &self.planned
    }
}

// === impl Made ===

impl Made {
    /// What the sandbox got by this request.
    pub(super) fn attached(self) -> Attached {
        let mut attached = answer(&self.record);
        attached.attachments.retain(|a| self.planned.iter().any(|planned| planned == a.interface.as_str()));
        attached
    }
}
