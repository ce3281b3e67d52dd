//! The worker over a backend in memory: what it waits for, and whom it does not admit.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_node::policy::PoliciesState;
use knit_policy::backend::{Backend, Denied, Failure, Follow, RouterPlace};
use knit_policy::model::{Action, Attachment, Kind, Labels, NamespaceMatch, Node, Peer, Pod, PodKey, Policy};
use knit_policy::model::{PolicyName, Rule, Scope, Selector, Subject, Tier};
use knit_policy::sets::{Change, Key, Value};
use knit_types::sync::Locked as _;
use tokio::sync::{oneshot, watch};

use super::*;
use crate::recorded::Strangers;

/// What stands in for the kernel.
#[derive(Debug, Default)]
struct Held {
    elements: BTreeMap<Key, Value>,
    calls: usize,
    synced: bool,
    fails: bool,
    /// What live connections have not followed yet, and how often they were made to, or could not be.
    touched: bool,
    follows: usize,
    cannot_follow: usize,
    panics: bool,
    gap: Option<String>,
    denied: Denied,
    /// Each time they follow, one more of these is waited for.
    gate: Option<Arc<Mutex<Receiver<()>>>>,
    waiting: usize,
}

#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<Held>>);

impl Fake {
    fn attempt(&self) -> Result<std::sync::MutexGuard<'_, Held>, Failure> {
        let mut held = self.0.locked();
        held.calls += 1;
        if held.fails { Err("the kernel refuses".into()) } else { Ok(held) }
    }
}

impl Backends for Fake {
    fn open(&self, _: &RouterPlace<'_>) -> Result<Box<dyn Backend>, Failure> {
        Ok(Box::new(self.clone()))
    }
}

impl Backend for Fake {
    fn sync(&mut self, wanted: &BTreeMap<Key, Value>) -> Result<(), Failure> {
        let mut held = self.attempt()?;
        // The first time, too: what an earlier agent left has not followed, perhaps.
        let first = !std::mem::replace(&mut held.synced, true);
        held.touched |= first || held.elements != *wanted;
        held.elements = wanted.clone();
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<(), Failure> {
        let mut held = self.attempt()?;
        for change in changes {
            match change.new {
                Some(value) => held.elements.insert(change.key, value),
                None => held.elements.remove(&change.key),
            };
        }
        held.touched = true;
        Ok(())
    }

    fn restore(&mut self) -> Result<usize, Failure> {
        self.attempt().map(|_| 0)
    }

    fn set_node(&mut self, _: &[IpNet]) -> Result<(), Failure> {
        Ok(())
    }

    fn watch(&mut self, _: Box<dyn Fn() + Send>) {}

    fn denied(&mut self) -> Result<Denied, Failure> {
        Ok(self.0.locked().denied.clone())
    }

    fn gap(&mut self) -> Option<String> {
        self.0.locked().gap.clone()
    }

    fn touch_all(&mut self) {
        self.0.locked().touched = true;
    }

    fn has_touched(&self) -> bool {
        self.0.locked().touched
    }

    fn follow(&mut self) -> Follow {
        let (held, touched) = (Arc::clone(&self.0), self.0.locked().touched);
        Box::new(move || {
            let gate = held.locked().gate.clone();
            if let Some(gate) = gate {
                held.locked().waiting += 1;
                gate.locked().recv().expect("the test goes on");
            }
            let mut held = held.locked();
            if held.cannot_follow > 0 {
                held.cannot_follow -= 1;
                return Err("no list of connections".into());
            }
            if std::mem::take(&mut held.panics) {
                drop(held);
                std::panic::resume_unwind(Box::new("a bug"));
            }
            held.follows += usize::from(touched);
            Ok(0)
        })
    }

    fn leave_connections(&mut self, but: &BTreeSet<IpAddr>) {
        self.0.locked().touched = !but.is_empty();
    }
}

/// A worker with the router of the default Network.
struct Bench {
    fake: Fake,
    sender: Sender<Message>,
    state: watch::Receiver<PoliciesState>,
    metrics: Arc<Metrics>,
    /// What pods were told.
    told: Receiver<String>,
}

impl Bench {
    fn new() -> Self {
        let (fake, (sender, inbox)) = (Fake::default(), channel());
        let node = NodePlace { namespace: NetNs::current().expect("a namespace"), addresses: Vec::new() };
        let summary = watch::channel(Summary::default()).0;
        let (backends, metrics) = (Arc::new(fake.clone()), Arc::<Metrics>::default());
        let counted = Arc::clone(&metrics);
        let (told_by, told) = channel();
        let tell_pod = Box::new(move |pod: &Pod, what| {
            let _ = told_by.send(format!("{}: {what}", pod.key));
        });
        let watched = Watched(sender.clone());
        let worker =
            Worker::new("a", node, backends, watched, metrics, summary, tell_pod, Box::new(|| {}), false);
        std::thread::spawn(move || worker.run(&inbox));
        let (by, state) = watch::channel(PoliciesState::default());
        let bench = Self { fake, sender, state, metrics: counted, told };
        bench.tell(Told::Start { id: 1, network: "default".into(), place: Place::default(), state: by });
        bench
    }

