//! Addresses, routes, rules, neighbours, forwarding entries and sysctls: read back, and with packets that
//! follow them.

mod support;

use knit_kernel::addr::Address;
use knit_kernel::fdb::{FdbEntry, FdbPlace};
use knit_kernel::handle::{NeighbourFilter, RouteFilter};
use knit_kernel::link::{Change, NewLink, Peer, PortFlags, Vxlan};
use knit_kernel::neigh::Neighbour;
use knit_kernel::route::{Route, RouteAction};
use knit_kernel::rule::{Family, Rule, RuleAction};
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::testing::{in_namespaces, skip_for_kernel};
use knit_kernel::{Error, Mac, Op, owner};
use support::*;

#[test]
fn addresses_are_usable_at_once() {
    in_namespaces(|| {
        let (a, b) = (node(), node());
        let (index, _) = wire(&a, "a", "10.0.0.1/24", &b, "10.0.0.2/24");
        let v6 = Address::new(index, net("fd00::1/64"));
        let bare = Address::new(index, net("10.7.0.1/24")).without_prefix_route();
        a.apply(&[Op::create(v6), Op::create(bare)]).expect("added");
        let read = a.addresses(Some(index)).expect("list");
        assert!(read.contains(&v6) && !v6.tentative, "{read:?}");
        assert!(read.contains(&bare), "{read:?}");
        let routes =
            a.routes(&RouteFilter { table: Some(Route::MAIN), ..RouteFilter::default() }).expect("routes");
        assert!(routes.iter().any(|route| route.destination == net("10.0.0.0/24")));
        assert!(!routes.iter().any(|route| route.destination == net("10.7.0.0/24")), "no prefix route");
        assert!(!a.ensure(v6).expect("there as wanted"));
        let error = a.ensure(Address { no_prefix_route: false, ..bare }).expect_err("another property");
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        let b_index = b.index_of(&name("eth0")).expect("there");
        b.apply(&[Op::create(Address::new(b_index, net("fd00::2/64")))]).expect("added");
        must_reach(&a, &b, "fd00::2");
        assert!(a.remove(v6).expect("removed"));
        assert!(!a.remove(v6).expect("not there is fine"));
        assert!(!a.addresses(Some(index)).expect("list").contains(&v6));
    });
}

#[test]
fn a_routed_pod_needs_one_batch_inside_and_no_neighbour_discovery() {
    in_namespaces(|| {
        let (node, pod) = (node(), node());
        let gateway_mac = mac("02:00:00:00:00:fe");
        let peer = Peer { mac: Some(mac("02:00:00:00:00:05")), ..Peer::new(name("eth0"), pod.namespace()) };
        let new = NewLink { mac: Some(gateway_mac), up: true, ..NewLink::veth(name("knit-5"), peer) };
        let made = node.create_link(&new).expect("veth");
        let eth0 = made.peer.expect("a peer");
        let (gw4, gw6) = (ip("169.254.1.1"), ip("fe80::1"));
        let ops = [
            Change::of(1).up().into(),
            Change::of(eth0).up().into(),
            Op::create(Address::new(eth0, net("10.0.0.5/32"))),
            Op::create(Address::new(eth0, net("fd00::5/128"))),
            Op::create(Neighbour::permanent(eth0, gw4, gateway_mac)),
            Op::create(Neighbour::permanent(eth0, gw6, gateway_mac)),
            Op::create(Route::default_v4().via(gw4).dev(eth0).onlink()),
            Op::create(Route::default_v6().via(gw6).dev(eth0).onlink()),
        ];
        pod.apply(&ops).expect("one batch");
        let pod_mac = mac("02:00:00:00:00:05");
        node.apply(&[
            Op::create(Address::new(made.index, net("192.0.2.1/32"))),
            Op::create(Address::new(made.index, net("fd01::1/128"))),
            Op::create(Route::to(net("10.0.0.5/32")).dev(made.index)),
            Op::create(Route::to(net("fd00::5/128")).dev(made.index)),
            Op::create(Neighbour::permanent(made.index, ip("10.0.0.5"), pod_mac)),
            Op::create(Neighbour::permanent(made.index, ip("fd00::5"), pod_mac)),
        ])
        .expect("the node's side");
        must_reach(&pod, &node, "192.0.2.1");
        must_reach(&pod, &node, "fd01::1");
        must_reach(&node, &pod, "10.0.0.5");
        must_reach(&node, &pod, "fd00::5");
        let ours = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
        let mut read: Vec<_> =
            node.routes(&ours).expect("ours").iter().map(|route| route.destination).collect();
        read.sort();
        assert_eq!(read, [net("10.0.0.5/32"), net("fd00::5/128")]);
        let read = pod.routes(&ours).expect("ours");
        assert!(read.iter().all(|route| route.interface == Some(eth0) && route.onlink), "{read:?}");
        assert_eq!(read.iter().map(|route| route.gateway).collect::<Vec<_>>(), [Some(gw4), Some(gw6)]);
    });
}

