//! nftables with real packets: two namespaces, a veth pair between them, TCP and UDP sockets at both ends.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use knit_kernel::netlink::{Batch, Protocol, Socket, flags};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::{eventually, in_namespaces, namespace, skip_for_kernel};
use knit_nft::{
    Chain, ChainKind, CtStatus, Direction, DynsetOp, Element, EtherType, Family, Hook, IcmpxCode, L4Proto,
    Mark, NatFlags, Nftables, Port, Reject, Rule, Set, TableId, TableState, Transaction, Verdict, field,
};

const LINK: u32 = 10;
const SECONDS: Duration = Duration::from_secs(60);

/// The far end, with listeners that live in its namespace.
struct Far {
    ns: NetNs,
}

fn up(batch: &mut Batch) {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&LINK.to_ne_bytes());
    header[8..12].copy_from_slice(&1u32.to_ne_bytes());
    header[12..16].copy_from_slice(&1u32.to_ne_bytes());
    batch.push(16, 0, |w| _ = w.fixed(&header));
}

fn address(batch: &mut Batch, address: &str) {
    let bytes = match address.parse().expect("an address") {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let v6 = bytes.len() == 16;
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let [a, b, c, d] = LINK.to_ne_bytes();
    // No duplicate address detection: it would take seconds.
    let header = [family as u8, if v6 { 64 } else { 24 }, 0x02, 0, a, b, c, d];
    batch.push(20, flags::CREATE | flags::EXCL, |w| _ = w.fixed(&header).bytes(2, &bytes).bytes(1, &bytes));
}

fn request(socket: &mut Socket, batch: &mut Batch) {
    socket.request(batch).and_then(knit_kernel::netlink::Answers::all).expect("the kernel takes it");
}

/// Near: 10.1.0.1, 10.1.0.9, fd01::1; far: 10.1.0.2 and .3, fd01::2.
fn topology() -> Far {
    let ns = namespace();
    let mut near = Socket::open(Protocol::Route).expect("a route socket");
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&LINK.to_ne_bytes());
    let mut batch = Batch::new();
    batch.push(16, flags::CREATE | flags::EXCL, |w| {
        w.fixed(&header).string(3, "near").nested(18, |w| {
            w.string(1, "veth").nested(2, |w| {
                w.nested(1, |w| {
                    w.fixed(&header).string(3, "far").u32(28, ns.as_fd().as_raw_fd() as u32);
                });
            });
        });
    });
    up(&mut batch);
    for text in ["10.1.0.1", "10.1.0.9", "fd01::1"] {
        address(&mut batch, text);
    }
    request(&mut near, &mut batch);
    let mut far = Socket::open_in(Protocol::Route, &ns).expect("a route socket");
    let mut batch = Batch::new();
    up(&mut batch);
    for text in ["10.1.0.2", "10.1.0.3", "fd01::2"] {
        address(&mut batch, text);
    }
    request(&mut far, &mut batch);
    Far { ns }
}

impl Far {
    fn tcp(&self, address: &str) -> TcpListener {
        let listener = self.ns.run(|| TcpListener::bind(address)).expect("entered").expect("bound");
        listener.set_nonblocking(true).expect("set");
        listener
    }

    fn udp(&self, address: &str) -> UdpSocket {
        let socket = self.ns.run(|| UdpSocket::bind(address)).expect("entered").expect("bound");
        socket.set_read_timeout(Some(SECONDS)).expect("set");
        socket
    }
}

fn connect(to: &str) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(&to.parse().expect("a socket address"), SECONDS)
}

/// How many connections a listener has got, and from where.
fn accepted(listener: &TcpListener) -> Vec<SocketAddr> {
    std::iter::from_fn(|| match listener.accept() {
        Ok((_, peer)) => Some(peer),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => panic!("accept: {error}"),
    })
    .collect()
}

/// How many connections each listener has got, once that many are there: a client may have its answer before
/// the last packet of the handshake is with the server.
fn all_accepted(listeners: &[TcpListener], wanted: usize) -> Vec<usize> {
    let mut counts = vec![0; listeners.len()];
    eventually("all connections arrive", SECONDS, || {
        for (count, listener) in counts.iter_mut().zip(listeners) {
            *count += accepted(listener).len();
        }
        counts.iter().sum::<usize>() >= wanted
    });
    counts
}

const ENDPOINTS: u32 = 3;

