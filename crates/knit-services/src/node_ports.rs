//! Which Service has which node port: a pod that got the same number as its host port would take what is
//! meant for it.

use std::collections::HashMap;

use knit_proxy::model::{Protocol, ServiceName};
use knit_proxy::source::Event;

/// The node ports of all Services, whoever serves them.
#[derive(Debug, Default)]
pub(crate) struct NodePorts {
    owners: HashMap<(Protocol, u16), ServiceName>,
    of: HashMap<ServiceName, Vec<(Protocol, u16)>>,
}

impl NodePorts {
    /// Takes in what a source says.
    pub(crate) fn hear(&mut self, event: &Event) {
        match event {
            Event::SetService(service) => {
                self.forget(&service.name);
                let named = service.ports.iter();
                let ports: Vec<(Protocol, u16)> =
                    named.filter_map(|port| Some((port.protocol, port.node_port?.get()))).collect();
                if !ports.is_empty() {
                    self.owners.extend(ports.iter().map(|port| (*port, service.name.clone())));
                    self.of.insert(service.name.clone(), ports);
                }
            }
            Event::DeleteService(name) => self.forget(name),
            _ => {}
        }
    }

    /// Whose a port is.
    pub(crate) fn owner(&self, protocol: Protocol, port: u16) -> Option<&ServiceName> {
        self.owners.get(&(protocol, port))
    }

    fn forget(&mut self, name: &ServiceName) {
        for port in self.of.remove(name).unwrap_or_default() {
            if self.owners.get(&port) == Some(name) {
                self.owners.remove(&port);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use knit_proxy::model::{Service, ServicePort};

    use super::*;

    #[test]
    fn a_port_is_its_services_until_that_names_another_or_goes() {
        let mut ports = NodePorts::default();
        let set = |number| {
            let port = ServicePort::new("web", Protocol::Tcp, 80).node_port(number);
            Event::SetService(Box::new(Service::new("shop/web").add_port(port)))
        };
        let owner = |ports: &NodePorts, number| ports.owner(Protocol::Tcp, number).map(ToString::to_string);
        ports.hear(&set(30080));
        assert_eq!(owner(&ports, 30080).as_deref(), Some("shop/web"));
        assert_eq!(ports.owner(Protocol::Udp, 30080), None);
        ports.hear(&set(30081));
        assert_eq!((owner(&ports, 30080), owner(&ports, 30081).as_deref()), (None, Some("shop/web")));
        ports.hear(&Event::DeleteService("shop/web".into()));
        assert_eq!(owner(&ports, 30081), None);
        assert!(ports.of.is_empty());
    }
}
