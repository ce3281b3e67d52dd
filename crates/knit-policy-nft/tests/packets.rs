//! Against the kernel, between pods that answer: each behaviour that policies promise, in both families.

mod support;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use knit_kernel::conntrack::{Conntrack, Filter, Flow};
use knit_kernel::nft::Kernel;
use knit_kernel::testing::in_namespaces;
use knit_nft::{
    Chain, ChainKind, CtState, Family as TableFamily, Hook, L4Proto, Mark, Nftables as _, Port, Rule,
    TableId, TableState, field,
};
use knit_policy::model::{Direction, Protocol, Traffic};
use knit_policy_nft::live::Followed;
use knit_policy_nft::{CUT, Router};
use knit_testbed::{ip, name};
use knit_types::Family;
use support::cluster::{HERE, Policies, cluster_policy, policy};
use support::lab::Lab;
use support::packet::{ACK, Bench, Packet};
use support::probe::{connect, echoes, reaches, udp};
use support::world::serve;

/// What `knit-linux` marks connections with that it leads into routers.
const STEERED: u32 = 0x0010_0000;
const PING: Traffic = Traffic::Other;
/// How long something is waited for that must not happen.
const NEVER: Duration = Duration::from_millis(300);

fn tcp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Tcp, port)
}

fn datagram(port: u16) -> Traffic {
    Traffic::Port(Protocol::Udp, port)
}

impl Lab {
    /// Translates a destination, as a service proxy does, and has its mark on the packets.
    fn service(&self, at: &str, to: SocketAddr) {
        let family = if to.is_ipv4() { TableFamily::Ip } else { TableFamily::Ip6 };
        let rule = Rule::new().eq(field::l4proto(), &L4Proto::TCP);
        let rule = match ip(at) {
            IpAddr::V4(at) => rule.eq(field::ip_daddr(), &at),
            IpAddr::V6(at) => rule.eq(field::ip6_daddr(), &at),
        };
        let rule = rule.set_mark(Mark(0x4000)).dnat_to(to.ip(), Some(Port(to.port())));
        let state = TableState::new(TableId::new(family, "services"))
            .chain(Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, -100), [rule])
            .chain(
                Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, 100),
                [Rule::new()
                    .any_of(field::mark(), &Mark(0x4000))
                    .masquerade(knit_nft::NatFlags::NONE)
                    .comment("the mark came through")],
            );
        Kernel::open_in(&self.world.router).expect("nftables").apply(&state).expect("a service");
    }
}

#[test]
fn isolation_peers_and_ports() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        lab.expect(&[("a", "b", tcp(80)), ("out", "a", datagram(80)), ("c", "a", PING)], &[]);
        // Nobody reaches a.
        lab.policies.apply(&policy("deny", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress]}"));
        lab.expect(
            &[("a", "b", tcp(80)), ("a", "out", datagram(80)), ("a", "c", PING), ("c", "b", tcp(80))],
            &[
                ("b", "a", tcp(80)),
                ("out", "a", tcp(80)),
                ("far", "a", datagram(81)),
                ("c", "a", PING),
                ("b", "a", PING),
            ],
        );
        // Pods of the namespace at a port with a name, those of y at a range; TCP alone. Ranges of few ports
        // are single elements, this one is not.
        lab.policies.apply(&policy(
            "some",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}], ports: [{port: \
             web}]}, {from: [{namespaceSelector: {matchLabels: {ns: y}}}], ports: [{port: 5000, endPort: \
             5100}]}]}",
        ));
        lab.expect(
            &[("b", "a", tcp(80)), ("far", "a", tcp(80)), ("c", "a", tcp(5000)), ("c", "a", tcp(5100))],
            &[
                ("b", "a", tcp(81)),
                ("b", "a", datagram(80)),
                ("b", "a", tcp(5000)),
                ("c", "a", tcp(80)),
                ("c", "a", datagram(5000)),
                ("c", "a", tcp(8080)),
                ("out", "a", tcp(80)),
                ("b", "a", PING),
            ],
        );
        // A rule without ports is everything, what has no ports included (rule 23).
        lab.policies.apply(&policy(
            "all",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             far}}}]}]}",
        ));
        lab.expect(&[("far", "a", PING), ("far", "a", datagram(8080))], &[("b", "a", PING)]);
        for name in ["deny", "some", "all"] {
            lab.policies.delete("x", name);
        }
        lab.expect(&[("out", "a", tcp(80)), ("b", "a", PING)], &[]);
        let tables = Kernel::open_in(&lab.world.router).expect("nftables").tables().expect("listed");
        assert_eq!(tables, [], "where no policy acts there is no table");
    });
}

