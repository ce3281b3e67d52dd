//! Service ports that somebody else decided about: a [`View`] hands them on as they are.
//!
//! This is how a node view that was made in another process comes in
//! ([`Event::SetPort`](crate::source::Event)): the engine paces, retries and reports as with one of its own.
//! A service is either decided here, from a [`Service`](crate::model::Service) and its groups, or given; if
//! it is both, what is decided here counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::config::NodeSettings;
use super::output::{HealthCheck, PortKey, PortView};
use super::store::View;
use crate::diff::Store;
use crate::model::{Family, Protocol, ServiceName};

/// All that was given.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub settings: Option<NodeSettings>,
    ports: Store<PortKey, Arc<PortView>>,
    checks: Store<ServiceName, HealthCheck>,
}

/// What was given of one service.
#[derive(Debug, Clone, Default)]
pub(super) struct GivenService {
    pub ports: BTreeMap<PortKey, Arc<PortView>>,
    pub health_check: Option<HealthCheck>,
}

impl Given {
    pub fn service(&self, name: &ServiceName) -> GivenService {
        let first =
            PortKey { service: name.clone(), port: "".into(), protocol: Protocol::Tcp, family: Family::V4 };
        let ports = self.ports.range(first..).take_while(|(key, _)| key.service == *name);
        GivenService {
            ports: ports.map(|(key, port)| (key.clone(), Arc::clone(port))).collect(),
            health_check: self.checks.get(name).cloned(),
        }
    }

    /// Whether something was given that [`take`](Self::take) has not said yet.
    pub fn is_dirty(&self) -> bool {
        self.ports.is_dirty() || self.checks.is_dirty()
    }

    /// The services of which something else is given than at the last call.
    pub fn take(&mut self) -> impl Iterator<Item = ServiceName> + use<> {
        let ports = self.ports.take().into_iter().map(|delta| delta.into_key().service);
        ports.chain(self.checks.take().into_iter().map(crate::diff::Delta::into_key))
    }

    pub fn list_start(&mut self) {
        self.ports.begin();
        self.checks.begin();
    }

    pub fn list_done(&mut self) {
        self.ports.sweep();
        self.checks.sweep();
    }
}

impl View {
    /// Adds or replaces a service port that was decided elsewhere.
    pub fn set_port(&mut self, key: PortKey, port: Arc<PortView>) {
        self.given.ports.set(key, port);
    }

    /// Removes a service port that was decided elsewhere.
    pub fn delete_port(&mut self, key: &PortKey) {
        self.given.ports.delete(key);
    }

    /// Adds or replaces a health check that was decided elsewhere.
    pub fn set_health_check(&mut self, name: ServiceName, check: HealthCheck) {
        self.given.checks.set(name, check);
    }

    /// Removes a health check that was decided elsewhere.
    pub fn delete_health_check(&mut self, name: &ServiceName) {
        self.given.checks.delete(name);
    }

    /// Says what holds for the node, in place of what follows from its [`NodeInfo`](crate::model::NodeInfo).
    pub fn set_settings(&mut self, settings: NodeSettings) {
        self.node_dirty |= self.given.settings.as_ref() != Some(&settings);
        self.given.settings = Some(settings);
    }

    /// Says that all that was given up to now is the state with this number, and when its changes were
    /// triggered.
    pub fn set_revision(&mut self, revision: u64, triggered_ms: Vec<u64>) {
        self.triggered_ms.extend(triggered_ms);
        self.revision = revision;
        // There is something to answer, even if nothing changed.
        self.node_dirty = true;
    }
}
