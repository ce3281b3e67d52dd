//! The [`View`]: holds the model, recomputes what a change touches.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::claims::{Claim, Claims, FrontendKey};
use super::config::{NodeSettings, ViewConfig};
use super::frontends::NodePortPlaces;
use super::given::Given;
use super::output::{Changes, FrontendKind, HealthCheck, NoLocal, NodeView, PortChange, PortKey, PortView};
use super::parts::{claims_of, cluster_ip, port_key, same_endpoints, settle, taken, twice};
use super::select::{self, Candidate, Decision};
use super::{frontends, merge};
use crate::diff::Store;
use crate::model::{
    EndpointGroup, Family, GroupName, NodeInfo, PerFamily, Problem, Protocol, Service, ServiceName,
    ServicePort,
};

/// The lists that a view is made of (rule 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ListKind {
    /// Services.
    Services,
    /// Endpoint groups.
    Groups,
    /// Ranges of service addresses.
    ServiceRanges,
}

/// Holds services, endpoints and node, and works out what the node has to do. See the [module](super).
#[derive(Debug)]
pub struct View {
    config: ViewConfig,
    node: NodeInfo,
    ranges: Store<Arc<str>, Vec<IpNet>>,
    services: BTreeMap<ServiceName, Entry>,
    /// Which service a group belongs to: a group may be deleted by name, or go over to another service.
    owners: HashMap<GroupName, ServiceName>,
    claims: Claims,
    node_ports: PerFamily<NodePortPlaces>,
    pub(super) dirty: BTreeSet<ServiceName>,
    pub(super) node_dirty: bool,
    announced: bool,
    pub(super) triggered_ms: Vec<u64>,
    /// What was decided elsewhere.
    pub(super) given: Given,
    pub(super) revision: u64,
    problems: BTreeMap<ServiceName, Vec<Problem>>,
    current: NodeView,
    relist: Relist,
}

/// All that is known of one service. It is there as soon as the service or one of its groups is.
#[derive(Debug, Default)]
struct Entry {
    service: Option<Box<Service>>,
    /// Sorted by name: there are few.
    groups: Vec<EndpointGroup>,
}

/// Names seen since a list began: what is not among them at its end is gone.
#[derive(Debug, Default)]
struct Relist {
    services: Option<HashSet<ServiceName>>,
    groups: Option<HashSet<GroupName>>,
}

/// What one service contributes to the node view.
struct Resolved {
    ports: BTreeMap<PortKey, Arc<PortView>>,
    health_check: Option<HealthCheck>,
    problems: Vec<Problem>,
}

impl View {
    /// An empty view.
    #[must_use]
    pub fn new(config: ViewConfig, node: NodeInfo) -> Self {
        let settings = NodeSettings::resolve(&config, &node, Vec::new());
        let node_ports = PerFamily::from_fn(|family| NodePortPlaces::new(&config, &node, family));
        Self {
            node_ports,
            config,
            node,
            ranges: Store::new(),
            services: BTreeMap::new(),
            owners: HashMap::new(),
            claims: Claims::default(),
            dirty: BTreeSet::new(),
            node_dirty: true,
            announced: false,
            triggered_ms: Vec::new(),
            given: Given::default(),
            revision: 0,
            problems: BTreeMap::new(),
            current: NodeView { node: Arc::new(settings), ..NodeView::default() },
            relist: Relist::default(),
        }
    }

    /// The settings it was made with.
    #[must_use]
    pub fn config(&self) -> &ViewConfig {
        &self.config
    }

    /// The node it is for.
    #[must_use]
    pub fn node(&self) -> &NodeInfo {
        &self.node
    }

    /// The view as of the last [`take_changes`](Self::take_changes).
    #[must_use]
    pub fn current(&self) -> &NodeView {
        &self.current
    }

