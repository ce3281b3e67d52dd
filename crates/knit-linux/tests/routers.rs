//! Networks with routers of their own: one switched, one routed, with the same addresses, beside the default
//! Network.

mod support;

use std::net::SocketAddr;

use knit_kernel::testing::in_namespaces;
use knit_runtime::Runtime;
use support::{
    Cluster, NEVER, Node, SOON, Talk, TestPod, blue, default_network, green, ip, run, tcp, udp, udp_via,
};

/// Pods of one tenant: two on node a, one on node b.
async fn three(
    cluster: &Cluster,
    network: impl Fn(&Node) -> knit_runtime::Network,
    a: u8,
    b: u8,
) -> [TestPod; 3] {
    let name = network(&cluster.a).name;
    let pod = async |node: &Node, number: u8, place: &str| {
        let addresses = [format!("10.77.0.{number}"), format!("fd77::{number:x}")];
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        node.pod(&network(node), &format!("{name}-{place}"), &addresses).await
    };
    [pod(&cluster.a, a, "one").await, pod(&cluster.a, a + 1, "two").await, pod(&cluster.b, b, "three").await]
}

fn addresses(pod: &TestPod) -> [std::net::IpAddr; 2] {
    let addresses = &pod.attachments[0].addresses;
    [addresses[0].net.addr(), addresses[1].net.addr()]
}

#[test]
fn pods_of_a_network_reach_each_other_and_nobody_else() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let blues = three(&cluster, blue, 18, 34).await;
            let greens = three(&cluster, green, 34, 18).await;
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            // The same addresses in both, each reaching its own.
            for pods in [&blues, &greens] {
                for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 1)] {
                    for (source, target) in addresses(&pods[from]).into_iter().zip(addresses(&pods[to])) {
                        let talk = udp(&pods[from].space, &pods[to].space, target, 5000, SOON);
                        assert_eq!(talk, Talk::From(source), "{source} to {target}");
                        let to_port = SocketAddr::new(target, 5001);
                        let talk = tcp(&pods[from].space, &pods[to].space, to_port, 5001);
                        assert_eq!(talk, Talk::From(source), "{source} to {target}");
                    }
                }
            }
            // Node a reaches its own pods of both, and from them answers come back.
            for pod in [&blues[0], &greens[0]] {
                for target in addresses(pod) {
                    assert_ne!(
                        udp(&cluster.a.space, &pod.space, target, 5000, SOON),
                        Talk::Silence,
                        "{target}"
                    );
                }
            }
            // Nothing crosses: blue 10.77.0.18 is on a, green 10.77.0.18 is on b.
            for (from, to) in [(&blues, &greens), (&greens, &blues)] {
                for target in addresses(&to[1]) {
                    assert_eq!(
                        udp(&from[0].space, &to[1].space, target, 5002, NEVER),
                        Talk::Silence,
                        "{target}"
                    );
                }
            }
            // Nor between a tenant and the default Network, or nodes, or the other router's uplink.
            for pod in [&blues[0], &greens[0]] {
                for target in ["10.244.1.5", "fd44::1:5"] {
                    assert_eq!(
                        udp(&pod.space, &plain.space, ip(target), 5002, NEVER),
                        Talk::Silence,
                        "{target}"
                    );
                }
                for target in addresses(pod) {
                    assert_eq!(udp(&plain.space, &pod.space, target, 5002, NEVER), Talk::Silence, "{target}");
                }
                for target in ["192.168.7.1", "fd07::1"] {
                    assert_eq!(
                        udp(&pod.space, &cluster.a.space, ip(target), 5002, NEVER),
                        Talk::Silence,
                        "{target}"
                    );
                }
                assert_eq!(udp(&pod.space, &cluster.b.space, ip("192.168.7.2"), 5002, NEVER), Talk::Silence);
            }
            for (network, other) in [("blue", &greens[0]), ("green", &blues[0])] {
                let router = cluster.a.router(network);
                let handle = knit_kernel::Handle::open(&router).expect("a handle");
                for address in handle.addresses(None).expect("addresses") {
                    let target = address.address.addr();
                    if target.is_loopback() || addresses(other).contains(&target) {
                        continue;
                    }
                    // The gateway is its own router's, too; that one answers nothing either.
                    assert_eq!(
                        udp(&other.space, &router, target, 5003, NEVER),
                        Talk::Silence,
                        "{network} {target}"
                    );
                }
                // The node's own ends of both uplinks.
                let node = cluster.a.handle();
                for address in node.addresses(None).expect("addresses") {
                    let target = address.address.addr();
                    let uplink =
                        target.to_string().starts_with("169.254.") || target.to_string().starts_with("fd6b:");
                    if uplink {
                        let talk = udp(&other.space, &cluster.a.space, target, 5004, NEVER);
                        assert_eq!(talk, Talk::Silence, "{target}");
                    }
                }
            }
        });
    });
}