#[test]
fn egress_blocks_with_exceptions_and_the_router_itself() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        serve(&lab.world.router);
        lab.policies.apply(&policy(
            "out",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: \
             10.0.0.0/16, except: [10.0.0.12/32]}}, {ipBlock: {cidr: 'fd00::/32', except: \
             ['fd00::12/128']}}], ports: [{port: 80}]}]}",
        ));
        lab.expect(
            &[("a", "b", tcp(80)), ("a", "far", tcp(80)), ("c", "a", tcp(81)), ("b", "c", tcp(81))],
            &[("a", "c", tcp(80)), ("a", "out", tcp(80)), ("a", "b", tcp(81)), ("a", "b", PING)],
        );
        // Rule 26: the router itself is no exception.
        for own in ["192.0.2.1", "2001:db8:2::1"] {
            assert!(!lab.reaches_by("a", ip(own), tcp(80)), "{own}");
            assert!(lab.reaches_by("b", ip(own), tcp(80)), "{own}");
        }
        lab.policies.apply(&policy(
            "node",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: \
             192.0.2.1/32}}, {ipBlock: {cidr: '2001:db8:2::1/128'}}]}]}",
        ));
        for own in ["192.0.2.1", "2001:db8:2::1"] {
            assert!(lab.reaches_by("a", ip(own), tcp(81)), "{own}");
        }
    });
}

#[test]
fn the_node_itself_always_gets_in_and_answers_and_errors_come_back() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        lab.policies.apply(&policy("none", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
        // Rule 25, by the hook of what a node sends.
        let router = lab.world.router.try_clone().expect("a namespace");
        for family in Family::ALL {
            let to = lab.address("a", family);
            for traffic in [tcp(80), datagram(80), PING] {
                assert!(reaches(&router, to, traffic, || false), "{to} {traffic}");
            }
        }
        lab.expect(&[], &[("a", "b", tcp(80)), ("out", "a", tcp(80)), ("a", "out", PING)]);
        // Allowed one way: answers pass, and so does the error of a port where nobody listens (rule 22).
        lab.policies.apply(&policy(
            "way",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: 9, \
             protocol: UDP}, {port: 80}]}]}",
        ));
        lab.expect(&[("a", "out", tcp(80)), ("a", "c", tcp(80))], &[("a", "b", tcp(80)), ("a", "out", PING)]);
        for family in Family::ALL {
            let to = SocketAddr::new(lab.address("out", family), 9);
            let socket = udp(&lab.world.host("a").space, to);
            socket.set_read_timeout(Some(knit_testbed::SOON)).expect("a timeout");
            socket.send(b"anybody?").expect("sent");
            let error = socket.recv(&mut [0; 8]).expect_err("nobody listens there");
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{to}");
        }
    });
}

