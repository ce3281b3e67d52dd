//! Networks that have no router on this node: their Services' clients are led to other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use knit_node::world::World;
use knit_proxy::model::{Family, NetworkName, NodeInfo};
use knit_proxy::source::Event;
use knit_proxy::vitals::{Checks, serve_health_checks};
use tokio::task::AbortHandle;

use super::Supervisor;
use crate::absent::Absent;
use crate::instance::{bind_on, log_server};

/// One of them, with the task that answers its health checks.
#[derive(Debug)]
pub(super) struct AbsentNetwork {
    absent: Absent,
    checks: Option<AbortHandle>,
    /// It was told something since it was last asked.
    dirty: bool,
}

impl Drop for AbsentNetwork {
    fn drop(&mut self) {
        self.checks.iter().for_each(AbortHandle::abort);
    }
}

impl Supervisor {
    /// Whether a Network has no router on this node, and will have none in a moment: of one that has pods
    /// here the router is on its way, and what leads there from before stays until it is there.
    fn is_absent(&self, network: &NetworkName) -> bool {
        *network != NetworkName::default()
            && self.world.borrow().networks.contains_key(network.as_str())
            && !self.instances.values().any(|instance| instance.name() == *network && instance.reported)
            && !self.core.has_pods_of(network)
    }

    /// Looks again at which Networks with Services that clients outside reach have no router here.
    pub(super) fn look_for_absent(&mut self) {
        if self.told.is_none() {
            return;
        }
        let external = self.table.external_networks();
        let gone = |supervisor: &Self, network: &NetworkName| {
            !external.contains(network) || !supervisor.world.borrow().networks.contains_key(network.as_str())
        };
        let ended: Vec<NetworkName> = self.absent.keys().filter(|name| gone(self, name)).cloned().collect();
        for network in ended {
            self.absent.remove(&network);
            self.steering.forget_network(&network);
        }
        external.iter().for_each(|network| self.lead_onward(network));
    }

    /// Begins to lead clients of a Network's Services to other nodes, if it has no router here.
    pub(super) fn lead_onward(&mut self, network: &NetworkName) {
        if self.told.is_none() || self.absent.contains_key(network) || !self.is_absent(network) {
            return;
        }
        let node = self.table.node().cloned().unwrap_or_else(|| NodeInfo::new(&self.config.node));
        let mut absent = Absent::new(network, node, self.reserved.clone());
        // Services come before their endpoints.
        for event in self.table.replay(network) {
            let _ = absent.take(&event);
        }
        let mut new = AbsentNetwork { absent, checks: None, dirty: true };
        // An instance that is starting answers them itself.
        if self.instances.values().all(|instance| instance.name() != *network) {
            new.checks = Some(self.answer_checks(&new.absent));
        }
        self.absent.insert(network.clone(), new);
    }

    /// A Network gets a router here: its proxy answers health checks from now on. Clients are led to other
    /// nodes until the proxy says what it serves.
    pub(super) fn router_comes(&mut self, network: &NetworkName) {
        if let Some(checks) = self.absent.get_mut(network).and_then(|absent| absent.checks.take()) {
            checks.abort();
        }
    }

    /// Tells what has no router here of an event.
    pub(super) fn tell_absent(&mut self, network: &NetworkName, event: &Event) {
        let Some(known) = self.absent.get_mut(network) else { return };
        known.dirty = true;
        if known.absent.take(event)
            && let Event::SetService(service) = event
        {
            for group in self.table.groups_of(&service.name) {
                let _ = known.absent.take(&group);
            }
        }
    }

    /// The same of all of them.
    pub(super) fn tell_all_absent(&mut self, event: &Event) {
        for known in self.absent.values_mut() {
            known.dirty = true;
            let _ = known.absent.take(event);
        }
    }

    /// Has what became another lead where it should.
    pub(super) fn lead_absent(&mut self) {
        if self.absent.values().all(|known| !known.dirty) {
            return;
        }
        let world = self.world.borrow().clone();
        let node = self.node_addresses();
        for (network, known) in self.absent.iter_mut().filter(|(_, known)| known.dirty) {
            known.dirty = false;
            for (key, found) in known.absent.changes(&|name, family| address(&world, name, family)) {
                let found = found.as_ref().map(|(places, service)| (places.clone(), service));
                self.steering.set_places(network, &key, found, &node);
            }
        }
    }

    /// Nodes came, went, or have other addresses.
    pub(super) fn nodes_moved(&mut self, before: Option<&World>, world: &World) {
        if self.absent.is_empty() || before.is_some_and(|before| Arc::ptr_eq(&before.nodes, &world.nodes)) {
            return;
        }
        let (old, new) = (before.map(|before| &before.nodes), &world.nodes);
        let of = |name: &str| old.and_then(|old| old.get(name)).map(|view| &view.addresses);
        let changed = new.iter().filter(|(name, view)| of(name) != Some(&view.addresses));
        let gone = old.into_iter().flat_map(|old| old.keys()).filter(|name| !new.contains_key(*name));
        let moved: BTreeSet<&str> =
            changed.map(|(name, _)| name.as_str()).chain(gone.map(String::as_str)).collect();
        let node = self.node_addresses();
        for (network, known) in &mut self.absent {
            for (key, found) in known.absent.moved(&moved, &|name, family| address(world, name, family)) {
                let found = found.as_ref().map(|(places, service)| (places.clone(), service));
                self.steering.set_places(network, &key, found, &node);
            }
        }
    }

    fn answer_checks(&self, absent: &Absent) -> AbortHandle {
        let (health, checks) = (absent.health.clone(), Checks::On(self.node_addresses()));
        let bind = bind_on(Arc::clone(&self.node));
        tokio::spawn(serve_health_checks(health, checks, bind, &log_server)).abort_handle()
    }
}

/// How a node is reached by another.
fn address(world: &World, node: &str, family: Family) -> Option<IpAddr> {
    let view = world.nodes.get(node)?;
    view.addresses.iter().copied().find(|address| Family::of(*address) == family)
}
