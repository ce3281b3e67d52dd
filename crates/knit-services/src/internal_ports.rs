//! Ports of a router that stand for Services without a node port: pure bookkeeping.
//!
//! What is steered into a router arrives at the router's own address, and the port says which Service it is
//! for: its node port where it has one. A Service that clients outside reach by other addresses only
//! (external IPs, or a load balancer without node ports) is given a port for that, which nobody else sees.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use knit_proxy::model::{Protocol, Service, ServiceName};
use knit_runtime::routers::Routers;

/// The ports of one router.
#[derive(Debug)]
pub(crate) struct InternalPorts {
    /// Ports that nobody is given.
    reserved: Reserved,
    /// Who has a port.
    taken: HashMap<(Protocol, u16), PortOwner>,
    /// What was given to whom.
    given: HashMap<(ServiceName, Arc<str>, Protocol), u16>,
    next: u16,
}

#[derive(Debug)]
struct PortOwner {
    service: ServiceName,
    /// It is the node port that the Service itself names.
    named: bool,
}

const FIRST: u16 = 1024;
/// Where the API server gives Services their node ports, unless it is told another range: one that is given
/// here would be taken away again.
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30_000..=32_767;

/// Ports that are a runtime's own, such as that of the tunnels between nodes: no Service has them, neither on
/// a node nor in a router.
pub(crate) type Reserved = Vec<(Protocol, u16)>;

/// The ports that are a runtime's own.
pub(crate) fn reserved(routers: &dyn Routers) -> Reserved {
    routers.reserved_ports()
}

/// Whether clients outside reach a Service by more than node ports.
fn has_addresses(service: &Service) -> bool {
    !service.external_ips.is_empty() || !service.load_balancer_ips.is_empty()
}

/// Whether clients outside reach a Service at all; `open`: its external IPs count.
pub(crate) fn is_external(service: &Service, open: bool) -> bool {
    (open && !service.external_ips.is_empty())
        || !service.load_balancer_ips.is_empty()
        || service.ports.iter().any(|port| port.node_port.is_some())
}

impl InternalPorts {
    /// The ports of one router, of which some are not to be had.
    pub(crate) fn new(reserved: Reserved) -> Self {
        Self { reserved, taken: HashMap::new(), given: HashMap::new(), next: FIRST }
    }

    fn is_reserved(&self, protocol: Protocol, port: u16) -> bool {
        self.reserved.contains(&(protocol, port))
    }

    /// Gives a Service the ports that it lacks. Answers with the Services that lost theirs, because this one
    /// names it: they are to be prepared again.
    pub(crate) fn prepare(&mut self, service: &mut Service) -> Vec<ServiceName> {
        self.taken.retain(|_, owner| owner.service != service.name);
        let mut evicted = Vec::new();
        for port in &mut service.ports {
            port.node_port = port.node_port.filter(|number| !self.is_reserved(port.protocol, number.get()));
        }
        for port in &service.ports {
            let Some(number) = port.node_port else { continue };
            let owner = PortOwner { service: service.name.clone(), named: true };
            let before = self.taken.insert((port.protocol, number.get()), owner);
            if let Some(before) = before.filter(|before| !before.named) {
                self.given.retain(|(name, _, protocol), given| {
                    (name, *protocol, *given) != (&before.service, port.protocol, number.get())
                });
                evicted.push(before.service);
            }
        }
        if !has_addresses(service) {
            self.given.retain(|(name, _, _), _| *name != service.name);
            return evicted;
        }
        let name = service.name.clone();
        for port in service.ports.iter_mut().filter(|port| port.node_port.is_none()) {
            let key = (name.clone(), Arc::clone(&port.name), port.protocol);
            let wish = self.given.get(&key).copied();
            let number = wish
                .filter(|number| !self.taken.contains_key(&(port.protocol, *number)))
                .or_else(|| self.free(port.protocol));
            let Some(number) = number else { continue };
            self.taken.insert((port.protocol, number), PortOwner { service: name.clone(), named: false });
            self.given.insert(key, number);
            port.node_port = NonZeroU16::new(number);
        }
        evicted
    }

