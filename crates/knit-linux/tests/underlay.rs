//! Networks on a link of the nodes: pods on a segment that others are on, too.

mod support;

use std::net::IpAddr;
use std::time::Duration;

use knit_kernel::addr::Address as LinkAddress;
use knit_kernel::handle::{LinkFilter, NeighbourFilter};
use knit_kernel::link::{Change, Macvlan, MacvlanMode, NewLink};
use knit_kernel::netns::NetNs;
use knit_kernel::packet::frame::{self, Heard, Word};
use knit_kernel::packet::{EtherType, PacketSocket};
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::testing::{eventually, in_namespaces, namespace};
use knit_kernel::{Handle, Mac, Op, owner};
use knit_runtime::{
    AttachRequest, Network, NetworkName, Reason, Runtime, Underlay, UnderlayKind, UnderlayMode,
};
use support::segment::{Lan, beside, give, has_carrier, on_segment, pod, talks};
use support::{NEVER, SOON, Talk, TestPod, ip, name, net, run, udp};

fn on(parent: &str, mode: UnderlayMode) -> Underlay {
    let kind = UnderlayKind::Macvlan;
    Underlay { parent: parent.into(), mode, kind, duplicate_check: Duration::from_millis(60) }
}

/// The same Network, whose pods ask for their addresses that long.
fn asking(mut network: Network, patience: Duration) -> Network {
    network.underlay.as_mut().expect("underlay").duplicate_check = patience;
    network
}

/// The same Network, whose pods take their addresses without asking.
fn unchecked(network: Network) -> Network {
    asking(network, Duration::ZERO)
}

/// The same Network, whose pods ask until somebody answers, however slow the machine is.
fn patient(network: Network) -> Network {
    asking(network, SOON)
}

fn on_lan(name: &'static str, id: u32, mode: UnderlayMode) -> Network {
    on_segment(name, id, on("eth1", mode))
}

fn lan() -> Network {
    on_lan("lan", 7, UnderlayMode::Bridge)
}

/// The host of the segment gets another address.
fn also_has(space: &NetNs, address: &str) {
    give(space, "eth1", [address]);
}

fn no_longer_has(space: &NetNs, address: &str) {
    let handle = Handle::open(space).expect("a handle");
    let eth1 = handle.index_of(&name("eth1")).expect("eth1");
    handle.apply(&[Op::delete(LinkAddress::new(eth1, net(address)))]).expect("taken away");
}

fn mac_of(space: &NetNs, link: &str) -> Mac {
    let link = Handle::open(space).expect("a handle").link_by_name(&name(link)).expect("a look");
    link.expect("there").mac.expect("a MAC")
}

/// What the whole segment hears about some addresses, by a host on it.
struct Ear {
    sockets: [PacketSocket; 2],
    about: Vec<IpAddr>,
    heard: Vec<Heard>,
}

impl Ear {
    fn of(space: &NetNs, about: &[&str]) -> Self {
        let eth1 = Handle::open(space).expect("a handle").index_of(&name("eth1")).expect("eth1");
        let open = |protocol| PacketSocket::open(space, eth1, protocol).expect("a socket");
        let sockets = [EtherType::Arp, EtherType::Ipv6].map(open);
        let about: Vec<IpAddr> = about.iter().map(|text| ip(text)).collect();
        for group in about.iter().flat_map(|address| frame::groups(*address)) {
            sockets[1].join(group).expect("joined");
        }
        Self { sockets, about, heard: Vec::new() }
    }

    /// How often a MAC has said this about an address so far.
    fn count(&mut self, mac: Mac, address: &str, word: Word) -> usize {
        for socket in &self.sockets {
            let mut buffer = [0; frame::LONGEST];
            while let Some(bytes) = socket.receive(&mut buffer).expect("received") {
                self.heard.extend(frame::parse(bytes).filter(|heard| self.about.contains(&heard.address)));
            }
        }
        let said = Heard { address: ip(address), mac, word };
        self.heard.iter().filter(|heard| **heard == said).count()
    }
}

/// The names of the macvlan links in a namespace.
fn children(space: &NetNs) -> Vec<String> {
    let filter = LinkFilter { kind: Some("macvlan"), ..LinkFilter::default() };
    let links = Handle::open(space).expect("a handle").links(&filter).expect("links");
    links.into_iter().map(|link| link.name.to_string()).collect()
}