#[test]
fn routes_are_read_back_compared_and_deleted() {
    in_namespaces(|| {
        let (a, b) = (node(), node());
        let (index, _) = wire(&a, "a", "10.0.0.1/24", &b, "10.0.0.2/24");
        let via6 = Route::to(net("10.66.0.0/16")).via(ip("fe80::9")).dev(index).onlink();
        let plain = Route::to(net("10.50.0.0/16")).via(ip("10.0.0.2"));
        let routes = [
            plain,
            via6,
            plain.metric(50),
            plain.table(1000).dev(index),
            Route::to(net("10.51.0.0/16")).action(RouteAction::Blackhole),
            Route::to(net("10.52.0.0/16")).action(RouteAction::Unreachable),
            Route::to(net("fd51::/16")).action(RouteAction::Blackhole).metric(7),
            Route::to(net("10.53.0.0/16")).action(RouteAction::Local).dev(1).table(Route::LOCAL),
        ];
        for route in routes {
            assert!(
                a.ensure(route)
                    .unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error))),
                "{route} is new"
            );
            assert!(!a.ensure(route).expect("there"), "{route} is there");
            let found = a
                .routes(&RouteFilter { table: Some(route.table), protocol: Some(owner::PROTOCOL) })
                .expect("list");
            let same = found.iter().any(|found| {
                (found.destination, found.action, found.gateway)
                    == (route.destination, route.action, route.gateway)
                    && route.metric.is_none_or(|metric| found.metric == Some(metric))
            });
            assert!(same, "{route} in {found:?}");
        }
        assert_eq!(a.routes(&RouteFilter { table: Some(4242), protocol: None }).expect("no such table"), []);
        let other = Route { gateway: Some(ip("10.0.0.3")), ..plain };
        let error = a.ensure(other).expect_err("another gateway");
        assert!(error.to_string().contains("gateway"), "{error}");
        assert!(matches!(error, Error::Conflict { .. }));
        a.apply(&[Op::replace(other)]).expect("replaced");
        assert!(!a.ensure(other).expect("there"));
        for route in [&[other], &routes[1..]].concat() {
            assert!(a.remove(route).expect("removed"), "{route}");
            assert!(!a.remove(route).expect("gone"), "{route}");
        }
        assert_eq!(
            a.routes(&RouteFilter { protocol: Some(owner::PROTOCOL), table: None }).expect("list"),
            []
        );
    });
}

#[test]
fn forwarding_follows_routes_and_rules() {
    in_namespaces(|| {
        // left -- router -- right, and a rule that sends what comes from left to a table of its own.
        let (left, router, right) = (node(), node(), node());
        let (to_left, _) = wire(&router, "left", "10.1.0.254/24", &left, "10.1.0.1/24");
        wire(&router, "right", "10.2.0.254/24", &right, "10.2.0.1/24");
        let sysctls = Sysctls::of(router.namespace()).expect("sysctls");
        sysctls.set(&Sysctl::ipv4_forwarding(), 1).expect("forwarding on");
        left.apply(&[Op::create(Route::default_v4().via(ip("10.1.0.254")))]).expect("default");
        right.apply(&[Op::create(Route::default_v4().via(ip("10.2.0.254")))]).expect("default");
        must_reach(&left, &right, "10.2.0.1");
        let closed = Route::to(net("10.2.0.0/24")).action(RouteAction::Blackhole).table(1000);
        let mut rule = Rule::new(Family::V4, 500, RuleAction::Table(1000));
        rule.iif = Some(name("left"));
        router.apply(&[Op::create(closed), Op::create(rule.clone())]).expect("applied");
        must_not_reach(&left, &right, "10.2.0.1");
        assert!(!router.ensure(rule.clone()).expect("the same rule is there"));
        assert!(router.remove(rule.clone()).expect("removed"));
        assert!(!router.remove(rule).expect("gone"));
        must_reach(&left, &right, "10.2.0.1");
        assert!(router.delete_link(to_left).expect("deleted"));
        must_not_reach(&left, &right, "10.2.0.1");
    });
}

