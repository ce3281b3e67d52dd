//! The thread that owns the engine: it is told of everything, settles, and has each router carry out one
//! batch. What a pod waits for is answered when the batch with it is in force.

mod known;
mod router;
#[cfg(test)]
mod tests;
mod told;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use knit_api::names::DEFAULT_NETWORK;
use knit_node::policy::PoliciesState;
use knit_policy::backend::{Backends, Failure};
use knit_policy::model::{Direction, Name, Namespace, NamespaceMatch, Peer, Pod, PodKey, Policy, PolicyName};
use knit_policy::sets::{Change, Engine, Key, Value};
use tokio::sync::watch;

use crate::metrics::{Metrics, Of};
use crate::recorded::Strangers;
use known::Known;
pub(crate) use known::SliceContent;
use router::Router;
pub(crate) use router::{NodePlace, Place, Settings};
pub(crate) use told::{Admit, Message, Objection, Summary, Told, Watched};

/// So many messages are taken in before they are put in force.
const BATCH: usize = 4096;

/// How many policies act on pods of this node in each Network, and the newest version of one.
type Acting = BTreeMap<Name, (usize, Option<u64>)>;

/// Tells a pod something.
pub(crate) type TellPod = Box<dyn Fn(&Pod, String) + Send>;

/// The thread's state.
pub(crate) struct Worker {
    pub(crate) engine: Engine,
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) node: NodePlace,
    pub(crate) watched: Watched,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) summary: watch::Sender<Summary>,
    /// Tells a pod that policies select an interface of it which they cannot be enforced for, and why.
    pub(crate) tell_pod: TellPod,
    /// The interfaces of which that was told: the pod's uid, and the Network.
    unenforced: BTreeSet<(Name, Name)>,
    /// Told when what NodeNetwork shows may have changed.
    pub(crate) changed: Box<dyn Fn() + Send>,
    /// Policies are left to others in the whole cluster.
    pub(crate) off: bool,
    known: Known,
    routers: BTreeMap<Name, Looked>,
    settings: BTreeMap<Name, Settings>,
    versions: BTreeMap<PolicyName, u64>,
    complete: bool,
    /// Policies or pods of this node have changed since states were last told.
    acting_changed: bool,
    acting: Acting,
    policies_changed: bool,
    /// How many policies there are, and whether one of them asks for nodes.
    policies: (usize, bool),
    nodes_known: bool,
    /// Where it is known what cluster services lead to.
    aliases_known: BTreeSet<Name>,
    /// Where interfaces are of which nobody knows whose they are.
    strangers: Strangers,
    admits: Vec<Admit>,
    /// Live connections of this router are being made to follow, on another thread.
    following: Option<u64>,
    /// What became of that.
    followed: Option<Result<usize, Failure>>,
    oldest: Option<Instant>,
}

/// A router, and who wants to know how it stands.
struct Looked {
    router: Router,
    peers_known: bool,
    /// When the oldest of what is not in force yet arrived.
    arrived: Option<Instant>,
    state: watch::Sender<PoliciesState>,
}

impl Worker {
    #[expect(clippy::too_many_arguments, reason = "all that a thread is made of, once")]
    pub(crate) fn new(
        node_name: &str,
        node: NodePlace,
        backends: Arc<dyn Backends>,
        watched: Watched,
        metrics: Arc<Metrics>,
        summary: watch::Sender<Summary>,
        tell_pod: TellPod,
        changed: Box<dyn Fn() + Send>,
        off: bool,
    ) -> Self {
        Self {
            engine: Engine::new(node_name),
            backends,
            node,
            watched,
            metrics,
            summary,
            tell_pod,
            unenforced: BTreeSet::new(),
            changed,
            off,
            known: Known::default(),
            routers: BTreeMap::new(),
            settings: BTreeMap::new(),
            versions: BTreeMap::new(),
            complete: false,
            acting_changed: false,
            acting: Acting::new(),
            policies_changed: false,
            policies: (0, false),
            nodes_known: false,
            aliases_known: BTreeSet::new(),
            strangers: Strangers::default(),
            admits: Vec::new(),
            following: None,
            followed: None,
            oldest: None,
        }
    }

