//! VXLAN devices: made in the node's namespace, so that their outer packets are the node's.

use std::collections::BTreeSet;

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Change, Details, Link, NewLink, Vxlan};
use knit_kernel::{Handle, IfName, Mtu, owner};
use knit_runtime::Result;

use crate::fail::internal;
use crate::links::WantedLink;
use crate::shape::{Facts, Shape, tunnel_mac};
use crate::space::NamespaceSockets;
use crate::wanted::{Entry, Links, found_on_own};

/// The group of tunnels in the node's namespace. Not that of ports: what comes out of one has another node's
/// sources.
pub(crate) const GROUP: u32 = owner::GROUP + 2;

/// The name of the default Network's tunnel, and of any other's until it is moved into its router.
pub(crate) fn node_tunnel(network: u32) -> IfName {
    IfName::new(format!("vx-{network}")).expect("a prefix and eight digits are a name")
}

/// The name of a tunnel in its router.
pub(crate) const ROUTER_TUNNEL: &str = "vxlan";

/// The same as a name.
pub(crate) fn router_tunnel() -> IfName {
    IfName::new(ROUTER_TUNNEL).expect("vxlan is a name")
}

/// The tunnel in a router: by its name, or by its mark where somebody renamed it.
pub(crate) fn in_router(router: &Handle, network: u32) -> Result<Option<Link>> {
    let named = router.link_by_name(&router_tunnel()).map_err(internal("look for the tunnel"))?;
    if named.is_some() {
        return Ok(named);
    }
    let owner = format!("tunnel {network}");
    let filter = LinkFilter { kind: Some("vxlan"), owner: Some(&owner), ..LinkFilter::default() };
    Ok(router.links(&filter).map_err(internal("look for the tunnel"))?.pop())
}

/// Makes a tunnel in the node's namespace and moves it into a router. One that a crash left on the way is
/// replaced.
pub(crate) fn make_in_router(node: &Handle, router: &NamespaceSockets, wanted: &NewLink<'_>) -> Result<()> {
    if let Some(left) = node.link_by_name(&wanted.name).map_err(internal("look for the tunnel"))? {
        node.delete_link(left.index).map_err(internal("delete a leftover tunnel"))?;
    }
    let made = node.create_link(wanted).map_err(internal("create the tunnel"))?;
    let moved = Change::of(made.index).move_to(router.namespace(), Some(router_tunnel()));
    node.apply(&[moved.into()]).map_err(internal("move the tunnel into the router"))
}

/// The device that a Network wants; none if it has no tunnels.
pub(crate) fn wanted(shape: &Shape, facts: &Facts, name: IfName) -> Option<NewLink<'static>> {
    let source = shape.tunnel_source?;
    let vxlan = Vxlan { port: facts.vxlan_port, local: Some(source), ..Vxlan::new(shape.id()) };
    let mut link = NewLink::vxlan(name, vxlan);
    link.mac = Some(tunnel_mac(source));
    link.mtu = Mtu::new(shape.mtu).ok();
    link.alias = Some(owner::alias(&format!("tunnel {}", shape.id())));
    link.group = GROUP;
    link.addr_gen = Some(knit_kernel::link::AddrGenMode::None);
    Some(link)
}

/// Makes, changes or removes the tunnel of the default Network, in the node's namespace.
pub(crate) fn ensure_in_node(handle: &Handle, shape: &Shape, facts: &Facts, name: &IfName) -> Result<()> {
    let owner = format!("tunnel {}", shape.id());
    let filter = LinkFilter { kind: Some("vxlan"), owner: Some(&owner), ..LinkFilter::default() };
    // Under another name it would keep the number that a new one needs.
    for link in handle.links(&filter).map_err(internal("look for the tunnel"))? {
        if link.name != *name {
            handle.delete_link(link.index).map_err(internal("delete a renamed tunnel"))?;
        }
    }
    let there = handle.link_by_name(name).map_err(internal("look for the tunnel"))?;
    let Some(mut wanted) = wanted(shape, facts, name.clone()) else {
        if let Some(link) = there.filter(|link| link.owner().is_some()) {
            handle.delete_link(link.index).map_err(internal("delete the tunnel"))?;
        }
        return Ok(());
    };
    wanted.up = true;
    // One without its mark is one whose making was cut off.
    if let Some(link) = there {
        if !same(&wanted, &link) || (link.group == wanted.group && link.alias.is_none()) {
            handle.delete_link(link.index).map_err(internal("delete a tunnel with other properties"))?;
        } else {
            WantedLink::tunnel(shape, None).settle(handle, &link)?;
        }
    }
    handle.ensure_link(&wanted).map_err(internal("create the tunnel"))?;
    Ok(())
}

/// Whether a device is what is wanted. What can be changed in place is not looked at.
pub(crate) fn same(wanted: &NewLink<'_>, found: &Link) -> bool {
    let knit_kernel::link::Kind::Vxlan(options) = &wanted.kind else { return false };
    matches!(&found.details, Details::Vxlan(there) if there.id == options.id
        && there.port == options.port
        && there.local == options.local)
        && wanted.mac == found.mac
}

/// The forwarding entries that a tunnel has.
pub(crate) fn found(handle: &Handle, links: &Links, name: &IfName) -> Result<BTreeSet<Entry>> {
    let own: Links = links
        .iter()
        .filter(|(link, _)| link.as_str() == name.as_str())
        .map(|(n, i)| (n.clone(), *i))
        .collect();
    if own.is_empty() {
        return Ok(BTreeSet::new());
    }
    found_on_own(handle, &own).map_err(internal("read the tunnel's entries"))
}
