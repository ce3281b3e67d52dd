//! Small helpers of the [`View`](super::View): what a service claims, what two states have in common, what to
//! say.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::claims::FrontendKey;
use super::config::ViewConfig;
use super::frontends::{self, NodePortPlaces};
use super::output::{FrontendKind, PortKey, PortView};
use crate::model::{EndpointGroup, Family, PerFamily, Problem, Service, ServicePort};

/// Every frontend a service asks for.
pub(super) fn claims_of<'a>(
    service: &'a Service,
    config: &'a ViewConfig,
    node_ports: &'a PerFamily<NodePortPlaces>,
) -> impl Iterator<Item = (FrontendKind, FrontendKey, PortKey)> + 'a {
    Family::ALL.into_iter().flat_map(move |family| {
        service.ports.iter().flat_map(move |port| {
            let key = port_key(service, port, family);
            frontends::wanted(service, port, family, config, node_ports.get(family))
                .into_iter()
                .map(move |(kind, frontend)| (kind, frontend, key.clone()))
        })
    })
}

pub(super) fn port_key(service: &Service, port: &ServicePort, family: Family) -> PortKey {
    PortKey { service: service.name.clone(), port: Arc::clone(&port.name), protocol: port.protocol, family }
}

pub(super) fn cluster_ip(view: &PortView) -> Option<IpAddr> {
    view.frontends.iter().find(|f| f.kind == FrontendKind::ClusterIp).and_then(|f| f.address)
}

/// Whether two states of a group mean the same. When the change was triggered is no part of the state.
pub(super) fn same_endpoints(a: &EndpointGroup, b: &EndpointGroup) -> bool {
    a.service == b.service && a.family == b.family && a.ports == b.ports && a.endpoints == b.endpoints
}

/// Takes out of both lists what came and went again.
pub(super) fn settle(added: &mut Vec<IpAddr>, removed: &mut Vec<IpAddr>) {
    if removed.is_empty() {
        return;
    }
    let mut net: BTreeMap<IpAddr, i64> = BTreeMap::new();
    added.drain(..).for_each(|a| *net.entry(a).or_default() += 1);
    removed.drain(..).for_each(|a| *net.entry(a).or_default() -= 1);
    added.extend(net.iter().filter(|(_, n)| **n > 0).map(|(a, _)| *a));
    removed.extend(net.iter().filter(|(_, n)| **n < 0).map(|(a, _)| *a));
}

pub(super) fn taken(
    service: &Service,
    port: &ServicePort,
    kind: FrontendKind,
    frontend: FrontendKey,
    winner: &PortKey,
) -> Problem {
    let field = match kind {
        FrontendKind::ClusterIp => "spec.clusterIPs",
        FrontendKind::LoadBalancerIp => "status.loadBalancer.ingress",
        FrontendKind::ExternalIp => "spec.externalIPs",
        FrontendKind::NodePort => "spec.ports[].nodePort",
    };
    let place = match frontend.address {
        Some(address) => SocketAddr::new(address, frontend.port).to_string(),
        None => frontend.port.to_string(),
    };
    let message = format!(
        "{kind} {place} {} of port {:?} is already used by {}, which takes precedence; it is not \
        served here, change one of the two",
        frontend.protocol, &*port.name, winner.service
    );
    Problem::service(service.name.as_str(), field, message)
}

pub(super) fn twice(service: &Service, port: &ServicePort) -> Problem {
    let message = format!("port {:?} {} is listed twice; the first one is used", &*port.name, port.protocol);
    Problem::service(service.name.as_str(), "spec.ports", message)
}
