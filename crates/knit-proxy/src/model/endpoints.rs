//! Endpoints: the places that answer for a service, in groups that change together.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Family, GroupName, NetworkName, Protocol, ServiceName};

/// Some of a service's endpoints. A service may have any number of groups (rule 8); one change touches one
/// group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointGroup {
    /// The group's name.
    pub name: GroupName,
    /// The service that its endpoints answer for (rule 5).
    pub service: ServiceName,
    /// The Network its endpoints are in.
    pub network: NetworkName,
    /// The family of its addresses.
    pub family: Family,
    /// The ports on which every endpoint of this group answers.
    pub ports: Box<[GroupPort]>,
    /// The endpoints.
    pub endpoints: Box<[Endpoint]>,
    /// When the change happened that led to this state, in milliseconds since 1970, where it is known; for
    /// the latency that `network_programming_duration_seconds` measures (rule 61).
    pub triggered_ms: Option<u64>,
}

/// A port on which endpoints answer. The number is theirs, not the service's (rule 11).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPort {
    /// The name of the service's port it belongs to.
    pub name: Arc<str>,
    /// The protocol of the service's port it belongs to.
    pub protocol: Protocol,
    /// The number to send to.
    pub number: u16,
}

/// One place that answers for a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its address.
    pub address: IpAddr,
    /// In which state it is.
    pub conditions: Conditions,
    /// The node it runs on, if it runs on one (rule 15).
    pub node: Option<Arc<str>>,
    /// Who should prefer it, where somebody said so (rule 35).
    pub hints: Option<Box<Hints>>,
}

/// In which state an endpoint is (rule 13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Conditions {
    /// It should get new traffic.
    pub ready: bool,
    /// It can answer, whether or not it should get new traffic.
    pub serving: bool,
    /// It is on its way out.
    pub terminating: bool,
}

/// Which nodes and zones should prefer an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hints {
    /// Names of nodes.
    pub nodes: Box<[Arc<str>]>,
    /// Names of zones.
    pub zones: Box<[Arc<str>]>,
}

impl EndpointGroup {
    /// A group of ready endpoints without a node, all answering on one unnamed port.
    #[must_use]
    pub fn of_addresses(
        name: impl Into<GroupName>,
        service: impl Into<ServiceName>,
        protocol: Protocol,
        number: u16,
        addresses: &[IpAddr],
    ) -> Self {
        Self {
            name: name.into(),
            service: service.into(),
            network: NetworkName::default(),
            family: addresses.first().map_or(Family::V4, |a| Family::of(*a)),
            ports: Box::new([GroupPort { name: "".into(), protocol, number }]),
            endpoints: addresses.iter().map(|a| Endpoint::new(*a)).collect(),
            triggered_ms: None,
        }
    }
}

impl Endpoint {
    /// A ready endpoint that runs on no known node.
    #[must_use]
    pub fn new(address: IpAddr) -> Self {
        Self { address, conditions: Conditions::READY, node: None, hints: None }
    }

    /// Says which node it runs on.
    #[must_use]
    pub fn on(mut self, node: &str) -> Self {
        self.node = Some(node.into());
        self
    }

    /// Says in which state it is.
    #[must_use]
    pub fn state(mut self, conditions: Conditions) -> Self {
        self.conditions = conditions;
        self
    }

    /// Says who should prefer it.
    #[must_use]
    pub fn hints(mut self, nodes: &[&str], zones: &[&str]) -> Self {
        let list = |names: &[&str]| names.iter().map(|n| Arc::from(*n)).collect();
        self.hints = Some(Box::new(Hints { nodes: list(nodes), zones: list(zones) }));
        self
    }
}

impl Conditions {
    /// Ready and serving: the normal state.
    pub const READY: Self = Self { ready: true, serving: true, terminating: false };
    /// On its way out, but still answering.
    pub const SERVING_TERMINATING: Self = Self { ready: false, serving: true, terminating: true };
    /// On its way out and not answering.
    pub const TERMINATING: Self = Self { ready: false, serving: false, terminating: true };
    /// There, but not answering.
    pub const NOT_READY: Self = Self { ready: false, serving: false, terminating: false };
}
