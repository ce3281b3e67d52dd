//! Messages to view types. Whatever another process sends is looked at before it is believed.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;

use super::proto;
use crate::model::{Family, PerFamily, Protocol, ServiceName};
use crate::view::{
    Action, Frontend, FrontendKind, HealthCheck, Masquerade, NodePortMatch, NodeSettings, PodTraffic,
    PortKey, PortView, Route, Scope, Sources, Target, Targets,
};

/// A message that cannot be used: which field, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Unusable {
    /// The field, as the .proto file names it.
    pub field: &'static str,
    /// What is wrong with it, and what it should be.
    pub message: String,
}

type Result<T> = std::result::Result<T, Unusable>;

fn unusable<T>(field: &'static str, message: impl Into<String>) -> Result<T> {
    Err(Unusable { field, message: message.into() })
}

fn parse<T: FromStr>(field: &'static str, what: &str, text: &str) -> Result<T> {
    text.parse().or_else(|_| unusable(field, format!("{text:?} is not a valid {what}")))
}

fn list<T: FromStr, C: FromIterator<T>>(field: &'static str, what: &str, texts: &[String]) -> Result<C> {
    texts.iter().map(|text| parse(field, what, text)).collect()
}

fn number(field: &'static str, number: u32) -> Result<u16> {
    match u16::try_from(number) {
        Ok(number @ 1..) => Ok(number),
        _ => unusable(field, format!("{number} is not a valid port; ports are 1 to 65535")),
    }
}

fn family(field: &'static str, family: i32) -> Result<Family> {
    match proto::Family::try_from(family) {
        Ok(proto::Family::Ipv4) => Ok(Family::V4),
        Ok(proto::Family::Ipv6) => Ok(Family::V6),
        _ => unusable(field, format!("{family} is not a known address family")),
    }
}

fn service(field: &'static str, namespace: &str, name: &str) -> Result<ServiceName> {
    let fits = |part: &str| !part.is_empty() && part.len() <= 253 && !part.contains('/');
    if fits(namespace) && fits(name) {
        return Ok(ServiceName::new(namespace, name));
    }
    unusable(field, format!("{namespace:?} and {name:?} are not the namespace and name of a service"))
}

/// The key of a service port.
///
/// # Errors
/// If a part of it makes no sense.
pub fn key(key: &proto::PortKey) -> Result<PortKey> {
    let protocol = match proto::Protocol::try_from(key.protocol) {
        Ok(proto::Protocol::Tcp) => Protocol::Tcp,
        Ok(proto::Protocol::Udp) => Protocol::Udp,
        Ok(proto::Protocol::Sctp) => Protocol::Sctp,
        _ => return unusable("key.protocol", format!("{} is not a known protocol", key.protocol)),
    };
    Ok(PortKey {
        service: service("key.service", &key.namespace, &key.service)?,
        port: key.port.as_str().into(),
        protocol,
        family: family("key.family", key.family)?,
    })
}

/// A service port.
///
/// # Errors
/// If a part of it makes no sense.
pub fn port(port: &proto::Port) -> Result<(PortKey, PortView)> {
    let Some(of) = &port.key else { return unusable("key", "it is missing") };
    let key = key(of)?;
    let cluster = targets("cluster", key.family, &port.cluster)?;
    let local = targets("local", key.family, &port.local)?;
    let frontend = |from: &proto::Frontend| frontend(from, key.family, [cluster.len(), local.len()]);
    let mut frontends: Box<[Frontend]> = port.frontends.iter().map(frontend).collect::<Result<_>>()?;
    frontends.sort_unstable();
    let view = PortView {
        frontends,
        cluster,
        local,
        affinity_seconds: (port.affinity_seconds != 0).then_some(port.affinity_seconds),
        serving: targets("serving", key.family, &port.serving)?,
    };
    Ok((key, view))
}

fn address(field: &'static str, family: Family, text: &str) -> Result<IpAddr> {
    let address: IpAddr = parse(field, "IP address", text)?;
    if Family::of(address) == family {
        return Ok(address);
    }
    unusable(field, format!("{address} is not of the key's family {family}"))
}

fn targets(field: &'static str, family: Family, list: &[proto::Endpoint]) -> Result<Targets> {
    let target = |from: &proto::Endpoint| {
        let address = address(field, family, &from.address)?;
        Ok(Target { address, port: number(field, from.port)?, local: from.local })
    };
    let mut found: Vec<Target> = list.iter().map(target).collect::<Result<_>>()?;
    found.sort_unstable();
    found.dedup_by_key(|target| target.socket());
    Ok(found.into())
}