    fn tell(&self, told: Told) {
        self.sender.send(Message { told, at: Instant::now() }).expect("it runs");
    }

    /// Returns when all that was told before has been carried out.
    fn settled(&self) {
        let (sender, done) = channel();
        self.tell(Told::Ask(Box::new(move |_| sender.send(()).expect("sent"))));
        done.recv().expect("an answer");
    }

    /// Returns when all that was told before has been put in force, and said to whom it concerns: a request
    /// is answered by the commit of what came with it, so a second one is answered after that.
    fn committed(&self, network: &str) {
        for _ in 0..2 {
            let _ = self.admit(network, true);
        }
    }

    fn set(&self, policy: Policy) {
        self.tell(Told::SetPolicy(Box::new(policy), Some(12)));
    }

    fn isolate(&self) {
        let namespaces = NamespaceMatch::Named("shop".into());
        let policy = Policy {
            name: PolicyName { kind: Kind::Network, namespace: "shop".into(), name: "deny".into() },
            tier: Tier::Namespace,
            scope: Scope::Primary,
            subject: Subject { namespaces, pods: Selector::labels([("app", "web")]) },
            ingress: Some(Box::default()),
            egress: None,
        };
        self.set(policy);
    }

    fn admit(&self, network: &str, labels_known: bool) -> Result<(), Objection> {
        self.ask(network, labels_known).blocking_recv().expect("an answer")
    }

    fn ask(&self, network: &str, labels_known: bool) -> oneshot::Receiver<Result<(), Objection>> {
        self.ask_in(network, labels_known, Labels::default())
    }

    fn ask_in(
        &self,
        network: &str,
        labels_known: bool,
        namespace: Labels,
    ) -> oneshot::Receiver<Result<(), Objection>> {
        let addresses = [std::net::IpAddr::from([10, 0, 0, 5])].into();
        let attachment = Attachment { network: network.into(), primary: true, addresses };
        let labels = if labels_known { vec![("app", "web")] } else { Vec::new() };
        let pod = Pod {
            node: "a".into(),
            labels: labels.into_iter().collect(),
            attachments: [attachment].into(),
            ..Pod::new("shop", "web")
        };
        let (reply, answer) = oneshot::channel();
        let (namesakes, namespace) = (Vec::new(), Some(namespace));
        self.tell(Told::Admit(Box::new(Admit { pod, namesakes, labels_known, namespace, reply })));
        answer
    }
}

#[test]
fn nothing_is_changed_before_everything_has_arrived_and_nobody_admitted() {
    let bench = Bench::new();
    bench.isolate();
    assert_eq!(bench.admit("default", true), Err(Objection::NotComplete));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("default", true), Err(Objection::PeersUnknown("default".into())));
    assert_eq!(bench.fake.0.locked().calls, 0, "what an earlier agent left is in force");
    bench.tell(Told::PeersKnown("default".into()));
    assert_eq!(bench.admit("default", false), Err(Objection::LabelsUnknown));
    assert_eq!(bench.admit("default", true), Ok(()));
    assert!(!bench.fake.0.locked().elements.is_empty(), "before the answer");
}

#[test]
fn a_pod_is_not_admitted_while_what_policies_ask_for_cannot_be_put_in_force() {
    let bench = Bench::new();
    bench.isolate();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    bench.fake.0.locked().fails = true;
    let refused = bench.admit("default", true);
    assert!(matches!(&refused, Err(Objection::NotInForce(_, why)) if why.contains("refuses")), "{refused:?}");
    bench.settled();
    let problem = bench.state.borrow().problem.clone();
    assert!(problem.is_some_and(|problem| problem.contains("refuses")));
    bench.fake.0.locked().fails = false;
    assert_eq!(bench.admit("default", true), Ok(()));
    bench.settled();
    let state = bench.state.borrow().clone();
    assert_eq!((state.acting, state.newest.as_deref(), state.problem), (1, Some("12"), None));
    bench.tell(Told::Local(PodKey::new("shop", "web"), Vec::new()));
    let (sender, gone) = channel();
    bench.tell(Told::Compare);
    bench.tell(Told::Ask(Box::new(move |engine| {
        sender.send(engine.cluster().pod(&PodKey::new("shop", "web")).is_none()).expect("sent");
    })));
    assert!(gone.recv().expect("an answer"));
}

