//! The tunnels' port: nodes only, each with what is its own, and nobody translates or forwards it.

mod support;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::handle::NeighbourFilter;
use knit_kernel::nft::Kernel;
use knit_kernel::op::Op;
use knit_kernel::route::Route;
use knit_kernel::testing::in_namespaces;
use knit_nft::{Chain, ChainKind, Family, Hook, L4Proto, Nftables, Port, Rule, TableId, TableState, field};
use knit_runtime::{PortMapping, Protocol, Reason, Runtime};
use support::{
    Cluster, NEVER, Node, SOON, Talk, TestPod, blue, default_network, green, ip, name, net, run, tcp, udp,
    udp_via,
};

/// A service address that nobody else has.
const VIPS: [&str; 2] = ["10.96.0.50", "fd96::50"];

/// Translates UDP to `vip`, to any port or to this one, as a service proxy would at both hooks.
fn service(node: &Node, vip: IpAddr, frontend: Option<u16>, endpoint: SocketAddr) {
    let rule = match vip {
        IpAddr::V4(vip) => Rule::new().eq(field::ip_daddr(), &vip),
        IpAddr::V6(vip) => Rule::new().eq(field::ip6_daddr(), &vip),
    };
    let rule = rule.eq(field::l4proto(), &L4Proto::UDP);
    let rule = match frontend {
        Some(port) => rule.eq(field::th_dport(), &Port(port)),
        None => rule,
    };
    let rule = rule.dnat_to(endpoint.ip(), Some(Port(endpoint.port())));
    let family = if vip.is_ipv4() { Family::Ip } else { Family::Ip6 };
    let masquerade = Rule::new().masquerade(knit_nft::NatFlags::NONE);
    let state = TableState::new(TableId::new(family, "a-proxy"))
        .chain(Chain::base("in", ChainKind::Nat, Hook::Prerouting, -100), [rule.clone()])
        .chain(Chain::base("out", ChainKind::Nat, Hook::Output, -100), [rule])
        .chain(Chain::base("post", ChainKind::Nat, Hook::Postrouting, 100), [masquerade]);
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
fn a_service_that_names_a_nodes_tunnel_leads_nobody_into_it() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            ways_in(&cluster);
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            for (vip, own, other) in
                [(VIPS[0], "192.168.7.1", "192.168.7.2"), (VIPS[1], "fd07::1", "fd07::2")]
            {
                for (space, endpoint) in [(&cluster.a.space, own), (&cluster.b.space, other)] {
                    let at = SocketAddr::new(ip(vip), 5000);
                    for (client, who) in [(&pod.space, "a pod"), (&cluster.outside, "the outside")] {
                        service(&cluster.a, ip(vip), None, SocketAddr::new(ip(endpoint), 4789));
                        let talk = udp_via(client, space, at, 4789, NEVER);
                        assert_eq!(talk, Talk::Silence, "{who} by {vip} to {endpoint}");
                        // The Service itself is fine: another port of the node answers.
                        service(&cluster.a, ip(vip), None, SocketAddr::new(ip(endpoint), 4788));
                        let talk = udp_via(client, space, SocketAddr::new(ip(vip), 5001), 4788, SOON);
                        assert_ne!(talk, Talk::Silence, "{who} by {vip} to {endpoint}");
                    }
                }
            }
        });
    });
}

/// Pods of one tenant, one on each node.
async fn pair(
    cluster: &Cluster,
    network: impl Fn(&Node) -> knit_runtime::Network,
    a: u8,
    b: u8,
) -> [TestPod; 2] {
    let title = network(&cluster.a).name;
    let pod = async |node: &Node, number: u8| {
        let addresses = [format!("10.77.0.{number}"), format!("fd77::{number:x}")];
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        node.pod(&network(node), &format!("{title}-{number}"), &addresses).await
    };
    [pod(&cluster.a, a).await, pod(&cluster.b, b).await]
}

fn crosses(pods: &[TestPod; 2], what: &str) {
    for place in [0, 1] {
        let target = pods[1].attachments[0].addresses[place].net.addr();
        let talk = udp(&pods[0].space, &pods[1].space, target, 5000, SOON);
        assert_ne!(talk, Talk::Silence, "{target}, {what}");
        tcp(&pods[0].space, &pods[1].space, SocketAddr::new(target, 5001), 5001);
    }
}

