//! Against the kernel: many policies come and go while pods do, and packets are judged by what is in force.

mod support;

use knit_kernel::nft::Kernel;
use knit_kernel::testing::in_namespaces;
use knit_nft::{Family as TableFamily, Nftables as _, TableId};
use knit_policy::model::{DEFAULT_NETWORK, PodKey, Protocol, Traffic};
use knit_policy_nft::{PolicyTable, Router, TABLE};
use knit_testbed::ip;
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
