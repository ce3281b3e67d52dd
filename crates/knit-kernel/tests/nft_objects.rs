//! nftables objects: written, read back, printed by `nft`, changed, refused.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::time::Duration;

use knit_kernel::nft::Kernel;
use knit_kernel::testing::{in_namespaces, skip, skip_for_kernel};
use knit_nft::{
    AddrType, Boolean, CgroupId, Chain, ChainKind, CtState, CtStatus, Direction, DynsetOp, Element,
    EtherAddr, Exists, Fake, Family, FibFlags, Hook, IcmpxCode, IfIndex, IfName, L4Proto, Mark, NatFlags,
    NatKind, NfProto, Nftables, Policy, Port, Reject, Rule, Set, Table, TableId, TableState, Transaction,
    Uid, Verdict, Zone, diff, field,
};

type ServiceKey = (Ipv4Addr, L4Proto, Port);
type SlotKey = (Ipv4Addr, L4Proto, Port, Mark);
type Endpoint = (Ipv4Addr, Port);

fn v4(text: &str) -> Ipv4Addr {
    text.parse().expect("an address")
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A service proxy's table: dispatch map, endpoint map, affinity, source ranges.
fn services() -> TableState {
    let service = (field::ip_daddr(), field::l4proto(), field::th_dport());
    let pick = (field::ip_daddr(), field::l4proto(), field::th_dport(), field::numgen_random(2));
    let client = (
        field::ip_saddr(),
        field::ct_ip_daddr(Direction::Original),
        field::ct_proto_dst(Direction::Original),
    );
    let endpoint = (field::ip_daddr(), field::th_dport());
    let vip = v4("10.96.0.1");
    TableState::new(Table::new(TableId::new(Family::Ip, "services")).comment("made by knit"))
        .set(
            Set::verdict_map::<ServiceKey>("service-ips").comment("address, protocol, port"),
            [
                Element::new(&(vip, L4Proto::TCP, Port(80)))
                    .verdict(Verdict::Goto("lb-2".into()))
                    .comment("ns1/web"),
                Element::new(&(vip, L4Proto::UDP, Port(53))).verdict(Verdict::Drop),
            ],
        )
        .set(
            Set::map::<SlotKey, Endpoint>("endpoints"),
            [
                Element::new(&(vip, L4Proto::TCP, Port(80), Mark(0))).value(&(v4("10.0.0.1"), Port(8080))),
                Element::new(&(vip, L4Proto::TCP, Port(80), Mark(1))).value(&(v4("10.0.0.2"), Port(8080))),
            ],
        )
        .set(
            Set::map::<(Ipv4Addr, Ipv4Addr, Port), Endpoint>("affinity")
                .dynamic(1000)
                .timeout(Duration::from_secs(10800)),
            [],
        )
        .set(
            Set::of::<Ipv4Addr>("ranges").interval().counter(),
            [
                Element::prefix(ip("10.0.0.0"), 8).comment("pods"),
                Element::range(&v4("192.168.0.10"), &v4("192.168.0.19")),
                Element::range(&v4("192.168.0.20"), &v4("192.168.0.20")),
                Element::prefix(ip("255.255.255.0"), 24),
            ],
        )
        .set(
            Set::of::<(Ipv4Addr, Port)>("allowed").interval().timeouts(),
            [Element::range(&(v4("10.1.0.0"), Port(1)), &(v4("10.1.255.255"), Port(1024)))
                .timeout(Duration::from_secs(3600))],
        )
        .chain(Chain::regular("lb-2"), [Rule::new().dnat_map(Family::Ip, &pick, "endpoints")])
        .chain(Chain::regular("logged"), [Rule::new().log("knit: ").drop()])
        .chain(
            Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, -100),
            [Rule::new().vmap(&service, "service-ips").comment("dispatch")],
        )
        .chain(
            Chain::base("after-dnat", ChainKind::Filter, Hook::Prerouting, -90),
            [Rule::new()
                .one_of(&field::l4proto(), &[L4Proto::TCP, L4Proto::UDP])
                .any_of(field::ct_status(), &CtStatus::DNAT)
                .update_map(DynsetOp::Update, &client, &endpoint, "affinity", None)],
        )
        .chain(
            Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, 100),
            [
                Rule::new()
                    .masked_eq(field::mark(), &Mark(0x4000), &Mark(0x4000))
                    .counter()
                    .masquerade(NatFlags::FULLY_RANDOM),
                Rule::new().in_prefix(field::ip_saddr(), ip("10.9.0.0"), 16).snat_to(
                    ip("192.0.2.1"),
                    NatFlags { random: false, fully_random: true, persistent: true },
                ),
            ],
        )
        .chain(
            Chain::base("filter", ChainKind::Filter, Hook::Forward, 0)
                .policy(Policy::Drop)
                .comment("default deny"),
            [
                Rule::new()
                    .any_of(field::ct_state(), &(CtState::ESTABLISHED | CtState::RELATED))
                    .counter()
                    .accept()
                    .comment("replies"),
                Rule::new().in_set(&field::ip_saddr(), "ranges").accept(),
                Rule::new().not_in_set(&(field::ip_saddr(), field::th_dport()), "allowed").ret(),
                Rule::new().one_of(&field::l4proto(), &[L4Proto::TCP, L4Proto::UDP]).accept(),
                Rule::new()
                    .vmap_of(
                        &(field::ip_daddr(), field::l4proto()),
                        &[
                            ((vip, L4Proto::TCP), Verdict::Goto("logged".into())),
                            ((vip, L4Proto::UDP), Verdict::Drop),
                        ],
                    )
                    .comment("own map"),
            ],
        )
}