#[test]
fn a_service_on_the_tunnels_port_takes_nothing_of_the_tunnel() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let thief = cluster.b.pod(&default_network(), "thief", &["10.244.2.5", "fd44::2:5"]).await;
            // Whoever sends to 4789/UDP of either node is led to the thief, on both nodes and at both hooks.
            for (node, at) in [(&cluster.a, "192.168.7.2"), (&cluster.b, "192.168.7.2")] {
                service(node, ip(at), Some(4789), SocketAddr::new(ip("10.244.2.5"), 4789));
            }
            let stolen = thief.space.run(|| UdpSocket::bind("0.0.0.0:4789")).expect("in").expect("bound");
            stolen.set_read_timeout(Some(NEVER)).expect("a timeout");
            crosses(&pair(&cluster, &blue, 18, 34).await, "blue");
            crosses(&pair(&cluster, &green, 34, 18).await, "green");
            assert!(stolen.recv_from(&mut [0; 64]).is_err(), "a frame was led to a pod");
        });
    });
}

#[test]
fn a_host_port_on_the_tunnels_port_is_refused_before_anything_is_made() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            for (network, addresses) in [
                (default_network(), ["10.244.2.5", "fd44::2:5"]),
                (green(&cluster.b), ["10.77.0.18", "fd77::12"]),
            ] {
                let pod = TestPod::new(&format!("thief-{}", network.name));
                let mut request = pod.request(&network, &addresses);
                let mapping =
                    |protocol| PortMapping { protocol, host_port: 4789, container_port: 4789, host_ip: None };
                request.ports = vec![mapping(Protocol::Udp)];
                let before = support::tables(&cluster.b);
                let error = cluster.b.runtime.attach(&request).await.expect_err("the port is the tunnels'");
                assert_eq!(error.reason, Reason::Invalid, "{error}");
                assert!(error.to_string().contains("4789/UDP"), "{error}");
                assert_eq!(support::tables(&cluster.b), before);
                // TCP is another port.
                request.ports = vec![mapping(Protocol::Tcp)];
                cluster.b.runtime.attach(&request).await.expect("attached");
                cluster.b.runtime.detach(&request.pod, None).await.expect("detached");
            }
            crosses(&pair(&cluster, &blue, 18, 34).await, "blue");
        });
    });
}

/// A datagram inside an Ethernet frame inside a tunnel.
struct Frame {
    vni: u32,
    to: [u8; 6],
    source: IpAddr,
    target: IpAddr,
    port: u16,
}

