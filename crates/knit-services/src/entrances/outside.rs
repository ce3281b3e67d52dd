//! The places that clients outside know of a port that is in force in a router.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use knit_proxy::model::{Protocol, Service};
use knit_proxy::view::{FrontendKind, PortKey, PortView, Sources};

use super::{Ends, EntranceAddress};

pub(super) type Found = (EntranceAddress, FrontendKind, SocketAddr, Option<Box<[IpNet]>>);

/// The places that clients outside know of a port, and where the router takes them.
pub(super) fn places(key: &PortKey, view: &PortView, service: &Service, ends: &Ends) -> Vec<Found> {
    let internal = view.frontends.iter().find(|frontend| frontend.kind == FrontendKind::NodePort);
    let (Some(internal), Some(router)) = (internal, Ends::of(&ends.router, key.family)) else {
        return Vec::new();
    };
    let to = (router, internal.port).into();
    let at = |address, port| EntranceAddress { address, protocol: key.protocol, port };
    let node = Ends::of(&ends.node, key.family);
    let mut found = Vec::new();
    for frontend in &view.frontends {
        let (FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp, Some(address)) =
            (frontend.kind, frontend.address)
        else {
            continue;
        };
        let sources = sources(&frontend.sources, address, node);
        found.push((at(address, frontend.port), frontend.kind, to, sources));
    }
    if names(service, &key.port, key.protocol, internal.port) {
        found.extend(node.map(|node| {
            let place = at(node, internal.port);
            // Where it is the load balancer's address too, that one's list holds.
            let same = found.iter().find(|(known, ..)| *known == place);
            let sources = same.and_then(|(.., sources)| sources.clone());
            (place, FrontendKind::NodePort, to, sources)
        }));
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