/// One rule for every expression that the builder knows.
fn everything() -> TableState {
    let ports = Set::of::<(Ipv6Addr, IfName)>("names").timeouts().size(64);
    let all = [
        Rule::new()
            .eq(field::iifname(), &IfName::new("eth0"))
            .ne(field::oifname(), &IfName::new("lo"))
            .accept(),
        Rule::new().eq(field::iif(), &IfIndex(1)).set_mark(Mark(7)),
        Rule::new().eq(field::skuid(), &Uid(1000)).drop(),
        Rule::new().eq(field::nfproto(), &NfProto::IPV6).eq(field::l4proto(), &L4Proto::TCP).ret(),
        Rule::new()
            .eq(field::l4proto(), &L4Proto::TCP)
            .between(field::th_dport(), &Port(1024), &Port(2048))
            .reject(Reject::TcpReset),
        Rule::new().reject(Reject::Icmpx(IcmpxCode::PortUnreachable)),
        Rule::new().any_of(field::ct_status(), &CtStatus::DNAT).set_mark_bits(0xff00, 0x1200),
        Rule::new().eq(field::ct_mark(), &Mark(3)).set_ct_mark_bits(0xf, 0x5).save_mark().restore_mark(),
        Rule::new().eq(field::ct_ip_daddr(Direction::Original), &v4("10.96.0.1")).counter(),
        Rule::new().eq(field::ct_ip6_saddr(Direction::Reply), &"fd00::1".parse().expect("address")).counter(),
        Rule::new()
            .eq(field::ct_protocol(), &L4Proto::TCP)
            .eq(field::ct_proto_dst(Direction::Original), &Port(80))
            .set_ct_mark(Mark(9)),
        Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL).accept(),
        Rule::new().eq(field::fib_exists(FibFlags::SADDR | FibFlags::IIF), &Exists(false)).drop(),
        Rule::new().limit(10, Duration::from_secs(1), 5).log("knit: ").limit_over(
            3,
            Duration::from_secs(60),
            9,
        ),
        Rule::new().log_group("knit: ", 5),
        Rule::new().eq(field::symhash(4), &Mark(1)).accept(),
        Rule::new()
            .eq(field::jhash(&(field::ip_saddr(), field::th_sport()), 8, Some(0xdead_beef)), &Mark(2))
            .accept(),
        Rule::new().eq(field::numgen_inc(3), &Mark(0)).drop(),
        Rule::new().eq(field::socket_mark(), &Mark(1)).accept(),
        Rule::new().eq(field::socket_transparent(), &Boolean(true)).accept(),
        Rule::new().eq(field::socket_wildcard(), &Boolean(false)).accept(),
        Rule::new()
            .eq(field::nfproto(), &NfProto::IPV6)
            .not_in_prefix(field::ip6_saddr(), ip("fd00::"), 64)
            .counter(),
        Rule::new().eq(field::nfproto(), &NfProto::IPV6).update_set(
            &(field::ip6_saddr(), field::iifname()),
            "updated",
            Some(Duration::from_secs(30)),
        ),
        Rule::new().add_to_set(&field::th_dport(), "seen", None),
        Rule::new().eq(field::ether_saddr(), &EtherAddr([2, 0, 0, 0, 0, 1])).counter(),
        Rule::new().not_one_of(&field::th_dport(), &[Port(22), Port(443)]).jump("next"),
        Rule::new().eq(field::nfproto(), &NfProto::IPV4).in_ranges::<Ipv4Addr>(
            &field::ip_saddr(),
            vec![Element::prefix(ip("10.0.0.0"), 8), Element::prefix(ip("172.16.0.0"), 12)],
        ),
    ];
    TableState::new(TableId::new(Family::Inet, "everything"))
        .set(ports, [])
        .set(Set::of::<(Ipv6Addr, IfName)>("updated").dynamic(10).timeouts(), [])
        .set(Set::of::<Port>("seen").dynamic(100), [])
        .chain(Chain::regular("next"), [])
        .chain(Chain::base("in", ChainKind::Filter, Hook::Prerouting, -150), all)
        .chain(
            Chain::base("raw", ChainKind::Filter, Hook::Prerouting, -300),
            [Rule::new().notrack(), Rule::new().set_ct_zone(Zone(5))],
        )
        .chain(
            Chain::base("nat", ChainKind::Nat, Hook::Output, -100),
            [
                Rule::new().eq(field::l4proto(), &L4Proto::TCP).dnat_to(ip("fd00::2"), Some(Port(80))),
                Rule::new().eq(field::l4proto(), &L4Proto::TCP).redirect_to(Port(8080)),
                Rule::new().nat_to(NatKind::Dnat, ip("10.0.0.1"), None, NatFlags::NONE),
            ],
        )
}

