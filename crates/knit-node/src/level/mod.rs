//! Level-triggered: what runtimes made is compared with what it should be in every pass, and at once when the
//! kernel tells of a change by somebody else; what differs is repaired.
//!
//! Nobody waits for a comparison. A repair is a Network's, or an attachment's, and each of them is limited by
//! itself: whoever damages the same thing again and again is reported, and costs nobody else.

mod follow;
mod pace;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use knit_ledger::AttachmentState;
use knit_runtime::{
    Attachment, Damage, Disturbance, InterfaceName, NotKnown, Reason as RuntimeReason, Runtime, SandboxId,
    Survey,
};
use knit_types::NetworkName;
use knit_types::sync::Locked;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::networks::compute::Unready;
use crate::reconcile::{Outcome, Reconciler};
use crate::report::PodEvent;
pub use follow::Followers;
pub(crate) use follow::Known;
pub use pace::{Backoff, Pace, RepairTurn};

/// A Network is repaired this often at the least, whoever damages it: it is a matter of isolation.
const NETWORK_REPAIR_MAX_DELAY: Duration = Duration::from_secs(5);
/// A look or a repair that failed is tried again after this; how often the same thing is repaired is limited
/// anyway.
pub(crate) const COMPARE_RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long a runtime that did not answer lately has to do so.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Damage of this kind is nobody's doing: the node's own link has changed.
const NODE: &str = "node";

/// Attachments that are to be attached again: sandbox and interface.
pub(crate) type Damaged = BTreeSet<(SandboxId, InterfaceName)>;

/// What runtimes were seen to have, by their names.
pub(crate) type SeenAttachments = BTreeMap<String, Vec<Attachment>>;

/// How often what was repaired.
#[derive(Debug)]
pub(crate) struct Repairs {
    networks: Mutex<Backoff<NetworkName>>,
    attachments: Mutex<Backoff<(SandboxId, InterfaceName)>>,
    /// What was told of the insides of pods: each thing once.
    noticed: Mutex<BTreeMap<(SandboxId, InterfaceName), String>>,
}

/// What a look at one runtime came to.
#[derive(Debug, Default)]
pub(crate) struct RuntimeLook {
    /// Attachments that are to be attached again.
    pub damaged: Damaged,
    /// When something is to be repaired that was repaired too often of late, or could not be.
    pub again: Option<Instant>,
}

/// What became of a Network that was told again what it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SetUp {
    /// It is so now.
    Done,
    /// It is nobody's any more.
    Gone,
    Failed,
}

/// What is worth telling about damage.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum DamageNews {
    /// It was told before.
    Nothing,
    /// The node itself has changed.
    Changed,
    /// Somebody changed what was made.
    Damaged,
    /// Somebody does so again and again.
    Fight,
}

/// Why it was looked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LookOccasion {
    /// The kernel told of a change: whoever changes things all the time is not to keep the agent busy.
    News,
    /// A pass, which is rare enough: it puts right whatever it finds.
    Pass,
}

// === impl Repairs ===

impl Repairs {
    pub(crate) fn new(pass: Duration) -> Self {
        Self {
            networks: Mutex::new(Backoff::new(NETWORK_REPAIR_MAX_DELAY.min(pass))),
            attachments: Mutex::new(Backoff::new(pass)),
            noticed: Mutex::default(),
        }
    }

    fn networks(&self) -> MutexGuard<'_, Backoff<NetworkName>> {
        self.networks.locked()
    }

    /// What is to be told of the inside of a pod: what was not told before. Pods that are gone are forgotten.
    fn is_news(
        &self,
        who: &(SandboxId, InterfaceName),
        what: &str,
        is_there: impl Fn(&SandboxId) -> bool,
    ) -> bool {
        let mut told = self.noticed.locked();
        told.retain(|(sandbox, _), _| is_there(sandbox));
        told.insert(who.clone(), what.to_owned()).is_none_or(|before| before != what)
    }

    /// Whether it is an attachment's turn to be made again.
    pub(crate) fn attachment(&self, sandbox: &SandboxId, interface: &InterfaceName) -> RepairTurn {
        let mut attachments = self.attachments.locked();
        attachments.turn(&(sandbox.clone(), interface.clone()), Instant::now())
    }
}

// === impl RuntimeLook ===

impl RuntimeLook {
    fn come_back(&mut self, at: Instant) {
        self.again = Some(self.again.map_or(at, |again| again.min(at)));
    }
}

// === impl Reconciler ===

