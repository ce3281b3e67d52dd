//! Tests of the node view. Each names the rules it proves.

mod frontends;
mod incremental;
mod select;

use std::net::IpAddr;

use super::*;
use crate::model::{Endpoint, EndpointGroup, Family, GroupPort, NodeInfo, Protocol, Service, ServicePort};

/// The node all tests run on.
fn node() -> NodeInfo {
    NodeInfo {
        zone: Some("zone-a".into()),
        addresses: vec![ip("198.51.100.1"), ip("2001:db8::1")],
        ..NodeInfo::new("here")
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a test's address")
}

/// A TCP service `ns/svc` with the cluster IP 10.0.0.1:80.
fn service() -> Service {
    Service::new("ns/svc").cluster_ip(ip("10.0.0.1")).port(Protocol::Tcp, 80)
}

/// The same, with node port 30080, an external IP and a load-balancer IP.
fn everywhere() -> Service {
    let mut service = Service::new("ns/svc")
        .cluster_ip(ip("10.0.0.1"))
        .add_port(ServicePort::new("", Protocol::Tcp, 80).node_port(30080));
    service.external_ips = Box::new([ip("203.0.113.1")]);
    service.load_balancer_ips = Box::new([ip("203.0.113.2")]);
    service
}

/// A group of `ns/svc` with one unnamed TCP port 8080.
fn group(endpoints: &[Endpoint]) -> EndpointGroup {
    EndpointGroup {
        endpoints: endpoints.into(),
        family: endpoints.first().map_or(Family::V4, |e| Family::of(e.address)),
        ..EndpointGroup::of_addresses("ns/svc-1", "ns/svc", Protocol::Tcp, 8080, &[])
    }
}

fn named_group(name: &str, ports: &[(&str, Protocol, u16)], endpoints: &[Endpoint]) -> EndpointGroup {
    EndpointGroup {
        name: name.into(),
        ports: ports
            .iter()
            .map(|(name, protocol, number)| GroupPort {
                name: (*name).into(),
                protocol: *protocol,
                number: *number,
            })
            .collect(),
        ..group(endpoints)
    }
}

fn view_of(config: ViewConfig, service: Service, groups: &[EndpointGroup]) -> View {
    let mut view = View::new(config, node());
    view.set_service(service);
    groups.iter().cloned().for_each(|g| view.set_group(g));
    view.take_changes();
    view
}

fn key(port: &str, protocol: Protocol, family: Family) -> PortKey {
    PortKey { service: "ns/svc".into(), port: port.into(), protocol, family }
}

/// The one IPv4 TCP port of `ns/svc`.
fn port(view: &View) -> &PortView {
    &view.current().ports[&key("", Protocol::Tcp, Family::V4)]
}

fn text(targets: &[Target]) -> Vec<String> {
    targets.iter().map(ToString::to_string).collect()
}

fn frontend(view: &PortView, kind: FrontendKind) -> &Frontend {
    view.frontends.iter().find(|f| f.kind == kind).expect("the frontend")
}
