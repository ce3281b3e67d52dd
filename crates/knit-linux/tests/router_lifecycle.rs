//! Routers: repeating, repairing, restarting, removing; ports of the node and steering into them.

mod support;

use std::net::SocketAddr;

use knit_kernel::Handle;
use knit_kernel::handle::LinkFilter;
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_linux::STEERED;
use knit_nft::{
    Chain, ChainKind, Family, Hook, L4Proto, Mark, Nftables, Port, Rule, TableId, TableState, Transaction,
    field,
};
use knit_runtime::{NetworkId, PortMapping, Protocol, Reason, Runtime};
use support::{
    Cluster, NEVER, Node, SOON, Talk, TestPod, blue, default_network, green, ip, name, ours, ours_in, run,
    tables, tables_in, udp, udp_via,
};

/// All that is ours on a node and in its routers.
fn everything(node: &Node) -> Vec<(Vec<String>, Vec<String>)> {
    let mut all = vec![(ours(node), tables(node))];
    for router in ["blue", "green"] {
        let router = node.router(router);
        all.push((ours_in(&router), tables_in(&router)));
    }
    all
}

async fn setup_all(node: &Node) {
    for network in [default_network(), blue(node), green(node)] {
        node.setup(&network).await;
    }
}

#[test]
fn setting_routers_up_again_changes_nothing() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            cluster.a.pod(&green(&cluster.a), "two", &["10.77.0.34", "fd77::22"]).await;
            let before = everything(&cluster.a);
            setup_all(&cluster.a).await;
            assert_eq!(everything(&cluster.a), before);
            cluster.a.restart();
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list").len(), 2);
            setup_all(&cluster.a).await;
            assert_eq!(everything(&cluster.a), before);
        });
    });
}

#[test]
fn routers_are_repaired_while_their_pods_talk() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let one = cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            let two = cluster.a.pod(&green(&cluster.a), "two", &["10.77.0.34", "fd77::22"]).await;
            let before = everything(&cluster.a);
            for router in ["blue", "green"] {
                let router = cluster.a.router(router);
                let handle = Handle::open(&router).expect("a handle");
                let tunnel = handle.index_of(&name("vxlan")).expect("a tunnel");
                handle.delete_link(tunnel).expect("somebody deletes it");
                let mut kernel = Kernel::open_in(&router).expect("nftables");
                let mut flush = Transaction::new();
                flush.delete_table(&TableId::new(Family::Inet, "knit"));
                kernel.commit(&flush).expect("flushed");
            }
            let node = cluster.a.handle();
            let uplink = node.index_of(&name("up-2")).expect("an uplink");
            node.delete_link(uplink).expect("somebody deletes it");
            cluster.a.restart();
            setup_all(&cluster.a).await;
            let without_numbers = |all: Vec<(Vec<String>, Vec<String>)>| -> Vec<String> {
                let words = all.into_iter().flat_map(|(words, tables)| {
                    // Without the numbers of rules: those were made again.
                    let text = |table: String| {
                        table.rsplit_once('\n').map_or(String::new(), |(text, _)| text.into())
                    };
                    words.into_iter().chain(tables.into_iter().map(text))
                });
                let strip = |text: String| {
                    let (mut out, mut rest) = (String::new(), text.as_str());
                    while let Some((head, tail)) = rest.split_once("link ") {
                        out.push_str(head);
                        rest = tail.trim_start_matches(|c: char| c.is_ascii_digit());
                    }
                    out + rest
                };
                let mut words: Vec<String> = words.map(strip).collect();
                words.sort();
                words
            };
            assert_eq!(without_numbers(everything(&cluster.a)), without_numbers(before));
            for (pod, address) in [(&one, "10.77.0.18"), (&two, "fd77::22")] {
                assert_ne!(udp(&cluster.a.space, &pod.space, ip(address), 5000, SOON), Talk::Silence);
                assert_ne!(udp(&pod.space, &cluster.outside, ip("203.0.113.9"), 5000, SOON), Talk::Silence);
            }
        });
    });
}

#[test]
fn a_router_goes_with_its_network() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            cluster.a.setup(&default_network()).await;
            let before = (ours(&cluster.a), tables(&cluster.a));
            cluster.a.setup(&blue(&cluster.a)).await;
            let pod = cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            let error = cluster.a.runtime.remove_network(&"blue".into()).await.expect_err("in use");
            assert_eq!(error.reason, Reason::InUse);
            cluster.a.runtime.detach(&pod.pod, None).await.expect("detached");
            cluster.a.runtime.remove_network(&"blue".into()).await.expect("removed");
            cluster.a.runtime.remove_network(&"blue".into()).await.expect("removed twice");
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), before);
            assert!(!cluster.a.routers.join("blue").exists());
            let error =
                cluster.a.runtime.attach(&pod.request(&blue(&cluster.a), &["10.77.0.18", "fd77::12"])).await;
            assert_eq!(error.expect_err("gone").reason, Reason::NetworkNotFound);
            // And it can come back at once.
            cluster.a.setup(&blue(&cluster.a)).await;
            cluster.a.pod(&blue(&cluster.a), "two", &["10.77.0.18", "fd77::12"]).await;
        });
    });
}