impl Reconciler {
    /// Compares what all runtimes made with what it should be, and puts Networks right: the part of a pass.
    /// Says which attachments are to be attached again, and what runtimes were seen to have of which nothing
    /// was repaired.
    pub(crate) async fn compare_all(&self, first: bool, outcome: &mut Outcome) -> (Damaged, SeenAttachments) {
        let (mut damaged, mut seen) = (Damaged::new(), SeenAttachments::new());
        self.networks.compare_services_and_policies();
        // Side by side: one that hangs holds up nobody's but its own.
        let all = self.runtimes.all();
        let looks = all.into_iter().map(|(name, runtime)| self.compare_one(name, runtime, first));
        for (of_one, listed, did) in futures::future::join_all(looks).await {
            damaged.extend(of_one);
            seen.extend(listed);
            outcome.add(&did);
        }
        (damaged, seen)
    }

    /// Compares what one runtime made: which of its attachments are to be attached again, what it was seen to
    /// have, and what was done.
    async fn compare_one(
        &self,
        name: String,
        runtime: Arc<dyn Runtime>,
        first: bool,
    ) -> (Damaged, Option<(String, Vec<Attachment>)>, Outcome) {
        let (mut damaged, mut seen, mut outcome) = (Damaged::new(), None, Outcome::default());
        // One that is known not to answer is only asked whether it does so again.
        let limit = self.answer_limit(&name);
        match tokio::time::timeout(limit, runtime.survey_and_list()).await {
            Ok(Ok((survey, listed))) => {
                if survey.networks.is_empty() {
                    seen = listed.map(|listed| (name, listed));
                }
                damaged = self.put_right(&runtime, survey, LookOccasion::Pass, &mut outcome).await.damaged;
            }
            // Before the first request, all was set up just now.
            Ok(Err(error)) if error.reason == RuntimeReason::Unsupported => {
                if !first {
                    damaged = self.compare_foreign(&name, &runtime, &mut outcome).await;
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(runtime = %name, error = &error as &dyn std::error::Error, "cannot \
                    compare the state of a network runtime");
                outcome.failed += 1;
            }
            Err(_) => {
                tracing::warn!(runtime = %name, "cannot compare the state of a network runtime: it does \
                    not answer");
                outcome.failed += 1;
            }
        }
        (damaged, seen, outcome)
    }

    /// How long a pass waits for a runtime's answer.
    pub(crate) fn answer_limit(&self, name: &str) -> Duration {
        let limit = self.config.runtime_deadline;
        if self.runtimes.is_well(name) { limit } else { limit.min(PROBE_TIMEOUT) }
    }

    /// Looks after what one runtime made whenever it says that somebody else may have changed it, forever.
    /// Networks are repaired as soon as they are found damaged; attachments, which may take long, beside
    /// that.
    pub(crate) async fn keep_right(&self, runtime: Arc<dyn Runtime>) {
        let ((damaged, told), (look_again, due)) = (unbounded_channel(), unbounded_channel());
        let looking = self.keep_looking(&runtime, &damaged, due);
        tokio::join!(looking, self.keep_attached(told, look_again));
    }

    async fn keep_looking(
        &self,
        runtime: &Arc<dyn Runtime>,
        damaged: &UnboundedSender<Damaged>,
        mut look_again: UnboundedReceiver<Instant>,
    ) {
        let (mut rules, mut rest) = (Pace::default(), Pace::default());
        // When it is to be looked because of either of them, and because of what was put off.
        let (mut rules_due, mut rest_due, mut later) = (None, None, None);
        loop {
            let due: Option<Instant> = [rules_due, rest_due, later].into_iter().flatten().min();
            let wait = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                what = runtime.disturbed() => match what {
                    Disturbance::Rules => _ = rules_due.get_or_insert(rules.next(Instant::now())),
                    Disturbance::Something => _ = rest_due.get_or_insert(rest.next(Instant::now())),
                },
                Some(at) = look_again.recv() => {
                    later = Some(later.map_or(at, |later: Instant| later.min(at)));
                }
                () = wait => {
                    let now = Instant::now();
                    // One look is for all; what is grave does not wait because there was much of the rest.
                    if rules_due.take().is_some() {
                        rules.looked(now);
                    }
                    if rest_due.take().is_some() {
                        rest.looked(now);
                    }
                    later = self.look_after(runtime, damaged).await;
                }
            }
        }
    }

    /// Compares what one runtime made, and repairs Networks that differ; attachments that do are passed on.
    /// Says when to look again, if that is known.
    async fn look_after(
        &self,
        runtime: &Arc<dyn Runtime>,
        attachments: &UnboundedSender<Damaged>,
    ) -> Option<Instant> {
        let mut outcome = Outcome::default();
        let survey = match tokio::time::timeout(self.config.runtime_deadline, runtime.survey()).await {
            Ok(Ok(survey)) => survey,
            // Nobody is told by a runtime that does not compare: the passes do.
            Ok(Err(error)) if error.reason == RuntimeReason::Unsupported => return None,
            // The next pass says so, if it lasts.
            Ok(Err(_)) | Err(_) => return Some(Instant::now() + COMPARE_RETRY_DELAY),
        };
        let RuntimeLook { damaged, again } =
            self.put_right(runtime, survey, LookOccasion::News, &mut outcome).await;
        if !damaged.is_empty() {
            // They are made again as long as it is looked.
            let _ = attachments.send(damaged);
        }
        again
    }

