//! Networks on a bridge of the nodes: pods are ports of it, in the midst of whatever else it connects.

mod support;

use std::net::IpAddr;
use std::time::Duration;

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Bridge, Change, Link, NewLink, Peer, PortFlags};
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{eventually, in_namespaces};
use knit_kernel::{Handle, Op, owner};
use knit_runtime::{Network, NetworkName, Reason, Runtime, Underlay, UnderlayKind, UnderlayMode};
use support::segment::{Lan, beside, give, has_carrier, on_segment, pod, talks};
use support::{NEVER, Node, SOON, Talk, TestPod, ip, name, net, run, udp};

/// A cluster whose nodes have a bridge `br1` with an address, and with a port on the segment.
fn bridged() -> Lan {
    let lan = Lan::new();
    bridge(&lan.cluster.a, ["10.9.0.1/24", "fd09::1/64"]);
    bridge(&lan.cluster.b, ["10.9.0.2/24", "fd09::2/64"]);
    lan
}

/// Gives a node its bridge.
fn bridge(node: &Node, addresses: [&str; 2]) {
    let handle = node.handle();
    let mut bridge = NewLink::bridge(name("br1"), Bridge::default());
    // It is not Knit's.
    (bridge.up, bridge.group) = (true, 0);
    let index = handle.create_link(&bridge).expect("a bridge").index;
    let port = Change { master: Some(Some(index)), ..Change::named(name("eth1")) };
    handle.apply(&[port.into()]).expect("eth1 is its port");
    give(&node.space, "br1", addresses);
    has_carrier(&node.space, "br1");
}

fn link(space: &NetNs, link: &str) -> Option<Link> {
    Handle::open(space).expect("a handle").link_by_name(&name(link)).expect("a look")
}

/// The links of a node that are ours, by their names.
fn ours(node: &Node) -> Vec<String> {
    let filter = LinkFilter { group: Some(owner::GROUP), ..LinkFilter::default() };
    let links = node.handle().links(&filter).expect("links");
    links.into_iter().map(|link| link.name.to_string()).filter(|name| name.starts_with("knit")).collect()
}

fn on_bridge(mode: UnderlayMode, patience: u64) -> Network {
    let underlay = Underlay {
        parent: "br1".into(),
        mode,
        kind: UnderlayKind::Bridge,
        duplicate_check: Duration::from_millis(patience),
    };
    on_segment("lan", 7, underlay)
}

fn lan() -> Network {
    on_bridge(UnderlayMode::Bridge, 30)
}

const ONE: [&str; 2] = ["10.9.0.18", "fd09::12"];
const TWO: [&str; 2] = ["10.9.0.19", "fd09::13"];
const THREE: [&str; 2] = ["10.9.0.34", "fd09::22"];

#[test]
fn pods_on_a_bridge_reach_each_other_their_node_other_nodes_and_the_segment() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let (a, b) = (&lan_.cluster.a, &lan_.cluster.b);
            // The rules of the default Network are in the same namespace as the bridge. Some distributions
            // have bridged packets pass those of IP.
            a.setup(&support::default_network()).await;
            for sysctl in [Sysctl::bridge_nf_call_iptables(), Sysctl::bridge_nf_call_ip6tables()] {
                let sysctls = Sysctls::of(&a.space).expect("sysctls");
                if let Err(error) = sysctls.set(&sysctl, 1) {
                    println!("{sysctl}: {error}");
                }
            }
            let before = link(&a.space, "br1").expect("br1");
            for node in [a, b] {
                node.setup(&lan()).await;
                node.setup(&lan()).await;
            }
            let first = a.pod(&support::default_network(), "first", &["10.244.1.9", "fd44::1:9"]).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            let two = pod(a, &lan(), "two", &TWO).await;
            let three = pod(b, &lan(), "three", &THREE).await;
            for n in 0..2 {
                talks(&one.space, &two.space, TWO[n]);
                talks(&one.space, &three.space, THREE[n]);
                talks(&three.space, &one.space, ONE[n]);
                talks(&one.space, &lan_.host, ["10.9.0.200", "fd09::200"][n]);
                talks(&lan_.host, &one.space, ONE[n]);
                talks(&a.space, &one.space, ONE[n]);
                talks(&one.space, &a.space, ["10.9.0.1", "fd09::1"][n]);
            }
            // The bridge is as it was, but for its ports.
            let after = link(&a.space, "br1").expect("br1");
            assert_eq!((after.mac, after.mtu), (before.mac, before.mtu));
            let made = &one.attachments[0];
            let port = link(&a.space, &made.host.name).expect("the host end");
            assert_eq!((port.index, port.master), (made.host.index, Some(before.index)));
            assert_eq!((made.host.netns_inode, made.mtu), (a.space.id().ino, 1500));
            assert_eq!(made.host.netns_path, None, "it is in the node's own namespace");
            let request = beside(&one, &lan(), "net1", &ONE);
            assert_eq!(a.runtime.attach(&request).await.expect("there already"), *made);
            // The default Network does not take them for its own.
            let mut listed: Vec<(NetworkName, String)> = a
                .runtime
                .list(None)
                .await
                .expect("a list")
                .into_iter()
                .map(|there| (there.network, there.pod.sandbox.to_string()))
                .collect();
            listed.sort();
            let wanted = [("default", "first"), ("lan", "one"), ("lan", "two")];
            assert_eq!(listed, wanted.map(|(network, pod)| (network.into(), pod.to_owned())));
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.is_empty() && survey.attachments.is_empty(), "{survey:?}");
            a.setup(&support::default_network()).await;
            talks(&a.space, &first.space, "10.244.1.9");
            a.runtime.check(&one.pod, Some(&one.path), None).await.expect("as it was made");
            talks(&one.space, &lan_.host, "10.9.0.200");
            for pod in [&one, &two] {
                a.runtime.detach(&pod.pod, None).await.expect("detached");
                assert_eq!(link(&pod.space, "net1"), None);
            }
            assert_eq!(ours(a), [first.attachments[0].host.name.clone()]);
            a.runtime.remove_network(&"lan".into()).await.expect("removed");
            let after = link(&a.space, "br1").expect("br1");
            assert_eq!((after.mac, after.mtu), (before.mac, before.mtu));
        });
    });
}

