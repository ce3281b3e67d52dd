//! An agent that is killed at any step of a change: what is in force is what was before or what was asked
//! for, and the next agent, which may be killed as well, arrives at what was asked for.

mod support;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use knit_kernel::conntrack::{Conntrack, Filter};
use knit_kernel::testing::in_namespaces;
use knit_nft::{Error, Fake, Family as TableFamily, Generation, Nftables, TableId, TableState, Transaction};
use knit_policy::model::{DEFAULT_NETWORK, Namespace, PodKey};
use knit_policy::sets::{Engine, Key, Value};
use knit_policy_nft::live::{Connection, Touched};
use knit_policy_nft::{CUT, PolicyTable, Router, TABLE};
use knit_testbed::{NEVER, SOON, ip};
use support::cluster::{HERE, Policies, cluster_policy, pod, policy, read};
use support::probe::{connect, echoes};
use support::world::World;

/// A kernel, and what an agent that lives for so many more steps does to it. The end of each call is a step,
/// and so is its beginning.
#[derive(Clone, Default)]
struct Mortal {
    kernel: Arc<Mutex<Fake>>,
    left: Arc<Mutex<Option<usize>>>,
}

impl Mortal {
    /// Whoever uses this from now on has so many steps to live; no end with none.
    fn live(&self, steps: Option<usize>) -> Self {
        Self { kernel: Arc::clone(&self.kernel), left: Arc::new(Mutex::new(steps)) }
    }

    /// The same, for who uses it already.
    fn ends_in(&self, steps: usize) {
        *self.left.lock().unwrap() = Some(steps);
    }

    fn is_dead(&self) -> bool {
        *self.left.lock().unwrap() == Some(0)
    }

    /// What is in force, by family.
    fn text(&self) -> [String; 2] {
        [TableFamily::Ip, TableFamily::Ip6].map(|family| {
            let state = self.kernel.lock().unwrap().table(&TableId::new(family, TABLE)).unwrap();
            state.map(|state| state.without_handles().to_string()).unwrap_or_default()
        })
    }

    fn step(&self) -> knit_nft::Result<()> {
        match &mut *self.left.lock().unwrap() {
            None => return Ok(()),
            Some(0) => {}
            Some(left) => *left -= 1,
        }
        // Nobody is left who could read it.
        if self.is_dead() { Err(Error::TooBig { bytes: 1, limit: 0 }) } else { Ok(()) }
    }

    fn call<T>(&self, work: impl FnOnce(&mut Fake) -> knit_nft::Result<T>) -> knit_nft::Result<T> {
        self.step()?;
        let done = work(&mut self.kernel.lock().unwrap());
        self.step()?;
        done
    }
}

impl Nftables for Mortal {
    fn commit(&mut self, transaction: &Transaction) -> knit_nft::Result<()> {
        self.call(|kernel| kernel.commit(transaction))
    }

    fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> knit_nft::Result<()> {
        self.call(|kernel| kernel.commit_if(generation, transaction))
    }

    fn commit_chunked(&mut self, transaction: &Transaction) -> knit_nft::Result<usize> {
        self.call(|kernel| kernel.commit_chunked(transaction))
    }

    fn generation(&mut self) -> knit_nft::Result<Generation> {
        self.call(Nftables::generation)
    }

    fn tables(&mut self) -> knit_nft::Result<Vec<TableId>> {
        self.call(Nftables::tables)
    }

    fn snapshot(&mut self, table: &TableId) -> knit_nft::Result<(Generation, Option<TableState>)> {
        self.call(|kernel| kernel.snapshot(table))
    }
}

/// What happens to a cluster, one after the other.
type Step = (&'static str, fn(&mut Engine));

const STEPS: [Step; 9] = [
    ("the first policy", |engine| {
        engine.set_policy(read(&policy(
            "web",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             b}}}], ports: [{port: 80}]}]}",
        )));
    }),
    ("it allows something else", |engine| {
        engine.set_policy(read(&policy(
            "web",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             c}}}, {ipBlock: {cidr: 10.9.0.0/16, except: [10.9.1.0/24]}}], ports: [{port: 81}, {port: 1000, \
             endPort: 2000}]}]}",
        )));
    }),
    ("another one", |engine| {
        engine.set_policy(read(&policy(
            "out",
            "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {pod: \
             b}}}]}]}",
        )));
    }),
    ("one of the cluster", |engine| {
        engine.set_policy(read(&cluster_policy(
            "admin",
            "{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Deny, from: \
             [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 23}}}]}]}",
        )));
    }),
    ("a pod of another node comes", |engine| engine.set_pod(named("x/c2", "there", "c", 4))),
    ("a pod's address is another's", |engine| {
        engine.delete_pod(&PodKey::new("x", "c2"), None);
        engine.set_pod(named("x/b2", "there", "b", 4));
    }),
    ("a pod of this node comes", |engine| engine.set_pod(named("x/a2", HERE, "a", 5))),
    ("two policies go", |engine| {
        engine.delete_policy(&read(&policy("web", "{podSelector: {}}")).name);
        engine.delete_policy(&read(&policy("out", "{podSelector: {}}")).name);
    }),
    ("the last one goes", |engine| {
        let name =
            read(&cluster_policy("admin", "{tier: Admin, priority: 1, subject: {namespaces: {}}}")).name;
        engine.delete_policy(&name);
    }),
];

