//! The table of a switched Network's bridge: its pods send frames as themselves only.
//!
//! Only IP and ARP. Sender addresses in ARP, and targets of neighbour advertisements, are the pod's own. Router
//! advertisements and redirects are routers' business. Multicast listener reports are dropped because nobody listens:
//! snooping is off, and each would go to every port.

use knit_kernel::nft::{
    Chain, ChainKind, EtherType, Family, Hook, Icmp6Type, L4Proto, Rule, Table, TableState, field,
};

use super::{from_ours, port, table};

const FIRST: i32 = -300;

const NEIGHBOUR_ADVERTISEMENT: Icmp6Type = Icmp6Type(136);
const FORBIDDEN: [Icmp6Type; 6] =
    [Icmp6Type(130), Icmp6Type(131), Icmp6Type(132), Icmp6Type(134), Icmp6Type(137), Icmp6Type(143)];

/// The bridge's table.
pub(crate) fn layout() -> TableState {
    let source4 = (field::iifname(), field::ether_saddr(), field::ip_saddr());
    let source6 = (field::iifname(), field::ether_saddr(), field::ip6_saddr());
    let frame = (field::iifname(), field::ether_saddr(), field::arp_saddr_ip());
    let sender = (field::iifname(), field::arp_saddr_ether(), field::arp_saddr_ip());
    let target = (field::iifname(), field::ether_saddr(), field::nd_target());
    TableState::new(Table::new(table(Family::Bridge)).comment("made by knit"))
        .set(port::sources4(), [])
        .set(port::sources6(), [])
        .chain(
            Chain::base("ports", ChainKind::Filter, Hook::Prerouting, FIRST),
            [from_ours(Rule::new()).goto("port")],
        )
        .chain(
            Chain::regular("port").comment("what a pod sends"),
            [
                Rule::new().eq(field::ether_type(), &EtherType::IPV4).in_set(&source4, "sources4").accept(),
                Rule::new().eq(field::ether_type(), &EtherType::IPV6).goto("port6"),
                Rule::new()
                    .eq(field::ether_type(), &EtherType::ARP)
                    .in_set(&frame, "sources4")
                    .in_set(&sender, "sources4")
                    .accept(),
                Rule::new().counter().drop().comment("spoofed"),
            ],
        )
        .chain(
            Chain::regular("port6"),
            [
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::ICMPV6)
                    .one_of(&field::icmpv6_type(), &FORBIDDEN)
                    .drop(),
                Rule::new()
                    .eq(field::l4proto(), &L4Proto::ICMPV6)
                    .eq(field::icmpv6_type(), &NEIGHBOUR_ADVERTISEMENT)
                    .not_in_set(&target, "sources6")
                    .counter()
                    .drop()
                    .comment("spoofed"),
                Rule::new().in_set(&source6, "sources6").accept(),
                Rule::new().counter().drop().comment("spoofed"),
            ],
        )
}
