//! What Networks allow their Services, and whom that is told.

use std::collections::BTreeSet;
use std::net::IpAddr;

use knit_api::names;
use knit_kernel::Handle;
use knit_model::Network;
use knit_node::world::World;
use knit_proxy::model::{Family, NetworkName, ServiceName};
use knit_proxy::source::Event;

use super::Supervisor;

impl Supervisor {
    /// Which Networks allow what. Returns what changes for whom.
    pub(super) fn permit(&mut self, world: &World) -> Vec<(NetworkName, Event)> {
        let those = |allows: fn(&Network) -> bool| -> BTreeSet<NetworkName> {
            let networks = world.networks.values().filter(|network| allows(network));
            networks.map(|network| network.name().clone()).collect()
        };
        if self.steering.set_on_nodes(those(Network::serves_node_addresses)) && self.told.is_some() {
            self.set_defaults();
        }
        self.table.set_open(those(Network::serves_external_ips))
    }

    /// Tells of external IPs that a Network does not allow.
    pub(super) fn tell_all_denied(&mut self, world: &World) {
        let services: Vec<ServiceName> = self.table.with_external_ips().cloned().collect();
        services.iter().for_each(|service| self.tell_denied(world, service));
    }

    /// Tells of a Service's external IPs, if its Network does not allow them. Who serves the default Network
    /// in place of this agent does not ask.
    pub(super) fn tell_denied(&mut self, world: &World, service: &ServiceName) {
        let left = self.steering.left_to_others();
        let denied = self.table.denied(service);
        let denied = denied.filter(|(network, _)| !left || **network != NetworkName::default());
        self.refusals.denied(world, service, denied);
    }

    /// Somebody else serves the default Network on this node, or this agent does.
    pub(super) fn leave_to_others(&mut self, left: bool) {
        if self.steering.set_left_to_others(left) && self.told.is_some() {
            let world = self.world.borrow().clone();
            self.tell_all_denied(&world);
        }
    }

    /// Whether external IPs of the default Network may be addresses that this node has and no Node lists.
    pub(super) fn takes_own(&self) -> bool {
        let world = self.world.borrow();
        world.networks.get(names::DEFAULT_NETWORK).is_some_and(|network| network.serves_node_addresses())
    }

    /// Looks at the addresses that this node has, so that authors of Services hear of those that they cannot
    /// have. What counts is decided for each packet by the kernel, which knows them at any time.
    pub(super) fn look_at_own_addresses(&mut self) {
        if self.table.with_external_ips().next().is_some() {
            self.read_own_addresses();
        }
    }

    /// Reads them, whether or not a Service has external IPs.
    pub(super) fn read_own_addresses(&mut self) {
        match Handle::open(&self.node).and_then(|handle| handle.addresses(None)) {
            Ok(found) => self.steering.set_own(found.iter().map(|found| found.address.addr()).collect()),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::debug!(error, "cannot read the node's addresses");
            }
        }
    }

    /// Tells of addresses that lead elsewhere, or nowhere.
    pub(super) fn tell_refused(&mut self) {
        let refused = self.steering.take_refused();
        if !refused.is_empty() {
            let world = self.world.borrow().clone();
            refused.iter().for_each(|(service, whys)| self.refusals.addresses(&world, service, whys));
        }
    }

    /// What the default Network's Services have is not steered.
    pub(super) fn set_defaults(&mut self) {
        let node = self.node_addresses();
        self.table.default_services().for_each(|service| self.steering.set_default(&service, &node));
    }

    /// Where node ports answer.
    pub(super) fn node_addresses(&self) -> Vec<IpAddr> {
        let node = self.table.node();
        node.map_or_else(Vec::new, |node| Family::ALL.into_iter().filter_map(|f| node.primary(f)).collect())
    }
}
