//! Kinds of Networks: what one is inside its router, and what a pod of it has.
//!
//! One file for each kind, which is all that there is of it: everything else in this crate asks the driver. A
//! new kind is a file here, a line in [`of`] and in [`ALL`], and a letter for marks.

mod routed;
mod switched;

use std::collections::BTreeSet;
use std::fmt;

use knit_kernel::link::PortFlags;
use knit_kernel::nft::{TableId, TableState};
use knit_kernel::{Handle, Op};
use knit_runtime::{Network, Result, Topology};

use crate::attach::Plan;
use crate::mark::Mark;
use crate::networks::Net;
use crate::rules::Put;
use crate::settings::Setting;
use crate::shape::{Facts, Home, Shape};
use crate::sight::{Sight, Wrong};
use crate::wanted::Entry;

pub(crate) use routed::remote_entries as routed_remote_entries;

/// What a kind of Network is on a node. Drivers have no state: a Network's is its [`Shape`] and its router's
/// namespace.
pub(crate) trait Driver: fmt::Debug + Send + Sync {
    /// Which kind it is.
    fn topology(&self) -> Topology;

    /// What it is called in the marks of attachments, for ever; the first kind has no letter.
    fn letter(&self) -> Option<char>;

    /// Refuses a Network that cannot be of this kind in such a router, and says what to do.
    fn check(&self, network: &Network, home: Home) -> Result<(), String>;

    /// Whether pods have their subnet on their link. If not, they have only the gateway there.
    fn has_subnet_on_link(&self) -> bool;

    /// The links of a router that are neither uplink, tunnel nor ports: makes and changes them. Says which of
    /// them the tunnel and the ports are ports of, if any.
    fn settle_links(&self, router: &Handle, shape: &Shape) -> Result<Option<u32>>;

    /// Says what is wrong with these links, and which one the tunnel and the ports are ports of.
    fn compare_links(&self, router: &Sight, shape: &Shape, wrong: &mut Wrong) -> Option<u32>;

    /// The name of the link in a router that the tunnel and the ports are ports of, and what they are there.
    fn master(&self) -> Option<Master>;

    /// Settings of a router beyond forwarding, and what it means where a kernel does not have them.
    fn settings(&self) -> Vec<(Vec<Setting>, &'static str)>;

    /// The tables inside a router: where ports are checked, and the router's own. They may be the same.
    fn tables(&self, vxlan_port: u16) -> Vec<TableState>;

    /// The table that the sources of pods are in.
    fn sources(&self) -> TableId;

    /// What this kind has in the router's own table, besides what every Network has there.
    fn router_elements(&self) -> Vec<Put>;

    /// What a router has for itself and for the pods of other nodes.
    fn router_entries(&self, shape: &Shape, facts: &Facts) -> BTreeSet<Entry>;

    /// What a router has for a pod of this node.
    fn pod_entries(&self, host: &str, mark: &Mark) -> Vec<Entry>;

    /// What of that does not go with the pod's link.
    fn left_by(&self, mark: &Mark) -> Vec<Entry>;

    /// What is done inside the pod's namespace, to the interface with this number there.
    fn pod_side(&self, plan: &Plan, interface: u32, ipv6: bool) -> Vec<Op<'static>> {
        plan.pod_ops(interface, ipv6)
    }

    /// Whether a new pod can be reached: by default a packet goes from its router to each of its addresses
    /// and back.
    fn verify(&self, net: &Net, plan: &Plan) -> Result<()> {
        net.asks(plan)
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
const ALL: [&dyn Driver; 2] = [&routed::Routed, &switched::Switched];

/// The driver of a kind.
pub(crate) fn of(topology: Topology) -> &'static dyn Driver {
    match topology {
        Topology::Layer3 => &routed::Routed,
        Topology::Layer2 => &switched::Switched,
    }
}

/// The names of links that others are ports of, of all kinds.
pub(crate) fn masters() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().filter_map(|driver| driver.master().map(|master| master.name))
}

/// The kind that a mark is of, by the letters in it.
pub(crate) fn of_letters(letters: &str) -> Topology {
    let lettered =
        ALL.into_iter().find(|driver| driver.letter().is_some_and(|letter| letters.contains(letter)));
    lettered.map_or(Topology::Layer3, Driver::topology)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name_and_by_its_letter() {
        for driver in ALL {
            assert_eq!(of(driver.topology()).topology(), driver.topology());
            let letters = driver.letter().map(String::from).unwrap_or_default();
            assert_eq!(of_letters(&format!("-dp{letters}")), driver.topology(), "{driver:?}");
        }
        let letters: BTreeSet<_> = ALL.iter().map(|driver| driver.letter()).collect();
        assert_eq!(letters.len(), ALL.len(), "no two kinds have one letter");
    }
}