#[test]
fn a_pod_with_several_networks() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            // One primary after another: the others are further interfaces.
            for (number, primary) in ["default", "blue", "green"].into_iter().enumerate() {
                let mut pod = TestPod::new(&format!("many-{primary}"));
                let nets = [
                    (default_network(), ["10.244.1.5", "fd44::1:5"]),
                    (blue(&cluster.a), ["10.77.0.18", "fd77::12"]),
                    (green(&cluster.a), ["10.77.0.34", "fd77::22"]),
                ];
                let overlapping = primary != "default";
                for (place, (network, addresses)) in nets.iter().enumerate() {
                    // Blue and green have the same subnets, so a pod has only one of them.
                    let skip = if overlapping { *network.name != *primary && place != 0 } else { place == 2 };
                    if skip {
                        continue;
                    }
                    let mut request = pod.request(network, addresses);
                    request.interface = format!("net{place}").parse().expect("a name");
                    request.default_route = network.name == primary;
                    pod = pod.attached(&cluster.a, request).await;
                }
                assert_eq!(pod.attachments.len(), 2);
                let listed = cluster.a.runtime.list(Some(&pod.pod.sandbox)).await.expect("a list");
                assert_eq!(listed.len(), 2);
                let (network, name) = (default_network(), format!("plain{number}"));
                let plain = cluster.b.pod(&network, &name, &["10.244.2.5", "fd44::2:5"]).await;
                assert_eq!(
                    udp(&pod.space, &plain.space, ip("10.244.2.5"), 5000, SOON),
                    Talk::From(ip("10.244.1.5"))
                );
                assert_eq!(
                    udp(&pod.space, &plain.space, ip("fd44::2:5"), 5000, SOON),
                    Talk::From(ip("fd44::1:5"))
                );
                let world = udp(&pod.space, &cluster.outside, ip("203.0.113.9"), 5000, SOON);
                assert_eq!(world, Talk::From(ip("192.168.7.1")), "by {primary}");
                cluster.a.runtime.check(&pod.pod, None, None).await.expect("whole");
                cluster.a.runtime.detach(&pod.pod, None).await.expect("detached");
                cluster.b.runtime.detach(&plain.pod, None).await.expect("detached");
                assert_eq!(cluster.a.runtime.list(None).await.expect("a list"), []);
            }
        });
    });
}

#[test]
fn the_outside_and_services_are_reached_where_allowed() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            // A service of the default Network, as a proxy would make it.
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            let far = cluster.b.pod(&default_network(), "far", &["10.244.2.5", "fd44::2:5"]).await;
            service(&cluster.a, "10.96.0.1", "10.244.1.5");
            service(&cluster.a, "fd96::1", "fd44::2:5");
            service(&cluster.a, "10.96.0.2", "10.244.1.5");
            let blue_pod = cluster.a.pod(&blue(&cluster.a), "blue", &["10.77.0.18", "fd77::12"]).await;
            let green_pod = cluster.a.pod(&green(&cluster.a), "green", &["10.77.0.34", "fd77::22"]).await;
            for pod in [&blue_pod, &green_pod] {
                for (world, node) in [("203.0.113.9", "192.168.7.1"), ("2001:db8:99::9", "fd07::1")] {
                    let talk = udp(&pod.space, &cluster.outside, ip(world), 5000, SOON);
                    assert_eq!(talk, Talk::From(ip(node)), "{world}");
                }
                let at = |address: &str| SocketAddr::new(ip(address), 5000);
                assert_ne!(udp_via(&pod.space, &plain.space, at("10.96.0.1"), 5000, SOON), Talk::Silence);
                assert_ne!(udp_via(&pod.space, &far.space, at("fd96::1"), 5000, SOON), Talk::Silence);
                assert_eq!(udp_via(&pod.space, &plain.space, at("10.96.0.2"), 5000, NEVER), Talk::Silence);
            }
            // The same source port from both to the same place.
            let socket = |pod: &TestPod| {
                let bound =
                    pod.space.run(|| std::net::UdpSocket::bind("0.0.0.0:5555")).expect("in").expect("bound");
                bound.set_read_timeout(Some(SOON)).expect("a timeout");
                bound
            };
            let world = cluster.outside.run(|| std::net::UdpSocket::bind("203.0.113.9:7000")).expect("in");
            let world = world.expect("bound");
            world.set_read_timeout(Some(SOON)).expect("a timeout");
            let both = [socket(&blue_pod), socket(&green_pod)];
            for (number, socket) in both.iter().enumerate() {
                socket.send_to(&[number as u8], "203.0.113.9:7000").expect("sent");
            }
            for _ in 0..2 {
                let mut buffer = [0; 8];
                let (length, from) = world.recv_from(&mut buffer).expect("it arrives");
                world.send_to(&buffer[..length], from).expect("answered");
            }
            for (number, socket) in both.iter().enumerate() {
                let mut buffer = [0; 8];
                let (length, _) = socket.recv_from(&mut buffer).expect("an answer");
                assert_eq!(&buffer[..length], &[number as u8], "each gets its own");
            }
            // Without leave, no outside.
            for network in [blue(&cluster.a), green(&cluster.a)] {
                let mut network = network;
                network.outside = false;
                cluster.a.setup(&network).await;
            }
            for pod in [&blue_pod, &green_pod] {
                assert_eq!(udp(&pod.space, &cluster.outside, ip("203.0.113.9"), 5001, NEVER), Talk::Silence);
                assert_eq!(
                    udp(&pod.space, &cluster.outside, ip("2001:db8:99::9"), 5001, NEVER),
                    Talk::Silence
                );
            }
        });
    });
}