    /// Runs until it is told to end.
    pub(crate) fn run(mut self, inbox: &Receiver<Message>) {
        loop {
            let routers = || self.routers.values().map(|looked| &looked.router);
            let due = routers().filter_map(Router::due);
            let follow_due = routers().filter_map(Router::follow_due).filter(|_| self.following.is_none());
            let due = due.chain(follow_due).min();
            let first = match due {
                Some(at) => match inbox.recv_timeout(at.saturating_duration_since(Instant::now())) {
                    Ok(message) => Some(message),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                None => match inbox.recv() {
                    Ok(message) => Some(message),
                    Err(_) => return,
                },
            };
            for message in first.into_iter().chain(inbox.try_iter().take(BATCH)) {
                if matches!(message.told, Told::End) {
                    return;
                }
                self.take(message);
            }
            self.commit();
        }
    }

    fn take(&mut self, Message { told, at }: Message) {
        match told {
            Told::SetPolicy(policy, version) => {
                if let Some(version) = version {
                    self.versions.insert(policy.name.clone(), version);
                }
                self.engine.set_policy(*policy);
                self.policies_changed = true;
                self.arrived(at);
            }
            Told::DeletePolicy(name) => {
                self.versions.remove(&name);
                self.engine.delete_policy(&name);
                self.policies_changed = true;
                self.arrived(at);
            }
            Told::Namespace(name, Some(labels)) => {
                self.engine.set_namespace(Namespace::new(&name, labels));
                self.arrived(at);
            }
            Told::Namespace(name, None) => {
                self.engine.delete_namespace(&name);
                self.arrived(at);
            }
            Told::Local(name, pods) => {
                self.known.set_named(&mut self.engine, &name, pods);
                self.arrived(at);
            }
            Told::Locals(pods, strangers) => {
                self.known.set_locals(&mut self.engine, pods);
                self.strangers = strangers;
                self.acting_changed = true;
            }
            Told::Slices(network, slices) => {
                for (name, content) in slices {
                    self.known.set_slice(&mut self.engine, &(network.clone(), name), content);
                }
                self.oldest.get_or_insert(at);
            }
            Told::PeersKnown(network) => {
                if let Some(looked) = self.routers.get_mut(&network) {
                    looked.peers_known = true;
                }
            }
            Told::NodesKnown => self.nodes_known = true,
            Told::Node(_, Some(node)) => self.engine.set_node(*node),
            Told::Node(name, None) => self.engine.delete_node(&name),
            Told::Aliases(network, aliases) => self.engine.set_aliases(&network, &aliases),
            Told::AliasesKnown(network) => drop(self.aliases_known.insert(network)),
            Told::NodeAddresses(addresses) => {
                let now = Instant::now();
                for looked in self.routers.values_mut() {
                    looked.router.set_node(&addresses, &self.metrics, now);
                }
                self.node.addresses = addresses;
            }
            Told::Settings(network, settings) => {
                self.settings.insert(network.clone(), settings);
                let settings = self.settings_of(&network);
                if let Some(looked) = self.routers.get_mut(&network) {
                    looked.router.set_settings(settings);
                }
            }
            Told::Start { id, network, place, state } => {
                let router = Router::new(id, network.clone(), place, self.settings_of(&network));
                self.routers.insert(network, Looked { router, peers_known: false, arrived: None, state });
                self.acting_changed = true;
            }
            Told::Stop { id } => {
                let stopped: Vec<Name> = self
                    .routers
                    .iter()
                    .filter(|(_, looked)| looked.router.id() == id)
                    .map(|(network, _)| network.clone())
                    .collect();
                for network in stopped {
                    self.routers.remove(&network);
                    for slice in self.known.slices_of(&network) {
                        self.known.set_slice(&mut self.engine, &slice, SliceContent::default());
                    }
                }
            }
            Told::Complete => {
                self.complete = true;
                self.acting_changed = true;
            }
            Told::Admit(admit) => {
                let key = admit.pod.key.clone();
                // They may come from the same snapshot by another way, and later.
                if let Some(labels) = &admit.namespace {
                    self.engine.set_namespace(Namespace::new(&key.namespace, labels.clone()));
                }
                for attachment in &admit.pod.attachments {
                    if let Some(looked) = self.routers.get_mut(&attachment.network) {
                        let has = |a: &IpAddr| self.known.has_address(&key, &attachment.network, *a);
                        looked.router.starts_with(attachment.addresses.iter().copied().filter(|a| !has(a)));
                        looked.router.look_for_move();
                        looked.router.try_now();
                    }
                }
                let pods = admit.namesakes.iter().chain([&admit.pod]).cloned().collect();
                self.known.set_named(&mut self.engine, &PodKey { older: None, ..key }, pods);
                self.acting_changed = true;
                self.admits.push(*admit);
            }
            Told::Compare => {
                let now = Instant::now();
                for looked in self.routers.values_mut() {
                    looked.router.look_for_move();
                    looked.router.restore(&self.metrics, now);
                    looked.router.count_denied(&self.metrics);
                }
            }
            Told::Touched { network, id } => {
                if let Some(looked) = self.routers.get_mut(&network)
                    && looked.router.id() == id
                {
                    looked.router.touched(Instant::now());
                }
            }
            Told::Followed { id, outcome } => {
                if self.following == Some(id) {
                    self.followed = Some(outcome);
                }
            }
            Told::Ask(question) => question(&self.engine),
            Told::End => {}
        }
    }

    /// Something came that policies come from.
    fn arrived(&mut self, at: Instant) {
        self.acting_changed = true;
        self.oldest.get_or_insert(at);
    }

    fn settings_of(&self, network: &Name) -> Settings {
        let settings = self.settings.get(network).copied().unwrap_or_default();
        Settings { enforced: settings.enforced && !self.off, ..settings }
    }

    /// Puts in force what was told, and answers who waits for it.
    fn commit(&mut self) {
        let now = Instant::now();
        self.count_policies();
        if self.complete {
            let lacking: BTreeMap<Name, &str> =
                self.routers.keys().filter_map(|n| Some((n.clone(), self.lacks(n)?))).collect();
            let mut batches: BTreeMap<Name, Vec<Change>> = self.engine.settle().into_iter().collect();
            // When the oldest of what is in force now arrived.
            let (arrived, mut effective) = (self.oldest.take(), None::<Instant>);
            for (network, looked) in &mut self.routers {
                let changes = batches.remove(network).unwrap_or_default();
                let waits = looked.router.settings().enforced && !looked.router.is_written();
                let lacks = waits && lacking.contains_key(network);
                if !looked.peers_known || lacks {
                    // What is in the kernel from before stays.
                    looked.router.bring_whole();
                    continue;
                }
                let (engine, was_written) = (&self.engine, looked.router.is_written());
                let with = (&self.backends, &self.node, &self.watched);
                looked.router.apply(&changes, || engine.elements(network), with, &self.metrics, now);
                if !changes.is_empty() {
                    looked.arrived = looked.arrived.or(arrived);
                }
                // What is refused has not had its effect yet.
                if looked.router.is_written() {
                    effective = looked.arrived.take().into_iter().chain(effective).min();
                }
                if was_written {
                    count(&mut looked.router.size, &changes);
                } else if looked.router.is_written() {
                    looked.router.size = (0, 0);
                    let all = engine.elements(network);
                    let all = all.into_iter().map(|(key, value)| Change { key, old: None, new: Some(value) });
                    count(&mut looked.router.size, &all.collect::<Vec<_>>());
                }
                let (elements, subjects) = looked.router.size;
                self.metrics.elements.get_or_create(&Of::network(network)).set(number(elements));
                self.metrics.subjects.get_or_create(&Of::network(network)).set(number(subjects));
            }
            if let Some(arrived) = effective {
                self.metrics.commits.observe(arrived.elapsed().as_secs_f64());
            }
        }
        for admit in std::mem::take(&mut self.admits) {
            let answer = self.judge(&admit);
            // Who does not wait any more asks again.
            let _ = admit.reply.send(answer);
        }
        self.tell_states();
        let now = Instant::now();
        self.routers.values_mut().for_each(|looked| looked.router.repair_if_due(&self.metrics, now));
        self.follow(now);
    }

    /// Has live connections follow where that is due, in one router at a time. Where there are many that
    /// takes long, so it is done on another thread.
    fn follow(&mut self, now: Instant) {
        // After the commit, so that what has come together with this is not taken for looked at.
        if let Some(outcome) = self.followed.take() {
            let followed = self.following.take();
            let router = self.routers.values_mut().find(|looked| Some(looked.router.id()) == followed);
            if let Some(looked) = router {
                looked.router.has_followed(outcome, &self.metrics, now);
            }
        }
        if self.following.is_some() {
            return;
        }
        let due = self.routers.values_mut().filter_map(|looked| {
            let at = looked.router.follow_due().filter(|at| *at <= now)?;
            Some((at, &mut looked.router))
        });
        let Some((_, router)) = due.min_by_key(|(at, _)| *at) else { return };
        let id = router.id();
        let Some(follow) = router.follow(now) else { return };
        self.following = Some(id);
        let report = self.watched.follow_report(id);
        // If there is no thread, or it ends early, the report says so, and it is tried again.
        let thread = std::thread::Builder::new().name("policy-follow".to_owned());
        let spawned = thread.spawn(move || report.carry_out(follow));
        if let Err(error) = spawned {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot start the thread that applies policies to live connections"
            );
        }
    }