#[test]
fn pods_of_one_node_do_not_reach_each_other_by_a_bridge_in_private_mode() {
    in_namespaces(|| {
        run(async {
            let lan = bridged();
            let (a, private) = (&lan.cluster.a, on_bridge(UnderlayMode::Private, 0));
            a.setup(&private).await;
            let one = pod(a, &private, "one", &ONE).await;
            let two = pod(a, &private, "two", &TWO).await;
            talks(&one.space, &lan.host, "10.9.0.200");
            talks(&a.space, &two.space, TWO[0]);
            assert_eq!(udp(&one.space, &two.space, ip(TWO[0]), 7000, NEVER), Talk::Silence);
            assert_eq!(udp(&one.space, &two.space, ip(TWO[1]), 7000, NEVER), Talk::Silence);
        });
    });
}

#[test]
fn a_networks_smaller_mtu_is_its_pods_and_not_the_bridges() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            a.setup(&Network { mtu: Some(1400), ..lan() }).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            assert_eq!(one.attachments[0].mtu, 1400);
            assert_eq!(link(&one.space, "net1").expect("net1").mtu, 1400);
            assert_eq!(link(&a.space, "br1").expect("br1").mtu, 1500);
        });
    });
}

#[test]
fn what_is_no_bridge_is_refused() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            let up = Change::named(name("eth1")).up();
            let alone = Change { master: Some(None), ..up };
            a.handle().apply(&[alone.into()]).expect("eth1 by itself");
            let mut network = lan();
            network.underlay.as_mut().expect("underlay").parent = "eth1".into();
            let error = a.runtime.setup_network(&network).await.expect_err("it is a veth");
            assert_eq!(error.reason, Reason::Invalid, "{error}");
            let words = "eth1 of node a is not a bridge: name one, or use kind: Macvlan";
            assert!(error.to_string().contains(words), "{error}");
        });
    });
}

