//! What instances are told: each object goes to the Network that it belongs to, once all objects have
//! arrived.

use std::collections::BTreeMap;
use std::sync::Arc;

use knit_node::world::World;
use knit_proxy::model::{NetworkName, Protocol, ServiceName};
use knit_proxy::source::Event;
use knit_proxy::view::ListKind;
use knit_types::sync::Locked;
use tokio::time::Instant;

use super::Supervisor;
use crate::forbidden::Forbidden;
use crate::instance::Instance;
use crate::internal_ports::{InternalPorts, is_external};
use crate::table::{Recipient, Table};

impl Supervisor {
    pub(super) fn event(&mut self, event: Event) {
        if let Event::Problem(problem) = &event {
            tracing::warn!("{problem}");
        }
        self.node_ports.locked().hear(&event);
        if matches!(event, Event::ListDone(ListKind::Services)) {
            self.listed.send_replace(true);
        }
        if let Event::SetService(service) = &event
            && !service.external_ips.is_empty()
            && !self.steering.knows_own()
        {
            self.read_own_addresses();
        }
        let service = match &event {
            Event::SetService(service) => Some(service.name.clone()),
            Event::DeleteService(name) => Some(name.clone()),
            _ => None,
        };
        let world = self.world.borrow().clone();
        let before = self.node_addresses();
        let taken = self.table.take(event, |namespace| self.placement.network_of(&world, namespace));
        if let Some(name) = service.filter(|_| self.told.is_some()) {
            self.tell_denied(&world, &name);
        }
        let Some((to, event)) = taken else { return };
        if self.told.is_some() && self.node_addresses() != before {
            self.set_defaults();
        }
        // Before everything has arrived, it is only kept.
        if self.told.is_some() {
            match to {
                Recipient::One(network) => self.send_to(&network, event),
                Recipient::All => {
                    self.tell_all_absent(&event);
                    self.instances.values_mut().for_each(|i| send(i, event.clone()));
                }
            }
        }
    }

    pub(super) fn look_at_world(&mut self, seen: &mut Option<Arc<World>>, world: &Arc<World>) {
        let before = seen.replace(Arc::clone(world));
        self.nodes_moved(before.as_deref(), world);
        if !before.as_ref().is_some_and(|seen| Forbidden::same(seen, world)) {
            let forbidden = Forbidden::of(world, &self.routers.uplink_ranges());
            self.steering.set_forbidden(forbidden.clone());
            let filtered = self.table.set_forbidden(forbidden);
            if self.told.is_some() {
                filtered.into_iter().for_each(|(network, event)| self.send_to(&network, event));
            }
        }
        let namespaces = self.placement.look(world);
        if namespaces.is_empty() {
            return;
        }
        let mut moved = self.permit(world);
        let network_of = |namespace: &str| self.placement.network_of(world, namespace);
        moved.extend(self.table.reassign(|namespace| namespaces.contains(namespace), network_of));
        if self.told.is_some() {
            moved.into_iter().for_each(|(network, event)| self.send_to(&network, event));
            self.tell_all_denied(world);
            self.keep_networks();
            self.look_for_absent();
        }
    }

    pub(super) fn send_to(&mut self, network: &NetworkName, event: Event) {
        if *network == NetworkName::default() {
            match &event {
                Event::SetService(service) => {
                    let node = self.node_addresses();
                    // With what was left out of it: its author is told.
                    if let Some(service) = self.table.service(&service.name) {
                        self.steering.set_default(&service, &node);
                    }
                }
                Event::DeleteService(name) => self.steering.forget_default(name),
                _ => {}
            }
        }
        if let Event::SetService(service) = &event
            && *network != NetworkName::default()
            && is_external(service, true)
            && self.instances.values().all(|instance| instance.name() != *network)
        {
            if self.table.needs_router(service, network, &self.reserved) {
                self.keep_network(network);
            }
            self.lead_onward(network);
        }
        self.tell_absent(network, &event);
        for event in prepared(&mut self.internal, &self.reserved, &self.table, network, event) {
            self.instances.values_mut().filter(|i| i.name() == *network).for_each(|i| send(i, event.clone()));
        }
    }

    /// Tells an instance everything.
    pub(super) fn replay(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let name = instance.name();
        let node = self.table.node().map(|node| Event::SetNode(Box::new(node.clone())));
        for event in node.into_iter().chain(self.table.replay(&name)) {
            for event in prepared(&mut self.internal, &self.reserved, &self.table, &name, event) {
                send(instance, event);
            }
        }
        if let Some(proxy) = &instance.running
            && proxy.all_listed().is_err()
        {
            instance.running = None;
        }
    }