    /// A Service is gone.
    pub(crate) fn forget(&mut self, service: &ServiceName) {
        self.taken.retain(|_, owner| owner.service != *service);
        self.given.retain(|(name, _, _), _| name != service);
    }

    fn free(&mut self, protocol: Protocol) -> Option<u16> {
        for _ in FIRST..=u16::MAX {
            let number = self.next;
            self.next = number.checked_add(1).unwrap_or(FIRST);
            let free = !NODE_PORTS.contains(&number) && !self.is_reserved(protocol, number);
            if free && !self.taken.contains_key(&(protocol, number)) {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use knit_proxy::model::ServicePort;

    use super::*;

    fn service(name: &str, node_port: u16, addresses: bool) -> Service {
        let port = ServicePort::new("web", Protocol::Tcp, 80).node_port(node_port);
        let mut service = Service::new(name).add_port(port);
        if addresses {
            service.external_ips = Box::new([[203, 0, 113, 1].into()]);
        }
        service
    }

    fn prepared(ports: &mut InternalPorts, mut service: Service) -> (Option<u16>, Vec<String>) {
        let evicted = ports.prepare(&mut service);
        let evicted = evicted.iter().map(ToString::to_string).collect();
        (service.ports[0].node_port.map(NonZeroU16::get), evicted)
    }

    #[test]
    fn a_service_without_a_node_port_gets_one_and_keeps_it() {
        let mut ports = InternalPorts::new(Vec::new());
        assert_eq!(prepared(&mut ports, service("a/plain", 0, false)), (None, vec![]));
        assert_eq!(prepared(&mut ports, service("a/node", 30080, true)), (Some(30080), vec![]));
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(FIRST), vec![]));
        assert_eq!(prepared(&mut ports, service("a/two", 0, true)), (Some(FIRST + 1), vec![]));
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(FIRST), vec![]));
        ports.forget(&"a/one".into());
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(FIRST + 2), vec![]));
    }

    #[test]
    fn nobody_is_given_a_port_that_the_api_server_gives_others() {
        let mut ports = InternalPorts { next: 29_999, ..InternalPorts::new(Vec::new()) };
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(29_999), vec![]));
        assert_eq!(prepared(&mut ports, service("a/two", 0, true)), (Some(32_768), vec![]));
    }

    #[test]
    fn nobody_is_given_the_port_of_the_tunnels() {
        const TUNNEL_PORT: u16 = 4789;
        let mut ports = InternalPorts::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
        ports.next = TUNNEL_PORT;
        let udp = |node_port| {
            let mut service = service("a/udp", node_port, true);
            service.ports[0].protocol = Protocol::Udp;
            service
        };
        let given = prepared(&mut ports, udp(0)).0.expect("a port");
        assert_ne!(given, TUNNEL_PORT);
        let named = prepared(&mut ports, udp(TUNNEL_PORT)).0;
        assert_eq!(named, Some(given), "one that names it is reached by its addresses all the same");
        ports.next = TUNNEL_PORT;
        assert_eq!(prepared(&mut ports, service("a/tcp", 0, true)), (Some(TUNNEL_PORT), vec![]));
    }

    #[test]
    fn who_names_a_port_has_it() {
        let mut ports = InternalPorts::new(Vec::new());
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(FIRST), vec![]));
        let named = prepared(&mut ports, service("a/two", FIRST, false));
        assert_eq!(named, (Some(FIRST), vec!["a/one".to_owned()]));
        assert_eq!(prepared(&mut ports, service("a/one", 0, true)), (Some(FIRST + 1), vec![]));
        // The one who named it goes over to another.
        assert_eq!(prepared(&mut ports, service("a/two", 30000, false)), (Some(30000), vec![]));
        assert!(!ports.taken.contains_key(&(Protocol::Tcp, FIRST)));
    }
}
