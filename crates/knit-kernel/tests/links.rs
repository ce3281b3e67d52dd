//! Links: made, read back, changed, moved, deleted, and with packets through them.

mod support;

use std::time::{Duration, Instant};

use knit_kernel::addr::Address;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{AddrGenMode, Bridge, Change, Details, NewLink, Peer, PortFlags, Vxlan};
use knit_kernel::testing::in_namespaces;
use knit_kernel::{Error, Handle, Mtu, Op, owner};
use support::*;

#[test]
fn a_veth_is_made_with_everything_at_once() {
    in_namespaces(|| {
        let (node, pod) = (node(), node());
        let br = bridge(&node, "br0");
        let new = NewLink {
            mac: Some(mac("02:00:00:00:00:01")),
            mtu: Some(Mtu::new(1400).expect("fine")),
            alias: Some(owner::alias("default/web-0")),
            master: Some(br.index),
            port: Some(PortFlags { isolated: true, hairpin: true, ..PortFlags::default() }),
            addr_gen: Some(AddrGenMode::None),
            up: true,
            ..NewLink::veth(
                name("knit-1"),
                Peer {
                    mac: Some(mac("02:00:00:00:00:02")),
                    mtu: Some(Mtu::new(1399).expect("fine")),
                    ..Peer::new(name("eth0"), pod.namespace())
                },
            )
        };
        let made = node.create_link(&new).expect("created");
        let here = node.link(made.index).expect("get").expect("there");
        assert_eq!(here.name, name("knit-1"));
        assert_eq!((here.kind.as_str(), here.up, here.mtu), ("veth", true, 1400));
        assert_eq!((here.mac, here.master), (new.mac, Some(br.index)));
        assert_eq!((here.owner(), here.group), (Some("default/web-0"), owner::GROUP));
        assert_eq!((here.port, here.addr_gen), (new.port, Some(AddrGenMode::None)));
        assert_eq!(
            node.addresses(Some(made.index)).expect("addresses"),
            [],
            "no link-local address was made"
        );
        let there = pod.link_by_name(&name("eth0")).expect("get").expect("there");
        assert_eq!((Some(there.index), there.mtu, there.up), (made.peer, 1399, false));
        assert_eq!(there.mac, Some(mac("02:00:00:00:00:02")));
        assert_eq!((there.alias, there.group), (None, 0), "marks are never where a pod can edit them");
    });
}

#[test]
fn a_pair_may_be_in_one_namespace_and_carries_packets() {
    in_namespaces(|| {
        let (a, b) = (node(), node());
        wire(&a, "to-b", "10.0.0.1/24", &b, "10.0.0.2/24");
        must_reach(&a, &b, "10.0.0.2");
        must_reach(&b, &a, "10.0.0.1");
        let peer = Peer { name: name("y"), namespace: None, mac: None, mtu: None };
        let made = a.create_link(&NewLink::veth(name("x"), peer)).expect("created");
        assert_eq!(a.link_by_name(&name("y")).expect("get").map(|link| link.index), made.peer);
    });
}

