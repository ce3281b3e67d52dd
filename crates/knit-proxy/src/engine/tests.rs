//! Engine and pacing, with a clock of our own. Rules 6, 57, 59.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::*;
use crate::backend::{Failure, Outcome, Retry};
use crate::model::{EndpointGroup, NodeInfo, Protocol, Service};
use crate::source::{self, Event};
use crate::view::{Changes, ListKind, NodeView, PortKey};

struct FakeClock(Cell<Instant>);

impl FakeClock {
    fn new() -> Self {
        Self(Cell::new(Instant::now()))
    }

    fn forward(&self, ms: u64) {
        self.0.set(self.0.get() + Duration::from_millis(ms));
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Instant {
        self.0.get()
    }
}

/// Notes what it is asked, and answers as it is told.
#[derive(Default)]
struct Fake {
    calls: Vec<String>,
    answers: Vec<Outcome>,
}

impl Fake {
    fn answer(&mut self, call: String) -> Outcome {
        self.calls.push(call);
        if self.answers.is_empty() { Outcome::Done } else { self.answers.remove(0) }
    }
}

impl Backend for Fake {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        self.answer(format!("sync {}", state.ports.len()))
    }

    fn apply(&mut self, changes: &Changes, _: &NodeView) -> Outcome {
        let names: Vec<String> = (changes.ports.iter())
            .map(|c| format!("{}{}", if c.new.is_some() { "+" } else { "-" }, c.key.service.name()))
            .collect();
        let retry = changes.retry.map_or_else(String::new, |family| format!("again {family} "));
        self.answer(format!("apply {retry}{}", names.join(" ")))
    }
}

fn service(n: u8) -> Event {
    let service = Service::new(&*format!("ns/s{n}"));
    Event::SetService(Box::new(service.cluster_ip([10, 0, 0, n].into()).port(Protocol::Tcp, 80)))
}

fn key(n: u8) -> PortKey {
    let family = crate::model::Family::V4;
    PortKey { service: (&*format!("ns/s{n}")).into(), port: "".into(), protocol: Protocol::Tcp, family }
}

fn engine() -> Engine<Fake> {
    Engine::new(EngineConfig::default(), NodeInfo::new("here"), Fake::default())
}

/// An engine past its first sync, a long time ago.
fn started(clock: &FakeClock) -> Engine<Fake> {
    let mut engine = engine();
    engine.handle(Event::ListDone(ListKind::Services), clock.now());
    engine.handle(Event::ListDone(ListKind::Groups), clock.now());
    engine.poll(clock);
    engine.backend().calls.clear();
    clock.forward(60_000);
    engine
}

#[test]
fn rule_6_nothing_is_programmed_before_all_lists_are_there() {
    let clock = FakeClock::new();
    let mut engine = engine();
    engine.handle(service(1), clock.now());
    engine.handle(Event::ListDone(ListKind::Services), clock.now());
    assert_eq!(engine.poll(&clock), None);
    assert!(engine.backend().calls.is_empty());
    engine.handle(Event::ListDone(ListKind::Groups), clock.now());
    assert_eq!(engine.poll(&clock), Some(clock.now() + Duration::from_secs(3600)));
    assert_eq!(engine.backend().calls, ["sync 1"]);
}

#[test]
fn rule_6_also_for_node_and_ranges_where_asked() {
    let clock = FakeClock::new();
    let wait_for = WaitFor { services: true, groups: true, service_ranges: true, node: true };
    let config = EngineConfig { wait_for, ..EngineConfig::default() };
    let mut engine = Engine::new(config, NodeInfo::new("here"), Fake::default());
    for event in [
        Event::ListDone(ListKind::Services),
        Event::ListDone(ListKind::Groups),
        Event::ListDone(ListKind::ServiceRanges),
        Event::SetNode(Box::new(NodeInfo::new("here"))),
    ] {
        assert!(engine.backend().calls.is_empty());
        engine.handle(event, clock.now());
        engine.poll(&clock);
    }
    assert_eq!(engine.backend().calls, ["sync 0"]);
}

