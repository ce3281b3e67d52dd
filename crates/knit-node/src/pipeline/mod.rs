//! One pod's way: every front door makes a [`PodRequest`], and this carries it out. The files are the steps
//! in their order, and each step takes what only the one before it gives. `waits` says how long each may
//! wait.
//!
//! | step | file | from | to |
//! |---|---|---|---|
//! | resolve | `resolve` | request, one snapshot of the cluster | `Wanted`, for each interface |
//! | prepare | `prepare` | `Wanted` | `Resolved`: their Networks are set up here, their Services in force |
//! | reserve | `reserve` | `Resolved` | `Reserved`: addresses for all interfaces, or for none |
//! | record | `record` | `Reserved` | `Recorded`: the whole plan is in the ledger, and nothing is made yet |
//! | admit | `admit` | `Recorded` | `Admitted`: policies about it are in force |
//! | attach | `attach` | `Admitted` | an `Answer` of the runtime for each interface |
//! | verify | `verify` | `Answer` | `Verified`: what was made is what was asked for |
//! | record | `record` | `Verified` | `Made`, acknowledged |
//! | undo | `undo` | whatever was recorded | nothing is left, or a later pass tries again |
//!
//! A claim goes the first three steps before there is a sandbox (`claim`); what it has reserved, a sandbox
//! gets by the write that records its plan. `check` looks whether what was made is still there.

pub(crate) mod admit;
mod attach;
mod check;
mod claim;
mod host_ports;
mod node_selector;
mod patience;
mod prepare;
mod record;
mod reserve;
pub mod resolve;
mod set_up;
mod undo;
mod verify;
mod waits;

use std::sync::Arc;
use std::time::Duration;

use knit_ledger::{NetnsRef, SandboxRecord};
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};

use crate::config::{CoreConfig, MainInterfaces};
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::networks::{Networks, WaitLimit};
use crate::report::Report;
use crate::request::{Main, PodRequest, pod_name};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::unreadable;
use crate::world::WorldStore;
pub(crate) use claim::Occasion;
pub(crate) use patience::NriPatience;
use resolve::{Held, Missing, resolve};
pub(crate) use undo::DetachLimits;
pub(crate) use verify::Answer;
pub(crate) use waits::Waits;

/// How long a runtime may take to take back what it could not make. Its attach may have used up most of the
/// time that the caller waits.
const UNDO_TIMEOUT: Duration = Duration::from_secs(5);

/// All that carrying out a request takes. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline {
    pub(crate) config: Arc<CoreConfig>,
    pub(crate) world: Arc<WorldStore>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) runtimes: Arc<Runtimes>,
    pub(crate) networks: Arc<Networks>,
    pub(crate) report: Arc<Report>,
    pub(crate) nri_patience: Arc<NriPatience>,
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
struct SandboxSite {
    netns: NetnsRef,
    has: Vec<Held>,
}

// === impl Pipeline ===