#[test]
fn a_bridge_has_its_options_and_forwards() {
    in_namespaces(|| {
        let node = node();
        let options = Bridge { ageing_seconds: 77, stp: false, multicast_snooping: false };
        let new = NewLink {
            mac: Some(mac("02:11:22:33:44:55")),
            up: true,
            ..NewLink::bridge(name("br0"), options.clone())
        };
        let br = node.create_link(&new).expect("bridge");
        let read = node.link(br.index).expect("get").expect("there");
        assert_eq!(read.details, Details::Bridge(options));
        assert_eq!(read.mac, new.mac);
        let a = pod(&node, br.index, "a", "10.1.0.1/24", PortFlags::default());
        let b = pod(&node, br.index, "b", "10.1.0.2/24", PortFlags::default());
        must_reach(&a, &b, "10.1.0.2");
        let ports =
            node.links(&LinkFilter { master: Some(br.index), ..LinkFilter::default() }).expect("list");
        let names: Vec<_> = ports.iter().map(|link| link.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    });
}

#[test]
fn isolated_ports_do_not_talk_to_each_other() {
    in_namespaces(|| {
        let node = node();
        let br = bridge(&node, "br0");
        let isolated = PortFlags { isolated: true, ..PortFlags::default() };
        let a = pod(&node, br.index, "a", "10.1.0.1/24", isolated);
        let b = pod(&node, br.index, "b", "10.1.0.2/24", isolated);
        let gateway = pod(&node, br.index, "gw", "10.1.0.254/24", PortFlags::default());
        must_reach(&a, &gateway, "10.1.0.254");
        must_reach(&gateway, &b, "10.1.0.2");
        must_not_reach(&a, &b, "10.1.0.2");
        // The same two talk as soon as the flag is gone, so it was the flag.
        let index = node.index_of(&name("b")).expect("there");
        node.apply(&[Change { port: Some(PortFlags::default()), ..Change::of(index) }.into()])
            .expect("changed");
        must_reach(&a, &b, "10.1.0.2");
    });
}

#[test]
fn port_flags_are_read_back() {
    in_namespaces(|| {
        let node = node();
        let br = bridge(&node, "br0");
        let all_off = PortFlags {
            isolated: false,
            hairpin: false,
            neigh_suppress: false,
            learning: false,
            flood: false,
            multicast_flood: false,
            broadcast_flood: false,
        };
        let peer = Peer { name: name("p1"), namespace: None, mac: None, mtu: None };
        let new = NewLink { master: Some(br.index), port: Some(all_off), ..NewLink::veth(name("p0"), peer) };
        let made = node.create_link(&new).expect("port");
        let read = || node.link(made.index).expect("get").expect("there").port;
        assert_eq!(read(), Some(all_off));
        for flags in [
            PortFlags { isolated: true, ..all_off },
            PortFlags { hairpin: true, ..all_off },
            PortFlags { neigh_suppress: true, ..all_off },
            PortFlags { learning: true, ..all_off },
            PortFlags { flood: true, ..all_off },
            PortFlags { multicast_flood: true, ..all_off },
            PortFlags { broadcast_flood: true, ..all_off },
            PortFlags::default(),
        ] {
            node.apply(&[Change { port: Some(flags), ..Change::of(made.index) }.into()]).expect("changed");
            assert_eq!(read(), Some(flags));
        }
        node.apply(&[Change { master: Some(None), ..Change::of(made.index) }.into()]).expect("released");
        assert_eq!(read(), None);
    });
}

#[test]
fn a_hairpin_port_sends_frames_back() {
    in_namespaces(|| {
        // Two addresses behind one port: what one sends to the other must leave by the port that it came in
        // by.
        let node = node();
        let br = bridge(&node, "br0");
        let [_inner, a, b] = two_behind_one_port(&node, br.index);
        must_not_reach(&a, &b, "10.1.0.2");
        let port = node.index_of(&name("port")).expect("there");
        let hairpin = PortFlags { hairpin: true, ..PortFlags::default() };
        node.apply(&[Change { port: Some(hairpin), ..Change::of(port) }.into()]).expect("changed");
        must_reach(&a, &b, "10.1.0.2");
    });
}

/// Two pods on a second bridge whose isolated ports can talk only through the outer bridge's one port.
fn two_behind_one_port(node: &Handle, br: u32) -> [Handle; 3] {
    let inner = support::node();
    let inner_br = bridge(&inner, "inner");
    let peer = Peer::new(name("uplink"), inner.namespace());
    let new = NewLink { master: Some(br), up: true, ..NewLink::veth(name("port"), peer) };
    let made = node.create_link(&new).expect("port");
    let uplink = made.peer.expect("a peer");
    let plain = PortFlags { learning: false, ..PortFlags::default() };
    inner
        .apply(&[Change {
            master: Some(Some(inner_br.index)),
            port: Some(plain),
            up: Some(true),
            ..Change::of(uplink)
        }
        .into()])
        .expect("uplink");
    // Without learning the inner bridge sends everything to its uplink, also what it could deliver itself.
    let isolated = PortFlags { isolated: true, learning: false, ..PortFlags::default() };
    let a = pod(&inner, inner_br.index, "a", "10.1.0.1/24", isolated);
    let b = pod(&inner, inner_br.index, "b", "10.1.0.2/24", isolated);
    [inner, a, b]
}

#[test]
fn a_vxlan_made_in_the_node_and_moved_to_a_router_tunnels_through_the_node() {
    in_namespaces(|| {
        let (node1, node2) = (node(), node());
        wire(&node1, "wire", "192.168.0.1/24", &node2, "192.168.0.2/24");
        let routers = [
            (&node1, "192.168.0.1", "192.168.0.2", "10.9.0.1/24", "02:09:00:00:00:01"),
            (&node2, "192.168.0.2", "192.168.0.1", "10.9.0.2/24", "02:09:00:00:00:02"),
        ]
        .map(|(node, local, remote, address, own)| {
            let router = support::node();
            let options = Vxlan { local: Some(ip(local)), port: 4790, ttl: 64, ..Vxlan::new(77) };
            let new = NewLink {
                mac: Some(mac(own)),
                mtu: Some(Mtu::new(1450).expect("fine")),
                ..NewLink::vxlan(name("vx77"), options.clone())
            };
            let made = node.create_link(&new).expect("vxlan");
            let read = node.link(made.index).expect("get").expect("there");
            assert_eq!(read.details, Details::Vxlan(options));
            let change = Change::of(made.index).move_to(router.namespace(), Some(name("tunnel")));
            node.apply(&[change.into()]).expect("moved");
            assert_eq!(node.link_by_name(&name("vx77")).expect("get"), None, "it left the node");
            let index = router.index_of(&name("tunnel")).expect("it is in the router");
            set_up(&router, index, address);
            let remote = knit_kernel::fdb::FdbEntry::remote(index, knit_kernel::Mac::ZERO, ip(remote));
            assert!(router.ensure(remote).expect("made"));
            router
        });
        must_reach(&routers[0], &routers[1], "10.9.0.2");
        must_reach(&routers[1], &routers[0], "10.9.0.1");
        // The tunnel uses the node's wire: without it there is no way.
        let wire = node1.index_of(&name("wire")).expect("there");
        node1.apply(&[Change::of(wire).down().into()]).expect("down");
        must_not_reach(&routers[0], &routers[1], "10.9.0.2");
    });
}

#[test]
fn links_change() {
    in_namespaces(|| {
        let node = node();
        let br = bridge(&node, "br0");
        let peer = Peer { name: name("b"), namespace: None, mac: None, mtu: None };
        let a = node.create_link(&NewLink::veth(name("a"), peer)).expect("veth");
        let change = Change {
            rename: Some(name("renamed")),
            alias: Some("somebody's".into()),
            group: Some(5),
            mac: Some(mac("02:00:00:00:aa:bb")),
            mtu: Some(Mtu::new(1300).expect("fine")),
            master: Some(Some(br.index)),
            addr_gen: Some(AddrGenMode::Random),
            up: Some(true),
            ..Change::of(a.index)
        };
        node.apply(&[change.into()]).expect("changed");
        let read = node.link_by_name(&name("renamed")).expect("get").expect("there");
        assert_eq!((read.index, read.mtu, read.group, read.up), (a.index, 1300, 5, true));
        assert_eq!((read.alias.as_deref(), read.owner()), (Some("somebody's"), None));
        assert_eq!((read.mac, read.master), (Some(mac("02:00:00:00:aa:bb")), Some(br.index)));
        assert_eq!(read.addr_gen, Some(AddrGenMode::Random));
        assert!(!read.running, "the other end is down");
        node.apply(&[Change::named(name("b")).up().into()]).expect("up by name");
        knit_kernel::testing::eventually("both ends run", Duration::from_secs(60), || {
            node.link(a.index).expect("get").is_some_and(|link| link.running)
        });
        let change = Change { alias: Some(String::new()), ..Change::of(a.index).down() };
        node.apply(&[change.into()]).expect("changed");
        let read = node.link(a.index).expect("get").expect("there");
        assert_eq!((read.up, read.alias), (false, None));
    });
}

#[test]
fn listings_are_filtered() {
    in_namespaces(|| {
        let node = node();
        bridge(&node, "br0");
        for (called, owner) in [("a0", Some("ns/a")), ("b0", Some("ns/b")), ("c0", None)] {
            let peer = Peer { name: name(&format!("{called}p")), namespace: None, mac: None, mtu: None };
            let new = NewLink { alias: owner.map(owner::alias), ..NewLink::veth(name(called), peer) };
            node.create_link(&new).expect("veth");
        }
        let names = |filter: LinkFilter<'_>| -> Vec<String> {
            node.links(&filter).expect("list").iter().map(|link| link.name.to_string()).collect()
        };
        assert_eq!(names(LinkFilter { kind: Some("bridge"), ..LinkFilter::default() }), ["br0"]);
        assert_eq!(names(LinkFilter { owned: true, ..LinkFilter::default() }), ["a0", "b0"]);
        assert_eq!(names(LinkFilter { owner: Some("ns/b"), ..LinkFilter::default() }), ["b0"]);
        assert_eq!(
            names(LinkFilter { group: Some(owner::GROUP), ..LinkFilter::default() }),
            ["br0", "a0", "b0", "c0"]
        );
        assert_eq!(names(LinkFilter::default()).len(), 8);
    });
}

