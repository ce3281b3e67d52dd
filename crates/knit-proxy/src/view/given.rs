//! Service ports that somebody else decided about: a [`View`] hands them on as they are.
//!
//! This is how a node view that was made in another process comes in ([`Event::SetPort`](crate::source::Event)): the
//! engine paces, retries and reports as with one of its own. A service is either decided here, from a
//! [`Service`](crate::model::Service) and its groups, or given; if it is both, what is decided here counts.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use super::config::NodeSettings;
use super::output::{HealthCheck, PortKey, PortView};
use super::store::View;
use crate::model::ServiceName;

/// All that was given.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub settings: Option<NodeSettings>,
    services: BTreeMap<ServiceName, GivenService>,
    relist: Option<Seen>,
}

/// What was given of one service.
#[derive(Debug, Clone, Default)]
pub(super) struct GivenService {
    pub ports: BTreeMap<PortKey, Arc<PortView>>,
    pub health_check: Option<HealthCheck>,
}

/// What came since a list began.
#[derive(Debug, Default)]
struct Seen {
    ports: HashSet<PortKey>,
    checks: HashSet<ServiceName>,
}

impl Given {
    pub fn service(&self, name: &ServiceName) -> GivenService {
        self.services.get(name).cloned().unwrap_or_default()
    }

    pub fn list_start(&mut self) {
        self.relist = Some(Seen::default());
    }
}

impl View {
    /// Adds or replaces a service port that was decided elsewhere.
    pub fn set_port(&mut self, key: PortKey, port: Arc<PortView>) {
        if let Some(seen) = &mut self.given.relist {
            seen.ports.insert(key.clone());
        }
        let service = self.given.services.entry(key.service.clone()).or_default();
        if service.ports.get(&key) == Some(&port) {
            return;
        }
        self.dirty.insert(key.service.clone());
        service.ports.insert(key, port);
    }

    /// Removes a service port that was decided elsewhere.
    pub fn delete_port(&mut self, key: &PortKey) {
        self.change_given(&key.service, |service| service.ports.remove(key).is_some());
    }

    /// Adds or replaces a health check that was decided elsewhere.
    pub fn set_health_check(&mut self, name: ServiceName, check: HealthCheck) {
        if let Some(seen) = &mut self.given.relist {
            seen.checks.insert(name.clone());
        }
        let service = self.given.services.entry(name.clone()).or_default();
        if service.health_check.as_ref() != Some(&check) {
            service.health_check = Some(check);
            self.dirty.insert(name);
        }
    }

    /// Removes a health check that was decided elsewhere.
    pub fn delete_health_check(&mut self, name: &ServiceName) {
        self.change_given(name, |service| service.health_check.take().is_some());
    }

    /// Says what holds for the node, in place of what follows from its [`NodeInfo`](crate::model::NodeInfo).
    pub fn set_settings(&mut self, settings: NodeSettings) {
        self.node_dirty |= self.given.settings.as_ref() != Some(&settings);
        self.given.settings = Some(settings);
    }

    /// Says that all that was given up to now is the state with this number, and when its changes were triggered.
    pub fn set_revision(&mut self, revision: u64, triggered_ms: Vec<u64>) {
        self.triggered_ms.extend(triggered_ms);
        self.revision = revision;
        // There is something to answer, even if nothing changed.
        self.node_dirty = true;
    }

    /// Ends a full list of what was given.
    pub(super) fn given_listed(&mut self) {
        let Some(seen) = self.given.relist.take() else { return };
        let services = self.given.services.iter();
        let (mut ports, mut checks) = (Vec::new(), Vec::new());
        for (name, service) in services {
            ports.extend(service.ports.keys().filter(|key| !seen.ports.contains(*key)).cloned());
            checks.extend(
                (service.health_check.is_some() && !seen.checks.contains(name)).then(|| name.clone()),
            );
        }
        ports.iter().for_each(|key| self.delete_port(key));
        checks.iter().for_each(|name| self.delete_health_check(name));
    }

    fn change_given(&mut self, name: &ServiceName, change: impl FnOnce(&mut GivenService) -> bool) {
        let Some(service) = self.given.services.get_mut(name) else { return };
        if change(service) {
            self.dirty.insert(name.clone());
        }
        if service.ports.is_empty() && service.health_check.is_none() {
            self.given.services.remove(name);
        }
    }
}
