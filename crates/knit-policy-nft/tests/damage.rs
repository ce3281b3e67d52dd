//! Against the kernel: what others do to the tables is found and repaired, nothing that began meanwhile goes
//! on, and a restart under traffic judges nothing wrongly.

mod support;

use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use knit_kernel::testing::{eventually, in_namespaces, skip, table_damages};
use knit_nft::{Family as TableFamily, TableId, Transaction};
use knit_policy::model::{DEFAULT_NETWORK, Protocol, Traffic};
use knit_policy_nft::{PolicyTable, Router, TABLE};
use knit_testbed::tables::{commit_as_stranger, elsewhere_in_the_rule_set, read};
use knit_testbed::{SOON, ip};
use support::cluster::{HERE, Policies, policy};
use support::packet::{Bench, Packet};
use support::probe::{connect, echoes};
use support::world::World;

fn tcp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Tcp, port)
}

fn table() -> TableId {
    TableId::new(TableFamily::Ip, TABLE)
}

/// a is reached by b at port 80, and by nobody else.
fn policies(space: &knit_kernel::NetNs) -> Policies {
    let mut policies = Policies::new(space, Router::Node);
    policies.pod("x/a", HERE, &[ip("10.0.0.10"), ip("fd00::10")]);
    policies.pod("x/b", "there", &[ip("10.0.0.11"), ip("fd00::11")]);
    policies.pod("y/c", "there", &[ip("10.0.0.12"), ip("fd00::12")]);
    policies.apply(&policy(
        "web",
        "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}], \
         ports: [{port: 80}]}]}",
    ));
    policies
}

#[test]
fn damage_is_found_by_comparing_and_put_right_and_counted() {
    in_namespaces(|| {
        let bench = Bench::new("in");
        let mut policies = policies(&bench.router);
        policies.table.look_again();
        assert_eq!(policies.table.restore().expect("looked").changes, 0);
        assert_eq!(policies.table.take_repairs(), 0, "to begin is no repair");
        let before = read(&bench.router, &table());
        for (what, damage) in &table_damages(&bench.router, &table(), "peers", "to") {
            assert!(policies.table.is_intact(), "before {what}");
            commit_as_stranger(&bench.router, damage);
            assert!(!policies.table.is_intact(), "{what}");
            policies.table.restore().expect("restored");
            assert_eq!(read(&bench.router, &table()), before, "{what}");
            assert!(policies.table.take_repairs() > 0, "{what}");
        }
        assert_eq!(policies.table.restore().expect("nothing to do").changes, 0);
        // What others do to their own is nobody's business.
        let (tell, told) = mpsc::channel();
        policies.table.watch(Box::new(move || _ = tell.send(())));
        policies.table.look_again();
        policies.table.restore().expect("looked");
        assert_eq!(policies.table.take_repairs(), 0);
        commit_as_stranger(&bench.router, &elsewhere_in_the_rule_set("firewall"));
        eventually("that is heard", SOON, || policies.table.is_intact());
        assert!(told.try_recv().is_err());
        let mut tx = Transaction::new();
        tx.delete_table(&table());
        commit_as_stranger(&bench.router, &tx);
        told.recv_timeout(SOON).expect("told");
        assert!(!policies.table.is_intact());
    });
}

#[test]
fn after_a_flush_nothing_passes_that_began_meanwhile() {
    in_namespaces(|| {
        let world = World::routed(&[
            ("a", "10.0.0.10", "fd00::10"),
            ("b", "10.0.0.11", "fd00::11"),
            ("c", "10.0.0.12", "fd00::12"),
        ]);
        world.serve();
        let mut policies = policies(&world.router);
        let (tell, told) = mpsc::channel();
        policies.table.watch(Box::new(move || _ = tell.send(())));
        let flushed = world.router.run(|| Command::new("nft").args(["flush", "ruleset"]).status());
        match flushed.expect("entered") {
            Ok(status) => assert!(status.success()),
            Err(error) => return skip(format_args!("nft: {error}")),
        }
        told.recv_timeout(SOON).expect("told");
        let c = &world.host("c").space;
        let streams = [ip("10.0.0.10"), ip("fd00::10")];
        let mut streams = streams.map(|to| connect(c, SocketAddr::new(to, 80)));
        let fine = &world.host("b").space;
        let mut fine = connect(fine, SocketAddr::new(ip("10.0.0.10"), 80));
        let applied = policies.table.restore().expect("restored");
        assert!(policies.table.take_repairs() > 0);
        // While there is no rule that asks for it, the kernel may not track connections: then they have no
        // beginning that it knows, and do not go on either.
        policies.table.follow(&applied.touched).expect("followed");
        for stream in &mut streams {
            assert!(!echoes(stream, std::time::Duration::from_millis(300)));
        }
        let _ = echoes(&mut fine, std::time::Duration::from_millis(1));
        assert!(policies.table.is_intact());
    });
}