impl Frame {
    fn bytes(&self) -> Vec<u8> {
        let mut packet = vec![8, 0, 0, 0];
        packet.extend((self.vni << 8).to_be_bytes());
        packet.extend(self.to);
        packet.extend([0x0a, 9, 9, 9, 9, 9]);
        let mut datagram = Vec::new();
        datagram.extend(self.port.to_be_bytes());
        datagram.extend(self.port.to_be_bytes());
        datagram.extend([0, 12, 0, 0]);
        datagram.extend(b"evil");
        match (self.source, self.target) {
            (IpAddr::V4(source), IpAddr::V4(target)) => {
                packet.extend([8, 0]);
                packet.extend(v4_header(source, target));
            }
            (IpAddr::V6(source), IpAddr::V6(target)) => {
                packet.extend([0x86, 0xdd]);
                packet.extend([0x60, 0, 0, 0, 0, 12, 17, 64]);
                packet.extend(source.octets());
                packet.extend(target.octets());
                let sum = v6_checksum(source, target, &datagram);
                datagram[6..8].copy_from_slice(&sum.to_be_bytes());
            }
            _ => panic!("one family"),
        }
        packet.extend(datagram);
        packet
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn v4_header(source: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut header = vec![0x45, 0, 0, 20 + 8 + 4, 0, 0, 0, 0, 64, 17, 0, 0];
    header.extend(source.octets());
    header.extend(target.octets());
    let checksum = fold(sum(&header));
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

fn v6_checksum(source: Ipv6Addr, target: Ipv6Addr, datagram: &[u8]) -> u16 {
    fold(sum(&source.octets()) + sum(&target.octets()) + 12 + 17 + sum(datagram))
}

/// Whether a frame that `from` sends to node b's tunnel comes out at a pod there.
fn arrives(from: &NetNs, to: IpAddr, frame: &Frame, pod: &TestPod, wait: Duration) -> bool {
    arrives_by(from, SocketAddr::new(to, 4789), frame, pod, wait)
}

/// Whether a frame that `from` sends to any address and port comes out at a pod.
fn arrives_by(from: &NetNs, to: SocketAddr, frame: &Frame, pod: &TestPod, wait: Duration) -> bool {
    let any: IpAddr = if frame.target.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let listener = pod.space.run(|| UdpSocket::bind((any, frame.port))).expect("in").expect("bound");
    listener.set_read_timeout(Some(wait)).expect("a timeout");
    let any: IpAddr = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let socket = from.run(|| UdpSocket::bind((any, 0))).expect("in").expect("bound");
    socket.send_to(&frame.bytes(), to).expect("sent");
    listener.recv(&mut [0; 64]).is_ok()
}

/// The MAC of node b's router in a routed Network.
fn router_mac(cluster: &Cluster, network: &str) -> [u8; 6] {
    let router = knit_kernel::Handle::open(&cluster.b.router(network)).expect("a handle");
    let tunnel = router.link_by_name(&name("vxlan")).expect("a look").and_then(|link| link.mac);
    tunnel.expect("a tunnel").0
}

#[test]
fn a_frame_that_a_service_leads_to_another_node_comes_out_nowhere() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            ways_in(&cluster);
            let pod = cluster.a.pod(&default_network(), "one", &["10.244.1.5", "fd44::1:5"]).await;
            let [_, victim] = pair(&cluster, &green, 34, 18).await;
            // Right in all but who sends it: its source is node a's, and masquerading makes it look like node
            // a's.
            let (source, target) = (ip("10.77.0.41"), victim.attachments[0].addresses[0].net.addr());
            let frame = Frame { vni: 3, to: router_mac(&cluster, "green"), source, target, port: 6000 };
            cluster.a.take_over();
            let end = ip("192.168.7.2");
            assert!(arrives(&cluster.a.space, end, &frame, &victim, SOON), "the frame is right");
            service(&cluster.a, ip(VIPS[0]), None, SocketAddr::new(end, 4789));
            let vip = SocketAddr::new(ip(VIPS[0]), 5000);
            for (client, who) in [(&pod.space, "a pod"), (&cluster.outside, "the outside")] {
                assert!(!arrives_by(client, vip, &frame, &victim, NEVER), "{who} by a Service");
            }
            assert!(!arrives(&pod.space, end, &frame, &victim, NEVER), "a pod, masqueraded");
            assert!(arrives(&cluster.a.space, end, &frame, &victim, SOON), "the node's own still does");
        });
    });
}

/// A pod with `hostNetwork` is in the node's namespace.
#[test]
fn any_program_of_a_node_sent_frames_as_pods_of_every_network() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let greens = pair(&cluster, &green, 34, 18).await;
            let blues = pair(&cluster, &blue, 18, 34).await;
            let router = router_mac(&cluster, "green");
            for (end, vni, to, pods, sources) in [
                ("192.168.7.2", 3, router, &greens, ["10.77.0.41", "fd77::29"]),
                ("192.168.7.2", 2, blues[1].attachments[0].mac.octets(), &blues, ["10.77.0.25", "fd77::19"]),
            ] {
                for place in [0, 1] {
                    let target = pods[1].attachments[0].addresses[place].net.addr();
                    let frame = Frame { vni, to, source: ip(sources[place]), target, port: 6000 };
                    let socket =
                        cluster.a.space.run(|| UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
                    let error = socket.send_to(&frame.bytes(), (end, 4789)).expect_err("it is dropped");
                    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "Network {vni}: {error}");
                }
            }
            // What pods send is the kernel's to send, also where their sockets are seen on the way.
            crosses(&greens, "green");
            crosses(&blues, "blue");
            cluster.a.take_over();
            let target = greens[1].attachments[0].addresses[0].net.addr();
            let frame = Frame { vni: 3, to: router, source: ip("10.77.0.41"), target, port: 6000 };
            assert!(
                arrives(&cluster.a.space, ip("192.168.7.2"), &frame, &greens[1], SOON),
                "they were right"
            );
        });
    });
}

/// A tenant whose nodes have no IPv4 address that tunnels could end at.
fn over_ipv6(mut network: knit_runtime::Network) -> knit_runtime::Network {
    for block in &mut network.blocks {
        block.node_addresses.retain(IpAddr::is_ipv6);
    }
    network
}

#[test]
fn a_node_takes_frames_from_nodes_only_and_only_their_own() {
    in_namespaces(|| run(frames_of(ip("192.168.7.2"), |network| network)));
}

#[test]
fn a_node_takes_frames_over_ipv6_from_nodes_only_and_only_their_own() {
    in_namespaces(|| run(frames_of(ip("fd07::2"), over_ipv6)));
}

