//! Networks with a router of their own: a namespace that holds the Network's bridge or ports, its tunnel, and
//! one end of the uplink to the node.
//!
//! The rules of both sides are in force before the uplink comes up.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::link::{AddrGenMode, Change, Link, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::op::Object;
use knit_kernel::{Handle, IfName, Mtu, owner};
use knit_nft::{Element, IfName as NftName, Set, TableState};
use knit_runtime::{Error, Reason, Result};
use knit_types::{Family, NetworkName};

use crate::default_router;
use crate::fail::internal;
use crate::links::{WantedLink, find_renamed, links_of, ports_by_name, settle_ports};
use crate::mark::Mark;
use crate::networks::Net;
use crate::node::Node;
use crate::pair;
use crate::plan::Plan;
use crate::port::take_elements;
use crate::router_tables;
use crate::rules::node::uplinks;
use crate::rules::{self, SetElement};
use crate::settings;
use crate::shape::{Facts, RouterHome, Shape};
use crate::tunnel::{self, ROUTER_TUNNEL};
use crate::uplink::{End, ROUTER_END, UplinkSlot, node_end};
use crate::wanted::{Difference, Entry, Links, found, found_on_own, take};

/// Makes or repairs a Network's router, wherever it is.
pub(crate) fn set_up(net: &Net, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
    match net.home {
        RouterHome::Node => default_router::set_up(net, shape, facts),
        RouterHome::Own => set_own_up(net, shape, facts),
    }
}

/// Keeps the rules in force that a Network has, or lays them down without what would open them. `tables` are
/// those of its kind.
pub(crate) fn hold_closed(node: &Node, net: Option<&Net>, tables: Vec<TableState>) -> Result<()> {
    let Some(net) = net else { return node.tables().close(node) };
    let Some(shape) = net.shape() else {
        node.tables().close(node)?;
        return router_tables::close(net, tables);
    };
    let ports = pair::list(&*net.space.links()?)?;
    if net.home == RouterHome::Own {
        router_tables::settle(net, &shape, &ports)?;
    }
    node.tables().settle_part(node, &shape, &ports)?;
    settle_ports(&net.attachments, &*net.space.links()?, &shape, &ports, None)
}

/// Takes a Network's router away.
pub(crate) fn take_down(net: &Net) -> Result<()> {
    match net.home {
        RouterHome::Node => default_router::take_down(net),
        RouterHome::Own => take_own_down(net),
    }
}

fn set_own_up(net: &Net, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
    let node = &net.node;
    let ports = ports_by_name(&net.attachments, &*net.space.links()?)?;
    let uplink = node_end(shape.id());
    router_tables::settle(net, shape, &ports)?;
    take_sources_of_lost(net, &ports)?;
    let place = {
        let mut tables = node.tables();
        tables.settle_part(node, shape, &ports)?;
        if let Some(before) = net.shape().filter(|before| before.id() != shape.id()) {
            tables.clear_part(node, RouterHome::Own, before.id())?;
        }
        // Under the same lock: no two Networks choose one place.
        ensure_uplink(net, shape, facts, &uplink)?
    };
    settings::settle(&net.space, &settings::forwarding(shape, None))?;
    let master = settle_links(net, shape, facts)?;
    for (settings, consequence) in shape.driver().settings() {
        settings::settle_if_possible(&net.space, &settings, consequence);
    }
    settle_ports(&net.attachments, &*net.space.links()?, shape, &ports, master)?;
    router_side(net, shape, facts, place, &ports)?;
    uplink_side(net, shape, facts, &uplink, place, &ports)
}