    /// Nothing is programmed before all that there is has arrived, and it is known where it belongs.
    pub(super) fn tell_if_complete(&mut self) {
        if self.told.is_none() && self.table.listed() && self.world.borrow().can_serve() {
            let world = self.world.borrow().clone();
            // Nobody was told anything yet.
            let _ = self.permit(&world);
            let _ = self.placement.look(&world);
            let network_of = |namespace: &str| self.placement.network_of(&world, namespace);
            let _ = self.table.reassign(|_| true, network_of);
            let forbidden = Forbidden::of(&world, &self.routers.uplink_ranges());
            let _ = self.table.set_forbidden(forbidden.clone());
            self.steering.set_forbidden(forbidden);
            self.told = Some(Instant::now());
            self.set_defaults();
            self.tell_all_denied(&world);
            let ids: Vec<u64> = self.instances.keys().copied().collect();
            ids.into_iter().for_each(|id| self.replay(id));
            self.keep_networks();
            self.look_for_absent();
        }
    }
}

/// What an instance is to be told: in a router apart from the node, every Service that clients outside reach
/// has a port.
fn prepared(
    internal: &mut BTreeMap<NetworkName, InternalPorts>,
    reserved: &[(Protocol, u16)],
    table: &Table,
    network: &NetworkName,
    event: Event,
) -> Vec<Event> {
    if *network == NetworkName::default() {
        return vec![event];
    }
    let ports = internal.entry(network.clone()).or_insert_with(|| InternalPorts::new(reserved.to_vec()));
    match event {
        Event::SetService(mut service) => {
            let evicted: Vec<ServiceName> = ports.prepare(&mut service);
            let mut events = vec![Event::SetService(service)];
            for mut again in evicted.iter().filter_map(|name| table.handed(name)) {
                // Who is given a port takes none away.
                let _ = ports.prepare(&mut again);
                events.push(Event::SetService(Box::new(again)));
            }
            events
        }
        Event::DeleteService(name) => {
            ports.forget(&name);
            vec![Event::DeleteService(name)]
        }
        other => vec![other],
    }
}

/// Sends to one that runs. One that has stopped is started again at the next look, with everything.
pub(super) fn send(instance: &mut Instance, event: Event) {
    let own = instance.router.is_none();
    let Some(proxy) = &instance.running else { return };
    let event = match event {
        Event::SetNode(node) => Event::SetNode(Box::new(proxy.facts.node(own, &node))),
        other => other,
    };
    if proxy.send(event).is_err() {
        let network = &instance.network.name;
        tracing::error!(%network, "the service proxy stopped unexpectedly; restarting it");
        instance.running = None;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use knit_proxy::model::{Protocol, Service, ServicePort};

    use super::*;

    #[test]
    fn a_service_that_lost_its_port_got_external_ips_that_are_a_nodes() {
        let [node, outside] = [[192, 0, 2, 1], [203, 0, 113, 1]].map(IpAddr::from);
        let blue = NetworkName::from("blue");
        let mut table = Table::default();
        table.set_open(BTreeSet::from([blue.clone()]));
        table.set_forbidden(Forbidden::new([], [node]));
        let mut internal = BTreeMap::new();
        let mut told = |service: Service| -> Vec<Service> {
            let event = Event::SetService(Box::new(service));
            let (_, event) = table.take(event, |_| Some(blue.clone())).expect("an event");
            let events = prepared(&mut internal, &[], &table, &blue, event);
            let services = events.into_iter().map(|event| match event {
                Event::SetService(service) => *service,
                other => panic!("{other:?}"),
            });
            services.collect()
        };
        let port = |number| ServicePort::new("web", Protocol::Tcp, 80).node_port(number);
        let mut one = Service::new("sky/one").add_port(port(0));
        one.external_ips = Box::new([node, outside]);
        let first = told(one);
        assert_eq!((first.len(), &*first[0].external_ips), (1, &[outside][..]));
        let given = first[0].ports[0].node_port.expect("a port");
        // Another one names that port.
        let both = told(Service::new("sky/two").add_port(port(given.get())));
        assert_eq!((both.len(), both[1].name.to_string()), (2, "sky/one".to_owned()));
        assert_ne!(both[1].ports[0].node_port, Some(given));
        assert_eq!(*both[1].external_ips, [outside], "the node's own address is not its");
    }
}
