//! One pass that compares ledger, runtimes and what really runs, and repairs or removes the difference. The
//! same pass runs at start and from then on.

mod adopt;
mod fate;
mod garbage;
mod repair;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use futures::StreamExt as _;
use knit_ledger::{AttachmentState, SandboxRecord, Unreadable};
use knit_runtime::{Attachment, InterfaceName, Pod, Reason as RuntimeReason, SandboxId};
use knit_types::PodRef;
use tokio::time::Instant;

use crate::clock;
use crate::config::CoreConfig;
use crate::cri::Cri;
use crate::level::{Damaged, Repairs, SeenAttachments};
use crate::metrics::Metrics;
use crate::networks::Networks;
use crate::pipeline::{DetachLimits, Pipeline};
use crate::report::{PodEvent, Report};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::world::WorldStore;
use fate::SandboxLiveness;

/// How many sandboxes are reconciled at a time. A pod that does not answer takes seconds.
const SANDBOXES_AT_ONCE: usize = 32;

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

/// Compares, repairs and removes.
pub(crate) struct Reconciler {
    pub(crate) config: Arc<CoreConfig>,
    pub(crate) world: Arc<WorldStore>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) runtimes: Arc<Runtimes>,
    pub(crate) networks: Arc<Networks>,
    pub(crate) pipeline: Pipeline,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) report: Arc<Report>,
    pub(crate) repairs: Repairs,
    /// The container runtime, if it is to be asked.
    pub(crate) cri: Option<Cri>,
    /// No runtime has a Network any more that was deleted while no agent ran.
    pub(crate) no_unknown_networks: AtomicBool,
}

// === impl Outcome ===

impl Outcome {
    /// Adds what another part of the pass did. Every field is named, so that a new one is not forgotten.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { removed, rolled_back, finished, repaired, networks_repaired, adopted, strays, failed } =
            self;
        *removed += other.removed;
        *rolled_back += other.rolled_back;
        *finished += other.finished;
        *repaired += other.repaired;
        *networks_repaired += other.networks_repaired;
        *adopted += other.adopted;
        *strays += other.strays;
        *failed += other.failed;
    }
}

// === impl Reconciler ===

impl Reconciler {
    /// One pass.
    pub(crate) async fn pass(&self, pass: &Pass) -> Outcome {
        let (mut outcome, begun) = (Outcome::default(), Instant::now());
        self.take_spooled().await;
        if let Some(cri) = &self.cri {
            let known = {
                let books = self.sandboxes.books();
                let unreadable = books.unreadable().map(|record| record.key().to_owned());
                books.records().map(|r| r.sandbox().to_string()).chain(unreadable).collect()
            };
            cri.ask(known, clock::now).await;
        }
        let (damaged, seen) = self.compare_all(pass.first, &mut outcome).await;
        let mut lists = self.lists(seen, &mut outcome).await;
        (lists.damaged, lists.begun, lists.first) = (damaged, Some(begun), pass.first);
        let sandboxes: Vec<SandboxId> =
            self.sandboxes.books().records().map(|r| r.sandbox().clone()).collect();
        self.reconcile_each(sandboxes, &lists, &mut outcome).await;
        self.reconcile_unreadable(pass, begun, &mut outcome).await;
        // What is gone comes first: its address may be a running pod's by now.
        if pass.adopt {
            self.adopt(&lists, &pass.netns_dirs, &mut outcome);
        }
        // What is in force about what was not recorded until now stays in force: before anything is enforced.
        if self.name_adopted() > 0 || pass.adopt {
            self.networks.compare_services_and_policies();
        }
        self.sandboxes.set_whole(true);
        // After the ledger was lost, what could not be adopted may still be a running pod's.
        if !pass.adopt {
            self.remove_strays(&lists, &mut outcome).await;
        }
        if pass.first && !pass.adopt {
            self.collect_leftovers(&lists, &mut outcome).await;
        }
        if !pass.adopt {
            self.remove_unknown_networks(&lists, &mut outcome).await;
        }
        if outcome != Outcome::default() {
            tracing::info!(?outcome, "reconciled");
        }
        self.sandboxes.changed();
        outcome
    }

