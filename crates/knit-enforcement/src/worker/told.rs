//! What the worker is told, and what it answers.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::Instant;

use ipnet::IpNet;
use knit_node::policy::PoliciesState;
use knit_policy::backend::{Failure, Follow};
use knit_policy::model::{Alias, Labels, Name, Node, Pod, PodKey, Policy, PolicyName};
use knit_policy::sets::Engine;
use tokio::sync::{oneshot, watch};

use super::{Place, Settings, SliceContent};
use crate::recorded::Strangers;

/// What the worker is told, and when what caused it arrived.
pub(crate) struct Message {
    pub(crate) told: Told,
    pub(crate) at: Instant,
}

/// What the worker is told.
pub(crate) enum Told {
    /// A policy, with the version that the API server gave it.
    SetPolicy(Box<Policy>, Option<u64>),
    /// A policy is gone.
    DeletePolicy(PolicyName),
    /// A namespace has these labels; none if it is gone.
    Namespace(Name, Option<Labels>),
    /// The pods of this node that have this name: several while one goes and another comes.
    Local(PodKey, Vec<Pod>),
    /// All pods of this node, and where there is one of which nobody knows who it is.
    Locals(BTreeMap<PodKey, Pod>, Strangers),
    /// Slices of a Network, by name, that were told of together.
    Slices(Name, Vec<(Name, SliceContent)>),
    /// All slices of a Network have arrived, or those of the last run count.
    PeersKnown(Name),
    /// All nodes have arrived, or those of the last run count.
    NodesKnown,
    /// A node; none if it is gone.
    Node(Name, Option<Box<Node>>),
    /// The cluster services that pods of a Network reach over the uplink.
    Aliases(Name, Vec<Alias>),
    /// All of a Network have arrived, or those of the last run count.
    AliasesKnown(Name),
    /// The addresses of this node.
    NodeAddresses(Vec<IpNet>),
    /// What an operator says about policies in a Network.
    Settings(Name, Settings),
    /// A Network's router is there.
    Start { id: u64, network: Name, place: Place, state: watch::Sender<PoliciesState> },
    /// It is not looked after any more.
    Stop { id: u64 },
    /// Everything that policies depend on has arrived, or that of the last run counts.
    Complete,
    /// A pod is to be subject to policies before it is made.
    Admit(Box<Admit>),
    /// Compare what is in force with what should be.
    Compare,
    /// Somebody else changed something in a router.
    Touched { network: Name, id: u64 },
    /// Live connections of a router have followed what was in force, or could not; how many were cut.
    Followed { id: u64, outcome: Result<usize, Failure> },
    /// Somebody wants to know something.
    Ask(Box<dyn FnOnce(&Engine) + Send>),
    /// Nobody is left.
    End,
}

/// A pod that waits for its policies.
pub(crate) struct Admit {
    /// The pod, with all its interfaces.
    pub(crate) pod: Pod,
    /// Others of its name.
    pub(crate) namesakes: Vec<Pod>,
    /// Whether its labels are known.
    pub(crate) labels_known: bool,
    /// The labels of its namespace, where they are known.
    pub(crate) namespace: Option<Labels>,
    /// Is answered when what policies ask for is in force.
    pub(crate) reply: oneshot::Sender<Result<(), Objection>>,
}

/// Why a pod is not admitted.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Objection {
    /// Policies, namespaces or pods have not all arrived.
    NotComplete,
    /// What was told after it says otherwise.
    Overtaken,
    /// A policy may select it, and its labels are not known.
    LabelsUnknown,
    /// A policy may select it, and the labels of its namespace are not known.
    NamespaceUnknown,
    /// Policies act on it in this Network, and their peers are not known.
    PeersUnknown(Name),
    /// Policies are not in force in this Network.
    NotInForce(Name, String),
    /// A policy acts on it in a Network where there is no router to enforce it in.
    NoRouter(Name, PolicyName),
}

/// What others may know at any time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Summary {
    /// Everything that policies depend on has arrived.
    pub(crate) complete: bool,
    /// How many policies there are.
    pub(crate) policies: usize,
    /// For how many Networks peers are known: it grows while a pod may be waiting for them.
    pub(crate) peers_known: usize,
    /// Whether some policy has nodes as peers.
    pub(crate) asks_for_nodes: bool,
    /// For how many Networks it is known what cluster services lead to.
    pub(crate) aliases_known: usize,
    /// Whether all nodes are known.
    pub(crate) nodes_known: bool,
}

/// Tells the worker of what others do to routers, and of what was done on other threads.
pub(crate) struct Watched(pub(crate) Sender<Message>);

/// Tells the worker what became of live connections, whatever happens to whoever has it.
pub(super) struct FollowReport {
    id: u64,
    sender: Sender<Message>,
    outcome: Option<Result<usize, Failure>>,
}

impl Watched {
    pub(super) fn follow_report(&self, id: u64) -> FollowReport {
        FollowReport { id, sender: self.0.clone(), outcome: None }
    }

    pub(super) fn teller(&self, network: Name, id: u64) -> Box<dyn Fn() + Send> {
        let sender = self.0.clone();
        // Without a worker there is nothing to repair.
        Box::new(move || {
            let told = Told::Touched { network: network.clone(), id };
            let _ = sender.send(Message { told, at: Instant::now() });
        })
    }
}

impl FollowReport {
    pub(super) fn carry_out(mut self, follow: Follow) {
        self.outcome = Some(follow());
    }
}

impl Drop for FollowReport {
    fn drop(&mut self) {
        let unsaid = || Err("the look at live connections ended early".into());
        let outcome = self.outcome.take().unwrap_or_else(unsaid);
        // Without a worker nobody waits for it.
        let _ =
            self.sender.send(Message { told: Told::Followed { id: self.id, outcome }, at: Instant::now() });
    }
}
