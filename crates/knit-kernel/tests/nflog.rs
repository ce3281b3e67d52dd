//! Packets that rules log: real ones, dropped by a rule behind a limit, read in another namespace's name.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use knit_kernel::netns::NetNs;
use knit_kernel::nflog::{Headers, Logged, Nflog, Transport};
use knit_kernel::nft::Kernel;
use knit_kernel::testing::{in_namespaces, namespace};
use knit_nft::{Chain, ChainKind, Family, Hook, Nftables, Rule, TableId, TableState};

const GROUP: u16 = 301;
const SECONDS: Duration = Duration::from_secs(60);

/// Everything that leaves is logged and dropped.
fn logs_and_drops() -> TableState {
    TableState::new(TableId::new(Family::Inet, "drops")).chain(
        Chain::base("output", ChainKind::Filter, Hook::Output, 0),
        [Rule::new().log_group("out ", GROUP).drop()],
    )
}

fn next(log: &mut Nflog, wanted: impl Fn(&Logged) -> bool) -> Logged {
    let (mut found, deadline) = (None, Instant::now() + SECONDS);
    while found.is_none() && Instant::now() < deadline {
        let lost = log.receive(deadline, |logged| {
            if wanted(&logged) {
                found.get_or_insert(logged);
            }
        });
        assert!(!lost.expect("the socket works"), "nothing is lost");
    }
    found.expect("it is logged")
}

#[test]
fn dropped_packets_are_read_with_their_headers() {
    in_namespaces(|| {
        let here = NetNs::current().expect("a namespace");
        let mut kernel = Kernel::open().expect("nftables");
        kernel.apply(&logs_and_drops()).expect("the table is made");
        let mut log = Nflog::open_in(&here, GROUP).expect("nfnetlink_log");
        for (bind, to) in [("127.0.0.1:0", "127.0.0.1:4242"), ("[::1]:0", "[::1]:4242")] {
            let socket = UdpSocket::bind(bind).expect("bound");
            socket.send_to(b"x", to).expect_err("a rule drops it");
            let from = socket.local_addr().expect("bound");
            let logged = next(&mut log, |l| l.headers.is_some_and(|h| h.source == from.ip()));
            assert_eq!(logged.prefix, "out ");
            let destination = to.parse::<std::net::SocketAddr>().expect("an address");
            let transport = Transport::Ports { protocol: 17, source: from.port(), destination: 4242 };
            let wanted = Headers { source: from.ip(), destination: destination.ip(), transport };
            assert_eq!(logged.headers, Some(wanted));
            assert_ne!(logged.output, 0, "it was to leave by the loopback link");
        }
    });
}

#[test]
fn a_group_has_one_listener_and_is_free_after_it() {
    in_namespaces(|| {
        let here = NetNs::current().expect("a namespace");
        let first = Nflog::open_in(&here, GROUP).expect("nfnetlink_log");
        let error = Nflog::open_in(&here, GROUP).expect_err("it is taken");
        assert!(error.to_string().contains("log group 301"), "{error}");
        // Another namespace has groups of its own.
        let other = Nflog::open_in(&namespace(), GROUP).expect("another namespace");
        drop((first, other));
        Nflog::open_in(&here, GROUP).expect("it is free again");
    });
}

#[test]
fn a_flood_is_lost_in_part_and_said_so() {
    in_namespaces(|| {
        let here = NetNs::current().expect("a namespace");
        let mut kernel = Kernel::open().expect("nftables");
        kernel.apply(&logs_and_drops()).expect("the table is made");
        let mut log = Nflog::open_in(&here, GROUP).expect("nfnetlink_log");
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bound");
        for _ in 0..20_000 {
            let _ = socket.send_to(&[0; 512], "127.0.0.1:4242");
        }
        let (mut read, mut lost) = (0_usize, false);
        let deadline = Instant::now() + SECONDS;
        while !lost && Instant::now() < deadline {
            lost |= log.receive(deadline, |_| read += 1).expect("the socket works");
        }
        lost |= log.drain(|_| read += 1).expect("the socket works");
        assert!(lost, "a flood that nobody reads is lost, and that is said");
        assert!(read < 20_000, "what waits is bounded: {read}");
        // It goes on afterwards.
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bound");
        let port = socket.local_addr().expect("bound").port();
        socket.send_to(b"x", "127.0.0.1:4243").expect_err("a rule drops it");
        next(&mut log, |l| {
            let wanted = Transport::Ports { protocol: 17, source: port, destination: 4243 };
            l.headers.is_some_and(|h| h.transport == wanted)
        });
    });
}