    /// Sets up again the Networks of which something differs.
    async fn put_right(
        &self,
        runtime: &Arc<dyn Runtime>,
        survey: Survey,
        occasion: LookOccasion,
        outcome: &mut Outcome,
    ) -> RuntimeLook {
        let mut look = RuntimeLook { damaged: survey.attachments, again: None };
        for (who, what) in survey.noticed {
            let Some(pod) = self.sandboxes.pod(&who.0) else { continue };
            if self.repairs.is_news(&who, &what, |sandbox| self.sandboxes.pod(sandbox).is_some()) {
                tracing::info!(sandbox = %who.0, interface = %who.1, "{what}");
                self.report.say(PodEvent { pod, reason: "InterfaceChanged", message: format!("{what}.") });
            }
        }
        for (network, why) in survey.unknown {
            // What was told of it is used up, so nobody else would have it compared before the next pass.
            look.come_back(Instant::now() + COMPARE_RETRY_DELAY);
            match why {
                NotKnown::Moving => tracing::debug!(%network, "part of it was being changed"),
                NotKnown::Failed(error) => {
                    tracing::warn!(%network, error, "part of a Network cannot be compared");
                    outcome.failed += 1;
                }
            }
        }
        // What could not be repaired and is no longer damaged: what was missing is back.
        let broken = self.networks.broken().into_iter().filter(|(name, network)| {
            let its_own = self.runtimes.get(name).is_some_and(|its| Arc::ptr_eq(&its, runtime));
            its_own && !survey.networks.contains_key(network)
        });
        for (_, network) in broken {
            if self.set_up_again(runtime, &network).await == SetUp::Failed {
                outcome.failed += 1;
                look.come_back(Instant::now() + COMPARE_RETRY_DELAY);
            }
        }
        for (network, damage) in survey.networks {
            let turn = self.repairs.networks().turn(&network, Instant::now());
            self.report_damage(&network, &damage, &turn);
            match turn {
                RepairTurn::Later(at) if occasion == LookOccasion::News => look.come_back(at),
                RepairTurn::Later(_) | RepairTurn::Now { .. } => {
                    match self.set_up_again(runtime, &network).await {
                        SetUp::Done => {
                            outcome.networks_repaired += 1;
                            self.count_repairs(&damage);
                        }
                        SetUp::Gone => {}
                        SetUp::Failed => {
                            outcome.failed += 1;
                            look.come_back(Instant::now() + COMPARE_RETRY_DELAY);
                        }
                    }
                }
            }
        }
        look
    }

    /// Tells a runtime again what a Network is.
    async fn set_up_again(&self, runtime: &Arc<dyn Runtime>, network: &NetworkName) -> SetUp {
        let gate = self.networks.gate(network);
        let _one_at_a_time = gate.lock().await;
        let Some(newest) = self.networks.newest(network) else { return SetUp::Gone };
        let limit = self.config.runtime_deadline;
        match tokio::time::timeout(limit, runtime.setup_network(&newest)).await {
            Ok(Ok(())) => {
                self.networks.is_now(&newest);
                SetUp::Done
            }
            Ok(Err(error)) => {
                tracing::error!(
                    %network,
                    error = &error as &dyn std::error::Error,
                    "cannot repair a damaged Network yet"
                );
                self.networks.is_broken(&newest, Unready::not_set_up(knit_types::chain(&error)));
                SetUp::Failed
            }
            Err(_) => {
                tracing::error!(%network, "cannot repair a damaged Network: its runtime does not answer");
                SetUp::Failed
            }
        }
    }

    /// For a runtime that does not compare by itself: each of its Networks is set up again, which changes
    /// nothing where nothing is damaged, and each of its attachments is checked.
    async fn compare_foreign(
        &self,
        name: &str,
        runtime: &Arc<dyn Runtime>,
        outcome: &mut Outcome,
    ) -> Damaged {
        for network in self.networks.of_runtime(name) {
            if self.set_up_again(runtime, &network).await == SetUp::Failed {
                outcome.failed += 1;
            }
        }
        self.check_foreign(name, runtime, None, outcome).await
    }

