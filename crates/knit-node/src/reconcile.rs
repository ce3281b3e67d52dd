//! One pass that compares ledger, runtimes and what really runs, and repairs or removes the difference. The same pass
//! runs at start and from then on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use knit_api::names;
use knit_ipam::{Addresses, LeaseKind};
use knit_ledger::{AttachmentPlan, AttachmentState, Leased, NetnsRef, Opaque, SandboxRecord};
use knit_runtime::{AttachRequest, Attachment, InterfaceName, Reason as RuntimeReason, Runtime, SandboxId};
use tokio::time::Instant;

use crate::clock;
use crate::core::Core;
use crate::fate::Fate;
use crate::level::{Damaged, Turn, is_damage};
use crate::netns;
use crate::record::{Details, pod_of};
use crate::report::PodEvent;
use crate::request::Door;

/// What is special about a pass.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// The first one of this run: no request is being served yet.
    pub first: bool,
    /// The ledger was lost: what runtimes have is taken into it, in place of being removed.
    pub adopt: bool,
    /// Where the namespaces of pods are mounted, to find those that are adopted.
    pub netns_dirs: Vec<PathBuf>,
}

/// What a pass did.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Outcome {
    /// Sandboxes removed because they are gone.
    pub removed: usize,
    /// Sandboxes whose unfinished attachments were taken back.
    pub rolled_back: usize,
    /// Sandboxes whose attachments were finished, though never acknowledged.
    pub finished: usize,
    /// Attachments made again because a runtime had lost them.
    pub repaired: usize,
    /// Networks set up again because somebody had changed what was made for them.
    pub networks_repaired: usize,
    /// Attachments taken into the ledger.
    pub adopted: usize,
    /// Attachments removed because nobody had recorded them.
    pub strays: usize,
    /// What could not be done now.
    pub failed: usize,
}

impl Core {
    /// What comes before the first request: Networks in use are set up, and everything is compared once.
    pub async fn begin(&self, pass: &Pass) -> Outcome {
        self.pass_over_networks().await;
        let outcome = self.reconcile(pass).await;
        self.assess();
        outcome
    }

    /// One pass.
    pub async fn reconcile(&self, pass: &Pass) -> Outcome {
        let mut outcome = Outcome::default();
        self.take_spooled().await;
        if let Some(cri) = self.cri() {
            let known = self.books().records().map(|r| r.sandbox().to_owned()).collect();
            cri.ask(known, clock::now).await;
        }
        let damaged = self.compare_all(pass.first, &mut outcome).await;
        let mut lists = self.lists(&mut outcome).await;
        lists.damaged = damaged;
        let sandboxes: Vec<SandboxId> =
            self.books().records().filter_map(|r| SandboxId::new(r.sandbox()).ok()).collect();
        for sandbox in sandboxes {
            // If something is being done for it, that settles it.
            let Some(_guard) = self.locks().try_lock(&sandbox) else { continue };
            let record = self.books().get(&sandbox).cloned();
            if let Some(record) = record {
                self.reconcile_one(&record, &lists, &mut outcome).await;
            }
        }
        // What is gone comes first: its address may be a running pod's by now.
        if pass.adopt {
            self.adopt(&lists, &pass.netns_dirs, &mut outcome);
        }
        // After the ledger was lost, what could not be adopted may still be a running pod's.
        if !pass.adopt {
            self.remove_strays(&lists, &mut outcome).await;
        }
        if pass.first && !pass.adopt {
            self.collect_leftovers(&mut outcome).await;
        }
        if outcome != Outcome::default() {
            tracing::info!(?outcome, "reconciled");
        }
        self.books_changed();
        outcome
    }

    /// Whether pods can be attached, as far as it can be told now.
    pub fn assess(&self) {
        let world = self.world().get();
        let states = self.networks().states();
        let default = states.iter().find(|s| s.name == names::DEFAULT_NETWORK);
        let problem = if self.networks().is_set_up(names::DEFAULT_NETWORK) {
            None
        } else if !world.networks.contains_key(names::DEFAULT_NETWORK) {
            Some(if world.synced.networks {
                "there is no Network named default: create it, or see that the controller runs".to_owned()
            } else {
                "the Kubernetes API does not answer, and no Network is known from before".to_owned()
            })
        } else {
            let problem = default.and_then(|s| s.problem.as_ref()).map(|p| p.message.clone());
            Some(problem.unwrap_or_else(|| "Network default is being set up".to_owned()))
        };
        self.readiness().set(problem);
    }

