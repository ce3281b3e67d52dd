//! Attachments that a runtime has lost, or of which something is damaged, are made again with what is
//! recorded of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use knit_ledger::SandboxRecord;
use knit_runtime::{
    AttachRequest, Attachment, InterfaceName, PortMapping, Reason as RuntimeReason, Runtime, SandboxId,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Lists, Outcome, Reconciler, SANDBOXES_AT_ONCE};
use crate::level::{COMPARE_RETRY_DELAY, Damaged, RepairTurn, is_damage};
use crate::pipeline::Answer;
use crate::pipeline::admit::Admitted;
use crate::report::PodEvent;

impl Reconciler {
    /// Makes these attachments again, of sandboxes for which nothing else is being done. Says when the next
    /// one is due of those that were made again too often of late.
    pub(crate) async fn attach_again(&self, damaged: &Damaged, outcome: &mut Outcome) -> Option<Instant> {
        let sandboxes: BTreeSet<SandboxId> = damaged.iter().map(|(sandbox, _)| sandbox.clone()).collect();
        let lists = Lists { damaged: damaged.clone(), ..Lists::default() };
        self.reconcile_each(sandboxes, &lists, outcome).await
    }

    /// Makes damaged attachments again as they are told of, forever, and side by side: how long one takes is
    /// up to its pod, which may not answer. Tells when something is to be looked at again.
    pub(crate) async fn keep_attached(
        &self,
        mut told: UnboundedReceiver<Damaged>,
        look_again: UnboundedSender<Instant>,
    ) {
        let (mut waiting, mut running) = (BTreeMap::<SandboxId, Damaged>::new(), FuturesUnordered::new());
        // Those that are being made again, and whether they were told of once more since.
        let mut busy: BTreeMap<SandboxId, bool> = BTreeMap::new();
        loop {
            while running.len() < SANDBOXES_AT_ONCE
                && let Some((sandbox, damaged)) = waiting.pop_first()
            {
                busy.insert(sandbox.clone(), false);
                running.push(
                    async move { (sandbox, self.attach_again(&damaged, &mut Outcome::default()).await) },
                );
            }
            let look_at = tokio::select! {
                more = told.recv() => {
                    let Some(more) = more else { return };
                    for one in more {
                        match busy.get_mut(&one.0) {
                            Some(again) => *again = true,
                            None => _ = waiting.entry(one.0.clone()).or_default().insert(one),
                        }
                    }
                    None
                }
                Some((sandbox, later)) = running.next() => {
                    let again = busy.remove(&sandbox).is_some_and(|again| again);
                    later.into_iter().chain(again.then(|| Instant::now() + COMPARE_RETRY_DELAY)).min()
                }
            };
            if let Some(at) = look_at
                && look_again.send(at).is_err()
            {
                return;
            }
        }
    }

    /// Whether a runtime has an attachment that was not on its list: it may have been made since. One that
    /// does not answer has lost nothing that we know of.
    async fn is_there(
        &self,
        runtime: &Arc<dyn Runtime>,
        sandbox: &SandboxId,
        interface: &InterfaceName,
    ) -> bool {
        let listed = tokio::time::timeout(self.config.runtime_deadline, runtime.list(Some(sandbox))).await;
        match listed {
            Ok(Ok(listed)) => listed.iter().any(|found| found.interface == *interface),
            Ok(Err(_)) | Err(_) => true,
        }
    }

