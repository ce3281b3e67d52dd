//! Which Service goes to which Network: pure bookkeeping over the events of one source.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use knit_proxy::model::{EndpointGroup, GroupName, NetworkName, NodeInfo, Service, ServiceName};
use knit_proxy::source::Event;
use knit_proxy::view::ListKind;

use crate::entrances::must_have_router;
use crate::forbidden::{AddressUse, Forbidden};
use crate::internal_ports::{Reserved, is_external};

/// All that was heard, by namespace, so that it can be told again: to the instance of a Network that starts
/// later, or that a namespace moves to.
#[derive(Debug, Default)]
pub struct Table {
    namespaces: HashMap<String, Namespace>,
    ranges: BTreeMap<Arc<str>, Vec<ipnet::IpNet>>,
    node: Option<NodeInfo>,
    /// Networks whose Services may have external IPs.
    open: BTreeSet<NetworkName>,
    /// Addresses that are nobody's to take, whatever the Network.
    forbidden: Forbidden,
    services_listed: bool,
    groups_listed: bool,
}

#[derive(Debug, Default)]
struct Namespace {
    /// Its primary Network; none if that cannot be said.
    network: Option<NetworkName>,
    services: BTreeMap<ServiceName, Service>,
    groups: BTreeMap<GroupName, EndpointGroup>,
}

/// To whom an event goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipient {
    /// The instance of one Network.
    One(NetworkName),
    /// All instances.
    All,
}

impl Table {
    /// Takes in what a source says, and returns who is to be told what. `network_of` says the primary Network
    /// of a namespace, none if that cannot be said.
    pub fn take(
        &mut self,
        event: Event,
        network_of: impl FnOnce(&str) -> Option<NetworkName>,
    ) -> Option<(Recipient, Event)> {
        match event {
            Event::SetService(service) => {
                let home = self.namespace(service.name.namespace(), network_of);
                home.services.insert(service.name.clone(), (*service).clone());
                let network = home.network.clone()?;
                let open = self.open.contains(&network);
                let service = handed(&service, &network, open, &self.forbidden);
                Some((Recipient::One(network), Event::SetService(Box::new(service))))
            }
            Event::SetGroup(mut group) => {
                let home = self.namespace(group.name.namespace(), network_of);
                home.groups.insert(group.name.clone(), (*group).clone());
                group.network = home.network.clone()?;
                Some((Recipient::One(group.network.clone()), Event::SetGroup(group)))
            }
            Event::DeleteService(name) => {
                let home = self.namespaces.get_mut(name.namespace())?;
                home.services.remove(&name)?;
                let to = home.network.clone();
                self.forget_if_empty(name.namespace());
                Some((Recipient::One(to?), Event::DeleteService(name)))
            }
            Event::DeleteGroup(name) => {
                let home = self.namespaces.get_mut(name.namespace())?;
                home.groups.remove(&name)?;
                let to = home.network.clone();
                self.forget_if_empty(name.namespace());
                Some((Recipient::One(to?), Event::DeleteGroup(name)))
            }
            Event::SetServiceRanges { name, ranges } => {
                self.ranges.insert(Arc::clone(&name), ranges.clone());
                Some((Recipient::All, Event::SetServiceRanges { name, ranges }))
            }
            Event::DeleteServiceRanges(name) => {
                self.ranges.remove(&name);
                Some((Recipient::All, Event::DeleteServiceRanges(name)))
            }
            Event::SetNode(node) => {
                self.node = Some((*node).clone());
                Some((Recipient::All, Event::SetNode(node)))
            }
            Event::ListDone(kind) => {
                match kind {
                    ListKind::Services => self.services_listed = true,
                    ListKind::Groups => self.groups_listed = true,
                    ListKind::ServiceRanges => {}
                }
                None
            }
            Event::SetExemptVips(_) | Event::ListStart(_) | Event::Problem(_) => None,
            // Nobody else decides about the Services that this agent serves.
            Event::SetPort(..)
            | Event::DeletePort(_)
            | Event::SetHealthCheck(..)
            | Event::DeleteHealthCheck(_)
            | Event::SetSettings(_)
            | Event::State { .. } => None,
        }
    }

