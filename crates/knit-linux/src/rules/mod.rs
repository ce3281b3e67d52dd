//! The packet filter: one table of fixed shape per namespace and family, and elements of sets for everything that
//! comes and goes.
//!
//! An attachment or a Network adds and removes elements only, so that its cost does not depend on how many there are.
//! Elements are keyed by the name of an interface: whose they are shows from that.

pub(crate) mod bridge;
mod elements;
mod merge;
pub(crate) mod node;
pub(crate) mod port;
pub(crate) mod router;
pub(crate) mod tunnel;

use ipnet::IpNet;
use knit_kernel::nft::expr::CmpOp;
use knit_kernel::nft::{Element, Expr, Family, Mark, Reg, Rule, Scalar, Set, TableId, field};
use knit_kernel::owner;

pub(crate) use elements::{Put, link_local, port_elements, port_sets, source_elements};
pub(crate) use merge::{Elements, interface, merge};

/// The mark that a connection has which was steered into a Network's router: the node's rules let it pass.
///
/// Whoever steers (a service proxy for NodePorts and load balancers of a Network, this runtime for ports of the node)
/// sets these bits of the connection's mark before the destination is translated; other bits are free.
pub const STEERED: u32 = 0x0010_0000;

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
fn from_ours(rule: Rule) -> Rule {
    rule.masked_eq(field::iifgroup(), &GROUP_MASK, &GROUP)
}

/// A packet goes out by an interface that is not ours.
fn to_others(rule: Rule) -> Rule {
    let zero = Mark(0).bytes();
    rule.load_at(Reg::FIRST, &field::oifgroup())
        .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask: GROUP_MASK.bytes(), xor: zero })
        .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ne, data: GROUP.bytes() })
}

/// A set of ranges of one family.
fn ranges<K: knit_kernel::nft::Key>(name: &str) -> Set {
    Set::of::<K>(name).interval()
}

/// Ranges of one family as elements that do not overlap.
pub(crate) fn range_elements(nets: &[IpNet], v4: bool) -> Vec<Element> {
    let nets: Vec<IpNet> = nets.iter().filter(|net| net.addr().is_ipv4() == v4).map(IpNet::trunc).collect();
    IpNet::aggregate(&nets).iter().map(|net| Element::prefix(net.network(), net.prefix_len())).collect()
}

#[cfg(test)]
mod tests;