impl Pipeline {
    /// Carries out a request: everything that it is about, or nothing. The same request again gives the same
    /// answer.
    pub(crate) async fn attach(&self, request: &PodRequest, waits: Waits) -> Result<Attached> {
        let (pod, who) = (&request.pod, pod_name(&request.pod));
        let lock = self.sandboxes.locks().lock(pod.sandbox.clone());
        let free_by = waits.soon().unwrap_or(waits.deadline());
        let _guard = tokio::time::timeout_at(free_by, lock).await.map_err(|_| {
            Error::new(
                Reason::NotReady,
                format!("{who}: an earlier request for it is still running; it will be retried"),
            )
        })?;
        let known = {
            let books = self.sandboxes.books();
            if let Some(record) = books.unreadable_of(&pod.sandbox) {
                return Err(unreadable::error(&who, record));
            }
            books.get(&pod.sandbox).cloned()
        };
        match &request.start {
            Some(start) => {
                self.check_main(&start.main, &who)?;
                let netns = namespace_of(&start.netns, &who)?;
                if let Some(record) = known {
                    if record.is_attached() && netns::is_same(record.netns(), &netns) {
                        claim::check_lent(&record, request, &who)?;
                        let answer = || Attached { netns: netns.path.clone(), ..answer(&record) };
                        let main = match &start.main {
                            Main::Ours(main) => &main.interface,
                            Main::Foreign(_) => return Ok(answer()),
                        };
                        if is_main(&record, main) {
                            return Ok(answer());
                        }
                        // Its main interface carries a running pod.
                        let message = format!(
                            "{who}: sandbox {} already has its networks, and {main} is not its main \
                            interface: \
                            request an additional interface with the annotation knit.dev/networks or a \
                            NetworkAttachment; for another main interface, detach the pod first",
                            pod.sandbox
                        );
                        return Err(Error::new(Reason::Refused, message));
                    }
                    tracing::info!(
                        sandbox = %pod.sandbox,
                        "cleaning up an earlier attempt for this sandbox first"
                    );
                    self.remove(&record).await?;
                }
                self.supersede(pod).await;
                let has = match &start.main {
                    Main::Ours(_) => Vec::new(),
                    Main::Foreign(name) => made_by_others(&start.netns, name).await,
                };
                self.give(request, SandboxSite { netns, has }, waits).await
            }
            None => {
                let Some(record) = known.filter(SandboxRecord::is_attached) else {
                    return Err(Error::new(Reason::NotReady, format!("{who} is being attached or detached")));
                };
                self.give(request, SandboxSite::of(&record), waits).await
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
        match resolve(&self.world.get(), request, &SandboxSite::of(&record).has, &[]) {
            Ok(_) => Ok(()),
            Err(Missing::Wait(error) | Missing::Error(error)) => Err(error),
        }
    }

    /// The steps, one after the other.
    async fn give(&self, request: &PodRequest, site: SandboxSite, waits: Waits) -> Result<Attached> {
        let wanted = self.resolve(request, &site, waits).await?;
        if wanted.is_empty() {
            // It wants nothing of the agent, and nothing is kept of it.
            return Ok(Attached { attachments: Vec::new(), netns: site.netns.path });
        }
        // A pod that starts waits for a block; for one that runs, who asks comes again.
        let patience = match &request.start {
            Some(_) => WaitLimit::Until(waits.at_most(self.config.block_wait)),
            None => WaitLimit::Once,
        };
        let resolved = self.prepare(request, site, wanted, patience, waits).await?;
        let reserved = self.reserve(resolved, patience).await?;
        // A claim keeps the address that it has, so for its pod another attempt gets no other one either.
        let keeps_addresses = |w: &&resolve::Wanted| !w.addresses.is_empty() || w.loan.is_some();
        let asked_for_addresses = reserved.resolved.wanted.iter().filter(keeps_addresses);
        let asked_for_addresses: Vec<InterfaceName> =
            asked_for_addresses.map(|wanted| wanted.interface.clone()).collect();
        let recorded = self.record(reserved)?;
        let made = match self.admit(&recorded, waits.admitted_by()).await {
            Ok(admitted) => self.make(&admitted, recorded.planned(), patience, waits).await,
            Err(error) => Err(error),
        };
        let made = made.and_then(|verified| self.acknowledge(&recorded, verified));
        match made {
            Ok(made) => Ok(made.attached()),
            Err(error) => {
                let error = self.final_if_asked_for(&request.pod.sandbox, &asked_for_addresses, error);
                // Who waits for the answer should hear of this error; what a runtime does not take away in
                // time, a later pass does.
                self.undo(recorded.record(), recorded.planned(), DetachLimits::of_request(UNDO_TIMEOUT))
                    .await;
                Err(error)
            }
        }
    }

    /// Where somebody else has an address that the pod asks for by itself, trying again with another one does
    /// not help.
    fn final_if_asked_for(&self, sandbox: &SandboxId, asked: &[InterfaceName], error: Error) -> Error {
        if error.reason != Reason::AddressInUse {
            return error;
        }
        let mut in_use = self.sandboxes.in_use();
        let asked = asked.iter().filter(|interface| in_use.remove(&(sandbox.clone(), (*interface).clone())));
        match asked.count() {
            0 => error,
            _ => Error { reason: Reason::Refused, ..error },
        }
    }

    /// Where another CNI plugin gives pods their main interface, the agent never does.
    fn check_main(&self, main: &Main, who: &str) -> Result<()> {
        match (self.config.main_interfaces, main) {
            (MainInterfaces::Ours, _) | (_, Main::Foreign(_)) => Ok(()),
            (MainInterfaces::Foreign, Main::Ours(main)) => {
                let message = format!(
                    "{who}: the node agent runs beside another CNI plugin (--nri) and does not create main \
                     interfaces such as {}: remove knit-cni from the CNI configuration of this node, or \
                     --nri from the agent",
                    main.interface
                );
                Err(Error::new(Reason::Refused, message))
            }
        }
    }

    /// A pod has one sandbox at a time: when it comes with a new one, the old one's DEL never came.
    async fn supersede(&self, pod: &Pod) {
        let old: Vec<SandboxId> = {
            let books = self.sandboxes.books();
            let same_pod = books.records().filter(|r| {
                let known = r.pod();
                *r.sandbox() != pod.sandbox
                    && known.is_some_and(|k| {
                        Some(&k.namespace) == pod.namespace.as_ref() && Some(&k.name) == pod.name.as_ref()
                    })
                    && (known.is_some_and(|k| k.uid.is_some() && k.uid == pod.uid)
                        || netns::is_gone(r.netns()))
            });
            same_pod.map(|r| r.sandbox().clone()).collect()
        };
        for sandbox in old {
            // If something is being done for it, that settles it.
            let Some(_guard) = self.sandboxes.locks().try_lock(sandbox.clone()) else { continue };
            let record = self.sandboxes.books().get(&sandbox).cloned();
            if let Some(record) = record {
                tracing::info!(
                    old = %sandbox, new = %pod.sandbox,
                    "the pod has a new sandbox; cleaning up the old one"
                );
                // What is left of it is tried again by the next pass.
                let _ = self.remove(&record).await;
            }
        }
    }
}

// === impl SandboxSite ===

impl SandboxSite {
    /// Where a sandbox is that runs.
    fn of(record: &SandboxRecord) -> Self {
        let held = |a: &knit_ledger::Attachment| Held {
            interface: a.plan().interface.to_string(),
            network: Some(a.plan().network.clone()),
        };
        Self { netns: record.netns().clone(), has: record.attachments().iter().map(held).collect() }
    }
}

/// What other plugins made in a namespace besides its main interface: its names are taken. If that cannot be
/// seen, the kernel refuses a name that is taken.
async fn made_by_others(netns: &std::path::Path, main: &InterfaceName) -> Vec<Held> {
    let path = netns.to_owned();
    let found = tokio::task::spawn_blocking(move || netns::interfaces(&path)).await;
    let names = match found {
        Ok(Ok(names)) => names,
        Ok(Err(error)) => {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(netns = %netns.display(), error, "its interfaces cannot be listed");
            Vec::new()
        }
        Err(_) => Vec::new(),
    };
    let others = names.into_iter().filter(|name| name != main.as_str());
    others.map(|interface| Held { interface, network: None }).collect()
}

fn namespace_of(path: &std::path::Path, who: &str) -> Result<NetnsRef> {
    let shown = path.display();
    match netns::identify(path) {
        Ok(Some(namespace)) => Ok(namespace),
        Ok(None) => {
            let message = format!("{who}: network namespace {shown} does not exist");
            Err(Error::new(Reason::UnknownSandbox, message))
        }
        Err(error) => {
            let message = format!("{who}: cannot inspect network namespace {shown}");
            Err(Error::new(Reason::Invalid, message).because(error))
        }
    }
}

/// Whether an interface is the main one of its sandbox: the one that an ADD names. Where none is known to be,
/// any one may.
fn is_main(record: &SandboxRecord, interface: &InterfaceName) -> bool {
    let main = record.attachments().iter().find(|a| a.details().main);
    match main {
        Some(main) => main.plan().interface == *interface,
        None => record.attachment(interface).is_some(),
    }
}

/// What a pod has, from its record: the main interface first.
fn answer(record: &SandboxRecord) -> Attached {
    let mut attachments: Vec<(bool, Attachment)> =
        record.attachments().iter().filter_map(|a| Some((!a.details().main, a.made()?.clone()))).collect();
    attachments.sort_by_key(|(further, _)| *further);
    Attached {
        attachments: attachments.into_iter().map(|(_, attachment)| attachment).collect(),
        netns: record.netns().path.clone(),
    }
}
