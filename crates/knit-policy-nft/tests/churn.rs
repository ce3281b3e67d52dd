//! Against the kernel: many policies come and go while pods do, and packets are judged by what is in force.

mod support;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use knit_kernel::nft::Kernel;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_nft::{Family as TableFamily, Nftables as _, TableId};
use knit_policy::model::{DEFAULT_NETWORK, PodKey, Protocol, Traffic};
use knit_policy_nft::{PolicyTable, Router, TABLE};
use knit_testbed::{SOON, ip};
use support::cluster::{HERE, Policies, pod, policy, read};
use support::packet::{Bench, Packet};

const POLICIES: usize = 1000;
const PODS: usize = 100;

/// Pods 0, 2, 4… are here.
fn set_pod(policies: &mut Policies, n: usize) {
    let node = if n.is_multiple_of(2) { HERE } else { "there" };
    let addresses = [ip(&format!("10.0.1.{n}")), ip(&format!("fd00::1:{n}"))];
    policies.engine.set_pod(pod(&format!("x/p{n}"), node, &addresses));
}

/// Policy n lets the pod after it reach pod n at a port of its own.
fn one(n: usize) -> String {
    let spec = format!(
        "{{podSelector: {{matchLabels: {{pod: p{}}}}}, ingress: [{{from: [{{podSelector: {{matchLabels: \
         {{pod: p{}}}}}}}], ports: [{{port: {}}}]}}]}}",
        n % PODS,
        (n + 1) % PODS,
        1000 + n
    );
    policy(&format!("n{n}"), &spec)
}

#[test]
fn a_thousand_policies_come_and_go_while_pods_do_and_leave_nothing() {
    in_namespaces(|| {
        let mut bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        (0..PODS).for_each(|n| set_pod(&mut policies, n));
        policies.settle();
        let id = TableId::new(TableFamily::Ip, TABLE);
        let mut kernel = Kernel::open_in(&bench.router).expect("nftables");
        let mut shape = None;
        let tell = |policies: &mut Policies, step: usize| {
            // A pod goes with each change, and the one that went before is back.
            let (gone, back) = (step * 7 % PODS, (step + PODS - 1) * 7 % PODS);
            policies.engine.delete_pod(&PodKey::new("x", format!("p{gone}")), None);
            set_pod(policies, back);
            policies.settle();
        };
        let mut check = |policies: &Policies, bench: &mut Bench, step: usize| {
            let state = kernel.table(&id).expect("read").expect("a table");
            // However many there are: so many sets, chains and rules.
            let rules = state.chains.values().map(|chain| chain.rules.len()).sum::<usize>();
            let now = (state.sets.len(), state.chains.len(), rules);
            assert_eq!(*shape.get_or_insert(now), now, "after {step}");
            let packets: Vec<Packet> = (0..40)
                .map(|n| {
                    let to = (step * 3 + n * 2) % PODS;
                    let from = (to + 1 + n % 2) % PODS;
                    let port = u16::try_from(1000 + step / PODS * PODS + to).expect("a port");
                    let address = |n: usize| ip(&format!("10.0.1.{n}"));
                    Packet::new(address(from), address(to), Traffic::Port(Protocol::Tcp, port))
                })
                .collect();
            let elements = policies.table.elements();
            let allowed = |packet: &Packet| elements.allow(packet.source, packet.destination, packet.traffic);
            let through = bench.pass(&packets, allowed);
            for (packet, through) in packets.iter().zip(through) {
                assert_eq!(through, allowed(packet), "after {step}: {packet:?}");
            }
        };
        for step in 0..POLICIES {
            policies.engine.set_policy(read(&one(step)));
            tell(&mut policies, step);
            if step % 100 == 99 {
                check(&policies, &mut bench, step);
            }
        }
        let elements = policies.engine.elements(DEFAULT_NETWORK);
        let mut again = PolicyTable::open_in(&bench.router, Router::Node).expect("a table");
        assert_eq!(again.sync(&elements).expect("read").changes, 0, "the changes come to what is wanted");
        for step in 0..POLICIES {
            policies.engine.delete_policy(&read(&one(step)).name);
            tell(&mut policies, step);
            if step % 100 == 50 {
                check(&policies, &mut bench, step);
            }
        }
        assert!(policies.table.elements().all().is_empty());
        let mut kernel = Kernel::open_in(&bench.router).expect("nftables");
        assert_eq!(kernel.table(&id).expect("read"), None);
        assert_eq!(policies.table.take_repairs(), 0);
    });
}

