//! Which address and port of the node leads into which router: pure bookkeeping.
//!
//! Routers say which of their Services are in force, with the places that clients outside know; Services of
//! the default Network want such places too, and are served on the node itself. Where two want one, the older
//! Service has it, as within one Network; but what a tenant wrote comes after what a load balancer gave.
//! Nobody has an address that belongs to a pod, a Service or, unless the operator allows it, a node; and
//! nobody has the port of the tunnel ([`Objection`]).

mod objection;
mod outside;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use knit_proxy::model::{Family, NetworkName, Protocol, Service, ServiceName};
use knit_proxy::view::{FrontendKind, PortKey, PortView};
use knit_runtime::routers::{Chosen, Entrance, Steered, Way};

use crate::forbidden::{AddressUse, Forbidden};
use crate::internal_ports::Reserved;
use objection::Objection;
pub(crate) use objection::Refusal;
use outside::into_router;
pub(crate) use outside::{handed_over, must_have_router};

/// Where clients come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EntranceAddress {
    pub address: IpAddr,
    pub protocol: Protocol,
    pub port: u16,
}

/// All places, and who wants them.
#[derive(Debug, Default)]
pub(crate) struct Steering {
    /// Ports that nobody has.
    reserved: Reserved,
    claims: HashMap<EntranceAddress, BTreeMap<Rank, Claim>>,
    /// What is claimed by whom, to take it back.
    by_owner: BTreeMap<EntranceOwner, Vec<(EntranceAddress, Rank)>>,
    forbidden: Forbidden,
    /// Addresses that this node has, whether or not its Node lists them.
    own: HashSet<IpAddr>,
    /// Networks whose load balancers may have addresses of nodes.
    on_nodes: BTreeSet<NetworkName>,
    /// Somebody else serves the default Network on this node, by rules of their own.
    left_to_others: bool,
    wanted: BTreeMap<EntranceAddress, Steered>,
    changed: BTreeSet<EntranceAddress>,
    /// What was refused to whom, and why.
    refused: BTreeMap<(ServiceName, EntranceAddress), Refusal>,
    news: BTreeSet<ServiceName>,
}

/// Who claims: a port in a router, or a Service of the default Network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum EntranceOwner {
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
    network: NetworkName,
    kind: FrontendKind,
    /// Where it leads; none for Services of the default Network, which the node itself serves, and for what
    /// no proxy was told of.
    to: Option<EntranceTarget>,
}

/// Where a place leads, and whom.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EntranceTarget {
    pub to: Way,
    /// Other nodes where this node and its pods are led instead.
    pub near: Option<Box<[SocketAddr]>>,
    pub sources: Option<Box<[IpNet]>>,
}

/// A place that clients outside know of a port.
pub(crate) type Place = (EntranceAddress, FrontendKind, EntranceTarget);

/// Where a router and its node are reached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ends {
    /// The router's end of its uplink, one per family.
    pub router: Vec<IpAddr>,
    /// The node's addresses where node ports answer, one per family.
    pub node: Vec<IpAddr>,
}

impl EntranceAddress {
    /// As the runtime has it.
    fn entrance(self) -> Entrance {
        Entrance { address: self.address, protocol: self.protocol, port: self.port }
    }
}

impl Ends {
    pub(crate) fn of(addresses: &[IpAddr], family: Family) -> Option<IpAddr> {
        addresses.iter().copied().find(|address| Family::of(*address) == family)
    }
}

impl Steering {
    /// Nobody has any place yet, and nobody gets the ports that are reserved.
    pub(crate) fn new(reserved: Reserved) -> Self {
        Self { reserved, ..Self::default() }
    }

    fn is_reserved(&self, protocol: Protocol, port: u16) -> bool {
        self.reserved.contains(&(protocol, port))
    }

    /// A port of a Service is in force in a router like this; none: no longer.
    pub(crate) fn set_port(
        &mut self,
        network: &NetworkName,
        key: &PortKey,
        found: Option<(&PortView, &Service)>,
        ends: &Ends,
    ) {
        let found = found.map(|(view, service)| (into_router(key, view, service, ends), service));
        self.set_places(network, key, found, &ends.node);
    }

