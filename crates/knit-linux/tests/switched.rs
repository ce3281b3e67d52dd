//! A switched Network: the traps of a bridge, one test each.

mod support;

use std::net::{IpAddr, SocketAddr};

use knit_kernel::addr::Address;
use knit_kernel::handle::NeighbourFilter;
use knit_kernel::link::Change;
use knit_kernel::neigh::Neighbour;
use knit_kernel::nft::Kernel;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{eventually, in_namespaces, skip_for_kernel};
use knit_kernel::{Handle, NetNs, Op, owner};
use knit_nft::{Chain, ChainKind, Family, Hook, NatFlags, Nftables, Rule, TableId, TableState, field};
use support::{Cluster, NEVER, SOON, Talk, TestPod, blue, ip, name, net, run, tcp, udp, udp_from, udp_via};

async fn blues(cluster: &Cluster) -> [TestPod; 3] {
    [
        cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await,
        cluster.a.pod(&blue(&cluster.a), "two", &["10.77.0.19", "fd77::13"]).await,
        cluster.b.pod(&blue(&cluster.b), "three", &["10.77.0.34", "fd77::22"]).await,
    ]
}

/// Translates a service's address in a router, as a proxy there would: to `endpoint`, and for `hairpin` and
/// remote clients from the router's own address.
fn service(router: &NetNs, vip: &str, endpoint: &str, source: Option<&str>) {
    let (family, to, from) = match ip(vip) {
        IpAddr::V4(vip) => (Family::Ip, Rule::new().eq(field::ip_daddr(), &vip), 4),
        IpAddr::V6(vip) => (Family::Ip6, Rule::new().eq(field::ip6_daddr(), &vip), 6),
    };
    let hooked = match (from, ip(endpoint)) {
        (4, IpAddr::V4(endpoint)) => Rule::new().eq(field::ip_daddr(), &endpoint),
        (_, IpAddr::V6(endpoint)) => Rule::new().eq(field::ip6_daddr(), &endpoint),
        _ => panic!("two families"),
    };
    let mut state = TableState::new(TableId::new(family, "services")).chain(
        Chain::base("services", ChainKind::Nat, Hook::Prerouting, -100),
        [to.dnat_to(ip(endpoint), None)],
    );
    if let Some(source) = source {
        state = state.chain(
            Chain::base("sources", ChainKind::Nat, Hook::Postrouting, 90),
            [hooked.snat_to(ip(source), NatFlags::default())],
        );
    }
    Kernel::open_in(router).expect("nftables").apply(&state).expect("a service");
}

/// Whether bridged packets pass the router's hooks on this kernel.
fn filters_bridges(router: &NetNs) -> bool {
    let sysctls = Sysctls::of(router).expect("sysctls");
    let on = sysctls.get(&Sysctl::bridge_nf_call_iptables()).is_ok_and(|value| value == "1");
    if !on {
        skip_for_kernel("br_netfilter, or does not let this namespace set it");
    }
    on
}

#[test]
fn services_work_on_a_bridge() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [one, two, three] = blues(&cluster).await;
            let router = cluster.a.router("blue");
            if !filters_bridges(&router) {
                return;
            }
            let at = |port| SocketAddr::new(ip("10.96.0.10"), port);
            let at6 = |port| SocketAddr::new(ip("fd96::10"), port);
            // To a pod of the same node, and to one of another: the client keeps its address.
            service(&router, "10.96.0.10", "10.77.0.19", None);
            service(&router, "fd96::10", "fd77::22", None);
            assert_eq!(udp_via(&one.space, &two.space, at(5000), 5000, SOON), Talk::From(ip("10.77.0.18")));
            assert_eq!(tcp(&one.space, &two.space, at(5001), 5001), Talk::From(ip("10.77.0.18")));
            assert_eq!(udp_via(&one.space, &three.space, at6(5000), 5000, SOON), Talk::From(ip("fd77::12")));
            // A pod that reaches itself: back out of the port that it came in by.
            service(&router, "10.96.0.10", "10.77.0.18", Some("10.77.0.17"));
            assert_eq!(tcp(&one.space, &one.space, at(5002), 5002), Talk::From(ip("10.77.0.17")));
        });
    });
}