/// Takes the sources away that attachments have whose link is gone without us: a set-up that reads no rules
/// does not find them.
pub(crate) fn take_sources_of_lost(net: &Net, ports: &[(Link, Mark)]) -> Result<()> {
    let there: HashSet<&str> = ports.iter().map(|(link, _)| link.name.as_str()).collect();
    let lost: Vec<(String, Mark)> = {
        let known = net.attachments.known();
        let ours = known.iter().filter(|(_, known)| known.network == net.name);
        let gone = ours.filter(|(host, _)| !there.contains(host.as_str()));
        gone.map(|(host, known)| (host.clone(), known.mark.clone())).collect()
    };
    for (host, mark) in lost {
        let own = rules::source_elements(&host, mark.mac, mark.ips());
        take_elements(&mut *net.space.rules()?, &own, &mark.driver().sources())?;
    }
    Ok(())
}

/// The pair of links between node and router: where its addresses are.
fn ensure_uplink(net: &Net, shape: &Shape, facts: &Facts, uplink: &IfName) -> Result<UplinkSlot> {
    let node = net.node.space.links()?;
    let there = find_renamed(&node, uplink, &format!("uplink {}", shape.id()))?;
    let inside = net.space.links()?.link_by_name(&router_end()).map_err(internal("look for the uplink"))?;
    let addresses = node.addresses(None).map_err(internal("list the node's addresses"))?;
    let place_of = |address: &knit_kernel::addr::Address| UplinkSlot::of(address.address.addr());
    if let (Some(link), Some(inside)) = (&there, &inside) {
        let place = addresses.iter().filter(|found| found.interface == link.index).find_map(place_of);
        if let Some(place) = place {
            WantedLink::uplink(shape, facts, place, End::Router).settle(&*net.space.links()?, inside)?;
            return Ok(place);
        }
    }
    // Half of one, left by a crash, or one whose node's end somebody took away or renamed.
    if let Some(link) = there {
        node.delete_link(link.index).map_err(internal("delete a broken uplink"))?;
    } else if let Some(inside) = inside {
        let deleted = net.space.links()?.delete_link(inside.index);
        deleted.map_err(internal("delete a broken uplink"))?;
    }
    let taken: BTreeSet<UplinkSlot> = addresses.iter().filter_map(place_of).collect();
    let place = UplinkSlot::choose(shape.id(), |place| taken.contains(&place)).ok_or_else(|| {
        Error::new(Reason::Internal, "there is no free uplink slot on this node: remove unused Networks")
    })?;
    let mut peer = Peer::new(router_end(), net.space.namespace());
    peer.mac = Some(place.mac(End::Router));
    peer.mtu = Mtu::new(facts.mtu).ok();
    let mut link = NewLink::veth(uplink.clone(), peer);
    link.mac = Some(place.mac(End::Node));
    link.mtu = Mtu::new(facts.mtu).ok();
    link.alias = Some(owner::alias(&format!("uplink {}", shape.id())));
    link.addr_gen = net.node.ipv6.then_some(AddrGenMode::None);
    let created = node.create_link(&link).map_err(internal("create the uplink"))?;
    // Its addresses are where its place is remembered: before it comes up.
    let links: Links = [(uplink.to_string(), created.index)].into();
    let own = place.addresses(End::Node).map(|net| Entry::Address { link: uplink.to_string(), net });
    crate::wanted::put(&*node, &links, &own).map_err(internal("add the uplink's addresses"))?;
    Ok(place)
}

