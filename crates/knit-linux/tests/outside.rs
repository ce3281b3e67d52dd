//! What is not the outside for a tenant, whatever it is called, and what it may say about others'
//! connections.

mod support;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::op::Op;
use knit_kernel::route::Route;
use knit_kernel::testing::in_namespaces;
use knit_kernel::{Handle, NetNs};
use knit_runtime::Network;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, socket_with};
use support::{Cluster, NEVER, SOON, Talk, TestPod, blue, green, ip, name, net, run, udp};

/// As the agent tells a runtime: the nodes' own addresses, and not all of their segment.
fn nodes_only(mut network: Network) -> Network {
    let segment = [net("192.168.7.0/24"), net("fd07::/64")];
    network.not_outside.retain(|range| !segment.contains(range));
    network.not_outside.extend(["192.168.7.1/32", "192.168.7.2/32", "fd07::1/128", "fd07::2/128"].map(net));
    network
}

async fn tenants(cluster: &Cluster) -> [TestPod; 2] {
    let (blue, green) = (nodes_only(blue(&cluster.a)), nodes_only(green(&cluster.a)));
    cluster.a.setup(&blue).await;
    cluster.a.setup(&green).await;
    let one = cluster.a.pod(&blue, "blue", &["10.77.0.18", "fd77::12"]).await;
    let two = cluster.a.pod(&green, "green", &["10.77.0.34", "fd77::22"]).await;
    [one, two]
}

#[test]
fn a_tenant_does_not_reach_what_clouds_tell_their_machines() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let outside = Handle::open(&cluster.outside).expect("a handle");
            let lo = outside.index_of(&name("lo")).expect("lo");
            let node = cluster.a.handle();
            let eth0 = node.index_of(&name("eth0")).expect("eth0");
            let told =
                ["169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254"];
            for address in told {
                let alone = ipnet::IpNet::from(ip(address));
                outside.apply(&[Op::create(Address::new(lo, alone))]).expect("an address");
                let via = if alone.addr().is_ipv4() { "192.168.7.99" } else { "fd07::99" };
                let route = Route { protocol: 4, ..Route::to(alone).dev(eth0).via(ip(via)) };
                node.apply(&[Op::create(route)]).expect("a way");
            }
            let pods = tenants(&cluster).await;
            for address in told {
                let node = udp(&cluster.a.space, &cluster.outside, ip(address), 80, SOON);
                assert_ne!(node, Talk::Silence, "the node itself reaches {address}");
                for pod in &pods {
                    let talk = udp(&pod.space, &cluster.outside, ip(address), 80, NEVER);
                    assert_eq!(talk, Talk::Silence, "{} to {address}", pod.pod.sandbox);
                }
            }
            for pod in &pods {
                for address in ["203.0.113.9", "2001:db8:99::9", "192.168.7.99", "fd07::99"] {
                    let talk = udp(&pod.space, &cluster.outside, ip(address), 80, SOON);
                    assert_ne!(talk, Talk::Silence, "{address} is the outside");
                }
            }
        });
    });
}

#[test]
fn a_broadcast_on_the_nodes_segment_is_not_the_outside() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let pods = tenants(&cluster).await;
            let listen = |space: &NetNs| {
                let socket = space.run(|| UdpSocket::bind("0.0.0.0:5002")).expect("in").expect("bound");
                socket.set_read_timeout(Some(NEVER)).expect("a timeout");
                socket
            };
            let listeners = [listen(&cluster.a.space), listen(&cluster.b.space), listen(&cluster.outside)];
            for pod in &pods {
                let socket = pod.space.run(|| UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
                socket.set_broadcast(true).expect("leave to broadcast");
                socket.send_to(b"all", "192.168.7.255:5002").expect("sent");
                for (place, listener) in listeners.iter().enumerate() {
                    let heard = listener.recv_from(&mut [0; 8]);
                    assert!(heard.is_err(), "{} was heard by listener {place}", pod.pod.sandbox);
                }
            }
        });
    });
}

fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// "Port unreachable", about a datagram from `from` to `to`.
fn unreachable(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut inner = Vec::new();
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            inner.extend([0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0]);
            inner.extend(from.octets());
            inner.extend(to.octets());
            let sum = checksum(&inner);
            inner[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            inner.extend([0x60, 0, 0, 0, 0, 12, 17, 64]);
            inner.extend(from.octets());
            inner.extend(to.octets());
        }
        _ => panic!("one family"),
    }
    inner.extend(from.port().to_be_bytes());
    inner.extend(to.port().to_be_bytes());
    inner.extend([0, 12, 0, 0, 1, 2, 3, 4]);
    let kind: [u8; 2] = if from.is_ipv4() { [3, 3] } else { [1, 4] };
    let mut message = vec![kind[0], kind[1], 0, 0, 0, 0, 0, 0];
    message.extend(inner);
    // The kernel computes that of ICMPv6.
    if from.is_ipv4() {
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

fn send_icmp(space: &NetNs, to: IpAddr, message: &[u8]) {
    let (family, protocol) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    let open = || socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol));
    let socket = space.run(open).expect("in").expect("a raw socket");
    rustix::net::sendto(&socket, message, SendFlags::empty(), &SocketAddr::new(to, 0)).expect("sent");
}

/// Whether a connected socket is told that nobody listens at the other end.
fn is_told(socket: &UdpSocket, wait: Duration) -> bool {
    socket.set_read_timeout(Some(wait)).expect("a timeout");
    match socket.recv(&mut [0; 8]) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => true,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tenant_says_nothing_about_others_connections() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let pods = tenants(&cluster).await;
            for (node, world) in [("192.168.7.1", "203.0.113.9"), ("fd07::1", "2001:db8:99::9")] {
                let (node, world) = (SocketAddr::new(ip(node), 7777), SocketAddr::new(ip(world), 7000));
                let bind = |space: &NetNs, at: SocketAddr| {
                    let socket = space.run(|| UdpSocket::bind(at)).expect("in").expect("bound");
                    socket.set_read_timeout(Some(SOON)).expect("a timeout");
                    socket
                };
                let (here, there) = (bind(&cluster.a.space, node), bind(&cluster.outside, world));
                here.connect(world).expect("connected");
                here.send(b"hello").expect("sent");
                there.recv_from(&mut [0; 8]).expect("it arrives");
                there.connect(node).expect("connected");
                let lie = unreachable(world, node);
                for pod in &pods {
                    send_icmp(&pod.space, world.ip(), &lie);
                    assert!(!is_told(&there, NEVER), "{} to {world}", pod.pod.sandbox);
                }
                // The message is right: of the node itself it is believed.
                send_icmp(&cluster.a.space, world.ip(), &lie);
                assert!(is_told(&there, SOON), "{world}");
            }
        });
    });
}

#[test]
fn a_node_hears_that_a_tenants_port_is_closed() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            for pod in &tenants(&cluster).await {
                for address in &pod.attachments[0].addresses {
                    let to = SocketAddr::new(address.net.addr(), 9);
                    let any: IpAddr = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
                    let socket =
                        cluster.a.space.run(|| UdpSocket::bind((any, 0))).expect("in").expect("bound");
                    socket.connect(to).expect("connected");
                    socket.send(b"hello").expect("sent");
                    assert!(is_told(&socket, SOON), "{to}");
                }
            }
        });
    });
}