#[test]
fn the_routers_own_address_is_the_source_that_remote_pods_answer() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [_, _, three] = blues(&cluster).await;
            let router = cluster.a.router("blue");
            // What the router itself sends to a pod of another node, from its own address and from the
            // gateway's.
            for (own, gateway, target) in
                [("10.77.0.17", "10.77.0.1", "10.77.0.34"), ("fd77::11", "fd77::1", "fd77::22")]
            {
                let talk = |source: &str, wait| {
                    let to = SocketAddr::new(ip(target), 5000);
                    let server =
                        three.space.run(|| std::net::UdpSocket::bind(to)).expect("in").expect("bound");
                    let client = router
                        .run(|| std::net::UdpSocket::bind((ip(source), 0)))
                        .expect("in")
                        .expect("bound");
                    client.send_to(b"x", to).expect("sent");
                    server.set_read_timeout(Some(SOON)).expect("a timeout");
                    client.set_read_timeout(Some(wait)).expect("a timeout");
                    let (_, from) = server.recv_from(&mut [0; 8]).expect("it arrives");
                    server.send_to(b"y", from).expect("answered");
                    client.recv(&mut [0; 8]).is_ok()
                };
                assert!(talk(own, SOON), "{own}");
                assert!(
                    !talk(gateway, NEVER),
                    "the answer to {gateway} ends at the other node's own gateway"
                );
            }
        });
    });
}

#[test]
fn a_bridge_whose_mac_changes_keeps_its_neighbours() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [one, _, three] = blues(&cluster).await;
            let router = Handle::open(&cluster.a.router("blue")).expect("a handle");
            let neighbours = || {
                let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
                let mut all: Vec<String> =
                    router.neighbours(&ours).expect("neighbours").iter().map(|n| format!("{n:?}")).collect();
                all.sort();
                all
            };
            let before = neighbours();
            assert!(before.len() >= 32, "a whole block of the other node: {}", before.len());
            // Another address of the router's own means another MAC, which flushes.
            let mut network = blue(&cluster.a);
            network.router_addresses = vec![ip("10.77.0.20"), ip("fd77::14")];
            cluster.a.setup(&network).await;
            assert_eq!(neighbours(), before);
            assert_eq!(
                udp(&one.space, &three.space, ip("10.77.0.34"), 5000, SOON),
                Talk::From(ip("10.77.0.18"))
            );
            // And somebody else's flush is repaired.
            let bridge = router.index_of(&name("bridge")).expect("the bridge");
            let mac = knit_kernel::Mac([0x0a, 0, 0, 0, 0, 1]);
            router.apply(&[Change { mac: Some(mac), ..Change::of(bridge) }.into()]).expect("changed");
            assert!(neighbours().len() < before.len(), "this kernel flushes neighbours of a bridge");
            cluster.a.setup(&network).await;
            assert_eq!(neighbours(), before);
        });
    });
}

