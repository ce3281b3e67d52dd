//! Where clients of a service port may connect to, and what happens to their traffic.

use std::net::IpAddr;

use super::claims::FrontendKey;
use super::config::{NodePortMatch, NodeSettings, ViewConfig};
use super::output::{Action, Frontend, FrontendKind, Masquerade, Route, Scope, Sources};
use super::select::{Decision, Pool, Uses};
use crate::model::{Family, NodeInfo, Service, ServicePort, TrafficPolicy};

/// The addresses that a service port asks for in one family, best kind first, each once.
///
/// Nothing if the service has no cluster IP of that family (rule 18). Exempt addresses are left out.
pub(super) fn wanted<'a>(
    service: &'a Service,
    port: &'a ServicePort,
    family: Family,
    config: &'a ViewConfig,
    node_ports: &NodePortPlaces,
) -> Vec<(FrontendKind, FrontendKey)> {
    let Some(cluster_ip) = service.cluster_ip_of(family).filter(|_| *config.families.get(family)) else {
        return Vec::new();
    };
    let free = |number: u16| !config.reserved.contains(&(port.protocol, number));
    let external: &[IpAddr] = if config.external_ips { &service.external_ips } else { &[] };
    let of_kind = |kind, list: &'a [IpAddr]| list.iter().map(move |address| (kind, *address));
    let mut found: Vec<(FrontendKind, FrontendKey)> = Vec::with_capacity(2);
    let addresses = std::iter::once((FrontendKind::ClusterIp, cluster_ip))
        .chain(of_kind(FrontendKind::LoadBalancerIp, &service.load_balancer_ips))
        .chain(of_kind(FrontendKind::ExternalIp, external))
        .filter(|(kind, _)| *kind == FrontendKind::ClusterIp || free(port.port))
        .filter(|(_, address)| Family::of(*address) == family && !config.exempt_vips.contains(address));
    for (kind, address) in addresses {
        let key = FrontendKey { family, protocol: port.protocol, port: port.port, address: Some(address) };
        // One address may be listed as load-balancer and as external IP. The former brings the source ranges.
        if found.iter().all(|(_, known)| *known != key) {
            found.push((kind, key));
        }
    }
    if let Some(node_port) = port.node_port.filter(|number| free(number.get())) {
        let key = |address| FrontendKey { family, protocol: port.protocol, port: node_port.get(), address };
        // The number as such, and each address where it answers: somebody may have that as an external one.
        let places = node_ports.addresses.iter().map(|address| Some(*address));
        for key in [None].into_iter().chain(places).map(key) {
            // Where it is the port's own load-balancer address, that one brings the source ranges.
            if found.iter().all(|(_, known)| *known != key) {
                found.push((FrontendKind::NodePort, key));
            }
        }
    }
    found
}

/// Where node ports of one family answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct NodePortPlaces {
    /// The addresses, as far as they are known.
    addresses: Vec<IpAddr>,
    /// These are all; if not, any address of the node is one.
    all: bool,
}

impl NodePortPlaces {
    pub(super) fn new(config: &ViewConfig, node: &NodeInfo, family: Family) -> Self {
        match config.node_ports.resolve(node, family) {
            NodePortMatch::Only(addresses) => Self { addresses: addresses.into(), all: true },
            NodePortMatch::AnyLocal => {
                let all = node.addresses.iter().chain(&node.host_addresses);
                let mut addresses: Vec<IpAddr> = all.copied().filter(|a| Family::of(*a) == family).collect();
                addresses.sort_unstable();
                addresses.dedup();
                Self { addresses, all: false }
            }
        }
    }

    /// The frontends of a node port that has these of the places: one for all addresses, or one for each
    /// where somebody else has some of them. Where any address is one, what somebody else has is more exact,
    /// and comes first.
    pub(super) fn frontends(&self, had: &[FrontendKey]) -> Vec<FrontendKey> {
        let Some(number) = had.iter().find(|key| key.address.is_none()) else { return Vec::new() };
        if !self.all || had.len() > self.addresses.len() {
            return vec![*number];
        }
        had.iter().filter(|key| key.address.is_some()).copied().collect()
    }
}

