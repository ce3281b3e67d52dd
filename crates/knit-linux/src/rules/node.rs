//! The node's own table: the default Network's pods, ports of the node, and the node's side of every uplink.

use std::net::{Ipv4Addr, Ipv6Addr};

use knit_nft::expr::CmpOp;
use knit_nft::{
    AddrType, Chain, ChainKind, CtDirection, CtState, CtStatus, Data, Element, Exists, Expr, Family,
    FibFlags, Hook, IfName, L4Proto, Mark, NatFlags, NfProto, Port, Reg, Rule, Scalar, Set, Table,
    TableState, field,
};

use super::{GROUP, GROUP_MASK, STEERED, from_ours, port, ranges, table, to_others, tunnel};
use crate::uplink;

/// A little before other people's destination translation: ports of the node and steering come first.
const BEFORE_DSTNAT: i32 = -110;
/// After connection tracking, before any translation.
const MANGLE: i32 = -150;
const SRCNAT: i32 = 100;
const FILTER: i32 = 0;

/// How many keys the connections of one uplink are counted under.
const FLOW_PARTS: u32 = 256;
/// Which part of what all uplinks may have together each of them may have besides. Where that is half of the
/// node's table, and there are no more than half as many Networks, a quarter of the table is left.
const FIRST_FLOWS: u32 = 64;
/// How many keys those of all uplinks together are counted under.
const ALL_FLOW_PARTS: u32 = 1024;

/// The most connections that come out of routers, about; 0 is as many as there is room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flows {
    /// Of each Network.
    pub each: u32,
    /// Of all of them.
    pub together: u32,
}

const REPLY: CtDirection = CtDirection(1);

/// Sets of the node's table that are keyed by an uplink.
pub(crate) mod uplinks {
    use super::*;

    /// The uplinks.
    pub(crate) fn all() -> Set {
        Set::of::<IfName>("uplinks").comment("to the routers of other Networks")
    }

    /// Those whose Network reaches the outside.
    pub(crate) fn outside() -> Set {
        Set::of::<IfName>("uplinks-outside").comment("whose Network reaches the outside")
    }

    /// Which services a Network reaches.
    pub(crate) fn services4() -> Set {
        Set::of::<(IfName, Ipv4Addr)>("uplink-services4")
    }

    /// Which services a Network reaches.
    pub(crate) fn services6() -> Set {
        Set::of::<(IfName, Ipv6Addr)>("uplink-services6")
    }

    /// What is not the outside for a Network.
    pub(crate) fn inside4() -> Set {
        Set::of::<(IfName, Ipv4Addr)>("uplink-inside4").interval()
    }

    /// What is not the outside for a Network.
    pub(crate) fn inside6() -> Set {
        Set::of::<(IfName, Ipv6Addr)>("uplink-inside6").interval()
    }
}

/// What is not the outside for the default Network.
pub(crate) fn inside4() -> Set {
    ranges::<Ipv4Addr>("inside4").comment("not the outside")
}

/// What is not the outside for the default Network.
pub(crate) fn inside6() -> Set {
    ranges::<Ipv6Addr>("inside6").comment("not the outside")
}

/// Sources that are masqueraded: the default Network's ranges if it may reach the outside.
pub(crate) fn outward4() -> Set {
    ranges::<Ipv4Addr>("outward4").comment("may reach the outside")
}

/// Sources that are masqueraded: the default Network's ranges if it may reach the outside.
pub(crate) fn outward6() -> Set {
    ranges::<Ipv6Addr>("outward6").comment("may reach the outside")
}

/// Ports of the node, on all of its addresses.
pub(crate) fn host_ports4() -> Set {
    Set::map::<(L4Proto, Port), (Ipv4Addr, Port)>("host-ports4")
}

/// Ports of the node, on all of its addresses.
pub(crate) fn host_ports6() -> Set {
    Set::map::<(L4Proto, Port), (Ipv6Addr, Port)>("host-ports6")
}

/// Ports of the node, on one of its addresses.
pub(crate) fn host_ports_at4() -> Set {
    Set::map::<(Ipv4Addr, L4Proto, Port), (Ipv4Addr, Port)>("host-ports-at4")
}

/// Ports of the node, on one of its addresses.
pub(crate) fn host_ports_at6() -> Set {
    Set::map::<(Ipv6Addr, L4Proto, Port), (Ipv6Addr, Port)>("host-ports-at6")
}

/// Pods that have ports of the node, as both source and destination: they may come back to themselves.
pub(crate) fn hairpin4() -> Set {
    Set::of::<(Ipv4Addr, Ipv4Addr)>("hairpin4")
}

/// Pods that have ports of the node, as both source and destination: they may come back to themselves.
pub(crate) fn hairpin6() -> Set {
    Set::of::<(Ipv6Addr, Ipv6Addr)>("hairpin6")
}