fn nft(kernel: &mut Kernel, args: &[&str]) -> Option<String> {
    let _ = kernel;
    match Command::new("nft").args(args).output() {
        Err(error) => {
            skip(format_args!("comparison with nft: it is not installed ({error})"));
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "nft {args:?}: {}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8(output.stdout).expect("nft prints UTF-8"))
        }
    }
}

#[test]
fn a_service_table_comes_back_as_it_was_written() {
    in_namespaces(|| {
        let mut kernel = Kernel::open().expect("nfnetlink");
        let wanted = services();
        let first = kernel.apply(&wanted).expect("the kernel takes it");
        assert!(!first.is_empty());
        let found = kernel.table(wanted.id()).expect("listing").expect("it is there").without_handles();
        assert_eq!(found.to_string(), wanted.to_string());
        assert_eq!(found, wanted);
        let second = kernel.apply(&wanted).expect("nothing to do");
        assert!(second.is_empty(), "a second pass changes nothing: {second}");
        if let Some(text) = nft(&mut kernel, &["list", "ruleset"]) {
            for line in [
                "comment \"made by knit\"",
                "type ipv4_addr . inet_proto . inet_service : verdict",
                "type ipv4_addr . inet_proto . inet_service . mark : ipv4_addr . inet_service",
                "10.96.0.1 . tcp . 80 comment \"ns1/web\" : goto lb-2",
                "dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 2 map @endpoints",
                "ip daddr . meta l4proto . th dport vmap @service-ips comment \"dispatch\"",
                "10.0.0.0/8 counter packets 0 bytes 0 comment \"pods\"",
                "192.168.0.10-192.168.0.19",
                "255.255.255.0/24",
                "10.1.0.0/16 . 1-1024",
                "masquerade fully-random",
                "ct state established,related counter packets 0 bytes 0 accept comment \"replies\"",
                "update @affinity { ip saddr . ct original ip daddr . ct original proto-dst : ip daddr . th \
                 dport }",
                "snat to 192.0.2.1 fully-random,persistent",
                "policy drop",
            ] {
                assert!(text.contains(line), "nft does not print {line:?}:\n{text}");
            }
        }
    });
}