#[test]
fn rules_are_read_back_by_owner() {
    in_namespaces(|| {
        let node = node();
        let before = node.rules(None).expect("the kernel's own").len();
        let v4 = Rule {
            from: Some(net("10.0.0.0/8")),
            to: Some(net("10.1.0.0/16")),
            iif: Some(name("lo")),
            fwmark: Some((0x10, 0xf0)),
            ..Rule::new(Family::V4, 100, RuleAction::Table(70_000))
        };
        let v6 = Rule { fwmark: Some((1, u32::MAX)), ..Rule::new(Family::V6, 101, RuleAction::Unreachable) };
        let foreign = Rule { protocol: 99, ..Rule::new(Family::V4, 102, RuleAction::Blackhole) };
        node.apply(&[Op::create(v4.clone()), Op::create(v6.clone()), Op::create(foreign.clone())])
            .expect("created");
        assert_eq!(node.rules(Some(owner::PROTOCOL)).expect("ours"), [v4.clone(), v6.clone()]);
        assert_eq!(node.rules(Some(99)).expect("theirs"), [foreign]);
        assert_eq!(node.rules(None).expect("all").len(), before + 3);
        for rule in [v4, v6] {
            assert!(node.remove(rule).expect("removed"));
        }
        assert_eq!(node.rules(Some(owner::PROTOCOL)).expect("ours"), []);
    });
}

#[test]
fn permanent_neighbours_replace_discovery() {
    in_namespaces(|| {
        let (a, b) = (node(), node());
        let (index, _) = wire(&a, "a", "10.0.0.1/24", &b, "10.0.0.2/24");
        let wrong = Neighbour::permanent(index, ip("10.0.0.2"), mac("02:de:ad:00:00:01"));
        assert!(a.ensure(wrong).expect("made"));
        assert!(!a.ensure(wrong).expect("there"));
        let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), interface: Some(index) };
        assert_eq!(a.neighbours(&ours).expect("ours"), [wrong]);
        must_not_reach(&a, &b, "10.0.0.2");
        let eth0 = b.link_by_name(&name("eth0")).expect("get").expect("there");
        let right = Neighbour { mac: eth0.mac, ..wrong };
        let error = a.ensure(right).expect_err("another MAC is there");
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        a.apply(&[Op::replace(right)]).expect("replaced");
        assert_eq!(a.neighbours(&ours).expect("ours"), [right]);
        must_reach(&a, &b, "10.0.0.2");
        assert!(a.remove(right).expect("removed"));
        assert!(!a.neighbours(&ours).expect("ours").contains(&right));
    });
}

#[test]
fn forwarding_entries_steer_frames() {
    in_namespaces(|| {
        let node = node();
        let br = bridge(&node, "br0");
        // Without learning and flooding, frames go only where an entry says.
        let quiet = PortFlags { learning: false, flood: false, ..PortFlags::default() };
        let a = pod(&node, br.index, "a", "10.1.0.1/24", quiet);
        let b = pod(&node, br.index, "b", "10.1.0.2/24", quiet);
        must_not_reach(&a, &b, "10.1.0.2");
        let mut entries = Vec::new();
        for (called, pod) in [("a", &a), ("b", &b)] {
            let eth0 = pod.link_by_name(&name("eth0")).expect("get").expect("there");
            let port = node.index_of(&name(called)).expect("there");
            entries.push(FdbEntry::port(port, eth0.mac.expect("ethernet")));
        }
        for entry in &entries {
            assert!(node.ensure(*entry).expect("made"));
            assert!(!node.ensure(*entry).expect("there"));
            assert!(node.fdb(Some(entry.interface)).expect("list").contains(entry));
        }
        must_reach(&a, &b, "10.1.0.2");
        let moved = FdbEntry { interface: entries[0].interface, ..entries[1] };
        assert!(matches!(node.ensure(moved), Err(Error::Conflict { .. })), "behind another port");
        assert!(node.remove(entries[1]).expect("removed"));
        assert!(!node.remove(entries[1]).expect("gone"));
        assert!(!node.fdb(None).expect("list").contains(&entries[1]));
    });
}