    /// Carries out the DELs that came while the agent was away.
    pub(crate) async fn take_spooled(&self) {
        let folder = knit_cni::paths::spool(&self.config().run_dir);
        let notes = match knit_cni::spool::notes(&folder) {
            Ok(notes) => notes,
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "noted DELs cannot be read");
                return;
            }
        };
        for note in notes {
            let del = note.request.ok().and_then(|del| {
                Some((SandboxId::new(del.container_id).ok()?, InterfaceName::new(del.ifname).ok()?))
            });
            let done = match del {
                Some((sandbox, interface)) => self.detach(sandbox, Some(interface)).await.is_ok(),
                None => {
                    tracing::warn!(file = %note.file.display(), "a noted DEL cannot be read, and is dropped: its sandbox is removed when its namespace is gone");
                    true
                }
            };
            if done && let Err(error) = std::fs::remove_file(&note.file) {
                tracing::warn!(file = %note.file.display(), %error, "a noted DEL is done, but its file cannot be removed");
            }
        }
    }

    /// What each runtime says it has. One that does not answer is not in it.
    async fn lists(&self, outcome: &mut Outcome) -> Lists {
        let mut lists = Lists::default();
        for (name, runtime) in self.runtimes().all() {
            match runtime.list(None).await {
                Ok(attachments) => {
                    let by_key = lists.by_runtime.entry(name).or_default();
                    for attachment in attachments {
                        let key = (attachment.pod.sandbox.clone(), attachment.interface.clone());
                        by_key.insert(key, attachment);
                    }
                }
                Err(error) => {
                    tracing::warn!(runtime = %name, error = &error as &dyn std::error::Error, "a network runtime does not say what it has");
                    outcome.failed += 1;
                }
            }
        }
        lists
    }

    async fn reconcile_one(
        &self,
        record: &SandboxRecord,
        lists: &Lists,
        outcome: &mut Outcome,
    ) -> Option<Instant> {
        match self.fate(record, lists.has(record)) {
            Fate::Lives => {}
            Fate::Hidden => {
                tracing::warn!(
                    sandbox = record.sandbox(),
                    path = %record.netns().path.display(),
                    "the container runtime says that it runs, but its network namespace is not to be seen: mount the \
                     directory of namespaces into the agent with its propagation"
                );
                outcome.failed += 1;
                return None;
            }
            Fate::Gone(why) => {
                tracing::info!(sandbox = record.sandbox(), "{why}: its networks are removed");
                self.metrics().garbage(record.attachments().len() as u64);
                match self.remove_sandbox(record).await {
                    Ok(()) => outcome.removed += 1,
                    Err(_) => outcome.failed += 1,
                }
                return None;
            }
        }
        let in_state = |wanted: fn(&AttachmentState) -> bool| -> Vec<String> {
            let matching = record.attachments().iter().filter(|a| wanted(a.state()));
            matching.map(|a| a.plan().interface.clone()).collect()
        };
        let leaving = in_state(|s| matches!(s, AttachmentState::Detaching(_)));
        let planned = in_state(|s| matches!(s, AttachmentState::Planned));
        if !leaving.is_empty() {
            if self.take_back(record, &leaving).await {
                outcome.rolled_back += 1;
            } else {
                outcome.failed += 1;
            }
        }
        if !planned.is_empty() {
            // The record may have changed just now.
            let sandbox = SandboxId::new(record.sandbox()).ok()?;
            let record = self.books().get(&sandbox).cloned()?;
            if self.finish(&record, &planned, lists).await {
                outcome.finished += 1;
            } else if self.take_back(&record, &planned).await {
                outcome.rolled_back += 1;
            } else {
                outcome.failed += 1;
            }
            return None;
        }
        if !leaving.is_empty() {
            return None;
        }
        self.repair(record, lists, outcome).await
    }

    /// Notes that planned attachments are there, if all of them are, whole.
    async fn finish(&self, record: &SandboxRecord, planned: &[String], lists: &Lists) -> bool {
        let Ok(pod) = pod_of(record) else { return false };
        let path = &record.netns().path;
        let netns = Some(path.as_path()).filter(|path| !path.as_os_str().is_empty());
        let mut finished = record.clone();
        for interface in planned {
            let Some(plan) = record.attachment(interface).map(knit_ledger::Attachment::plan) else {
                return false;
            };
            let Some(found) = lists.find(&plan.runtime, &pod.sandbox, interface) else { return false };
            let Some(runtime) = self.runtimes().get(&plan.runtime) else { return false };
            let name = InterfaceName::new(interface.as_str()).ok();
            if runtime.check(&pod, netns, name.as_ref()).await.is_err() {
                return false;
            }
            let Ok(made) = Opaque::of(found) else { return false };
            if finished.attached(interface, made).is_err() {
                return false;
            }
        }
        self.books().put(finished).is_ok()
    }

    /// Makes these attachments again, of sandboxes for which nothing else is being done. Says when the next one is due of
    /// those that were made again too often of late.
    pub(crate) async fn attach_again(&self, damaged: &Damaged, outcome: &mut Outcome) -> Option<Instant> {
        let sandboxes: BTreeSet<&SandboxId> = damaged.iter().map(|(sandbox, _)| sandbox).collect();
        let lists = Lists { damaged: damaged.clone(), ..Lists::default() };
        let mut later = None;
        for sandbox in sandboxes {
            // If something is being done for it, that settles it.
            let Some(_guard) = self.locks().try_lock(sandbox) else { continue };
            let Some(record) = self.books().get(sandbox).cloned() else { continue };
            later = later.into_iter().chain(self.reconcile_one(&record, &lists, outcome).await).min();
        }
        later
    }

    /// Makes attachments again that a runtime has lost, or of which something is damaged. Says when the next one is due of
    /// those that were made again too often of late.
    async fn repair(&self, record: &SandboxRecord, lists: &Lists, outcome: &mut Outcome) -> Option<Instant> {
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
            let Some(runtime) = self.runtimes().get(&plan.runtime) else { continue };
            match self.repairs().attachment(&pod.sandbox, &interface) {
                Turn::Later(at) => {
                    later = Some(later.map_or(at, |later| later.min(at)));
                    continue;
                }
                Turn::Now { fight: true, first: true } => {
                    tracing::error!(sandbox = record.sandbox(), %interface, network = %plan.network, "an interface is lost again and again: it is made again once in a while");
                }
                Turn::Now { .. } => {}
            }
            let request = match self.attach_request(record, &pod, &plan.interface) {
                Ok(request) => request,
                Err(error) => {
                    tracing::warn!(sandbox = record.sandbox(), interface = %plan.interface, error = &error as &dyn std::error::Error, "a lost interface cannot be made again yet");
                    outcome.failed += 1;
                    continue;
                }
            };
            let again = self.make_again(&runtime, &request);
            let result = tokio::time::timeout(self.config().runtime_deadline, again).await;
            match result {
                Ok(Ok(made)) if crate::attach::verify(&request, &made, record.netns().inode).is_ok() => {
                    tracing::warn!(sandbox = record.sandbox(), interface = %plan.interface, network = %plan.network, "an interface was lost or damaged, and is made again");
                    self.metrics().repaired("attachment", 1);
                    let message = format!(
                        "interface {interface} on Network {} was lost or damaged, and was made again with its addresses: \
                         look for what deletes or changes interfaces, in the pod or on its node",
                        plan.network
                    );
                    self.report().say(PodEvent { pod: pod.clone(), reason: "InterfaceMadeAgain", message });
                    let Some(mut current) = self.books().get(&pod.sandbox).cloned() else { return later };
                    let noted = Opaque::of(&made).is_ok_and(|m| current.attached(&plan.interface, m).is_ok())
                        && self.books().put(current).is_ok();
                    if noted {
                        outcome.repaired += 1;
                    } else {
                        outcome.failed += 1;
                    }
                    self.report().changed(&pod.sandbox);
                }
                Ok(Ok(made)) => {
                    // It may be in a namespace that is another's by now: nothing of ours stays there.
                    if let Err(error) = runtime.detach(&request.pod, Some(&made.interface)).await {
                        tracing::error!(sandbox = record.sandbox(), interface = %plan.interface, network = %plan.network, error = &error as &dyn std::error::Error, "an interface that was not made as asked cannot be removed");
                    }
                    outcome.failed += 1;
                }
                Err(_) => outcome.failed += 1,
                Ok(Err(error)) => {
                    tracing::error!(sandbox = record.sandbox(), interface = %plan.interface, network = %plan.network, error = &error as &dyn std::error::Error, "a lost interface cannot be made again");
                    outcome.failed += 1;
                }
            }
        }
        later
    }

    /// Attaches again. A runtime may take what is there for what was asked for; if it then says itself that it is damaged,
    /// it is taken away first.
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

    /// Removes what runtimes have and nobody recorded.
    async fn remove_strays(&self, lists: &Lists, outcome: &mut Outcome) {
        for (name, by_key) in &lists.by_runtime {
            let Some(runtime) = self.runtimes().get(name) else { continue };
            for ((sandbox, interface), attachment) in by_key {
                let recorded = |core: &Self| {
                    core.books().get(sandbox).is_some_and(|r| r.attachment(interface.as_str()).is_some())
                };
                if recorded(self) {
                    continue;
                }
                let Some(_guard) = self.locks().try_lock(sandbox) else { continue };
                if recorded(self) {
                    continue;
                }
                tracing::info!(%sandbox, %interface, runtime = %name, "an interface that nobody recorded is removed");
                match runtime.detach(&attachment.pod, Some(interface)).await {
                    Ok(()) => {
                        self.metrics().garbage(1);
                        outcome.strays += 1;
                    }
                    Err(error) => {
                        tracing::warn!(%sandbox, %interface, error = &error as &dyn std::error::Error, "it cannot be removed yet");
                        outcome.failed += 1;
                    }
                }
            }
        }
    }

    /// Has each runtime remove what is not even whole enough to be listed, and Networks that nobody knows. Only while no
    /// request is being served.
    async fn collect_leftovers(&self, outcome: &mut Outcome) {
        let (keep, in_use): (Vec<SandboxId>, BTreeSet<String>) = {
            let books = self.books();
            (
                books.records().filter_map(|r| SandboxId::new(r.sandbox()).ok()).collect(),
                books.networks_in_use(),
            )
        };
        let world = self.world().get();
        for (name, runtime) in self.runtimes().all() {
            match runtime.collect_garbage(&keep).await {
                Ok(removed) => outcome.strays += removed.len(),
                Err(error) => {
                    tracing::warn!(runtime = %name, error = &error as &dyn std::error::Error, "leftovers cannot be removed yet");
                    outcome.failed += 1;
                }
            }
            let Ok(status) = runtime.status().await else { continue };
            // Without the API's word a Network that is not known may well exist.
            let unknown =
                |n: &str| world.synced.networks && !world.networks.contains_key(n) && !in_use.contains(n);
            for network in status.networks.iter().filter(|n| unknown(&n.name)) {
                match runtime.remove_network(&network.name).await {
                    Err(error) if error.reason != RuntimeReason::NetworkNotFound => {
                        tracing::warn!(network = %network.name, error = &error as &dyn std::error::Error, "a Network that is gone cannot be removed yet");
                        outcome.failed += 1;
                    }
                    _ => {
                        tracing::info!(network = %network.name, runtime = %name, "a Network that is gone is removed");
                    }
                }
            }
        }
    }

    /// Takes what runtimes have into a ledger that lost it, or some of it: running pods must not notice. A record that was cut
    /// back may lack one interface only.
    fn adopt(&self, lists: &Lists, netns_dirs: &[PathBuf], outcome: &mut Outcome) {
        let mut sandboxes: BTreeMap<&SandboxId, Vec<(&str, &Attachment)>> = BTreeMap::new();
        for (runtime, by_key) in &lists.by_runtime {
            for attachment in by_key.values() {
                sandboxes.entry(&attachment.pod.sandbox).or_default().push((runtime, attachment));
            }
        }
        let mut books = self.books();
        for (sandbox, attachments) in sandboxes {
            let known = books.get(sandbox).cloned();
            let mut attachments = attachments;
            if let Some(record) = &known {
                let inode = record.netns().inode;
                attachments.retain(|(_, found)| {
                    let same = found.pod_netns_inode == inode || found.pod_netns_inode == 0;
                    same && record.attachment(found.interface.as_str()).is_none()
                });
            }
            let Some((_, first)) = attachments.first() else { continue };
            let pod = match (&first.pod.namespace, &first.pod.name) {
                (Some(namespace), Some(name)) => Some(knit_ipam::PodRef {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    uid: first.pod.uid.clone(),
                }),
                _ => self.cri().and_then(|cri| cri.pod(sandbox.as_str())),
            };
            let inode = first.pod_netns_inode;
            let namespace = find_netns(netns_dirs, inode)
                // Unknown: never removed because a path is free, but by its DEL, or when nothing of it is left.
                .unwrap_or(NetnsRef { path: PathBuf::new(), inode, device: 0 });
            let mut plans = attachments.iter().map(|(runtime, attachment)| plan_of(runtime, attachment));
            let record = match known {
                Some(mut record) => plans.try_for_each(|plan| record.plan(plan)).map(|()| record),
                None => SandboxRecord::planned(sandbox.as_str(), pod, namespace, clock::now().0, plans),
            };
            let mut record = match record {
                Ok(record) => record,
                Err(error) => {
                    tracing::error!(%sandbox, error = &error as &dyn std::error::Error, "a running sandbox cannot be recorded");
                    outcome.failed += 1;
                    continue;
                }
            };
            for (_, attachment) in &attachments {
                if let Ok(made) = Opaque::of(attachment) {
                    // Each was planned just above.
                    let _ = record.attached(attachment.interface.as_str(), made);
                }
            }
            let found = |lease: &knit_ipam::Lease| {
                attachments.iter().any(|(_, attachment)| attachment.interface.as_str() == lease.key.interface)
            };
            let leases: Vec<knit_ipam::Lease> = record.leases().filter(found).collect();
            if let Err(error) = books.put(record) {
                tracing::error!(%sandbox, error = &error as &dyn std::error::Error, "a running sandbox cannot be recorded");
                outcome.failed += 1;
                continue;
            }
            leases.into_iter().for_each(|lease| books.adopt(lease));
            outcome.adopted += attachments.len();
        }
    }
}

