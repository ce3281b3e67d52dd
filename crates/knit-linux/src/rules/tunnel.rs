//! The tunnels' port on the node: taken from other nodes only, as what is theirs to send, and translated by
//! nobody.
//!
//! What a node that the cluster knows sends there is exempt from connection tracking, so no Service, no port
//! of the node and no masquerading ever sees it. Whatever is tracked did not come from such a node: it is
//! neither taken nor, if we forward it, let through, and that is looked at after translation.
//!
//! Nobody on this node sends frames but the kernel: what has a socket of the node's own namespace behind it
//! is dropped, since others would take it as this node's. A Network whose router is the node itself is the
//! exception: there the node's own programs talk to pods, and their packets keep their sockets inside frames.
//!
//! The source inside a frame must be one of the sending node's addresses in that Network. Only here are the
//! outer and the inner source seen together: a VXLAN device drops the outer one. The key is exact, so its
//! cost does not depend on how many nodes there are: a block is a power of two and aligned to its size, so it
//! consists of whole units of eight addresses, and one lookup of (Network, outer source, unit of the inner
//! source) answers. Single addresses (what was announced one by one, smaller blocks, the gateway that every
//! node's router has) are in a second set, which only a miss in the first one reaches.
//!
//! The default Network's blocks may be large (a node's podCIDR), so they are cut into larger units; which
//! kind a unit is of shows in the lowest bits of its key. Its nodes send as themselves, and forward for the
//! outside too: their own addresses are single ones, and a source that is neither a pod's nor the address of
//! a node that has pods may come from any node. Only these are looked up in a set of ranges.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use knit_nft::expr::{CmpOp, LookupResult, SetRef};
use knit_nft::{
    AddrType, Chain, ChainKind, CtState, CtStatus, Data, Element, EtherType, Expr, FibFlags, Hook, L4Proto,
    NfProto, Port, Reg, Rule, Scalar, Set, TableState, Uid, Vni, field,
};

use super::{SetElement, from_ours, range_elements, ranges};
use crate::shape::{RouterHome, Shape};

/// Before connection tracking.
const RAW: i32 = -300;
const FILTER: i32 = 0;

const UNCHECKED: &str = "tunnel-unchecked";

/// The addresses of a unit, as a power of two. The controller cuts no smaller block out of a subnet of some
/// size.
const UNIT: u8 = 3;
/// The addresses of larger units, as powers of two, with what their keys have in the lowest bits, where
/// smaller ones have zeros.
const LARGER: [(u8, u8); 2] = [(16, 2), (8, 1)];
/// The largest block, as a power of two: of a larger range the beginning is used.
const LARGEST: u8 = 16;

fn units44() -> Set {
    Set::of::<(Vni, Ipv4Addr, Ipv4Addr)>("tunnel-units44").comment("number, node, eight addresses of it")
}

fn units46() -> Set {
    Set::of::<(Vni, Ipv4Addr, Ipv6Addr)>("tunnel-units46")
}

fn units64() -> Set {
    Set::of::<(Vni, Ipv6Addr, Ipv4Addr)>("tunnel-units64")
}

fn units66() -> Set {
    Set::of::<(Vni, Ipv6Addr, Ipv6Addr)>("tunnel-units66")
}

fn hosts44() -> Set {
    Set::of::<(Vni, Ipv4Addr, Ipv4Addr)>("tunnel-hosts44").comment("number, node, one address of it")
}

fn hosts46() -> Set {
    Set::of::<(Vni, Ipv4Addr, Ipv6Addr)>("tunnel-hosts46")
}

fn hosts64() -> Set {
    Set::of::<(Vni, Ipv6Addr, Ipv4Addr)>("tunnel-hosts64")
}

fn hosts66() -> Set {
    Set::of::<(Vni, Ipv6Addr, Ipv6Addr)>("tunnel-hosts66")
}

