//! Pods, namespaces and nodes.

use k8s_openapi::api::core::v1 as core;

use super::{Converted, Problems, full_name, labels, parse_ip};
use crate::model::{Attachment, DEFAULT_NETWORK, NamedPort, Namespace, Node, Pod, PodKey, Protocol};

/// Reads a Pod. `attachments` are its interfaces; without any, it has its podIPs in the default Network.
#[must_use]
pub fn pod(object: &core::Pod, attachments: Option<Vec<Attachment>>) -> Converted<Pod> {
    let (namespace, name) = full_name(&object.metadata);
    let mut problems = Problems::of("Pod", format!("{namespace}/{name}"));
    let (spec, status) = (object.spec.as_ref(), object.status.as_ref());
    let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
    let attachments = attachments.unwrap_or_else(|| {
        let listed = status.and_then(|s| s.pod_ips.as_ref()).into_iter().flatten().map(|ip| ip.ip.as_str());
        let mut texts: Vec<&str> = listed.collect();
        if texts.is_empty() {
            texts.extend(status.and_then(|s| s.pod_ip.as_deref()).filter(|ip| !ip.is_empty()));
        }
        let mut addresses = Vec::new();
        for (i, text) in texts.into_iter().enumerate() {
            match parse_ip(text) {
                Some(address) => addresses.push(address),
                None => {
                    let message = format!("{text:?} is not an IP address; it is ignored");
                    problems.add(format!("status.podIPs[{i}].ip"), message);
                }
            }
        }
        vec![Attachment { network: DEFAULT_NETWORK.into(), primary: true, addresses: addresses.into() }]
    });
    let pod = Pod {
        key: PodKey::new(namespace, name),
        uid: object.metadata.uid.as_deref().unwrap_or_default().into(),
        created: object.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second()),
        node: spec.and_then(|s| s.node_name.as_deref()).unwrap_or_default().into(),
        labels: labels(&object.metadata),
        known_labels: None,
        ports: spec.map(named_ports).unwrap_or_default().into(),
        attachments: attachments.into(),
        host_network: spec.and_then(|s| s.host_network).unwrap_or(false),
        finished: matches!(phase, "Succeeded" | "Failed"),
    };
    Converted { object: Some(pod), problems: problems.into_list() }
}

/// The ports with names, of containers and of init containers that go on running (rule 21).
fn named_ports(spec: &core::PodSpec) -> Vec<NamedPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|c| c.ports.iter().flatten());
    ports
        .filter_map(|port| {
            Some(NamedPort {
                name: port.name.as_deref().filter(|n| !n.is_empty())?.into(),
                protocol: Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"))?,
                number: u16::try_from(port.container_port).ok().filter(|n| *n != 0)?,
            })
        })
        .collect()
}

/// Reads a Namespace.
#[must_use]
pub fn namespace(object: &core::Namespace) -> Namespace {
    Namespace::new(object.metadata.name.as_deref().unwrap_or_default(), labels(&object.metadata))
}

/// Reads a Node.
#[must_use]
pub fn node(object: &core::Node) -> Node {
    let listed = object.status.as_ref().and_then(|s| s.addresses.as_ref()).into_iter().flatten();
    // Names are listed too, and are not addresses.
    let mut addresses: Vec<_> = listed.filter_map(|a| parse_ip(&a.address)).collect();
    addresses.sort_unstable();
    addresses.dedup();
    Node {
        name: object.metadata.name.as_deref().unwrap_or_default().into(),
        labels: labels(&object.metadata),
        addresses: addresses.into(),
    }
}