    /// Whether a pod can be made now.
    fn judge(&self, admit: &Admit) -> Result<(), Objection> {
        if !self.complete {
            return Err(Objection::NotComplete);
        }
        // In force is what was told last.
        if !self.known.has(&admit.pod) {
            return Err(Objection::Overtaken);
        }
        let (pod, cluster) = (&admit.pod, self.engine.cluster());
        let labels = cluster.namespace_labels(&pod.key.namespace);
        for attachment in &pod.attachments {
            let (network, primary) = (&attachment.network, attachment.primary);
            if !self.settings_of(network).enforced {
                continue;
            }
            let about = || cluster.policies().filter(|p| p.covers(network, primary));
            if admit.namespace.is_none() && about().any(|p| is_by_labels(&p.subject.namespaces)) {
                return Err(Objection::NamespaceUnknown);
            }
            let may_select = |p: &Policy| match &p.subject.namespaces {
                NamespaceMatch::Named(name) => *name == pod.key.namespace,
                NamespaceMatch::Selected(selector) => selector.matches(&labels),
            };
            if !admit.labels_known && about().any(|p| may_select(p) && !p.subject.pods.is_everything()) {
                return Err(Objection::LabelsUnknown);
            }
            let acting = cluster.policies_on(pod, network, primary);
            let Some(first) = acting.first() else { continue };
            let Some(looked) = self.routers.get(network) else {
                return Err(Objection::NoRouter(network.clone(), first.name.clone()));
            };
            if !looked.peers_known {
                return Err(Objection::PeersUnknown(network.clone()));
            }
            if !looked.router.is_in_force() {
                let why = self.lacks(network).or(looked.router.problem());
                let why = why.unwrap_or("they are being applied");
                return Err(Objection::NotInForce(network.clone(), why.to_owned()));
            }
        }
        Ok(())
    }

