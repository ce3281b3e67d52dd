//! Connection tracking: flows that we make and flows of real packets, listed with filters and deleted.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::conntrack::{Conntrack, Error, Filter, Flow, L4, Status, Tuple, TupleFilter};
use knit_kernel::nft::Kernel;
use knit_kernel::testing::in_namespaces;
use knit_nft::{Chain, ChainKind, Family, Hook, L4Proto, Nftables, Port, Rule, TableId, TableState, field};

const TCP: u8 = 6;
const UDP: u8 = 17;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn flow(protocol: u8, src: (&str, u16), dst: (&str, u16)) -> Flow {
    let tuple = Tuple::new(protocol, (ip(src.0), src.1), (ip(dst.0), dst.1));
    let mut flow = Flow::new(tuple, Duration::from_secs(300));
    flow.tcp_state = (protocol == TCP).then_some(3);
    flow
}

/// A flow to a service address that an endpoint answers.
fn translated(protocol: u8, client: (&str, u16), service: (&str, u16), endpoint: (&str, u16)) -> Flow {
    let mut flow = flow(protocol, client, service);
    flow.reply = Tuple::new(protocol, (ip(endpoint.0), endpoint.1), (ip(client.0), client.1));
    flow
}

fn originals(flows: &[Flow]) -> Vec<String> {
    let mut texts: Vec<String> = flows.iter().map(|flow| flow.original.to_string()).collect();
    texts.sort();
    texts
}

#[test]
fn made_flows_are_listed_by_filters_and_deleted_by_tuple() {
    in_namespaces(|| {
        let mut conntrack = Conntrack::open().expect("ctnetlink");
        let mut marked = flow(TCP, ("10.0.0.1", 1000), ("10.0.0.9", 80));
        marked.mark = 0x4007;
        let mut zoned = flow(UDP, ("10.0.0.1", 53), ("10.0.0.9", 53));
        zoned.zone = 7;
        let ping = Tuple {
            src: ip("10.0.0.1"),
            dst: ip("10.0.0.9"),
            l4: L4::Icmp { protocol: 1, id: 5, kind: 8, code: 0 },
        };
        let flows = [
            marked.clone(),
            zoned.clone(),
            flow(UDP, ("10.0.0.1", 53), ("10.0.0.9", 53)),
            flow(UDP, ("10.0.0.2", 53), ("10.0.0.9", 53)),
            translated(UDP, ("10.0.0.3", 999), ("10.96.0.10", 53), ("10.0.0.7", 5353)),
            translated(UDP, ("10.0.0.3", 998), ("10.96.0.10", 53), ("10.0.0.8", 5353)),
            flow(UDP, ("fd00::1", 53), ("fd00::9", 53)),
            flow(TCP, ("fd00::1", 53), ("fd00::9", 443)),
            Flow::new(ping, Duration::from_secs(30)),
        ];
        for flow in &flows {
            conntrack.create(flow).expect("it can be made");
        }
        let error = conntrack.create(&flows[2]).expect_err("it is there");
        assert!(error.is_exists(), "{error:?}");
        assert_eq!(error.to_string(), "cannot create flow udp 10.0.0.1:53 -> 10.0.0.9:53");

        let mut count = |filter: Filter| {
            let listed = conntrack.list(&filter).expect("listing");
            assert!(listed.iter().all(|flow| filter.matches(flow)));
            listed.len()
        };
        assert_eq!(count(Filter::all()), 9);
        assert_eq!(count(Filter::v4()), 7);
        assert_eq!(count(Filter::v6()), 2);
        assert_eq!(count(Filter::all().mark(0x4000, 0xf000)), 1);
        assert_eq!(count(Filter::all().mark(0, 0xf000)), 8);
        assert_eq!(count(Filter::all().zone(7)), 1);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().protocol(UDP))), 5);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().protocol(UDP)).zone(0)), 4);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().dst(ip("10.0.0.9")))), 5);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().src(ip("10.0.0.2")))), 1);
        let service = TupleFilter::new().dst(ip("10.96.0.10")).protocol(UDP).dst_port(53);
        assert_eq!(count(Filter::v4().original(service.clone())), 2);
        let stale = Filter::v4().original(service).reply(TupleFilter::new().src(ip("10.0.0.7")));
        assert_eq!(count(stale.clone()), 1);
        assert_eq!(count(Filter::v6().original(TupleFilter::new().dst(ip("fd00::9")).protocol(TCP))), 1);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().src_port(999).protocol(UDP))), 1);
        assert_eq!(count(Filter::v4().original(TupleFilter::new().src(ip("10.9.9.9")))), 0);

        let listed = conntrack.list(&stale).expect("listing");
        assert_eq!(
            listed[0].to_string(),
            "udp 10.0.0.3:999 -> 10.96.0.10:53 (answered as udp 10.0.0.7:5353 -> 10.0.0.3:999)"
        );
        assert!(listed[0].timeout.is_some_and(|left| left > Duration::from_secs(250)));
        assert_eq!(conntrack.delete(&listed).expect("it is there"), 1);
        assert_eq!(conntrack.delete(&listed).expect("it is gone"), 0);

        // The same tuple in another zone is another flow.
        let in_zone = conntrack.list(&Filter::all().zone(7)).expect("listing");
        assert_eq!(conntrack.delete(&in_zone).expect("deleted"), 1);
        assert_eq!(originals(&conntrack.list(&Filter::v4()).expect("listing")).len(), 5);

        let all = conntrack.list(&Filter::all()).expect("listing");
        let found = all.iter().find(|flow| flow.mark != 0).expect("the marked one");
        assert_eq!((found.original, found.mark, found.tcp_state), (marked.original, 0x4007, Some(3)));
        assert!(all.iter().any(|flow| flow.original == ping && flow.reply == ping.reversed()));
        assert_eq!(conntrack.delete(&all).expect("deleted"), 7);
        assert_eq!(conntrack.list(&Filter::all()).expect("listing"), []);
    });
}