#[test]
fn tunnels_take_nothing_from_pods() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            let bad = cluster.a.pod(&blue(&cluster.a), "bad", &["10.77.0.18", "fd77::12"]).await;
            let worse = cluster.a.pod(&green(&cluster.a), "worse", &["10.77.0.34", "fd77::22"]).await;
            let victim = cluster.b.pod(&green(&cluster.b), "victim", &["10.77.0.18", "fd77::12"]).await;
            let listener =
                victim.space.run(|| std::net::UdpSocket::bind("0.0.0.0:6000")).expect("in").expect("bound");
            let frame = vxlan(3, [0x06, b'v', 192, 168, 7, 2], "10.77.0.40", "10.77.0.18", 6000);
            let arrives = |from: &knit_kernel::NetNs, wait| {
                let socket = from.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
                socket.send_to(&frame, "192.168.7.2:4789").expect("sent");
                listener.set_read_timeout(Some(wait)).expect("a timeout");
                listener.recv(&mut [0; 64]).is_ok()
            };
            cluster.a.take_over();
            assert!(arrives(&cluster.a.space, SOON), "the frame is right: a node's arrives");
            for (pod, name) in [(&plain, "plain"), (&bad, "blue"), (&worse, "green")] {
                assert!(!arrives(&pod.space, NEVER), "{name}");
            }
            assert!(arrives(&cluster.a.space, SOON), "and still does");
        });
    });
}

/// A tunnel's payload: an Ethernet frame with a datagram.
fn vxlan(vni: u32, to: [u8; 6], source: &str, target: &str, port: u16) -> Vec<u8> {
    let v4 = |text: &str| text.parse::<std::net::Ipv4Addr>().expect("an address").octets();
    let mut packet = vec![8, 0, 0, 0];
    packet.extend((vni << 8).to_be_bytes());
    packet.extend(to);
    packet.extend([0x0a, 9, 9, 9, 9, 9]);
    packet.extend([8, 0]);
    let mut header = vec![0x45, 0, 0, 20 + 8 + 4, 0, 0, 0, 0, 64, 17, 0, 0];
    header.extend(v4(source));
    header.extend(v4(target));
    let sum: u32 = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(header);
    packet.extend(port.to_be_bytes());
    packet.extend(port.to_be_bytes());
    packet.extend([0, 12, 0, 0]);
    packet.extend(b"evil");
    packet
}

/// Translates an address as a service proxy on the node would.
fn service(node: &Node, vip: &str, endpoint: &str) {
    use knit_kernel::nft::Kernel;
    use knit_nft::{Chain, ChainKind, Family, Hook, Nftables, Rule, TableId, TableState, field};
    let name = format!("proxy-{}", vip.replace([':', '.'], "-"));
    let rule = match ip(vip) {
        std::net::IpAddr::V4(vip) => Rule::new().eq(field::ip_daddr(), &vip),
        std::net::IpAddr::V6(vip) => Rule::new().eq(field::ip6_daddr(), &vip),
    };
    let family = if ip(vip).is_ipv4() { Family::Ip } else { Family::Ip6 };
    let state = TableState::new(TableId::new(family, name)).chain(
        Chain::base("services", ChainKind::Nat, Hook::Prerouting, -100),
        [rule.dnat_to(ip(endpoint), None)],
    );
    Kernel::open_in(&node.space).expect("nftables").apply(&state).expect("a service");
}