#[test]
fn an_interface_without_a_router_is_refused_if_a_policy_selects_it() {
    let bench = Bench::new();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("lan", true), Ok(()), "without a policy");
    bench.isolate();
    assert!(matches!(bench.admit("lan", true), Err(Objection::NoRouter(..))));
}

#[test]
fn a_pod_is_not_admitted_by_what_is_not_in_force_any_more() {
    let bench = Bench::new();
    bench.isolate();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    bench.settled();
    // While the worker is busy, all pods of the node arrive, as they were read before this one was recorded.
    let (go, gate) = channel();
    bench.tell(Told::Ask(Box::new(move |_| gate.recv().expect("told"))));
    let answer = bench.ask("default", true);
    bench.tell(Told::Locals(BTreeMap::new(), Strangers::default()));
    go.send(()).expect("it waits");
    assert_eq!(answer.blocking_recv().expect("an answer"), Err(Objection::Overtaken));
    assert_eq!(bench.admit("default", true), Ok(()));
    assert!(!bench.fake.0.locked().elements.is_empty(), "before the answer");
}

#[test]
fn live_connections_follow_however_often_they_could_not_be_listed() {
    let bench = Bench::new();
    bench.fake.0.locked().cannot_follow = 3;
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    bench.isolate();
    assert_eq!(bench.admit("default", true), Ok(()));
    let limit = std::time::Duration::from_secs(30);
    knit_kernel::testing::eventually("they follow", limit, || bench.fake.0.locked().follows > 0);
    assert_eq!(bench.fake.0.locked().cannot_follow, 0);
}

#[test]
fn nothing_is_changed_before_nodes_have_arrived_that_a_policy_denies() {
    let bench = Bench::new();
    let peers = Some([Peer::Nodes(Selector::everything())].into());
    bench.set(Policy {
        name: PolicyName { kind: Kind::Cluster, namespace: "".into(), name: "no-nodes".into() },
        tier: Tier::Admin(1),
        scope: Scope::Primary,
        subject: Subject {
            namespaces: NamespaceMatch::Selected(Selector::everything()),
            pods: Selector::everything(),
        },
        ingress: None,
        egress: Some([Rule { name: None, action: Action::Deny, peers, ports: None }].into()),
    });
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    let refused = bench.admit("default", true);
    assert!(matches!(&refused, Err(Objection::NotInForce(_, why)) if why.contains("Nodes")), "{refused:?}");
    assert_eq!(bench.fake.0.locked().calls, 0, "what an earlier agent left is in force");
    let address = std::net::IpAddr::from([192, 0, 2, 7]);
    let node =
        Node { name: "b".into(), labels: [("a", "b")].into_iter().collect(), addresses: [address].into() };
    bench.tell(Told::Node("b".into(), Some(Box::new(node))));
    bench.tell(Told::NodesKnown);
    assert_eq!(bench.admit("default", true), Ok(()));
    assert!(bench.fake.0.locked().elements.contains_key(&Key::Peer(address)), "with the first of them");
}

#[test]
fn nothing_is_changed_where_a_record_does_not_say_whose_interface_it_is_of() {
    let bench = Bench::new();
    bench.isolate();
    bench.tell(Told::PeersKnown("default".into()));
    let strangers = Strangers { networks: ["default".into()].into(), anywhere: false };
    bench.tell(Told::Locals(BTreeMap::new(), strangers));
    bench.tell(Told::Complete);
    let refused = bench.admit("default", true);
    assert!(
        matches!(&refused, Err(Objection::NotInForce(_, why)) if why.contains("does not name its pod")),
        "{refused:?}"
    );
    assert_eq!(bench.fake.0.locked().calls, 0, "what is in force about it stays");
    bench.settled();
    let state = bench.state.borrow().clone();
    assert!(state.problem.is_some_and(|problem| problem.contains("delete that pod")));
    assert_eq!(state.newest, None, "no policy is said to be in force");
    bench.tell(Told::Locals(BTreeMap::new(), Strangers::default()));
    assert_eq!(bench.admit("default", true), Ok(()));
}

