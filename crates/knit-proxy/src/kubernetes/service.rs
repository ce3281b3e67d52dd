//! Service to [`model::Service`](crate::model::Service). Rules 1, 3, 4, 18, 19, 22, 24, 39, 40, 44, 54.

use std::net::IpAddr;
use std::num::NonZeroU16;

use k8s_openapi::api::core::v1::{Service as Object, ServicePort as ObjectPort, ServiceSpec};

use super::{Converted, Ignored, Kubernetes, PROXY_NAME_LABEL, Problems, full_name, label, parse_net};
use crate::model::{Affinity, Family, Protocol, Service, ServiceName, ServicePort, TrafficPolicy};
use crate::source::Event;

impl Kubernetes {
    /// Reads a Service.
    #[must_use]
    pub fn service(&mut self, object: &Object) -> Converted {
        let (namespace, name) = full_name(&object.metadata);
        let name = ServiceName::new(namespace, name);
        let none = ServiceSpec::default();
        let spec = object.spec.as_ref().unwrap_or(&none);
        if let Some(ignored) = self.why_not(object, spec) {
            let event = Event::DeleteService(name);
            return Converted { event, ignored: Some(ignored), problems: Vec::new() };
        }
        let mut problems = Problems::of("Service", name.as_str());
        let mut service = Service::new("");
        service.network = self.network(namespace);
        let created = object.metadata.creation_timestamp.as_ref();
        service.created = created.and_then(|t| u64::try_from(t.0.as_second()).ok()).unwrap_or(0);
        for address in cluster_ips(spec, &mut problems) {
            service = service.cluster_ip(address);
        }
        service.external_ips =
            addresses(spec.external_ips.iter().flatten(), "spec.externalIPs", &mut problems);
        service.load_balancer_ips = load_balancer_ips(object, |mode| mode == "VIP", &mut problems);
        service.proxied_ips =
            load_balancer_ips(object, |mode| mode != "VIP", &mut Problems::of("Service", ""));
        service.source_ranges = source_ranges(spec, &mut problems);
        service.ports = (spec.ports.iter().flatten().enumerate())
            .filter_map(|(i, port)| self.service_port(i, port, &mut problems))
            .collect();
        if spec.internal_traffic_policy.as_deref() == Some("Local") {
            service.internal_policy = TrafficPolicy::Local;
        }
        let type_ = spec.type_.as_deref().unwrap_or("ClusterIP");
        let external = matches!(type_, "NodePort" | "LoadBalancer")
            || spec.external_ips.iter().flatten().next().is_some();
        if external && spec.external_traffic_policy.as_deref() == Some("Local") {
            service.external_policy = TrafficPolicy::Local;
        }
        service.affinity = affinity(spec, &mut problems);
        if type_ == "LoadBalancer" && service.external_policy == TrafficPolicy::Local {
            let port = spec.health_check_node_port.filter(|p| *p != 0);
            let port = port.and_then(|p| problems.port(p, || "spec.healthCheckNodePort".into()));
            service.health_check_port = port.and_then(NonZeroU16::new);
        }
        service.name = name;
        Converted { event: Event::SetService(Box::new(service)), ignored: None, problems: problems.list }
    }

    fn why_not(&self, object: &Object, spec: &ServiceSpec) -> Option<Ignored> {
        if label(&object.metadata, PROXY_NAME_LABEL) != self.proxy_name.as_deref() {
            return Some(Ignored::OtherProxy);
        }
        if spec.type_.as_deref() == Some("ExternalName") {
            return Some(Ignored::ExternalName);
        }
        let listed = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
        let mut real = listed.filter(|ip| !ip.is_empty() && *ip != "None");
        if real.next().is_none() || spec.cluster_ip.as_deref() == Some("None") {
            return Some(Ignored::NoClusterIp);
        }
        None
    }

    fn service_port(&mut self, i: usize, port: &ObjectPort, problems: &mut Problems) -> Option<ServicePort> {
        let number = problems.port(port.port, || format!("spec.ports[{i}].port"))?;
        let protocol = protocol(port.protocol.as_deref(), || format!("spec.ports[{i}].protocol"), problems)?;
        let node_port = port.node_port.filter(|p| *p != 0);
        let node_port = node_port.and_then(|p| problems.port(p, || format!("spec.ports[{i}].nodePort")));
        let name = self.interner.get(port.name.as_deref().unwrap_or_default());
        Some(ServicePort { name, protocol, port: number, node_port: node_port.and_then(NonZeroU16::new) })
    }
}