#[test]
fn a_deleted_link_is_gone_when_the_call_returns() {
    in_namespaces(|| {
        let (node, pod) = (node(), node());
        let br = bridge(&node, "br0");
        for round in 0..5 {
            let peer = Peer::new(name("eth0"), pod.namespace());
            let new = NewLink { master: Some(br.index), up: true, ..NewLink::veth(name("v"), peer) };
            let made = node.create_link(&new).unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert!(node.delete_link(made.index).expect("deleted"));
            assert_eq!(node.link(made.index).expect("get"), None);
            assert_eq!(pod.link_by_name(&name("eth0")).expect("get"), None, "and so is the other end");
            assert!(!node.delete_link(made.index).expect("deleting again is fine"));
        }
        let error = node.delete_link(1).expect_err("lo cannot be deleted");
        assert!(matches!(error, Error::Refused { .. }) && !error.is_not_found(), "{error}");
        assert!(node.delete_link(0).is_err());
    });
}

#[test]
fn deletions_neither_wait_for_the_barrier_nor_hold_up_others() {
    in_namespaces(|| {
        let node = node();
        let made: Vec<_> = (0..8)
            .map(|i| {
                let peer = Peer { name: name(&format!("p{i}")), namespace: None, mac: None, mtu: None };
                node.create_link(&NewLink::veth(name(&format!("v{i}")), peer)).expect("veth").index
            })
            .collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for index in &made {
                scope.spawn(|| assert!(node.delete_link(*index).expect("deleted")));
            }
            assert_eq!(node.link(1).expect("meanwhile").map(|link| link.name), Some(name("lo")));
        });
        println!("8 deletions at once: {:?}", start.elapsed());
        assert_eq!(node.links(&LinkFilter::default()).expect("list").len(), 1);
    });
}