#[test]
fn pods_of_two_nodes_and_a_host_of_the_segment_talk() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let (a, b) = (&lan_.cluster.a, &lan_.cluster.b);
            for node in [a, b] {
                node.setup(&lan()).await;
                node.setup(&lan()).await;
            }
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let two = pod(a, &lan(), "two", &["10.9.0.19", "fd09::13"]).await;
            let three = pod(b, &lan(), "three", &["10.9.0.34", "fd09::22"]).await;
            for (pod, address) in [(&two, "10.9.0.19"), (&two, "fd09::13"), (&three, "10.9.0.34")] {
                talks(&one.space, &pod.space, address);
            }
            talks(&one.space, &three.space, "fd09::22");
            for (from, to, address) in [
                (&one.space, &lan_.host, "10.9.0.200"),
                (&one.space, &lan_.host, "fd09::200"),
                (&lan_.host, &three.space, "10.9.0.34"),
                (&lan_.host, &three.space, "fd09::22"),
            ] {
                talks(from, to, address);
            }
            let made = &one.attachments[0];
            let nets: Vec<String> = made.addresses.iter().map(|address| address.net.to_string()).collect();
            assert_eq!(nets, ["10.9.0.18/24", "fd09::12/64"], "the segment's prefix, not the block's");
            assert_eq!((made.mtu, made.host.name.as_str(), made.routes.len()), (1500, "", 0));
            // The same again is the same.
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            assert_eq!(a.runtime.attach(&request).await.expect("there already"), *made);
            assert_eq!(a.runtime.list(None).await.expect("a list").len(), 2);
            assert_eq!(children(&a.space), [""; 0], "nothing of it is on the node");
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.is_empty() && survey.attachments.is_empty(), "{survey:?}");
            a.runtime.check(&one.pod, Some(&one.path), None).await.expect("as it was made");
            let error = a.runtime.remove_network(&"lan".into()).await.expect_err("in use");
            assert_eq!(error.reason, Reason::InUse);
            for pod in [&one, &two] {
                a.runtime.detach(&pod.pod, None).await.expect("detached");
                a.runtime.detach(&pod.pod, None).await.expect("detached already");
                assert!(children(&pod.space).is_empty());
            }
            a.runtime.remove_network(&"lan".into()).await.expect("removed");
            assert!(!a.routers.join("lan").exists());
        });
    });
}

#[test]
fn pods_of_one_node_do_not_talk_in_private_mode() {
    in_namespaces(|| {
        run(async {
            let lan = Lan::new();
            let private = unchecked(on_lan("private", 8, UnderlayMode::Private));
            lan.cluster.a.setup(&private).await;
            let one = pod(&lan.cluster.a, &private, "one", &["10.9.0.18", "fd09::12"]).await;
            let two = pod(&lan.cluster.a, &private, "two", &["10.9.0.19", "fd09::13"]).await;
            talks(&one.space, &lan.host, "10.9.0.200");
            assert_eq!(udp(&one.space, &two.space, ip("10.9.0.19"), 7000, NEVER), Talk::Silence);
        });
    });
}

#[test]
fn two_networks_on_one_parent_keep_their_attachments_apart() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = Lan::new();
            let other = on_lan("other", 9, UnderlayMode::Bridge);
            let a = &mut lan_.cluster.a;
            a.setup(&lan()).await;
            a.setup(&other).await;
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let request = beside(&one, &other, "net2", &["10.9.0.19", "fd09::13"]);
            let one = one.attached(a, request).await;
            for restarted in [false, true] {
                if restarted {
                    a.restart();
                    a.setup(&lan()).await;
                    a.setup(&other).await;
                }
                let mut list: Vec<(NetworkName, String)> = a
                    .runtime
                    .list(None)
                    .await
                    .expect("a list")
                    .into_iter()
                    .map(|made| (made.network, made.interface.to_string()))
                    .collect();
                list.sort();
                let wanted = [("lan", "net1"), ("other", "net2")].map(|(n, i)| (n.into(), i.into()));
                assert_eq!(list, wanted, "restarted: {restarted}");
            }
            a.runtime.detach(&one.pod, Some(&"net1".parse().expect("a name"))).await.expect("detached");
            assert_eq!(children(&one.space), ["net2"]);
            a.runtime.remove_network(&"lan".into()).await.expect("nobody is on it");
            talks(&one.space, &lan_.host, "10.9.0.200");
        });
    });
}