    /// Makes attachments again that a runtime has lost, or of which something is damaged. Says when the next
    /// one is due of those that were made again too often of late.
    pub(super) async fn repair(
        &self,
        record: &SandboxRecord,
        lists: &Lists,
        outcome: &mut Outcome,
    ) -> Option<Instant> {
        let pod = record.runtime_pod();
        let mut later: Option<Instant> = None;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let interface = &plan.interface;
            // A runtime that does not answer has lost nothing that we know of.
            let found = lists.find(&plan.runtime, &pod.sandbox, &plan.interface);
            let lost = lists.by_runtime.contains_key(&plan.runtime) && found.is_none();
            // A runtime that was started since does not know what was asked for: only the record does.
            let closed = found.is_some_and(|found| is_closed(&attachment.details().ports, found));
            if !lost && !closed && !lists.damaged.contains(&(pod.sandbox.clone(), interface.clone())) {
                continue;
            }
            let Some(runtime) = self.runtimes.get(&plan.runtime) else { continue };
            // All pods of the node wait for the first pass: one that let it wait would do so once more for
            // each of these. Later passes try each, since it may be the pod that does not answer.
            if lists.first && lists.is_silent(&self.runtimes, &plan.runtime) {
                outcome.failed += 1;
                continue;
            }
            if lost && self.is_there(&runtime, &pod.sandbox, interface).await {
                continue;
            }
            match self.repairs.attachment(&pod.sandbox, interface) {
                RepairTurn::Later(at) => {
                    later = Some(later.map_or(at, |later| later.min(at)));
                    continue;
                }
                RepairTurn::Now { fight: true, first: true } => {
                    tracing::error!(
                        sandbox = %record.sandbox(), %interface, network = %plan.network,
                        "an interface keeps disappearing: it is recreated at a limited rate"
                    );
                }
                RepairTurn::Now { .. } => {}
            }
            let request = match self.pipeline.asked_of_runtime(record, &pod, &plan.interface) {
                Ok(request) => request,
                Err(error) => {
                    tracing::warn!(
                        sandbox = %record.sandbox(),
                        interface = %plan.interface,
                        error = &error as &dyn std::error::Error,
                        "cannot recreate a lost interface yet"
                    );
                    outcome.failed += 1;
                    continue;
                }
            };
            let deadline = Instant::now() + self.config.runtime_deadline;
            let admitted = match self.pipeline.admit_again(record, deadline).await {
                Ok(admitted) => admitted,
                Err(error) => {
                    tracing::warn!(
                        sandbox = %record.sandbox(),
                        interface = %plan.interface,
                        error = &error as &dyn std::error::Error,
                        "cannot recreate a lost interface yet: its policies are not in force"
                    );
                    outcome.failed += 1;
                    continue;
                }
            };
            let mut again: BoxFuture<'static, _> =
                Box::pin(make_again(admitted.into_owned(), Arc::clone(&runtime), request.clone()));
            let result = tokio::time::timeout(self.config.runtime_deadline, &mut again).await;
            if lists.first {
                self.runtimes.has_answered(&plan.runtime, result.is_ok());
            }
            let verified = |attachment: &Attachment| {
                let answer = Answer { request: request.clone(), attachment: attachment.clone() };
                answer.verify(record.netns().inode).is_ok()
            };
            match result {
                Ok(Ok(made)) if verified(&made) => {
                    tracing::warn!(
                        sandbox = %record.sandbox(), interface = %plan.interface, network = %plan.network,
                        "an interface was lost or damaged; recreating it"
                    );
                    self.metrics.repaired("attachment", 1);
                    let message = format!(
                        "interface {interface} on Network {} was lost or damaged, and was recreated with \
                        its addresses: look for a program that deletes or changes interfaces, in the pod \
                        or on its node",
                        plan.network
                    );
                    self.report.say(PodEvent { pod: pod.clone(), reason: "InterfaceMadeAgain", message });
                    let Some(mut current) = self.sandboxes.books().get(&pod.sandbox).cloned() else {
                        return later;
                    };
                    let noted = current.attached(interface, made).is_ok()
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
                    let limit = self.config.detach_deadline;
                    let removal = runtime.detach(&request.pod, Some(&made.interface));
                    let removed = tokio::time::timeout(limit, removal).await;
                    let problem = match removed {
                        Ok(Ok(())) => None,
                        Ok(Err(error)) => Some(knit_types::chain(&error).to_string()),
                        Err(_) => Some(format!("its runtime did not answer within {} s", limit.as_secs())),
                    };
                    if let Some(error) = problem {
                        tracing::error!(
                            sandbox = %record.sandbox(),
                            interface = %plan.interface,
                            network = %plan.network,
                            error,
                            "cannot remove an interface that was not created as requested"
                        );
                    }
                    outcome.failed += 1;
                }
                Err(_) => {
                    // It cannot be ended, and goes on without the sandbox's lock: a DEL may come meanwhile.
                    self.pipeline.outlive(Arc::clone(&runtime), again, &request);
                    outcome.failed += 1;
                }
                Ok(Err(error)) => {
                    tracing::error!(
                        sandbox = %record.sandbox(),
                        interface = %plan.interface,
                        network = %plan.network,
                        error = &error as &dyn std::error::Error,
                        "cannot recreate a lost interface"
                    );
                    // Its address stays the pod's: the other host may be the one that has to give it up.
                    if error.reason == RuntimeReason::AddressInUse {
                        let message = format!(
                            "interface {interface} on Network {} cannot be recreated: {}",
                            plan.network,
                            knit_types::chain(&error)
                        );
                        self.report.say(PodEvent { pod: pod.clone(), reason: "AddressInUse", message });
                    }
                    outcome.failed += 1;
                }
            }
        }
        later
    }
}