fn nodes4() -> Set {
    Set::of::<(Vni, Ipv4Addr)>("tunnel-nodes4").comment("nodes that forward for others, too")
}

fn nodes6() -> Set {
    Set::of::<(Vni, Ipv6Addr)>("tunnel-nodes6")
}

/// Networks whose frames are not checked yet: tables of a version that did not check frames have been
/// replaced, and what other nodes may send in these Networks is not known before each of them is set up.
fn unchecked() -> Set {
    Set::of::<Vni>(UNCHECKED).comment("set up by an earlier version")
}

/// Networks whose frames may carry what the node's own programs send.
fn own() -> Set {
    Set::of::<Vni>("tunnel-own").comment("the node's own programs send in these")
}

/// Addresses of which it is known at which node they are: the default Network's pods, and nodes themselves.
fn known4() -> Set {
    ranges::<Ipv4Addr>("known4").comment("sources of one node only")
}

fn known6() -> Set {
    ranges::<Ipv6Addr>("known6").comment("sources of one node only")
}

/// The Networks that frames must still be taken of unchecked, if this is the table of a version that did not
/// check them. Without this, a Network's frames would be dropped from the moment that another one is set up.
/// A Network's own set-up removes it in the transaction that brings what it is checked by; a table that is
/// gone, flushed for instance, leaves none.
pub(super) fn unchecked_of(found: &TableState) -> Vec<SetElement> {
    let lacks = |set: fn() -> Set| (!found.sets.contains_key(&set().name)).then_some(set);
    // Likewise what the node's own programs send, which a table from before does not tell apart.
    let sets = [lacks(units44).map(|_| unchecked()), lacks(own).map(|_| own())];
    if sets.iter().all(Option::is_none) {
        return Vec::new();
    }
    let elements = found.sets.iter().flat_map(|(name, set)| {
        set.elements.values().filter_map(|element| super::node::network_of(name, element))
    });
    let networks: BTreeSet<u32> = elements.collect();
    let puts =
        |set: &Set| networks.iter().map(|id| SetElement::new(set.clone(), Element::new(&Vni(*id)))).collect();
    sets.iter().flatten().flat_map(|set| -> Vec<SetElement> { puts(set) }).collect()
}

/// To the tunnels' port.
pub(super) fn to_tunnel(port: u16) -> Rule {
    Rule::new().eq(field::l4proto(), &L4Proto::UDP).eq(field::th_dport(), &Port(port))
}

/// Adds the tunnels' chains and sets to the node's table. What comes off the wire enters by chain `tunnel`.
pub(super) fn checks(state: TableState, port: u16) -> TableState {
    let sets = [
        units44(),
        units46(),
        units64(),
        units66(),
        hosts44(),
        hosts46(),
        hosts64(),
        hosts66(),
        nodes4(),
        nodes6(),
        known4(),
        known6(),
        unchecked(),
        own(),
    ];
    let state = sets.into_iter().fold(state, |state, set| state.set(set, []));
    let (v4, v6) = (field::ip_saddr(), field::ip6_saddr());
    state
        .chain(
            Chain::base("tunnel-out", ChainKind::Filter, Hook::Output, RAW),
            [
                // Without a socket of this namespace the rule ends where it is asked for.
                to_tunnel(port)
                    .load_at(Reg::FIRST, &field::skuid())
                    .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ge, data: Uid(0).bytes() })
                    .not_in_set(&field::vxlan_vni(), "tunnel-own")
                    .counter()
                    .drop()
                    .comment("not the kernel's"),
                to_tunnel(port).notrack().comment("no Service is on this port"),
            ],
        )
        .chain(
            Chain::regular("tunnel").comment("frames of other nodes"),
            [Rule::new().eq(field::nfproto(), &NfProto::IPV4).goto("tunnel4"), Rule::new().goto("tunnel6")],
        )
        .chain(Chain::regular("tunnel4"), from_nodes(&v4, ["44", "46"], "tunnel-nodes4"))
        .chain(Chain::regular("tunnel6"), from_nodes(&v6, ["64", "66"], "tunnel-nodes6"))
        .chain(
            Chain::base("tunnel-in", ChainKind::Filter, Hook::Input, FILTER),
            [to_tunnel(port)
                .none_of(field::ct_state(), &CtState::UNTRACKED)
                .counter()
                .drop()
                .comment("not from a node")],
        )
        .chain(Chain::regular("tunnel-forward").comment("no way around a node's own check"), forwarded())
}