#[test]
fn a_new_runtime_finds_what_an_earlier_one_made_and_takes_it_away() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = Lan::new();
            let a = &mut lan_.cluster.a;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let two = pod(a, &lan(), "two", &["10.9.0.19", "fd09::13"]).await;
            // Told no path, and nothing is set up yet.
            a.restart();
            let list = a.runtime.list(None).await.expect("a list");
            assert_eq!(list.len(), 2);
            assert!(list.iter().all(|made| made.network == "lan" && made.host.name.is_empty()), "{list:?}");
            a.runtime.detach(&one.pod, None).await.expect("detached");
            assert!(children(&one.space).is_empty());
            let keep = ["three".parse().expect("a sandbox")];
            let removed = a.runtime.collect_garbage(&keep).await.expect("collected");
            assert_eq!(removed.len(), 1, "the stray one");
            assert!(children(&two.space).is_empty());
        });
    });
}

#[test]
fn a_runtime_killed_between_two_steps_leaves_nothing_that_is_not_found() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = Lan::new();
            let a = &mut lan_.cluster.a;
            a.setup(&lan()).await;
            let one = TestPod::new("one");
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            // Killed when the child was there, without its mark: as the kernel makes it.
            let node = a.handle();
            let half = |pod: &TestPod| {
                let parent = node.index_of(&name("eth1")).expect("eth1");
                let mode = MacvlanMode::Bridge;
                let child = Macvlan { parent, mode, namespace: Some(&pod.space) };
                node.create_link(&NewLink::macvlan(name("net1"), child)).expect("half of it");
                let inside = pod.handle().link_by_name(&name("net1")).expect("a look").expect("there");
                assert_eq!((inside.alias, inside.group), (None, owner::GROUP));
            };
            let one = one.attached(a, request.clone()).await;
            a.runtime.detach(&one.pod, None).await.expect("detached");
            half(&one);
            a.restart();
            a.setup(&lan()).await;
            let made = a.runtime.attach(&request).await.expect("made in place of the half");
            assert_eq!(made.interface.as_str(), "net1");
            talks(&one.space, &lan_.host, "10.9.0.200");
            a.runtime.detach(&one.pod, None).await.expect("detached");
            half(&one);
            a.restart();
            a.runtime.collect_garbage(&[]).await.expect("collected");
            assert!(children(&one.space).is_empty(), "half of one is nobody's");
            assert!(children(&a.space).is_empty());
        });
    });
}

#[test]
fn a_parent_that_goes_is_told_and_its_pods_come_back_with_it() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            lan_.unplug("a");
            assert!(children(&one.space).is_empty(), "the kernel deletes children with their parent");
            let survey = a.runtime.survey().await.expect("a survey");
            let damage = survey.networks.get("lan").expect("it is damaged");
            assert!(damage.iter().any(|damage| damage.message.contains("no link eth1")), "{damage:?}");
            assert_eq!(survey.attachments.len(), 1);
            for error in [
                a.runtime.setup_network(&lan()).await.expect_err("no parent"),
                a.runtime.attach(&request).await.expect_err("no parent"),
            ] {
                assert_eq!(error.reason, Reason::NotReady, "{error}");
                assert!(error.to_string().contains("has no link eth1"), "{error}");
            }
            let status = a.runtime.status().await.expect("a status");
            let here = status.networks.iter().find(|network| network.name == "lan").expect("the Network");
            assert!(!here.ready && here.message.contains("eth1"), "{here:?}");

            lan_.plug(&a.space, "a");
            a.setup(&lan()).await;
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.is_empty(), "{survey:?}");
            assert_eq!(survey.attachments.len(), 1, "its pod is still without");
            a.runtime.attach(&request).await.expect("made again");
            talks(&one.space, &lan_.host, "10.9.0.200");

            let down = Change::named(name("eth1")).down();
            a.handle().apply(&[down.into()]).expect("down");
            let error = a.runtime.setup_network(&lan()).await.expect_err("it is down");
            assert!(error.to_string().contains("eth1 of node a is down"), "{error}");
            let survey = a.runtime.survey().await.expect("a survey");
            assert!(survey.networks.contains_key("lan") && survey.attachments.is_empty(), "{survey:?}");
            a.handle().apply(&[Change::named(name("eth1")).up().into()]).expect("up");
            has_carrier(&a.space, "eth1");
            a.setup(&lan()).await;
            talks(&one.space, &lan_.host, "10.9.0.200");
        });
    });
}

