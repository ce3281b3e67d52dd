//! Kinds of Networks: what one is on a node, and what a pod of it has.
//!
//! One file for each kind, which is all that there is of it: everything else in this crate asks the driver. A
//! new kind is a file here, and a line in [`of`]. Most kinds have a router; theirs say what is in it, and
//! leave the verbs as they are. A kind without a router has verbs of its own.

mod routed;
mod switched;
mod underlay;

use std::collections::BTreeSet;
use std::fmt;

use std::sync::Arc;

use knit_kernel::link::{AddrGenMode, Link, PortFlags};
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, IfName, Op};
use knit_nft::{self as nft, TableId, TableState};
use knit_runtime::{HostEnd, InterfaceName, Network, Result, SandboxId, Topology};

use crate::fail::internal;
use crate::mark::Mark;
use crate::moves::{Comparing, InMotion};
use crate::networks::Net;
use crate::node::Node;
use crate::pair;
use crate::plan::Plan;
use crate::router;
use crate::router_sight;
use crate::rules::{self, SetElement};
use crate::settings::Setting;
use crate::shape::{Facts, RouterHome, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::space::NamespaceSockets;
use crate::survey::{Found, Looked};
use crate::wanted::Entry;

pub(crate) use routed::remote_entries as routed_remote_entries;

/// What a kind of Network is on a node. Drivers have no state: a Network's is its [`Shape`] and its router's
/// namespace.
pub(crate) trait Driver: fmt::Debug + Send + Sync {
    /// Which kind it is.
    fn topology(&self) -> Topology;

    /// What it is called in the marks of attachments, forever; the first kind has no letter.
    fn letter(&self) -> Option<char>;

    /// Refuses a Network that cannot be of this kind in such a router, and says what to do.
    fn check(&self, network: &Network, home: RouterHome) -> Result<(), String>;

    /// The link of the node that a Network is on, where that is not the one with the node's addresses.
    fn parent<'a>(&self, _: &'a Network) -> Option<&'a str> {
        None
    }

    // What is done to a Network on this node. As it is here it is done to one with a router.

    /// Refuses a node that cannot have the Network, before anything is made there, and says what to do.
    fn check_node(&self, _: &Node, _: &Shape, _: &Facts) -> Result<()> {
        Ok(())
    }

    /// Brings this node's side of a Network to what is wanted, whatever is there; no other call for the
    /// Network or its pods runs meanwhile.
    fn set_up(&self, net: &Net, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        router::set_up(net, shape, facts)
    }

    /// Keeps in force what keeps a Network apart that cannot be set up as it should be now; none if there is
    /// nothing of it yet.
    fn hold_closed(&self, node: &Node, net: Option<&Net>) -> Result<()> {
        router::hold_closed(node, net, self.tables(node.config.vxlan_port))
    }

    /// Takes away what setting a Network up made; it has no attachments.
    fn take_down(&self, net: &Net) -> Result<()> {
        router::take_down(net)
    }

    /// Compares a Network and its attachments with what they should be; says what of it is not known because
    /// it was being changed.
    fn compare(&self, looked: Looked<'_>, comparing: &Comparing<'_>, found: Found<'_>) -> Result<InMotion> {
        router_sight::compare(looked, comparing, found)
    }

    // What is done for one attachment. As it is here its link is a pair, whose other end is in the router.

    /// All attachments of a Network that the kernel has.
    fn attachments(&self, net: &Net) -> Result<Vec<(Link, Mark)>> {
        pair::list(&*net.space.links()?)
    }

    /// One of them.
    fn attachment(
        &self,
        net: &Net,
        sandbox: &SandboxId,
        interface: &InterfaceName,
    ) -> Result<Option<(Link, Mark)>> {
        pair::one(net, sandbox, interface)
    }

    /// What is there in the place of a planned attachment, as asked for or not. What was half made goes; what
    /// is another's is a conflict.
    fn find(&self, net: &Net, plan: &Plan) -> Result<Option<(Link, Mark)>> {
        pair::find(net, plan)
    }

    /// Makes an attachment.
    fn make(&self, net: &Net, plan: &Plan, pod: &NetNs) -> Result<Link> {
        pair::make(net, plan, pod)
    }

    /// What is done inside the pod's namespace, to the interface with this number there. `addr_gen` is none
    /// where links have no IPv6.
    fn pod_side(&self, plan: &Plan, interface: u32, addr_gen: Option<AddrGenMode>) -> Vec<Op<'static>> {
        plan.pod_ops(interface, addr_gen)
    }

    /// Whether a new pod can be reached: by default a packet goes from its router to each of its addresses
    /// and back.
    fn verify(&self, net: &Net, plan: &Plan) -> Result<()> {
        pair::verify(net, plan)
    }

    /// The link that a failed making left.
    fn leftover(&self, net: &Net, plan: &Plan) -> Result<Option<Link>> {
        pair::leftover(net, plan)
    }

    /// Takes an attachment away; what of it is gone already is fine.
    fn unmake(&self, net: &Net, link: Option<&Link>, mark: &Mark) -> Result<()> {
        pair::unmake(net, link, mark)
    }

    /// Looks whether an attachment is as it was made.
    fn inspect(&self, net: &Net, link: &Link, mark: &Mark) -> Result<()> {
        pair::inspect(net, link, mark)
    }

    /// Removes the links of makings that were cut off.
    fn collect_half_made(&self, net: &Net) -> Result<()> {
        pair::collect_half_made(net)
    }

    /// The other end of an attachment's link.
    fn host_end(&self, net: &Net, link: &Link) -> HostEnd {
        pair::host_end(net, link)
    }

    /// Takes away what of attachments does not go with a Network's namespace; says how many links.
    fn purge(&self, _: &NamespaceSockets) -> Result<usize> {
        Ok(0)
    }

    // What there is in a router.

    /// The links of a router that are neither uplink, tunnel nor ports: makes and changes them. Says which of
    /// them the tunnel and the ports are ports of, if any.
    fn settle_links(&self, _: &Handle, _: &Shape) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Says what is wrong with these links, and which one the tunnel and the ports are ports of.
    fn compare_links(&self, _: &NamespaceSight, _: &Shape, _: &mut NetworkDamage) -> Option<u32> {
        None
    }

    /// The name of the link in a router that the tunnel and the ports are ports of, and what they are there.
    fn master(&self) -> Option<Master> {
        None
    }

    /// Settings of a router beyond forwarding, and what it means where a kernel does not have them.
    fn settings(&self) -> Vec<(Vec<Setting>, &'static str)> {
        Vec::new()
    }

    /// The tables inside a router: where ports are checked, and the router's own. They may be the same.
    fn tables(&self, _vxlan_port: u16) -> Vec<TableState> {
        Vec::new()
    }

    /// The table that the sources of pods are in.
    fn sources(&self) -> TableId {
        rules::table(nft::Family::Inet)
    }

    /// What this kind has in the router's own table, besides what every Network has there.
    fn router_elements(&self) -> Vec<SetElement> {
        Vec::new()
    }

    /// What a router has for itself and for the pods of other nodes.
    fn router_entries(&self, _: &Shape, _: &Facts) -> BTreeSet<Entry> {
        BTreeSet::new()
    }

    /// What a router has for a pod of this node.
    fn pod_entries(&self, _host: &str, _: &Mark) -> Vec<Entry> {
        Vec::new()
    }

    /// What of that does not go with the pod's link.
    fn left_by(&self, _: &Mark) -> Vec<Entry> {
        Vec::new()
    }
}