/// What the Network's kind has there, and the tunnel; says what ports are ports of, if anything.
fn settle_links(net: &Net, shape: &Shape, facts: &Facts) -> Result<Option<u32>> {
    let handle = net.space.links()?;
    let master = shape.driver().settle_links(&handle, shape)?;
    let tunnel_name = tunnel::router_tunnel();
    let there = tunnel::in_router(&handle, shape.id())?;
    let staging = tunnel::node_tunnel(shape.id());
    let Some(wanted) = tunnel::wanted(shape, facts, staging.clone()) else {
        let message = format!("node {} has no address for a tunnel endpoint: give it one", facts.node);
        return Err(Error::new(Reason::NotReady, message));
    };
    let index = match there {
        Some(link) if tunnel::same(&wanted, &link) && link.name == tunnel_name => {
            WantedLink::tunnel(shape, master).settle(&handle, &link)?;
            link.index
        }
        there => {
            if let Some(link) = there {
                handle.delete_link(link.index).map_err(internal("delete a tunnel with other properties"))?;
            }
            tunnel::make_in_router(&*net.node.space.links()?, &net.space, &wanted)?;
            handle.index_of(&tunnel_name).map_err(internal("find the tunnel in the router"))?
        }
    };
    let mut change = Change::of(index).up();
    change.master = Some(master);
    change.port = shape.driver().master().map(|master| master.tunnel_port);
    change.addr_gen = net.node.ipv6.then_some(AddrGenMode::None);
    let lo = IfName::new("lo").expect("lo is a name");
    let changes = [change.into(), Change::named(lo).up().into()];
    handle.apply(&changes).map_err(internal("bring the tunnel up"))?;
    Ok(master)
}

/// Addresses, routes, neighbours and forwarding entries in the router.
fn router_side(
    net: &Net,
    shape: &Shape,
    facts: &Facts,
    place: UplinkSlot,
    ports: &[(Link, Mark)],
) -> Result<()> {
    let handle = net.space.links()?;
    let mut up = Change::named(router_end()).up();
    up.addr_gen = net.node.ipv6.then_some(AddrGenMode::None);
    up.alias = WantedLink::uplink(shape, facts, place, End::Router).alias;
    handle.apply(&[up.into()]).map_err(internal("bring the uplink up in the router"))?;
    let links = links_of(&handle, links_with_entries(shape), ports)?;
    let wanted = router_entries(shape, facts, place, ports);
    settle(&handle, &links, &wanted, &shape.network.name)
}

/// Addresses, neighbours and routes to local pods on the node's end of the uplink.
fn uplink_side(
    net: &Net,
    shape: &Shape,
    facts: &Facts,
    uplink: &IfName,
    place: UplinkSlot,
    ports: &[(Link, Mark)],
) -> Result<()> {
    let node = net.node.space.links()?;
    // Routes need a link that is up; the rules of both sides are in force.
    let link = node.link_by_name(uplink).map_err(internal("look for the uplink"))?;
    let link = link.ok_or_else(|| Error::new(Reason::NotReady, format!("{uplink} has just disappeared")))?;
    WantedLink::uplink(shape, facts, place, End::Node).settle(&node, &link)?;
    let links = links_of(&node, [uplink.as_str()], &[])?;
    settle(&node, &links, &uplink_entries(shape, uplink, place, ports), &shape.network.name)
}

/// What the node itself has for a pod whose primary Network this is: a route into its router, so that it
/// can be probed.
pub(crate) fn lead_node_to(net: &Net, plan: &Plan) -> Result<()> {
    if net.home == RouterHome::Node || !plan.shape.network.primary || !plan.mark.default_route {
        return Ok(());
    }
    let node = net.node.space.links()?;
    let (uplink, place, index) = uplink_of(&node, plan.shape.id())?;
    let links: Links = [(uplink.to_string(), index)].into();
    for address in plan.mark.ips() {
        let Some(Object::Route(route)) = local_route(&uplink, place, address).object(&links) else {
            continue;
        };
        node.ensure(route).map_err(|error| match error {
            knit_kernel::Error::Conflict { .. } => {
                let message = format!(
                    "{address} is a pod of another Network on this node, and primary Networks share the \
                     node's \
                     routes: reserve another address"
                );
                Error::new(Reason::Conflict, message).because(error)
            }
            error => internal("add the node's route to the pod")(error),
        })?;
    }
    Ok(())
}

