//! One pod's way: every front door makes a [`PodRequest`], and this carries it out. The files are the steps
//! in their order, and each step takes what only the one before it gives:
//!
//! | step | file | from | to |
//! |---|---|---|---|
//! | resolve | `resolve` | request, one snapshot of the cluster | `Resolved` |
//! | reserve | `reserve` | `Resolved` | `Reserved`: addresses for all interfaces, or for none |
//! | record | `record` | `Reserved` | `Recorded`: the whole plan is in the ledger, and nothing is made yet |
//! | admit | `admit` | `Recorded` | policies about it are in force |
//! | attach | `attach` | `Recorded` | `Answers` of the runtimes, all of them |
//! | verify | `verify` | `Answers` | `Verified`: what was made is what was asked for |
//! | record | `record` | `Verified` | `Made`, acknowledged |
//! | undo | `undo` | whatever was recorded | nothing is left, or a later pass tries again |
//!
//! A claim goes the first three steps before there is a sandbox (`claim`); what it has reserved, a sandbox
//! gets by the write that records its plan.

mod admit;
mod attach;
mod claim;
mod record;
mod reserve;
pub mod resolve;
mod undo;
mod verify;
mod waits;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use knit_api::names;
use knit_ledger::{NetnsRef, Reservation, SandboxRecord};
use knit_runtime::{Attachment, InterfaceName, Pod, SandboxId};
use knit_types::Owner;
use tokio::time::Instant;

use crate::config::{CoreConfig, MainInterfaces};
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::networks::{Networks, Patience};
use crate::proxy::ServiceProxy;
use crate::report::Report;
use crate::request::{Main, PodRequest, pod_name};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::unreadable;
use crate::world::{World, WorldStore};
use reserve::ForSandbox;
use resolve::{Held, Missing, Wanted, resolve};
pub(crate) use verify::Answer;
pub(crate) use waits::Waits;

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