#[test]
fn a_reused_tuple_is_not_deleted_by_an_old_id() {
    in_namespaces(|| {
        let mut conntrack = Conntrack::open().expect("ctnetlink");
        let flow = flow(UDP, ("10.0.0.1", 1), ("10.0.0.2", 2));
        conntrack.create(&flow).expect("made");
        let mut old = conntrack.list(&Filter::all()).expect("listing").remove(0);
        old.id = old.id.map(|id| id ^ 1);
        assert_eq!(conntrack.delete([&old]).expect("no error"), 0);
        assert_eq!(conntrack.list(&Filter::all()).expect("listing").len(), 1);
    });
}

#[test]
fn many_flows_are_deleted_in_batches() {
    in_namespaces(|| {
        let mut conntrack = Conntrack::open().expect("ctnetlink");
        for port in 1..=1000 {
            conntrack.create(&flow(UDP, ("10.0.0.1", port), ("10.0.0.2", 53))).expect("made");
        }
        let flows = conntrack.list(&Filter::v4()).expect("listing");
        assert_eq!(flows.len(), 1000);
        assert_eq!(conntrack.delete(&flows).expect("deleted"), 1000);
        assert_eq!(conntrack.delete(&flows).expect("all gone"), 0);
        assert_eq!(conntrack.list(&Filter::all()).expect("listing"), []);
    });
}

#[test]
fn filters_that_the_kernel_cannot_apply_are_refused() {
    in_namespaces(|| {
        let mut conntrack = Conntrack::open().expect("ctnetlink");
        for filter in [
            Filter::all().original(TupleFilter::new().dst(ip("10.0.0.1"))),
            Filter::v6().original(TupleFilter::new().dst(ip("10.0.0.1"))),
            Filter::v4().reply(TupleFilter::new().src_port(53)),
        ] {
            assert!(matches!(conntrack.list(&filter), Err(Error::Filter { .. })), "{filter}");
        }
    });
}