#[test]
fn a_pod_is_not_admitted_past_a_policy_that_selects_its_namespace_by_a_label_told_elsewhere() {
    let bench = Bench::new();
    bench.set(Policy {
        name: PolicyName { kind: Kind::Cluster, namespace: "".into(), name: "closed".into() },
        tier: Tier::Admin(1),
        scope: Scope::Primary,
        subject: Subject {
            namespaces: NamespaceMatch::Selected(Selector::labels([("closed", "yes")])),
            pods: Selector::everything(),
        },
        ingress: Some([Rule { name: None, action: Action::Deny, peers: None, ports: None }].into()),
        egress: None,
    });
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    // The task that tells of namespaces has not come to it yet.
    let answer = bench.ask_in("default", true, [("closed", "yes")].into_iter().collect());
    assert_eq!(answer.blocking_recv().expect("an answer"), Ok(()));
    assert!(!bench.fake.0.locked().elements.is_empty(), "before the answer");
}

#[test]
fn connections_of_an_addresss_last_pod_do_not_go_on_with_the_next_where_live_ones_are_kept() {
    let bench = Bench::new();
    // The pod starts before the router is brought whole: what comes in between would find nothing to change.
    let (go, gate) = channel();
    bench.tell(Told::Ask(Box::new(move |_| gate.recv().expect("told"))));
    bench.tell(Told::Settings("default".into(), Settings { cut_connections: false, ..Settings::default() }));
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    let first = bench.ask("default", true);
    go.send(()).expect("it waits");
    assert_eq!(first.blocking_recv().expect("an answer"), Ok(()));
    let limit = std::time::Duration::from_secs(30);
    let follow = |more_than: usize| {
        let followed = || bench.fake.0.locked().follows > more_than;
        knit_kernel::testing::eventually("they follow", limit, followed);
        knit_kernel::testing::eventually("and then none does", limit, || !bench.fake.0.locked().touched);
    };
    follow(0);
    let follows = bench.fake.0.locked().follows;
    bench.isolate();
    bench.committed("default");
    assert!(!bench.fake.0.locked().touched, "those of a pod that runs are kept");
    bench.tell(Told::Local(PodKey::new("shop", "web"), Vec::new()));
    let is_gone = || bench.fake.0.locked().elements.is_empty();
    knit_kernel::testing::eventually("nothing is said about it", limit, is_gone);
    assert_eq!(bench.admit("default", true), Ok(()));
    follow(follows);
}

#[test]
fn a_network_switched_from_keeping_live_connections_to_cutting_them_kept_those_that_were_there() {
    let bench = Bench::new();
    let settings = |cut_connections| Settings { cut_connections, ..Settings::default() };
    bench.tell(Told::Settings("default".into(), settings(false)));
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("default", true), Ok(()));
    bench.isolate();
    let limit = std::time::Duration::from_secs(30);
    knit_kernel::testing::eventually("those of the address's last pod are cut", limit, || {
        let held = bench.fake.0.locked();
        held.follows > 0 && !held.touched && !held.elements.is_empty()
    });
    let follows = bench.fake.0.locked().follows;
    // Not one rule changes for it.
    bench.tell(Told::Settings("default".into(), settings(true)));
    knit_kernel::testing::eventually("all are looked at", limit, || bench.fake.0.locked().follows > follows);
}

#[test]
fn a_pod_was_admitted_where_the_rules_do_not_see_all_packets() {
    let bench = Bench::new();
    bench.fake.0.locked().gap = Some("load br_netfilter".to_owned());
    bench.isolate();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    let refused = bench.admit("default", true);
    assert!(
        matches!(&refused, Err(Objection::NotInForce(_, why)) if why.contains("br_netfilter")),
        "{refused:?}"
    );
    bench.settled();
    assert!(!bench.fake.0.locked().elements.is_empty(), "what can be enforced is");
    let state = bench.state.borrow().clone();
    assert!(state.problem.is_some_and(|problem| problem.contains("br_netfilter")));
    assert_eq!(state.newest, None, "no policy is said to be in force");
    bench.fake.0.locked().gap = None;
    assert_eq!(bench.admit("default", true), Ok(()), "the module was loaded");
    bench.settled();
    assert_eq!(bench.state.borrow().problem, None);
}