/// Takes that route away.
pub(crate) fn stop_leading_node_to(net: &Net, mark: &Mark) -> Result<()> {
    if net.home == RouterHome::Node {
        return Ok(());
    }
    let node = net.node.space.links()?;
    let Some(uplink) = find_uplink(net, &node)? else { return Ok(()) };
    let addresses = node.addresses(Some(uplink.index)).map_err(internal("read the uplink's addresses"))?;
    let Some(place) = addresses.iter().find_map(|found| UplinkSlot::of(found.address.addr())) else {
        return Ok(());
    };
    let links: Links = [(uplink.name.to_string(), uplink.index)].into();
    let routes: Vec<Entry> = mark.ips().map(|address| local_route(&uplink.name, place, address)).collect();
    take(&*node, &links, &routes).map_err(internal("delete the node's route to the pod"))
}

/// The node's end of a Network's uplink, also for one that an earlier runtime set up.
fn find_uplink(net: &Net, node: &Handle) -> Result<Option<Link>> {
    let failed = || internal::<knit_kernel::Error>("look for the uplink");
    let link = match net.shape() {
        Some(shape) => node.link_by_name(&node_end(shape.id())).map_err(failed())?,
        None => {
            let inside = net.space.links()?.link_by_name(&router_end()).map_err(failed())?;
            let Some(peer) = inside.and_then(|link| link.link) else { return Ok(None) };
            node.link(peer).map_err(failed())?
        }
    };
    Ok(link.filter(|link| link.owner().is_some_and(|owner| owner.starts_with("uplink "))))
}

fn uplink_of(node: &Handle, id: u32) -> Result<(IfName, UplinkSlot, u32)> {
    let uplink = node_end(id);
    let index = node.index_of(&uplink).map_err(internal("find the uplink"))?;
    let addresses = node.addresses(Some(index)).map_err(internal("read the uplink's addresses"))?;
    let place = addresses.iter().find_map(|found| UplinkSlot::of(found.address.addr())).ok_or_else(|| {
        Error::new(Reason::NotReady, format!("{uplink} has lost its addresses: set the Network up again"))
    })?;
    Ok((uplink, place, index))
}

/// Takes a router away: uplink and rules on the node, then the namespace with all that is in it.
fn take_own_down(net: &Net) -> Result<()> {
    let id = net.shape().map(|shape| shape.id());
    let node = net.node.space.links()?;
    let ours = find_uplink(net, &node)?;
    if let Some(link) = &ours {
        node.delete_link(link.index).map_err(internal("delete the uplink"))?;
    }
    // A namespace goes when the kernel finds the time; a tunnel's number must be free at once.
    let inside = net.space.links()?;
    if let Some(link) =
        inside.link_by_name(&tunnel::router_tunnel()).map_err(internal("look for the tunnel"))?
    {
        inside.delete_link(link.index).map_err(internal("delete the tunnel"))?;
    }
    NetNs::delete(&net.path).map_err(internal("delete the router's namespace"))?;
    if let Some(id) = id.or_else(|| ours.as_ref().and_then(network_of)) {
        net.node.tables().clear_part(&net.node, RouterHome::Own, id)?;
    }
    Ok(())
}

/// The router's end of the uplink.
pub(crate) fn router_end() -> IfName {
    IfName::new(ROUTER_END).expect("uplink is a name")
}

/// The number of the Network whose uplink this is.
fn network_of(uplink: &Link) -> Option<u32> {
    uplink.owner()?.strip_prefix("uplink ")?.parse().ok()
}

/// The links of a router, besides ports, that something is on.
pub(crate) fn links_with_entries(shape: &Shape) -> impl Iterator<Item = &'static str> {
    let master = shape.driver().master().map(|master| master.name);
    [ROUTER_END, ROUTER_TUNNEL, "lo"].into_iter().chain(master)
}

