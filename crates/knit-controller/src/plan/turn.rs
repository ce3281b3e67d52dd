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
    pub(super) fn takes(&mut self, view: &AttachmentView, memory: &mut Memory, plan: &mut Plan) -> bool {
        if !memory.failed.is_empty()
            && let Some(at) = memory.failed.get(&(view.namespace.clone(), view.name.clone()))
        {
            plan.again_at(at.saturating_add(FAILED_RETRY_DELAY));
            return false;
        }
        let subject = subject(ATTACHMENTS, &format!("{}/{}", view.namespace, view.name));
        // What waits takes nobody's turn.
        if plan.leaves_out(memory, &subject, self.now) {
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

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::cluster::WriteFailure;

    #[test]
    fn attachments_whose_writes_were_out_of_date_took_the_turns_of_others() {
        let now = Now { wall: Timestamp::UNIX_EPOCH, steady: Duration::from_secs(500) };
        let (mut memory, mut plan) = (Memory::default(), Plan::default());
        let view = |n: usize| AttachmentView {
            namespace: "shop".into(),
            name: format!("p{n}"),
            ..AttachmentView::default()
        };
        for n in 0..ANSWERS_PER_PASS {
            let subject = subject(ATTACHMENTS, &format!("shop/p{n}"));
            memory.writes.failed(&subject, WriteFailure::OutOfDate, None, (now.steady, 1.0));
        }
        let mut turn = Turn::new(&mut memory, now);
        let all = 0..2 * ANSWERS_PER_PASS;
        let taken: Vec<usize> = all.filter(|n| turn.takes(&view(*n), &mut memory, &mut plan)).collect();
        assert_eq!(taken, Vec::from_iter(ANSWERS_PER_PASS..2 * ANSWERS_PER_PASS));
        assert_eq!(plan.again, Some(now.steady + Duration::from_millis(100)));
        assert!(!turn.takes(&view(1000), &mut memory, &mut plan), "no more than those in one pass");
    }
}