/// What nodes of one family may send: the names of sets end with `families`.
fn from_nodes<T: Scalar>(outer: &field::Field<T>, families: [&str; 2], nodes: &str) -> Vec<Rule>
where
    field::Field<T>: Clone,
{
    let [inner4, inner6] = families;
    let inner = |kind: EtherType| Rule::new().eq(field::vxlan_ether_type(), &kind);
    let take = |rule: Rule| rule.notrack().accept();
    let (ip4, ip6, arp) = (field::vxlan_ip_saddr, field::vxlan_ip6_saddr, field::vxlan_arp_saddr_ip);
    let units = |family: &str| format!("tunnel-units{family}");
    let hosts = |family: &str| format!("tunnel-hosts{family}");
    vec![
        take(in_units(inner(EtherType::IPV4), outer, &ip4(), &units(inner4), (UNIT, 0))),
        take(in_units(inner(EtherType::IPV6), outer, &ip6(), &units(inner6), (UNIT, 0))),
        take(in_units(inner(EtherType::ARP), outer, &arp(), &units(inner4), (UNIT, 0))),
        take(in_units(inner(EtherType::IPV4), outer, &ip4(), &units(inner4), LARGER[1])),
        take(in_units(inner(EtherType::IPV6), outer, &ip6(), &units(inner6), LARGER[1])),
        take(in_units(inner(EtherType::IPV4), outer, &ip4(), &units(inner4), LARGER[0])),
        take(in_units(inner(EtherType::IPV6), outer, &ip6(), &units(inner6), LARGER[0])),
        take(inner(EtherType::IPV4).in_set(&(field::vxlan_vni(), outer.clone(), ip4()), hosts(inner4))),
        take(inner(EtherType::IPV6).in_set(&(field::vxlan_vni(), outer.clone(), ip6()), hosts(inner6))),
        take(inner(EtherType::ARP).in_set(&(field::vxlan_vni(), outer.clone(), arp()), hosts(inner4))),
        take(
            inner(EtherType::IPV4)
                .in_set(&(field::vxlan_vni(), outer.clone()), nodes)
                .not_in_set(&ip4(), "known4"),
        ),
        take(
            inner(EtherType::IPV6)
                .in_set(&(field::vxlan_vni(), outer.clone()), nodes)
                .not_in_set(&ip6(), "known6"),
        ),
        take(Rule::new().in_set(&field::vxlan_vni(), UNCHECKED)),
        Rule::new()
            .eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL)
            .counter()
            .drop()
            .comment("not from a node, or not its own"),
    ]
}

/// The unit of the inner source, of one kind, is one of the outer source's in that Network.
fn in_units<T: Scalar, U: Scalar>(
    rule: Rule,
    outer: &field::Field<T>,
    inner: &field::Field<U>,
    set: &str,
    (bits, kind): (u8, u8),
) -> Rule {
    let size = U::TYPE.size() as usize;
    let mut mask = vec![0xff; size];
    let mut xor = vec![0; size];
    for byte in 0..size {
        let below = u32::from(bits).saturating_sub(8 * byte as u32);
        mask[size - 1 - byte] = 0xff_u8.checked_shl(below).unwrap_or(0);
    }
    xor[size - 1] = kind;
    let at = Reg::new(1 + (T::TYPE.size() / 4) as u8).expect("there are sixteen registers");
    let xor = Data::from_slice(&xor);
    rule.load_at(Reg::FIRST, &field::vxlan_vni())
        .load_at(Reg::new(1).expect("there are sixteen registers"), outer)
        .load_at(at, inner)
        .expr(Expr::Bitwise { sreg: at, dreg: at, mask: Data::from_slice(&mask), xor })
        .expr(Expr::Lookup { set: SetRef::Named(set.into()), sreg: Reg::FIRST, result: LookupResult::Match })
}

