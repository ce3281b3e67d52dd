//! What the agent holds: it starts the worker, and tells it of routers and interfaces.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant as StdInstant;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::ObjectReference;
use knit_kernel::NetNs;
use knit_ledger::SandboxRecord;
use knit_node::policy::{EnforcedRouter, PoliciesState, PolicyEnforcer, RouterApart};
use knit_node::proxy::Stopped;
use knit_node::{Core, Error, Reason, Result};
use knit_objects::{EventLimits, EventNote, EventRecorder, Objects, Reporter};
use knit_policy::backend::Backends;
use knit_policy::model::Name;
use knit_policy::sets::Engine;
use knit_runtime::Network;
use knit_types::sync::Locked;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::feed::{Shared, complete, follow_world};
use crate::metrics::Metrics;
use crate::worker::{Message, NodePlace, Place, Summary, TellPod, Told, Watched, Worker};
use crate::{admission, aliases, kinds, nodes, peers};

/// Whether this agent enforces policies.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Mode {
    /// It does, in every Network that does not leave it to others.
    #[default]
    On,
    /// Others do, or nobody: what an agent before this one made for policies is removed.
    Off,
}

/// What the enforcement of a node is told.
#[derive(Debug)]
pub struct Config {
    /// The node's name.
    pub node: String,
    /// The node's own network namespace: the default Network's router.
    pub namespace: NetNs,
    /// Whether policies are enforced.
    pub mode: Mode,
    /// What makes them true in a router.
    pub backends: Arc<dyn Backends>,
}

/// What the worker is started with, once.
type Start = (Config, Receiver<Message>, watch::Sender<Summary>);

/// The enforcement of policies on one node.
pub struct Enforcement {
    mode: Mode,
    sender: Sender<Message>,
    start: Mutex<Option<Start>>,
    summary: watch::Receiver<Summary>,
    shared: Arc<Mutex<Option<Arc<Shared>>>>,
    /// Tells which slices are to be followed.
    peers: mpsc::UnboundedSender<peers::Command>,
    peers_inbox: Mutex<Option<mpsc::UnboundedReceiver<peers::Command>>>,
    metrics: Arc<Metrics>,
    ids: AtomicU64,
}

impl Enforcement {
    /// For one node. Nothing runs before the agent asks for it.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (sender, inbox) = channel();
        let (peers, peers_inbox) = mpsc::unbounded_channel();
        let (summary_by, summary) = watch::channel(Summary::default());
        Self {
            mode: config.mode,
            sender,
            start: Mutex::new(Some((config, inbox, summary_by))),
            summary,
            shared: Arc::default(),
            peers,
            peers_inbox: Mutex::new(Some(peers_inbox)),
            metrics: Arc::default(),
            ids: AtomicU64::new(0),
        }
    }

    /// Asks the engine something, such as why a packet was denied. The question is dropped if nobody is left
    /// to answer it.
    pub fn ask(&self, question: impl FnOnce(&Engine) + Send + 'static) {
        self.tell(Told::Ask(Box::new(question)));
    }

    fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.locked().clone()
    }

    fn tell(&self, told: Told) {
        // Whoever waits for an answer hears that there is none.
        let _ = self.sender.send(Message { told, at: StdInstant::now() });
    }
}

#[async_trait]
impl PolicyEnforcer for Enforcement {
    fn follow(&self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) {
        let Some((config, inbox, summary)) = self.start.locked().take() else { return };
        let addresses = crate::feed::node_addresses(core, &core.world().get());
        let node = NodePlace { namespace: config.namespace, addresses };
        let shown = core.clone();
        let controller = knit_api::names::AGENT_MANAGER.to_owned();
        let reporter = Reporter { controller, instance: core.node().to_owned() };
        let worker = Worker::new(
            &config.node,
            node,
            config.backends,
            Watched(self.sender.clone()),
            Arc::clone(&self.metrics),
            summary,
            tell_pods(EventRecorder::start(objects, reporter, EventLimits::default())),
            Box::new(move || shown.networks_changed()),
            config.mode == Mode::Off,
        );
        let thread = std::thread::Builder::new().name("policy".to_owned());
        let ended = Ended(core.clone());
        let run = move || {
            // After the worker, also where it panics.
            let _ended = ended;
            worker.run(&inbox);
        };
        if let Err(error) = thread.spawn(run) {
            tracing::error!(%error, "policies are not enforced: cannot start the thread that does it");
            return;
        }
        if config.mode == Mode::Off {
            // Nothing is asked for: routers are brought to hold nothing.
            self.tell(Told::Complete);
        } else {
            let shared = Arc::new(Shared::new(core.clone(), self.sender.clone(), self.summary.clone()));
            kinds::follow(&shared, objects, tasks);
            tasks.spawn(aliases::follow(Arc::clone(&shared), objects.clone()));
            tasks.spawn(nodes::follow(Arc::clone(&shared), objects.clone()));
            tasks.spawn(follow_world(Arc::clone(&shared)));
            tasks.spawn(complete(Arc::clone(&shared)));
            if let Some(inbox) = self.peers_inbox.locked().take() {
                tasks.spawn(peers::follow_all(Arc::clone(&shared), objects.clone(), inbox));
            }
            *self.shared.locked() = Some(shared);
        }
        let ends = End { sender: self.sender.clone(), shared: Arc::clone(&self.shared) };
        // With the agent's other tasks: the thread ends when they do.
        tasks.spawn(async move {
            let _ends = ends;
            std::future::pending::<()>().await;
        });
    }