fn named(who: &str, node: &str, label: &str, number: u8) -> knit_policy::model::Pod {
    let addresses = [ip(&format!("10.0.0.{number}")), ip(&format!("fd00::{number}"))];
    let mut pod = pod(who, node, &addresses);
    pod.labels = [("pod", label)].into_iter().collect();
    pod
}

/// The engine of an agent that was told of so many steps.
fn engine(steps: usize) -> Engine {
    let mut engine = Engine::new(HERE);
    engine.set_namespace(Namespace::new("x", [("ns", "x")].into_iter().collect()));
    engine.set_pod(named("x/a", HERE, "a", 1));
    engine.set_pod(named("x/b", "there", "b", 2));
    engine.set_pod(named("x/c", "there", "c", 3));
    STEPS[..steps].iter().for_each(|(_, step)| step(&mut engine));
    engine.settle();
    engine
}

/// The engine of an agent that starts: it is told what there is, in another order, so that it numbers classes
/// in another way.
fn engine_of_the_next(steps: usize) -> Engine {
    let told = engine(steps);
    let mut engine = Engine::new(HERE);
    let mut policies: Vec<_> = told.cluster().policies().map(|policy| (**policy).clone()).collect();
    policies.reverse();
    policies.into_iter().for_each(|policy| {
        engine.set_policy(policy);
        engine.settle();
    });
    for name in ["a2", "b2", "c2", "c", "b", "a"] {
        if let Some(pod) = told.cluster().pod(&PodKey::new("x", name)) {
            engine.set_pod((**pod).clone());
            engine.settle();
        }
    }
    engine.set_namespace(Namespace::new("x", [("ns", "x")].into_iter().collect()));
    engine.settle();
    engine
}

/// A kernel in which an agent has put so many steps in force, that agent's table, and what it is told next.
fn agent_at(step: usize) -> (Mortal, PolicyTable, Engine) {
    let (kernel, engine) = (Mortal::default(), engine(step));
    let mut table = PolicyTable::over(kernel.live(None), Router::Node);
    table.sync(&engine.elements(DEFAULT_NETWORK)).expect("synced");
    (kernel, table, engine)
}

/// Puts a step in force. Says whether that was done.
fn change(engine: &mut Engine, table: &mut PolicyTable, step: usize) -> bool {
    (STEPS[step].1)(engine);
    engine.settle().iter().all(|(_, changes)| table.apply(changes).is_ok())
}

#[test]
fn killed_at_every_step_of_a_change_policies_are_those_before_or_those_asked_for() {
    let (mut kills, mut again) = (0, 0);
    for (step, (what, _)) in STEPS.iter().enumerate() {
        let (kernel, mut table, mut engine) = agent_at(step);
        let before = engine.elements(DEFAULT_NETWORK);
        assert!([0, 1].into_iter().all(|family| holds(&kernel, family, &before)), "{what}");
        assert!(change(&mut engine, &mut table, step));
        let wanted = engine_of_the_next(step + 1).elements(DEFAULT_NETWORK);
        assert!([0, 1].into_iter().all(|family| holds(&kernel, family, &wanted)), "{what}");
        assert!(!holds(&kernel, 0, &before), "{what}: it changes something, or this shows nothing");
        // How long each of two agents lives: one that changes something, and the next, which starts.
        for lives in 1.. {
            let mut ended = false;
            for next_lives in 1.. {
                let (kernel, _, mut engine) = agent_at(step);
                let first = kernel.live(None);
                let mut table = PolicyTable::over(first.clone(), Router::Node);
                table.sync(&engine.elements(DEFAULT_NETWORK)).expect("it starts");
                first.ends_in(lives);
                ended = change(&mut engine, &mut table, step) && !first.is_dead();
                drop(table);
                let is = |state| [0, 1].into_iter().all(|family| holds(&kernel, family, state));
                assert!(is(&before) || is(&wanted), "{what}, killed at {lives}");
                let second = kernel.live(Some(next_lives));
                let mut table = PolicyTable::over(second.clone(), Router::Node);
                let started = table.sync(&wanted).is_ok() && !second.is_dead();
                drop(table);
                // By now a family at a time, and classes may have other numbers.
                if !started {
                    for family in [0, 1] {
                        let known = holds(&kernel, family, &before) || holds(&kernel, family, &wanted);
                        assert!(known, "{what}, killed at {lives}, and the next one at {next_lives}");
                    }
                    again += 1;
                }
                let mut table = PolicyTable::over(kernel.live(None), Router::Node);
                let applied = table.sync(&wanted).expect("synced");
                // Whatever is alive may be of before: the agent that knew has not said so.
                let touched = if wanted.is_empty() { applied.touched.clone() } else { Touched::All };
                assert_eq!(applied.touched, touched, "{what}");
                let mut table = PolicyTable::over(kernel.live(None), Router::Node);
                assert_eq!(table.sync(&wanted).expect("synced").changes, 0, "{what}: nothing is left to do");
                if wanted.is_empty() {
                    assert_eq!(kernel.text(), ["", ""], "{what}: nothing is left behind");
                }
                if started {
                    break;
                }
            }
            if ended {
                break;
            }
            kills += 1;
        }
    }
    assert!(kills >= STEPS.len() && again > kills, "{kills} kills, {again} of the next agent");
}

