//! Which address and port of the node leads into which router: pure bookkeeping.
//!
//! Routers say which of their Services are in force, with the places that clients outside know; Services of the default
//! Network want such places too, and are served on the node itself. Where two want one, the older Service has it, as
//! within one Network. Nobody has an address that belongs to a Network or to the service ranges.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_proxy::model::{Family, NetworkName, Protocol, Service, ServiceName};
use knit_proxy::view::{FrontendKind, PortKey, PortView, Sources};
use knit_proxy_nft::{Place, Steered};

/// All places, and who wants them.
#[derive(Debug, Default)]
pub(crate) struct Steering {
    claims: HashMap<Place, BTreeMap<Rank, Option<Steered>>>,
    /// What is claimed by whom, to take it back.
    by_owner: BTreeMap<Owner, Vec<(Place, Rank)>>,
    forbidden: Vec<IpNet>,
    wanted: BTreeMap<Place, Steered>,
    changed: BTreeSet<Place>,
    /// Said once.
    refused: BTreeSet<(Place, ServiceName)>,
}

/// Who claims: a port in a router, or a Service of the default Network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Router(NetworkName, PortKey),
    Node(ServiceName),
}

/// The order of precedence.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    created: u64,
    service: ServiceName,
    port: Arc<str>,
}

/// Where a router and its node are reached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ends {
    /// The router's end of its uplink, one per family.
    pub router: Vec<IpAddr>,
    /// The node's addresses where node ports answer, one per family.
    pub node: Vec<IpAddr>,
}

impl Ends {
    fn of(addresses: &[IpAddr], family: Family) -> Option<IpAddr> {
        addresses.iter().copied().find(|address| Family::of(*address) == family)
    }
}

impl Steering {
    /// A port of a Service is in force in a router like this; none: no longer.
    pub(crate) fn set_port(
        &mut self,
        network: &NetworkName,
        key: &PortKey,
        found: Option<(&PortView, &Service)>,
        ends: &Ends,
    ) {
        let owner = Owner::Router(network.clone(), key.clone());
        let places = found.map_or_else(Vec::new, |(view, service)| {
            let rank =
                Rank { created: service.created, service: key.service.clone(), port: Arc::clone(&key.port) };
            let places = places(key, view, service, ends);
            places.into_iter().map(|(place, to)| (place, rank.clone(), Some(to))).collect()
        });
        self.replace(owner, places);
    }

    /// Nothing of a Network leads into its router any more.
    pub(crate) fn forget_network(&mut self, network: &NetworkName) {
        let of_network = |owner: &&Owner| matches!(owner, Owner::Router(name, _) if name == network);
        let owners: Vec<Owner> = self.by_owner.keys().filter(of_network).cloned().collect();
        owners.into_iter().for_each(|owner| self.replace(owner, Vec::new()));
    }

    /// The ports of a Network that lead into its router.
    pub(crate) fn ports_of(&self, network: &NetworkName) -> Vec<PortKey> {
        let key = |owner: &Owner| match owner {
            Owner::Router(name, key) if name == network => Some(key.clone()),
            _ => None,
        };
        self.by_owner.keys().filter_map(key).collect()
    }

    /// A Service of the default Network wants its places like anybody else, but they lead nowhere.
    pub(crate) fn set_default(&mut self, service: &Service) {
        let mut places = Vec::new();
        let addresses = service.external_ips.iter().chain(&service.load_balancer_ips);
        for address in addresses {
            for port in &service.ports {
                let rank = Rank {
                    created: service.created,
                    service: service.name.clone(),
                    port: Arc::clone(&port.name),
                };
                let place = Place { address: *address, protocol: port.protocol, port: port.port };
                places.push((place, rank, None));
            }
        }
        self.replace(Owner::Node(service.name.clone()), places);
    }

    /// A Service of the default Network is gone.
    pub(crate) fn forget_default(&mut self, name: &ServiceName) {
        self.replace(Owner::Node(name.clone()), Vec::new());
    }

    /// Addresses that no Service may have besides its cluster IP: those of pods and of Services.
    pub(crate) fn set_forbidden(&mut self, ranges: Vec<IpNet>) {
        if self.forbidden != ranges {
            self.forbidden = ranges;
            let all: Vec<Place> = self.claims.keys().copied().collect();
            all.into_iter().for_each(|place| self.decide(place));
        }
    }

    /// All that leads into routers.
    pub(crate) fn wanted(&self) -> &BTreeMap<Place, Steered> {
        &self.wanted
    }

