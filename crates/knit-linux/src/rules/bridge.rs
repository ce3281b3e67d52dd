//! The table of a switched Network's bridge: its pods send frames as themselves only.
//!
//! Only IP and ARP. Sender addresses in ARP, and targets of neighbour advertisements, are the pod's own.
//! Router advertisements and redirects are routers' business. Multicast listener reports are dropped because
//! nobody listens: snooping is off, and each would go to every port.
//!
//! Nothing about neighbours comes from other nodes: the bridge answers for their pods, from entries that are
//! permanent. Where a frame comes from is checked with its source (`tunnel`), which an advertisement's target
//! is not; that of ARP is its sender, and checked there.

use std::time::Duration;

use knit_nft::{
    ArpOp, Chain, ChainKind, EtherType, Family, Hook, Icmp6Type, IfName, L4Proto, Mark, Rule, Set, Table,
    TableState, field,
};

use super::{from_ours, port, table};

const FIRST: i32 = -300;

/// How many questions who has an address a pod may ask in a second, and at once. Each goes to every pod of
/// the Network on this node.
const QUESTIONS: (u64, u32) = (100, 300);
/// When a port's questions are counted from the start again: so long are ports remembered that are gone.
const QUESTIONS_TIMEOUT: Duration = Duration::from_secs(60);

/// The chains in which a pod's questions are counted, and the comment of the rules that drop what is too
/// many.
pub(crate) const ASKED_IN: [&str; 2] = ["port", "icmp6"];
pub(crate) const TOO_MANY: &str = "too many";

const ARP_REQUEST: ArpOp = ArpOp(1);
const NEIGHBOUR_SOLICITATION: Icmp6Type = Icmp6Type(135);
const NEIGHBOUR_ADVERTISEMENT: Icmp6Type = Icmp6Type(136);
const FORBIDDEN: [Icmp6Type; 6] =
    [Icmp6Type(130), Icmp6Type(131), Icmp6Type(132), Icmp6Type(134), Icmp6Type(137), Icmp6Type(143)];

const ROUTER_SOLICITATION: Icmp6Type = Icmp6Type(133);
/// What a node sends only about itself, or that no other node is asked for.
const ABOUT_NEIGHBOURS: [Icmp6Type; 3] =
    [ROUTER_SOLICITATION, NEIGHBOUR_SOLICITATION, NEIGHBOUR_ADVERTISEMENT];

/// Ports that asked.
fn questions() -> Set {
    Set::of::<IfName>("questions").dynamic(1 << 16).timeouts().comment("ports that asked who has an address")
}

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
        .set(questions(), [])
        .chain(
            Chain::base("ports", ChainKind::Filter, Hook::Prerouting, FIRST),
            [
                from_ours(Rule::new()).goto("port"),
                Rule::new().eq(field::iifgroup(), &Mark(crate::tunnel::GROUP)).goto("tunnel"),
            ],
        )
        .chain(
            Chain::regular("tunnel").comment("what comes from other nodes"),
            [FORBIDDEN.as_slice(), &ABOUT_NEIGHBOURS].map(|types| {
                Rule::new()
                    .eq(field::ether_type(), &EtherType::IPV6)
                    .eq(field::l4proto(), &L4Proto::ICMPV6)
                    .one_of(&field::icmpv6_type(), types)
                    .counter()
                    .drop()
            }),
        )
        .chain(
            Chain::regular("port").comment("what a pod sends"),
            [
                Rule::new().eq(field::ether_type(), &EtherType::IPV4).in_set(&source4, "sources4").accept(),
                Rule::new().eq(field::ether_type(), &EtherType::IPV6).goto("port6"),
                too_many(
                    Rule::new()
                        .eq(field::ether_type(), &EtherType::ARP)
                        .eq(field::arp_operation(), &ARP_REQUEST),
                ),
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
                Rule::new().eq(field::l4proto(), &L4Proto::ICMPV6).jump("icmp6"),
                Rule::new().in_set(&source6, "sources6").accept(),
                Rule::new().counter().drop().comment("spoofed"),
            ],
        )
        .chain(
            Chain::regular("icmp6"),
            [
                Rule::new().one_of(&field::icmpv6_type(), &FORBIDDEN).drop(),
                Rule::new()
                    .eq(field::icmpv6_type(), &NEIGHBOUR_ADVERTISEMENT)
                    .not_in_set(&target, "sources6")
                    .counter()
                    .drop()
                    .comment("spoofed"),
                too_many(Rule::new().eq(field::icmpv6_type(), &NEIGHBOUR_SOLICITATION)),
            ],
        )
}

/// More questions than a port may ask.
fn too_many(rule: Rule) -> Rule {
    rule.limit_each(&field::iifname(), "questions", QUESTIONS, QUESTIONS_TIMEOUT)
        .counter()
        .drop()
        .comment(TOO_MANY)
}