/// Whether a family's table is what is wanted, whatever the numbers of its classes.
fn holds(kernel: &Mortal, family: usize, wanted: &BTreeMap<Key, Value>) -> bool {
    let kernel =
        Mortal { kernel: Arc::new(Mutex::new(kernel.kernel.lock().unwrap().clone())), ..Mortal::default() };
    let before = kernel.text()[family].clone();
    PolicyTable::over(kernel.clone(), Router::Node).sync(wanted).expect("synced");
    kernel.text()[family] == before
}

/// Connections are cut one after the other: an agent may end between two of them.
#[test]
fn killed_between_two_connections_that_are_cut_the_next_agent_cuts_the_rest() {
    in_namespaces(|| {
        let world = World::routed(&[
            ("a", "10.0.0.10", "fd00::10"),
            ("b", "10.0.0.11", "fd00::11"),
            ("c", "10.0.0.12", "fd00::12"),
        ]);
        world.serve();
        let told = |policies: &mut Policies| {
            policies.pod("x/a", HERE, &world.host("a").addresses);
            policies.pod("x/b", "there", &world.host("b").addresses);
            policies.pod("y/c", "there", &world.host("c").addresses);
        };
        let open = "{podSelector: {matchLabels: {pod: a}}, ingress: [{}]}";
        let closed = "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: \
                      {pod: b}}}]}]}";
        let mut policies = Policies::new(&world.router, Router::Node);
        told(&mut policies);
        policies.apply(&policy("web", open));
        let server: [IpAddr; 2] = world.host("a").addresses;
        let sockets = |from: &str, count: usize| -> Vec<_> {
            let space = &world.host(from).space;
            (0..count).map(|n| connect(space, SocketAddr::new(server[n % 2], 80))).collect()
        };
        let (mut denied, mut allowed) = (sockets("c", 6), sockets("b", 2));
        assert!(denied.iter_mut().chain(&mut allowed).all(|stream| echoes(stream, SOON)));
        policies.apply(&policy("web", closed));
        // What it had done when it ended.
        let mut conntrack = Conntrack::open_in(&world.router).expect("connection tracking");
        let flows = conntrack.list(&Filter::all()).expect("listed");
        let from_c = |flow: &&knit_kernel::conntrack::Flow| {
            world.host("c").addresses.contains(&Connection::of(flow).source)
                && flow.original.l4.protocol() == 6
        };
        let some: Vec<_> = flows.iter().filter(from_c).take(2).collect();
        assert_eq!(conntrack.set_mark(some, CUT, CUT).expect("marked"), 2);
        drop(policies);
        let mut next = Policies {
            engine: Engine::new(HERE),
            table: PolicyTable::open_in(&world.router, Router::Node).expect("a table"),
            touched: Touched::default(),
        };
        for who in ["x", "y"] {
            next.engine.set_namespace(Namespace::new(who, [("ns", who)].into_iter().collect()));
        }
        next.engine.set_pod(pod("y/c", "there", &world.host("c").addresses));
        next.engine.set_pod(pod("x/b", "there", &world.host("b").addresses));
        next.engine.set_pod(pod("x/a", HERE, &world.host("a").addresses));
        next.engine.set_policy(read(&policy("web", closed)));
        next.engine.settle();
        let applied = next.table.sync(&next.engine.elements(DEFAULT_NETWORK)).expect("synced");
        assert_eq!((applied.changes, &applied.touched), (0, &Touched::All));
        let followed = next.table.follow(&applied.touched).expect("followed");
        assert_eq!((followed.cut, followed.resumed), (4, 0));
        assert!(allowed.iter_mut().all(|stream| echoes(stream, SOON)), "allowed as before");
        assert!(!denied.iter_mut().any(|stream| echoes(stream, NEVER / 4)), "not one of them goes on");
    });
}