    fn count_policies(&mut self) {
        if std::mem::take(&mut self.policies_changed) {
            let known = self.engine.cluster();
            let policies = known.policies().count();
            self.metrics.policies.set(number(policies));
            self.policies = (policies, known.policies().any(|policy| asks_for_nodes(policy)));
        }
    }

    /// What is missing for a router that is not in force, so that what is in the kernel from before stays:
    /// what denies nodes that are not known would allow them, what allows DNS would not, and what isolates a
    /// pod of which nobody knows who it is would go.
    fn lacks(&self, network: &Name) -> Option<&'static str> {
        if self.policies.1 && !self.nodes_known {
            return Some("Nodes, which a policy refers to, have not arrived from the API");
        }
        if self.policies.0 > 0 && **network != *DEFAULT_NETWORK && !self.aliases_known.contains(network) {
            return Some("endpoints of cluster services have not arrived from the API");
        }
        self.strangers.may_be_in(network).then_some(
            "the agent's record of an interface there does not name its pod, or cannot be read: delete that \
             pod",
        )
    }

    /// Says how everything stands, where that has changed.
    fn tell_states(&mut self) {
        let ((policies, asks_for_nodes), nodes_known) = (self.policies, self.nodes_known);
        let peers_known = self.routers.values().filter(|looked| looked.peers_known).count();
        let (complete, aliases_known) = (self.complete, self.aliases_known.len());
        let summary = Summary { complete, policies, peers_known, asks_for_nodes, aliases_known, nodes_known };
        self.summary.send_if_modified(|now| std::mem::replace(now, summary) != summary);
        if std::mem::take(&mut self.acting_changed) {
            self.acting = self.count_acting();
            self.tell_unenforced();
        }
        let mut news = false;
        for (network, looked) in &self.routers {
            let mut state = looked.state.borrow().clone();
            let in_force = looked.router.is_in_force();
            let missing = || self.lacks(network).filter(|_| self.complete && !in_force);
            state.problem = match looked.router.settings().enforced {
                false => Some("Knit does not enforce policies in this Network".to_owned()),
                true => {
                    let problem = looked.router.problem().or_else(missing);
                    problem.map(|why| format!("policies are not in force: {why}"))
                }
            };
            let (count, newest) = self.acting.get(network).copied().unwrap_or_default();
            state.acting = count;
            // What is not in force yet is not said to be.
            if in_force {
                state.newest = newest.map(|version| version.to_string()).or(state.newest);
            }
            news |= looked.state.send_if_modified(|now| {
                let changed = *now != state;
                *now = state;
                changed
            });
        }
        if news {
            (self.changed)();
        }
    }

    /// Tells the pods that have an interface where nobody enforces what policies say of it, as if there were
    /// none: the policy may have come after the pod.
    fn tell_unenforced(&mut self) {
        let without = |network: &Name| {
            let settings = self.settings_of(network);
            settings.enforced && !settings.has_router
        };
        if !self.complete {
            return;
        }
        if !self.settings.keys().any(without) {
            // One that comes back is another, and its pods are told again.
            self.unenforced.clear();
            return;
        }
        let mut found = BTreeSet::new();
        for pod in self.known.locals() {
            for attachment in pod.attachments.iter().filter(|attachment| without(&attachment.network)) {
                let network = &attachment.network;
                let acting = self.engine.cluster().policies_on(pod, network, attachment.primary);
                let Some(first) = acting.first() else { continue };
                let about = (pod.uid.clone(), network.clone());
                if !self.unenforced.contains(&about) {
                    let what = format!(
                        "{} selects this pod's interface in Network {network}, where no policy can be \
                         enforced, because that Network has no router: the interface stays as it is; leave \
                         the pod out of the policy, or use another Network",
                        first.name
                    );
                    (self.tell_pod)(pod, what);
                }
                found.insert(about);
            }
        }
        self.unenforced = found;
    }

    fn count_acting(&self) -> Acting {
        let mut names: BTreeMap<Name, BTreeSet<PolicyName>> = BTreeMap::new();
        let cluster = self.engine.cluster();
        if cluster.policies().next().is_some() {
            for pod in self.known.locals() {
                for attachment in &pod.attachments {
                    let acting = cluster.policies_on(pod, &attachment.network, attachment.primary);
                    let of_network = names.entry(attachment.network.clone()).or_default();
                    of_network.extend(acting.iter().map(|policy| policy.name.clone()));
                }
            }
        }
        let newest = |names: &BTreeSet<PolicyName>| {
            names.iter().filter_map(|name| self.versions.get(name).copied()).max()
        };
        names.into_iter().map(|(network, names)| (network, (names.len(), newest(&names)))).collect()
    }
}

/// Whether namespaces are selected by labels other than their own name.
fn is_by_labels(namespaces: &NamespaceMatch) -> bool {
    matches!(namespaces, NamespaceMatch::Selected(selector) if !selector.is_everything())
}

/// Whether a policy has nodes as peers.
fn asks_for_nodes(policy: &Policy) -> bool {
    let rules = Direction::ALL.into_iter().flat_map(|direction| policy.rules(direction).unwrap_or_default());
    rules.flat_map(|rule| rule.peers.iter().flatten()).any(|peer| matches!(peer, Peer::Nodes(_)))
}

/// Keeps count of elements and subjects.
fn count((elements, subjects): &mut (usize, usize), changes: &[Change]) {
    let of = |value: Option<Value>| usize::from(value.is_some());
    for change in changes {
        let (old, new) = (of(change.old), of(change.new));
        *elements = (*elements + new).saturating_sub(old);
        if matches!(change.key, Key::Subject(..)) {
            *subjects = (*subjects + new).saturating_sub(old);
        }
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
