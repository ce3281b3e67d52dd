//! The steps of a request, each of which leaves nothing half-done: clear away what is in the way, resolve, reserve and
//! record, attach; and the way back.

use std::collections::BTreeSet;

use knit_ledger::SandboxRecord;
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use tokio::time::Instant;

use super::{Attached, Core};
use crate::attach::GIVE_UP;
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::record::{Details, NotReserved, details, made, pod_of};
use crate::request::{PodRequest, pod_name};
use crate::resolve::{Missing, Wanted, resolve};

impl Core {
    pub(super) async fn do_attach(&self, request: &PodRequest, deadline: Instant) -> Result<Attached> {
        let pod = &request.pod;
        let who = pod_name(pod);
        let _guard =
            tokio::time::timeout_at(deadline, self.inner.locks.lock(&pod.sandbox)).await.map_err(|_| {
                Error::new(
                    Reason::NotReady,
                    format!("{who}: an earlier request for it still runs: it tries again"),
                )
            })?;
        let namespace = match netns::identify(&request.netns) {
            Ok(Some(namespace)) => namespace,
            Ok(None) => {
                let path = request.netns.display();
                return Err(Error::new(
                    Reason::UnknownSandbox,
                    format!("{who}: there is no network namespace {path}"),
                ));
            }
            Err(error) => {
                let message =
                    format!("{who}: network namespace {} cannot be looked at", request.netns.display());
                return Err(Error::new(Reason::Invalid, message).because(error));
            }
        };
        let known = self.books().get(&pod.sandbox).cloned();
        if let Some(record) = known {
            if record.is_attached() && *record.netns() == namespace {
                if is_main(&record, &request.interface) {
                    return Ok(answer(&record));
                }
                // Its main interface carries a running pod.
                let message = format!(
                    "{who}: sandbox {} has its networks, and {} is not its main interface: a further one is asked for with \
                     the annotation knit.dev/networks or a NetworkAttachment; for another main one, detach the pod first",
                    pod.sandbox, request.interface
                );
                return Err(Error::new(Reason::Refused, message));
            }
            tracing::info!(sandbox = %pod.sandbox, "an earlier attempt for this sandbox is cleared away first");
            self.remove_sandbox(&record).await?;
        }
        self.supersede(pod).await;

        let wanted = self.resolve(request, deadline).await?;
        self.check_host_ports(pod, &wanted)?;
        let networks: BTreeSet<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
        let block_deadline = deadline.min(Instant::now() + self.inner.config.block_wait);
        let ready = networks.iter().map(|network| async move {
            self.ensure_network(network, block_deadline).await?;
            let in_force = self.inner.networks.in_force(network, block_deadline).await;
            in_force.map_err(|problem| problem.into_error(network))
        });
        for result in futures::future::join_all(ready).await {
            result.map_err(|error| Error { message: format!("{who}: {}", error.message), ..error })?;
        }
        let plan: Vec<(Wanted, Details)> = wanted
            .into_iter()
            .enumerate()
            .map(|(n, wanted)| {
                let details = Details {
                    door: request.door.clone(),
                    main: n == 0,
                    default_route: wanted.default_route,
                    ports: wanted.ports.clone(),
                    dns: wanted.dns.clone(),
                };
                (wanted, details)
            })
            .collect();
        let record = self.reserve(pod, &namespace, &plan, block_deadline).await?;
        // What fails must be taken back before the caller stops waiting, or it never hears why.
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.saturating_sub(GIVE_UP).max(left / 2).min(self.inner.config.runtime_deadline);
        let record = self.attach_planned(record, limit).await?;
        self.books_changed();
        Ok(answer(&record))
    }

