//! What holds for the ports of routed pods, in whichever namespace they are.
//!
//! Pods send from their own addresses only. No ARP: both sides have permanent neighbours. No router
//! advertisements and redirects.

use std::net::{Ipv4Addr, Ipv6Addr};

use knit_nft::{
    Chain, ChainKind, EtherAddr, Family, Hook, Icmp6Type, IfName, L4Proto, NfProto, Rule, Set, Table,
    TableState, field,
};

use super::{from_ours, ranges, table};

/// Keys of the sets of sources.
pub(super) type Source4 = (IfName, EtherAddr, Ipv4Addr);
pub(super) type Source6 = (IfName, EtherAddr, Ipv6Addr);

/// Before connection tracking: a spoofed packet leaves no trace.
const RAW: i32 = -300;

const ROUTER_ADVERTISEMENT: Icmp6Type = Icmp6Type(134);
const REDIRECT: Icmp6Type = Icmp6Type(137);

/// Which sources a port may have.
pub(crate) fn sources4() -> Set {
    Set::of::<Source4>("sources4").comment("port, MAC and address of each pod")
}

/// Which sources a port may have.
pub(crate) fn sources6() -> Set {
    Set::of::<Source6>("sources6").comment("port, MAC and address of each pod")
}

/// The Network's own ranges.
pub(crate) fn pods4() -> Set {
    ranges::<Ipv4Addr>("pods4").comment("subnets of this Network")
}

/// The Network's own ranges.
pub(crate) fn pods6() -> Set {
    ranges::<Ipv6Addr>("pods6").comment("subnets of this Network")
}

/// Adds the checks of ports to an `inet` table. `excepted` is a set of interfaces of ours that are no ports;
/// `others` are rules for what comes by interfaces that are not ours.
pub(super) fn checks(state: TableState, excepted: &str, others: Vec<Rule>) -> TableState {
    let source4 = (field::iifname(), field::ether_saddr(), field::ip_saddr());
    let source6 = (field::iifname(), field::ether_saddr(), field::ip6_saddr());
    let ports =
        [Rule::new().in_set(&field::iifname(), excepted).accept(), from_ours(Rule::new()).goto("port")];
    state
        .set(sources4(), [])
        .set(sources6(), [])
        .set(pods4(), [])
        .set(pods6(), [])
        .chain(
            Chain::base("ports", ChainKind::Filter, Hook::Prerouting, RAW),
            ports.into_iter().chain(others),
        )
        .chain(
            Chain::regular("port").comment("what a pod sends"),
            [
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::ICMPV6)
                    .one_of(&field::icmpv6_type(), &[ROUTER_ADVERTISEMENT, REDIRECT])
                    .drop(),
                Rule::new().eq(field::nfproto(), &NfProto::IPV4).in_set(&source4, "sources4").accept(),
                Rule::new().eq(field::nfproto(), &NfProto::IPV6).in_set(&source6, "sources6").accept(),
                Rule::new().counter().drop().comment("spoofed"),
            ],
        )
}

/// The table that keeps ARP away.
pub(crate) fn no_arp() -> TableState {
    TableState::new(
        Table::new(table(Family::Arp)).comment("made by knit: neighbours of routed pods are permanent"),
    )
    .chain(Chain::base("ports", ChainKind::Filter, Hook::Input, 0), [from_ours(Rule::new()).drop()])
}