/// What is forwarded to the tunnels' port: between nodes that we know (which is not tracked), and what pods
/// do among themselves. Nothing that a pod or a router sends elsewhere, nothing that was translated there,
/// and nothing to an address of the cluster: behind this node's address it would look like this node's.
fn forwarded() -> Vec<Rule> {
    let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
    let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
    vec![
        Rule::new().any_of(field::ct_state(), &CtState::UNTRACKED).ret(),
        v4().in_set(&field::ip_daddr(), "pods4").ret(),
        v6().in_set(&field::ip6_daddr(), "pods6").ret(),
        from_ours(Rule::new()).counter().drop(),
        Rule::new().any_of(field::ct_status(), &CtStatus::DNAT).counter().drop(),
        v4().in_set(&field::ip_daddr(), "inside4").counter().drop(),
        v6().in_set(&field::ip6_daddr(), "inside6").counter().drop(),
    ]
}

/// What other nodes may send in a Network.
pub(crate) fn elements(shape: &Shape) -> Vec<SetElement> {
    let Some(family) = shape.tunnel_source else { return Vec::new() };
    let vni = Vni(shape.id());
    let mut puts = Vec::new();
    if shape.home == RouterHome::Node {
        puts.push(SetElement::new(own(), Element::new(&vni)));
        let nodes = shape.network.blocks.iter().flat_map(|block| &block.node_addresses).copied();
        let known: Vec<IpNet> = shape.pods().into_iter().chain(nodes.map(IpNet::from)).collect();
        puts.extend(
            range_elements(&known, knit_types::Family::V4)
                .into_iter()
                .map(|element| SetElement::new(known4(), element)),
        );
        puts.extend(
            range_elements(&known, knit_types::Family::V6)
                .into_iter()
                .map(|element| SetElement::new(known6(), element)),
        );
    }
    for remote in &shape.remotes {
        for node in shape.addresses_of(&remote.node).filter(|node| node.is_ipv4() == family.is_ipv4()) {
            if shape.home == RouterHome::Node {
                puts.push(match node {
                    IpAddr::V4(node) => SetElement::new(nodes4(), Element::new(&(vni, node))),
                    IpAddr::V6(node) => SetElement::new(nodes6(), Element::new(&(vni, node))),
                });
                puts.extend(shape.addresses_of(&remote.node).map(|own| host(vni, node, own)));
            } else {
                let gateways = shape.network.subnets.iter().filter_map(|subnet| subnet.gateway);
                puts.extend(gateways.map(|gateway| host(vni, node, gateway)));
            }
            for (range, _) in &remote.ranges {
                of_range(vni, node, *range, shape.home, &mut puts);
            }
        }
    }
    puts
}

/// Whether an element of this set is of the Network with this number.
pub(crate) fn is_of(set: &str, element: &Element, network: u32) -> bool {
    set.starts_with("tunnel-") && element.key.as_slice().starts_with(Vni(network).bytes().as_slice())
}

/// The number of the Network that an element of this set is of.
pub(crate) fn network_of(set: &str, element: &Element) -> Option<u32> {
    let number = element.key.as_slice().get(..4).filter(|_| set.starts_with("tunnel-"))?;
    // 24 bits and a reserved byte.
    Some(u32::from_be_bytes(number.try_into().ok()?) >> 8)
}

