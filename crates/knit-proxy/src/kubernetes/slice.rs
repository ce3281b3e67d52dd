//! EndpointSlice to [`EndpointGroup`]. Rules 2, 5, 11 to 14, 35, 61.

use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{Endpoint as ObjectEndpoint, EndpointPort, EndpointSlice};
use k8s_openapi::jiff::Timestamp;

use super::service::protocol;
use super::{
    Converted, HEADLESS_LABEL, Ignored, Kubernetes, Problems, SERVICE_NAME_LABEL, TRIGGER_ANNOTATION,
};
use super::{full_name, label};
use crate::model::{
    Conditions, Endpoint, EndpointGroup, Family, GroupName, GroupPort, Hints, Interner, ServiceName,
};
use crate::source::Event;

impl Kubernetes {
    /// Reads an EndpointSlice.
    #[must_use]
    pub fn slice(&mut self, object: &EndpointSlice) -> Converted {
        let (namespace, name) = full_name(&object.metadata);
        let name = GroupName::new(namespace, name);
        let ignore = |why| Converted {
            event: Event::DeleteGroup(name.clone()),
            ignored: Some(why),
            problems: Vec::new(),
        };
        let family = match object.address_type.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            _ => return ignore(Ignored::NotIp),
        };
        if label(&object.metadata, HEADLESS_LABEL).is_some() {
            return ignore(Ignored::HeadlessLabel);
        }
        let Some(service) = label(&object.metadata, SERVICE_NAME_LABEL).filter(|s| !s.is_empty()) else {
            return ignore(Ignored::NoServiceName);
        };
        let mut problems = Problems::of("EndpointSlice", name.as_str());
        let ports = (object.ports.iter().flatten().enumerate())
            .filter_map(|(i, port)| self.slice_port(i, port, &mut problems))
            .collect();
        let endpoints = (object.endpoints.iter().enumerate())
            .filter_map(|(i, e)| endpoint(i, e, family, &mut self.interner, &mut problems))
            .collect();
        let trigger = object.metadata.annotations.as_ref().and_then(|a| a.get(TRIGGER_ANNOTATION));
        let trigger = trigger.and_then(|t| t.parse::<Timestamp>().ok());
        let group = EndpointGroup {
            service: ServiceName::new(namespace, service),
            network: self.network(namespace),
            family,
            ports,
            endpoints,
            triggered_ms: trigger.and_then(|t| u64::try_from(t.as_millisecond()).ok()),
            name,
        };
        Converted { event: Event::SetGroup(Box::new(group)), ignored: None, problems: problems.list }
    }

    /// A port without a number means "all ports", and leads nowhere (rule 11). One without a name has the
    /// empty one: an API server writes that in, so a missing name is only ever seen in files.
    fn slice_port(&mut self, i: usize, port: &EndpointPort, problems: &mut Problems) -> Option<GroupPort> {
        let number = problems.port(port.port.filter(|p| *p != 0)?, || format!("ports[{i}].port"))?;
        let protocol = protocol(port.protocol.as_deref(), || format!("ports[{i}].protocol"), problems)?;
        Some(GroupPort {
            name: self.interner.get(port.name.as_deref().unwrap_or_default()),
            protocol,
            number,
        })
    }
}

fn endpoint(
    i: usize,
    object: &ObjectEndpoint,
    family: Family,
    interner: &mut Interner,
    problems: &mut Problems,
) -> Option<Endpoint> {
    let field = || format!("endpoints[{i}].addresses[0]");
    // Only the first address counts (rule 12).
    let Some(text) = object.addresses.first() else {
        problems.add(format!("endpoints[{i}].addresses"), "there is no address; the endpoint is ignored");
        return None;
    };
    let address = problems.ip(text, field)?;
    if Family::of(address) != family {
        problems.add(field(), format!("{text} is not an {family} address; the endpoint is ignored"));
        return None;
    }
    let conditions = object.conditions.as_ref();
    // Rule 13: what is missing counts as the favorable value.
    let conditions = Conditions {
        ready: conditions.and_then(|c| c.ready).unwrap_or(true),
        serving: conditions.and_then(|c| c.serving).unwrap_or(true),
        terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
    };
    let hints = object.hints.as_ref().and_then(|h| {
        let nodes: Box<[Arc<str>]> = h.for_nodes.iter().flatten().map(|n| interner.get(&n.name)).collect();
        let zones: Box<[Arc<str>]> = h.for_zones.iter().flatten().map(|z| interner.get(&z.name)).collect();
        (!nodes.is_empty() || !zones.is_empty()).then(|| Box::new(Hints { nodes, zones }))
    });
    let node = object.node_name.as_deref().filter(|n| !n.is_empty()).map(|n| interner.get(n));
    Some(Endpoint { address, conditions, node, hints })
}