#[test]
fn groups_are_deleted_at_once_and_others_stay() {
    in_namespaces(|| {
        let node = node();
        let make = |i: u32, group| {
            let peer = Peer { name: name(&format!("p{i}")), namespace: None, mac: None, mtu: None };
            let new = NewLink { group, ..NewLink::veth(name(&format!("v{i}")), peer) };
            node.create_link(&new).expect("veth").index
        };
        let doomed: Vec<_> = (0..10).map(|i| make(i, owner::GROUP)).collect();
        make(20, 7);
        make(21, 7);
        let stays = make(30, 8);
        node.delete_links(&[&doomed[..], &[9999]].concat()).expect("deleted, and one was not there");
        assert_eq!(
            node.links(&LinkFilter { group: Some(7), ..LinkFilter::default() }).expect("list").len(),
            2
        );
        assert!(node.delete_group(7).expect("deleted"));
        assert!(!node.delete_group(7).expect("none left is fine"));
        assert!(node.delete_group(0).is_err(), "everybody's group");
        assert!(node.link(stays).expect("get").is_some());
        assert_eq!(node.links(&LinkFilter::default()).expect("list").len(), 3);
        node.delete_links(&[]).expect("nothing to do");
    });
}

#[test]
fn ensure_accepts_what_is_as_wanted_and_refuses_what_is_not() {
    in_namespaces(|| {
        let node = node();
        let wanted = NewLink {
            up: true,
            alias: Some(owner::alias("net/blue")),
            ..NewLink::bridge(name("br0"), Bridge::default())
        };
        let made = node.ensure_link(&wanted).expect("made");
        node.apply(&[Change::of(made.index).down().into()]).expect("down");
        assert_eq!(node.ensure_link(&wanted).expect("found").index, made.index);
        assert!(node.link(made.index).expect("get").expect("there").up, "and set up again");
        let other = NewLink { mtu: Some(Mtu::new(1200).expect("fine")), ..wanted.clone() };
        let error = node.ensure_link(&other).expect_err("it differs");
        let Error::Conflict { object, differences, .. } = &error else { panic!("{error}") };
        assert_eq!(object, "bridge br0");
        assert_eq!(differences.iter().map(|d| d.property).collect::<Vec<_>>(), ["mtu"]);
        assert!(error.is_exists() && !error.is_retryable());
        assert!(error.to_string().contains("mtu: 1500 found, 1200 wanted"), "{error}");
        let vxlan = NewLink::vxlan(name("br0"), Vxlan::new(1));
        let error = node.ensure_link(&vxlan).expect_err("another kind");
        assert!(error.to_string().contains("kind: \"bridge\" found, \"vxlan\" wanted"), "{error}");
        assert_eq!(node.link(made.index).expect("get").expect("untouched").mtu, 1500);
        let vxlan = NewLink::vxlan(name("vx"), Vxlan::new(1));
        let made = node.ensure_link(&vxlan).expect("made");
        assert_eq!(node.ensure_link(&vxlan).expect("found"), made);
        let other = NewLink::vxlan(name("vx"), Vxlan { port: 99, ..Vxlan::new(1) });
        assert!(node.ensure_link(&other).expect_err("another port").is_exists());
    });
}