#[test]
fn a_crash_in_the_middle_leaves_nothing_in_the_way() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            // A tunnel that was made and not moved; an uplink whose other end is gone with its router.
            cluster.a.setup(&blue(&cluster.a)).await;
            let router = Handle::open(&cluster.a.router("blue")).expect("a handle");
            let tunnel = router.index_of(&name("vxlan")).expect("a tunnel");
            let back = knit_kernel::link::Change::of(tunnel).move_to(&cluster.a.space, Some(name("vx-2")));
            router.apply(&[back.into()]).expect("moved back");
            cluster.a.restart();
            cluster.a.setup(&blue(&cluster.a)).await;
            cluster.b.setup(&blue(&cluster.b)).await;
            let one = cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            let two = cluster.b.pod(&blue(&cluster.b), "two", &["10.77.0.34", "fd77::22"]).await;
            assert_ne!(udp(&one.space, &two.space, ip("10.77.0.34"), 5000, SOON), Talk::Silence);
            let left = cluster.a.handle().links(&LinkFilter { kind: Some("vxlan"), ..LinkFilter::default() });
            assert_eq!(left.expect("links"), []);
        });
    });
}

#[test]
fn an_address_is_one_pods_on_its_node() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            let before = everything(&cluster.a);
            let other = TestPod::new("two");
            let request = other.request(&green(&cluster.a), &["10.77.0.18", "fd77::13"]);
            let error =
                cluster.a.runtime.attach(&request).await.expect_err("the address is another primary's");
            assert_eq!(error.reason, Reason::Conflict, "{error}");
            assert!(error.message.contains("10.77.0.18"), "{error}");
            assert_eq!(everything(&cluster.a), before);
        });
    });
}

#[test]
fn what_a_pod_had_is_free_when_its_namespace_went_first() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let before = everything(&cluster.a);
            for restart in [false, true] {
                let pod = TestPod::new("one");
                let mut request = pod.request(&blue(&cluster.a), &["10.77.0.18", "fd77::12"]);
                let port = PortMapping {
                    protocol: Protocol::Udp,
                    host_port: 8053,
                    container_port: 53,
                    host_ip: None,
                };
                request.ports = vec![port];
                let TestPod { space, path, pod, attachments, .. } = pod.attached(&cluster.a, request).await;
                let host = name(&attachments[0].host.name);
                if restart {
                    cluster.a.restart();
                    setup_all(&cluster.a).await;
                }
                NetNs::delete(&path).expect("unmounted");
                drop(space);
                let router = Handle::open(&cluster.a.router("blue")).expect("a handle");
                eventually("the pair goes", SOON, || router.link_by_name(&host).expect("a look").is_none());
                cluster.a.runtime.detach(&pod, None).await.expect("detached");
                assert_eq!(everything(&cluster.a), before);
            }
        });
    });
}

#[test]
fn ports_of_the_node_lead_into_a_router() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            for (network, addresses, port) in [
                (blue(&cluster.a), ["10.77.0.18", "fd77::12"], 8001),
                (green(&cluster.a), ["10.77.0.34", "fd77::22"], 8002),
            ] {
                let pod = TestPod::new(&network.name);
                let mut request = pod.request(&network, &addresses);
                request.ports = vec![PortMapping {
                    protocol: Protocol::Udp,
                    host_port: port,
                    container_port: 53,
                    host_ip: None,
                }];
                let pod = pod.attached(&cluster.a, request).await;
                for (node, client) in [("192.168.7.1", "192.168.7.99"), ("fd07::1", "fd07::99")] {
                    let at = SocketAddr::new(ip(node), port);
                    let talk = udp_via(&cluster.outside, &pod.space, at, 53, SOON);
                    assert_eq!(talk, Talk::From(ip(client)), "{} {at}", network.name);
                    assert_ne!(udp_via(&cluster.a.space, &pod.space, at, 53, SOON), Talk::Silence, "{at}");
                }
            }
        });
    });
}

/// A proxy that steers a port of the node to a router's uplink, with the mark or without.
fn steer(node: &Node, port: u16, to: std::net::IpAddr, marked: bool) {
    let rule = Rule::new().eq(field::l4proto(), &L4Proto::UDP).eq(field::th_dport(), &Port(port));
    let rule = if marked { rule.set_ct_mark_bits(STEERED, STEERED) } else { rule.set_ct_mark(Mark(1)) };
    let state = TableState::new(TableId::new(Family::Ip, "steer"))
        .chain(Chain::base("steer", ChainKind::Nat, Hook::Prerouting, -105), [rule.dnat_to(to, None)]);
    Kernel::open_in(&node.space).expect("nftables").apply(&state).expect("steered");
}

