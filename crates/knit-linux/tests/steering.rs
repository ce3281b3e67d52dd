//! What may enter a router from the node: what was steered there, and the node's own where no Service
//! elsewhere sent it.

mod support;

use std::net::{IpAddr, SocketAddr, UdpSocket};

use knit_kernel::addr::Address;
use knit_kernel::nft::Kernel;
use knit_kernel::op::Op;
use knit_kernel::route::Route;
use knit_kernel::testing::in_namespaces;
use knit_linux::{STEERED, router_uplink};
use knit_nft::{Chain, ChainKind, Family, Hook, L4Proto, Nftables, Port, Rule, TableId, TableState, field};
use support::{
    Cluster, NEVER, Node, SOON, Talk, blue, default_network, green, ip, name, net, run, tcp, udp, udp_via,
};

/// A service address that nobody else has.
const VIPS: [&str; 2] = ["10.96.0.50", "fd96::50"];

/// Translates a service address to an endpoint as a service proxy on the node would, at both hooks.
fn service(node: &Node, vip: IpAddr, endpoint: IpAddr, mark: Option<u32>) {
    let rule = match vip {
        IpAddr::V4(vip) => Rule::new().eq(field::ip_daddr(), &vip),
        IpAddr::V6(vip) => Rule::new().eq(field::ip6_daddr(), &vip),
    };
    let rule = rule.eq(field::l4proto(), &L4Proto::UDP);
    let rule = match mark {
        Some(mark) => rule.set_ct_mark_bits(mark, mark),
        None => rule,
    };
    let family = if vip.is_ipv4() { Family::Ip } else { Family::Ip6 };
    let state = TableState::new(TableId::new(family, "a-proxy"))
        .chain(
            Chain::base("in", ChainKind::Nat, Hook::Prerouting, -100),
            [rule.clone().dnat_to(endpoint, Some(Port(80)))],
        )
        .chain(
            Chain::base("out", ChainKind::Nat, Hook::Output, -100),
            [rule.dnat_to(endpoint, Some(Port(80)))],
        );
    Kernel::open_in(&node.space).expect("nftables").apply(&state).expect("a service");
}

/// The outside sends to the service addresses by way of node a.
fn ways_in(cluster: &Cluster) {
    let outside = knit_kernel::Handle::open(&cluster.outside).expect("a handle");
    let eth0 = outside.index_of(&name("eth0")).expect("eth0");
    for (vip, via) in [("10.96.0.50/32", "192.168.7.1"), ("fd96::50/128", "fd07::1")] {
        let route = Route { protocol: 4, ..Route::to(net(vip)).dev(eth0).via(ip(via)) };
        outside.apply(&[Op::create(route)]).expect("a way");
    }
}

#[test]
fn a_service_elsewhere_leads_nobody_into_a_router() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            ways_in(&cluster);
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            for (network, addresses) in [
                (blue(&cluster.a), ["10.77.0.18", "fd77::12"]),
                (green(&cluster.a), ["10.77.0.34", "fd77::22"]),
            ] {
                let pod = cluster.a.pod(&network, &network.name, &addresses).await;
                for (vip, address) in VIPS.into_iter().zip(addresses) {
                    let (vip, address) = (ip(vip), ip(address));
                    let at = SocketAddr::new(vip, 5000);
                    // The node probes its pod, whatever Services there are.
                    let probe = |what| {
                        let talk = udp(&cluster.a.space, &pod.space, address, 5000, SOON);
                        assert_ne!(talk, Talk::Silence, "{address} {what}");
                    };
                    service(&cluster.a, vip, address, None);
                    for (client, who) in [
                        (&cluster.a.space, "the node"),
                        (&plain.space, "a pod"),
                        (&cluster.outside, "the outside"),
                    ] {
                        let talk = udp_via(client, &pod.space, at, 80, NEVER);
                        assert_eq!(talk, Talk::Silence, "{who} to {address}");
                    }
                    probe("beside a Service that names it");
                    service(&cluster.a, vip, address, Some(STEERED));
                    let talk = udp_via(&cluster.a.space, &pod.space, at, 80, SOON);
                    assert_ne!(talk, Talk::Silence, "steered, the node reaches {address}");
                    for client in [&plain.space, &cluster.outside] {
                        assert_ne!(udp_via(client, &pod.space, at, 80, SOON), Talk::Silence, "steered");
                    }
                }
            }
        });
    });
}

#[test]
fn nobody_out_there_is_a_pod() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            ways_in(&cluster);
            // The outside has an address of the tenants'.
            let outside = knit_kernel::Handle::open(&cluster.outside).expect("a handle");
            let lo = outside.index_of(&name("lo")).expect("lo");
            let liars = ["10.77.0.19", "fd77::13"];
            for liar in ["10.77.0.19/32", "fd77::13/128"] {
                outside.apply(&[Op::create(Address::new(lo, net(liar)))]).expect("an address");
            }
            for (network, addresses) in [
                (blue(&cluster.a), ["10.77.0.18", "fd77::12"]),
                (green(&cluster.a), ["10.77.0.34", "fd77::22"]),
            ] {
                let pod = cluster.a.pod(&network, &network.name, &addresses).await;
                for ((vip, address), liar) in VIPS.into_iter().zip(addresses).zip(liars) {
                    service(&cluster.a, ip(vip), ip(address), Some(STEERED));
                    let at = SocketAddr::new(ip(vip), 80);
                    assert_ne!(udp_via(&cluster.outside, &pod.space, at, 80, SOON), Talk::Silence, "{vip}");
                    let any: IpAddr = if at.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
                    let listener = pod.space.run(|| UdpSocket::bind((any, 80))).expect("in").expect("bound");
                    listener.set_read_timeout(Some(NEVER)).expect("a timeout");
                    let liar =
                        cluster.outside.run(|| UdpSocket::bind((ip(liar), 0))).expect("in").expect("bound");
                    liar.send_to(b"lie", at).expect("sent");
                    assert!(
                        listener.recv_from(&mut [0; 8]).is_err(),
                        "{liar:?} came from outside to {address}"
                    );
                }
            }
        });
    });
}

#[test]
fn a_router_has_its_ends_addresses() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let mut all = Vec::new();
            for network in ["blue", "green"] {
                let own = router_uplink(&cluster.a.router(network)).expect("addresses");
                assert_eq!((own.len(), own[0].is_ipv4(), own[1].is_ipv6()), (2, true, true), "{own:?}");
                all.extend(own);
            }
            all.dedup();
            assert_eq!(all.len(), 4, "{all:?}");
            assert_eq!(router_uplink(&cluster.a.space).expect("a look"), [] as [IpAddr; 0]);
            // What the API server and DNS see of a tenant is the node.
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            let pod = cluster.a.pod(&blue(&cluster.a), "blue", &["10.77.0.18", "fd77::12"]).await;
            let state = TableState::new(TableId::new(Family::Ip, "a-proxy")).chain(
                Chain::base("in", ChainKind::Nat, Hook::Prerouting, -100),
                [Rule::new()
                    .eq(field::ip_daddr(), &std::net::Ipv4Addr::new(10, 96, 0, 1))
                    .dnat_to(ip("10.244.1.5"), None)],
            );
            Kernel::open_in(&cluster.a.space).expect("nftables").apply(&state).expect("a service");
            let talk = tcp(&pod.space, &plain.space, SocketAddr::new(ip("10.96.0.1"), 53), 53);
            assert_eq!(talk, Talk::From(ip("192.168.7.1")));
        });
    });
}
