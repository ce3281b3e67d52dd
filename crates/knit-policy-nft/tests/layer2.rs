//! Against the kernel, on a bridge: pods of one segment are judged although no router is between them.

mod support;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::Handle;
use knit_kernel::testing::{eventually, in_namespaces, skip_for_kernel};
use knit_policy::model::{Protocol, Traffic};
use knit_policy_nft::Router;
use knit_policy_nft::live::Followed;
use knit_testbed::{SOON, ip, name};
use knit_types::Family;
use support::cluster::{HERE, Policies, policy};
use support::probe::{connect, echoes, reaches};
use support::world::World;

const HOSTS: [(&str, &str, &str); 3] =
    [("a", "10.0.0.10", "fd00::10"), ("b", "10.0.0.11", "fd00::11"), ("c", "10.0.0.12", "fd00::12")];

const NEVER: Duration = Duration::from_millis(300);

fn lab() -> Option<(World, Policies)> {
    let Some(world) = World::bridged(&HOSTS) else {
        skip_for_kernel("br_netfilter, which shows bridged packets to IP rules");
        return None;
    };
    world.serve();
    let router = Router::Apart { uplink: name("uplink"), node: Vec::new() };
    let mut policies = Policies::new(&world.router, router);
    for (host, who) in [("a", "x/a"), ("b", "x/b"), ("c", "y/c")] {
        policies.pod(who, HERE, &world.host(host).addresses);
    }
    Some((world, policies))
}

#[track_caller]
fn through(world: &World, policies: &mut Policies, from: &str, to: &str, traffic: Traffic) -> bool {
    let both = Family::ALL.map(|family| {
        let to: IpAddr = world.host(to).addresses[usize::from(family == Family::V6)];
        let before = policies.denied();
        reaches(&world.host(from).space, to, traffic, || policies.denied() > before)
    });
    assert_eq!(both[0], both[1], "{from} to {to}, {traffic}: the families differ");
    both[0]
}

#[test]
fn pods_of_one_bridge_are_judged_and_neighbours_are_found() {
    in_namespaces(|| {
        let Some((world, mut policies)) = lab() else { return };
        let (web, other) = (Traffic::Port(Protocol::Tcp, 80), Traffic::Port(Protocol::Udp, 81));
        policies.apply(&policy(
            "web",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress], ingress: [{from: \
             [{podSelector: {}}], ports: [{port: 80}]}]}",
        ));
        // The first packet of each needs the neighbour's MAC: discovery passes (rule 24).
        for (from, to, traffic, expected) in [
            ("b", "a", web, true),
            ("c", "a", web, false),
            ("b", "a", other, false),
            ("b", "a", Traffic::Other, false),
            ("b", "c", other, true),
            ("a", "b", web, false),
            ("a", "c", other, false),
        ] {
            let found = through(&world, &mut policies, from, to, traffic);
            assert_eq!(found, expected, "{from} to {to}, {traffic}");
        }
        // The router's own address is on the bridge, too.
        let before = policies.denied();
        let own = ip("10.0.0.1");
        assert!(!reaches(&world.host("a").space, own, Traffic::Other, || policies.denied() > before));
        assert!(reaches(&world.host("b").space, own, Traffic::Other, || false));
    });
}

#[test]
fn connections_on_a_bridge_are_cut() {
    in_namespaces(|| {
        let Some((world, mut policies)) = lab() else { return };
        policies.apply(&policy("open", "{podSelector: {matchLabels: {pod: a}}, ingress: [{}]}"));
        let mut streams =
            ["10.0.0.10", "fd00::10"].map(|to| connect(&world.host("b").space, SocketAddr::new(ip(to), 80)));
        assert!(streams.iter_mut().all(|stream| echoes(stream, SOON)));
        policies.apply(&policy("open", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress]}"));
        assert_eq!(policies.follow(), Followed { cut: 2, resumed: 0 });
        assert!(streams.iter_mut().all(|stream| !echoes(stream, NEVER)));
    });
}

/// Packets to many, and those of link-local addresses, would pass by an isolated pod's address.
#[test]
fn nothing_goes_round_the_addresses_of_subjects() {
    in_namespaces(|| {
        let Some((world, mut policies)) = lab() else { return };
        let (a, b) = (world.host("a"), world.host("b"));
        let local = |host: &support::world::Host| {
            let handle = Handle::open(&host.space).expect("a handle");
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            let addresses = handle.addresses(Some(eth0)).expect("listed");
            let found =
                addresses.into_iter().map(|found| found.address.addr()).find_map(|address| match address {
                    IpAddr::V6(v6) if v6.is_unicast_link_local() => Some(v6),
                    _ => None,
                });
            (found.expect("a link-local address"), eth0)
        };
        let ((there, _), (_, eth0)) = (local(a), local(b));
        let link_local = SocketAddr::V6(std::net::SocketAddrV6::new(there, 80, 0, eth0));
        let many: [SocketAddr; 3] = [
            SocketAddr::new(ip("10.0.0.255"), 80),
            SocketAddr::new(ip("255.255.255.255"), 80),
            SocketAddr::V6(std::net::SocketAddrV6::new("ff02::1".parse().expect("all"), 80, 0, eth0)),
        ];
        // How many of them are answered by a: it listens at port 80.
        let answered = |to: SocketAddr| {
            let bind = || UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
            let socket = b.space.run(bind).expect("entered").expect("a socket");
            socket.set_broadcast(true).expect("broadcast");
            socket.set_read_timeout(Some(NEVER)).expect("a timeout");
            let mut heard = false;
            // Some of those in the network answer; the question is whether a does.
            for _ in 0..3 {
                socket.send_to(b"anybody?", to).expect("sent");
                while let Ok((_, from)) = socket.recv_from(&mut [0; 16]) {
                    heard |= a.addresses.contains(&from.ip()) || from.ip() == IpAddr::from(there);
                }
                if heard {
                    break;
                }
            }
            heard
        };
        for to in many.into_iter().chain([link_local]) {
            // Link-local addresses are usable after a second or two.
            eventually(&format!("{to}: as long as no policy acts here"), SOON, || answered(to));
        }
        policies.apply(&policy("none", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress]}"));
        policies.touched = knit_policy_nft::live::Touched::All;
        for to in many.into_iter().chain([link_local]) {
            assert!(!answered(to), "{to}");
        }
    });
}
