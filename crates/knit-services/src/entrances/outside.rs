//! The places that clients outside know of a port, and where they lead: into this node's router, or to other
//! nodes that have one.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;

use ipnet::IpNet;
use knit_proxy::model::{Protocol, Service, ServicePort};
use knit_proxy::view::{Action, Frontend, FrontendKind, PortKey, PortView, Sources};
use knit_runtime::routers::Way;

use crate::internal_ports::Reserved;

use super::{Ends, EntranceAddress, EntranceTarget, Place};

/// The places of a port that a router of this node serves.
pub(super) fn into_router(key: &PortKey, view: &PortView, service: &Service, ends: &Ends) -> Vec<Place> {
    let internal = view.frontends.iter().find(|frontend| frontend.kind == FrontendKind::NodePort);
    let (Some(internal), Some(router)) = (internal, Ends::of(&ends.router, key.family)) else {
        return Vec::new();
    };
    let to = (router, internal.port).into();
    let named = names(service, &key.port, key.protocol, internal.port);
    places(key, view, Ends::of(&ends.node, key.family), named.then_some(internal.port), |_| {
        (Way::Router(to), None)
    })
}

/// The places of a port whose Network has no router on this node. They lead to these nodes, at the node port
/// that is the Service's on each of them. `node` is where node ports answer here.
pub(crate) fn handed_over(
    key: &PortKey,
    view: &PortView,
    port: &ServicePort,
    node: Option<IpAddr>,
    nodes: &[IpAddr],
) -> Vec<Place> {
    let Some(number) = port.node_port else { return Vec::new() };
    let nodes: Box<[SocketAddr]> = nodes.iter().map(|node| (*node, number.get()).into()).collect();
    let way = |action| match action {
        // None of the nodes with endpoints is known: they may be a moment away.
        Action::Endpoints(_) if nodes.is_empty() => Way::Rejected,
        Action::Endpoints(_) => Way::Nodes(nodes.clone()),
        Action::Reject => Way::Rejected,
        Action::Drop => Way::Dropped,
    };
    places(key, view, node, Some(number.get()), |frontend| {
        let to = way(frontend.route.action);
        // Rule 34: this node and its pods are not bound to the endpoints that it has.
        let near = frontend.from_node.map(|route| way(route.action)).filter(|near| *near != to);
        let near = near.and_then(|near| if let Way::Nodes(nodes) = near { Some(nodes) } else { None });
        (to, near)
    })
}

/// Whether clients outside reach a Service at a place that no other node could be asked for: without a node
/// port there is none by which the other one knows what is meant. Neither is there where the node port has
/// the load balancer's address and its list of sources, on which this node is not.
pub(crate) fn must_have_router(
    service: &Service,
    open: bool,
    reserved: &Reserved,
    is_nodes: impl Fn(IpAddr) -> bool,
) -> bool {
    let addresses = || {
        let external = service.external_ips.iter().filter(|_| open);
        external.chain(&*service.load_balancer_ips)
    };
    let restricted =
        service.source_ranges.is_some() && service.load_balancer_ips.iter().any(|ip| is_nodes(*ip));
    let is_free = |port: &ServicePort, number: u16| !reserved.contains(&(port.protocol, number));
    let number = |port: &ServicePort| port.node_port.map(NonZeroU16::get).filter(|n| is_free(port, *n));
    let alone = |port: &ServicePort| match number(port) {
        None => addresses().next().is_some(),
        Some(number) => restricted && number == port.port,
    };
    service.ports.iter().any(alone)
}

/// The places of a port, each with where it leads.
fn places(
    key: &PortKey,
    view: &PortView,
    node: Option<IpAddr>,
    node_port: Option<u16>,
    way: impl Fn(&Frontend) -> (Way, Option<Box<[SocketAddr]>>),
) -> Vec<Place> {
    let at = |address, port| EntranceAddress { address, protocol: key.protocol, port };
    let mut found: Vec<Place> = Vec::new();
    for frontend in &view.frontends {
        let (FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp, Some(address)) =
            (frontend.kind, frontend.address)
        else {
            continue;
        };
        let sources = sources(&frontend.sources, address, node);
        let (to, near) = way(frontend);
        found.push((at(address, frontend.port), frontend.kind, EntranceTarget { to, near, sources }));
    }
    let internal = view.frontends.iter().find(|frontend| frontend.kind == FrontendKind::NodePort);
    if let (Some(internal), Some(node), Some(number)) = (internal, node, node_port) {
        let place = at(node, number);
        // Where it is the load balancer's address too, that one's list holds.
        let same = found.iter().find(|(known, ..)| *known == place);
        let sources = same.and_then(|(.., target)| target.sources.clone());
        let (to, near) = way(internal);
        found.push((place, FrontendKind::NodePort, EntranceTarget { to, near, sources }));
    }
    found
}

/// Who may come. Rule 44: where the node itself may, its load-balancer address may too.
fn sources(sources: &Sources, address: IpAddr, node: Option<IpAddr>) -> Option<Box<[IpNet]>> {
    let Sources::Only { ranges, .. } = sources else { return None };
    let looped = node.is_some_and(|node| ranges.iter().any(|range| range.contains(&node)));
    Some(ranges.iter().copied().chain(looped.then(|| IpNet::from(address))).collect())
}

/// Whether a Service itself names a node port: one that was only given to it for the router's use is no port
/// of the node.
fn names(service: &Service, port: &str, protocol: Protocol, number: u16) -> bool {
    service.ports.iter().any(|found| {
        *found.name == *port
            && found.protocol == protocol
            && found.node_port.is_some_and(|named| named.get() == number)
    })
}