#[test]
fn services_are_judged_by_their_endpoint_and_the_mark_goes_on() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        for (at, family) in [("10.96.0.1", Family::V4), ("fd96::1", Family::V6)] {
            lab.service(at, SocketAddr::new(lab.address("b", family), 8080));
        }
        // Neither the service's address nor its port is what counts (rules 19 and 29); the client's own
        // address is, although it is masqueraded (rule 30).
        lab.policies.apply(&policy(
            "web",
            "{podSelector: {matchLabels: {pod: b}}, ingress: [{from: [{podSelector: {matchLabels: {pod: \
             a}}}, {ipBlock: {cidr: 203.0.113.0/24}}, {ipBlock: {cidr: '2001:db8:9::/64'}}], ports: [{port: \
             8080}]}]}",
        ));
        for at in ["10.96.0.1", "fd96::1"] {
            assert!(lab.reaches_by("a", ip(at), tcp(80)), "{at}");
            assert!(lab.reaches_by("out", ip(at), tcp(80)), "{at}");
            assert!(!lab.reaches_by("c", ip(at), tcp(80)), "{at}");
            // Rule 28: whatever isolates it, a pod reaches itself. It works only masqueraded, and that only
            // if the mark came through the chains.
            assert!(lab.reaches_by("b", ip(at), tcp(80)), "a pod by its Service to itself: {at}");
        }
        lab.policies.apply(&policy("none", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress]}"));
        for at in ["10.96.0.1", "fd96::1"] {
            assert!(!lab.reaches_by("a", ip(at), tcp(80)), "{at}");
        }
    });
}

#[test]
fn tiers_of_the_cluster_deny_and_accept() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        lab.policies.apply(&cluster_policy(
            "guard",
            "{tier: Admin, priority: 1, subject: {namespaces: {matchLabels: {ns: x}}}, ingress: [{action: \
             Accept, from: [{namespaces: {matchLabels: {ns: y}}}], protocols: [{tcp: {destinationPort: \
             {number: 81}}}]}, {action: Deny, from: [{namespaces: {matchLabels: {ns: y}}}]}]}",
        ));
        lab.expect(
            &[("c", "a", tcp(81)), ("out", "a", tcp(80)), ("a", "b", PING)],
            &[("c", "a", tcp(80)), ("c", "b", PING), ("c", "a", datagram(81))],
        );
        lab.policies.delete("", "guard");
        lab.expect(&[("c", "a", tcp(80))], &[]);
    });
}

#[test]
fn live_connections_are_cut_both_ways_resumed_and_nobody_elses_are_touched() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        let sockets = |lab: &Lab, from: &str, to: &str| {
            Family::ALL.map(|family| {
                let to = SocketAddr::new(lab.address(to, family), 80);
                connect(&lab.world.host(from).space, to)
            })
        };
        lab.policies.apply(&policy(
            "some",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}, {ipBlock: {cidr: \
             203.0.113.9/32}}, {ipBlock: {cidr: '2001:db8:9::9/128'}}]}]}",
        ));
        // Somebody else uses the connection mark, too.
        let state = TableState::new(TableId::new(TableFamily::Inet, "others")).chain(
            Chain::base("prerouting", ChainKind::Filter, Hook::Prerouting, -150),
            [Rule::new().any_of(field::ct_state(), &CtState::NEW).set_ct_mark_bits(STEERED, STEERED)],
        );
        Kernel::open_in(&lab.world.router).expect("nftables").apply(&state).expect("marks");
        let marks = |lab: &Lab| -> BTreeSet<u32> {
            let mut conntrack = Conntrack::open_in(&lab.world.router).expect("connection tracking");
            let tcp = |flow: &Flow| flow.original.l4.protocol() == 6;
            let flows = conntrack.list(&Filter::all()).expect("listed");
            flows.into_iter().filter(tcp).map(|flow| flow.mark).collect()
        };
        let mut cut = sockets(&lab, "out", "a");
        let mut kept = sockets(&lab, "b", "a");
        let mut beside = sockets(&lab, "out", "b");
        for stream in cut.iter_mut().chain(&mut kept).chain(&mut beside) {
            assert!(echoes(stream, knit_testbed::SOON));
        }
        // Without a word to live connections, they go on (the switch of a Network).
        lab.policies.apply(&policy(
            "some",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}]}]}",
        ));
        assert!(cut.iter_mut().all(|stream| echoes(stream, knit_testbed::SOON)));
        assert_eq!(lab.policies.follow(), Followed { cut: 2, resumed: 0 });
        assert_eq!(marks(&lab), [STEERED, STEERED | CUT].into());
        for stream in kept.iter_mut().chain(&mut beside) {
            assert!(echoes(stream, knit_testbed::SOON), "allowed as before");
        }
        for stream in &mut cut {
            assert!(!echoes(stream, NEVER), "denied now");
        }
        assert_eq!(lab.policies.follow(), Followed::default(), "nothing more to do");
        // Allowed again, the same connection goes on.
        lab.policies.delete("x", "some");
        lab.policies.apply(&policy("open", "{podSelector: {matchLabels: {pod: a}}, ingress: [{}]}"));
        lab.policies.touched = knit_policy_nft::live::Touched::All;
        assert_eq!(lab.policies.follow(), Followed { cut: 0, resumed: 2 });
        assert_eq!(marks(&lab), [STEERED].into());
        for stream in &mut cut {
            let mut late = [0; 4];
            stream.set_read_timeout(Some(knit_testbed::SOON)).expect("a timeout");
            std::io::Read::read_exact(stream, &mut late).expect("what was said while it was cut");
            assert!(echoes(stream, knit_testbed::SOON), "resumed");
        }
    });
}

