//! Over nftables in memory: what is written for a change, and what is left after a refusal.

mod support;

use std::sync::{Arc, Mutex};

use knit_nft::{Error, Fake, Family as TableFamily, Generation, Nftables, TableId, TableState, Transaction};
use knit_policy::model::{DEFAULT_NETWORK, Namespace};
use knit_policy::sets::Engine;
use knit_policy_nft::live::Touched;
use knit_policy_nft::{PolicyTable, Router, TABLE};
use knit_testbed::ip;
use support::cluster::{HERE, pod, policy, read};

/// A fake that others can look into, and that refuses when it is told to.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<(Fake, bool)>>);

impl Shared {
    fn text(&self) -> String {
        let mut inner = self.0.lock().unwrap();
        let mut text = String::new();
        for family in [TableFamily::Ip, TableFamily::Ip6] {
            let state = inner.0.table(&TableId::new(family, TABLE)).unwrap();
            text.extend(state.map(|state| state.without_handles().to_string()));
        }
        text
    }

    fn refuse(&self, refuse: bool) {
        self.0.lock().unwrap().1 = refuse;
    }

    fn commits(&self) -> usize {
        self.0.lock().unwrap().0.committed().len()
    }

    fn carry_out<T>(&self, work: impl FnOnce(&mut Fake) -> knit_nft::Result<T>) -> knit_nft::Result<T> {
        let mut inner = self.0.lock().unwrap();
        if inner.1 { Err(Error::TooBig { bytes: 1, limit: 0 }) } else { work(&mut inner.0) }
    }
}

impl Nftables for Shared {
    fn commit(&mut self, transaction: &Transaction) -> knit_nft::Result<()> {
        self.carry_out(|fake| fake.commit(transaction))
    }

    fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> knit_nft::Result<()> {
        self.carry_out(|fake| fake.commit_if(generation, transaction))
    }

    fn commit_chunked(&mut self, transaction: &Transaction) -> knit_nft::Result<usize> {
        self.carry_out(|fake| fake.commit_chunked(transaction))
    }

    fn generation(&mut self) -> knit_nft::Result<Generation> {
        self.0.lock().unwrap().0.generation()
    }

    fn tables(&mut self) -> knit_nft::Result<Vec<TableId>> {
        self.0.lock().unwrap().0.tables()
    }

    fn snapshot(&mut self, table: &TableId) -> knit_nft::Result<(Generation, Option<TableState>)> {
        self.0.lock().unwrap().0.snapshot(table)
    }
}

const WEB: &str = "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: \
                   {pod: b}}}, {ipBlock: {cidr: 10.9.0.0/16, except: [10.9.1.0/24]}}], ports: [{port: \
                   80}, {port: 1000, endPort: 2000}]}]}";

fn engine() -> Engine {
    let mut engine = Engine::new(HERE);
    engine.set_namespace(Namespace::new("x", Default::default()));
    engine.set_pod(pod("x/a", HERE, &[ip("10.0.0.1"), ip("fd00::1")]));
    engine.set_pod(pod("x/b", "there", &[ip("10.0.0.2"), ip("fd00::2")]));
    engine.set_policy(read(&policy("web", WEB)));
    engine
}

fn settle(engine: &mut Engine, table: &mut PolicyTable) -> Result<(), knit_policy_nft::Error> {
    engine.settle().iter().try_for_each(|(_, changes)| table.apply(changes).map(|_| ()))
}

