//! NetworkAttachments of users that no agent takes up: their pod is nowhere, and somebody must say so.

use jiff::SignedDuration;
use jiff::Timestamp;
use knit_api::NetworkAttachmentStatus;
use knit_api::conditions::network_attachment as reasons;

use super::action::{Action, Plan};
use super::index::Index;
use super::status::condition;
use super::turn::Turn;
use crate::cluster::{Memory, Now};

/// How long the agent of a pod's node may take to say something first.
const POD_NOT_FOUND_DELAY: SignedDuration = SignedDuration::from_secs(10);

/// Answers those that waited long enough. The agent of the pod's node overwrites it as soon as there is one.
pub(super) fn answer(index: &Index<'_>, memory: &mut Memory, now: Now, turn: &mut Turn, plan: &mut Plan) {
    for waiting in index.unanswered() {
        let Some(created) = waiting.unanswered else { continue };
        let over = created.saturating_add(POD_NOT_FOUND_DELAY).unwrap_or(Timestamp::MAX);
        if now.wall < over {
            plan.again_at(now.when(over));
            continue;
        }
        if !turn.takes(waiting, memory, plan) {
            continue;
        }
        let message = format!(
            "no node runs pod {} in namespace {}: create the pod, or delete this NetworkAttachment",
            waiting.pod, waiting.namespace
        );
        let condition =
            condition(&[], reasons::READY, false, reasons::REASON_NO_POD, message, None, now.wall);
        plan.actions.push(Action::AttachmentStatus {
            namespace: waiting.namespace.clone(),
            name: waiting.name.clone(),
            resource_version: waiting.resource_version.clone(),
            status: NetworkAttachmentStatus {
                conditions: vec![condition],
                ..NetworkAttachmentStatus::default()
            },
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::cluster::{AttachmentView, Cluster};
    use crate::plan::kept::Indexed;

    #[test]
    fn what_no_agent_takes_up_is_answered_once_the_agents_had_their_time() {
        let created = Timestamp::from_second(1_000_000).expect("a time");
        let at = |seconds| Now {
            wall: created + SignedDuration::from_secs(seconds),
            steady: Duration::from_secs(500),
        };
        let view = AttachmentView {
            namespace: "shop".into(),
            name: "web-blue".into(),
            pod: "web".into(),
            unanswered: Some(created),
            ..AttachmentView::default()
        };
        let answered = AttachmentView { network: "blue".into(), ..AttachmentView::default() };
        let all = [view, answered].map(|view| ((view.namespace.clone(), view.name.clone()), Arc::new(view)));
        let cluster = Cluster { attachments: all.into(), ..Cluster::default() };
        let (indexed, departed) = (Indexed::new(cluster), std::collections::HashSet::new());
        let index = Index::new(&indexed, &departed);
        let mut plan = Plan::default();
        let mut memory = Memory::default();
        let mut answer = |now, plan: &mut Plan| {
            let mut turn = Turn::new(&mut memory, now);
            answer(&index, &mut memory, now, &mut turn, plan);
        };
        answer(at(0), &mut plan);
        assert_eq!((plan.actions.len(), plan.again), (0, Some(Duration::from_secs(510))));
        let mut plan = Plan::default();
        answer(at(10), &mut plan);
        let words = plan.to_string();
        assert_eq!(words, "status of NetworkAttachment shop/web-blue: Ready=False/PodNotFound\n");
        let [Action::AttachmentStatus { status, .. }] = plan.actions.as_slice() else { panic!("{words}") };
        assert!(status.conditions[0].message.contains("no node runs pod web in namespace shop"));
    }
}