/// What somebody is to get: a sandbox, or a claim that has none yet.
#[derive(Debug)]
struct Resolved<T> {
    target: T,
    wanted: Vec<Wanted>,
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
                    if record.is_attached() && *record.netns() == netns {
                        claim::check_lent(&record, request, &who)?;
                        let main = match &start.main {
                            Main::Ours(main) => &main.interface,
                            Main::Foreign(_) => return Ok(answer(&record)),
                        };
                        if is_main(&record, main) {
                            return Ok(answer(&record));
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
                self.give(request, Site { netns, has }, waits).await
            }
            None => {
                let Some(record) = known.filter(SandboxRecord::is_attached) else {
                    return Err(Error::new(Reason::NotReady, format!("{who} is being attached or detached")));
                };
                self.give(request, Site::of(&record), waits).await
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
        match resolve(&self.world.get(), request, &Site::of(&record).has, &[]) {
            Ok(_) => Ok(()),
            Err(Missing::Wait(error) | Missing::Error(error)) => Err(error),
        }
    }

    /// Looks whether a sandbox's interfaces are as they were made.
    pub(crate) async fn check(&self, sandbox: &SandboxId) -> Result<Attached> {
        let _guard = self.sandboxes.locks().lock(sandbox.clone()).await;
        let record = {
            let books = self.sandboxes.books();
            if let Some(record) = books.unreadable_of(sandbox) {
                return Err(unreadable::error(&format!("sandbox {sandbox}"), record));
            }
            books.get(sandbox).cloned()
        };
        let Some(record) = record else {
            return Err(Error::new(Reason::UnknownSandbox, format!("sandbox {sandbox} has no networks")));
        };
        if netns::is_gone(record.netns()) {
            let path = record.netns().path.display();
            let message = format!("sandbox {sandbox}: network namespace {path} is gone or was replaced");
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
    async fn give(&self, request: &PodRequest, site: Site, waits: Waits) -> Result<Attached> {
        let wanted = self.resolve(request, &site, waits).await?;
        if wanted.is_empty() {
            // It wants nothing of the agent, and nothing is kept of it.
            return Ok(Attached { attachments: Vec::new(), netns: site.netns.path });
        }
        // A pod that starts waits for a block, unless others would wait with it; for one that runs, who asks
        // comes again.
        let patience = match (&request.start, waits.soon()) {
            (Some(_), None) => Patience::Until(waits.at_most(self.config.block_wait)),
            (None, _) | (_, Some(_)) => Patience::Once,
        };
        let resolved = self.prepare(request, site, wanted, patience, waits).await?;
        let reserved = self.reserve(resolved, patience).await?;
        let recorded = self.record(reserved)?;
        let made = match self.admit(&recorded, waits.admitted_by()).await {
            Ok(()) => self.make(&recorded, patience, waits).await,
            Err(error) => Err(error),
        };
        let made = made.and_then(|verified| self.acknowledge(&recorded, verified));
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

    /// Which Networks, under which names. If something is not known yet, a pod that starts waits for it a
    /// little.
    async fn resolve(&self, request: &PodRequest, site: &Site, waits: Waits) -> Result<Vec<Wanted>> {
        let claimed = self.claimed(request)?;
        let look = |world: &World| match resolve(world, request, &site.has, &claimed) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        };
        if request.start.is_none() {
            return look(&self.world.get())?;
        }
        self.world.wait(waits.at_most(self.config.cache_wait), look).await?
    }

    /// Has the Networks set up here, and runtimes that can make what is wanted.
    async fn prepare(
        &self,
        request: &PodRequest,
        site: Site,
        wanted: Vec<Wanted>,
        patience: Patience,
        waits: Waits,
    ) -> Result<Resolved<ForSandbox>> {
        self.check_node(&wanted, &pod_name(&request.pod))?;
        let networks: BTreeSet<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
        let ready_by = waits.soon().unwrap_or(patience.deadline());
        let ready = networks.iter().map(|network| async move {
            self.set_up(network, patience, waits).await?;
            let in_force = self.networks.in_force(network, ready_by).await;
            in_force.map_err(|problem| problem.into_error(network))
        });
        for result in futures::future::join_all(ready).await {
            let who = pod_name(&request.pod);
            result.map_err(|error| Error { message: format!("{who}: {}", error.message), ..error })?;
        }
        self.check_host_ports(&request.pod, &wanted, ready_by).await?;
        wanted.iter().try_for_each(|wanted| self.runtimes.can_have(wanted))?;
        let target = ForSandbox { pod: request.pod.clone(), netns: site.netns, door: request.door.clone() };
        Ok(Resolved { target, wanted })
    }

    /// A Network that is limited to some nodes is for pods of those alone, whatever the scheduler was told.
    fn check_node(&self, wanted: &[Wanted], who: &str) -> Result<()> {
        let world = self.world.get();
        let node = world.nodes.get(&self.config.node);
        for name in wanted.iter().map(|wanted| &wanted.network) {
            let network = world.networks.get(name);
            let Some(network) = network.filter(|network| network.object().spec.node_selector.is_some())
            else {
                continue;
            };
            let node = node.ok_or_else(|| {
                let message = format!("{who}: the labels of this node are not known yet; it will be retried");
                Error::new(Reason::NotReady, message)
            })?;
            let here = network.is_for_node(&node.labels).map_err(|error| {
                let message = format!("{who}: spec.nodeSelector of Network {name} cannot be read");
                Error::new(Reason::NotReady, message).because(error.clone())
            })?;
            if !here {
                let message = format!(
                    "{who}: the nodeSelector of Network {name} does not match node {}: request the Network \
                     with a claim or with the extended resource networks.knit.dev/{name}, or select matching \
                     nodes in the pod",
                    self.config.node
                );
                return Err(Error::new(Reason::Refused, message));
            }
        }
        Ok(())
    }

    /// What is reserved for the claims of a request.
    fn claimed(&self, request: &PodRequest) -> Result<Vec<Reservation>> {
        let books = self.sandboxes.books();
        let claimed = request.claims.iter().map(|claim| {
            let owner = Owner::claim(claim.clone());
            books.reservation(&owner).cloned().ok_or_else(|| {
                let who = pod_name(&request.pod);
                let message = match books.lent_to(&owner) {
                    Some(sandbox) => {
                        format!(
                            "{who}: {owner} is in use by sandbox {sandbox}: only one sandbox can use it at a \
                             time"
                        )
                    }
                    None => format!("{who}: nothing is reserved for {owner}: it must be prepared first"),
                };
                Error::new(Reason::NotReady, message)
            })
        });
        claimed.collect()
    }

    /// A port of the node that is another tenant's node port would take what is meant for that one's Service.
    async fn check_host_ports(&self, pod: &Pod, wanted: &[Wanted], deadline: Instant) -> Result<()> {
        let Some(proxy) = self.networks.proxy() else { return Ok(()) };
        if wanted.iter().any(|wanted| !wanted.ports.is_empty()) {
            let of_others = |w: &Wanted| !w.ports.is_empty() && w.network != names::DEFAULT_NETWORK;
            let is_default = !wanted.iter().any(of_others);
            self.wait_for_node_ports(proxy, pod, is_default, deadline).await?;
        }
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

    /// Waits until it is known whose each node port is: right after a start of the agent, what an earlier one
    /// left is in force, and nobody has said yet whose it is.
    async fn wait_for_node_ports(
        &self,
        proxy: &dyn ServiceProxy,
        pod: &Pod,
        is_default: bool,
        deadline: Instant,
    ) -> Result<()> {
        // While nobody answers, nobody makes pods or Services either: what starts was here before.
        let away = || self.world.get().before.networks_away;
        let deadline = if away() { Instant::now() } else { deadline };
        if tokio::time::timeout_at(deadline, proxy.node_ports_known()).await.unwrap_or(false) {
            return Ok(());
        }
        let who = pod_name(pod);
        if away() {
            tracing::warn!("{who}: assigning host ports without checking node ports: no API server answers");
            return Ok(());
        }
        // As it is with Services: they will not come, and the API server may need a pod of the default
        // Network.
        if let Some(stopped) = proxy.stopped() {
            if is_default {
                tracing::warn!("{who}: assigning host ports without checking node ports: {}", stopped.why);
                return Ok(());
            }
            return Err(Error::new(Reason::NotReady, format!("{who}: {}", stopped.why)));
        }
        let message = format!(
            "{who}: the Services of the cluster have not been listed yet, and a host port could be the node \
             port of one: retrying; if this persists, check that the agent's role allows listing Services"
        );
        Err(Error::new(Reason::NotReady, message))
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

    async fn check_each(&self, record: &SandboxRecord) -> Result<()> {
        let pod = record.runtime_pod();
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let runtime = self.runtimes.get(&plan.runtime).ok_or_else(|| {
                Error::new(Reason::NotReady, format!("network runtime {} does not answer", plan.runtime))
            })?;
            let check = runtime.check(&pod, Some(&record.netns().path), Some(&plan.interface));
            let limit = self.config.detach_deadline;
            match tokio::time::timeout(limit, check).await {
                Ok(checked) => checked.map_err(|error| {
                    Error::from_runtime("checking", &plan.network, plan.interface.as_str(), error)
                })?,
                Err(_) => {
                    let (name, seconds) = (&plan.runtime, limit.as_secs());
                    let message = format!(
                        "network runtime {name} did not check interface {} within {seconds} s: check its log",
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
            interface: a.plan().interface.to_string(),
            network: a.plan().network.clone(),
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
    others.map(|interface| Held { interface, network: String::new() }).collect()
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