#[test]
fn what_is_damaged_in_a_pod_is_found_and_put_right() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            let handle = one.handle();
            let index = || handle.index_of(&name("net1")).expect("net1");
            let damages: [(&str, &dyn Fn()); 5] = [
                ("deleted", &|| _ = handle.delete_link(index()).expect("deleted")),
                ("down", &|| handle.apply(&[Change::of(index()).down().into()]).expect("down")),
                ("renamed", &|| {
                    let rename = Change { rename: Some(name("mine")), ..Change::of(index()) };
                    handle.apply(&[Change::of(index()).down().into(), rename.up().into()]).expect("renamed");
                }),
                ("another MAC", &|| {
                    let mac = Some("02:00:5e:00:00:09".parse().expect("a MAC"));
                    handle.apply(&[Change { mac, ..Change::of(index()) }.into()]).expect("another MAC");
                }),
                ("an address lost", &|| {
                    let lost = LinkAddress::new(index(), net("10.9.0.18/24"));
                    handle.apply(&[Op::delete(lost)]).expect("taken away");
                }),
            ];
            for (what, damage) in damages {
                damage();
                let survey = a.runtime.survey().await.expect("a survey");
                assert_eq!(survey.attachments.len(), 1, "{what}: {survey:?}");
                a.runtime.check(&one.pod, Some(&one.path), None).await.expect_err(what);
                a.runtime.attach(&request).await.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(children(&one.space), ["net1"], "{what}");
                let survey = a.runtime.survey().await.expect("a survey");
                assert!(survey.attachments.is_empty(), "{what}: {survey:?}");
                talks(&one.space, &lan_.host, "10.9.0.200");
            }
        });
    });
}

#[test]
fn a_mark_that_a_pod_forged_is_not_believed() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            let victim = pod(a, &lan(), "victim", &["10.9.0.18", "fd09::12"]).await;
            let liar = pod(a, &lan(), "liar", &["10.9.0.19", "fd09::13"]).await;
            let alias = victim.handle().link_by_name(&name("net1")).expect("a look").expect("there").alias;
            let lie = Change { alias, ..Change::named(name("net1")) };
            liar.handle().apply(&[lie.into()]).expect("a pod may do that in its own namespace");
            let list = a.runtime.list(None).await.expect("a list");
            assert_eq!(list.iter().filter(|made| made.pod.sandbox == victim.pod.sandbox).count(), 1);
            a.runtime.detach(&victim.pod, None).await.expect("detached");
            assert!(children(&victim.space).is_empty());
            assert_eq!(children(&liar.space), ["net1"], "it was not taken for the other's");
        });
    });
}

#[test]
fn an_mtu_beyond_the_parents_is_refused_and_a_smaller_one_holds() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            let error = a.runtime.setup_network(&Network { mtu: Some(9000), ..lan() }).await;
            let error = error.expect_err("eth1 has 1500");
            assert!(error.to_string().contains("9000") && error.to_string().contains("eth1"), "{error}");
            a.setup(&Network { mtu: Some(1400), ..lan() }).await;
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            assert_eq!(one.attachments[0].mtu, 1400);
            assert_eq!(one.handle().link_by_name(&name("net1")).expect("a look").expect("there").mtu, 1400);
        });
    });
}

#[test]
fn a_network_of_another_kind_under_the_same_name_takes_the_place_of_an_empty_one() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = Lan::new();
            let a = &mut lan_.cluster.a;
            a.setup(&support::default_network()).await;
            a.setup(&lan()).await;
            a.restart();
            let switched = Network { name: "lan".into(), ..support::blue(a) };
            a.setup(&switched).await;
            let one = a.pod(&switched, "one", &["10.77.0.18", "fd77::12"]).await;
            a.restart();
            let error = a.runtime.setup_network(&lan()).await.expect_err("a pod is on it");
            assert_eq!(error.reason, Reason::InUse, "{error}");
            a.runtime.detach(&one.pod, None).await.expect("detached");
            a.setup(&lan()).await;
            pod(a, &lan(), "two", &["10.9.0.19", "fd09::13"]).await;
        });
    });
}