    /// Has a runtime check the attachments that it made, of one sandbox or of all. Says which are damaged.
    async fn check_foreign(
        &self,
        name: &str,
        runtime: &Arc<dyn Runtime>,
        sandbox: Option<&SandboxId>,
        outcome: &mut Outcome,
    ) -> Damaged {
        let attached: Vec<_> = {
            let books = self.sandboxes.books();
            let of = |record: &knit_ledger::SandboxRecord| {
                let made = |a: &&knit_ledger::Attachment| {
                    a.plan().runtime == name && matches!(a.state(), AttachmentState::Attached(_))
                };
                let own = record.attachments().iter().filter(made);
                let own: Vec<InterfaceName> = own.map(|a| a.plan().interface.clone()).collect();
                (record.runtime_pod(), record.netns().path.clone(), own)
            };
            match sandbox {
                Some(sandbox) => books.get(sandbox).into_iter().map(of).collect(),
                None => books.records().map(of).collect(),
            }
        };
        let mut damaged = Damaged::new();
        for (pod, netns, interfaces) in attached {
            let netns = Some(netns).filter(|path| !path.as_os_str().is_empty());
            for interface in interfaces {
                let limit = self.config.runtime_deadline;
                let check = runtime.check(&pod, netns.as_deref(), Some(&interface));
                match tokio::time::timeout(limit, check).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) if is_damage(error.reason) => {
                        damaged.insert((pod.sandbox.clone(), interface));
                    }
                    Ok(Err(error)) => {
                        tracing::debug!(runtime = name, sandbox = %pod.sandbox, %interface,
                            error = &error as &dyn std::error::Error, "cannot check an interface");
                    }
                    // One that hangs would hang for each of them.
                    Err(_) => {
                        tracing::warn!(
                            runtime = name,
                            "cannot check interfaces: the network runtime does not answer"
                        );
                        outcome.failed += 1;
                        return damaged;
                    }
                }
            }
        }
        damaged
    }

    fn report_damage(&self, network: &NetworkName, damage: &[Damage], turn: &RepairTurn) {
        let words: Vec<&str> = damage.iter().map(|damage| damage.message.as_str()).collect();
        let words = words.join("; ");
        match DamageNews::of(damage, turn) {
            DamageNews::Changed => tracing::info!(%network, "setting it up again: {words}"),
            DamageNews::Damaged => {
                tracing::warn!(
                    %network,
                    "another program changed Knit's kernel state; repairing it: {words}"
                );
            }
            DamageNews::Fight => {
                tracing::error!(%network, "another program keeps changing Knit's kernel state: {words}");
                let message = format!(
                    "Network {network}: a program on this node keeps changing Knit's kernel state \
                    ({words}). It is repaired every {} s; find the program that does it (a firewall \
                    service that flushes rules?) and stop it.",
                    NETWORK_REPAIR_MAX_DELAY.as_secs()
                );
                self.report.say_of_node("KnitIsDisturbed", message);
            }
            DamageNews::Nothing => tracing::debug!(%network, "damaged again: {words}"),
        }
    }

    fn count_repairs(&self, damage: &[Damage]) {
        let kinds: BTreeMap<&'static str, u64> = damage.iter().fold(BTreeMap::new(), |mut kinds, damage| {
            *kinds.entry(damage.kind).or_default() += 1;
            kinds
        });
        kinds.into_iter().for_each(|(kind, count)| self.metrics.repaired(kind, count));
    }
}

impl DamageNews {
    fn of(damage: &[Damage], turn: &RepairTurn) -> Self {
        match turn {
            // Nobody fights there: it can be set up for the node as it is, or not yet.
            RepairTurn::Now { first: true, .. } if damage.iter().all(|damage| damage.kind == NODE) => {
                Self::Changed
            }
            RepairTurn::Now { fight: false, first: true } => Self::Damaged,
            RepairTurn::Now { fight: true, first: true } => Self::Fight,
            RepairTurn::Now { .. } | RepairTurn::Later(_) => Self::Nothing,
        }
    }
}

/// Whether a check says that there is something to repair.
pub(crate) fn is_damage(reason: RuntimeReason) -> bool {
    matches!(reason, RuntimeReason::Damaged | RuntimeReason::AttachmentNotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_cannot_be_set_up_for_the_node_as_it_is_now_is_no_fight() {
        let damage = |kind| Damage { kind, message: "changed".into() };
        let fight = RepairTurn::Now { fight: true, first: true };
        assert_eq!(DamageNews::of(&[damage(NODE)], &fight), DamageNews::Changed);
        assert_eq!(DamageNews::of(&[damage(NODE), damage("rules")], &fight), DamageNews::Fight);
        assert_eq!(
            DamageNews::of(&[damage("rules")], &RepairTurn::Now { fight: false, first: true }),
            DamageNews::Damaged
        );
        assert_eq!(
            DamageNews::of(&[damage("rules")], &RepairTurn::Now { fight: true, first: false }),
            DamageNews::Nothing
        );
    }
}