/// Connections that came out of routers, counted by uplink and a part of the connection's hash.
fn flows() -> Set {
    let most = u32::from(uplink::COUNT) * FLOW_PARTS;
    Set::of::<(IfName, Mark)>("flows").dynamic(most).comment("connections of each uplink, in parts")
}

/// The same, up to the number that each of them may have however many all of them have.
fn first_flows() -> Set {
    let most = u32::from(uplink::COUNT) * FLOW_PARTS;
    Set::of::<(IfName, Mark)>("first-flows")
        .dynamic(most)
        .comment("connections of each uplink, up to those that it may have in any case")
}

/// What comes on top of that, of all uplinks together.
fn all_flows() -> Set {
    Set::of::<Mark>("all-flows")
        .dynamic(ALL_FLOW_PARTS)
        .comment("connections of all uplinks beyond their first, in parts")
}

/// Connections that were refused to a Network because it had too many, counted by its uplink.
pub(crate) fn refused() -> Set {
    Set::of::<IfName>("refused")
        .dynamic(u32::from(uplink::COUNT))
        .comment("connections, to one that had too many")
}

/// Connections that were refused to a Network because all of them had too many, counted by its uplink.
pub(crate) fn refused_together() -> Set {
    Set::of::<IfName>("all-refused")
        .dynamic(u32::from(uplink::COUNT))
        .comment("connections, because all together had too many")
}

/// Whether an element of a set is the default Network's, which has this number.
pub(crate) fn is_default(set: &str, element: &Element, network: u32) -> bool {
    ["sources", "pods", "inside", "outward", "known"].iter().any(|name| set.starts_with(name))
        || tunnel::is_of(set, element, network)
}

/// Whether all elements of a set are about a Network's uplink or tunnel.
pub(crate) fn is_by_network(set: &str) -> bool {
    set.starts_with("uplink") || set.starts_with("tunnel-")
}

/// The number of the Network whose uplink or tunnel an element of a set is about.
pub(crate) fn network_of(set: &str, element: &Element) -> Option<u32> {
    if set.starts_with("uplink") {
        return super::interface(element).strip_prefix(uplink::NODE_END_PREFIX)?.parse().ok();
    }
    tunnel::network_of(set, element)
}

/// The node's table without any element that depends on a Network or a pod.
pub(crate) fn layout(vxlan_port: u16, flows_at_most: Flows) -> TableState {
    let state = TableState::new(Table::new(table(Family::Inet)).comment("made by knit"));
    let frames = vec![tunnel::to_tunnel(vxlan_port).goto("tunnel")];
    let state = tunnel::checks(port::checks(state, "uplinks", frames), vxlan_port);
    let state = [
        uplinks::all(),
        uplinks::outside(),
        uplinks::services4(),
        uplinks::services6(),
        uplinks::inside4(),
        uplinks::inside6(),
        inside4(),
        inside6(),
        outward4(),
        outward6(),
        host_ports4(),
        host_ports6(),
        host_ports_at4(),
        host_ports_at6(),
        hairpin4(),
        hairpin6(),
        flows(),
        first_flows(),
        all_flows(),
        refused(),
        refused_together(),
    ]
    .into_iter()
    .fold(state, |state, set| state.set(set, []));
    let state = refusals(state, "refuse", "refused", "too many connections");
    let state = refusals(state, "refuse-all", "all-refused", "too many connections of all Networks");
    let state = state.chain(
        Chain::regular("further-flow").comment("one of those that Networks share"),
        further_flow(flows_at_most),
    );
    from_uplinks(to_uplinks(translation(state), vxlan_port), flows_at_most)
}