#[test]
fn pods_were_let_onto_the_link_that_the_nodes_tunnels_go_by() {
    in_namespaces(|| {
        run(async {
            let mut lan_ = Lan::new();
            let a = &mut lan_.cluster.a;
            let on_link =
                |parent: &str| Network { underlay: Some(on(parent, UnderlayMode::Bridge)), ..lan() };
            let error =
                a.runtime.setup_network(&on_link("eth0")).await.expect_err("it has the node's address");
            assert_eq!(error.reason, Reason::Invalid, "{error}");
            assert!(error.to_string().contains("carries the node's own address"), "{error}");
            // The same below the link that has it.
            let handle = a.handle();
            let parent = handle.index_of(&name("eth1")).expect("eth1");
            let upper = Macvlan { parent, mode: MacvlanMode::Bridge, namespace: None };
            let mut upper = NewLink::macvlan(name("upper"), upper);
            upper.up = true;
            let upper = handle.create_link(&upper).expect("a link on top").index;
            handle.apply(&[Op::create(LinkAddress::new(upper, net("10.9.0.1/24")))]).expect("an address");
            a.setup(&on_link("eth1")).await;
            a.restart_with(|config| config.addresses = vec![ip("10.9.0.1")]);
            let error =
                a.runtime.setup_network(&on_link("eth1")).await.expect_err("the node's address is on top");
            assert!(error.to_string().contains("carries the node's own address"), "{error}");
        });
    });
}

#[test]
fn a_pod_got_an_address_that_another_host_of_the_segment_had() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&patient(lan())).await;
            let other = namespace();
            lan_.plug(&other, "other");
            also_has(&other, "10.9.0.201/24");
            also_has(&other, "fd09::201/64");
            let one = TestPod::new("one");
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            let mac: Mac = "02:00:5e:00:00:18".parse().expect("a MAC");
            let request = AttachRequest { mac: Some(mac), ..request };
            let has = mac_of(&lan_.host, "eth1");
            for (mine, address) in [("10.9.0.18/24", "10.9.0.18"), ("fd09::12/64", "fd09::12")] {
                also_has(&lan_.host, mine);
                let mut ear = Ear::of(&other, &["10.9.0.18", "fd09::12"]);
                let error = a.runtime.attach(&request).await.expect_err("somebody has it");
                assert_eq!(error.reason, Reason::AddressInUse, "{error}");
                assert!(error.retryable(), "with another address");
                let words =
                    format!("address {address} is already in use by {has} on the segment of link eth1");
                assert!(error.to_string().contains(&words), "{error}");
                assert_eq!((children(&one.space), children(&a.space)), (Vec::new(), Vec::new()));
                assert_eq!(a.runtime.list(None).await.expect("a list").len(), 0);
                let asked = || ear.count(mac, address, Word::Probes) > 0;
                eventually("the question went out", SOON, asked);
                for address in ["10.9.0.18", "fd09::12"] {
                    assert_eq!(ear.count(mac, address, Word::Has), 0, "it was never claimed");
                }
                talks(&other, &lan_.host, address);
                no_longer_has(&lan_.host, mine);
            }
            a.setup(&lan()).await;
            a.runtime.attach(&request).await.expect("nobody has them any more");
            talks(&lan_.host, &one.space, "10.9.0.18");
            // Repair asks again, too.
            a.setup(&patient(lan())).await;
            let handle = one.handle();
            handle.delete_link(handle.index_of(&name("net1")).expect("net1")).expect("deleted");
            also_has(&lan_.host, "10.9.0.18/24");
            let error = a.runtime.attach(&request).await.expect_err("somebody took it meanwhile");
            assert_eq!(error.reason, Reason::AddressInUse, "{error}");
            let survey = a.runtime.survey().await.expect("a survey");
            assert_eq!(survey.attachments.len(), 1, "it is still to be made again");
        });
    });
}

#[test]
fn a_node_gave_a_pod_its_own_address_on_the_parent() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            also_has(&a.space, "10.9.0.18/24");
            let one = TestPod::new("one");
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            let error = a.runtime.attach(&request).await.expect_err("the node has it");
            assert_eq!(error.reason, Reason::AddressInUse, "{error}");
            assert!(error.to_string().contains("link eth1 of this node itself"), "{error}");
            assert_eq!(children(&one.space), [""; 0]);
        });
    });
}