/// Whether anything but the cluster IPs leads to a port (rule 39).
fn externally_accessible(service: &Service, port: &ServicePort, family: Family, config: &ViewConfig) -> bool {
    let of_family = |list: &[IpAddr]| list.iter().any(|a| Family::of(*a) == family);
    port.node_port.is_some()
        || of_family(&service.load_balancer_ips)
        || (config.external_ips && of_family(&service.external_ips))
}

/// What a port needs endpoints for (rules 34, 39).
pub(super) fn uses(service: &Service, port: &ServicePort, family: Family, config: &ViewConfig) -> Uses {
    let external = externally_accessible(service, port, family, config);
    Uses {
        cluster: external || service.internal_policy == TrafficPolicy::Cluster,
        local: service.internal_policy == TrafficPolicy::Local
            || (external && service.external_policy == TrafficPolicy::Local),
    }
}

/// Resolves one frontend.
pub(super) fn resolve(
    kind: FrontendKind,
    key: FrontendKey,
    service: &Service,
    decision: Decision,
    node: &NodeSettings,
) -> Frontend {
    let policy = match kind {
        FrontendKind::ClusterIp => service.internal_policy,
        _ => service.external_policy,
    };
    let action = |policy| match policy {
        // Nobody answers anywhere: say so at once (rule 33).
        _ if !decision.any => Action::Reject,
        TrafficPolicy::Cluster => scope(Scope::Cluster, decision.cluster),
        TrafficPolicy::Local => scope(Scope::Local, decision.local),
    };
    let knows_pods = node.knows_pods(key.family);
    let masquerade = match (kind, policy) {
        (FrontendKind::ClusterIp, _) if node.masquerade_all => Masquerade::All,
        (FrontendKind::ClusterIp, _) if knows_pods => Masquerade::NotPods,
        (FrontendKind::ClusterIp, _) => Masquerade::HairpinOnly,
        (_, TrafficPolicy::Cluster) => Masquerade::All,
        // The point of this policy is that the endpoint sees who called.
        (_, TrafficPolicy::Local) => Masquerade::HairpinOnly,
    };
    // Rule 34: who is inside the cluster already takes the short way, and is not bound to this node's
    // endpoints.
    let shortcut = kind != FrontendKind::ClusterIp && policy == TrafficPolicy::Local;
    let inside = |masquerade| Route { action: action(TrafficPolicy::Cluster), masquerade };
    Frontend {
        kind,
        address: key.address,
        port: key.port,
        route: Route { action: action(policy), masquerade },
        from_pods: (shortcut && knows_pods).then(|| inside(Masquerade::HairpinOnly)),
        from_node: shortcut.then(|| inside(Masquerade::All)),
        sources: match kind {
            FrontendKind::LoadBalancerIp => sources(service, key.family, node),
            _ => Sources::Any,
        },
    }
}

fn scope(scope: Scope, pool: Pool) -> Action {
    match pool {
        Pool::Ready | Pool::Terminating => Action::Endpoints(scope),
        // There are endpoints, but not in this scope (rules 31, 32).
        Pool::Empty | Pool::Unused => Action::Drop,
    }
}

/// Who may use the load-balancer addresses of a family (rules 19, 43, 44).
fn sources(service: &Service, family: Family, node: &NodeSettings) -> Sources {
    let Some(all) = &service.source_ranges else { return Sources::Any };
    let mut ranges: Vec<_> = all.iter().copied().filter(|r| Family::of_net(*r) == family).collect();
    // Ranges of the other family only restrict that one; so does Kubernetes read them.
    if (ranges.is_empty() && !all.is_empty()) || ranges.iter().any(|r| r.prefix_len() == 0) {
        return Sources::Any;
    }
    ranges.sort_unstable();
    ranges.dedup();
    let and_itself = node.primary.get(family).is_some_and(|ip| ranges.iter().any(|r| r.contains(&ip)));
    Sources::Only { ranges: ranges.into(), and_itself }
}