fn frontend(from: &proto::Frontend, family: Family, endpoints: [usize; 2]) -> Result<Frontend> {
    let kind = match proto::frontend::Kind::try_from(from.kind) {
        Ok(proto::frontend::Kind::ClusterIp) => FrontendKind::ClusterIp,
        Ok(proto::frontend::Kind::LoadBalancerIp) => FrontendKind::LoadBalancerIp,
        Ok(proto::frontend::Kind::ExternalIp) => FrontendKind::ExternalIp,
        Ok(proto::frontend::Kind::NodePort) => FrontendKind::NodePort,
        _ => return unusable("frontends.kind", format!("{} is not a known kind of frontend", from.kind)),
    };
    let address = match kind {
        FrontendKind::NodePort if from.address.is_empty() => None,
        _ => Some(address("frontends.address", family, &from.address)?),
    };
    let Some(main) = &from.route else { return unusable("frontends.route", "it is missing") };
    let route = |from: &proto::Route| route(*from, endpoints);
    let sources = match &from.sources {
        None => Sources::Any,
        Some(sources) => Sources::Only {
            ranges: ranges("frontends.sources", &sources.ranges, Some(family))?.into(),
            and_itself: sources.and_itself,
        },
    };
    Ok(Frontend {
        kind,
        address,
        port: number("frontends.port", from.port)?,
        route: route(main)?,
        from_pods: from.from_pods.as_ref().map(route).transpose()?,
        from_node: from.from_node.as_ref().map(route).transpose()?,
        sources,
    })
}

fn route(from: proto::Route, [cluster, local]: [usize; 2]) -> Result<Route> {
    let some = |scope, endpoints: usize| {
        if endpoints > 0 {
            return Ok(Action::Endpoints(scope));
        }
        unusable("frontends.route", "it leads to endpoints, but there are none")
    };
    let action = match proto::route::Action::try_from(from.action) {
        Ok(proto::route::Action::ClusterEndpoints) => some(Scope::Cluster, cluster)?,
        Ok(proto::route::Action::LocalEndpoints) => some(Scope::Local, local)?,
        Ok(proto::route::Action::Reject) => Action::Reject,
        Ok(proto::route::Action::Drop) => Action::Drop,
        _ => return unusable("frontends.route.action", format!("{} is not a known action", from.action)),
    };
    let masquerade = match proto::route::Masquerade::try_from(from.masquerade) {
        Ok(proto::route::Masquerade::HairpinOnly) => Masquerade::HairpinOnly,
        Ok(proto::route::Masquerade::NotPods) => Masquerade::NotPods,
        Ok(proto::route::Masquerade::All) => Masquerade::All,
        _ => {
            return unusable(
                "frontends.route.masquerade",
                format!("{} is not a known value", from.masquerade),
            );
        }
    };
    Ok(Route { action, masquerade })
}

fn ranges(field: &'static str, texts: &[String], of: Option<Family>) -> Result<Vec<IpNet>> {
    let mut found: Vec<IpNet> = list(field, "range of addresses", texts)?;
    if let Some(other) = found.iter().find(|range| of.is_some_and(|family| Family::of_net(**range) != family))
    {
        return unusable(field, format!("{other} is of the other family"));
    }
    found.sort_unstable();
    Ok(found)
}

/// The node's settings.
///
/// # Errors
/// If a part of them makes no sense.
pub fn node(from: &proto::NodeSettings) -> Result<NodeSettings> {
    let mut settings = NodeSettings {
        name: from.name.as_str().into(),
        service_ranges: ranges("service_ranges", &from.service_ranges, None)?.into(),
        exempt: list::<IpAddr, _>("exempt", "IP address", &from.exempt)?,
        masquerade_all: from.masquerade_all,
        leaving: from.leaving,
        ..NodeSettings::default()
    };
    for node_ports in &from.node_ports {
        let family = family("node_ports.family", node_ports.family)?;
        // A family that is served has an entry here.
        *settings.families.get_mut(family) = true;
        *settings.node_ports.get_mut(family) = if node_ports.any {
            NodePortMatch::AnyLocal
        } else {
            let one = |text: &String| address("node_ports.addresses", family, text);
            NodePortMatch::Only(node_ports.addresses.iter().map(one).collect::<Result<_>>()?)
        };
    }
    for pods in &from.pods {
        let family = family("pods.family", pods.family)?;
        *settings.pods.get_mut(family) = match &pods.by {
            None => PodTraffic::Unknown,
            Some(proto::pod_traffic::By::Sources(sources)) => {
                PodTraffic::Sources(ranges("pods.sources", &sources.ranges, Some(family))?.into())
            }
            Some(proto::pod_traffic::By::Bridge(name)) => PodTraffic::Bridge(Arc::from(name.as_str())),
            Some(proto::pod_traffic::By::InterfacePrefix(prefix)) => {
                PodTraffic::InterfacePrefix(Arc::from(prefix.as_str()))
            }
        };
    }
    let primary: Vec<IpAddr> = list("primary", "IP address", &from.primary)?;
    settings.primary =
        PerFamily::from_fn(|family| primary.iter().copied().find(|address| Family::of(*address) == family));
    Ok(settings)
}

/// A health check, and whose it is.
///
/// # Errors
/// If a part of it makes no sense.
pub fn health_check(from: &proto::HealthCheck) -> Result<(ServiceName, HealthCheck)> {
    let name = service_name(&from.service)?;
    let Some(port) = NonZeroU16::new(number("port", from.port)?) else {
        return unusable("port", "0 is not a valid port");
    };
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let local_ready = PerFamily { v4: count(from.local_ready_ipv4), v6: count(from.local_ready_ipv6) };
    Ok((name, HealthCheck { port, local_ready }))
}

/// A service's name, written as namespace/name.
///
/// # Errors
/// If it is none.
pub fn service_name(text: &str) -> Result<ServiceName> {
    let (namespace, name) = text.split_once('/').unwrap_or(("", text));
    service("service", namespace, name)
}