/// What comes out of a Network's router: answers, services that it lists, the outside if it may.
fn from_uplinks(state: TableState, flows_at_most: Flows) -> TableState {
    let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
    let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
    let (link4, link6) = uplink::ranges();
    state
        .chain(
            Chain::base("from-uplinks", ChainKind::Filter, Hook::Prerouting, MANGLE),
            [Rule::new().in_set(&field::iifname(), "uplinks").goto("from-uplink")],
        )
        .chain(
            Chain::regular("from-uplink").comment("default deny"),
            vec![
                Rule::new().any_of(field::ct_state(), &CtState::INVALID).drop(),
                Rule::new().eq(field::ct_direction(), &REPLY).accept().comment("answers"),
                Rule::new().any_of(field::ct_state(), &CtState::RELATED).goto("from-uplink-related"),
                v4().not_in_prefix(field::ip_saddr(), link4.addr().into(), link4.prefix_len())
                    .counter()
                    .drop(),
                v6().not_in_prefix(field::ip6_saddr(), link6.addr().into(), link6.prefix_len())
                    .counter()
                    .drop(),
                Rule::new().any_of(field::ct_state(), &CtState::NEW).jump("new-flow"),
                v4().in_set(&(field::iifname(), field::ip_daddr()), "uplink-services4").accept(),
                v6().in_set(&(field::iifname(), field::ip6_daddr()), "uplink-services6").accept(),
                Rule::new().not_in_set(&field::iifname(), "uplinks-outside").counter().drop(),
                Rule::new()
                    .ne(field::fib_addrtype(FibFlags::DADDR), &AddrType::UNICAST)
                    .counter()
                    .drop()
                    .comment("the node itself, and broadcast on its segments"),
                v4().in_set(&(field::iifname(), field::ip_daddr()), "uplink-inside4").counter().drop(),
                v6().in_set(&(field::iifname(), field::ip6_daddr()), "uplink-inside6").counter().drop(),
            ],
        )
        .chain(
            Chain::regular("new-flow").comment("one Network leaves others room, and all of them the node"),
            new_flow(flows_at_most),
        )
        .chain(
            Chain::regular("from-uplink-related")
                .comment("errors about connections, from who may know of them"),
            [
                Rule::new()
                    .eq(field::fib_exists(FibFlags::SADDR | FibFlags::IIF), &Exists(true))
                    .accept()
                    .comment("this router, and this node's pods behind it"),
                Rule::new().counter().drop(),
            ],
        )
}

/// Counts what is refused to each Network, and drops it. These are two rules: where there is no room to
/// count, the first one ends there.
fn refusals(state: TableState, chain: &str, counted: &str, why: &str) -> TableState {
    state.chain(
        Chain::regular(chain),
        [Rule::new().count_each(&field::iifname(), counted), Rule::new().counter().drop().comment(why)],
    )
}

/// Drops the first packet of a connection if its Network has too many. The kernel looks through all that it
/// counted under one key when another one comes, so each uplink has many keys: which one follows from the
/// connection's hash. All Networks together leave a part of the node's table to the node and the default
/// Network. What they share is what each has beyond its first connections: those it may have however many
/// greedy ones there are.
fn new_flow(Flows { each, together }: Flows) -> Vec<Rule> {
    let key = (field::iifname(), field::symhash(FLOW_PARTS));
    let of_one = Rule::new().connections_over(&key, "flows", each.div_ceil(FLOW_PARTS)).goto("refuse");
    let first = (together / FIRST_FLOWS).div_ceil(FLOW_PARTS);
    let further = Rule::new().connections_over(&key, "first-flows", first).goto("further-flow");
    [(each > 0).then_some(of_one), (together > 0).then_some(further)].into_iter().flatten().collect()
}

/// Drops it if all Networks together have too many.
fn further_flow(Flows { together, .. }: Flows) -> Vec<Rule> {
    let key = field::symhash(ALL_FLOW_PARTS);
    let most = together.div_ceil(ALL_FLOW_PARTS);
    let of_all = Rule::new().connections_over(&key, "all-flows", most).goto("refuse-all");
    (together > 0).then_some(of_all).into_iter().collect()
}

/// Goes out by an uplink, known by its group and how its name begins. Beside the set of uplinks, so that all
/// of them are closed as soon as this table is there: after somebody deleted it, the elements come back
/// Network by Network.
fn to_routers() -> Rule {
    let name = IfName::new(uplink::NODE_END_PREFIX).bytes();
    let begins = Data::from_slice(&name.as_slice()[..uplink::NODE_END_PREFIX.len()]);
    Rule::new()
        .masked_eq(field::oifgroup(), &GROUP_MASK, &GROUP)
        .load_at(Reg::FIRST, &field::oifname())
        .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Eq, data: begins })
}

/// What goes into a Network's router: answers, what was steered there, and the node's own (which is not
/// forwarded).
fn to_uplinks(state: TableState, vxlan_port: u16) -> TableState {
    state
        .chain(
            Chain::base("to-uplinks", ChainKind::Filter, Hook::Forward, FILTER),
            [
                tunnel::to_tunnel(vxlan_port).jump("tunnel-forward"),
                Rule::new().in_set(&field::oifname(), "uplinks").goto("to-uplink"),
                to_routers().goto("to-uplink"),
                to_others(from_ours(Rule::new())).ne(field::ct_direction(), &REPLY).jump("outward"),
            ],
        )
        .chain(
            Chain::regular("outward").comment("pods of a Network that has no outside"),
            [
                Rule::new().in_set(&field::iifname(), "uplinks").ret(),
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV4)
                    .not_in_set(&field::ip_saddr(), "outward4")
                    .not_in_set(&field::ip_daddr(), "inside4")
                    .counter()
                    .drop(),
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV6)
                    .not_in_set(&field::ip6_saddr(), "outward6")
                    .not_in_set(&field::ip6_daddr(), "inside6")
                    .counter()
                    .drop(),
            ],
        )
        .chain(
            Chain::regular("to-uplink").comment("default deny"),
            [
                Rule::new().eq(field::ct_direction(), &REPLY).accept().comment("answers"),
                Rule::new().any_of(field::ct_state(), &CtState::RELATED).accept(),
                Rule::new()
                    .masked_eq(field::ct_mark(), &Mark(STEERED), &Mark(STEERED))
                    .accept()
                    .comment("steered"),
                Rule::new().counter().drop(),
            ],
        )
        // Only here is it known by which interface a packet of the node's own goes whose destination was
        // translated.
        .chain(
            Chain::base("own-to-uplinks", ChainKind::Filter, Hook::Postrouting, FILTER),
            [Rule::new().in_set(&field::oifname(), "uplinks"), to_routers()].map(|rule| {
                rule.ne(field::ct_direction(), &REPLY)
                    .any_of(field::ct_status(), &CtStatus::DNAT)
                    .none_of(field::ct_mark(), &Mark(STEERED))
                    .counter()
                    .drop()
                    .comment("a Service elsewhere that names a pod of this Network")
            }),
        )
}