    /// A port of the node that is another tenant's node port would take what is meant for that one's Service.
    fn check_host_ports(&self, pod: &Pod, wanted: &[Wanted]) -> Result<()> {
        let Some(proxy) = &self.inner.proxy else { return Ok(()) };
        for mapping in wanted.iter().flat_map(|wanted| &wanted.ports) {
            let owner = proxy.owner_of_node_port(mapping.protocol, mapping.host_port);
            let Some((namespace, name)) =
                owner.filter(|(namespace, _)| Some(namespace) != pod.namespace.as_ref())
            else {
                continue;
            };
            let message = format!(
                "{}: host port {} is the node port of Service {namespace}/{name}: give the pod another one",
                pod_name(pod),
                mapping.host_port
            );
            return Err(Error::new(Reason::Refused, message));
        }
        Ok(())
    }

    async fn resolve(&self, request: &PodRequest, deadline: Instant) -> Result<Vec<Wanted>> {
        let patience = deadline.min(Instant::now() + self.inner.config.cache_wait);
        let found = self.inner.world.wait(patience, |world| match resolve(world, request) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        });
        found.await?
    }

    /// Reserves and records, and waits for a further block if there is no address.
    pub(crate) async fn reserve(
        &self,
        pod: &Pod,
        namespace: &knit_ledger::NetnsRef,
        plan: &[(Wanted, Details)],
        deadline: Instant,
    ) -> Result<SandboxRecord> {
        plan.iter().try_for_each(|(wanted, _)| self.runtimes().can_have(wanted))?;
        let record = loop {
            let freed = self.inner.addresses.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            let reserved = self.books().reserve(pod, namespace, plan, clock::now());
            match reserved {
                Ok(record) => break record,
                Err(NotReserved::Error(error)) => return Err(error),
                Err(NotReserved::Exhausted { network, error }) => {
                    self.inner.networks.starved(&network);
                    self.networks_changed();
                    tracing::info!(%network, sandbox = %pod.sandbox, "no free address; waiting for a further block");
                    if tokio::time::timeout_at(deadline, freed).await.is_err() {
                        return Err(error);
                    }
                }
            }
        };
        self.books_changed();
        self.cover(&record, deadline).await?;
        Ok(record)
    }

    /// Reserves and records, and waits for nothing: who asks comes again.
    pub(crate) async fn reserve_now(
        &self,
        pod: &Pod,
        namespace: &knit_ledger::NetnsRef,
        plan: &[(Wanted, Details)],
    ) -> Result<SandboxRecord> {
        let reserved = self.books().reserve(pod, namespace, plan, clock::now());
        let record = match reserved {
            Ok(record) => record,
            Err(NotReserved::Error(error)) => return Err(error),
            Err(NotReserved::Exhausted { network, error }) => {
                self.inner.networks.starved(&network);
                self.networks_changed();
                return Err(error);
            }
        };
        self.books_changed();
        self.cover(&record, Instant::now() + self.inner.config.runtime_deadline).await?;
        Ok(record)
    }

    /// A block that came a moment ago may not be known to the runtime yet. What is planned is taken back if that lasts.
    async fn cover(&self, record: &SandboxRecord, deadline: Instant) -> Result<()> {
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let Some(lease) = &plan.lease else { continue };
            let own: Vec<knit_ipam::Block> = self.books().allocator.blocks(&plan.network).cloned().collect();
            if !self.inner.networks.covers(&plan.network, self.node(), &lease.addresses, &own)
                && let Err(error) = self.bring_up_to_date(&plan.network, deadline).await
            {
                let planned: Vec<String> = record
                    .attachments()
                    .iter()
                    .filter(|a| matches!(a.state(), knit_ledger::AttachmentState::Planned))
                    .map(|a| a.plan().interface.clone())
                    .collect();
                self.take_back(record, &planned).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes all of a sandbox away.
    pub(crate) async fn remove_sandbox(&self, record: &SandboxRecord) -> Result<()> {
        let all: Vec<String> = record.attachments().iter().map(|a| a.plan().interface.clone()).collect();
        let problem = self.take_back_within(record, &all, self.inner.config.detach_deadline).await;
        if let Ok(pod) = pod_of(record) {
            self.inner.report.detached(&pod);
        }
        let Some(problem) = problem else { return Ok(()) };
        let message = format!(
            "sandbox {} could not be detached completely: {problem}; the agent tries again",
            record.sandbox()
        );
        Err(Error::new(Reason::NotReady, message))
    }

    /// A pod has one sandbox at a time: when it comes with a new one, the old one's DEL never came.
    async fn supersede(&self, pod: &Pod) {
        let old: Vec<SandboxId> = {
            let books = self.books();
            let same_pod = books.records().filter(|r| {
                let known = r.pod();
                r.sandbox() != pod.sandbox.as_str()
                    && known.is_some_and(|k| {
                        Some(&k.namespace) == pod.namespace.as_ref() && Some(&k.name) == pod.name.as_ref()
                    })
                    && (known.is_some_and(|k| k.uid.is_some() && k.uid == pod.uid)
                        || netns::is_gone(r.netns()))
            });
            same_pod.filter_map(|r| SandboxId::new(r.sandbox()).ok()).collect()
        };
        for sandbox in old {
            // If something is being done for it, that settles it.
            let Some(_guard) = self.inner.locks.try_lock(&sandbox) else { continue };
            let record = self.books().get(&sandbox).cloned();
            if let Some(record) = record {
                tracing::info!(old = %sandbox, new = %pod.sandbox, "the pod has a new sandbox; its old one is cleared away");
                // What is left of it is tried again by the next pass.
                let _ = self.remove_sandbox(&record).await;
            }
        }
    }

    pub(super) async fn do_check(&self, sandbox: &SandboxId) -> Result<Attached> {
        let Some(record) = self.books().get(sandbox).cloned() else {
            return Err(Error::new(Reason::UnknownSandbox, format!("sandbox {sandbox} has no networks")));
        };
        if netns::is_gone(record.netns()) {
            let path = record.netns().path.display();
            let message = format!("sandbox {sandbox}: network namespace {path} is gone or another one");
            return Err(Error::new(Reason::UnknownSandbox, message));
        }
        if !record.is_attached() {
            let message = format!("sandbox {sandbox} is not attached to all of its networks");
            return Err(Error::new(Reason::Damaged, message));
        }
        let pod = pod_of(&record)?;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let runtime = self.runtimes().get(&plan.runtime).ok_or_else(|| {
                Error::new(Reason::NotReady, format!("network runtime {} does not answer", plan.runtime))
            })?;
            let interface = InterfaceName::new(plan.interface.as_str()).ok();
            let check = runtime.check(&pod, Some(&record.netns().path), interface.as_ref());
            let limit = self.inner.config.detach_deadline;
            match tokio::time::timeout(limit, check).await {
                Ok(checked) => checked.map_err(|error| {
                    Error::from_runtime("checking", &plan.network, &plan.interface, error)
                })?,
                Err(_) => {
                    let (name, seconds) = (&plan.runtime, limit.as_secs());
                    let message = format!(
                        "network runtime {name} did not check interface {} within {seconds} s: see its log",
                        plan.interface
                    );
                    return Err(Error::new(Reason::NotReady, message));
                }
            }
        }
        Ok(answer(&record))
    }
}

/// Whether an interface is the main one of its sandbox: the one that an ADD names. Where none is known to be, any one may.
pub(super) fn is_main(record: &SandboxRecord, interface: &InterfaceName) -> bool {
    let main = record.attachments().iter().find(|a| details(a).is_some_and(|d| d.main));
    match main {
        Some(main) => main.plan().interface == interface.as_str(),
        None => record.attachment(interface.as_str()).is_some(),
    }
}

/// What a pod has, from its record: the main interface first.
fn answer(record: &SandboxRecord) -> Attached {
    let mut attachments: Vec<(bool, Attachment)> = record
        .attachments()
        .iter()
        .filter_map(|a| Some((!details(a).is_some_and(|d| d.main), made(a)?)))
        .collect();
    attachments.sort_by_key(|(further, _)| *further);
    Attached {
        attachments: attachments.into_iter().map(|(_, attachment)| attachment).collect(),
        netns: record.netns().path.clone(),
    }
}