#[test]
fn a_pod_waited_until_live_connections_had_followed() {
    let bench = Bench::new();
    let (go, gate) = channel();
    bench.fake.0.locked().gate = Some(Arc::new(Mutex::new(gate)));
    let (by, _state) = watch::channel(PoliciesState::default());
    bench.tell(Told::Start { id: 2, network: "blue".into(), place: Place::default(), state: by });
    for network in ["default", "blue"] {
        bench.tell(Told::PeersKnown(network.into()));
    }
    bench.tell(Told::Complete);
    let limit = std::time::Duration::from_secs(30);
    knit_kernel::testing::eventually("one follows", limit, || bench.fake.0.locked().waiting == 1);
    bench.isolate();
    assert_eq!(bench.admit("default", true), Ok(()));
    let seen = || {
        let held = bench.fake.0.locked();
        (held.follows, held.waiting, held.touched, !held.elements.is_empty())
    };
    assert!(seen().3, "what policies ask for is in force");
    assert_eq!((seen().0, seen().1), (0, 1), "and one router has not even followed yet");
    // Whatever follows from now on, which is the first one again, since that has changed meanwhile.
    (0..100).for_each(|_| go.send(()).expect("it takes it, or will"));
    knit_kernel::testing::eventually("all follow", limit, || {
        let (follows, _, touched, _) = seen();
        follows >= 2 && !touched
    });
}

#[test]
fn live_connections_did_not_follow_any_more_after_a_bug_in_that() {
    let bench = Bench::new();
    bench.fake.0.locked().panics = true;
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    bench.isolate();
    assert_eq!(bench.admit("default", true), Ok(()));
    let limit = std::time::Duration::from_secs(30);
    knit_kernel::testing::eventually("they follow", limit, || bench.fake.0.locked().follows > 0);
    assert!(!bench.fake.0.locked().panics);
}

#[test]
fn a_refused_change_was_counted_as_if_it_had_had_its_effect() {
    let bench = Bench::new();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("default", true), Ok(()));
    let observed = |count: usize| {
        bench.settled();
        let text = bench.metrics.text();
        assert!(text.contains(&format!("knit_policy_commit_seconds_count {count}\n")), "{text}");
    };
    observed(0);
    bench.fake.0.locked().fails = true;
    bench.isolate();
    assert!(bench.admit("default", true).is_err());
    observed(0);
    bench.fake.0.locked().fails = false;
    assert_eq!(bench.admit("default", true), Ok(()));
    observed(1);
}

#[test]
fn a_pod_on_an_underlay_network_heard_nothing_of_a_policy_that_came_after_it() {
    let bench = Bench::new();
    bench.tell(Told::Settings("lan".into(), Settings { has_router: false, ..Settings::default() }));
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("lan", true), Ok(()), "without a policy");
    bench.isolate();
    bench.committed("lan");
    let told: Vec<String> = bench.told.try_iter().collect();
    assert!(matches!(&told[..], [what] if what.contains("shop/deny selects this pod")), "{told:?}");
    bench.tell(Told::Namespace("shop".into(), Some(Labels::default())));
    bench.committed("lan");
    assert_eq!(bench.told.try_iter().count(), 0, "once");
}

#[test]
fn what_the_kernel_counts_of_denied_packets_was_shown_nowhere() {
    let bench = Bench::new();
    let address = |last| IpAddr::from([10, 0, 0, last]);
    let count = |denied: &[(u8, u64)]| {
        let each = denied.iter().map(|(last, packets)| ((Direction::Ingress, address(*last)), *packets));
        bench.fake.0.locked().denied = each.collect();
        bench.tell(Told::Compare);
        bench.settled();
    };
    // An earlier agent has counted these already.
    bench.fake.0.locked().denied = [((Direction::Ingress, address(5)), 100)].into();
    bench.tell(Told::PeersKnown("default".into()));
    bench.tell(Told::Complete);
    assert_eq!(bench.admit("default", true), Ok(()));
    for (denied, total) in
        [(&[(5, 103)][..], 3), (&[(5, 103), (6, 4)], 7), (&[(5, 2), (6, 4)], 9), (&[], 9), (&[(6, 1)], 10)]
    {
        count(denied);
        let text = bench.metrics.text();
        let line = "knit_policy_denied_packets_total{network=\"default\",direction=\"ingress\"}";
        assert!(text.contains(&format!("{line} {total}\n")), "{total}: {text}");
    }
}