#[test]
fn rule_59_the_first_change_goes_at_once_and_a_burst_together() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    engine.handle(service(1), clock.now());
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1"]);
    let first = clock.now();
    for n in 2..5 {
        clock.forward(10);
        engine.handle(service(n), clock.now());
        assert_eq!(engine.poll(&clock), Some(first + Duration::from_secs(1)));
    }
    clock.forward(970);
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1", "apply +s2 +s3 +s4"]);
}

#[test]
fn what_came_and_went_is_not_sent() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    engine.handle(service(1), clock.now());
    engine.handle(Event::DeleteService("ns/s1".into()), clock.now());
    engine.poll(&clock);
    assert!(engine.backend().calls.is_empty());
    assert!(engine.inspect().view.current().ports.is_empty());
}

#[test]
fn rule_57_after_a_failure_everything_is_sent_again_with_growing_waits() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    engine.backend().answers = vec![Outcome::Failed("no memory".into()); 3];
    engine.handle(service(1), clock.now());
    let mut waits = Vec::new();
    while let Some(at) = engine.poll(&clock) {
        let wait = at - clock.now();
        if wait > Duration::from_secs(100) {
            break;
        }
        assert_eq!(engine.inspect().broken(), Some("no memory"));
        assert_eq!(engine.inspect().status(&key(1)), Some(PortStatus::Pending));
        waits.push(wait.as_secs());
        clock.0.set(at);
    }
    assert_eq!(waits, [1, 2, 4]);
    assert_eq!(engine.backend().calls, ["apply +s1", "sync 1", "sync 1", "sync 1"]);
    assert_eq!(engine.inspect().broken(), None);
    assert_eq!(engine.inspect().status(&key(1)), Some(PortStatus::Done));
    assert_eq!(Pace::default().backoff(100), Duration::from_secs(30));
}

#[test]
fn rule_18_a_family_that_fails_is_tried_again_while_the_other_goes_on_with_changes() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    let failed = || Outcome::FamilyFailed {
        family: crate::model::Family::V6,
        reason: "no IPv6".into(),
        failures: Vec::new(),
    };
    engine.backend().answers = vec![failed(), failed(), failed(), Outcome::Done];
    engine.handle(service(1), clock.now());
    let first = engine.poll(&clock).expect("a time to try again");
    assert_eq!(first - clock.now(), Duration::from_secs(1));
    assert_eq!(engine.inspect().broken(), Some("no IPv6"));
    assert_eq!(engine.inspect().status(&key(1)), Some(PortStatus::Done), "IPv4 is in force");
    clock.0.set(first);
    let second = engine.poll(&clock).expect("another");
    assert_eq!(second - clock.now(), Duration::from_secs(2));
    // A change in between goes by itself, and does not put the next attempt off.
    clock.forward(1000);
    engine.handle(service(2), clock.now());
    assert_eq!(engine.poll(&clock), Some(second));
    clock.0.set(second);
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1", "apply again IPv6 ", "apply +s2", "apply again IPv6 "]);
    assert_eq!(engine.inspect().broken(), None);
}

#[test]
fn rule_57_everything_is_sent_every_hour() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    let at = engine.poll(&clock).expect("a time");
    clock.0.set(at);
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["sync 0"]);
}

#[test]
fn one_port_that_fails_is_tried_again_by_itself() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    let failure = Failure { key: key(2), reason: "no room".into(), retry: Retry::Later };
    engine.backend().answers = vec![Outcome::Partly(vec![failure.clone()]), Outcome::Partly(vec![failure])];
    engine.handle(service(1), clock.now());
    engine.handle(service(2), clock.now());
    let at = engine.poll(&clock).expect("a retry");
    assert_eq!(at, clock.now() + Duration::from_secs(1));
    assert_eq!(engine.inspect().status(&key(1)), Some(PortStatus::Done));
    assert_eq!(engine.inspect().status(&key(2)), Some(PortStatus::Failed("no room".into())));
    clock.0.set(at);
    let again = engine.poll(&clock).expect("another");
    assert_eq!(again, at + Duration::from_secs(2));
    clock.0.set(again);
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1 +s2", "apply +s2", "apply +s2"]);
    assert_eq!(engine.inspect().failed().count(), 0);
}