#[test]
fn vxlan_entries_name_the_remote_node() {
    in_namespaces(|| {
        let node = node();
        let vx = node.create_link(&NewLink::vxlan(name("vx"), Vxlan::new(5))).expect("vxlan").index;
        let known = FdbEntry::remote(vx, mac("02:00:00:00:00:01"), ip("192.0.2.1"));
        let flood = ["192.0.2.2", "192.0.2.3"].map(|remote| FdbEntry::remote(vx, Mac::ZERO, ip(remote)));
        node.apply(&[Op::create(known), Op::create(flood[0]), Op::create(flood[1])]).expect("created");
        let read = node.fdb(Some(vx)).expect("list");
        assert_eq!(read.len(), 3, "{read:?}");
        for entry in [known, flood[0], flood[1]] {
            assert!(read.contains(&entry), "{entry} in {read:?}");
        }
        let moved = FdbEntry { place: FdbPlace::Remote(ip("192.0.2.9")), ..known };
        assert!(matches!(node.ensure(moved), Err(Error::Conflict { .. })));
        node.apply(&[Op::replace(moved)]).expect("replaced");
        assert!(node.fdb(Some(vx)).expect("list").contains(&moved));
        for entry in [moved, flood[0], flood[1]] {
            assert!(node.remove(entry).expect("removed"), "{entry}");
        }
        assert_eq!(node.fdb(Some(vx)).expect("list"), []);
    });
}