#[test]
fn a_port_that_was_taken_off_its_bridge_is_put_back() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            let host = one.attachments[0].host.name.clone();
            let damages: [(&str, Change<'static>); 3] = [
                ("off the bridge", Change { master: Some(None), ..Change::named(name(&host)) }),
                ("down", Change::named(name(&host)).down()),
                (
                    "isolated",
                    Change {
                        port: Some(PortFlags { isolated: true, ..PortFlags::default() }),
                        ..Change::named(name(&host))
                    },
                ),
            ];
            for (what, damage) in damages {
                a.handle().apply(&[damage.into()]).expect(what);
                let survey = a.runtime.survey().await.expect("a survey");
                let found = survey.networks.get("lan").unwrap_or_else(|| panic!("{what}: {survey:?}"));
                assert!(found.iter().all(|damage| damage.kind == "links"), "{what}: {found:?}");
                assert!(survey.attachments.is_empty(), "{what}: {survey:?}");
                a.runtime.check(&one.pod, Some(&one.path), None).await.expect_err(what);
                a.setup(&lan()).await;
                let survey = a.runtime.survey().await.expect("a survey");
                assert!(survey.networks.is_empty() && survey.attachments.is_empty(), "{what}: {survey:?}");
                a.runtime.check(&one.pod, Some(&one.path), None).await.expect(what);
                talks(&one.space, &lan_.host, "10.9.0.200");
            }
            // Without its name or its mark it is made again.
            let handle = a.handle();
            let index = || handle.index_of(&name(&host)).expect("the host end");
            let rename = |index| Change { rename: Some(name("mine")), ..Change::of(index) };
            let damages: [(&str, &dyn Fn() -> Vec<Change<'static>>); 2] = [
                // Before Linux 6.2 a link has to be down first, and not by the same request.
                ("renamed", &|| vec![Change::of(index()).down(), rename(index())]),
                ("without its mark", &|| vec![Change { alias: Some("mine".into()), ..Change::of(index()) }]),
            ];
            for (what, damage) in damages {
                for change in damage() {
                    handle.apply(&[change.into()]).expect(what);
                }
                let survey = a.runtime.survey().await.expect("a survey");
                assert_eq!(survey.attachments.len(), 1, "{what}: {survey:?}");
                a.runtime.attach(&beside(&one, &lan(), "net1", &ONE)).await.expect(what);
                assert_eq!(ours(a), std::slice::from_ref(&host), "{what}");
                talks(&one.space, &lan_.host, "10.9.0.200");
            }
        });
    });
}

#[test]
fn a_bridge_that_goes_is_told_and_gets_its_ports_back_when_it_returns() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            a.setup(&support::default_network()).await;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            let two = TestPod::new("two");
            let handle = a.handle();
            handle.delete_link(handle.index_of(&name("br1")).expect("br1")).expect("deleted");
            let survey = a.runtime.survey().await.expect("a survey");
            let damage = survey.networks.get("lan").expect("it is damaged");
            assert!(damage.iter().any(|damage| damage.message.contains("no link br1")), "{damage:?}");
            assert!(survey.attachments.is_empty(), "the pod has its interface still: {survey:?}");
            for error in [
                a.runtime.setup_network(&lan()).await.expect_err("no bridge"),
                a.runtime.attach(&beside(&two, &lan(), "net1", &TWO)).await.expect_err("no bridge"),
            ] {
                assert_eq!(error.reason, Reason::NotReady, "{error}");
            }
            assert_eq!(link(&two.space, "net1"), None);
            // What the pod sends comes in by a link of the node's own meanwhile, and gets no further.
            let net1 = one.handle().index_of(&name("net1")).expect("net1");
            for node in ["192.168.7.1/32", "fd07::1/128"] {
                let way = Route::to(net(node)).dev(net1);
                one.handle().apply(&[Op::create(way)]).expect("a route of the pod's own");
                let talk = udp(&one.space, &a.space, net(node).addr(), 7000, NEVER);
                assert_eq!(talk, Talk::Silence, "{node}");
            }
            bridge(a, ["10.9.0.1/24", "fd09::1/64"]);
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.contains_key("lan"), "{survey:?}");
            a.setup(&lan()).await;
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.is_empty() && survey.attachments.is_empty(), "{survey:?}");
            talks(&one.space, &lan_.host, "10.9.0.200");
            talks(&a.space, &one.space, ONE[1]);
        });
    });
}

/// A pair whose making was cut off.
fn half(node: &Node, pod: &TestPod, host: &str, alias: Option<String>) {
    let mut pair = NewLink::veth(name(host), Peer::new(name("net1"), &pod.space));
    pair.alias = alias;
    node.handle().create_link(&pair).expect("half of it");
}