#[test]
fn a_udp_flow_through_dnat_is_found_by_its_endpoint_and_can_be_cut() {
    in_namespaces(|| {
        let server = UdpSocket::bind("127.0.0.1:0").expect("lo is up");
        let port = server.local_addr().expect("bound").port();
        let mut kernel = Kernel::open().expect("nfnetlink");
        let table = TableState::new(TableId::new(Family::Ip, "dnat")).chain(
            Chain::base("output", ChainKind::Nat, Hook::Output, -100),
            [Rule::new()
                .eq(field::ip_daddr(), &"127.0.0.53".parse().expect("an address"))
                .eq(field::l4proto(), &L4Proto::UDP)
                .eq(field::th_dport(), &Port(53))
                .dnat_to(ip("127.0.0.1"), Some(Port(port)))],
        );
        kernel.apply(&table).expect("the kernel takes it");

        let client = UdpSocket::bind("127.0.0.1:0").expect("lo is up");
        client.connect("127.0.0.53:53").expect("a route");
        client.send(b"hello").expect("sent");
        let mut buffer = [0; 16];
        server.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let (len, from) = server.recv_from(&mut buffer).expect("translated");
        server.send_to(&buffer[..len], from).expect("answered");
        assert_eq!(client.recv(&mut buffer).expect("translated back"), 5);

        let mut conntrack = Conntrack::open().expect("ctnetlink");
        let filter = Filter::v4()
            .original(TupleFilter::new().dst(ip("127.0.0.53")).protocol(UDP).dst_port(53))
            .reply(TupleFilter::new().src(ip("127.0.0.1")).protocol(UDP).src_port(port));
        let flows = conntrack.list(&filter).expect("listing");
        assert_eq!(flows.len(), 1, "{flows:?}");
        assert!(flows[0].status.contains(Status::DST_NAT) && flows[0].status.contains(Status::SEEN_REPLY));
        let by_status = Filter::v4().status(Status::DST_NAT);
        assert_eq!(conntrack.list(&by_status).expect("listing").len(), 1);
        assert_eq!(conntrack.delete(&flows).expect("deleted"), 1);
        assert_eq!(conntrack.list(&filter).expect("listing"), []);
    });
}

#[test]
fn one_bit_of_a_mark_is_set_and_cleared_and_the_others_stay() {
    in_namespaces(|| {
        const BIT: u32 = 0x0020_0000;
        let mut conntrack = Conntrack::open().expect("ctnetlink");
        let mut flows = [
            flow(TCP, ("10.0.0.1", 1000), ("10.0.0.9", 80)),
            translated(UDP, ("10.0.0.3", 999), ("10.96.0.10", 53), ("10.0.0.7", 5353)),
            flow(UDP, ("fd00::1", 53), ("fd00::9", 53)),
            flow(UDP, ("10.0.0.1", 53), ("10.0.0.9", 53)),
        ];
        flows[0].mark = 0x0010_4007;
        flows[1].zone = 7;
        for flow in &flows {
            conntrack.create(flow).expect("it can be made");
        }
        let gone = flow(UDP, ("10.0.0.5", 53), ("10.0.0.9", 53));
        let marked = conntrack.set_mark(flows[..3].iter().chain([&gone]), BIT | 1, BIT).expect("marked");
        assert_eq!(marked, 3, "one is not there, and is not made");
        let listed = conntrack.list(&Filter::all().mark(BIT, BIT)).expect("listing");
        assert_eq!(originals(&listed), originals(&flows[..3]));
        let marks: Vec<u32> = listed.iter().map(|flow| flow.mark & !BIT).filter(|mark| *mark != 0).collect();
        assert_eq!(marks, [0x0010_4007], "other bits, of the flow or of the value, are not touched");
        assert_eq!(conntrack.set_mark(&listed, 0, BIT).expect("cleared"), 3);
        assert_eq!(conntrack.list(&Filter::all().mark(BIT, BIT)).expect("listing"), []);
        assert_eq!(conntrack.list(&Filter::all()).expect("listing").len(), 4);
    });
}