#[test]
fn every_expression_comes_back_as_it_was_written() {
    in_namespaces(|| {
        let mut kernel = Kernel::open().expect("nfnetlink");
        let wanted = everything();
        kernel.apply(&wanted).expect("the kernel takes it");
        let found = kernel.table(wanted.id()).expect("listing").expect("it is there").without_handles();
        assert_eq!(found.to_string(), wanted.to_string());
        assert_eq!(found, wanted);
        assert!(kernel.apply(&wanted).expect("nothing to do").is_empty());
        if let Some(text) = nft(&mut kernel, &["list", "ruleset"]) {
            for line in [
                "iifname \"eth0\" oifname != \"lo\" accept",
                "reject with tcp reset",
                "ct status dnat",
                "ct original ip daddr 10.96.0.1",
                "fib daddr type local accept",
                "fib saddr . iif oif missing drop",
                "limit rate 10/second",
                "log prefix \"knit: \" group 5",
                "update @updated { ip6 saddr . iifname timeout 30s }",
                "dnat ip6 to [fd00::2]:80",
                "redirect to :8080",
                "ct zone set 5",
                "notrack",
            ] {
                assert!(text.contains(line), "nft does not print {line:?}:\n{text}");
            }
        }
    });
}

#[test]
fn cgroups_are_matched_by_id() {
    in_namespaces(|| {
        let mut kernel = Kernel::open().expect("nfnetlink");
        let wanted = TableState::new(TableId::new(Family::Inet, "cgroups")).chain(
            Chain::base("out", ChainKind::Filter, Hook::Output, 0),
            [Rule::new().eq(field::socket_cgroup(1), &CgroupId(1)).counter()],
        );
        match kernel.apply(&wanted) {
            Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => {
                skip_for_kernel("socket cgroupv2 expression");
            }
            other => {
                other.expect("the kernel takes it");
                assert!(kernel.apply(&wanted).expect("nothing to do").is_empty());
            }
        }
    });
}

#[test]
fn bridges_are_matched_by_name() {
    in_namespaces(|| {
        let mut kernel = Kernel::open().expect("nfnetlink");
        let wanted = TableState::new(TableId::new(Family::Bridge, "bridges")).chain(
            Chain::base("forward", ChainKind::Filter, Hook::Forward, 0),
            [Rule::new().eq(field::ibrname(), &IfName::new("br0")).drop()],
        );
        match kernel.apply(&wanted) {
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::ENOENT)) => {
                skip_for_kernel("bridge family or no meta ibrname");
            }
            other => {
                other.expect("the kernel takes it");
                assert!(kernel.apply(&wanted).expect("nothing to do").is_empty());
            }
        }
    });
}

#[test]
fn tables_are_printed_for_people() {
    insta::assert_snapshot!("services", services());
    insta::assert_snapshot!("everything", everything());
    insta::assert_snapshot!("services_plan", diff(None, &services()));
}