#[test]
fn an_address_is_asked_for_before_it_is_used_and_announced_afterwards() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&lan()).await;
            // The host of the segment knows somebody else by these addresses.
            let before = namespace();
            lan_.plug(&before, "before");
            also_has(&before, "10.9.0.18/24");
            also_has(&before, "fd09::12/64");
            talks(&lan_.host, &before, "10.9.0.18");
            talks(&lan_.host, &before, "fd09::12");
            lan_.unplug("before");
            let known = |address: &str| {
                let handle = Handle::open(&lan_.host).expect("a handle");
                let all = handle.neighbours(&NeighbourFilter::default()).expect("neighbours");
                all.into_iter().find(|there| there.address == ip(address)).and_then(|there| there.mac)
            };
            let mut ear = Ear::of(&lan_.host, &["10.9.0.18", "fd09::12"]);
            let one = pod(a, &lan(), "one", &["10.9.0.18", "fd09::12"]).await;
            let mac = one.attachments[0].mac;
            for address in ["10.9.0.18", "fd09::12"] {
                let mut said = |word| ear.count(mac, address, word);
                eventually("it was asked for three times", SOON, || said(Word::Probes) == 3);
                eventually("it was announced", SOON, || said(Word::Has) > 0);
                let of_it: Vec<Word> =
                    ear.heard.iter().filter(|heard| heard.address == ip(address)).map(|it| it.word).collect();
                assert_eq!(of_it[..4], [Word::Probes, Word::Probes, Word::Probes, Word::Has]);
                eventually("the host knows the pod by it", SOON, || known(address) == Some(mac));
            }
        });
    });
}

#[test]
fn of_two_nodes_that_ask_for_one_address_at_once_at_most_one_gets_it() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let (a, b) = (&lan_.cluster.a, &lan_.cluster.b);
            let network = asking(lan(), Duration::from_secs(1));
            a.setup(&network).await;
            b.setup(&network).await;
            let (one, two) = (TestPod::new("one"), TestPod::new("two"));
            let request = |pod: &TestPod, mac: &str| AttachRequest {
                mac: Some(mac.parse().expect("a MAC")),
                ..beside(pod, &lan(), "net1", &["10.9.0.18", "fd09::12"])
            };
            let [first, second] = [request(&one, "02:00:5e:00:00:01"), request(&two, "02:00:5e:00:00:02")];
            for _ in 0..3 {
                let (of_a, of_b) = tokio::join!(a.runtime.attach(&first), b.runtime.attach(&second));
                assert!(of_a.is_err() || of_b.is_err(), "both have it");
                for error in of_a.err().into_iter().chain(of_b.err()) {
                    assert_eq!(error.reason, Reason::AddressInUse, "{error}");
                }
                a.runtime.detach(&one.pod, None).await.expect("detached");
                b.runtime.detach(&two.pod, None).await.expect("detached");
            }
            a.runtime.attach(&first).await.expect("nobody else asks");
            b.setup(&patient(lan())).await;
            let error = b.runtime.attach(&second).await.expect_err("the other has it");
            assert_eq!(error.reason, Reason::AddressInUse, "{error}");
        });
    });
}

#[test]
fn duplicates_are_looked_for_where_ipv6_is_off_in_new_namespaces() {
    in_namespaces(|| {
        run(async {
            let lan_ = Lan::new();
            let a = &lan_.cluster.a;
            a.setup(&patient(lan())).await;
            let one = TestPod::new("one");
            let off = Sysctl::ipv6_disabled(Scope::Default);
            Sysctls::of(&one.space).expect("sysctls").set(&off, 1).expect("IPv6 off");
            let request = beside(&one, &lan(), "net1", &["10.9.0.18", "fd09::12"]);
            also_has(&lan_.host, "fd09::12/64");
            let error = a.runtime.attach(&request).await.expect_err("somebody has it");
            assert_eq!(error.reason, Reason::AddressInUse, "{error}");
            no_longer_has(&lan_.host, "fd09::12/64");
            a.setup(&lan()).await;
            let one = one.attached(a, request).await;
            talks(&lan_.host, &one.space, "fd09::12");
            talks(&lan_.host, &one.space, "10.9.0.18");
        });
    });
}
