//! Kubernetes objects to the [`model`](crate::model).
//!
//! A [`Kubernetes`] reads a Service, EndpointSlice, Node or ServiceCIDR and makes an [`Event`] of it; the
//! object is not needed afterwards, and no part of it is kept (rule 7). What cannot be understood is left out
//! and named in a [`Problem`]; the rest of the object is served (rule 12).
//!
//! Fields that an API server would fill in are taken as it would fill them in, so that objects written by
//! hand in files mean the same as those in a cluster.

mod service;
mod slice;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::model::{Interner, NetworkName, NodeInfo, ObjectRef, Problem};
use crate::source::Event;

pub use knit_types::{parse_ip, parse_net};

/// The label that hands a Service to a proxy of another name (rule 1).
pub const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// The label of EndpointSlices that no proxy uses; their Service has no endpoints then, and rejects (rule 2).
pub const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
/// The label that says which Service an EndpointSlice belongs to (rule 5).
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// The label that says which zone a Node is in (rule 35).
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// The taint of a Node that is about to be removed (rule 55).
pub const LEAVING_TAINT: &str = "ToBeDeletedByClusterAutoscaler";
/// The annotation that says when the change happened that an EndpointSlice reports (rule 61).
pub const TRIGGER_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Which Network a namespace is in.
type NetworkOf = Box<dyn Fn(&str) -> NetworkName + Send>;

/// Makes model objects of Kubernetes ones.
#[derive(Default)]
pub struct Kubernetes {
    proxy_name: Option<Box<str>>,
    network_of: Option<NetworkOf>,
    interner: Interner,
}

/// What became of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// What to tell an engine: to set it, or to delete it if it is not ours (any more).
    pub event: Event,
    /// Why it is not ours.
    pub ignored: Option<Ignored>,
    /// What in it could not be used.
    pub problems: Vec<Problem>,
}

/// Why an object is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Ignored {
    /// Rule 1.
    #[error("it is for a service proxy with another name (label {PROXY_NAME_LABEL})")]
    OtherProxy,
    /// Rule 2.
    #[error("it has the label {HEADLESS_LABEL}")]
    HeadlessLabel,
    /// Rule 3.
    #[error("it has no cluster IP")]
    NoClusterIp,
    /// Rule 4.
    #[error("it is of type ExternalName")]
    ExternalName,
    /// Rule 5.
    #[error("it has no label {SERVICE_NAME_LABEL}")]
    NoServiceName,
    /// Rule 5.
    #[error("its addresses are not IP addresses")]
    NotIp,
}

impl Converted {
    /// The event, then one for each problem.
    pub fn into_events(self) -> impl Iterator<Item = Event> {
        std::iter::once(self.event).chain(self.problems.into_iter().map(Event::Problem))
    }
}

impl Kubernetes {
    /// For kube-proxy's part: all Services that no other proxy has.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Serves the Services with this name in their label instead (rule 1).
    #[must_use]
    pub fn named(mut self, proxy_name: &str) -> Self {
        self.proxy_name = Some(proxy_name.into());
        self
    }

    /// Says which Network a namespace's services are in. Without it, all are in the default one.
    #[must_use]
    pub fn networks(mut self, network_of: impl Fn(&str) -> NetworkName + Send + 'static) -> Self {
        self.network_of = Some(Box::new(network_of));
        self
    }

    /// Reads a Node.
    #[must_use]
    pub fn node(&mut self, object: &Node) -> (NodeInfo, Vec<Problem>) {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let mut problems = Problems::of("Node", name);
        let labels = object.metadata.labels.as_ref();
        let spec = object.spec.as_ref();
        let listed = object.status.as_ref().and_then(|s| s.addresses.as_ref());
        let mut addresses = Vec::new();
        for wanted in ["InternalIP", "ExternalIP"] {
            for (i, address) in listed.into_iter().flatten().enumerate().filter(|(_, a)| a.type_ == wanted) {
                let field = || format!("status.addresses[{i}].address");
                addresses.extend(problems.ip(&address.address, field));
            }
        }
        let cidrs = spec.and_then(|s| match &s.pod_cidrs {
            Some(list) if !list.is_empty() => Some(list.clone()),
            _ => s.pod_cidr.clone().map(|one| vec![one]),
        });
        let pod_ranges = (cidrs.iter().flatten().enumerate())
            .filter_map(|(i, cidr)| problems.net(cidr, || format!("spec.podCIDRs[{i}]")))
            .collect();
        let leaving = object.metadata.deletion_timestamp.is_some()
            || spec.and_then(|s| s.taints.as_ref()).is_some_and(|t| t.iter().any(|t| t.key == LEAVING_TAINT));
        let zone = labels.and_then(|l| l.get(ZONE_LABEL)).filter(|z| !z.is_empty());
        let node = NodeInfo {
            name: self.interner.get(name),
            zone: zone.map(|z| self.interner.get(z)),
            addresses,
            host_addresses: Vec::new(),
            pod_ranges,
            leaving,
        };
        (node, problems.list)
    }

    /// Reads a ServiceCIDR (rule 27).
    #[must_use]
    pub fn service_cidr(&mut self, object: &ServiceCIDR) -> Converted {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let mut problems = Problems::of("ServiceCIDR", name);
        let cidrs = object.spec.as_ref().and_then(|s| s.cidrs.as_ref());
        let ranges = (cidrs.into_iter().flatten().enumerate())
            .filter_map(|(i, cidr)| problems.net(cidr, || format!("spec.cidrs[{i}]")))
            .collect();
        let event = Event::SetServiceRanges { name: name.into(), ranges };
        Converted { event, ignored: None, problems: problems.list }
    }

    fn network(&self, namespace: &str) -> NetworkName {
        self.network_of.as_ref().map_or_else(NetworkName::default, |f| f(namespace))
    }
}

fn label<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Namespace and name; an object without a namespace is in `default`, as an API server would have it.
fn full_name(metadata: &ObjectMeta) -> (&str, &str) {
    let namespace = metadata.namespace.as_deref().filter(|n| !n.is_empty()).unwrap_or("default");
    (namespace, metadata.name.as_deref().unwrap_or_default())
}

/// Collects what is wrong with one object.
struct Problems {
    object: ObjectRef,
    list: Vec<Problem>,
}

impl Problems {
    fn of(kind: &'static str, name: &str) -> Self {
        Self { object: ObjectRef { kind, name: name.into() }, list: Vec::new() }
    }

    fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.list.push(Problem { object: self.object.clone(), field: field.into(), message: message.into() });
    }

    fn ip(&mut self, text: &str, field: impl Fn() -> String) -> Option<std::net::IpAddr> {
        let found = parse_ip(text);
        if found.is_none() {
            self.add(field(), format!("{text:?} is not an IP address; it is ignored"));
        }
        found
    }

    fn net(&mut self, text: &str, field: impl Fn() -> String) -> Option<ipnet::IpNet> {
        let found = parse_net(text.trim());
        if found.is_none() {
            self.add(field(), format!("{text:?} is not a valid CIDR such as 10.0.0.0/8; it is ignored"));
        }
        found
    }

    fn port(&mut self, number: i32, field: impl Fn() -> String) -> Option<u16> {
        let found = u16::try_from(number).ok().filter(|n| *n != 0);
        if found.is_none() {
            self.add(field(), format!("{number} is not a port number (1 to 65535); the port is ignored"));
        }
        found
    }
}