#[test]
fn a_refusal_names_the_object() {
    in_namespaces(|| {
        let mut kernel = Kernel::open().expect("nfnetlink");
        let id = TableId::new(Family::Ip, "knit");
        let map = Set::verdict_map::<ServiceKey>("service-ips");
        let key = |port| Element::new(&(v4("10.0.0.1"), L4Proto::TCP, Port(port)));
        let elements =
            |ports: &[u16]| ports.iter().map(|port| key(*port).verdict(Verdict::Drop)).collect::<Vec<_>>();
        let mut tx = Transaction::new();
        tx.add_table(id.clone()).add_set(&id, map.clone()).add_elements(&id, &map, elements(&[1, 2, 3]));
        kernel.commit(&tx).expect("the first time");

        let mut tx = Transaction::new();
        tx.create_elements(&id, &map, elements(&[7, 8, 2, 9]));
        let error = kernel.commit(&tx).expect_err("2 is there");
        assert!(error.is_exists(), "{error:?}");
        assert_eq!(error.to_string(), "cannot create element 10.0.0.1 . tcp . 2 to map ip knit service-ips");
        assert_eq!(error.index(), Some(0));

        let mut tx = Transaction::new();
        tx.add_chain(&id, Chain::regular("a")).delete_elements(&id, &map, elements(&[5]));
        let error = kernel.commit(&tx).expect_err("5 is not there");
        assert!(error.is_not_found(), "{error:?}");
        assert_eq!(error.to_string(), "cannot delete element 10.0.0.1 . tcp . 5 of map ip knit service-ips");
        assert_eq!(error.index(), Some(1));
        let state = kernel.table(&id).expect("listing").expect("there");
        assert!(state.chains.is_empty(), "nothing of a refused transaction stays");
        assert_eq!(state.sets["service-ips"].elements.len(), 3);

        let mut tx = Transaction::new();
        tx.add_chain(&id, Chain::regular("a")).add_rule(&id, "a", Rule::new().jump("nowhere"));
        let error = kernel.commit(&tx).expect_err("no such chain");
        assert!(error.is_not_found());
        assert_eq!(error.to_string(), "cannot add rule ip knit a jump nowhere");

        let mut tx = Transaction::new();
        tx.add_chain(&id, Chain::regular("a")).add_rule(
            &id,
            "a",
            Rule::new().vmap(&(field::ip_daddr(), field::l4proto(), field::th_dport()), "service-ips"),
        );
        kernel.commit(&tx).expect("a user of the map");
        let mut tx = Transaction::new();
        tx.delete_set(&id, "service-ips");
        let error = kernel.commit(&tx).expect_err("in use");
        assert!(error.is_busy() && error.is_retryable(), "{error:?}");
        assert_eq!(error.to_string(), "cannot delete set ip knit service-ips");
    });
}

#[test]
fn what_cannot_be_said_is_refused_before_it_is_sent() {
    let mut fake = Fake::new();
    let id = TableId::new(Family::Ip, "knit");
    let long = "x".repeat(300);
    for (name, comment) in [("", ""), (long.as_str(), ""), ("a\0b", ""), ("good", long.as_str())] {
        let mut tx = Transaction::new();
        tx.add_table(id.clone()).add_chain(&id, Chain::regular(name).comment(comment));
        let error = fake.commit(&tx).expect_err("not valid");
        assert!(matches!(error, knit_nft::Error::Invalid { .. }), "{error:?}");
    }
    let mut tx = Transaction::new();
    let wide =
        (field::ip6_saddr(), field::ip6_daddr(), field::ip6_saddr(), field::ip6_daddr(), field::th_dport());
    tx.add_table(id.clone()).add_chain(&id, Chain::regular("a"));
    tx.add_rule(&id, "a", Rule::new().in_set(&wide, "s"));
    assert!(matches!(fake.commit(&tx), Err(knit_nft::Error::Invalid { .. })));
    let mut tx = Transaction::new();
    tx.add_table(id.clone()).add_chain(&id, Chain::regular("a"));
    tx.add_rule(&id, "a", Rule::new().in_prefix(field::ip_saddr(), ip("fd00::"), 64));
    assert!(matches!(fake.commit(&tx), Err(knit_nft::Error::Invalid { .. })));
}