/// Attaches again. A runtime may take what is there for what was asked for; if it then says itself that it is
/// damaged, it is taken away first.
///
/// In a task of its own: a runtime inside the agent works right where it is awaited, and waits for the pod to
/// answer there.
async fn make_again(
    admitted: Admitted<'static>,
    runtime: Arc<dyn Runtime>,
    request: AttachRequest,
) -> knit_runtime::Result<Attachment> {
    let mut task = JoinSet::new();
    task.spawn(async move {
        let made = admitted.attach(&runtime, &request).await?;
        let (pod, interface) = (&request.pod, Some(&request.interface));
        match runtime.check(pod, Some(&request.netns), interface).await {
            Err(error) if is_damage(error.reason) => {
                runtime.detach(pod, interface).await?;
                admitted.attach(&runtime, &request).await
            }
            _ => Ok(made),
        }
    });
    match task.join_next().await {
        Some(Ok(made)) => made,
        Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Nobody else ends it.
        Some(Err(_)) | None => Err(knit_runtime::Error::new(RuntimeReason::Internal, "it was given up")),
    }
}

/// Whether a port of the node that was asked for does not lead to an attachment, by what its runtime says.
/// One that says nothing of ports is believed.
fn is_closed(asked: &[PortMapping], found: &Attachment) -> bool {
    let plain = |mapping: &PortMapping| PortMapping {
        host_ip: mapping.host_ip.filter(|ip| !ip.is_unspecified()),
        ..*mapping
    };
    // On an address of a family that the pod does not have, nothing leads to it.
    let leads = |mapping: &&PortMapping| {
        let same_family =
            |ip: &IpAddr| found.addresses.iter().any(|a| a.net.addr().is_ipv4() == ip.is_ipv4());
        mapping.host_ip.as_ref().is_none_or(same_family)
    };
    let there: Vec<PortMapping> = found.ports.iter().map(plain).collect();
    !there.is_empty() && asked.iter().filter(leads).any(|mapping| !there.contains(&plain(mapping)))
}

#[cfg(test)]
mod tests {
    use knit_runtime::{Address, HostEnd, Pod, Protocol};

    use super::*;

    #[test]
    fn a_host_port_that_was_closed_while_no_agent_ran_stayed_closed() {
        let mapping = |host_port, host_ip: Option<&str>| PortMapping {
            protocol: Protocol::Tcp,
            host_port,
            container_port: 80,
            host_ip: host_ip.map(|ip| ip.parse().expect("an address")),
        };
        let found = |ports: &[PortMapping]| Attachment {
            pod: Pod { sandbox: "one".parse().expect("an id"), namespace: None, name: None, uid: None },
            network: "default".into(),
            interface: "eth0".parse().expect("a name"),
            addresses: vec![Address { net: "10.1.0.5/32".parse().expect("an address"), gateway: None }],
            mac: knit_ipam::Mac([2, 0, 0, 0, 0, 1]),
            mtu: 1450,
            routes: Vec::new(),
            dns: knit_runtime::Dns::default(),
            host: HostEnd::default(),
            pod_netns_inode: 1,
            ports: ports.to_vec(),
        };
        let (one, two) = (mapping(8080, None), mapping(8081, None));
        let asked = [one, two];
        assert!(!is_closed(&asked, &found(&[two, one])));
        assert!(is_closed(&asked, &found(std::slice::from_ref(&one))));
        assert!(!is_closed(&asked, &found(&[])), "its runtime says nothing of ports");
        let any = mapping(8080, Some("0.0.0.0"));
        assert!(!is_closed(&[any], &found(std::slice::from_ref(&one))));
        let v6 = mapping(8082, Some("fd07::1"));
        assert!(!is_closed(&[one, v6], &found(std::slice::from_ref(&one))), "it has no such address");
        let at = mapping(8080, Some("192.168.7.1"));
        assert!(is_closed(&[at], &found(&[one])));
    }
}