/// What a Network has in the node's table.
pub(crate) fn uplink_elements(shape: &Shape, uplink: &IfName) -> Vec<SetElement> {
    let network = &shape.network;
    let link = NftName::new(uplink.as_str());
    let mut puts = vec![SetElement::new(uplinks::all(), Element::new(&link))];
    if network.outside {
        puts.push(SetElement::new(uplinks::outside(), Element::new(&link)));
    }
    for service in &network.cluster_service_ips {
        puts.push(match service {
            IpAddr::V4(v4) => SetElement::new(uplinks::services4(), Element::new(&(link, *v4))),
            IpAddr::V6(v6) => SetElement::new(uplinks::services6(), Element::new(&(link, *v6))),
        });
    }
    let nodes = network.blocks.iter().flat_map(|block| &block.node_addresses).copied().map(IpNet::from);
    let never = rules::never_outside();
    let inside: Vec<IpNet> = network.not_outside.iter().copied().chain(nodes).chain(never).collect();
    let inside = IpNet::aggregate(&inside.iter().map(IpNet::trunc).collect());
    let range = |set: Set, element| SetElement::new(set, element);
    for net in inside {
        puts.push(match net {
            IpNet::V4(net) => {
                let element = Element::range(&(link, net.network()), &(link, net.broadcast()));
                range(uplinks::inside4(), element)
            }
            IpNet::V6(net) => {
                let element = Element::range(&(link, net.network()), &(link, net.broadcast()));
                range(uplinks::inside6(), element)
            }
        });
    }
    puts
}

/// All that is wanted on the node's end of an uplink.
pub(crate) fn uplink_entries(
    shape: &Shape,
    uplink: &IfName,
    place: UplinkSlot,
    ports: &[(Link, Mark)],
) -> BTreeSet<Entry> {
    let mut wanted: BTreeSet<Entry> = BTreeSet::new();
    for net in place.addresses(End::Node) {
        wanted.insert(Entry::Address { link: uplink.to_string(), net });
    }
    for family in Family::ALL {
        let address = place.address(End::Router, family);
        let mac = place.mac(End::Router);
        wanted.insert(Entry::Neighbour { link: uplink.to_string(), address, mac });
    }
    if shape.network.primary {
        for (_, mark) in ports.iter().filter(|(_, mark)| mark.default_route) {
            wanted.extend(mark.ips().map(|address| local_route(uplink, place, address)));
        }
    }
    wanted
}

/// All that is wanted in a router.
pub(crate) fn router_entries(
    shape: &Shape,
    facts: &Facts,
    place: UplinkSlot,
    ports: &[(Link, Mark)],
) -> BTreeSet<Entry> {
    let mut entries = BTreeSet::new();
    for net in place.addresses(End::Router) {
        entries.insert(Entry::Address { link: ROUTER_END.into(), net });
    }
    for family in Family::ALL {
        let (address, mac) = (place.address(End::Node, family), place.mac(End::Node));
        entries.insert(Entry::Neighbour { link: ROUTER_END.into(), address, mac });
        let to = match family {
            Family::V4 => IpNet::V4(Default::default()),
            Family::V6 => IpNet::V6(Default::default()),
        };
        entries.insert(Entry::Route { to, via: Some(address), link: ROUTER_END.into(), source: None });
    }
    entries.extend(shape.driver().router_entries(shape, facts));
    for (link, mark) in ports {
        entries.extend(shape.driver().pod_entries(link.name.as_str(), mark));
    }
    entries
}

/// A route from the node into a router, to one pod.
fn local_route(uplink: &IfName, place: UplinkSlot, address: IpAddr) -> Entry {
    let family = Family::of(address);
    Entry::Route {
        to: IpNet::from(address),
        via: Some(place.address(End::Router, family)),
        link: uplink.to_string(),
        source: Some(place.address(End::Node, family)),
    }
}

/// Brings what is on these links to what is wanted.
fn settle(handle: &Handle, links: &Links, wanted: &BTreeSet<Entry>, network: &NetworkName) -> Result<()> {
    let mut there = found(handle, links).map_err(internal("read routes and neighbors"))?;
    there.extend(found_on_own(handle, links).map_err(internal("read addresses and forwarding entries"))?);
    let difference = Difference::between(wanted, &there);
    if !difference.is_empty() {
        tracing::debug!(%network, "\n{difference}");
    }
    difference.apply(handle, links).map_err(internal("update addresses, routes and neighbors"))
}