    /// The places of a port of a Service, and where they lead; none: it has none any more. `node` are the
    /// addresses where node ports answer.
    pub(crate) fn set_places(
        &mut self,
        network: &NetworkName,
        key: &PortKey,
        found: Option<(Vec<Place>, &Service)>,
        node: &[IpAddr],
    ) {
        let owner = EntranceOwner::Router(network.clone(), key.clone());
        let places = found.map_or_else(Vec::new, |(places, service)| {
            let claim = |(place, kind, to)| {
                let claim = Claim { network: network.clone(), kind, to: Some(to) };
                (place, Rank::new(service, &key.port, kind), claim)
            };
            let mut all: Vec<_> = places.into_iter().map(claim).collect();
            // The router was not told of these. They are refused, so that the author hears of it.
            let mut refuse = |address: IpAddr, port: u16, kind| {
                let place = EntranceAddress { address, protocol: key.protocol, port };
                if all.iter().all(|(known, ..)| *known != place) {
                    let claim = Claim { network: network.clone(), kind, to: None };
                    all.push((place, Rank::new(service, &key.port, kind), claim));
                }
            };
            if let Some(port) = service.ports.iter().find(|port| port.name == key.port) {
                let of_family = |address: &IpAddr| Family::of(*address) == key.family;
                let tunnels = self.is_reserved(key.protocol, port.port);
                let taken = |address: &IpAddr| tunnels || self.forbidden.whose(*address).is_some();
                let external = service.external_ips.iter().copied().filter(of_family).filter(taken);
                external.for_each(|address| refuse(address, port.port, FrontendKind::ExternalIp));
                let balanced = service.load_balancer_ips.iter().copied().filter(of_family);
                let balanced = balanced.filter(|_| tunnels);
                balanced.for_each(|address| refuse(address, port.port, FrontendKind::LoadBalancerIp));
                if let Some(number) =
                    port.node_port.filter(|number| self.is_reserved(key.protocol, number.get()))
                {
                    let node = Ends::of(node, key.family);
                    node.into_iter().for_each(|node| refuse(node, number.get(), FrontendKind::NodePort));
                }
            }
            all
        });
        self.replace(owner, places);
    }

    /// Nothing of a Network leads into its router any more.
    pub(crate) fn forget_network(&mut self, network: &NetworkName) {
        let of_network =
            |owner: &&EntranceOwner| matches!(owner, EntranceOwner::Router(name, _) if name == network);
        let owners: Vec<EntranceOwner> = self.by_owner.keys().filter(of_network).cloned().collect();
        owners.into_iter().for_each(|owner| self.replace(owner, Vec::new()));
    }

    /// The ports of a Network that lead into its router.
    pub(crate) fn ports_of(&self, network: &NetworkName) -> Vec<PortKey> {
        let key = |owner: &EntranceOwner| match owner {
            EntranceOwner::Router(name, key) if name == network => Some(key.clone()),
            _ => None,
        };
        self.by_owner.keys().filter_map(key).collect()
    }

    /// A Service of the default Network wants its places like anybody else, but they lead nowhere. `node` are
    /// the addresses where its node ports answer.
    pub(crate) fn set_default(&mut self, service: &Service, node: &[IpAddr]) {
        let mut places = Vec::new();
        // Where only node ports may have those addresses, nobody else can want the place.
        let contested = !self.on_nodes.is_empty();
        for port in &service.ports {
            let mut add = |kind, address: &IpAddr, port_number| {
                let place = EntranceAddress { address: *address, protocol: port.protocol, port: port_number };
                let claim = Claim { network: NetworkName::default(), kind, to: None };
                places.push((place, Rank::new(service, &port.name, kind), claim));
            };
            service.external_ips.iter().for_each(|a| add(FrontendKind::ExternalIp, a, port.port));
            service.load_balancer_ips.iter().for_each(|a| add(FrontendKind::LoadBalancerIp, a, port.port));
            let counts = |number: u16| contested || self.is_reserved(port.protocol, number);
            if let Some(number) = port.node_port.filter(|number| counts(number.get())) {
                node.iter().for_each(|address| add(FrontendKind::NodePort, address, number.get()));
            }
        }
        self.replace(EntranceOwner::Node(service.name.clone()), places);
    }

    /// A Service of the default Network is gone.
    pub(crate) fn forget_default(&mut self, name: &ServiceName) {
        self.replace(EntranceOwner::Node(name.clone()), Vec::new());
    }

    /// Addresses that no Service may have besides its cluster IP.
    pub(crate) fn set_forbidden(&mut self, forbidden: Forbidden) {
        if self.forbidden != forbidden {
            self.forbidden = forbidden;
            self.decide_all();
        }
    }

    /// Whether the addresses that this node has were ever looked at.
    pub(crate) fn knows_own(&self) -> bool {
        !self.own.is_empty()
    }

    /// The addresses that this node has.
    pub(crate) fn set_own(&mut self, own: HashSet<IpAddr>) {
        if self.own != own {
            self.own = own;
            self.decide_all();
        }
    }

    /// Whether somebody else serves the default Network here. Says whether that is another answer than
    /// before.
    pub(crate) fn set_left_to_others(&mut self, left: bool) -> bool {
        let other = std::mem::replace(&mut self.left_to_others, left) != left;
        if other {
            self.decide_all();
        }
        other
    }

    /// Whether somebody else serves the default Network here.
    pub(crate) fn left_to_others(&self) -> bool {
        self.left_to_others
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

    /// All that leads into routers.
    pub(crate) fn wanted(&self) -> BTreeMap<Entrance, Steered> {
        self.wanted.iter().map(|(place, to)| (place.entrance(), to.clone())).collect()
    }

    /// What is another one since the last call.
    pub(crate) fn take_changed(&mut self) -> Vec<(Entrance, Option<Steered>)> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().map(|place| (place.entrance(), self.wanted.get(&place).cloned())).collect()
    }

