//! Against the kernel, on random clusters: real packets are judged as the verdict function judges them,
//! whatever was in the table before, and by whichever changes it got there.

#[path = "../../knit-policy/tests/support/random.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod random;
mod support;

use std::collections::BTreeMap;
use std::net::IpAddr;

use knit_kernel::testing::in_namespaces;
use knit_policy::cluster::AddressOwner;
use knit_policy::model::{DEFAULT_NETWORK, Family, Traffic};
use knit_policy::sets::Engine;
use knit_policy::verdict::{Flow, State};
use knit_policy_nft::{PolicyTable, Router};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::packet::{Bench, Packet};

const NODE: &str = "n0";
/// Each builds a cluster of up to sixty events, and sends sixty packets at each of two stops.
const CASES: u32 = 192;

fn packets() -> impl Strategy<Value = Vec<Packet>> {
    let one = (random::any_address(), random::any_address(), random::traffic());
    let one = one.prop_filter_map("a packet", |(source, destination, traffic)| {
        let fits = match traffic {
            Traffic::Icmpv6(_) => source.is_ipv6(),
            Traffic::Port(..) | Traffic::Other => true,
        };
        let same = Family::of(source) == Family::of(destination);
        (fits && same).then_some(Packet::new(source, destination, traffic))
    });
    prop::collection::vec(one, 60)
}

/// What the verdict function says that this node's router does to a packet that comes to it from elsewhere.
fn judged(engine: &Engine, packet: &Packet) -> bool {
    let cluster = engine.cluster();
    let flow = Flow {
        network: DEFAULT_NETWORK.into(),
        source: packet.source,
        destination: packet.destination,
        traffic: packet.traffic,
        state: State::New,
    };
    let verdict = cluster.judge(&flow);
    let here = |address| match cluster.owner(DEFAULT_NETWORK, address) {
        AddressOwner::Pod(pod) => *pod.node == *NODE,
        _ => false,
    };
    (verdict.egress.allowed || !here(packet.source)) && (verdict.ingress.allowed || !here(packet.destination))
}

/// What the node sends itself goes by another hook, and is not tried here.
fn from_the_node(engine: &Engine, packet: &Packet) -> bool {
    let cluster = engine.cluster();
    matches!(cluster.owner(DEFAULT_NETWORK, packet.source), AddressOwner::Node(_))
        && cluster.is_address_of_node(packet.source, NODE)
}

/// Pods of this node stay subjects whoever claims their addresses elsewhere; the verdict function, which has
/// no place, goes by the youngest claimant.
fn is_contested(engine: &Engine, address: IpAddr) -> bool {
    let cluster = engine.cluster();
    let here = cluster.owner_on(NODE, DEFAULT_NETWORK, address);
    here.is_some_and(|here| match cluster.owner(DEFAULT_NETWORK, address) {
        AddressOwner::Pod(pod) => pod.key != here.key,
        _ => true,
    })
}

fn compare(
    bench: &mut Bench,
    engine: &Engine,
    table: &PolicyTable,
    packets: &[Packet],
) -> Result<(), TestCaseError> {
    let is_tried = |packet: &&Packet| {
        let contested = [packet.source, packet.destination].into_iter().any(|a| is_contested(engine, a));
        !contested && !from_the_node(engine, packet)
    };
    let packets: Vec<Packet> = packets.iter().filter(is_tried).copied().collect();
    let through = bench.pass(&packets, |packet| judged(engine, packet));
    for (packet, through) in packets.iter().zip(through) {
        let expected = judged(engine, packet);
        prop_assert_eq!(through, expected, "{:?}\n{:#?}", packet, table.elements());
        let always = packet.traffic.always_passes();
        let from_memory = table.elements().allow(packet.source, packet.destination, packet.traffic);
        prop_assert_eq!(always || from_memory, expected, "from memory: {:?}", packet);
    }
    Ok(())
}

#[test]
fn packets_are_judged_as_the_verdict_function_judges_them() {
    in_namespaces(|| {
        let bench = std::cell::RefCell::new(Bench::new("in"));
        let events = prop::collection::vec((random::event(), prop::bool::weighted(0.2)), 1..60);
        let config = Config { failure_persistence: None, ..Config::with_cases(CASES) };
        let run = TestRunner::new(config).run(&(events, packets()), |(events, packets)| {
            let bench = &mut *bench.borrow_mut();
            let mut engine = Engine::new(NODE);
            // What the last case left is there, with classes of its own numbers.
            let mut table = PolicyTable::open_in(&bench.router, Router::Node).expect("a table");
            table.sync(&BTreeMap::new()).expect("synced");
            let half = events.len() / 2;
            for (index, (event, stop)) in events.iter().enumerate() {
                random::tell(&mut engine, event);
                if *stop || index == half || index + 1 == events.len() {
                    for (network, changes) in engine.settle() {
                        if &*network == DEFAULT_NETWORK {
                            table.apply(&changes).expect("applied");
                        }
                    }
                }
                if index == half {
                    compare(bench, &engine, &table, &packets)?;
                    // As after a restart: another engine, which numbers classes in its own way.
                    table = PolicyTable::open_in(&bench.router, Router::Node).expect("a table");
                    let applied = table.sync(&engine.elements(DEFAULT_NETWORK)).expect("synced");
                    prop_assert_eq!(applied.changes, 0, "a restart changes nothing");
                }
            }
            let elements = engine.elements(DEFAULT_NETWORK);
            prop_assert!(*table.elements().all() == elements);
            compare(bench, &engine, &table, &packets)?;
            prop_assert_eq!(table.sync(&elements).expect("synced").changes, 0, "changes add up");
            Ok(())
        });
        if let Err(error) = run {
            panic!("{error}");
        }
    });
}