    fn start(&self, router: Option<RouterApart>, network: &Network) -> Box<dyn EnforcedRouter> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let name = Name::from(network.name.as_str());
        let (sender, state) = watch::channel(PoliciesState::default());
        let place = Place { apart: router, is_bridged: network.topology.is_switched() };
        self.tell(Told::Start { id, network: name.clone(), place, state: sender });
        match self.mode {
            // It is followed as soon as somebody follows anything.
            Mode::On => drop(self.peers.send(peers::Command::Follow { id, network: name.clone() })),
            Mode::Off => self.tell(Told::PeersKnown(name.clone())),
        }
        let (peers, sender) = (self.peers.clone(), self.sender.clone());
        Box::new(Held { id, network: name, state, peers, sender })
    }

    async fn admit(&self, record: &SandboxRecord, deadline: Instant) -> Result<()> {
        match self.shared() {
            Some(shared) => admission::admit(&shared, record, deadline).await,
            None if self.mode == Mode::Off => Ok(()),
            None => {
                let message = "policies cannot be enforced on this node: check the agent's log";
                Err(Error::new(Reason::NotReady, message))
            }
        }
    }

    fn released(&self, namespace: &str, name: &str) {
        if let Some(shared) = self.shared() {
            shared.tell_local(namespace, name);
        }
    }

    fn compare(&self) {
        if let Some(shared) = self.shared() {
            shared.tell_locals();
        }
        self.tell(Told::Compare);
    }

    fn stopped(&self) -> Option<Stopped> {
        // The thread has the other end, or it waits to be started with it.
        let ended = self.mode == Mode::On && self.summary.has_changed().is_err();
        ended.then(|| Stopped {
            why: "policy enforcement has stopped on this node: see the agent's log and restart the agent"
                .to_owned(),
            ran: true,
        })
    }

    fn metrics(&self) -> String {
        self.metrics.text()
    }
}

impl fmt::Debug for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enforcement").field("summary", &*self.summary.borrow()).finish_non_exhaustive()
    }
}

/// Events on pods, by this node's agent.
fn tell_pods(recorder: EventRecorder) -> TellPod {
    Box::new(move |pod, what| {
        let reference = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.key.namespace.as_ref().to_owned()),
            name: Some(pod.key.name.as_ref().to_owned()),
            uid: (!pod.uid.is_empty()).then(|| pod.uid.as_ref().to_owned()),
            ..ObjectReference::default()
        };
        recorder.tell(EventNote::warning(reference, "PolicyNotEnforced", "Enforce", what));
    })
}

/// Tells the agent that the thread has ended.
struct Ended(Core);

impl Drop for Ended {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("policy enforcement has stopped on this node: restart the agent");
        }
        self.0.assess();
        self.0.networks_changed();
    }
}

/// Ends the thread, and lets go of the agent, which holds the enforcement in turn.
struct End {
    sender: Sender<Message>,
    shared: Arc<Mutex<Option<Arc<Shared>>>>,
}

impl Drop for End {
    fn drop(&mut self) {
        *self.shared.locked() = None;
        let _ = self.sender.send(Message { told: Told::End, at: StdInstant::now() });
    }
}

/// A router, as the agent holds it.
struct Held {
    id: u64,
    network: Name,
    state: watch::Receiver<PoliciesState>,
    peers: mpsc::UnboundedSender<peers::Command>,
    sender: Sender<Message>,
}

impl EnforcedRouter for Held {
    fn state(&self) -> PoliciesState {
        let state = self.state.borrow().clone();
        // It is closed when nobody is left who could change it.
        match self.state.has_changed() {
            Ok(_) => state,
            Err(_) => {
                let problem = Some("policy enforcement has stopped on this node".to_owned());
                PoliciesState { problem, ..state }
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.peers.send(peers::Command::Stop { id: self.id });
        let _ = self.sender.send(Message { told: Told::Stop { id: self.id }, at: StdInstant::now() });
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policies")
            .field("network", &self.network)
            .field("state", &*self.state.borrow())
            .finish()
    }
}