/// A range in units, as large as they fit for the default Network, or address by address where it is smaller
/// than one.
fn of_range(vni: Vni, node: IpAddr, range: IpNet, home: RouterHome, puts: &mut Vec<SetElement>) {
    let bits = range.max_prefix_len() - range.prefix_len();
    let larger = LARGER.into_iter().find(|(unit, _)| home == RouterHome::Node && bits >= *unit);
    let (unit_bits, kind) = larger.unwrap_or((if bits < UNIT { 0 } else { UNIT }, 0));
    for offset in (0..1u128 << bits.min(LARGEST)).step_by(1 << unit_bits) {
        let offset = offset + u128::from(kind);
        let address: IpAddr = match range.network() {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + offset as u32).into(),
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + offset).into(),
        };
        puts.push(if unit_bits == 0 { host(vni, node, address) } else { unit(vni, node, address) });
    }
}

fn unit(vni: Vni, node: IpAddr, first: IpAddr) -> SetElement {
    put(vni, node, first, [units44, units46, units64, units66])
}

fn host(vni: Vni, node: IpAddr, address: IpAddr) -> SetElement {
    put(vni, node, address, [hosts44, hosts46, hosts64, hosts66])
}

fn put(vni: Vni, node: IpAddr, inner: IpAddr, [s44, s46, s64, s66]: [fn() -> Set; 4]) -> SetElement {
    match (node, inner) {
        (IpAddr::V4(node), IpAddr::V4(inner)) => SetElement::new(s44(), Element::new(&(vni, node, inner))),
        (IpAddr::V4(node), IpAddr::V6(inner)) => SetElement::new(s46(), Element::new(&(vni, node, inner))),
        (IpAddr::V6(node), IpAddr::V4(inner)) => SetElement::new(s64(), Element::new(&(vni, node, inner))),
        (IpAddr::V6(node), IpAddr::V6(inner)) => SetElement::new(s66(), Element::new(&(vni, node, inner))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_its_units_and_a_small_one_its_addresses() {
        let node = "192.168.7.2".parse().expect("an address");
        let count_at = |range: &str, home| {
            let mut puts = Vec::new();
            of_range(Vni(3), node, range.parse().expect("a range"), home, &mut puts);
            let units = puts.iter().filter(|put| put.set.name.starts_with("tunnel-units")).count();
            (units, puts.len() - units)
        };
        let count = |range: &str| count_at(range, RouterHome::Own);
        assert_eq!(count("10.77.0.16/28"), (2, 0));
        assert_eq!(count("10.77.0.0/24"), (32, 0));
        assert_eq!(count("10.77.0.8/29"), (1, 0));
        assert_eq!(count("10.77.0.8/30"), (0, 4));
        assert_eq!(count("10.77.0.9/32"), (0, 1));
        assert_eq!(count("fd77::10/124"), (2, 0));
        assert_eq!(count("fd77::9/128"), (0, 1));
        assert_eq!(count("fd77::/64"), (1 << 13, 0));
        // A node's podCIDR.
        for (range, units) in [("10.244.1.0/24", 1), ("10.244.0.0/20", 16), ("10.1.0.0/16", 1)] {
            assert_eq!(count_at(range, RouterHome::Node), (units, 0), "{range}");
        }
        assert_eq!(count_at("fd44:0:0:1::/64", RouterHome::Node), (1, 0));
        assert_eq!(count_at("fd44::1:0/120", RouterHome::Node), (1, 0));
        assert_eq!(count_at("10.244.1.16/28", RouterHome::Node), (2, 0));
    }

    #[test]
    fn an_element_says_which_network_it_is_of() {
        let put = host(Vni(3), "fd07::2".parse().expect("v6"), "10.77.0.1".parse().expect("v4"));
        assert!(is_of(&put.set.name, &put.element, 3));
        assert!(!is_of(&put.set.name, &put.element, 0x300));
        assert!(!is_of("uplinks", &put.element, 3));
        assert_eq!(network_of(&put.set.name, &put.element), Some(3));
        assert_eq!(network_of("uplinks", &put.element), None);
    }
}