#[test]
fn only_what_is_steered_enters_a_router() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            for (network, addresses, port) in [
                (blue(&cluster.a), ["10.77.0.18", "fd77::12"], 30001),
                (green(&cluster.a), ["10.77.0.34", "fd77::22"], 30002),
            ] {
                let pod = cluster.a.pod(&network, &network.name, &addresses).await;
                let router = cluster.a.router(&network.name);
                let handle = Handle::open(&router).expect("a handle");
                let uplink = handle.index_of(&name("uplink")).expect("an uplink");
                let own = handle.addresses(Some(uplink)).expect("addresses");
                let own =
                    own.iter().map(|own| own.address.addr()).find(std::net::IpAddr::is_ipv4).expect("IPv4");
                // The router balances what comes to its uplink's address.
                let balance =
                    Rule::new().eq(field::l4proto(), &L4Proto::UDP).eq(field::th_dport(), &Port(port));
                let state = TableState::new(TableId::new(Family::Ip, "proxy")).chain(
                    Chain::base("services", ChainKind::Nat, Hook::Prerouting, -100),
                    [balance.dnat_to(ip(addresses[0]), Some(Port(80)))],
                );
                Kernel::open_in(&router).expect("nftables").apply(&state).expect("balanced");
                let at = SocketAddr::new(ip("192.168.7.1"), port);
                steer(&cluster.a, port, own, false);
                assert_eq!(udp_via(&cluster.outside, &pod.space, at, 80, NEVER), Talk::Silence, "not marked");
                // A Service elsewhere that names a tenant's address is not steering.
                steer(&cluster.a, port, ip(addresses[0]), false);
                assert_eq!(udp_via(&cluster.outside, &pod.space, at, 80, NEVER), Talk::Silence, "not marked");
                steer(&cluster.a, port, own, true);
                let talk = udp_via(&cluster.outside, &pod.space, at, 80, SOON);
                assert_eq!(talk, Talk::From(ip("192.168.7.99")), "steered, with the client's own address");
            }
        });
    });
}

/// What the node's table has of a Network with this number.
fn elements_of(node: &Node, number: u32) -> Vec<String> {
    let id = TableId::new(Family::Inet, "knit");
    let table = Kernel::open_in(&node.space).expect("nftables").table(&id).expect("read").expect("a table");
    let (mut uplink, vni) = (format!("up-{number}").into_bytes(), (number << 8).to_be_bytes());
    uplink.resize(16, 0);
    let is_of = |set: &str, key: &[u8]| match set {
        _ if set.starts_with("uplink") => key.starts_with(&uplink),
        _ => set.starts_with("tunnel-") && key.starts_with(&vni),
    };
    let sets = table.sets.iter().flat_map(|(name, set)| {
        let its = set.elements.values().filter(|element| is_of(name, element.key.as_slice()));
        its.map(move |element| format!("{name}: {element:?}"))
    });
    sets.collect()
}

#[test]
fn a_network_that_was_removed_while_its_namespace_was_gone_left_its_rules_for_good() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            assert!(!elements_of(&cluster.a, 2).is_empty() && !elements_of(&cluster.a, 3).is_empty());
            let there = cluster.a.routers.join("blue");
            // The runtime is away, so nothing else holds it.
            cluster.a.restart_with(|config| config.router_directory = "/run/elsewhere".into());
            NetNs::delete(&there).expect("gone");
            let node = cluster.a.handle();
            let gone = || node.link_by_name(&name("up-2")).expect("a look").is_none();
            eventually("the router's links are gone", SOON, gone);
            cluster.a.restart();
            cluster.a.setup(&default_network()).await;
            cluster.a.runtime.remove_network(&"blue".into()).await.expect("removed");
            assert_eq!(elements_of(&cluster.a, 2), Vec::<String>::new());
            assert!(!elements_of(&cluster.a, 3).is_empty(), "another Network that is not set up yet");
        });
    });
}

#[test]
fn a_network_that_got_another_number_left_the_rules_of_its_first_one() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let numbered = |node: &Node, number| {
                let id = NetworkId::new(number).expect("a number");
                knit_runtime::Network { id, ..blue(node) }
            };
            cluster.a.setup(&numbered(&cluster.a, 7)).await;
            assert_eq!(elements_of(&cluster.a, 2), Vec::<String>::new());
            assert!(!elements_of(&cluster.a, 7).is_empty());
            // The same while the runtime was away.
            cluster.a.restart();
            cluster.a.setup(&numbered(&cluster.a, 8)).await;
            assert_eq!(elements_of(&cluster.a, 7), Vec::<String>::new());
            assert!(!elements_of(&cluster.a, 8).is_empty());
            cluster.a.setup(&default_network()).await;
            cluster.a.setup(&green(&cluster.a)).await;
            assert!(!elements_of(&cluster.a, 3).is_empty());
            let survey = cluster.a.runtime.survey().await.expect("compared");
            assert!(survey.networks.is_empty(), "{survey:?}");
        });
    });
}