/// Numbered packets between pods that stay, while a thousand policies come and go and a hundred pods do: each
/// policy acts on the pod that they go to and has the ones that they come from as peers, so that what the
/// kernel looks up for them is another thing with every change.
#[test]
fn no_packet_of_a_stream_is_misjudged_while_a_thousand_policies_and_a_hundred_pods_come_and_go() {
    /// So many packets are sent while a change is carried out, at most: all have tags of their own.
    const PER_CHANGE: usize = 28;
    in_namespaces(|| {
        let bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        (0..PODS).for_each(|n| set_pod(&mut policies, n));
        for (who, node, n) in [("x/to", HERE, 201), ("x/friend", "there", 202), ("y/foe", "there", 203)] {
            let addresses = [ip(&format!("10.0.1.{n}")), ip(&format!("fd00::1:{n}"))];
            policies.engine.set_pod(pod(who, node, &addresses));
        }
        policies.apply(&policy(
            "stays",
            "{podSelector: {matchLabels: {pod: to}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             friend}}}], ports: [{port: 80}]}]}",
        ));
        // It lets them in at a port of its own; and what it selects the friend by, with a pod that comes and
        // goes, is another thing each time, and with it the friend's class.
        let beside = |n: usize| {
            policy(
                &format!("n{n}"),
                &format!(
                    "{{podSelector: {{matchLabels: {{pod: to}}}}, ingress: [{{from: [{{podSelector: \
                     {{matchExpressions: [{{key: pod, operator: In, values: [friend, p{}]}}]}}}}, \
                     {{namespaceSelector: {{matchLabels: {{ns: y}}}}}}], ports: [{{port: {}}}]}}]}}",
                    n % PODS,
                    1000 + n,
                ),
            )
        };
        let names = |from: &str| [format!("10.0.1.{from}"), format!("fd00::1:{from}")].map(|text| ip(&text));
        let to = names("201");
        let packet = |from: [IpAddr; 2], family: usize| {
            Packet::new(from[family], to[family], Traffic::Port(Protocol::Tcp, 80))
        };
        // Odd tags must pass, even ones must not.
        let stream: Vec<Packet> =
            (0..2).flat_map(|family| [packet(names("202"), family), packet(names("203"), family)]).collect();
        let (steps, sent) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (commits, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let room = || (steps.load(Ordering::Relaxed) + 1) * PER_CHANGE;
        let at_once = 20;
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let mut tag = 0_u16;
                while !ended.load(Ordering::Relaxed) {
                    // While nothing is being written, nothing can be wrong.
                    if !commits.load(Ordering::Acquire) || usize::from(tag) + stream.len() > room() {
                        std::thread::yield_now();
                        continue;
                    }
                    for packet in &stream {
                        tag += 1;
                        bench.send(&Packet { tag, ..*packet });
                    }
                    sent.store(tag.into(), Ordering::Release);
                }
            });
            for step in 0..2 * POLICIES {
                // Some are there at any time, and each of them comes and goes once.
                if step < POLICIES {
                    policies.engine.set_policy(read(&beside(step)));
                }
                if (at_once..POLICIES + at_once).contains(&step) {
                    policies.engine.delete_policy(&read(&beside(step - at_once)).name);
                }
                let (gone, back) = (step * 7 % PODS, (step + PODS - 1) * 7 % PODS);
                policies.engine.delete_pod(&PodKey::new("x", format!("p{gone}")), None);
                set_pod(&mut policies, back);
                let changes = policies.engine.settle();
                steps.store(step, Ordering::Relaxed);
                let before = sent.load(Ordering::Acquire);
                commits.store(true, Ordering::Release);
                for (_, changes) in changes {
                    policies.table.apply(&changes).expect("applied");
                }
                // Each change has a part of the stream, however busy the machine is.
                while sent.load(Ordering::Acquire) == before
                    && before + stream.len() <= room()
                    && !sender.is_finished()
                {
                    std::thread::yield_now();
                }
                commits.store(false, Ordering::Release);
            }
            ended.store(true, Ordering::Relaxed);
            sender.join().expect("the stream");
        });
        let sent = sent.into_inner();
        assert!(sent > 2 * POLICIES, "{sent} packets are no stream");
        assert_eq!(policies.engine.cluster().policies().count(), 1, "all others came and went");
        // A packet that is lost before it comes to any rule is no verdict; what was denied is counted.
        let (each, lost) = (sent / 2, sent / 200);
        eventually("what must pass has passed", SOON, || {
            bench.seen().keys().filter(|tag| *tag % 2 == 1).count() >= each - lost
        });
        let denied = usize::try_from(policies.denied()).expect("few");
        assert!((each - lost..=each).contains(&denied), "of {each} that must not pass {denied} were denied");
        let wrong: Vec<u16> = bench.seen().into_keys().filter(|tag| tag % 2 == 0).collect();
        assert!(wrong.is_empty(), "of {sent} packets, these passed and must not have: {wrong:?}");
        assert_eq!(policies.table.take_repairs(), 0);
    });
}

/// A range of up to 64 ports was an element for each, however many ranges there were.
#[test]
fn a_tenant_with_thousands_of_ranges_of_ports_takes_nothing_from_its_neighbors() {
    in_namespaces(|| {
        let mut bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        (0..4).for_each(|n| set_pod(&mut policies, n));
        policies.engine.set_policy(read(&one(0)));
        policies.settle();
        let elements = |policies: &Policies| policies.engine.elements(DEFAULT_NETWORK).len();
        let before = elements(&policies);
        let ranges: Vec<String> =
            (0..4000).map(|n| format!("{{port: {}, endPort: {}}}", n * 16 + 1, n * 16 + 6)).collect();
        let spec = format!(
            "{{podSelector: {{matchLabels: {{pod: p2}}}}, ingress: [{{ports: [{}]}}]}}",
            ranges.join(", ")
        );
        policies.engine.set_policy(read(&policy("large", &spec)));
        policies.settle();
        let added = elements(&policies) - before;
        assert!(added < 2 * 4010, "{added} elements of two addresses");
        let packet = |from: u8, to: u8, port: u16| {
            let address = |n: u8| ip(&format!("10.0.1.{n}"));
            Packet::new(address(from), address(to), Traffic::Port(Protocol::Tcp, port))
        };
        let packets = [packet(1, 2, 17), packet(1, 2, 16), packet(1, 0, 1000), packet(3, 0, 1000)];
        let allowed = |packet: &Packet| {
            [packets[0], packets[2]].iter().any(|p| p.source == packet.source && p.traffic == packet.traffic)
        };
        let through = bench.pass(&packets, allowed);
        assert_eq!(through, [true, false, true, false], "its own, and its neighbor's");
        // The neighbor's policy changes.
        policies.delete("x", "n0");
        assert_eq!(bench.pass(&[packet(3, 0, 1000)], |_| true), [true]);
    });
}