/// What each runtime that answers has.
#[derive(Debug, Default)]
struct Lists {
    /// What is there, but not as it was made.
    damaged: Damaged,
    by_runtime: BTreeMap<String, BTreeMap<(SandboxId, InterfaceName), Attachment>>,
}

impl Lists {
    fn find(&self, runtime: &str, sandbox: &SandboxId, interface: &str) -> Option<&Attachment> {
        let interface = InterfaceName::new(interface).ok()?;
        self.by_runtime.get(runtime)?.get(&(sandbox.clone(), interface))
    }

    /// Whether anything of a sandbox is left; nothing if one of its runtimes does not answer.
    fn has(&self, record: &SandboxRecord) -> Option<bool> {
        let sandbox = SandboxId::new(record.sandbox()).ok()?;
        let mut any = false;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            self.by_runtime.get(&plan.runtime)?;
            any |= self.find(&plan.runtime, &sandbox, &plan.interface).is_some();
        }
        Some(any)
    }
}

fn plan_of(runtime: &str, attachment: &Attachment) -> AttachmentPlan {
    let main = attachment.interface.as_str() == "eth0";
    let details = Details {
        door: Door::Cni(String::new()),
        main,
        default_route: main,
        ports: Vec::new(),
        dns: attachment.dns.clone(),
    };
    let addresses: Vec<std::net::IpAddr> = attachment.addresses.iter().map(|a| a.net.addr()).collect();
    AttachmentPlan {
        interface: attachment.interface.to_string(),
        network: attachment.network.clone(),
        runtime: runtime.to_owned(),
        lease: Addresses::from_list(&addresses).map(|addresses| Leased {
            addresses,
            mac: attachment.mac,
            kind: LeaseKind::Dynamic,
        }),
        host_interface: Some(attachment.host.name.clone()),
        parameters: Opaque::of(&details).unwrap_or_default(),
    }
}

/// The namespace with this inode, if it is mounted in one of these directories.
fn find_netns(directories: &[PathBuf], inode: u64) -> Option<NetnsRef> {
    let entries = directories.iter().filter_map(|d| std::fs::read_dir(d).ok()).flatten().flatten();
    let mut found = entries.filter_map(|e| netns::identify(&e.path()).ok().flatten());
    found.find(|namespace| inode != 0 && namespace.inode == inode)
}
