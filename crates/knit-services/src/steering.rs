//! Which address and port of the node leads into which router: pure bookkeeping.
//!
//! Routers say which of their Services are in force, with the places that clients outside know; Services of
//! the default Network want such places too, and are served on the node itself. Where two want one, the older
//! Service has it, as within one Network; but what a tenant wrote comes after what a load balancer gave.
//! Nobody has an address that belongs to a pod, a Service or, unless the operator allows it, a node; and
//! nobody has the port of the tunnel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::link::Vxlan;
use knit_proxy::model::{Family, NetworkName, Protocol, Service, ServiceName};
use knit_proxy::view::{FrontendKind, PortKey, PortView, Sources};
use knit_proxy_nft::{Chosen, Place, Steered};

use crate::forbidden::{Forbidden, Whose};

/// All places, and who wants them.
#[derive(Debug, Default)]
pub(crate) struct Steering {
    claims: HashMap<Place, BTreeMap<Rank, Claim>>,
    /// What is claimed by whom, to take it back.
    by_owner: BTreeMap<Owner, Vec<(Place, Rank)>>,
    forbidden: Forbidden,
    /// Networks whose load balancers may have addresses of nodes.
    on_nodes: BTreeSet<NetworkName>,
    wanted: BTreeMap<Place, Steered>,
    changed: BTreeSet<Place>,
    /// What was refused to whom, and why.
    refused: BTreeMap<(ServiceName, Place), String>,
    news: BTreeSet<ServiceName>,
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
    /// The address is one that whoever wrote the Service chose: it comes after those that were given.
    by_tenant: bool,
    created: u64,
    service: ServiceName,
    port: Arc<str>,
    /// Of one port's, a load balancer's address comes first: it brings who may come.
    node_port: bool,
}

/// What somebody wants a place for.
#[derive(Debug, Clone)]
struct Claim {
    kind: FrontendKind,
    /// Where it leads; none for Services of the default Network, which the node itself serves, and for what
    /// no proxy was told of.
    to: Option<To>,
}

#[derive(Debug, Clone)]
struct To {
    network: NetworkName,
    at: std::net::SocketAddr,
    sources: Option<Box<[IpNet]>>,
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
            let claim = |(place, kind, at, sources)| {
                let to = Some(To { network: network.clone(), at, sources });
                (place, Rank::new(service, &key.port, kind), Claim { kind, to })
            };
            let mut all: Vec<_> = places(key, view, service, ends).into_iter().map(claim).collect();
            // The router was not told of these. They are refused, so that the author hears of it.
            let taken = |address: &&IpAddr| {
                Family::of(**address) == key.family && self.forbidden.whose(**address).is_some()
            };
            let port = service.ports.iter().find(|port| port.name == key.port);
            for address in service.external_ips.iter().filter(taken) {
                let Some(port) = port.map(|port| port.port) else { break };
                let place = Place { address: *address, protocol: key.protocol, port };
                let kind = FrontendKind::ExternalIp;
                if all.iter().all(|(known, ..)| *known != place) {
                    all.push((place, Rank::new(service, &key.port, kind), Claim { kind, to: None }));
                }
            }
            all
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

    /// A Service of the default Network wants its places like anybody else, but they lead nowhere. `node` are
    /// the addresses where its node ports answer.
    pub(crate) fn set_default(&mut self, service: &Service, node: &[IpAddr]) {
        let mut places = Vec::new();
        for port in &service.ports {
            let mut add = |kind, address: &IpAddr, port_number| {
                let place = Place { address: *address, protocol: port.protocol, port: port_number };
                places.push((place, Rank::new(service, &port.name, kind), Claim { kind, to: None }));
            };
            service.external_ips.iter().for_each(|a| add(FrontendKind::ExternalIp, a, port.port));
            service.load_balancer_ips.iter().for_each(|a| add(FrontendKind::LoadBalancerIp, a, port.port));
            if let Some(number) = port.node_port {
                node.iter().for_each(|address| add(FrontendKind::NodePort, address, number.get()));
            }
        }
        self.replace(Owner::Node(service.name.clone()), places);
    }

    /// A Service of the default Network is gone.
    pub(crate) fn forget_default(&mut self, name: &ServiceName) {
        self.replace(Owner::Node(name.clone()), Vec::new());
    }

    /// Addresses that no Service may have besides its cluster IP.
    pub(crate) fn set_forbidden(&mut self, forbidden: Forbidden) {
        if self.forbidden != forbidden {
            self.forbidden = forbidden;
            self.decide_all();
        }
    }

    /// Networks whose load balancers may have addresses of nodes. Says whether they are other ones.
    pub(crate) fn set_on_nodes(&mut self, networks: BTreeSet<NetworkName>) -> bool {
        let other = self.on_nodes != networks;
        if other {
            self.on_nodes = networks;
            self.decide_all();
        }
        other
    }