#[test]
fn a_runtime_killed_between_two_steps_leaves_nothing_of_a_pair_that_is_not_found() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = bridged();
            let a = &mut lan_.cluster.a;
            a.setup(&support::default_network()).await;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            let request = beside(&one, &lan(), "net1", &ONE);
            let host = one.attachments[0].host.name.clone();
            let alias = link(&a.space, &host).expect("the host end").alias;
            assert_eq!(alias, Some(format!("knit:underlay 7 {host}")));
            // Killed right after the kernel made the pair, and after the host end said whose it is.
            for alias in [None, alias] {
                a.runtime.detach(&one.pod, None).await.expect("detached");
                half(a, &one, &host, alias.clone());
                a.restart();
                a.setup(&support::default_network()).await;
                a.setup(&lan()).await;
                a.runtime.attach(&request).await.expect("made in place of the half");
                talks(&one.space, &lan_.host, "10.9.0.200");
                a.runtime.detach(&one.pod, None).await.expect("detached");
                half(a, &one, &host, alias);
                a.restart();
                a.runtime.collect_garbage(&[]).await.expect("collected");
                assert_eq!(ours(a), [""; 0], "half of one is nobody's");
                assert_eq!(link(&one.space, "net1"), None);
                a.setup(&support::default_network()).await;
                a.setup(&lan()).await;
                a.runtime.attach(&request).await.expect("made");
            }
            // What is whole is found and kept.
            a.restart();
            let keep = [one.pod.sandbox.clone()];
            assert_eq!(a.runtime.collect_garbage(&keep).await.expect("collected"), []);
            let list = a.runtime.list(None).await.expect("a list");
            assert_eq!((list.len(), list[0].host.name.as_str()), (1, host.as_str()), "{list:?}");
            talks(&one.space, &lan_.host, "10.9.0.200");
            assert_eq!(a.runtime.collect_garbage(&[]).await.expect("collected").len(), 1);
            assert_eq!(ours(a), [""; 0]);
        });
    });
}

#[test]
fn nothing_is_left_on_the_node_of_a_pod_whose_namespace_is_gone() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let TestPod { space, path, pod: who, .. } = pod(a, &lan(), "one", &ONE).await;
            assert_eq!(ours(a).len(), 1);
            NetNs::delete(&path).expect("unmounted");
            drop(space);
            eventually("the host end goes with the pod's", SOON, || ours(a).is_empty());
            a.runtime.detach(&who, None).await.expect("it is gone already");
            assert!(a.runtime.list(None).await.expect("a list").is_empty());
        });
    });
}

#[test]
fn what_is_damaged_in_a_pod_on_a_bridge_is_found_and_put_right() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &ONE).await;
            let handle = one.handle();
            let index = || handle.index_of(&name("net1")).expect("net1");
            let damages: [(&str, &dyn Fn()); 3] = [
                ("deleted", &|| _ = handle.delete_link(index()).expect("deleted")),
                ("down", &|| handle.apply(&[Change::of(index()).down().into()]).expect("down")),
                ("its mark lost", &|| {
                    let alias = Some("mine".to_owned());
                    handle.apply(&[Change { alias, ..Change::of(index()) }.into()]).expect("another alias");
                }),
            ];
            for (what, damage) in damages {
                damage();
                let survey = a.runtime.survey().await.expect("a survey");
                assert_eq!(survey.attachments.len(), 1, "{what}: {survey:?}");
                a.runtime
                    .attach(&beside(&one, &lan(), "net1", &ONE))
                    .await
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(ours(a).len(), 1, "{what}");
                let survey = a.runtime.survey().await.expect("a survey");
                assert!(survey.attachments.is_empty(), "{what}: {survey:?}");
                talks(&one.space, &lan_.host, "10.9.0.200");
            }
        });
    });
}

#[test]
fn a_pod_on_a_bridge_got_an_address_that_another_host_had() {
    in_namespaces(|| {
        run(async {
            let lan_ = bridged();
            let a = &lan_.cluster.a;
            // Until somebody answers, however slow the machine is.
            let network = on_bridge(UnderlayMode::Bridge, 60_000);
            a.setup(&network).await;
            let one = TestPod::new("one");
            let of_host = link(&lan_.host, "eth1").expect("eth1").mac.expect("a MAC").to_string();
            for (address, owner) in [
                ("10.9.0.200", of_host.as_str()),
                ("fd09::200", &of_host),
                ("10.9.0.1", "link br1 of this node itself"),
            ] {
                let taken: IpAddr = ip(address);
                let both = if taken.is_ipv4() { [address, ONE[1]] } else { [ONE[0], address] };
                let error =
                    a.runtime.attach(&beside(&one, &network, "net1", &both)).await.expect_err(address);
                assert_eq!(error.reason, Reason::AddressInUse, "{address}: {error}");
                assert!(error.to_string().contains(owner), "{address}: {error}");
                assert_eq!((ours(a), link(&one.space, "net1")), (Vec::new(), None), "{address}");
            }
            a.setup(&lan()).await;
            let request = beside(&one, &lan(), "net1", &ONE);
            let one = one.attached(a, request).await;
            talks(&lan_.host, &one.space, ONE[0]);
        });
    });
}
