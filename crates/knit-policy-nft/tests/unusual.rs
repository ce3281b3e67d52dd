//! Against the kernel: pods that are no pods to policies, and policies that nobody would write.

mod support;

use knit_kernel::testing::in_namespaces;
use knit_policy::model::{Node, Pod, Protocol, Traffic};
use knit_types::Family;
use support::cluster::{pod, policy};
use support::lab::Lab;

const PING: Traffic = Traffic::Other;

fn tcp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Tcp, port)
}

/// Rule 27: a pod with `hostNetwork` is nobody's peer by its labels, and no policy acts on it.
#[test]
fn pods_in_their_nodes_namespace_are_the_node() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        let node = lab.world.host("out").addresses;
        let there = Node { name: "there".into(), labels: Default::default(), addresses: node.into() };
        lab.policies.engine.set_node(there);
        let agent = Pod { host_network: true, ..pod("x/agent", "there", &node) };
        lab.policies.engine.set_pod(agent);
        lab.policies
            .apply(&policy("none", "{podSelector: {matchLabels: {pod: agent}}, policyTypes: [Egress]}"));
        lab.policies.apply(&policy(
            "in",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             agent}}}, {podSelector: {matchLabels: {pod: far}}}]}]}",
        ));
        lab.expect(
            &[("out", "b", tcp(80)), ("far", "a", tcp(80))],
            &[("out", "a", tcp(80)), ("out", "a", PING), ("b", "a", tcp(80))],
        );
        // Its node's address is what lets it in.
        lab.policies.apply(&policy(
            "node",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: 203.0.113.9/32}}, \
             {ipBlock: {cidr: '2001:db8:9::9/128'}}]}]}",
        ));
        lab.expect(&[("out", "a", tcp(80)), ("out", "a", PING)], &[("b", "a", tcp(80))]);
    });
}

#[test]
fn ten_thousand_blocks_with_overlaps_and_exceptions_are_in_force_and_take_nothing_from_others() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        lab.policies.apply(&policy(
            "neighbor",
            "{podSelector: {matchLabels: {pod: b}}, ingress: [{from: [{podSelector: {}}]}]}",
        ));
        // Each address twice, in a block and in the half of it, and a hole in both.
        let block = |i: u32| {
            let base = std::net::Ipv4Addr::from(0xcb00_0000 + (i % 5000) * 256);
            let hole = std::net::Ipv4Addr::from(u32::from(base) + 8);
            format!("{{ipBlock: {{cidr: {base}/{}, except: [{hole}/30]}}}}", if i < 5000 { 24 } else { 25 })
        };
        let blocks = (0..10_000).map(block).collect::<Vec<_>>().join(", ");
        let rule = format!("{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{blocks}]}}]}}");
        lab.policies.apply(&policy("blocks", &rule));
        let a = lab.address("a", Family::V4);
        assert!(!lab.reaches_by("out", a, tcp(80)), "it is in the hole");
        lab.expect(&[("far", "b", tcp(80))], &[("far", "a", tcp(80)), ("out", "b", tcp(80))]);
        // Rule 17: another policy lets it in all the same.
        let own =
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: 203.0.113.9/32}}]}]}";
        lab.policies.apply(&policy("own", own));
        assert!(lab.reaches_by("out", a, tcp(80)));
        lab.policies.delete("x", "own");
        assert!(!lab.reaches_by("out", a, tcp(80)));
        let wider = rule.replace("203.0.113.8/30", "203.0.113.12/30");
        lab.policies.apply(&policy("blocks", &wider));
        assert!(lab.reaches_by("out", a, tcp(80)), "the hole is beside it");
        lab.policies.delete("x", "blocks");
        lab.expect(&[("far", "a", tcp(80)), ("far", "b", tcp(80))], &[("out", "b", tcp(80))]);
    });
}