async fn frames_of(end: IpAddr, over: impl Fn(knit_runtime::Network) -> knit_runtime::Network) {
    let cluster = Cluster::with_tenants().await;
    let (blue, green) = (|node: &Node| over(blue(node)), |node: &Node| over(green(node)));
    for node in [&cluster.a, &cluster.b] {
        node.setup(&blue(node)).await;
        node.setup(&green(node)).await;
    }
    // Green is routed: a has 10.77.0.32/28, b has 10.77.0.16/28. Blue is switched, the other way round.
    let greens = pair(&cluster, &green, 34, 18).await;
    let blues = pair(&cluster, &blue, 18, 34).await;
    cluster.a.take_over();
    let router = router_mac(&cluster, "green");
    let mac = |pod: &TestPod| pod.attachments[0].mac.octets();
    for (vni, to, pod, own, others) in [
        (3, router, &greens[1], ["10.77.0.41", "fd77::29"], ["10.77.0.25", "fd77::19"]),
        (2, mac(&blues[1]), &blues[1], ["10.77.0.25", "fd77::19"], ["10.77.0.41", "fd77::29"]),
    ] {
        for place in [0, 1] {
            let target = pod.attachments[0].addresses[place].net.addr();
            let frame = |source: &str| Frame { vni, to, source: ip(source), target, port: 6000 };
            let own = frame(own[place]);
            assert!(arrives(&cluster.a.space, end, &own, pod, SOON), "the frame is right");
            assert!(!arrives(&cluster.outside, end, &own, pod, NEVER), "from no node, {}", own.source);
            let strangers = [["10.77.0.99", "fd77::99"], ["203.0.113.9", "2001:db8:99::9"]];
            for lie in [others].iter().chain(&strangers) {
                let lie = frame(lie[place]);
                assert!(!arrives(&cluster.a.space, end, &lie, pod, NEVER), "{} is not a's", lie.source);
            }
            // Every router has the gateway's address; the kernel of a routing one takes it from nobody else.
            if vni == 2 {
                let gateway = frame(["10.77.0.1", "fd77::1"][place]);
                assert!(arrives(&cluster.a.space, end, &gateway, pod, SOON), "{}", gateway.source);
            }
            let elsewhere = Frame { vni: 5 - vni, ..own };
            assert!(!arrives(&cluster.a.space, end, &elsewhere, pod, NEVER), "another Network");
        }
    }
    crosses(&greens, "green");
    crosses(&blues, "blue");
}

/// An advertisement that the neighbour with this address has that MAC, in a frame to a pod.
fn advertisement(vni: u32, source: IpAddr, to: &TestPod, neighbour: IpAddr, mac: [u8; 6]) -> Vec<u8> {
    let (IpAddr::V6(source), IpAddr::V6(neighbour)) = (source, neighbour) else { panic!("not IPv6") };
    let IpAddr::V6(target) = to.attachments[0].addresses[1].net.addr() else { panic!("not IPv6") };
    // Not asked for, and to override what is there.
    let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    message.extend(neighbour.octets());
    message.extend([2, 1]);
    message.extend(mac);
    let length = message.len() as u16;
    let sum = fold(sum(&source.octets()) + sum(&target.octets()) + u32::from(length) + 58 + sum(&message));
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = vec![8, 0, 0, 0];
    packet.extend((vni << 8).to_be_bytes());
    packet.extend(to.attachments[0].mac.octets());
    packet.extend([0x0a, 9, 9, 9, 9, 9]);
    packet.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    packet.extend(length.to_be_bytes());
    packet.extend([58, 255]);
    packet.extend(source.octets());
    packet.extend(target.octets());
    packet.extend(message);
    packet
}

