//! View types to messages.

use super::proto;
use crate::model::{Family, Protocol, ServiceName};
use crate::view::{
    Action, Frontend, FrontendKind, HealthCheck, Masquerade, NodePortMatch, NodeSettings, PodTraffic,
    PortKey, PortView, Route, Scope, Sources, Target,
};

fn texts<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

fn family(family: Family) -> i32 {
    match family {
        Family::V4 => proto::Family::Ipv4,
        Family::V6 => proto::Family::Ipv6,
    }
    .into()
}

pub(super) fn key(key: &PortKey) -> proto::PortKey {
    let protocol = match key.protocol {
        Protocol::Tcp => proto::Protocol::Tcp,
        Protocol::Udp => proto::Protocol::Udp,
        Protocol::Sctp => proto::Protocol::Sctp,
    };
    proto::PortKey {
        namespace: key.service.namespace().to_owned(),
        service: key.service.name().to_owned(),
        port: key.port.to_string(),
        protocol: protocol.into(),
        family: family(key.family),
    }
}

pub(super) fn port(port_key: &PortKey, view: &PortView) -> proto::Port {
    proto::Port {
        key: Some(key(port_key)),
        frontends: view.frontends.iter().map(frontend).collect(),
        cluster: endpoints(&view.cluster),
        local: endpoints(&view.local),
        affinity_seconds: view.affinity_seconds.unwrap_or(0),
        serving: endpoints(&view.serving),
    }
}

fn endpoints(targets: &[Target]) -> Vec<proto::Endpoint> {
    let endpoint =
        |t: &Target| proto::Endpoint { address: t.address.to_string(), port: t.port.into(), local: t.local };
    targets.iter().map(endpoint).collect()
}

fn frontend(frontend: &Frontend) -> proto::Frontend {
    let kind = match frontend.kind {
        FrontendKind::ClusterIp => proto::frontend::Kind::ClusterIp,
        FrontendKind::LoadBalancerIp => proto::frontend::Kind::LoadBalancerIp,
        FrontendKind::ExternalIp => proto::frontend::Kind::ExternalIp,
        FrontendKind::NodePort => proto::frontend::Kind::NodePort,
    };
    proto::Frontend {
        kind: kind.into(),
        address: frontend.address.map(|a| a.to_string()).unwrap_or_default(),
        port: frontend.port.into(),
        route: Some(route(frontend.route)),
        from_pods: frontend.from_pods.map(route),
        from_node: frontend.from_node.map(route),
        sources: match &frontend.sources {
            Sources::Any => None,
            Sources::Only { ranges, and_itself } => {
                Some(proto::Sources { ranges: texts(ranges), and_itself: *and_itself })
            }
        },
    }
}

fn route(route: Route) -> proto::Route {
    let action = match route.action {
        Action::Endpoints(Scope::Cluster) => proto::route::Action::ClusterEndpoints,
        Action::Endpoints(Scope::Local) => proto::route::Action::LocalEndpoints,
        Action::Reject => proto::route::Action::Reject,
        Action::Drop => proto::route::Action::Drop,
    };
    let masquerade = match route.masquerade {
        Masquerade::HairpinOnly => proto::route::Masquerade::HairpinOnly,
        Masquerade::NotPods => proto::route::Masquerade::NotPods,
        Masquerade::All => proto::route::Masquerade::All,
    };
    proto::Route { action: action.into(), masquerade: masquerade.into() }
}

pub(super) fn node(settings: &NodeSettings) -> proto::NodeSettings {
    let served = || Family::ALL.into_iter().filter(|f| *settings.families.get(*f));
    let node_ports = served().map(|f| {
        let (any, addresses) = match settings.node_ports.get(f) {
            NodePortMatch::AnyLocal => (true, Vec::new()),
            NodePortMatch::Only(list) => (false, texts(list)),
        };
        proto::NodePortAddresses { family: family(f), any, addresses }
    });
    let pods = served().filter_map(|f| {
        let by = match settings.pods.get(f) {
            PodTraffic::Unknown => return None,
            PodTraffic::Sources(list) => {
                proto::pod_traffic::By::Sources(proto::Ranges { ranges: texts(list) })
            }
            PodTraffic::Bridge(name) => proto::pod_traffic::By::Bridge(name.to_string()),
            PodTraffic::InterfacePrefix(prefix) => {
                proto::pod_traffic::By::InterfacePrefix(prefix.to_string())
            }
        };
        Some(proto::PodTraffic { family: family(f), by: Some(by) })
    });
    proto::NodeSettings {
        name: settings.name.to_string(),
        node_ports: node_ports.collect(),
        pods: pods.collect(),
        service_ranges: texts(&settings.service_ranges),
        exempt: texts(&settings.exempt),
        primary: Family::ALL
            .into_iter()
            .filter_map(|f| *settings.primary.get(f))
            .map(|a| a.to_string())
            .collect(),
        masquerade_all: settings.masquerade_all,
        leaving: settings.leaving,
    }
}

pub(super) fn health_check(service: &ServiceName, check: &HealthCheck) -> proto::HealthCheck {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    proto::HealthCheck {
        service: service.to_string(),
        port: check.port.get().into(),
        local_ready_ipv4: count(check.local_ready.v4),
        local_ready_ipv6: count(check.local_ready.v6),
    }
}
