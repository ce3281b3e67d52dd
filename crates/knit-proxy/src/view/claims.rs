//! Who has which address and port, where several services want the same one.
//!
//! A cluster IP comes before every other kind of address, so that nobody can take another service's traffic
//! by listing its cluster IP among their own external ones. Then comes what the cluster or a provider gave
//! (node ports, load balancers' addresses), then external IPs, which whoever writes a service chooses. Among
//! equals the older service wins, then the one whose name comes first. The loser keeps everything else it
//! has, gets a [`Problem`](crate::model::Problem), and moves up when the winner goes.

use std::collections::HashMap;
use std::net::IpAddr;

use super::output::{FrontendKind, PortKey};
use crate::model::{Family, Protocol, ServiceName};

/// An address and port that can belong to one service port only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FrontendKey {
    /// The family; for a node port nothing else says it.
    pub family: Family,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
    /// The address; `None` for a node port as such. It wants each address where it answers as well.
    pub address: Option<IpAddr>,
}

/// One service port that wants a frontend. The order of the fields is the order of precedence.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    given_by: Giver,
    created: u64,
    pub port: PortKey,
}

/// Who gave an address or port, whom it is believed most first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Giver {
    /// The API server: it is nobody else's.
    Cluster,
    /// The API server as well, or a load balancer's controller.
    Provider,
    /// Whoever wrote the service.
    Author,
}

impl Claim {
    pub fn new(kind: FrontendKind, created: u64, port: PortKey) -> Self {
        let given_by = match kind {
            FrontendKind::ClusterIp => Giver::Cluster,
            FrontendKind::NodePort | FrontendKind::LoadBalancerIp => Giver::Provider,
            FrontendKind::ExternalIp => Giver::Author,
        };
        Self { given_by, created, port }
    }
}

/// All claims, best first. Nearly always there is one.
#[derive(Debug, Default)]
pub(super) struct Claims {
    by_frontend: HashMap<FrontendKey, Vec<Claim>>,
}

impl Claims {
    /// Adds a claim; answers with the other services that want the same frontend.
    pub fn add(&mut self, key: FrontendKey, claim: Claim) -> Vec<ServiceName> {
        match self.by_frontend.entry(key) {
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(vec![claim]);
                Vec::new()
            }
            std::collections::hash_map::Entry::Occupied(mut entry) => {
                let others = services(entry.get(), &claim.port.service);
                let claims = entry.get_mut();
                let at = claims.partition_point(|c| *c < claim);
                claims.insert(at, claim);
                others
            }
        }
    }

    /// Takes a claim back; answers with the other services that want the same frontend.
    pub fn remove(&mut self, key: &FrontendKey, port: &PortKey) -> Vec<ServiceName> {
        let Some(claims) = self.by_frontend.get_mut(key) else { return Vec::new() };
        if let Some(at) = claims.iter().position(|c| c.port == *port) {
            claims.remove(at);
        }
        if claims.is_empty() {
            self.by_frontend.remove(key);
            return Vec::new();
        }
        services(claims, &port.service)
    }

    /// The service port that has a frontend.
    pub fn winner(&self, key: &FrontendKey) -> Option<&PortKey> {
        self.by_frontend.get(key)?.first().map(|c| &c.port)
    }
}

fn services(claims: &[Claim], but: &ServiceName) -> Vec<ServiceName> {
    claims.iter().map(|c| &c.port.service).filter(|s| *s != but).cloned().collect()
}