/// The source of its frame is its own, but the address that it advertises is not.
#[test]
fn a_node_told_pods_of_others_that_it_had_an_address_of_theirs() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let pair = pair(&cluster, &blue, 18, 34).await;
            let pod = &pair[1];
            let (peer, end) = (ip("fd77::23"), ip("192.168.7.2"));
            cluster.a.take_over();
            let local = cluster.b.pod(&blue(&cluster.b), "local", &["10.77.0.35", "fd77::23"]).await;
            assert_ne!(udp(&pod.space, &local.space, peer, 5000, SOON), Talk::Silence);
            let known = |address: IpAddr| {
                let all = pod.handle().neighbours(&NeighbourFilter::default()).expect("neighbours");
                all.into_iter().find(|n| n.address == address).and_then(|n| n.mac).map(|mac| mac.0)
            };
            let socket = cluster.a.space.run(|| UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
            let evil = [0x0a, 9, 9, 9, 9, 9];
            let mac = local.attachments[0].mac.octets();
            assert_eq!(known(peer), Some(mac));
            for neighbour in [peer, ip("fd77::1"), pair[0].attachments[0].addresses[1].net.addr()] {
                // It is known before: only then is an advertisement that nobody asked for taken.
                let _ = udp(&pod.space, &cluster.outside, neighbour, 5000, NEVER);
                let lie = advertisement(2, ip("fd77::19"), pod, neighbour, evil);
                socket.send_to(&lie, SocketAddr::new(end, 4789)).expect("sent");
                // Behind it, so that it has arrived if it does.
                let target = pod.attachments[0].addresses[1].net.addr();
                let to = pod.attachments[0].mac.octets();
                let frame = Frame { vni: 2, to, source: ip("fd77::19"), target, port: 6000 };
                assert!(arrives(&cluster.a.space, end, &frame, pod, SOON), "the frame is right");
                assert_ne!(known(neighbour), Some(evil), "{neighbour}");
            }
            crosses(&pair, "blue");
        });
    });
}

/// The default Network, by tunnel although the nodes are on one segment.
fn by_tunnel(blocks: [(&str, &str); 2]) -> knit_runtime::Network {
    let mut network = default_network();
    network.parameters.insert("path".into(), "tunnel".into());
    let [a, b] = blocks;
    network.blocks = vec![support::block("a", 1, a.0, a.1), support::block("b", 2, b.0, b.1)];
    network
}

#[test]
fn the_default_networks_tunnel_takes_no_source_of_another_node() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            // Small blocks, podCIDRs, and a large one: each is cut into other units.
            for (blocks, own, others) in [
                (
                    [("10.244.1.0/28", "fd44::1:0/124"), ("10.244.2.0/28", "fd44::2:0/124")],
                    ["10.244.1.9", "fd44::1:9"],
                    ["10.244.1.17", "fd44::1:11"],
                ),
                (
                    [("10.244.1.0/24", "fd44::1:0/112"), ("10.244.2.0/24", "fd44::2:0/112")],
                    ["10.244.1.200", "fd44::1:c8"],
                    ["10.244.3.200", "fd44::3:c8"],
                ),
            ] {
                let network = by_tunnel(blocks);
                for node in [&cluster.a, &cluster.b] {
                    node.setup(&network).await;
                }
                let one =
                    cluster.a.pod(&network, &format!("one-{}", own[0]), &["10.244.1.5", "fd44::1:5"]).await;
                let two =
                    cluster.b.pod(&network, &format!("two-{}", own[0]), &["10.244.2.5", "fd44::2:5"]).await;
                let pods = [one, two];
                let tunnel = cluster.b.handle().link_by_name(&name("vx-1")).expect("a look");
                let to = tunnel.and_then(|link| link.mac).expect("a tunnel").0;
                let end = ip("192.168.7.2");
                for place in [0, 1] {
                    let target = ip(["10.244.2.5", "fd44::2:5"][place]);
                    let frame = |source: &str| Frame { vni: 1, to, source: ip(source), target, port: 6000 };
                    for taken in [own[place], ["192.168.7.1", "fd07::1"][place]] {
                        let frame = frame(taken);
                        assert!(arrives(&cluster.a.space, end, &frame, &pods[1], SOON), "{taken} is a's");
                        assert!(!arrives(&cluster.outside, end, &frame, &pods[1], NEVER), "from no node");
                    }
                    // The outside, for which a node forwards.
                    let outside = frame(["203.0.113.77", "2001:db8:99::77"][place]);
                    assert!(arrives(&cluster.a.space, end, &outside, &pods[1], SOON), "{}", outside.source);
                    let lies = [
                        others[place],
                        ["10.244.2.7", "fd44::2:7"][place],
                        ["192.168.7.2", "fd07::2"][place],
                    ];
                    for lie in lies {
                        let lie = frame(lie);
                        assert!(
                            !arrives(&cluster.a.space, end, &lie, &pods[1], NEVER),
                            "{} is not a's",
                            lie.source
                        );
                    }
                }
                crosses(&pods, "default");
                // A node itself sends, too.
                let target = pods[1].attachments[0].addresses[0].net.addr();
                assert_ne!(udp(&cluster.a.space, &pods[1].space, target, 5002, SOON), Talk::Silence);
                for (node, pod) in [&cluster.a, &cluster.b].into_iter().zip(&pods) {
                    node.runtime.detach(&pod.pod, None).await.expect("detached");
                }
            }
        });
    });
}