/// A service in the two-map layout, for packets that this namespace sends.
fn service_v4() -> TableState {
    let (vip, endpoint) = (Ipv4Addr::new(10, 1, 0, 100), Ipv4Addr::new(10, 1, 0, 2));
    let service = (field::ip_daddr(), field::l4proto(), field::th_dport());
    let slot = (field::ip_daddr(), field::l4proto(), field::th_dport(), field::numgen_random(ENDPOINTS));
    TableState::new(TableId::new(Family::Ip, "services"))
        .set(
            Set::verdict_map::<(Ipv4Addr, L4Proto, Port)>("service-ips"),
            [Element::new(&(vip, L4Proto::TCP, Port(80))).verdict(Verdict::Goto("lb".into()))],
        )
        .set(
            Set::map::<(Ipv4Addr, L4Proto, Port, Mark), (Ipv4Addr, Port)>("endpoints"),
            (0..ENDPOINTS).map(|n| {
                Element::new(&(vip, L4Proto::TCP, Port(80), Mark(n)))
                    .value(&(endpoint, Port(8000 + n as u16)))
            }),
        )
        .chain(Chain::regular("lb"), [Rule::new().dnat_map(Family::Ip, &slot, "endpoints")])
        .chain(
            Chain::base("output", ChainKind::Nat, Hook::Output, -100),
            [Rule::new().vmap(&service, "service-ips")],
        )
}

fn service_v6() -> TableState {
    let vip: Ipv6Addr = "fd01::100".parse().expect("an address");
    let endpoint: Ipv6Addr = "fd01::2".parse().expect("an address");
    let service = (field::ip6_daddr(), field::l4proto(), field::th_dport());
    let slot = (field::ip6_daddr(), field::l4proto(), field::th_dport(), field::numgen_random(ENDPOINTS));
    TableState::new(TableId::new(Family::Ip6, "services"))
        .set(
            Set::verdict_map::<(Ipv6Addr, L4Proto, Port)>("service-ips"),
            [Element::new(&(vip, L4Proto::TCP, Port(80))).verdict(Verdict::Goto("lb".into()))],
        )
        .set(
            Set::map::<(Ipv6Addr, L4Proto, Port, Mark), (Ipv6Addr, Port)>("endpoints"),
            (0..ENDPOINTS).map(|n| {
                Element::new(&(vip, L4Proto::TCP, Port(80), Mark(n)))
                    .value(&(endpoint, Port(8000 + n as u16)))
            }),
        )
        .chain(Chain::regular("lb"), [Rule::new().dnat_map(Family::Ip6, &slot, "endpoints")])
        .chain(
            Chain::base("output", ChainKind::Nat, Hook::Output, -100),
            [Rule::new().vmap(&service, "service-ips")],
        )
}