/// Reads a protocol; nothing means TCP.
pub(super) fn protocol(
    text: Option<&str>,
    field: impl Fn() -> String,
    problems: &mut Problems,
) -> Option<Protocol> {
    match text.filter(|t| !t.is_empty()) {
        None | Some("TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(other) => {
            problems.add(field(), format!("{other:?} must be TCP, UDP or SCTP; the port is ignored"));
            None
        }
    }
}

/// Each cluster IP counts for the family listed beside it (rule 18).
fn cluster_ips(spec: &ServiceSpec, problems: &mut Problems) -> Vec<IpAddr> {
    let families = spec.ip_families.as_deref().unwrap_or_default();
    let several = spec.cluster_ips.as_deref().unwrap_or_default();
    let list = if several.is_empty() { spec.cluster_ip.as_slice() } else { several };
    let mut found = Vec::new();
    for (i, text) in list.iter().enumerate().filter(|(_, text)| !text.is_empty() && *text != "None") {
        let Some(address) = problems.ip(text, || format!("spec.clusterIPs[{i}]")) else { continue };
        let family = Family::of(address).to_string();
        if !families.is_empty() && families.get(i) != Some(&family) {
            let message =
                format!("{text} is an {family} address, but ipFamilies[{i}] is not {family}; it is ignored");
            problems.add(format!("spec.clusterIPs[{i}]"), message);
            continue;
        }
        found.push(address);
    }
    found
}

fn addresses<'a>(
    list: impl Iterator<Item = &'a String>,
    field: &str,
    problems: &mut Problems,
) -> Box<[IpAddr]> {
    list.enumerate().filter_map(|(i, text)| problems.ip(text, || format!("{field}[{i}]"))).collect()
}

/// The addresses of one mode. Only those whose packets reach the nodes unchanged (`VIP`) are ours; names and
/// proxying load balancers are not (rule 22).
fn load_balancer_ips(object: &Object, of: fn(&str) -> bool, problems: &mut Problems) -> Box<[IpAddr]> {
    let status = object.status.as_ref().and_then(|s| s.load_balancer.as_ref());
    let ingress = status.and_then(|s| s.ingress.as_deref()).unwrap_or_default();
    (ingress.iter().enumerate())
        .filter(|(_, entry)| of(entry.ip_mode.as_deref().unwrap_or("VIP")))
        .filter_map(|(i, entry)| Some((i, entry.ip.as_deref().filter(|ip| !ip.is_empty())?)))
        .filter_map(|(i, ip)| problems.ip(ip, || format!("status.loadBalancer.ingress[{i}].ip")))
        .collect()
}

/// White space around a range is ignored (rule 44). A list in which nothing can be read lets nobody in.
fn source_ranges(spec: &ServiceSpec, problems: &mut Problems) -> Option<Box<[ipnet::IpNet]>> {
    let list: Vec<&String> = spec.load_balancer_source_ranges.iter().flatten().collect();
    if list.iter().all(|text| text.trim().is_empty()) {
        return None;
    }
    let mut found = Vec::new();
    for (i, text) in list.into_iter().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        match parse_net(text.trim()) {
            Some(range) => found.push(range),
            None => problems.add(
                format!("spec.loadBalancerSourceRanges[{i}]"),
                format!("{text:?} is not a valid CIDR such as 10.0.0.0/8; it allows no clients"),
            ),
        }
    }
    Some(found.into())
}

fn affinity(spec: &ServiceSpec, problems: &mut Problems) -> Option<Affinity> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref());
    let Some(seconds) = config.and_then(|c| c.timeout_seconds) else { return Some(Affinity::default()) };
    match u32::try_from(seconds) {
        Ok(timeout_seconds @ 1..=86_400) => Some(Affinity { timeout_seconds }),
        _ => {
            let message =
                format!("{seconds} must be between 1 and 86400; using {}", Affinity::DEFAULT_TIMEOUT_SECONDS);
            problems.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", message);
            Some(Affinity::default())
        }
    }
}