#[test]
fn changes_and_a_fresh_start_come_to_the_same() {
    let shared = Shared::default();
    let mut table = PolicyTable::over(shared.clone(), Router::Node);
    let mut engine = engine();
    settle(&mut engine, &mut table).unwrap();
    let first = shared.commits();
    // A pod more elsewhere is one element of each family.
    engine.set_pod({
        let mut twin = pod("x/b2", "there", &[ip("10.0.0.3"), ip("fd00::3")]);
        twin.labels = [("pod", "b")].into_iter().collect();
        twin
    });
    let changes = engine.settle();
    assert_eq!(changes[0].1.len(), 2, "{changes:?}");
    let applied = table.apply(&changes[0].1).unwrap();
    assert_eq!(shared.commits(), first + 1, "one transaction for both families");
    assert_eq!(applied.touched, Touched::Cut, "it can only allow more");
    let elements = engine.elements(DEFAULT_NETWORK);
    let fresh = Shared::default();
    PolicyTable::over(fresh.clone(), Router::Node).sync(&elements).unwrap();
    assert_eq!(shared.text(), fresh.text());
    // And back to nothing.
    engine.delete_policy(&read(&policy("web", WEB)).name);
    settle(&mut engine, &mut table).unwrap();
    assert_eq!(shared.text(), "");
}

/// Live connections are looked at where one of them may be denied now, and nowhere else.
#[test]
fn only_what_may_deny_something_touches_live_connections() {
    let mut table = PolicyTable::over(Shared::default(), Router::Node);
    let mut engine = engine();
    let mut told = |engine: &mut Engine| {
        let changes = engine.settle();
        changes
            .iter()
            .map(|(_, changes)| table.apply(changes).unwrap().touched)
            .fold(Touched::Nothing, Touched::and)
    };
    told(&mut engine);
    let addresses = |some: &[&str]| Touched::Addresses(some.iter().map(|a| ip(a)).collect());
    let labelled = |label: &str| {
        let mut twin = pod("x/twin", "there", &[ip("10.0.0.3")]);
        twin.labels = [("pod", label)].into_iter().collect();
        twin
    };
    engine.set_pod(labelled("b"));
    assert_eq!(told(&mut engine), Touched::Cut, "one more may");
    engine.set_pod(labelled("stranger"));
    assert_eq!(told(&mut engine), addresses(&["10.0.0.3"]), "it may no longer");
    engine.set_pod(pod("x/other", "there", &[ip("10.0.0.9")]));
    assert_eq!(told(&mut engine), Touched::Nothing, "nobody asks for it");
    let open = "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}], ports: [{port: \
                443}]}]}";
    engine.set_policy(read(&policy("open", open)));
    assert_eq!(told(&mut engine), Touched::Cut, "more may");
    engine.delete_policy(&read(&policy("open", open)).name);
    let touched = told(&mut engine);
    let Touched::Addresses(some) = &touched else { panic!("{touched:?}") };
    assert!(some.contains(&ip("10.0.0.9")), "{some:?}");
    engine.delete_policy(&read(&policy("web", WEB)).name);
    // Its blocks are gone, too.
    assert_eq!(told(&mut engine), Touched::All);
}

#[test]
fn a_refusal_leaves_what_was_in_force_and_the_next_chance_brings_everything() {
    let shared = Shared::default();
    let mut table = PolicyTable::over(shared.clone(), Router::Node);
    let mut engine = engine();
    settle(&mut engine, &mut table).unwrap();
    let before = shared.text();
    shared.refuse(true);
    engine.set_pod(pod("x/c", "there", &[ip("10.0.0.4")]));
    engine.set_policy(read(&policy("none", "{podSelector: {}, policyTypes: [Egress]}")));
    assert!(settle(&mut engine, &mut table).is_err());
    assert!(table.restore().is_err());
    assert_eq!(shared.text(), before);
    assert!(!table.is_intact());
    shared.refuse(false);
    // A later change brings what was missed, too.
    engine.set_pod(pod("x/d", HERE, &[ip("10.0.0.5")]));
    settle(&mut engine, &mut table).unwrap();
    let fresh = Shared::default();
    PolicyTable::over(fresh.clone(), Router::Node).sync(&engine.elements(DEFAULT_NETWORK)).unwrap();
    assert_eq!(shared.text(), fresh.text());
    assert_eq!(table.take_repairs(), 0, "nobody else did anything");
}