    /// What is another one since the last call.
    pub(crate) fn take_changed(&mut self) -> Vec<(Place, Option<Steered>)> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().map(|place| (place, self.wanted.get(&place).cloned())).collect()
    }

    fn replace(&mut self, owner: Owner, places: Vec<(Place, Rank, Option<Steered>)>) {
        let mut touched = BTreeSet::new();
        for (place, rank) in self.by_owner.remove(&owner).unwrap_or_default() {
            if let Some(claims) = self.claims.get_mut(&place) {
                claims.remove(&rank);
                if claims.is_empty() {
                    self.claims.remove(&place);
                }
            }
            touched.insert(place);
        }
        let mut own = Vec::with_capacity(places.len());
        for (place, rank, to) in places {
            self.claims.entry(place).or_default().insert(rank.clone(), to);
            own.push((place, rank));
            touched.insert(place);
        }
        if !own.is_empty() {
            self.by_owner.insert(owner, own);
        }
        touched.into_iter().for_each(|place| self.decide(place));
    }

    fn decide(&mut self, place: Place) {
        let claims = self.claims.get(&place);
        let winner = claims.and_then(|claims| claims.first_key_value());
        let allowed = !self.forbidden.iter().any(|range| range.contains(&place.address));
        for (rank, to) in claims.into_iter().flatten() {
            let first = winner.is_some_and(|(winner, _)| winner == rank);
            let refused = to.is_some() && (!first || !allowed);
            let key = (place, rank.service.clone());
            if !refused {
                self.refused.remove(&key);
            } else if self.refused.insert(key) {
                let why = match winner {
                    Some((winner, _)) if !first => format!("Service {} has it", winner.service),
                    _ => "it is inside a Network or a range of service addresses".to_owned(),
                };
                let (address, port, service) = (place.address, place.port, &rank.service);
                tracing::warn!(%service, "{address} port {port} does not lead to this Service: {why}");
            }
        }
        if claims.is_none() {
            self.refused.retain(|(refused, _)| *refused != place);
        }
        let to = winner.and_then(|(_, to)| to.clone()).filter(|_| allowed);
        let same = match (&to, self.wanted.get(&place)) {
            (Some(new), Some(old)) => new == old,
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.changed.insert(place);
            match to {
                Some(to) => self.wanted.insert(place, to),
                None => self.wanted.remove(&place),
            };
        }
    }
}

/// The places that clients outside know of a port, and where the router takes them.
fn places(key: &PortKey, view: &PortView, service: &Service, ends: &Ends) -> Vec<(Place, Steered)> {
    let internal = view.frontends.iter().find(|frontend| frontend.kind == FrontendKind::NodePort);
    let (Some(internal), Some(router)) = (internal, Ends::of(&ends.router, key.family)) else {
        return Vec::new();
    };
    let to = (router, internal.port).into();
    let at = |address, port| Place { address, protocol: key.protocol, port };
    let mut found = Vec::new();
    for frontend in &view.frontends {
        let (FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp, Some(address)) =
            (frontend.kind, frontend.address)
        else {
            continue;
        };
        let node = Ends::of(&ends.node, key.family);
        found.push((
            at(address, frontend.port),
            Steered { to, sources: sources(&frontend.sources, address, node) },
        ));
    }
    if names(service, &key.port, key.protocol, internal.port) {
        let node = Ends::of(&ends.node, key.family);
        found.extend(node.map(|node| (at(node, internal.port), Steered { to, sources: None })));
    }
    found
}

/// Who may come. Rule 44: where the node itself may, its load-balancer address may too.
fn sources(sources: &Sources, address: IpAddr, node: Option<IpAddr>) -> Option<Box<[IpNet]>> {
    let Sources::Only { ranges, .. } = sources else { return None };
    let looped = node.is_some_and(|node| ranges.iter().any(|range| range.contains(&node)));
    Some(ranges.iter().copied().chain(looped.then(|| IpNet::from(address))).collect())
}

/// Whether a Service itself names a node port: one that was only given to it for the router's use is no port of the node.
fn names(service: &Service, port: &str, protocol: Protocol, number: u16) -> bool {
    service.ports.iter().any(|found| {
        *found.name == *port
            && found.protocol == protocol
            && found.node_port.is_some_and(|named| named.get() == number)
    })
}

#[cfg(test)]
mod tests {
    use knit_proxy::model::{EndpointGroup, NodeInfo, ServicePort};
    use knit_proxy::view::{NodePorts, View, ViewConfig};

    use super::*;
    use crate::internal_ports::InternalPorts;