#[test]
fn connections_of_the_node_are_never_cut() {
    in_namespaces(|| {
        let mut lab = Lab::new();
        let router = lab.world.router.try_clone().expect("a namespace");
        let mut streams =
            Family::ALL.map(|family| connect(&router, SocketAddr::new(lab.address("a", family), 80)));
        lab.policies.apply(&policy("none", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
        lab.policies.touched = knit_policy_nft::live::Touched::All;
        assert_eq!(lab.policies.follow(), Followed::default());
        assert!(streams.iter_mut().all(|stream| echoes(stream, knit_testbed::SOON)));
    });
}

#[test]
fn what_did_not_begin_here_does_not_pass_a_subject_and_marks_stay() {
    in_namespaces(|| {
        let mut bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        let (pod, other) = (["10.0.0.10", "fd00::10"].map(ip), ["10.0.0.11", "fd00::11"].map(ip));
        policies.pod("x/a", HERE, &pod);
        policies.pod("x/b", HERE, &other);
        policies.apply(&policy("open", "{podSelector: {matchLabels: {pod: a}}, ingress: [{}]}"));
        for (index, pod) in pod.into_iter().enumerate() {
            let client = [ip("203.0.113.9"), ip("2001:db8:9::9")][index];
            let syn = Packet::new(client, pod, tcp(80));
            assert!(bench.passes(syn));
            // Either way round: an answer without a question must not begin a connection.
            assert!(!bench.passes(Packet { flags: ACK, ..syn }));
            assert!(!bench.passes(Packet { flags: ACK, ..Packet::new(pod, client, tcp(80)) }));
            assert!(bench.passes(Packet { flags: ACK, ..Packet::new(client, other[index], tcp(80)) }));
        }
        let family = TableFamily::Inet;
        let state = TableState::new(TableId::new(family, "marks")).chain(
            Chain::base("prerouting", ChainKind::Filter, Hook::Prerouting, -150),
            [Rule::new().set_mark(Mark(0xdead_4000))],
        );
        Kernel::open_in(&bench.router).expect("nftables").apply(&state).expect("marks");
        policies.apply(&policy(
            "narrow",
            "{podSelector: {matchLabels: {pod: b}}, policyTypes: [Ingress, Egress], ingress: [{from: \
             [{podSelector: {}}], ports: [{port: 80}]}, {from: [{ipBlock: {cidr: 203.0.113.0/24}}], ports: \
             [{port: 1000, endPort: 9000}]}], egress: [{to: [{podSelector: {}}]}]}",
        ));
        let packets = [
            Packet::new(pod[0], other[0], tcp(80)),
            Packet::new(ip("203.0.113.9"), other[0], tcp(5000)),
            Packet::new(other[1], pod[1], datagram(80)),
        ];
        assert_eq!(bench.pass(&packets, |_| true), [true; 3]);
        let marks: Vec<u32> = bench.seen().into_values().collect();
        assert_eq!(marks, [0xdead_4000; 5]);
    });
}

#[test]
fn apart_from_the_node_its_addresses_are_exempt_over_the_uplink_alone() {
    in_namespaces(|| {
        let node =
            vec!["169.254.192.1/32".parse().expect("a range"), "fd6b::1/128".parse().expect("a range")];
        let router = Router::Apart { uplink: name("in"), node };
        let elsewhere = Router::Apart {
            uplink: name("uplink"),
            node: vec!["169.254.192.1/32".parse().expect("a range"), "fd6b::1/128".parse().expect("a range")],
        };
        let mut bench = Bench::new("in");
        for (router, from_node) in [(router, true), (elsewhere, false)] {
            let mut policies = Policies::new(&bench.router, router);
            let pod = ["10.0.0.10", "fd00::10"].map(ip);
            policies.pod("x/a", HERE, &pod);
            policies.apply(&policy(
                "lb",
                "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 203.0.113.0/24}}, {ipBlock: {cidr: \
                 '2001:db8:9::/64'}}]}]}",
            ));
            let to = |source: &str| {
                let source = ip(source);
                Packet::new(source, pod[usize::from(source.is_ipv6())], tcp(80))
            };
            let sources = ["169.254.192.1", "fd6b::1", "203.0.113.9", "2001:db8:9::9", "198.51.100.9"];
            let packets = sources.map(to);
            let expected = [from_node, from_node, true, true, false];
            let wanted =
                |packet: &Packet| expected[sources.iter().position(|s| ip(s) == packet.source).expect("one")];
            assert_eq!(bench.pass(&packets, wanted), expected, "steered traffic is judged by its client");
            // The node has other addresses now.
            policies.table.set_node(&["198.51.100.0/24".parse().expect("a range")]).expect("set");
            assert!(!bench.passes(packets[0]));
            assert_eq!(bench.passes(packets[4]), from_node);
            policies.table.remove().expect("removed");
        }
    });
}

#[test]
fn denied_packets_are_counted_for_each_subject_and_direction() {
    in_namespaces(|| {
        let mut bench = Bench::new("in");
        let mut policies = Policies::new(&bench.router, Router::Node);
        let (a, b, out) = (ip("10.0.0.10"), ip("10.0.0.11"), ip("203.0.113.9"));
        policies.pod("x/a", HERE, &[a]);
        policies.pod("x/b", HERE, &[b]);
        policies.apply(&policy("none", "{podSelector: {}, policyTypes: [Ingress, Egress]}"));
        let packets: Vec<Packet> = [vec![(a, out); 3], vec![(out, b); 2], vec![(a, b)], vec![(out, out)]]
            .concat()
            .into_iter()
            .map(|(from, to)| Packet::new(from, to, datagram(80)))
            .collect();
        let through = bench.pass(&packets, |packet| packet.destination == out && packet.source == out);
        assert_eq!(through, [false, false, false, false, false, false, true]);
        let counters = policies.table.counters().expect("counted");
        let packets = |direction, address| counters[&(direction, address)].packets;
        assert_eq!(packets(Direction::Egress, a), 4, "the source's side comes first");
        assert_eq!(packets(Direction::Ingress, a), 0);
        assert_eq!(packets(Direction::Egress, b), 0);
        assert_eq!(packets(Direction::Ingress, b), 2);
        assert_eq!(counters[&(Direction::Ingress, b)].bytes, 2 * 28);
    });
}