#[test]
fn a_batch_goes_on_after_a_refusal_and_names_what_failed() {
    in_namespaces(|| {
        let node = node();
        let ops = [
            Op::create(Address::new(1, net("10.0.0.1/32"))),
            Op::create(Address::new(4711, net("10.0.0.2/32"))),
            Op::create(Route::to(net("10.9.0.0/16")).via(ip("203.0.113.1"))),
            Op::create(Address::new(1, net("10.0.0.3/32"))),
        ];
        let error = node.apply(&ops).expect_err("two cannot work");
        let Error::Refused { of, failures, namespace, .. } = &error else { panic!("{error}") };
        assert_eq!((*of, namespace), (4, &node.namespace().to_string()));
        assert_eq!(failures.iter().map(|failure| failure.index).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(failures[0].operation, "create address 10.0.0.2/32 on link 4711");
        assert_eq!(failures[1].operation, "create route to 10.9.0.0/16 via 203.0.113.1");
        assert!(failures[1].refusal.message.is_some(), "the kernel's own words");
        assert!(error.to_string().contains("2 of 4 operations failed"), "{error}");
        let have: Vec<_> = node.addresses(Some(1)).expect("list").iter().map(|a| a.address).collect();
        assert!(have.contains(&net("10.0.0.1/32")) && have.contains(&net("10.0.0.3/32")), "{have:?}");
    });
}

#[test]
fn long_batches_are_split() {
    in_namespaces(|| {
        let node = node();
        let route = |i: u32| {
            Route::to(net(&format!("10.{}.{}.0/24", i / 256, i % 256))).action(RouteAction::Blackhole)
        };
        let ops: Vec<_> = (0..1000).map(|i| Op::create(route(i))).collect();
        node.apply(&ops).expect("all");
        let ours = RouteFilter { protocol: Some(owner::PROTOCOL), table: None };
        assert_eq!(node.routes(&ours).expect("list").len(), 1000);
        let error = node.apply(&ops).expect_err("all are there");
        let Error::Refused { failures, .. } = &error else { panic!("{error}") };
        assert_eq!(failures.len(), 1000);
        assert_eq!(failures[999].index, 999);
        assert!(error.is_exists());
    });
}

#[test]
fn bad_objects_are_refused_before_anything_is_sent() {
    in_namespaces(|| {
        let node = node();
        let good = Op::create(Route::to(net("10.1.0.0/16")).action(RouteAction::Blackhole));
        let bad = [
            Op::create(Route::to(net("10.1.0.1/16")).dev(1)),
            Op::create(Route::to(net("10.1.0.0/16"))),
            Op::create(Route::to(net("fd00::/8")).via(ip("10.0.0.1"))),
            Op::create(Route::to(net("10.2.0.0/16")).via(ip("10.0.0.1")).onlink()),
            Op::create(Route { source: Some(ip("fd00::1")), ..Route::to(net("10.2.0.0/16")).dev(1) }),
            Op::create(Rule {
                from: Some(net("fd00::/8")),
                ..Rule::new(Family::V4, 1, RuleAction::Table(1))
            }),
            Op::create(Rule {
                to: Some(net("10.0.0.1/8")),
                ..Rule::new(Family::V4, 1, RuleAction::Table(1))
            }),
            Op::create(Rule {
                fwmark: Some((0x100, 0xff)),
                ..Rule::new(Family::V4, 1, RuleAction::Table(1))
            }),
            Op::create(Rule::new(Family::V4, 1, RuleAction::Table(0))),
            Op::create(Neighbour::permanent(1, ip("10.0.0.1"), Mac::ZERO)),
            Op::create(FdbEntry::port(1, mac("01:00:00:00:00:00"))),
        ];
        for op in bad {
            let error = node.apply(&[good.clone(), op.clone()]).expect_err("cannot work");
            assert!(matches!(error, Error::Invalid { .. }), "{op}: {error}");
        }
        let ours = RouteFilter { protocol: Some(owner::PROTOCOL), table: None };
        assert_eq!(node.routes(&ours).expect("list"), [], "not even the good one was sent");
    });
}

#[test]
fn sysctls_are_those_of_the_namespace() {
    in_namespaces(|| {
        let (a, b) = (node(), node());
        let (in_a, in_b) = (Sysctls::of(a.namespace()).expect("a"), Sysctls::of(b.namespace()).expect("b"));
        let forwarding = Sysctl::ipv4_forwarding();
        assert_eq!(in_a.get(&forwarding).expect("get"), "0");
        in_a.set(&forwarding, 1).expect("set");
        assert_eq!(
            (in_a.get(&forwarding).expect("a"), in_b.get(&forwarding).expect("b")),
            ("1".into(), "0".into())
        );
        wire(&a, "wire.1", "10.0.0.1/24", &b, "10.0.0.2/24");
        let link = name("wire.1");
        in_a.set_all(&[
            (Sysctl::rp_filter(Scope::Link(&link)), "2".into()),
            (Sysctl::accept_ra(Scope::Link(&link)), "2".into()),
            (Sysctl::ipv6_disabled(Scope::Default), "1".into()),
        ])
        .expect("set");
        assert_eq!(in_a.get(&Sysctl::rp_filter(Scope::Link(&link))).expect("get"), "2");
        assert_eq!(in_a.get(&Sysctl::ipv6_disabled(Scope::Default)).expect("get"), "1");
        let error = in_a.set(&Sysctl::rp_filter(Scope::Link(&name("gone"))), 1).expect_err("no such link");
        assert!(error.is_not_found(), "{error}");
        assert!(error.to_string().contains("net/ipv4/conf/gone/rp_filter to 1"), "{error}");
        assert!(matches!(in_a.set(&forwarding, "many"), Err(Error::Sysctl { .. })));
        match in_a.get(&Sysctl::bridge_nf_call_iptables()) {
            Ok(_) => {
                in_a.set(&Sysctl::bridge_nf_call_iptables(), 0).expect("set");
                assert_eq!(in_a.get(&Sysctl::bridge_nf_call_iptables()).expect("get"), "0");
            }
            Err(error) if error.is_not_found() => {
                skip_for_kernel("br_netfilter, or it is not loaded");
            }
            Err(error) => panic!("{error}"),
        }
    });
}
