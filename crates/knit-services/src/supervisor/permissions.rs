//! What Networks allow their Services, and whom that is told.

use std::collections::BTreeSet;
use std::net::IpAddr;

use knit_api::NetworkSpec;
use knit_node::world::World;
use knit_proxy::model::{Family, NetworkName};
use knit_proxy::source::Event;

use super::Supervisor;

impl Supervisor {
    /// Which Networks allow what. Returns what changes for whom.
    pub(super) fn permit(&mut self, world: &World) -> Vec<(NetworkName, Event)> {
        let those = |allows: &dyn Fn(&str, &NetworkSpec) -> bool| -> BTreeSet<NetworkName> {
            let networks = world.networks.iter().filter(|(name, network)| allows(name, &network.spec));
            networks.map(|(name, _)| NetworkName::from(name.as_str())).collect()
        };
        if self.steering.set_on_nodes(those(&|_, spec| spec.serves_node_addresses())) && self.told.is_some() {
            self.set_defaults();
        }
        self.table.set_open(those(&|name, spec| spec.serves_external_ips(name)))
    }

    /// Tells of external IPs that a Network does not allow.
    pub(super) fn tell_denied(&mut self, world: &World) {
        for service in self.table.with_external_ips() {
            self.refusals.denied(world, service, self.table.denied(service));
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

    /// Where node ports answer, if anybody but node ports may have those addresses.
    pub(super) fn node_addresses(&self) -> Vec<IpAddr> {
        let node = self.table.node().filter(|_| self.steering.shares_nodes());
        node.map_or_else(Vec::new, |node| Family::BOTH.into_iter().filter_map(|f| node.primary(f)).collect())
    }
}