    /// Whether there may be changes to take.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.node_dirty || !self.dirty.is_empty() || self.ranges.is_dirty() || self.given.is_dirty()
    }

    /// What is wrong with the services as they are now: frontends that another service has.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().flatten()
    }

    /// A service as it was set.
    #[must_use]
    pub fn service(&self, name: &str) -> Option<&Service> {
        self.services.get(name)?.service.as_deref()
    }

    /// All services, sorted by name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values().filter_map(|e| e.service.as_deref())
    }

    /// The endpoint groups of a service, sorted by name, whether or not the service itself is there.
    pub fn groups(&self, service: &str) -> impl Iterator<Item = &EndpointGroup> {
        self.services.get(service).into_iter().flat_map(|e| &e.groups)
    }

    /// Endpoint groups whose service is not there.
    pub fn orphans(&self) -> impl Iterator<Item = &EndpointGroup> {
        self.services.values().filter(|e| e.service.is_none()).flat_map(|e| &e.groups)
    }

    /// Adds or replaces a service.
    pub fn set_service(&mut self, service: Service) {
        if service.network != self.config.network {
            self.delete_service(&service.name);
            return;
        }
        if let Some(seen) = &mut self.relist.services {
            seen.insert(service.name.clone());
        }
        let entry = self.services.entry(service.name.clone()).or_default();
        if entry.service.as_deref() == Some(&service) {
            return;
        }
        if let Some(old) = entry.service.take() {
            self.unclaim(&old);
        }
        self.claim(&service);
        let name = service.name.clone();
        self.services.entry(name.clone()).or_default().service = Some(Box::new(service));
        self.dirty.insert(name);
    }

    /// Removes a service. Its groups stay: they may have come first, or their service may come back.
    pub fn delete_service(&mut self, name: &ServiceName) {
        let Some(entry) = self.services.get_mut(name) else { return };
        let Some(old) = entry.service.take() else { return };
        if entry.groups.is_empty() {
            self.services.remove(name);
        }
        self.unclaim(&old);
        self.dirty.insert(name.clone());
    }

    /// Adds or replaces an endpoint group.
    pub fn set_group(&mut self, group: EndpointGroup) {
        if group.network != self.config.network {
            self.delete_group(&group.name);
            return;
        }
        if let Some(seen) = &mut self.relist.groups {
            seen.insert(group.name.clone());
        }
        let owner = self.owners.insert(group.name.clone(), group.service.clone());
        if let Some(owner) = owner.filter(|o| *o != group.service) {
            self.drop_group(&owner, &group.name);
        }
        let entry = self.services.entry(group.service.clone()).or_default();
        match entry.groups.binary_search_by(|g| g.name.cmp(&group.name)) {
            Ok(at) if same_endpoints(&entry.groups[at], &group) => {}
            Ok(at) => {
                self.triggered_ms.extend(group.triggered_ms);
                self.dirty.insert(group.service.clone());
                entry.groups[at] = group;
            }
            Err(at) => {
                self.triggered_ms.extend(group.triggered_ms);
                self.dirty.insert(group.service.clone());
                entry.groups.reserve_exact(1);
                entry.groups.insert(at, group);
            }
        }
    }

    /// Removes an endpoint group.
    pub fn delete_group(&mut self, name: &GroupName) {
        if let Some(owner) = self.owners.remove(name) {
            self.drop_group(&owner, name);
        }
    }

    /// Replaces what is known of the node. Everything is recomputed if it matters.
    pub fn set_node(&mut self, node: NodeInfo) {
        if node == self.node {
            return;
        }
        self.node = node;
        let node_ports = PerFamily::from_fn(|family| NodePortPlaces::new(&self.config, &self.node, family));
        if node_ports != self.node_ports {
            self.claim_again(|view| view.node_ports = node_ports);
        }
        self.dirty_all();
    }

    /// Adds or replaces ranges that service addresses come from, by the name of the object that says so (rule
    /// 27).
    pub fn set_service_ranges(&mut self, name: &str, ranges: Vec<IpNet>) {
        self.ranges.set(name.into(), ranges);
    }

    /// Removes the ranges that an object gave.
    pub fn delete_service_ranges(&mut self, name: &str) {
        self.ranges.delete(&name.into());
    }

    /// Replaces the addresses to leave alone (see [`ViewConfig::exempt_vips`]).
    pub fn set_exempt_vips(&mut self, exempt: Vec<IpAddr>) {
        if exempt == self.config.exempt_vips {
            return;
        }
        self.claim_again(|view| view.config.exempt_vips = exempt);
        self.dirty_all();
    }

    /// Changes what claims follow from.
    fn claim_again(&mut self, change: impl FnOnce(&mut Self)) {
        let services: Vec<Box<Service>> = self.services.values().filter_map(|e| e.service.clone()).collect();
        for service in &services {
            self.unclaim(service);
        }
        change(self);
        for service in &services {
            self.claim(service);
        }
    }

    /// Begins a full list of one kind: what is not set again until [`list_done`](Self::list_done) is gone.
    pub fn list_start(&mut self, kind: ListKind) {
        match kind {
            ListKind::Services => {
                self.relist.services = Some(HashSet::new());
                self.given.list_start();
            }
            ListKind::Groups => self.relist.groups = Some(HashSet::new()),
            ListKind::ServiceRanges => self.ranges.begin(),
        }
    }

    /// Ends a full list. Without a beginning it changes nothing.
    pub fn list_done(&mut self, kind: ListKind) {
        match kind {
            ListKind::Services => {
                self.given.list_done();
                let Some(seen) = self.relist.services.take() else { return };
                let gone: Vec<_> =
                    self.services().map(|s| &s.name).filter(|n| !seen.contains(*n)).cloned().collect();
                gone.iter().for_each(|name| self.delete_service(name));
            }
            ListKind::Groups => {
                let Some(seen) = self.relist.groups.take() else { return };
                let gone: Vec<_> = self.owners.keys().filter(|n| !seen.contains(*n)).cloned().collect();
                gone.iter().for_each(|name| self.delete_group(name));
            }
            ListKind::ServiceRanges => self.ranges.sweep(),
        }
    }

    /// Recomputes what changed since the last call.
    pub fn take_changes(&mut self) -> Changes {
        let mut changes =
            Changes { triggered_ms: std::mem::take(&mut self.triggered_ms), ..Changes::default() };
        self.dirty.extend(self.given.take());
        let other_ranges = !self.ranges.take().is_empty();
        if std::mem::take(&mut self.node_dirty) || other_ranges {
            self.current.revision = self.revision;
            let settings = self.given.settings.clone().unwrap_or_else(|| {
                let ranges = self.ranges.iter().flat_map(|(_, ranges)| ranges).copied().collect();
                NodeSettings::resolve(&self.config, &self.node, ranges)
            });
            // The first call reports the node in any case, so that a backend learns its settings.
            if !std::mem::replace(&mut self.announced, true) || settings != *self.current.node {
                changes.node = true;
                self.current.node = Arc::new(settings);
            }
        }
        for name in std::mem::take(&mut self.dirty) {
            let resolved = self.resolve(&name);
            self.merge_in(&name, resolved, &mut changes);
        }
        // A cluster IP may have gone with one service and come with another in the same batch.
        settle(&mut changes.cluster_ips_added, &mut changes.cluster_ips_removed);
        changes
    }

    /// The endpoints of one service port before any choice, and the choice (see [`crate::explain`]).
    #[must_use]
    pub fn candidates(
        &self,
        service: &str,
        port: &ServicePort,
        family: Family,
    ) -> (Vec<Candidate<'_>>, Decision) {
        let groups = self.groups(service);
        let found = merge(groups, family, &port.name, port.protocol, &self.node.name);
        let uses = self.service(service).map_or(select::Uses { cluster: false, local: false }, |s| {
            frontends::uses(s, port, family, &self.config)
        });
        let decision = Decision::make(&found, uses, &self.node);
        (found, decision)
    }

    fn resolve(&self, name: &ServiceName) -> Resolved {
        let Some(service) = self.service(name.as_str()) else {
            let given = self.given.service(name);
            return Resolved { ports: given.ports, health_check: given.health_check, problems: Vec::new() };
        };
        let mut resolved = Resolved { ports: BTreeMap::new(), health_check: None, problems: Vec::new() };
        let mut local_ready: PerFamily<BTreeSet<IpAddr>> = PerFamily::default();
        for family in Family::ALL {
            for port in &service.ports {
                let node_ports = self.node_ports.get(family);
                let wanted = frontends::wanted(service, port, family, &self.config, node_ports);
                if wanted.is_empty() {
                    continue;
                }
                let key = port_key(service, port, family);
                if resolved.ports.contains_key(&key) {
                    resolved.problems.push(twice(service, port));
                    continue;
                }
                let (candidates, decision) = self.candidates(name.as_str(), port, family);
                let mut had: Vec<(FrontendKind, FrontendKey)> = Vec::with_capacity(wanted.len());
                let mut ports = Vec::new();
                for (kind, frontend) in wanted {
                    match self.claims.winner(&frontend) {
                        Some(winner) if *winner != key => {
                            resolved.problems.push(taken(service, port, kind, frontend, winner));
                            if kind == FrontendKind::NodePort && frontend.address.is_none() {
                                // Its addresses go with the number.
                                break;
                            }
                        }
                        _ if kind == FrontendKind::NodePort => ports.push(frontend),
                        _ => had.push((kind, frontend)),
                    }
                }
                had.extend(node_ports.frontends(&ports).into_iter().map(|at| (FrontendKind::NodePort, at)));
                let node = &self.current.node;
                let mut found: Vec<_> = (had.into_iter())
                    .map(|(kind, at)| frontends::resolve(kind, at, service, decision, node))
                    .collect();
                if service.health_check_port.is_some() {
                    local_ready.get_mut(family).extend(select::local_ready(&candidates));
                }
                found.sort_unstable();
                let (cluster, local) = decision.sets(&candidates, &self.node);
                let serving = match port.protocol {
                    Protocol::Udp => select::serving(&candidates),
                    Protocol::Tcp | Protocol::Sctp => Arc::default(),
                };
                let view = PortView {
                    frontends: found.into(),
                    cluster,
                    local,
                    affinity_seconds: service.affinity.map(|a| a.timeout_seconds),
                    serving,
                };
                resolved.ports.insert(key, Arc::new(view));
            }
        }
        resolved.health_check = service.health_check_port.map(|port| HealthCheck {
            port,
            local_ready: PerFamily::from_fn(|family| local_ready.get(family).len()),
        });
        resolved
    }

    /// Puts one service's part into the current view, and notes the difference.
    fn merge_in(&mut self, name: &ServiceName, mut resolved: Resolved, changes: &mut Changes) {
        let old: Vec<PortKey> = self.port_keys(name).cloned().collect();
        let mut ports = Vec::new();
        for key in old {
            let new = resolved.ports.remove(&key);
            let current = &self.current.ports[&key];
            if new.as_ref() != Some(current) {
                ports.push(PortChange { old: Some(Arc::clone(current)), new, key });
            }
        }
        ports.extend(resolved.ports.into_iter().map(|(key, new)| PortChange {
            key,
            old: None,
            new: Some(new),
        }));
        ports.sort_by(|a, b| a.key.cmp(&b.key));
        for change in &ports {
            for address in change.old.iter().flat_map(|view| cluster_ip(view)) {
                match self.current.cluster_ips.get_mut(&address) {
                    Some(count) if *count > 1 => *count -= 1,
                    _ => {
                        self.current.cluster_ips.remove(&address);
                        changes.cluster_ips_removed.push(address);
                    }
                }
            }
            for address in change.new.iter().flat_map(|view| cluster_ip(view)) {
                let count = self.current.cluster_ips.entry(address).or_default();
                *count += 1;
                if *count == 1 {
                    changes.cluster_ips_added.push(address);
                }
            }
            let [old, new] = [&change.old, &change.new]
                .map(|view| view.as_ref().map_or_else(NoLocal::default, |view| view.no_local()));
            let count = self.current.no_local.get_mut(change.key.family);
            count.internal = count.internal + new.internal - old.internal;
            count.external = count.external + new.external - old.external;
            match &change.new {
                Some(new) => self.current.ports.insert(change.key.clone(), Arc::clone(new)),
                None => self.current.ports.remove(&change.key),
            };
        }
        changes.ports.append(&mut ports);

        let health_check = resolved.health_check;
        if self.current.health_checks.get(name) != health_check.as_ref() {
            changes.health_checks.push(name.clone());
            match health_check {
                Some(new) => self.current.health_checks.insert(name.clone(), new),
                None => self.current.health_checks.remove(name),
            };
        }

        let known = self.problems.remove(name).unwrap_or_default();
        changes.problems.extend(resolved.problems.iter().filter(|p| !known.contains(p)).cloned());
        if !resolved.problems.is_empty() {
            self.problems.insert(name.clone(), resolved.problems);
        }
    }

    /// The keys of a service in the current view.
    fn port_keys(&self, name: &ServiceName) -> impl Iterator<Item = &PortKey> {
        let from = PortKey {
            service: name.clone(),
            port: Arc::default(),
            protocol: Protocol::Tcp,
            family: Family::V4,
        };
        self.current.ports.range(from..).map(|(key, _)| key).take_while(move |key| key.service == *name)
    }

    fn dirty_all(&mut self) {
        self.node_dirty = true;
        let names = self.services.iter().filter(|(_, e)| e.service.is_some()).map(|(name, _)| name.clone());
        self.dirty.extend(names);
    }

    fn drop_group(&mut self, owner: &ServiceName, name: &GroupName) {
        let Some(entry) = self.services.get_mut(owner) else { return };
        entry.groups.retain(|g| g.name != *name);
        if entry.groups.is_empty() && entry.service.is_none() {
            self.services.remove(owner);
        }
        self.dirty.insert(owner.clone());
    }

    fn claim(&mut self, service: &Service) {
        for (kind, frontend, key) in claims_of(service, &self.config, &self.node_ports) {
            let others = self.claims.add(frontend, Claim::new(kind, service.created, key));
            self.dirty.extend(others);
        }
    }

    fn unclaim(&mut self, service: &Service) {
        for (_, frontend, key) in claims_of(service, &self.config, &self.node_ports) {
            let others = self.claims.remove(&frontend, &key);
            self.dirty.extend(others);
        }
    }
}