#[test]
fn a_link_that_cannot_be_finished_is_not_left_half_made() {
    in_namespaces(|| {
        let (node, pod) = (node(), node());
        // `lo` is no bridge, so the kernel refuses to make the veth its port.
        let peer = Peer::new(name("eth0"), pod.namespace());
        let new = NewLink { master: Some(1), ..NewLink::veth(name("v"), peer.clone()) };
        assert!(matches!(node.create_link(&new), Err(Error::Refused { .. })));
        assert_eq!(node.links(&LinkFilter::default()).expect("list").len(), 1);
        assert_eq!(pod.links(&LinkFilter::default()).expect("list").len(), 1);
        // The name is taken in the other namespace: neither end is made, and what was there is as before.
        let new = NewLink::veth(name("v"), peer.clone());
        node.create_link(&new).expect("made");
        let index = pod.index_of(&name("eth0")).expect("there");
        let again = NewLink { alias: Some("x".into()), ..NewLink::veth(name("w"), peer) };
        let error = node.create_link(&again).expect_err("eth0 is taken");
        assert!(error.is_exists(), "{error}");
        assert!(error.to_string().contains("create veth w"), "{error}");
        assert_eq!(node.link_by_name(&name("w")).expect("get"), None);
        assert_eq!(pod.index_of(&name("eth0")).expect("there"), index);
        let taken =
            NewLink { alias: Some("mine".into()), up: true, ..NewLink::bridge(name("v"), Bridge::default()) };
        assert!(node.create_link(&taken).expect_err("v is taken").is_exists());
        let v = node.link_by_name(&name("v")).expect("get").expect("there");
        assert_eq!(
            (v.kind.as_str(), v.alias, v.up),
            ("veth", None, false),
            "the one that was there is untouched"
        );
    });
}

#[test]
fn bad_input_is_refused_before_anything_is_sent() {
    in_namespaces(|| {
        let node = node();
        let peer = || Peer { name: name("p"), namespace: None, mac: None, mtu: None };
        let bad = [
            NewLink { mac: Some(mac("01:00:00:00:00:00")), ..NewLink::veth(name("v"), peer()) },
            NewLink { alias: Some("x".repeat(256)), ..NewLink::veth(name("v"), peer()) },
            NewLink { port: Some(PortFlags::default()), ..NewLink::veth(name("v"), peer()) },
            NewLink::veth(name("p"), peer()),
            NewLink::vxlan(name("v"), Vxlan::new(1 << 24)),
            NewLink::vxlan(name("v"), Vxlan { port: 0, ..Vxlan::new(1) }),
        ];
        for new in bad {
            let error = node.create_link(&new).expect_err("cannot work");
            assert!(matches!(error, Error::Invalid { .. }), "{error}");
        }
        let by_name = Change { rename: Some(name("b")), ..Change::named(name("a")) };
        let ops = [Op::create(Address::new(1, net("10.0.0.1/32"))), by_name.into()];
        assert!(matches!(node.apply(&ops), Err(Error::Invalid { .. })));
        assert!(!node.addresses(Some(1)).expect("list").iter().any(|a| a.address == net("10.0.0.1/32")));
        assert_eq!(node.links(&LinkFilter::default()).expect("list").len(), 1);
        let error = Error::from(knit_kernel::NetNs::open("/run/netns/gone").expect_err("it vanished"));
        assert!(error.is_not_found() && !error.is_retryable(), "{error}");
        assert!(error.to_string().contains("/run/netns/gone"), "{error}");
    });
}