    /// Whether there is such a Network.
    pub(crate) fn shares_nodes(&self) -> bool {
        !self.on_nodes.is_empty()
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

    /// Services that were refused something else since the last call, and what they are refused now.
    pub(crate) fn take_refused(&mut self) -> Vec<(ServiceName, Vec<String>)> {
        let texts = |service: &ServiceName| {
            let first =
                Place { address: std::net::Ipv4Addr::UNSPECIFIED.into(), protocol: Protocol::Tcp, port: 0 };
            let of_service = self.refused.range((service.clone(), first)..);
            let of_service = of_service.take_while(|((name, _), _)| name == service);
            let text = |place: &Place, why: &str| {
                format!("{} port {}/{}: {why}", place.address, place.port, place.protocol)
            };
            of_service.map(|((_, place), why)| text(place, why)).collect()
        };
        let news: Vec<ServiceName> = std::mem::take(&mut self.news).into_iter().collect();
        news.into_iter().map(|service| (service.clone(), texts(&service))).collect()
    }

    fn replace(&mut self, owner: Owner, places: Vec<(Place, Rank, Claim)>) {
        let mut touched = BTreeSet::new();
        for (place, rank) in self.by_owner.remove(&owner).unwrap_or_default() {
            if let Some(claims) = self.claims.get_mut(&place) {
                claims.remove(&rank);
                if claims.is_empty() {
                    self.claims.remove(&place);
                }
            }
            if places.iter().all(|(still, _, _)| *still != place) {
                self.set_refused(place, &rank.service, None);
            }
            touched.insert(place);
        }
        let mut own = Vec::with_capacity(places.len());
        for (place, rank, claim) in places {
            self.claims.entry(place).or_default().insert(rank.clone(), claim);
            own.push((place, rank));
            touched.insert(place);
        }
        if !own.is_empty() {
            self.by_owner.insert(owner, own);
        }
        touched.into_iter().for_each(|place| self.decide(place));
    }

    fn decide_all(&mut self) {
        let all: Vec<Place> = self.claims.keys().copied().collect();
        all.into_iter().for_each(|place| self.decide(place));
    }

    /// Why a claim does not count; none if it does.
    fn objection(&self, place: &Place, claim: &Claim) -> Option<&'static str> {
        const CLUSTER: &str = "the address is inside a Network or a range of service addresses";
        const NODE: &str = "it is an address of a node";
        let Some(to) = &claim.to else {
            // What the node itself serves is not steered; but these it does not serve.
            return match (claim.kind, self.forbidden.whose(place.address)?) {
                (FrontendKind::ExternalIp, Whose::Cluster) => Some(CLUSTER),
                (FrontendKind::ExternalIp, Whose::Node) => Some(NODE),
                _ => None,
            };
        };
        if place.protocol == Protocol::Udp && place.port == Vxlan::PORT {
            return Some("it is the port of the tunnel between nodes");
        }
        match (claim.kind, self.forbidden.whose(place.address)?) {
            (FrontendKind::NodePort, _) => None,
            (_, Whose::Cluster) => Some(CLUSTER),
            (FrontendKind::LoadBalancerIp, Whose::Node) if self.on_nodes.contains(&to.network) => None,
            (FrontendKind::LoadBalancerIp, Whose::Node) => Some(
                "it is an address of a node, which the Service's Network does not allow \
                 (spec.services.nodeAddresses)",
            ),
            (_, Whose::Node) => Some(NODE),
        }
    }

    fn decide(&mut self, place: Place) {
        let claims: Vec<(Rank, Claim)> =
            self.claims.get(&place).into_iter().flatten().map(|(r, c)| (r.clone(), c.clone())).collect();
        let objections: Vec<_> = claims.iter().map(|(_, claim)| self.objection(&place, claim)).collect();
        let winner = objections.iter().position(Option::is_none);
        for ((rank, claim), objection) in claims.iter().zip(&objections) {
            let why = match (objection, winner) {
                (_, Some(winner)) if claims[winner].0.service == rank.service => None,
                (Some(why), _) => Some((*why).to_owned()),
                (None, Some(winner)) if claim.to.is_some() => {
                    Some(format!("Service {} has it", claims[winner].0.service))
                }
                _ => None,
            };
            self.set_refused(place, &rank.service, why);
        }
        let to = winner.and_then(|at| {
            let Claim { kind, to } = &claims[at].1;
            let to = to.as_ref()?;
            let chosen = match kind {
                FrontendKind::LoadBalancerIp if !self.on_nodes.contains(&to.network) => Chosen::ByProvider,
                FrontendKind::ExternalIp => Chosen::ByTenant,
                _ => Chosen::ByOperator,
            };
            Some(Steered { to: to.at, sources: to.sources.clone(), chosen })
        });
        if to.as_ref() != self.wanted.get(&place) {
            self.changed.insert(place);
            match to {
                Some(to) => self.wanted.insert(place, to),
                None => self.wanted.remove(&place),
            };
        }
    }

    fn set_refused(&mut self, place: Place, service: &ServiceName, why: Option<String>) {
        let key = (service.clone(), place);
        if self.refused.get(&key) == why.as_ref() {
            return;
        }
        match why {
            Some(why) => self.refused.insert(key, why),
            None => self.refused.remove(&key),
        };
        self.news.insert(service.clone());
    }
}

impl Rank {
    fn new(service: &Service, port: &Arc<str>, kind: FrontendKind) -> Self {
        Self {
            by_tenant: kind == FrontendKind::ExternalIp,
            created: service.created,
            service: service.name.clone(),
            port: Arc::clone(port),
            node_port: kind == FrontendKind::NodePort,
        }
    }
}

type Found = (Place, FrontendKind, std::net::SocketAddr, Option<Box<[IpNet]>>);

/// The places that clients outside know of a port, and where the router takes them.
fn places(key: &PortKey, view: &PortView, service: &Service, ends: &Ends) -> Vec<Found> {
    let internal = view.frontends.iter().find(|frontend| frontend.kind == FrontendKind::NodePort);
    let (Some(internal), Some(router)) = (internal, Ends::of(&ends.router, key.family)) else {
        return Vec::new();
    };
    let to = (router, internal.port).into();
    let at = |address, port| Place { address, protocol: key.protocol, port };
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

#[cfg(test)]
mod tests;
