//! One pod's way: every front door makes a [`PodRequest`], and this carries it out. The files are the steps
//! in their order, and each step takes what only the one before it gives:
//!
//! | step | file | from | to |
//! |---|---|---|---|
//! | resolve | `resolve` | request, one snapshot of the cluster | `Resolved` |
//! | reserve | `reserve` | `Resolved` | `Reserved`: addresses for all interfaces, or for none |
//! | record | `record` | `Reserved` | `Recorded`: the whole plan is in the ledger, and nothing is made yet |
//! | attach | `attach` | `Recorded` | `Answers` of the runtimes, all of them |
//! | verify | `verify` | `Answers` | `Verified`: what was made is what was asked for |
//! | record | `record` | `Verified` | `Made`, acknowledged |
//! | undo | `undo` | whatever was recorded | nothing is left, or a later pass tries again |

mod attach;
mod record;
mod reserve;
pub mod resolve;
mod undo;
mod verify;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use knit_ledger::{NetnsRef, SandboxRecord};
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use tokio::time::Instant;

use crate::config::CoreConfig;
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::networks::{Networks, Patience};
use crate::report::Report;
use crate::request::{Door, PodRequest, pod_name};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::books::{details, made, pod_of};
use crate::world::{World, WorldStore};
use resolve::{Held, Missing, Wanted, resolve};
pub(crate) use verify::Answer;

/// How long a runtime may take to take back what it could not make. Its attach may have used up most of the
/// time that the caller waits.
const GIVE_UP: Duration = Duration::from_secs(5);

/// All that carrying out a request takes. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline {
    pub(crate) config: Arc<CoreConfig>,
    pub(crate) world: Arc<WorldStore>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) runtimes: Arc<Runtimes>,
    pub(crate) networks: Arc<Networks>,
    pub(crate) report: Arc<Report>,
}

/// What a pod got: its main interface first.
#[derive(Clone, Debug, PartialEq)]
pub struct Attached {
    /// The interfaces.
    pub attachments: Vec<Attachment>,
    /// The pod's network namespace.
    pub netns: std::path::PathBuf,
}

/// Where a sandbox is, and what it has already.
#[derive(Debug)]
struct Site {
    netns: NetnsRef,
    has: Vec<Held>,
}

/// What a sandbox is to get.
#[derive(Debug)]
struct Resolved {
    pod: Pod,
    netns: NetnsRef,
    door: Door,
    wanted: Vec<Wanted>,
}

// === impl Pipeline ===

impl Pipeline {
    /// Carries out a request: everything that it is about, or nothing. The same request again gives the same
    /// answer.
    pub(crate) async fn attach(&self, request: &PodRequest, deadline: Instant) -> Result<Attached> {
        let (pod, who) = (&request.pod, pod_name(&request.pod));
        let lock = self.sandboxes.locks().lock(&pod.sandbox);
        let _guard = tokio::time::timeout_at(deadline, lock).await.map_err(|_| {
            Error::new(
                Reason::NotReady,
                format!("{who}: an earlier request for it still runs: it tries again"),
            )
        })?;
        let known = self.sandboxes.books().get(&pod.sandbox).cloned();
        match &request.start {
            Some(start) => {
                let netns = namespace_of(&start.netns, &who)?;
                if let Some(record) = known {
                    if record.is_attached() && *record.netns() == netns {
                        if is_main(&record, &start.interface) {
                            return Ok(answer(&record));
                        }
                        // Its main interface carries a running pod.
                        let message = format!(
                            "{who}: sandbox {} has its networks, and {} is not its main interface: a further \
                             one is \
                             asked for with the annotation knit.dev/networks or a NetworkAttachment; for \
                             another main \
                             one, detach the pod first",
                            pod.sandbox, start.interface
                        );
                        return Err(Error::new(Reason::Refused, message));
                    }
                    tracing::info!(
                        sandbox = %pod.sandbox,
                        "an earlier attempt for this sandbox is cleared away first"
                    );
                    self.remove(&record).await?;
                }
                self.supersede(pod).await;
                self.give(request, Site { netns, has: Vec::new() }, deadline).await
            }
            None => {
                let Some(record) = known.filter(SandboxRecord::is_attached) else {
                    return Err(Error::new(Reason::NotReady, format!("{who} is being attached or detached")));
                };
                self.give(request, Site::of(&record), deadline).await
            }
        }
    }

    /// Whether a sandbox that runs could get what a request is about, as far as can be told now. Nothing is
    /// changed.
    pub(crate) fn could_get(&self, request: &PodRequest) -> Result<()> {
        let record = self.sandboxes.books().get(&request.pod.sandbox).cloned();
        let Some(record) = record else {
            let message = format!("{} has no networks", pod_name(&request.pod));
            return Err(Error::new(Reason::UnknownSandbox, message));
        };
        match resolve(&self.world.get(), request, &Site::of(&record).has) {
            Ok(_) => Ok(()),
            Err(Missing::Wait(error) | Missing::Error(error)) => Err(error),
        }
    }