#[test]
fn one_port_that_cannot_work_waits_for_a_change() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    let failure = Failure { key: key(1), reason: "no SCTP".into(), retry: Retry::OnChange };
    engine.backend().answers = vec![Outcome::Partly(vec![failure])];
    engine.handle(service(1), clock.now());
    let at = engine.poll(&clock).expect("the hourly sync");
    assert!(at - clock.now() > Duration::from_secs(3000));
    clock.forward(5000);
    let group = EndpointGroup::of_addresses("ns/g", "ns/s1", Protocol::Tcp, 8080, &[[10, 1, 0, 1].into()]);
    engine.handle(Event::SetGroup(Box::new(group)), clock.now());
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1", "apply +s1"]);
    assert_eq!(engine.inspect().status(&key(1)), Some(PortStatus::Done));
}

#[test]
fn a_delete_that_fails_is_tried_again() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    engine.handle(service(1), clock.now());
    engine.poll(&clock);
    clock.forward(2000);
    let failure = Failure { key: key(1), reason: "busy".into(), retry: Retry::Later };
    engine.backend().answers = vec![Outcome::Partly(vec![failure])];
    engine.handle(Event::DeleteService("ns/s1".into()), clock.now());
    let at = engine.poll(&clock).expect("a retry");
    clock.0.set(at);
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1", "apply -s1", "apply -s1"]);
}

#[test]
fn a_retry_that_is_due_waits_for_the_pace() {
    let clock = FakeClock::new();
    let pace = Pace { min_interval: Duration::from_secs(10), ..Pace::default() };
    let config = EngineConfig { pace, ..EngineConfig::default() };
    let mut engine = Engine::new(config, NodeInfo::new("here"), Fake::default());
    let failure = Failure { key: key(1), reason: "busy".into(), retry: Retry::Later };
    engine.backend().answers = vec![Outcome::Partly(vec![failure])];
    engine.handle(service(1), clock.now());
    engine.handle(Event::ListDone(ListKind::Services), clock.now());
    engine.handle(Event::ListDone(ListKind::Groups), clock.now());
    let start = clock.now();
    let at = engine.poll(&clock).expect("a retry");
    assert_eq!(at, start + Duration::from_secs(1));
    clock.0.set(at);
    assert_eq!(engine.poll(&clock), Some(start + Duration::from_secs(10)));
}

#[test]
fn a_full_list_takes_away_what_is_not_in_it() {
    let clock = FakeClock::new();
    let mut engine = started(&clock);
    engine.handle(service(1), clock.now());
    engine.handle(service(2), clock.now());
    engine.poll(&clock);
    clock.forward(2000);
    engine.handle(Event::ListStart(ListKind::Services), clock.now());
    engine.handle(service(2), clock.now());
    engine.handle(Event::ListDone(ListKind::Services), clock.now());
    engine.poll(&clock);
    assert_eq!(engine.backend().calls, ["apply +s1 +s2", "apply -s1"]);
}

/// Sends the number of ports of every call through a channel.
struct Sending(std::sync::mpsc::Sender<usize>);

impl Backend for Sending {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        self.0.send(state.ports.len()).expect("the test listens");
        Outcome::Done
    }
}

#[test]
fn on_a_thread_through_a_handle() {
    let (handle, inbox) = source::handle();
    let (sender, calls) = std::sync::mpsc::channel();
    let engine = Engine::new(EngineConfig::default(), NodeInfo::new("here"), Sending(sender));
    let thread = std::thread::spawn(move || run(engine, &inbox).inspect().view.services().count());
    handle
        .set_service(Service::new("ns/a").cluster_ip([10, 0, 0, 1].into()).port(Protocol::Tcp, 80))
        .unwrap();
    assert_eq!(handle.inspect(|engine| (engine.ready, engine.view.services().count())), Ok((false, 1)));
    handle.all_listed().unwrap();
    assert_eq!(calls.recv(), Ok(1));
    handle.stop();
    assert_eq!(thread.join().unwrap(), 1);
    assert_eq!(handle.all_listed(), Err(source::Stopped));
}