    /// Looks again at the primary Network of the namespaces that `moved` names, and returns what changes for
    /// whom. One of which it cannot be said now stays where it is: what is served goes on.
    pub fn reassign(
        &mut self,
        moved: impl Fn(&str) -> bool,
        network_of: impl Fn(&str) -> Option<NetworkName>,
    ) -> Vec<(NetworkName, Event)> {
        let mut events = Vec::new();
        for (name, home) in self.namespaces.iter_mut().filter(|(name, _)| moved(name)) {
            let Some(network) = network_of(name).filter(|network| home.network.as_ref() != Some(network))
            else {
                continue;
            };
            if let Some(old) = home.network.replace(network) {
                let services = home.services.keys().cloned().map(Event::DeleteService);
                let groups = home.groups.keys().cloned().map(Event::DeleteGroup);
                events.extend(services.chain(groups).map(|event| (old.clone(), event)));
            }
            if let Some(new) = &home.network {
                let open = self.open.contains(new);
                let told = home.events(new, open, &self.forbidden);
                events.extend(told.map(|event| (new.clone(), event)));
            }
        }
        events
    }

    /// Which Networks' Services may have external IPs. Returns what changes for whom.
    pub fn set_open(&mut self, open: BTreeSet<NetworkName>) -> Vec<(NetworkName, Event)> {
        let before = std::mem::replace(&mut self.open, open);
        let mut events = Vec::new();
        for home in self.namespaces.values() {
            let Some(network) = &home.network else { continue };
            let now = self.open.contains(network);
            if before.contains(network) != now {
                let services = home.services.values().filter(|service| !service.external_ips.is_empty());
                let services = services.map(|service| handed(service, network, now, &self.forbidden));
                events.extend(services.map(|s| (network.clone(), Event::SetService(Box::new(s)))));
            }
        }
        events
    }

    /// Which addresses belong to somebody in the cluster. Returns what changes for whom.
    pub(crate) fn set_forbidden(&mut self, forbidden: Forbidden) -> Vec<(NetworkName, Event)> {
        if self.forbidden == forbidden {
            return Vec::new();
        }
        let before = std::mem::replace(&mut self.forbidden, forbidden);
        let mut events = Vec::new();
        for home in self.namespaces.values() {
            let Some(network) = home.network.as_ref().filter(|network| self.open.contains(*network)) else {
                continue;
            };
            for service in home.services.values() {
                let other =
                    |address| before.whose(address).is_some() != self.forbidden.whose(address).is_some();
                if service.external_ips.iter().copied().any(other) {
                    let service = handed(service, network, true, &self.forbidden);
                    events.push((network.clone(), Event::SetService(Box::new(service))));
                }
            }
        }
        events
    }

    /// The external IPs of a Service that its Network does not allow, with that Network.
    pub(crate) fn denied(&self, name: &ServiceName) -> Option<(&NetworkName, &[std::net::IpAddr])> {
        let home = self.namespaces.get(name.namespace())?;
        let network = home.network.as_ref().filter(|network| !self.open.contains(*network))?;
        let service = home.services.get(name)?;
        (!service.external_ips.is_empty()).then_some((network, &*service.external_ips))
    }

    /// All Services that have external IPs.
    pub(crate) fn with_external_ips(&self) -> impl Iterator<Item = &ServiceName> {
        let services = self.namespaces.values().flat_map(|home| home.services.values());
        services.filter(|service| !service.external_ips.is_empty()).map(|service| &service.name)
    }

    /// All that the instance of a Network has to know at its start, without the node and the ends of the
    /// lists.
    pub fn replay(&self, network: &NetworkName) -> impl Iterator<Item = Event> {
        let ranges = self
            .ranges
            .iter()
            .map(|(name, ranges)| Event::SetServiceRanges { name: Arc::clone(name), ranges: ranges.clone() });
        let homes = self.namespaces.values().filter(|home| home.network.as_ref() == Some(network));
        let open = self.open.contains(network);
        ranges.chain(homes.flat_map(move |home| home.events(network, open, &self.forbidden)))
    }

    /// A Service as its namespace's Network has it, with external IPs that are somebody else's.
    pub(crate) fn service(&self, name: &ServiceName) -> Option<Service> {
        let home = self.namespaces.get(name.namespace())?;
        let network = home.network.as_ref()?;
        home.services.get(name).map(|service| served(service, network, self.open.contains(network)))
    }

    /// A Service as its proxy is told of it.
    pub(crate) fn handed(&self, name: &ServiceName) -> Option<Service> {
        let home = self.namespaces.get(name.namespace())?;
        let network = home.network.as_ref()?;
        let open = self.open.contains(network);
        home.services.get(name).map(|service| handed(service, network, open, &self.forbidden))
    }