fn spread(table: &TableState, endpoint: &str, vip: &str) {
    let far = topology();
    let mut kernel = Kernel::open().expect("nfnetlink");
    kernel.apply(table).expect("the kernel takes it");
    let listeners: Vec<TcpListener> =
        (0..ENDPOINTS).map(|n| far.tcp(&format!("{endpoint}:{}", 8000 + n))).collect();
    let connections: Vec<TcpStream> = (0..60).map(|_| connect(vip).expect("translated")).collect();
    let counts = all_accepted(&listeners, connections.len());
    assert_eq!(counts.iter().sum::<usize>(), connections.len());
    // Sixty throws of a three-sided die miss one side about once in 10^10 runs.
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    if let Ok(output) = std::process::Command::new("nft").args(["list", "ruleset"]).output() {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn connections_spread_over_endpoints_v4() {
    in_namespaces(|| spread(&service_v4(), "10.1.0.2", "10.1.0.100:80"));
}

#[test]
fn connections_spread_over_endpoints_v6() {
    in_namespaces(|| spread(&service_v6(), "[fd01::2]", "[fd01::100]:80"));
}

#[test]
fn a_client_stays_with_its_endpoint() {
    in_namespaces(|| {
        let far = topology();
        let mut kernel = Kernel::open().expect("nfnetlink");
        let client = (
            field::ip_saddr(),
            field::ct_ip_daddr(Direction::Original),
            field::ct_proto_dst(Direction::Original),
        );
        let slot = (field::ip_daddr(), field::l4proto(), field::th_dport(), field::numgen_random(ENDPOINTS));
        let affinity = Set::map::<(Ipv4Addr, Ipv4Addr, Port), (Ipv4Addr, Port)>("affinity")
            .dynamic(100)
            .timeout(Duration::from_secs(600));
        let table = service_v4()
            .set(affinity.clone(), [])
            .chain(
                Chain::regular("lb"),
                [
                    Rule::new().dnat_map(
                        Family::Ip,
                        &(field::ip_saddr(), field::ip_daddr(), field::th_dport()),
                        "affinity",
                    ),
                    Rule::new().dnat_map(Family::Ip, &slot, "endpoints"),
                ],
            )
            .chain(
                Chain::base("after-dnat", ChainKind::Filter, Hook::Output, -90),
                [Rule::new().any_of(field::ct_status(), &CtStatus::DNAT).update_map(
                    DynsetOp::Update,
                    &client,
                    &(field::ip_daddr(), field::th_dport()),
                    "affinity",
                    None,
                )],
            );
        kernel.apply(&table).expect("the kernel takes it");
        let listeners: Vec<TcpListener> =
            (0..ENDPOINTS).map(|n| far.tcp(&format!("10.1.0.2:{}", 8000 + n))).collect();
        let connections: Vec<TcpStream> =
            (0..20).map(|_| connect("10.1.0.100:80").expect("translated")).collect();
        let counts = all_accepted(&listeners, connections.len());
        assert!(counts.contains(&connections.len()), "all to one endpoint: {counts:?}");
        let stored = kernel.elements(table.id(), &affinity).expect("listing");
        assert_eq!(stored.len(), 1);
        assert!(stored[0].expires.is_some_and(|left| left > Duration::from_secs(500)), "{stored:?}");
        assert!(kernel.apply(&table).expect("nothing to do").is_empty(), "a restart forgets no client");
    });
}

#[test]
fn masquerade_hides_the_sender() {
    in_namespaces(|| {
        let far = topology();
        let mut kernel = Kernel::open().expect("nfnetlink");
        let hidden = Ipv4Addr::new(10, 1, 0, 9);
        let table = TableState::new(TableId::new(Family::Ip, "masquerade")).chain(
            Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, 100),
            [Rule::new().eq(field::ip_saddr(), &hidden).counter().masquerade(NatFlags::FULLY_RANDOM)],
        );
        kernel.apply(&table).expect("the kernel takes it");
        let server = far.udp("10.1.0.2:5000");
        let client = UdpSocket::bind("10.1.0.9:0").expect("bound");
        client.send_to(b"x", "10.1.0.2:5000").expect("sent");
        let (_, from) = server.recv_from(&mut [0; 4]).expect("received");
        assert_eq!(from.ip(), IpAddr::from([10, 1, 0, 1]));
        let state = kernel.table(table.id()).expect("listing").expect("there");
        assert_eq!(state.chains["postrouting"].rules[0].counter.map(|(packets, _)| packets), Some(1));
    });
}

#[test]
fn rejected_connections_are_refused_and_dropped_packets_are_gone() {
    in_namespaces(|| {
        let far = topology();
        let mut kernel = Kernel::open_in(&far.ns).expect("nfnetlink");
        let table = TableState::new(TableId::new(Family::Inet, "filter")).chain(
            Chain::base("input", ChainKind::Filter, Hook::Input, 0),
            [
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::TCP)
                    .eq(field::th_dport(), &Port(9000))
                    .reject(Reject::TcpReset),
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::UDP)
                    .eq(field::th_dport(), &Port(9001))
                    .reject(Reject::Icmpx(IcmpxCode::PortUnreachable)),
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::UDP)
                    .eq(field::th_dport(), &Port(9002))
                    .counter()
                    .drop(),
            ],
        );
        kernel.apply(&table).expect("the kernel takes it");
        for (tcp, udp) in [("10.1.0.2", "10.1.0.1"), ("[fd01::2]", "[fd01::1]")] {
            let listener = far.tcp(&format!("{tcp}:9000"));
            let error = connect(&format!("{tcp}:9000")).expect_err("rejected");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            assert_eq!(accepted(&listener), []);

            let _deaf = far.udp(&format!("{tcp}:9001"));
            let client = UdpSocket::bind(format!("{udp}:0")).expect("bound");
            client.set_read_timeout(Some(SECONDS)).expect("set");
            client.connect(format!("{tcp}:9001")).expect("a route");
            client.send(b"x").expect("sent");
            let error = client.recv(&mut [0; 4]).expect_err("rejected");
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        }
        let (closed, open) = (far.udp("10.1.0.2:9002"), far.udp("10.1.0.2:9003"));
        let client = UdpSocket::bind("10.1.0.1:0").expect("bound");
        client.send_to(b"dropped", "10.1.0.2:9002").expect("sent");
        client.send_to(b"kept", "10.1.0.2:9003").expect("sent");
        assert_eq!(open.recv(&mut [0; 16]).expect("received"), 4);
        eventually("the dropped packet is counted", SECONDS, || {
            let state = kernel.table(table.id()).expect("listing").expect("there");
            state.chains["input"].rules[2].counter.is_some_and(|(packets, _)| packets == 1)
        });
        closed.set_nonblocking(true).expect("set");
        assert_eq!(closed.recv(&mut [0; 16]).expect_err("nothing came").kind(), ErrorKind::WouldBlock);
    });
}

