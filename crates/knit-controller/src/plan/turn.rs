//! How much is written about NetworkAttachments in one pass. Whoever makes ten thousand of them waits; blocks
//! and statuses of others do not.

use std::time::Duration;

use super::action::{Plan, subject};
use crate::cluster::{AttachmentView, Memory, Now};

/// So many answers in one pass, and so many that are let go or forgotten.
const ANSWERS_PER_PASS: usize = 50;
/// And the next ones after this time.
const NEXT_ANSWERS_DELAY: Duration = Duration::from_millis(100);
/// The kind, as in [`subject`].
const ATTACHMENTS: &str = "networkattachments";
/// What failed is left alone for this long: the others do not wait for it.
const FAILED_RETRY_DELAY: Duration = Duration::from_secs(30);

/// What may still be written in this pass.
pub(super) struct Turn {
    left: usize,
    now: Now,
}

impl Turn {
    pub(super) fn new(memory: &mut Memory, now: Now) -> Self {
        memory.failed.retain(|_, at| now.steady < at.saturating_add(FAILED_RETRY_DELAY));
        Self { left: ANSWERS_PER_PASS.saturating_sub(memory.writes.count_of(ATTACHMENTS)), now }
    }

    /// Whether something may be written about this one now; if not, the plan says when to look again.
    pub(super) fn takes(&mut self, view: &AttachmentView, memory: &Memory, plan: &mut Plan) -> bool {
        if !memory.failed.is_empty()
            && let Some(at) = memory.failed.get(&(view.namespace.clone(), view.name.clone()))
        {
            plan.again_at(at.saturating_add(FAILED_RETRY_DELAY));
            return false;
        }
        let subject = subject(ATTACHMENTS, &format!("{}/{}", view.namespace, view.name));
        if memory.writes.is_under_way(&subject) {
            return false;
        }
        let Some(left) = self.left.checked_sub(1) else {
            plan.again_at(self.now.steady.saturating_add(NEXT_ANSWERS_DELAY));
            return false;
        };
        self.left = left;
        true
    }
}