#[test]
fn an_element_in_the_way_fails_the_whole_batch_and_is_put_right() {
    let shared = Shared::default();
    let mut table = PolicyTable::over(shared.clone(), Router::Node);
    let mut engine = engine();
    settle(&mut engine, &mut table).unwrap();
    // Somebody deletes the table behind our back.
    let mut tx = Transaction::new();
    tx.delete_table(&TableId::new(TableFamily::Ip, TABLE));
    shared.clone().commit(&tx).unwrap();
    assert!(!table.is_intact());
    engine.set_pod(pod("x/d", HERE, &[ip("10.0.0.5")]));
    engine.set_policy(read(&policy("none", "{podSelector: {}, policyTypes: [Egress]}")));
    settle(&mut engine, &mut table).unwrap();
    assert!(table.take_repairs() > 0);
    assert!(table.is_intact());
    let fresh = Shared::default();
    PolicyTable::over(fresh.clone(), Router::Node).sync(&engine.elements(DEFAULT_NETWORK)).unwrap();
    assert_eq!(shared.text(), fresh.text());
}

#[test]
fn another_run_numbers_classes_anew_and_nothing_is_written() {
    let shared = Shared::default();
    let mut table = PolicyTable::over(shared.clone(), Router::Node);
    let peers = ["p", "q", "r"].map(|name| {
        pod(
            &format!("x/{name}"),
            "there",
            &[ip(match name {
                "p" => "10.0.1.1",
                "q" => "10.0.1.2",
                _ => "10.0.1.3",
            })],
        )
    });
    let rules = ["p", "q", "r"].map(|name| {
        let port = 80 + u16::from(name.as_bytes()[0]);
        policy(
            name,
            &format!(
                "{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{{podSelector: \
                 {{matchLabels: {{pod: {name}}}}}}}], ports: [{{port: {port}}}]}}]}}"
            ),
        )
    });
    let mut one = engine();
    for (pod, rule) in peers.iter().zip(&rules) {
        one.set_pod(pod.clone());
        one.set_policy(read(rule));
        settle(&mut one, &mut table).unwrap();
    }
    let mut other = engine();
    for (pod, rule) in peers.iter().zip(&rules).rev() {
        other.set_pod(pod.clone());
        other.set_policy(read(rule));
        other.settle();
    }
    let (before, elements) = (shared.text(), other.elements(DEFAULT_NETWORK));
    assert_ne!(one.elements(DEFAULT_NETWORK), elements, "the numbers differ, or this shows nothing");
    let mut again = PolicyTable::over(shared.clone(), Router::Node);
    assert_eq!(again.sync(&elements).unwrap().changes, 0);
    assert_eq!(shared.text(), before);
    // And what that run says from now on is understood.
    other.set_pod(pod("x/s", "there", &[ip("10.0.1.4")]));
    other.set_policy(read(&policy("s", WEB)));
    settle(&mut other, &mut again).unwrap();
    assert_eq!(
        PolicyTable::over(shared, Router::Node).sync(&other.elements(DEFAULT_NETWORK)).unwrap().changes,
        0
    );
}

#[test]
fn an_agent_that_ended_between_a_change_and_what_follows_from_it_left_connections_alive() {
    let shared = Shared::default();
    let elements = {
        let mut engine = engine();
        settle(&mut engine, &mut PolicyTable::over(shared.clone(), Router::Node)).unwrap();
        engine.elements(DEFAULT_NETWORK)
    };
    // The next agent finds all as it should be, and does not know which of it is new.
    let mut table = PolicyTable::over(shared.clone(), Router::Node);
    let applied = table.sync(&elements).unwrap();
    assert_eq!((applied.changes, applied.touched), (0, Touched::All));
    let again = table.sync(&elements).unwrap();
    assert_eq!((again.changes, again.touched), (0, Touched::Nothing), "once is enough");
}

#[test]
fn where_no_policy_acts_a_start_looks_at_no_connection() {
    let mut table = PolicyTable::over(Shared::default(), Router::Node);
    assert_eq!(table.sync(&Default::default()).unwrap().touched, Touched::Nothing);
}