#[test]
fn interval_sets_match_from_the_first_to_the_last_address() {
    in_namespaces(|| {
        let _far = topology();
        let mut kernel = Kernel::open().expect("nfnetlink");
        let last = |n: u8| Ipv4Addr::new(10, 1, 0, n);
        let blocked = Set::of::<Ipv4Addr>("blocked").interval();
        let table = TableState::new(TableId::new(Family::Ip, "blocked"))
            .set(
                blocked.clone(),
                [
                    Element::range(&last(20), &last(29)),
                    Element::range(&last(30), &last(30)),
                    Element::prefix(last(64).into(), 30),
                ],
            )
            .set(
                Set::of::<(Ipv4Addr, Port)>("pairs").interval(),
                [Element::range(&(last(40), Port(100)), &(last(49), Port(199)))],
            )
            .chain(
                Chain::base("output", ChainKind::Filter, Hook::Output, 0),
                [
                    Rule::new().in_set(&field::ip_daddr(), "blocked").drop(),
                    Rule::new().in_set(&(field::ip_daddr(), field::th_dport()), "pairs").drop(),
                ],
            );
        kernel.apply(&table).expect("the kernel takes it");
        let client = UdpSocket::bind("10.1.0.1:0").expect("bound");
        // What the output hook drops, the sender is told at once.
        let passes = |n: u8, port: u16| match client.send_to(b"x", (last(n), port)) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => false,
            Err(error) => panic!("{n}:{port}: {error}"),
        };
        for (n, wanted) in [
            (19, true),
            (20, false),
            (29, false),
            (30, false),
            (31, true),
            (63, true),
            (64, false),
            (67, false),
            (68, true),
        ] {
            assert_eq!(passes(n, 9), wanted, "10.1.0.{n}");
        }
        for (n, port, wanted) in
            [(40, 99, true), (40, 100, false), (49, 199, false), (49, 200, true), (50, 150, true)]
        {
            assert_eq!(passes(n, port), wanted, "10.1.0.{n}:{port}");
        }
        let mut tx = Transaction::new();
        tx.delete_elements(table.id(), &blocked, vec![Element::range(&last(20), &last(29))]);
        kernel.commit(&tx).expect("deleted");
        assert!(passes(20, 9) && passes(29, 9) && !passes(30, 9));
    });
}

#[test]
fn an_ingress_chain_drops_spoofed_packets() {
    in_namespaces(|| {
        let far = topology();
        let mut kernel = Kernel::open_in(&far.ns).expect("nfnetlink");
        let table = TableState::new(TableId::new(Family::Netdev, "spoof")).chain(
            Chain::base("far", ChainKind::Filter, Hook::Ingress, -500).device("far"),
            [Rule::new()
                .eq(field::meta_protocol(), &EtherType::IPV4)
                .ne(field::ip_saddr(), &Ipv4Addr::new(10, 1, 0, 1))
                .counter()
                .drop()],
        );
        match kernel.apply(&table) {
            Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => {
                return skip_for_kernel("ingress hook");
            }
            other => _ = other.expect("the kernel takes it"),
        }
        assert!(kernel.apply(&table).expect("nothing to do").is_empty());
        let server = far.udp("10.1.0.2:5000");
        let spoofed = UdpSocket::bind("10.1.0.9:0").expect("bound");
        let honest = UdpSocket::bind("10.1.0.1:0").expect("bound");
        spoofed.send_to(b"spoofed", "10.1.0.2:5000").expect("sent");
        honest.send_to(b"ok", "10.1.0.2:5000").expect("sent");
        let (length, from) = server.recv_from(&mut [0; 16]).expect("received");
        assert_eq!((length, from.ip()), (2, IpAddr::from([10, 1, 0, 1])));
        eventually("the spoofed packet is counted", SECONDS, || {
            let state = kernel.table(table.id()).expect("listing").expect("there");
            state.chains["far"].rules[0].counter.is_some_and(|(packets, _)| packets == 1)
        });
    });
}