    const ROUTER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 192, 6));
    const NODE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn ends() -> Ends {
        Ends { router: vec![ROUTER], node: vec![NODE] }
    }

    fn web(name: &str, created: u64, node_port: u16) -> Service {
        let port = ServicePort::new("", Protocol::Tcp, 80).node_port(node_port);
        let service = Service::new(name).cluster_ip([10, 96, 0, 9].into()).add_port(port);
        Service { created, network: "blue".into(), ..service }
    }

    /// The one port of a Service, as its router's view has it.
    fn resolved(service: &Service) -> (PortKey, Arc<PortView>) {
        let config = ViewConfig {
            network: "blue".into(),
            node_ports: NodePorts::Ranges(vec![IpNet::from(ROUTER)]),
            ..ViewConfig::default()
        };
        let mut view = View::new(config, NodeInfo { addresses: vec![ROUTER], ..NodeInfo::new("a") });
        let mut service = service.clone();
        let _ = InternalPorts::default().prepare(&mut service);
        let endpoint = [10, 77, 0, 18].into();
        let mut group =
            EndpointGroup::of_addresses("t/s-1", service.name.as_str(), Protocol::Tcp, 8080, &[endpoint]);
        group.network = "blue".into();
        view.set_group(group);
        view.set_service(service);
        view.take_changes();
        view.current().ports.first_key_value().map(|(k, v)| (k.clone(), Arc::clone(v))).expect("one port")
    }

    fn put(steering: &mut Steering, network: &str, service: &Service) -> PortKey {
        let (key, view) = resolved(service);
        steering.set_port(&network.into(), &key, Some((&view, service)), &ends());
        key
    }

    fn changes(steering: &mut Steering) -> Vec<String> {
        let text = |(place, to): (Place, Option<Steered>)| {
            let to = to.map_or_else(
                || "nowhere".to_owned(),
                |to| match to.sources {
                    None => to.to.to_string(),
                    Some(sources) => format!("{} for {sources:?}", to.to),
                },
            );
            format!("{}:{} -> {to}", place.address, place.port)
        };
        steering.take_changed().into_iter().map(text).collect()
    }

    #[test]
    fn a_node_port_leads_into_the_router() {
        let mut steering = Steering::default();
        let key = put(&mut steering, "blue", &web("t/s", 1, 30080));
        assert_eq!(changes(&mut steering), ["192.0.2.1:30080 -> 169.254.192.6:30080"]);
        put(&mut steering, "blue", &web("t/s", 1, 30080));
        assert_eq!(changes(&mut steering), [] as [String; 0], "the same is no change");
        steering.set_port(&"blue".into(), &key, None, &ends());
        assert_eq!(changes(&mut steering), ["192.0.2.1:30080 -> nowhere"]);
        assert!(steering.claims.is_empty() && steering.by_owner.is_empty());
    }

    #[test]
    fn other_addresses_lead_there_too_for_those_who_may() {
        let mut steering = Steering::default();
        let mut service = web("t/s", 1, 0);
        service.external_ips = Box::new([[203, 0, 113, 1].into()]);
        service.load_balancer_ips = Box::new([[203, 0, 113, 2].into()]);
        service.source_ranges = Some(Box::new(["192.0.2.0/24".parse().expect("a range")]));
        put(&mut steering, "blue", &service);
        let expected = [
            "203.0.113.1:80 -> 169.254.192.6:1024",
            "203.0.113.2:80 -> 169.254.192.6:1024 for [192.0.2.0/24, 203.0.113.2/32]",
        ];
        // The port that was given for it is no port of the node.
        assert_eq!(changes(&mut steering), expected);
        steering.forget_network(&"blue".into());
        assert_eq!(steering.wanted().len(), 0);
    }

    #[test]
    fn the_older_service_has_an_address_whatever_its_network() {
        let mut steering = Steering::default();
        let address: IpAddr = [203, 0, 113, 1].into();
        let of = |name: &str, created| Service { external_ips: Box::new([address]), ..web(name, created, 0) };
        put(&mut steering, "blue", &of("t/young", 9));
        assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> 169.254.192.6:1024"]);
        steering.set_default(&of("shop/old", 3));
        assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> nowhere"], "the default Network's is older");
        put(&mut steering, "green", &of("u/oldest", 1));
        assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> 169.254.192.6:1024"]);
        steering.forget_network(&"green".into());
        steering.forget_default(&"shop/old".into());
        assert_eq!(steering.wanted().len(), 1);
    }

    #[test]
    fn nobody_has_an_address_of_pods_or_services() {
        let mut steering = Steering::default();
        let dns: IpAddr = [10, 96, 0, 10].into();
        put(&mut steering, "blue", &Service { external_ips: Box::new([dns]), ..web("t/evil", 1, 30080) });
        assert_eq!(steering.wanted().len(), 2);
        steering.set_forbidden(vec!["10.96.0.0/16".parse().expect("a range")]);
        let left: Vec<IpAddr> = steering.wanted().keys().map(|place| place.address).collect();
        assert_eq!(left, [NODE]);
    }
}