/// Numbered packets, some that must pass and some that must not, while the agent is killed and started again
/// and again: each time with another engine that numbers classes in another way, and with other policies
/// beside, whose classes take the numbers that were free.
#[test]
fn restarts_under_a_numbered_stream_judge_nothing_wrongly() {
    in_namespaces(|| {
        let bench = Bench::new("in");
        let router = bench.router.try_clone().expect("a namespace");
        let mut first = policies(&router);
        first.table.restore().expect("in force");
        drop(first);
        let stop = AtomicBool::new(false);
        let (good, bad) = (
            [
                Packet::new(ip("10.0.0.11"), ip("10.0.0.10"), tcp(80)),
                Packet::new(ip("fd00::11"), ip("fd00::10"), tcp(80)),
            ],
            [
                Packet::new(ip("10.0.0.12"), ip("10.0.0.10"), tcp(80)),
                Packet::new(ip("fd00::12"), ip("fd00::10"), tcp(80)),
            ],
        );
        // Odd numbers must pass, even ones must not.
        let sent = std::thread::scope(|scope| {
            let stream = scope.spawn(|| {
                let mut tag = 0_u16;
                while !stop.load(Ordering::Relaxed) && tag < u16::MAX - 4 {
                    for packet in good.iter().zip(&bad).flat_map(|(good, bad)| [good, bad]) {
                        tag += 1;
                        bench.send(&Packet { tag, ..*packet });
                    }
                }
                tag
            });
            for round in 0..40_u16 {
                let mut policies = Policies {
                    engine: knit_policy::sets::Engine::new(HERE),
                    table: PolicyTable::open_in(&router, Router::Node).expect("a table"),
                    touched: Default::default(),
                };
                let engine = &mut policies.engine;
                // Another order each time, and others beside.
                let mut pods = vec![("x/a", HERE, 10_u8), ("x/b", "there", 11), ("y/c", "there", 12)];
                pods.extend(
                    [("x/d", "there", 13), ("x/e", "there", 14)].into_iter().take(usize::from(round % 3)),
                );
                pods.rotate_left(usize::from(round) % 3);
                for (who, node, n) in pods {
                    let addresses = [ip(&format!("10.0.0.{n}")), ip(&format!("fd00::{n}"))];
                    engine.set_pod(support::cluster::pod(who, node, &addresses));
                }
                let beside = policy(
                    "beside",
                    &format!(
                        "{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{{podSelector: \
                         {{matchLabels: {{pod: {}}}}}}}], ports: [{{port: 80}}]}}]}}",
                        ["d", "e"][usize::from(round % 2)]
                    ),
                );
                let web = policy(
                    "web",
                    "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: \
                     {pod: b}}}], ports: [{port: 80}]}]}",
                );
                let mut texts = [beside, web];
                texts.rotate_left(usize::from(round) / 2 % 2);
                for text in &texts {
                    engine.set_policy(support::cluster::read(text));
                    engine.settle();
                }
                policies.table.sync(&policies.engine.elements(DEFAULT_NETWORK)).expect("synced");
            }
            stop.store(true, Ordering::Relaxed);
            stream.join().expect("the stream")
        });
        assert!(sent > 200, "only {sent} packets");
        let expected = usize::from(sent / 2);
        eventually("all that must pass have passed", SOON, || bench.seen().len() >= expected);
        let wrong: Vec<u16> = bench.seen().into_keys().filter(|tag| tag % 2 == 0).collect();
        assert!(wrong.is_empty(), "of {sent} packets, these passed and must not have: {wrong:?}");
    });
}
