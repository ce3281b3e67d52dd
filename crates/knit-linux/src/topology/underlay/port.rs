//! The host end of an interface whose Network is on a bridge of its node: a port of that bridge, in the
//! node's own namespace.
//!
//! Its alias is not the mark of an attachment, which the pod's end has. The default Network, whose router is
//! the same namespace, and whose pods' host ends are there, too, leaves it alone for that. Nor do rules
//! concern it: whatever comes in by the port of a bridge is the bridge's.

use std::collections::HashSet;

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{AddrGenMode, Link, NewLink, PortFlags};
use knit_kernel::links::LinkList;
use knit_kernel::netns::NetNs;
use knit_kernel::{IfName, Mac, Mtu, owner};
use knit_runtime::{Error, Network, Reason, Result, UnderlayKind, UnderlayMode};

use super::child::name_of;
use crate::fail::internal;
use crate::links::WantedLink;
use crate::mark::Mark;
use crate::plan::Plan;
use crate::port::is_half_made;

/// Before the Network's number and the host end's name in its alias.
const ALIAS: &str = "underlay";

/// What the host end of an attachment says.
pub(super) fn alias(network: u32, host: &IfName) -> String {
    owner::alias(&format!("{ALIAS} {network} {host}"))
}

/// Whether a link of the node is the host end of this attachment. Not by its name alone: that follows from a
/// mark, which a pod can change.
pub(super) fn is_host_end(link: &Link, mark: &Mark) -> bool {
    let says = mark.network.map(|network| alias(network, &mark.host()));
    link.kind == name_of(UnderlayKind::Bridge) && says.is_some() && link.alias == says
}

/// What a host end is to be, as the port of this bridge.
pub(super) fn like(network: &Network, bridge: u32) -> WantedLink {
    WantedLink { port: Some((bridge, flags(network))), ..WantedLink::default() }
}

/// Isolated ports reach those that are not, such as the one to the wire, and no other isolated ones.
fn flags(network: &Network) -> PortFlags {
    let is_private = network.underlay.as_ref().is_some_and(|u| u.mode == UnderlayMode::Private);
    PortFlags { isolated: is_private, ..PortFlags::default() }
}

/// The pair to be made for a plan.
pub(super) fn new_pair<'a>(
    plan: &Plan,
    bridge: u32,
    pod: &'a NetNs,
    addr_gen: Option<AddrGenMode>,
) -> Result<NewLink<'a>> {
    let mut new = NewLink::veth(plan.host.clone(), plan.peer(pod)?);
    // A bridge that nobody gave a MAC takes the least of its ports', and changes it with them.
    let [_, rest @ ..] = plan.mark.mac.octets();
    let mut mac = [0xfe; 6];
    mac[1..].copy_from_slice(&rest);
    new.mac = Some(Mac(mac));
    // And the least MTU of its ports, unless somebody gave it one. The pod's end has the Network's.
    new.mtu = Mtu::new(Mtu::MAX).ok();
    new.alias = Some(alias(plan.shape.id(), &plan.host));
    (new.master, new.port) = (Some(bridge), Some(flags(&plan.shape.network)));
    new.addr_gen = addr_gen;
    new.up = true;
    Ok(new)
}

/// Takes away what a making that was cut off left in the place of a host end. Its other end in the pod, which
/// has no mark yet, goes with it.
pub(super) fn clear(node: &dyn LinkList, network: u32, host: &IfName) -> Result<()> {
    let found = node.link_by_name(host).map_err(internal("look for incomplete links"))?;
    let Some(link) = found else { return Ok(()) };
    if link.alias != Some(alias(network, host)) && !is_half_made(&link, false) {
        let message =
            format!("link {host} already exists and is not an attachment of this Network: delete it");
        return Err(Error::new(Reason::Conflict, message));
    }
    tracing::info!(link = %host, "removing a link whose creation was interrupted");
    node.delete_link(link.index).map(|_| ()).map_err(internal("delete an incomplete link"))
}

/// The host ends of a Network's attachments on the node, under whichever name, by the one that they were
/// given.
pub(super) fn host_ends(node: &dyn LinkList, network: u32) -> Result<Vec<(Link, String)>> {
    let kind = Some(name_of(UnderlayKind::Bridge));
    let filter = LinkFilter { kind, owned: true, ..LinkFilter::default() };
    let links = node.links(&filter).map_err(internal("list links"))?;
    let begin = format!("{ALIAS} {network} ");
    let host = |link: Link| {
        let host = link.owner()?.strip_prefix(&begin)?.to_owned();
        Some((link, host))
    };
    Ok(links.into_iter().filter_map(host).collect())
}

/// Takes host ends away that no attachment has: of these, all but those in `keep`.
pub(super) fn collect(
    node: &dyn LinkList,
    host_ends: &[(Link, String)],
    keep: &HashSet<String>,
) -> Result<()> {
    for (link, _) in host_ends.iter().filter(|(_, host)| !keep.contains(host)) {
        tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
        node.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
    }
    Ok(())
}