    /// Looks whether a sandbox's interfaces are as they were made.
    pub(crate) async fn check(&self, sandbox: &SandboxId) -> Result<Attached> {
        let _guard = self.sandboxes.locks().lock(sandbox).await;
        let record = self.sandboxes.books().get(sandbox).cloned();
        let Some(record) = record else {
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
        self.check_each(&record).await?;
        Ok(answer(&record))
    }

    /// The steps, one after the other.
    async fn give(&self, request: &PodRequest, site: Site, deadline: Instant) -> Result<Attached> {
        let wanted = self.resolve(request, &site, deadline).await?;
        // A pod that starts waits for a block; for one that runs, who asks comes again.
        let patience = match request.start {
            Some(_) => Patience::Until(deadline.min(Instant::now() + self.config.block_wait)),
            None => Patience::Once,
        };
        let resolved = self.prepare(request, site, wanted, patience).await?;
        let reserved = self.reserve(resolved, patience).await?;
        let recorded = self.record(reserved)?;
        let made = match self.make(&recorded, patience, deadline).await {
            Ok(verified) => self.acknowledge(&recorded, verified),
            Err(error) => Err(error),
        };
        match made {
            Ok(made) => Ok(made.attached()),
            Err(error) => {
                // Who waits for the answer should hear of this error; what a runtime does not take away in
                // time, a later pass does.
                self.undo(recorded.record(), recorded.planned(), GIVE_UP).await;
                Err(error)
            }
        }
    }

    /// Which Networks, under which names. If something is not known yet, a pod that starts waits for it a
    /// little.
    async fn resolve(&self, request: &PodRequest, site: &Site, deadline: Instant) -> Result<Vec<Wanted>> {
        let look = |world: &World| match resolve(world, request, &site.has) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        };
        if request.start.is_none() {
            return look(&self.world.get())?;
        }
        let soon = deadline.min(Instant::now() + self.config.cache_wait);
        self.world.wait(soon, look).await?
    }

    /// Has the Networks set up here, and runtimes that can make what is wanted.
    async fn prepare(
        &self,
        request: &PodRequest,
        site: Site,
        wanted: Vec<Wanted>,
        patience: Patience,
    ) -> Result<Resolved> {
        let networks: BTreeSet<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
        let ready = networks.iter().map(|network| async move {
            self.networks.ensure(network, patience).await?;
            let in_force = self.networks.in_force(network, patience.deadline()).await;
            in_force.map_err(|problem| problem.into_error(network))
        });
        for result in futures::future::join_all(ready).await {
            let who = pod_name(&request.pod);
            result.map_err(|error| Error { message: format!("{who}: {}", error.message), ..error })?;
        }
        // Whose node ports there are is known when the Services are.
        self.check_host_ports(&request.pod, &wanted)?;
        wanted.iter().try_for_each(|wanted| self.runtimes.can_have(wanted))?;
        Ok(Resolved { pod: request.pod.clone(), netns: site.netns, door: request.door.clone(), wanted })
    }

    /// A port of the node that is another tenant's node port would take what is meant for that one's Service.
    fn check_host_ports(&self, pod: &Pod, wanted: &[Wanted]) -> Result<()> {
        let Some(proxy) = self.networks.proxy() else { return Ok(()) };
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

    /// A pod has one sandbox at a time: when it comes with a new one, the old one's DEL never came.
    async fn supersede(&self, pod: &Pod) {
        let old: Vec<SandboxId> = {
            let books = self.sandboxes.books();
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
            let Some(_guard) = self.sandboxes.locks().try_lock(&sandbox) else { continue };
            let record = self.sandboxes.books().get(&sandbox).cloned();
            if let Some(record) = record {
                tracing::info!(
                    old = %sandbox, new = %pod.sandbox,
                    "the pod has a new sandbox; its old one is cleared away"
                );
                // What is left of it is tried again by the next pass.
                let _ = self.remove(&record).await;
            }
        }
    }

    async fn check_each(&self, record: &SandboxRecord) -> Result<()> {
        let pod = pod_of(record)?;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let runtime = self.runtimes.get(&plan.runtime).ok_or_else(|| {
                Error::new(Reason::NotReady, format!("network runtime {} does not answer", plan.runtime))
            })?;
            let interface = InterfaceName::new(plan.interface.as_str()).ok();
            let check = runtime.check(&pod, Some(&record.netns().path), interface.as_ref());
            let limit = self.config.detach_deadline;
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
        Ok(())
    }
}

// === impl Site ===

impl Site {
    /// Where a sandbox is that runs.
    fn of(record: &SandboxRecord) -> Self {
        let held = |a: &knit_ledger::Attachment| Held {
            interface: a.plan().interface.clone(),
            network: a.plan().network.clone(),
        };
        Self { netns: record.netns().clone(), has: record.attachments().iter().map(held).collect() }
    }
}

fn namespace_of(path: &std::path::Path, who: &str) -> Result<NetnsRef> {
    let shown = path.display();
    match netns::identify(path) {
        Ok(Some(namespace)) => Ok(namespace),
        Ok(None) => {
            let message = format!("{who}: there is no network namespace {shown}");
            Err(Error::new(Reason::UnknownSandbox, message))
        }
        Err(error) => {
            let message = format!("{who}: network namespace {shown} cannot be looked at");
            Err(Error::new(Reason::Invalid, message).because(error))
        }
    }
}

/// Whether an interface is the main one of its sandbox: the one that an ADD names. Where none is known to be,
/// any one may.
fn is_main(record: &SandboxRecord, interface: &InterfaceName) -> bool {
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