/// Ports of the node, and masquerading.
fn translation(state: TableState) -> TableState {
    let (link4, link6) = uplink::ranges();
    let random = NatFlags { fully_random: true, ..NatFlags::default() };
    state
        .chain(
            Chain::base("host-ports-in", ChainKind::Nat, Hook::Prerouting, BEFORE_DSTNAT),
            [local_destination().goto("host-ports")],
        )
        .chain(
            Chain::base("host-ports-out", ChainKind::Nat, Hook::Output, BEFORE_DSTNAT),
            [local_destination().goto("host-ports")],
        )
        .chain(Chain::regular("host-ports"), host_ports())
        .chain(
            Chain::base("masquerade", ChainKind::Nat, Hook::Postrouting, SRCNAT),
            [
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV4)
                    .in_set(&(field::ip_saddr(), field::ip_daddr()), "hairpin4")
                    .masquerade(random)
                    .comment("a pod that comes back to itself"),
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV6)
                    .in_set(&(field::ip6_saddr(), field::ip6_daddr()), "hairpin6")
                    .masquerade(random),
                to_others(Rule::new().eq(field::nfproto(), &NfProto::IPV4))
                    .in_set(&field::ip_saddr(), "outward4")
                    .not_in_set(&field::ip_daddr(), "inside4")
                    .masquerade(random)
                    .comment("pods to the outside"),
                to_others(Rule::new().eq(field::nfproto(), &NfProto::IPV6))
                    .in_set(&field::ip6_saddr(), "outward6")
                    .not_in_set(&field::ip6_daddr(), "inside6")
                    .masquerade(random),
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV4)
                    .in_prefix(field::ip_saddr(), link4.addr().into(), link4.prefix_len())
                    .not_in_set(&field::oifname(), "uplinks")
                    .masquerade(random)
                    .comment("routers to services and the outside"),
                Rule::new()
                    .eq(field::nfproto(), &NfProto::IPV6)
                    .in_prefix(field::ip6_saddr(), link6.addr().into(), link6.prefix_len())
                    .not_in_set(&field::oifname(), "uplinks")
                    .masquerade(random),
            ],
        )
}

/// To an address of the node, those of its loopback too.
fn local_destination() -> Rule {
    Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL)
}

fn host_ports() -> Vec<Rule> {
    // Beyond the registers that setting a mark needs.
    let at = Reg::new(8).expect("there are sixteen registers");
    let steer = |rule: Rule| rule.set_ct_mark_bits(STEERED, STEERED);
    let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
    let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
    let port = (field::l4proto(), field::th_dport());
    let (to4, to6) = (field::ip_daddr(), field::ip6_daddr());
    let at4 = (to4, field::l4proto(), field::th_dport());
    let at6 = (to6, field::l4proto(), field::th_dport());
    vec![
        // What is sent from a loopback address cannot leave the node, whatever its destination becomes.
        v4().in_prefix(field::ip_saddr(), Ipv4Addr::LOCALHOST.into(), 8).ret(),
        v6().eq(field::ip6_saddr(), &Ipv6Addr::LOCALHOST).ret(),
        Rule::new().not_one_of(&field::l4proto(), &[L4Proto::TCP, L4Proto::UDP, L4Proto::SCTP]).ret(),
        steer(v4().map_at(at, &at4, "host-ports-at4")).dnat_at(Family::Ip, at),
        steer(v6().map_at(at, &at6, "host-ports-at6")).dnat_at(Family::Ip6, at),
        steer(v4().map_at(at, &port, "host-ports4")).dnat_at(Family::Ip, at),
        steer(v6().map_at(at, &port, "host-ports6")).dnat_at(Family::Ip6, at),
    ]
}
