//! The packet filter: one table of fixed shape per namespace and family, and elements of sets for everything
//! that comes and goes.
//!
//! An attachment or a Network adds and removes elements only, so that its cost does not depend on how many
//! there are. Elements are keyed by the name of an interface: whose they are shows from that.

pub(crate) mod bridge;
mod elements;
mod merge;
pub(crate) mod node;
pub(crate) mod port;
pub(crate) mod router;
pub(crate) mod tunnel;

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_kernel::owner;
use knit_nft::expr::CmpOp;
use knit_nft::{Element, Expr, Family, Mark, Reg, Rule, Scalar, Set, TableId, field};
use knit_types::ByFamily as _;

pub(crate) use elements::{
    SetElement, is_same, link_local, port_elements, port_sets, ports_in, ports_of, same_ports,
    source_elements,
};
pub(crate) use merge::{Elements, interface, merge};

/// The mark that a connection has which was steered into a Network's router: the node's rules let it pass.
///
/// Whoever steers (a service proxy for NodePorts and load balancers of a Network, this runtime for ports of
/// the node) sets these bits of the connection's mark before the destination is translated; other bits are
/// free.
pub const STEERED: u32 = 0x0010_0000;

/// The mark of a connection that this node hands over to another one, which has the router that it is for.
pub(crate) const HANDED: u32 = 0x0040_0000;

/// The name of every table here.
pub(crate) const TABLE: &str = "knit";

/// The table of a family.
pub(crate) fn table(family: Family) -> TableId {
    TableId::new(family, TABLE)
}

/// Without the bit that the group of a link has which is about to be deleted.
const GROUP_MASK: Mark = Mark(!1);
const GROUP: Mark = Mark(owner::GROUP & !1);

/// A packet came in by an interface of ours.
pub(crate) fn from_ours(rule: Rule) -> Rule {
    rule.masked_eq(field::iifgroup(), &GROUP_MASK, &GROUP)
}

/// A packet goes out by an interface that is not ours.
fn to_others(rule: Rule) -> Rule {
    let zero = Mark(0).bytes();
    rule.load_at(Reg::FIRST, &field::oifgroup())
        .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask: GROUP_MASK.bytes(), xor: zero })
        .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ne, data: GROUP.bytes() })
}

/// What is not the outside for any Network with a router of its own, whatever it may reach: link-local
/// addresses, which are not to be forwarded (RFC 3927, RFC 4291), and where clouds tell their machines, and
/// thereby whoever looks like one, their credentials.
pub(crate) fn never_outside() -> impl Iterator<Item = IpNet> {
    let v4 = |a, b, c, d, length| Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length);
    let v6 = |first, second, last, length| {
        Ipv6Net::new_assert(Ipv6Addr::new(first, second, 0, 0, 0, 0, 0, last), length)
    };
    let v4 = [v4(169, 254, 0, 0, 16), v4(100, 100, 100, 200, 32), v4(168, 63, 129, 16, 32)];
    let v6 = [v6(0xfe80, 0, 0, 10), v6(0xfd00, 0xec2, 0x254, 128), v6(0xfd20, 0xce, 0x254, 128)];
    v4.into_iter().map(IpNet::from).chain(v6.into_iter().map(IpNet::from))
}

/// A set of ranges of one family.
fn ranges<K: knit_nft::Key>(name: &str) -> Set {
    Set::of::<K>(name).interval()
}

/// Ranges of one family as elements that do not overlap.
pub(crate) fn range_elements(nets: &[IpNet], family: knit_types::Family) -> Vec<Element> {
    let nets: Vec<IpNet> = nets.of_family(family).map(IpNet::trunc).collect();
    IpNet::aggregate(&nets).iter().map(|net| Element::prefix(net.network(), net.prefix_len())).collect()
}

#[cfg(test)]
mod tests;