    /// The Services of the default Network, with external IPs that are somebody else's.
    pub(crate) fn default_services(&self) -> impl Iterator<Item = Service> {
        let default = NetworkName::default();
        let open = self.open.contains(&default);
        let homes = self.namespaces.values().filter(move |home| home.network.as_ref() == Some(&default));
        let services = homes.flat_map(|home| home.services.values());
        services.map(move |service| served(service, &NetworkName::default(), open))
    }

    /// The endpoints of a Service, as the proxy of its Network is told of them.
    pub(crate) fn groups_of(&self, name: &ServiceName) -> impl Iterator<Item = Event> {
        let home = self.namespaces.get(name.namespace());
        let found = home.and_then(|home| home.network.as_ref().map(|network| (home, network)));
        found.into_iter().flat_map(move |(home, network)| {
            let groups = home.groups.values().filter(move |group| group.service == *name);
            groups.map(|group| {
                Event::SetGroup(Box::new(EndpointGroup { network: network.clone(), ..group.clone() }))
            })
        })
    }

    /// Networks besides the default one with a Service that only a router of their own can lead clients
    /// outside to.
    pub(crate) fn networks_that_need_routers(&self, reserved: &Reserved) -> BTreeSet<NetworkName> {
        let default = NetworkName::default();
        let of = |home: &Namespace| {
            let network = home.network.clone().filter(|network| *network != default)?;
            let needs = |service: &Service| self.needs_router(service, &network, reserved);
            home.services.values().any(needs).then_some(network)
        };
        self.namespaces.values().filter_map(of).collect()
    }

    /// Whether only a router of its Network leads clients outside to a Service.
    pub(crate) fn needs_router(&self, service: &Service, network: &NetworkName, reserved: &Reserved) -> bool {
        let is_nodes = |address| self.forbidden.whose(address) == Some(AddressUse::Node);
        must_have_router(service, self.open.contains(network), reserved, is_nodes)
    }

    /// Networks besides the default one with a Service that clients outside reach: every node has to lead
    /// there.
    pub(crate) fn external_networks(&self) -> BTreeSet<NetworkName> {
        let default = NetworkName::default();
        let of = |home: &Namespace| {
            let network = home.network.clone().filter(|network| *network != default)?;
            let open = self.open.contains(&network);
            home.services.values().any(|service| is_external(service, open)).then_some(network)
        };
        self.namespaces.values().filter_map(of).collect()
    }

    /// The node, if it was heard of.
    #[must_use]
    pub fn node(&self) -> Option<&NodeInfo> {
        self.node.as_ref()
    }

    /// Whether all Services and endpoints that there are have been heard of, and the node: without its
    /// addresses and zone a first sync would take node ports away that an agent before this one made.
    #[must_use]
    pub fn listed(&self) -> bool {
        self.services_listed && self.groups_listed && self.node.is_some()
    }

    fn namespace(
        &mut self,
        name: &str,
        network_of: impl FnOnce(&str) -> Option<NetworkName>,
    ) -> &mut Namespace {
        self.namespaces
            .entry(name.to_owned())
            .or_insert_with(|| Namespace { network: network_of(name), ..Namespace::default() })
    }

    fn forget_if_empty(&mut self, name: &str) {
        if self.namespaces.get(name).is_some_and(|home| home.services.is_empty() && home.groups.is_empty()) {
            self.namespaces.remove(name);
        }
    }
}

/// A Service as its Network has it: without external IPs, if those are not allowed there.
fn served(service: &Service, network: &NetworkName, open: bool) -> Service {
    let mut service = Service { network: network.clone(), ..service.clone() };
    if !open {
        service.external_ips = Box::default();
    }
    service
}

/// The same without external IPs that belong to somebody in the cluster: so a proxy is told of it. One that
/// had them would take what is meant for nodes and pods, such as the kubelet's probes.
fn handed(service: &Service, network: &NetworkName, open: bool, forbidden: &Forbidden) -> Service {
    let mut service = served(service, network, open);
    let free = |address: &std::net::IpAddr| forbidden.whose(*address).is_none();
    if !service.external_ips.iter().all(free) {
        service.external_ips = service.external_ips.iter().copied().filter(free).collect();
    }
    service
}

impl Namespace {
    fn events(
        &self,
        network: &NetworkName,
        open: bool,
        forbidden: &Forbidden,
    ) -> impl Iterator<Item = Event> {
        let services = self.services.values();
        let services = services
            .map(move |service| Event::SetService(Box::new(handed(service, network, open, forbidden))));
        let groups = self.groups.values().map(|group| {
            Event::SetGroup(Box::new(EndpointGroup { network: network.clone(), ..group.clone() }))
        });
        services.chain(groups)
    }
}

