//! The table of a router with a namespace of its own: what may go up, and who it looks like there.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use knit_nft::{
    Chain, ChainKind, CtDirection, CtState, Family, Hook, IfName, L4Proto, NatFlags, NfProto, Rule, Set,
    Table, TableState, field,
};
use knit_types::Family as IpFamily;

use super::{SetElement, port, range_elements, ranges, table, tunnel};
use crate::shape::Shape;
use crate::uplink::ROUTER_END;

/// After connection tracking, before any translation.
const MANGLE: i32 = -150;
const FILTER: i32 = 0;
const SRCNAT: i32 = 100;
const REPLY: CtDirection = CtDirection(1);

fn inside4() -> Set {
    ranges::<Ipv4Addr>("inside4").comment("not the outside")
}

fn inside6() -> Set {
    ranges::<Ipv6Addr>("inside6").comment("not the outside")
}

fn outward4() -> Set {
    ranges::<Ipv4Addr>("outward4").comment("may reach the outside")
}

fn outward6() -> Set {
    ranges::<Ipv6Addr>("outward6").comment("may reach the outside")
}

fn services4() -> Set {
    Set::of::<Ipv4Addr>("services4").comment("services of the default Network")
}

fn services6() -> Set {
    Set::of::<Ipv6Addr>("services6").comment("services of the default Network")
}

/// Interfaces that are no ports.
fn others() -> Set {
    Set::of::<IfName>("others")
}

/// The beginning of a router's table that checks what comes by ports.
pub(crate) fn with_ports() -> TableState {
    port::checks(empty().set(others(), []), "others", Vec::new())
}

/// The beginning of a router's table whose ports are checked elsewhere.
pub(crate) fn without_ports() -> TableState {
    empty().set(port::pods4(), []).set(port::pods6(), [])
}

fn empty() -> TableState {
    TableState::new(Table::new(table(Family::Inet)).comment("made by knit"))
}

/// Interfaces of a router that checks ports, and that are none.
pub(crate) fn not_ports(links: [&str; 2]) -> Vec<SetElement> {
    let element = |link| knit_nft::Element::new(&IfName::new(link));
    links.map(|link| SetElement::new(others(), element(link))).into()
}

/// A router's table, without any element.
pub(crate) fn layout(beginning: TableState, vxlan_port: u16) -> TableState {
    let state = beginning;
    let state = [inside4(), inside6(), outward4(), outward6(), services4(), services6()]
        .into_iter()
        .fold(state, |state, set| state.set(set, []));
    let uplink = IfName::new(ROUTER_END);
    let random = NatFlags { fully_random: true, ..NatFlags::default() };
    let from_uplink = || Rule::new().eq(field::iifname(), &uplink);
    state
        .chain(
            Chain::base("from-uplinks", ChainKind::Filter, Hook::Prerouting, MANGLE),
            [
                from_uplink()
                    .eq(field::nfproto(), &NfProto::IPV4)
                    .in_set(&field::ip_saddr(), "pods4")
                    .counter()
                    .drop()
                    .comment("nobody out there is a pod"),
                from_uplink()
                    .eq(field::nfproto(), &NfProto::IPV6)
                    .in_set(&field::ip6_saddr(), "pods6")
                    .counter()
                    .drop(),
            ],
        )
        .chain(
            Chain::base("to-uplinks", ChainKind::Filter, Hook::Forward, FILTER),
            [Rule::new().eq(field::oifname(), &uplink).goto("to-uplink")],
        )
        .chain(Chain::regular("to-uplink").comment("default deny"), to_uplink(vxlan_port))
        .chain(
            Chain::base("router", ChainKind::Filter, Hook::Input, FILTER),
            [
                Rule::new().eq(field::iifname(), &IfName::new("lo")).accept(),
                Rule::new().eq(field::ct_direction(), &REPLY).accept(),
                Rule::new().any_of(field::ct_state(), &CtState::RELATED).accept(),
                Rule::new().one_of(&field::l4proto(), &[L4Proto::ICMP, L4Proto::ICMPV6]).accept(),
                Rule::new().counter().drop().comment("a router serves nothing itself"),
            ],
        )
        .chain(
            Chain::base("masquerade", ChainKind::Nat, Hook::Postrouting, SRCNAT),
            [Rule::new().eq(field::oifname(), &uplink).masquerade(random)],
        )
}

fn to_uplink(vxlan_port: u16) -> Vec<Rule> {
    let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
    let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
    vec![
        Rule::new().eq(field::ct_direction(), &REPLY).accept().comment("answers"),
        Rule::new().any_of(field::ct_state(), &CtState::RELATED).accept(),
        // What is not tracked here is not translated either, and would look like somebody else's on the node.
        Rule::new().any_of(field::ct_state(), &CtState::INVALID).drop(),
        tunnel::to_tunnel(vxlan_port).counter().drop().comment("tunnels"),
        v4().in_set(&field::ip_daddr(), "services4").accept(),
        v6().in_set(&field::ip6_daddr(), "services6").accept(),
        v4().in_set(&field::ip_saddr(), "outward4").not_in_set(&field::ip_daddr(), "inside4").accept(),
        v6().in_set(&field::ip6_saddr(), "outward6").not_in_set(&field::ip6_daddr(), "inside6").accept(),
        Rule::new().counter().drop(),
    ]
}

/// The elements that a Network has there, besides those of its pods.
pub(crate) fn elements(shape: &Shape) -> Vec<SetElement> {
    let network = &shape.network;
    let subnets: Vec<IpNet> = network.subnets.iter().map(|subnet| subnet.cidr).collect();
    let inside = network.not_outside.iter().chain(&subnets).copied();
    let inside: Vec<IpNet> = inside.chain(super::never_outside()).collect();
    let outward: &[IpNet] = if network.outside { &subnets } else { &[] };
    let mut puts = Vec::new();
    let mut put = |set: fn() -> Set, nets: &[IpNet], family| {
        puts.extend(range_elements(nets, family).into_iter().map(|element| SetElement::new(set(), element)));
    };
    put(port::pods4, &subnets, IpFamily::V4);
    put(port::pods6, &subnets, IpFamily::V6);
    put(inside4, &inside, IpFamily::V4);
    put(inside6, &inside, IpFamily::V6);
    put(outward4, outward, IpFamily::V4);
    put(outward6, outward, IpFamily::V6);
    for service in &network.cluster_service_ips {
        puts.push(match service {
            std::net::IpAddr::V4(v4) => SetElement::new(services4(), knit_nft::Element::new(v4)),
            std::net::IpAddr::V6(v6) => SetElement::new(services6(), knit_nft::Element::new(v6)),
        });
    }
    puts
}