    /// Carries out the DELs that came while the agent was away.
    pub(crate) async fn take_spooled(&self) {
        let folder = knit_cni::paths::spool(&self.config.run_dir);
        let notes = match knit_cni::spool::notes(&folder) {
            Ok(notes) => notes,
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "cannot read recorded DELs");
                return;
            }
        };
        let limits = DetachLimits::of_pass(self.config.detach_deadline, Instant::now());
        let each = notes.into_iter().map(|note| async move {
            let del = note.request.ok().and_then(|del| {
                Some((SandboxId::new(del.container_id).ok()?, InterfaceName::new(del.ifname).ok()?))
            });
            let done = match del {
                Some((sandbox, interface)) => {
                    self.pipeline.detach_with(&sandbox, Some(&interface), limits).await.is_ok()
                }
                None => {
                    tracing::warn!(
                        file = %note.file.display(),
                        "dropping a recorded DEL that cannot be read: its sandbox is removed when its \
                        namespace is gone"
                    );
                    true
                }
            };
            if done && let Err(error) = std::fs::remove_file(&note.file) {
                tracing::warn!(
                    file = %note.file.display(), %error,
                    "a recorded DEL is done, but its file cannot be removed"
                );
            }
        });
        futures::stream::iter(each).buffer_unordered(SANDBOXES_AT_ONCE).collect::<Vec<()>>().await;
    }

    /// What each runtime says it has, if that was not seen just now. One that does not answer is not in it.
    async fn lists(&self, mut seen: SeenAttachments, outcome: &mut Outcome) -> Lists {
        let mut lists = Lists::default();
        // Side by side: one that hangs holds up nobody's but its own.
        let asked = self.runtimes.all().into_iter().map(|(name, runtime)| {
            let seen = seen.remove(&name);
            let limit = self.answer_limit(&name);
            async move {
                let listed = match seen {
                    Some(seen) => Ok(seen),
                    None => tokio::time::timeout(limit, runtime.list(None)).await.unwrap_or_else(|_| {
                        let message = format!("it does not answer within {} s", limit.as_secs());
                        Err(knit_runtime::Error::new(RuntimeReason::NotReady, message))
                    }),
                };
                (name, listed)
            }
        });
        for (name, listed) in futures::future::join_all(asked.collect::<Vec<_>>()).await {
            match listed {
                Ok(attachments) => {
                    let by_key = lists.by_runtime.entry(name).or_default();
                    for attachment in attachments {
                        let key = (attachment.pod.sandbox.clone(), attachment.interface.clone());
                        by_key.insert(key, attachment);
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        runtime = %name, error = &error as &dyn std::error::Error,
                        "a network runtime does not list what it has"
                    );
                    outcome.failed += 1;
                }
            }
        }
        lists
    }

    /// Reconciles sandboxes, some of them at a time: one whose pod or runtime does not answer holds up few
    /// others. Says when the next one is due of those that were repaired too often of late.
    async fn reconcile_each(
        &self,
        sandboxes: impl IntoIterator<Item = SandboxId>,
        lists: &Lists,
        outcome: &mut Outcome,
    ) -> Option<Instant> {
        let each = sandboxes.into_iter().map(|sandbox| async move {
            let mut outcome = Outcome::default();
            // If something is being done for it, that settles it.
            let Some(_guard) = self.sandboxes.locks().try_lock(sandbox.clone()) else {
                return (None, outcome);
            };
            let record = self.sandboxes.books().get(&sandbox).cloned();
            let Some(record) = record else { return (None, outcome) };
            (self.reconcile_one(&record, lists, &mut outcome).await, outcome)
        });
        let mut done = futures::stream::iter(each).buffer_unordered(SANDBOXES_AT_ONCE);
        let mut due = None;
        while let Some((later, did)) = done.next().await {
            outcome.add(&did);
            due = due.into_iter().chain(later).min();
        }
        due
    }

    async fn reconcile_one(
        &self,
        record: &SandboxRecord,
        lists: &Lists,
        outcome: &mut Outcome,
    ) -> Option<Instant> {
        let limit = self.config.detach_deadline;
        let limits = match lists.begun {
            Some(begun) => DetachLimits::of_pass(limit, begun),
            None => DetachLimits::of_request(limit),
        };
        match self.fate(record, lists.has(record)) {
            SandboxLiveness::Lives => {}
            SandboxLiveness::Hidden => {
                tracing::warn!(
                    sandbox = %record.sandbox(),
                    path = %record.netns().path.display(),
                    "the container runtime reports it as running, but its network namespace cannot be found: \
                     mount its directory into the agent with mountPropagation: HostToContainer"
                );
                outcome.failed += 1;
                return None;
            }
            SandboxLiveness::Gone(why) => {
                tracing::info!(sandbox = %record.sandbox(), "{why}: removing its networks");
                self.metrics.garbage(record.attachments().len() as u64);
                match self.pipeline.remove_with(record, limits).await {
                    Ok(()) => outcome.removed += 1,
                    Err(_) => outcome.failed += 1,
                }
                return None;
            }
        }
        let take_back = async |record: &SandboxRecord, interfaces: &[InterfaceName]| {
            self.pipeline.undo(record, interfaces, limits).await.is_none()
        };
        let in_state = |wanted: fn(&AttachmentState) -> bool| -> Vec<InterfaceName> {
            let matching = record.attachments().iter().filter(|a| wanted(a.state()));
            matching.map(|a| a.plan().interface.clone()).collect()
        };
        let leaving = in_state(|s| matches!(s, AttachmentState::Detaching(_)));
        let planned = in_state(|s| matches!(s, AttachmentState::Planned));
        if !leaving.is_empty() {
            if take_back(record, &leaving).await {
                outcome.rolled_back += 1;
            } else {
                outcome.failed += 1;
            }
        }
        if !planned.is_empty() {
            // The record may have changed just now.
            let record = self.sandboxes.books().get(record.sandbox()).cloned()?;
            if self.finish(&record, &planned, lists).await {
                outcome.finished += 1;
            } else if take_back(&record, &planned).await {
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

    /// Records that cannot be read: they are told at each start, and go when their sandbox is certainly gone.
    async fn reconcile_unreadable(&self, pass: &Pass, begun: Instant, outcome: &mut Outcome) {
        let records: Vec<Unreadable> = self.sandboxes.books().unreadable().cloned().collect();
        self.metrics.unreadable(records.len());
        if pass.first {
            records.iter().for_each(|record| self.tell_unreadable(record));
        }
        let limits = DetachLimits::of_pass(self.config.detach_deadline, begun);
        let each = records.into_iter().map(|record| async move {
            let sandbox = record.sandbox().filter(|id| self.is_unreadable_gone(id, &record))?;
            let _guard = self.sandboxes.locks().try_lock(sandbox.clone())?;
            Some(self.pipeline.remove_unreadable(&sandbox, &record, limits).await)
        });
        let mut done = futures::stream::iter(each).buffer_unordered(SANDBOXES_AT_ONCE);
        while let Some(removed) = done.next().await {
            match removed {
                Some(Ok(())) => outcome.removed += 1,
                Some(Err(_)) => outcome.failed += 1,
                None => {}
            }
        }
        let left = self.sandboxes.books().unreadable().count();
        self.metrics.unreadable(left);
    }

    /// Says on the events of pod and node what is the matter.
    fn tell_unreadable(&self, record: &Unreadable) {
        let advice = if record.sandbox().is_some() {
            "its networks are not maintained; delete the pod so that it is recreated"
        } else if record.claim().is_some() {
            "nothing is prepared for it; delete its pods, and the claim if it was not made from a template"
        } else {
            // Nobody's DEL is for it.
            "interfaces without a record are left alone; stop the agent, move its ledger away and start the \
             agent again: the ledger is then rebuilt from the existing interfaces"
        };
        let message = format!(
            "the agent's record of {} cannot be read ({}): its addresses stay reserved, and {advice}",
            record.claim().map_or_else(|| record.key().to_owned(), |claim| format!("claim {claim}")),
            record.why()
        );
        if let (Some(pod), Some(sandbox)) = (record.pod(), record.sandbox()) {
            let PodRef { namespace, name, uid } = pod;
            let pod = Pod { sandbox, namespace: Some(namespace), name: Some(name), uid };
            self.report.say(PodEvent { pod, reason: "RecordUnreadable", message: message.clone() });
        }
        self.report.say_of_node("RecordUnreadable", message);
    }

    /// Notes that planned attachments are there, if all of them are, whole.
    async fn finish(&self, record: &SandboxRecord, planned: &[InterfaceName], lists: &Lists) -> bool {
        let pod = record.runtime_pod();
        let path = &record.netns().path;
        let netns = Some(path.as_path()).filter(|path| !path.as_os_str().is_empty());
        let mut finished = record.clone();
        for interface in planned {
            let Some(plan) = record.attachment(interface).map(knit_ledger::Attachment::plan) else {
                return false;
            };
            let Some(found) = lists.find(&plan.runtime, &pod.sandbox, interface) else { return false };
            let Some(runtime) = self.runtimes.get(&plan.runtime) else { return false };
            let check = runtime.check(&pod, netns, Some(interface));
            if !matches!(tokio::time::timeout(self.config.runtime_deadline, check).await, Ok(Ok(()))) {
                return false;
            }
            if finished.attached(interface, found.clone()).is_err() {
                return false;
            }
        }
        self.sandboxes.books().put(finished).is_ok()
    }
}

/// What each runtime that answers has.
#[derive(Debug, Default)]
struct Lists {
    /// What is there, but not as it was made.
    damaged: Damaged,
    /// When the pass began that they are for.
    begun: Option<Instant>,
    /// It is the first one, for which all requests wait.
    first: bool,
    by_runtime: BTreeMap<String, BTreeMap<(SandboxId, InterfaceName), Attachment>>,
}

impl Lists {
    /// Whether a runtime has let this pass wait in vain.
    fn is_silent(&self, runtimes: &Runtimes, name: &str) -> bool {
        self.begun.is_some_and(|begun| runtimes.is_silent_since(name, begun))
    }

    fn find(&self, runtime: &str, sandbox: &SandboxId, interface: &InterfaceName) -> Option<&Attachment> {
        self.by_runtime.get(runtime)?.get(&(sandbox.clone(), interface.clone()))
    }

    /// Whether anything of a sandbox is left; nothing if one of its runtimes does not answer.
    fn has(&self, record: &SandboxRecord) -> Option<bool> {
        let mut any = false;
        for attachment in record.attachments() {
            let plan = attachment.plan();
            self.by_runtime.get(&plan.runtime)?;
            any |= self.find(&plan.runtime, record.sandbox(), &plan.interface).is_some();
        }
        Some(any)
    }
}