#[cfg(test)]
mod tests {
    use knit_proxy::model::Protocol;

    use super::*;

    fn service(name: &str) -> Event {
        let service = Service::new(name).cluster_ip([10, 96, 0, 1].into()).port(Protocol::Tcp, 80);
        Event::SetService(Box::new(service))
    }

    fn group(name: &str, of: &str) -> Event {
        let address = [10, 1, 0, 1].into();
        Event::SetGroup(Box::new(EndpointGroup::of_addresses(name, of, Protocol::Tcp, 80, &[address])))
    }

    fn blue(namespace: &str) -> Option<NetworkName> {
        Some(NetworkName::from(if namespace == "sky" { "blue" } else { "default" }))
    }

    fn networks(events: impl IntoIterator<Item = Event>) -> Vec<(String, String)> {
        let name = |event| match event {
            Event::SetService(s) => (s.name.to_string(), s.network.to_string()),
            Event::SetGroup(g) => (g.name.to_string(), g.network.to_string()),
            other => panic!("{other:?}"),
        };
        let mut names: Vec<_> = events.into_iter().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_service_goes_to_the_network_of_its_namespace() {
        let mut table = Table::default();
        let (to, event) = table.take(service("sky/web"), blue).expect("an event");
        assert_eq!(to, Recipient::One("blue".into()));
        assert_eq!(networks([event]), [("sky/web".to_owned(), "blue".to_owned())]);
        let (to, _) = table.take(service("shop/web"), blue).expect("an event");
        assert_eq!(to, Recipient::One(NetworkName::default()));
        assert_eq!(
            networks(table.replay(&NetworkName::default())),
            [("shop/web".to_owned(), "default".to_owned())]
        );
    }

    #[test]
    fn a_namespace_that_moves_takes_its_services_along() {
        let mut table = Table::default();
        for event in [service("sky/web"), group("sky/web-1", "sky/web"), service("shop/web")] {
            table.take(event, |_| Some(NetworkName::default()));
        }
        let moved = table.reassign(|_| true, blue);
        let (gone, come): (Vec<_>, Vec<_>) =
            moved.into_iter().partition(|(to, _)| *to == NetworkName::default());
        assert_eq!(gone.len(), 2, "{gone:?}");
        assert!(gone.iter().all(|(_, e)| matches!(e, Event::DeleteService(_) | Event::DeleteGroup(_))));
        let come = networks(come.into_iter().map(|(_, event)| event));
        assert_eq!(
            come,
            [("sky/web", "blue"), ("sky/web-1", "blue")].map(|(a, b)| (a.to_owned(), b.to_owned()))
        );
        assert_eq!(table.reassign(|_| true, blue), []);
    }

    #[test]
    fn a_selector_that_cannot_be_read_took_every_service_away() {
        let mut table = Table::default();
        for event in [service("sky/web"), group("sky/web-1", "sky/web"), service("shop/web")] {
            table.take(event, blue);
        }
        assert_eq!(table.reassign(|_| true, |_| None), [], "what is served goes on");
        let (to, _) = table.take(service("sky/other"), |_| None).expect("an event");
        assert_eq!(to, Recipient::One("blue".into()));
        // One whose Network was never known is told nobody, until it is.
        assert_eq!(table.take(service("new/web"), |_| None), None);
        assert_eq!(table.reassign(|_| true, |_| None), []);
        let come = table.reassign(|_| true, blue).into_iter().map(|(_, event)| event);
        assert_eq!(networks(come), [("new/web".to_owned(), "default".to_owned())]);
    }

    #[test]
    fn what_was_never_heard_of_is_deleted_nowhere() {
        let mut table = Table::default();
        assert_eq!(table.take(Event::DeleteService("a/b".into()), blue), None);
        table.take(service("sky/web"), blue);
        let (to, _) = table.take(Event::DeleteService("sky/web".into()), blue).expect("an event");
        assert_eq!(to, Recipient::One("blue".into()));
        assert_eq!(table.replay(&"blue".into()).count(), 0);
    }

    #[test]
    fn lists_and_the_node_are_waited_for() {
        let mut table = Table::default();
        table.take(Event::ListDone(ListKind::Groups), blue);
        table.take(Event::ListDone(ListKind::ServiceRanges), blue);
        table.take(Event::ListDone(ListKind::Services), blue);
        assert!(!table.listed(), "without its node it would take all node ports away");
        table.take(Event::SetNode(Box::new(NodeInfo::new("a"))), blue);
        assert!(table.listed());
        let mut table = Table::default();
        table.take(Event::SetNode(Box::new(NodeInfo::new("a"))), blue);
        table.take(Event::ListDone(ListKind::Groups), blue);
        assert!(!table.listed());
    }

    #[test]
    fn external_ips_are_handed_on_only_where_the_network_allows_them() {
        let address: std::net::IpAddr = [203, 0, 113, 1].into();
        let external = |name: &str| {
            let service = Service::new(name).cluster_ip([10, 96, 0, 1].into()).port(Protocol::Tcp, 80);
            Event::SetService(Box::new(Service { external_ips: Box::new([address]), ..service }))
        };
        let has = |event: &Event| match event {
            Event::SetService(service) => !service.external_ips.is_empty(),
            other => panic!("{other:?}"),
        };
        let mut table = Table::default();
        table.set_open(BTreeSet::from([NetworkName::default()]));
        let (_, event) = table.take(external("sky/web"), blue).expect("an event");
        assert!(!has(&event));
        let (_, event) = table.take(external("shop/web"), blue).expect("an event");
        assert!(has(&event));
        assert!(!table.replay(&"blue".into()).any(|event| has(&event)));
        assert_eq!(table.external_networks(), BTreeSet::new(), "nobody outside reaches blue");
        let denied = table.denied(&"sky/web".into());
        assert_eq!(denied, Some((&"blue".into(), &[address][..])));
        // The Network allows it.
        let events = table.set_open(BTreeSet::from([NetworkName::default(), "blue".into()]));
        assert_eq!(events.len(), 1);
        assert!(events[0].0 == "blue" && has(&events[0].1));
        assert_eq!(table.external_networks(), BTreeSet::from(["blue".into()]));
        assert_eq!(table.denied(&"sky/web".into()), None);
        assert!(table.service(&"sky/web".into()).is_some_and(|s| !s.external_ips.is_empty()));
    }

    #[test]
    fn external_ips_of_nodes_and_pods_reach_no_proxy_also_of_the_default_network() {
        let [node, pod, joins, outside] =
            [[192, 0, 2, 1], [10, 79, 0, 5], [192, 0, 2, 2], [203, 0, 113, 1]].map(std::net::IpAddr::from);
        let external = |name: &str| {
            let service = Service::new(name).cluster_ip([10, 96, 0, 1].into()).port(Protocol::Tcp, 10250);
            let external_ips = Box::new([node, pod, joins, outside]);
            // A load balancer's that is the node's own stays: that is how small clusters have theirs.
            let load_balancer_ips = Box::new([node]);
            Event::SetService(Box::new(Service { external_ips, load_balancer_ips, ..service }))
        };
        let has = |event: Event| match event {
            Event::SetService(service) => {
                assert_eq!(*service.load_balancer_ips, [node]);
                service.external_ips.into_vec()
            }
            other => panic!("{other:?}"),
        };
        let forbidden = |nodes: &[std::net::IpAddr]| {
            let pods: ipnet::IpNet = "10.79.0.0/16".parse().expect("a range");
            Forbidden::new([pods], nodes.iter().copied())
        };
        let mut table = Table::default();
        table.set_open(BTreeSet::from([NetworkName::default(), "blue".into()]));
        table.set_forbidden(forbidden(&[node]));
        for name in ["shop/web", "sky/web"] {
            let (_, event) = table.take(external(name), blue).expect("an event");
            assert_eq!(has(event), [joins, outside], "{name}");
        }
        for network in ["default", "blue"] {
            let again: Vec<_> = table.replay(&network.into()).flat_map(has).collect();
            assert_eq!(again, [joins, outside], "{network}");
        }
        // A node joins, and leaves.
        assert_eq!(table.set_forbidden(forbidden(&[node])), []);
        let told = |events: Vec<(NetworkName, Event)>| {
            let mut told: Vec<_> =
                events.into_iter().map(|(to, event)| (to.to_string(), has(event))).collect();
            told.sort();
            told
        };
        let each = |addresses: &[std::net::IpAddr]| {
            ["blue", "default"].map(|network| (network.to_owned(), addresses.to_vec()))
        };
        assert_eq!(told(table.set_forbidden(forbidden(&[node, joins]))), each(&[outside]));
        assert_eq!(told(table.set_forbidden(forbidden(&[node]))), each(&[joins, outside]));
    }
}