#[test]
fn a_switched_pod_sends_only_as_itself() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [bad, good, far] = blues(&cluster).await;
            let handle = bad.handle();
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            for lie in ["10.77.0.25/32", "fd77::19/128"] {
                handle
                    .apply(&[Op::create(Address::new(eth0, net(lie)))])
                    .expect("a pod may say what it likes");
            }
            // Neighbours written by hand, so that only the datagram itself is tried.
            for (pod, address) in
                [(&good, "10.77.0.19"), (&good, "fd77::13"), (&far, "10.77.0.34"), (&far, "fd77::22")]
            {
                let mac = knit_kernel::Mac(pod.attachments[0].mac.octets());
                handle
                    .apply(&[Op::replace(Neighbour::permanent(eth0, ip(address), mac))])
                    .expect("a neighbour");
            }
            for (lie, truth, server, to) in [
                ("10.77.0.25", "10.77.0.18", &good, "10.77.0.19"),
                ("10.77.0.25", "10.77.0.18", &far, "10.77.0.34"),
                ("fd77::19", "fd77::12", &good, "fd77::13"),
                ("fd77::19", "fd77::12", &far, "fd77::22"),
            ] {
                let to = SocketAddr::new(ip(to), 5000);
                assert!(!udp_from(&bad.space, ip(lie), &server.space, to, NEVER), "{lie}");
                assert!(udp_from(&bad.space, ip(truth), &server.space, to, SOON), "{truth}");
            }
            // Another MAC.
            let own = knit_kernel::Mac(bad.attachments[0].mac.octets());
            for mac in
                [knit_kernel::Mac(good.attachments[0].mac.octets()), knit_kernel::Mac([2, 0, 0, 0, 0, 9])]
            {
                handle.apply(&[Change { mac: Some(mac), ..Change::of(eth0) }.into()]).expect("another MAC");
                let to = SocketAddr::new(ip("10.77.0.34"), 5001);
                assert!(!udp_from(&bad.space, ip("10.77.0.18"), &far.space, to, NEVER));
            }
            handle.apply(&[Change { mac: Some(own), ..Change::of(eth0) }.into()]).expect("its own MAC");
            assert_ne!(udp(&bad.space, &good.space, ip("10.77.0.19"), 5002, SOON), Talk::Silence);
        });
    });
}

#[test]
fn neighbours_are_not_poisoned() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [bad, good, _] = blues(&cluster).await;
            let handle = bad.handle();
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            // `bad` claims the address of a pod that is on the other node, and answers for it.
            for lie in ["10.77.0.34/32", "fd77::22/128"] {
                handle
                    .apply(&[Op::create(Address::new(eth0, net(lie)))])
                    .expect("a pod may say what it likes");
            }
            let far = [ip("10.77.0.34"), ip("fd77::22")];
            let wanted = knit_kernel::Mac([0x0a, 2, 10, 77, 0, 34]);
            for address in far {
                assert_ne!(udp(&good.space, &bad.space, address, 5000, NEVER), Talk::From(address));
                eventually(&format!("somebody answers for {address}"), SOON, || {
                    let seen = good.handle().neighbours(&NeighbourFilter::default()).expect("neighbours");
                    seen.iter().any(|seen| seen.address == address && seen.mac.is_some())
                });
                let seen = good.handle().neighbours(&NeighbourFilter::default()).expect("neighbours");
                let seen = seen.iter().find(|seen| seen.address == address).expect("it was asked for");
                assert_eq!(seen.mac, Some(wanted), "the bridge answered for {address}, and not the liar");
            }
            // And for an address that nobody has.
            handle.apply(&[Op::create(Address::new(eth0, net("10.77.0.26/32")))]).expect("another lie");
            assert_eq!(udp(&good.space, &bad.space, ip("10.77.0.26"), 5000, NEVER), Talk::Silence);
            let seen = good.handle().neighbours(&NeighbourFilter::default()).expect("neighbours");
            let liar = knit_kernel::Mac(bad.attachments[0].mac.octets());
            assert!(
                !seen.iter().any(|seen| seen.address == ip("10.77.0.26") && seen.mac == Some(liar)),
                "{seen:?}"
            );
        });
    });
}

#[test]
fn large_packets_cross_the_tunnel() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let [one, _, three] = blues(&cluster).await;
            assert_eq!(one.attachments[0].mtu, 1450);
            let server =
                three.space.run(|| std::net::UdpSocket::bind("10.77.0.34:5000")).expect("in").expect("bound");
            let client =
                one.space.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
            server.set_read_timeout(Some(SOON)).expect("a timeout");
            // The largest datagram that is not cut, and one that is.
            for size in [1450 - 28, 4000] {
                client.send_to(&vec![7; size], "10.77.0.34:5000").expect("sent");
                let mut buffer = vec![0; 9000];
                assert_eq!(server.recv(&mut buffer).expect("it arrives"), size);
            }
        });
    });
}
