//! Against the kernel: denied packets are told of, by whom they were denied, and a flood of them leaves
//! others their turn.

mod support;

use std::collections::BTreeMap;
use std::net::IpAddr;

use knit_kernel::nflog::Nflog;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_policy::model::{Direction, Protocol, Traffic};
use knit_policy_nft::Router;
use knit_policy_nft::log::{GROUP, Why};
use knit_testbed::{SOON, ip};
use support::cluster::{HERE, Policies, policy};
use support::packet::{Bench, Packet};

#[test]
fn denied_packets_are_told_of_and_a_flood_leaves_others_their_turn() {
    in_namespaces(|| {
        let mut bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        let (a, b, six, out) = (ip("10.0.0.10"), ip("10.0.0.11"), ip("fd00::10"), ip("203.0.113.9"));
        policies.pod("x/a", HERE, &[a, six]);
        policies.pod("x/b", HERE, &[b]);
        policies.apply(&policy("none", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
        let mut log = Nflog::open_in(&bench.router, GROUP).expect("a listener");
        let to = |source, destination| Packet::new(source, destination, Traffic::Port(Protocol::Udp, 53));
        // The way is known by then, and nothing waits for a neighbour's answer.
        bench.pass(&[], |_| true);
        let mut packets = vec![to(out, a); 500];
        packets.extend([to(b, out), to(ip("2001:db8::9"), six)]);
        assert!(bench.pass(&packets, |_| false).iter().all(|through| !through));
        let mut told: BTreeMap<(Why, IpAddr, IpAddr), usize> = BTreeMap::new();
        let both = [
            (Why::Denied(Direction::Egress), b, out),
            (Why::Denied(Direction::Ingress), ip("2001:db8::9"), six),
        ];
        eventually("those of others are told", SOON, || {
            log.drain(|packet| {
                let why = Why::of_prefix(&packet.prefix).expect("a prefix of ours");
                let headers = packet.headers.expect("headers");
                *told.entry((why, headers.source, headers.destination)).or_default() += 1;
            })
            .expect("read");
            both.iter().all(|one| told.contains_key(one))
        });
        let flood = told[&(Why::Denied(Direction::Ingress), out, a)];
        assert!((1..100).contains(&flood), "{flood} of 500 were told");
        assert_eq!(told.len(), 3, "{told:?}");
        let counters = policies.table.counters().expect("counted");
        assert_eq!(counters[&(Direction::Ingress, a)].packets, 500, "all are counted");
    });
}