    /// Services that were refused something else since the last call, and what they are refused now.
    pub(crate) fn take_refused(&mut self) -> Vec<(ServiceName, Vec<Refusal>)> {
        let texts = |service: &ServiceName| {
            let first = EntranceAddress {
                address: std::net::Ipv4Addr::UNSPECIFIED.into(),
                protocol: Protocol::Tcp,
                port: 0,
            };
            let of_service = self.refused.range((service.clone(), first)..);
            let of_service = of_service.take_while(|((name, _), _)| name == service);
            let text = |place: &EntranceAddress, refusal: &Refusal| {
                let EntranceAddress { address, protocol, port } = place;
                Refusal {
                    why: format!("{address} port {port}/{protocol}: {}", refusal.why),
                    ..refusal.clone()
                }
            };
            of_service.map(|((_, place), refusal)| text(place, refusal)).collect()
        };
        let news: Vec<ServiceName> = std::mem::take(&mut self.news).into_iter().collect();
        news.into_iter().map(|service| (service.clone(), texts(&service))).collect()
    }

    fn replace(&mut self, owner: EntranceOwner, places: Vec<(EntranceAddress, Rank, Claim)>) {
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
        let all: Vec<EntranceAddress> = self.claims.keys().copied().collect();
        all.into_iter().for_each(|place| self.decide(place));
    }

    /// Why a claim does not count; none if it does.
    fn objection(&self, place: &EntranceAddress, claim: &Claim) -> Option<Objection> {
        let Claim { network, kind, to } = claim;
        if self.is_reserved(place.protocol, place.port) {
            let node_port = *kind == FrontendKind::NodePort;
            return Some(Objection::Tunnel { protocol: place.protocol, port: place.port, node_port });
        }
        let default = *network == NetworkName::default();
        if default && self.left_to_others {
            return None;
        }
        let allowed = self.on_nodes.contains(network);
        match (kind, self.forbidden.whose(place.address)) {
            (FrontendKind::NodePort | FrontendKind::ClusterIp, _) => None,
            // What the node itself serves is not steered, and it serves what load balancers have.
            (FrontendKind::LoadBalancerIp, _) if to.is_none() => None,
            (_, Some(AddressUse::Cluster)) => Some(Objection::InCluster),
            (FrontendKind::LoadBalancerIp, Some(AddressUse::Node)) if allowed => None,
            (FrontendKind::LoadBalancerIp, Some(AddressUse::Node)) => Some(Objection::OfNodeDenied),
            (FrontendKind::ExternalIp, Some(AddressUse::Node)) => Some(Objection::OfNode),
            (FrontendKind::ExternalIp, None) if self.own.contains(&place.address) => {
                (!default || !allowed).then_some(Objection::Unlisted { allowable: default })
            }
            (_, None) => None,
        }
    }

    fn decide(&mut self, place: EntranceAddress) {
        let claims: Vec<(Rank, Claim)> =
            self.claims.get(&place).into_iter().flatten().map(|(r, c)| (r.clone(), c.clone())).collect();
        let objections: Vec<_> = claims.iter().map(|(_, claim)| self.objection(&place, claim)).collect();
        let winner = objections.iter().position(Option::is_none);
        for ((rank, claim), objection) in claims.iter().zip(&objections) {
            let why = match (objection, winner) {
                (_, Some(winner)) if claims[winner].0.service == rank.service => None,
                (Some(objection), _) => Some(Refusal::from(*objection)),
                (None, Some(winner)) if claim.to.is_some() => Some(Refusal {
                    why: format!("Service {} already uses it", claims[winner].0.service),
                    only_here: false,
                }),
                _ => None,
            };
            self.set_refused(place, &rank.service, why);
        }
        let to = winner.and_then(|at| {
            let Claim { network, kind, to } = &claims[at].1;
            let to = to.as_ref()?;
            let chosen = match kind {
                FrontendKind::LoadBalancerIp if self.on_nodes.contains(network) => Chosen::OnNode,
                FrontendKind::LoadBalancerIp => Chosen::ByProvider,
                FrontendKind::ExternalIp => Chosen::ByTenant,
                _ => Chosen::ByOperator,
            };
            let EntranceTarget { to, near, sources } = to.clone();
            Some(Steered { to, near, sources, chosen })
        });
        if to.as_ref() != self.wanted.get(&place) {
            self.changed.insert(place);
            match to {
                Some(to) => self.wanted.insert(place, to),
                None => self.wanted.remove(&place),
            };
        }
    }

    fn set_refused(&mut self, place: EntranceAddress, service: &ServiceName, refusal: Option<Refusal>) {
        let key = (service.clone(), place);
        if self.refused.get(&key) == refusal.as_ref() {
            return;
        }
        match refusal {
            Some(refusal) => self.refused.insert(key, refusal),
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

#[cfg(test)]
mod tests;
