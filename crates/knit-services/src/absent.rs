//! Services of a Network that has no router on this node: what clients outside who come to this node are led
//! to instead, which is other nodes that have one.
//!
//! Every node answers for every node port and load balancer's address, but only nodes with pods of a Network
//! have its router. The others hand connections over to nodes on which endpoints of the Service run, at the
//! Service's node port, where they are what any client outside is. Which endpoints count, what becomes of
//! traffic under the policy Local and what health checks say is worked out by the same [`View`] that a
//! router's proxy has; only that nothing is programmed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use knit_proxy::backend::Outcome;
use knit_proxy::elect::chosen;
use knit_proxy::engine::Run;
use knit_proxy::health::Health;
use knit_proxy::model::{Family, NetworkName, NodeInfo, Service, ServiceName};
use knit_proxy::source::Event;
use knit_proxy::view::{NodePorts, PortKey, PortView, View, ViewConfig};
use knit_runtime::routers::Way;

use crate::entrances::{Ends, Place, handed_over};
use crate::internal_ports::{Reserved, is_external};

/// Never: nothing waits here.
const UNHEALTHY_DELAY: Duration = Duration::MAX;

/// One Network without a router on this node.
#[derive(Debug)]
pub(crate) struct Absent {
    reserved: Reserved,
    view: View,
    /// The nodes on which endpoints of each port run.
    nodes: BTreeMap<PortKey, BTreeSet<Arc<str>>>,
    /// What health checks say of it: this node has no endpoint.
    pub(crate) health: Health,
}

/// The places of a port, with its Service; none if it has none any more.
pub(crate) type Change = (PortKey, Option<(Vec<Place>, Service)>);

impl Absent {
    pub(crate) fn new(network: &NetworkName, node: NodeInfo, reserved: Reserved) -> Self {
        let config = ViewConfig {
            network: network.clone(),
            node_ports: NodePorts::Primary,
            reserved: reserved.clone(),
            ..ViewConfig::default()
        };
        let (view, nodes, health) = (View::new(config, node), BTreeMap::new(), Health::new(UNHEALTHY_DELAY));
        Self { reserved, view, nodes, health }
    }

    /// Takes in what its Network's proxy would be told. A Service that nobody outside reaches is left out,
    /// with its endpoints; whether this one is new here, so that its endpoints are still to be told.
    pub(crate) fn take(&mut self, event: &Event) -> bool {
        match event {
            Event::SetService(service) if is_external(service, true) => {
                let new = self.view.service(service.name.as_str()).is_none();
                self.view.set_service(without(&self.reserved, service));
                return new;
            }
            Event::SetService(service) => self.forget(&service.name),
            Event::DeleteService(name) => self.forget(name),
            Event::SetGroup(group) if self.view.service(group.service.as_str()).is_some() => {
                self.view.set_group((**group).clone());
            }
            // One that went over to another Service, too.
            Event::SetGroup(group) => self.view.delete_group(&group.name),
            Event::DeleteGroup(name) => self.view.delete_group(name),
            Event::SetNode(node) => self.view.set_node((**node).clone()),
            _ => {}
        }
        false
    }

    fn forget(&mut self, service: &ServiceName) {
        self.view.delete_service(service);
        let groups: Vec<_> = self.view.groups(service.as_str()).map(|group| group.name.clone()).collect();
        groups.iter().for_each(|group| self.view.delete_group(group));
    }

    /// What became another since the last call. `address` says how other nodes are reached, by family.
    pub(crate) fn changes(&mut self, address: &impl Fn(&str, Family) -> Option<IpAddr>) -> Vec<Change> {
        let changes = self.view.take_changes();
        if !changes.health_checks.is_empty() || changes.node {
            let now = Instant::now();
            let (full, state) = (true, self.view.current());
            let (outcome, took) = (&Outcome::Done, Duration::ZERO);
            let run = Run { full, changes: &changes, state, outcome, ended: now, took };
            self.health.observer().ran(&run);
        }
        let mut keys: BTreeSet<PortKey> = changes.ports.into_iter().map(|change| change.key).collect();
        if changes.node {
            keys.extend(self.nodes.keys().cloned());
        }
        keys.into_iter().map(|key| self.change(key, address)).collect()
    }

    /// What is another because these nodes have other addresses, came or went.
    pub(crate) fn moved(
        &mut self,
        nodes: &BTreeSet<&str>,
        address: &impl Fn(&str, Family) -> Option<IpAddr>,
    ) -> Vec<Change> {
        let touched = |named: &BTreeSet<Arc<str>>| named.iter().any(|node| nodes.contains(&**node));
        let keys = self.nodes.iter().filter(|(_, named)| touched(named)).map(|(key, _)| key.clone());
        let keys: Vec<PortKey> = keys.collect();
        keys.into_iter().map(|key| self.change(key, address)).collect()
    }

    fn change(&mut self, key: PortKey, address: &impl Fn(&str, Family) -> Option<IpAddr>) -> Change {
        let view = self.view.current().ports.get(&key).cloned();
        let service = self.view.service(key.service.as_str()).cloned();
        let Some((view, service)) = view.zip(service) else {
            self.nodes.remove(&key);
            return (key, None);
        };
        let places = self.places(&key, &view, &service, address);
        (key, Some((places, service)))
    }

    fn places(
        &mut self,
        key: &PortKey,
        view: &PortView,
        service: &Service,
        address: &impl Fn(&str, Family) -> Option<IpAddr>,
    ) -> Vec<Place> {
        let is_this =
            |port: &&knit_proxy::model::ServicePort| port.name == key.port && port.protocol == key.protocol;
        let Some(port) = service.ports.iter().find(is_this) else { return Vec::new() };
        let own = self.view.node();
        let (candidates, decision) = self.view.candidates(key.service.as_str(), port, key.family);
        let counts = candidates.iter().filter(|candidate| decision.judge_cluster(candidate, own).is_in());
        let nodes: BTreeSet<Arc<str>> = counts.filter_map(|c| c.endpoint.node.clone()).collect();
        let reached = nodes.iter().filter(|node| **node != own.name);
        let reached: BTreeMap<&str, IpAddr> =
            reached.filter_map(|node| Some((&**node, address(node, key.family)?))).collect();
        // Not all nodes without a router hand over to the same few.
        let object = format!("{} {}", own.name, key.service);
        // Who comes back to the same endpoint does so on one node only.
        let most = if service.affinity.is_some() { 1 } else { Way::MOST_NODES };
        let to: Vec<IpAddr> =
            chosen(reached.keys().copied(), &object, most).iter().map(|node| reached[node]).collect();
        let node = Ends::of(&own.addresses, key.family);
        let places = handed_over(key, view, port, node, &to);
        self.nodes.insert(key.clone(), nodes);
        places
    }
}

/// A Service without node ports that no Service has.
fn without(reserved: &Reserved, service: &Service) -> Service {
    let mut service = service.clone();
    for port in &mut service.ports {
        let is_free = |number: u16| !reserved.contains(&(port.protocol, number));
        port.node_port = port.node_port.filter(|number| is_free(number.get()));
    }
    service
}

#[cfg(test)]
mod tests;
