//! Attachments that a runtime has lost, or of which something is damaged, are made again with what is
//! recorded of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use knit_ledger::{Opaque, SandboxRecord};
use knit_runtime::{AttachRequest, Attachment, InterfaceName, Runtime, SandboxId};
use tokio::time::Instant;

use super::{Lists, Outcome, Reconciler};
use crate::level::{Damaged, Turn, is_damage};
use crate::pipeline::Answer;
use crate::report::PodEvent;
use crate::sandboxes::books::pod_of;

impl Reconciler {
    /// Makes these attachments again, of sandboxes for which nothing else is being done. Says when the next
    /// one is due of those that were made again too often of late.
    pub(crate) async fn attach_again(&self, damaged: &Damaged, outcome: &mut Outcome) -> Option<Instant> {
        let sandboxes: BTreeSet<&SandboxId> = damaged.iter().map(|(sandbox, _)| sandbox).collect();
        let lists = Lists { damaged: damaged.clone(), ..Lists::default() };
        let mut later = None;
        for sandbox in sandboxes {
            // If something is being done for it, that settles it.
            let Some(_guard) = self.sandboxes.locks().try_lock(sandbox) else { continue };
            let Some(record) = self.sandboxes.books().get(sandbox).cloned() else { continue };
            later = later.into_iter().chain(self.reconcile_one(&record, &lists, outcome).await).min();
        }
        later
    }

    /// Makes attachments again that a runtime has lost, or of which something is damaged. Says when the next
    /// one is due of those that were made again too often of late.
    pub(super) async fn repair(
        &self,
        record: &SandboxRecord,
        lists: &Lists,
        outcome: &mut Outcome,
    ) -> Option<Instant> {
        let pod = pod_of(record).ok()?;
        let mut later: Option<Instant> = None;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let Ok(interface) = InterfaceName::new(plan.interface.as_str()) else { continue };
            // A runtime that does not answer has lost nothing that we know of.
            let lost = lists.by_runtime.contains_key(&plan.runtime)
                && lists.find(&plan.runtime, &pod.sandbox, &plan.interface).is_none();
            if !lost && !lists.damaged.contains(&(pod.sandbox.clone(), interface.clone())) {
                continue;
            }
            let Some(runtime) = self.runtimes.get(&plan.runtime) else { continue };
            match self.repairs.attachment(&pod.sandbox, &interface) {
                Turn::Later(at) => {
                    later = Some(later.map_or(at, |later| later.min(at)));
                    continue;
                }
                Turn::Now { fight: true, first: true } => {
                    tracing::error!(
                        sandbox = record.sandbox(), %interface, network = %plan.network,
                        "an interface is lost again and again: it is made again once in a while"
                    );
                }
                Turn::Now { .. } => {}
            }
            let request = match self.pipeline.asked_of_runtime(record, &pod, &plan.interface) {
                Ok(request) => request,
                Err(error) => {
                    tracing::warn!(
                        sandbox = record.sandbox(),
                        interface = %plan.interface,
                        error = &error as &dyn std::error::Error,
                        "a lost interface cannot be made again yet"
                    );
                    outcome.failed += 1;
                    continue;
                }
            };
            let again = self.make_again(&runtime, &request);
            let result = tokio::time::timeout(self.config.runtime_deadline, again).await;
            let verified = |attachment: &Attachment| {
                let answer = Answer { request: request.clone(), attachment: attachment.clone() };
                answer.verify(record.netns().inode).is_ok()
            };
            match result {
                Ok(Ok(made)) if verified(&made) => {
                    tracing::warn!(
                        sandbox = record.sandbox(), interface = %plan.interface, network = %plan.network,
                        "an interface was lost or damaged, and is made again"
                    );
                    self.metrics.repaired("attachment", 1);
                    let message = format!(
                        "interface {interface} on Network {} was lost or damaged, and was made again with \
                         its \
                         addresses: look for what deletes or changes interfaces, in the pod or on its node",
                        plan.network
                    );
                    self.report.say(PodEvent { pod: pod.clone(), reason: "InterfaceMadeAgain", message });
                    let Some(mut current) = self.sandboxes.books().get(&pod.sandbox).cloned() else {
                        return later;
                    };
                    let noted = Opaque::of(&made).is_ok_and(|m| current.attached(&plan.interface, m).is_ok())
                        && self.sandboxes.books().put(current).is_ok();
                    if noted {
                        outcome.repaired += 1;
                    } else {
                        outcome.failed += 1;
                    }
                    self.report.changed(&pod.sandbox);
                }
                Ok(Ok(made)) => {
                    // It may be in a namespace that is another's by now: nothing of ours stays there.
                    if let Err(error) = runtime.detach(&request.pod, Some(&made.interface)).await {
                        tracing::error!(
                            sandbox = record.sandbox(),
                            interface = %plan.interface,
                            network = %plan.network,
                            error = &error as &dyn std::error::Error,
                            "an interface that was not made as asked cannot be removed"
                        );
                    }
                    outcome.failed += 1;
                }
                Err(_) => outcome.failed += 1,
                Ok(Err(error)) => {
                    tracing::error!(
                        sandbox = record.sandbox(),
                        interface = %plan.interface,
                        network = %plan.network,
                        error = &error as &dyn std::error::Error,
                        "a lost interface cannot be made again"
                    );
                    outcome.failed += 1;
                }
            }
        }
        later
    }

    /// Attaches again. A runtime may take what is there for what was asked for; if it then says itself that
    /// it is damaged, it is taken away first.
    async fn make_again(
        &self,
        runtime: &Arc<dyn Runtime>,
        request: &AttachRequest,
    ) -> knit_runtime::Result<Attachment> {
        let made = runtime.attach(request).await?;
        let (pod, interface) = (&request.pod, Some(&request.interface));
        match runtime.check(pod, Some(&request.netns), interface).await {
            Err(error) if is_damage(error.reason) => {
                runtime.detach(pod, interface).await?;
                runtime.attach(request).await
            }
            _ => Ok(made),
        }
    }
}