/// A link that others are ports of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Master {
    pub name: &'static str,
    pub pod_port: PortFlags,
    pub tunnel_port: PortFlags,
}

/// All kinds.
fn all() -> impl Iterator<Item = &'static dyn Driver> {
    Topology::ALL.into_iter().map(of)
}

/// The driver of a kind.
pub(crate) fn of(topology: Topology) -> &'static dyn Driver {
    match topology {
        Topology::Layer3 => &routed::Routed,
        Topology::Layer2 => &switched::Switched,
        Topology::Underlay => &underlay::Underlay,
    }
}

/// The driver of the Network whose router is the node itself.
pub(crate) fn default() -> &'static dyn Driver {
    &routed::Routed
}

/// The driver of a Network whose namespace was found, as far as that is known before it is set up: kinds with
/// a router are told apart by the marks of their attachments.
pub(crate) fn found_in(space: &NamespaceSockets) -> Result<&'static dyn Driver> {
    let found = space.links()?.link_by_name(&lo()).map_err(internal("read a Network's namespace"))?;
    let says = found.as_ref().and_then(|lo| lo.owner()?.strip_prefix(NAMESPACE));
    Ok(says.map_or(default(), |says| of(of_letters(says))))
}

/// Before the letter of a kind without a router and its Network's number, in the mark of the loopback link of
/// the Network's namespace.
const NAMESPACE: &str = "namespace ";

/// The loopback link, which every namespace has.
fn lo() -> IfName {
    IfName::new("lo").expect("lo is a name")
}

/// The names of links that others are ports of, of all kinds.
pub(crate) fn masters() -> impl Iterator<Item = &'static str> {
    all().filter_map(|driver| driver.master().map(|master| master.name))
}

/// The kind that a mark is of, by the letters in it.
pub(crate) fn of_letters(letters: &str) -> Topology {
    let lettered = all().find(|driver| driver.letter().is_some_and(|letter| letters.contains(letter)));
    lettered.map_or(Topology::Layer3, Driver::topology)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name_and_by_its_letter() {
        for driver in all() {
            assert_eq!(of(driver.topology()).topology(), driver.topology());
            let letters = driver.letter().map(String::from).unwrap_or_default();
            assert_eq!(of_letters(&format!("-dp{letters}")), driver.topology(), "{driver:?}");
        }
        let letters: BTreeSet<_> = all().map(Driver::letter).collect();
        assert_eq!(letters.len(), Topology::ALL.len(), "no two kinds have one letter");
    }
}
