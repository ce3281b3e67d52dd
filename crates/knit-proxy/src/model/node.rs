//! The node a proxy runs on.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::Family;

/// What a proxy needs to know about the node it runs on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeInfo {
    /// Its name. Endpoints whose node has this name are local (rule 15).
    pub name: Arc<str>,
    /// The zone it is in, for zone hints (rule 35).
    pub zone: Option<Arc<str>>,
    /// Its published addresses; the first of a family is that family's primary one.
    pub addresses: Vec<IpAddr>,
    /// All addresses on its interfaces, where node ports are limited to ranges (rule 24).
    pub host_addresses: Vec<IpAddr>,
    /// The ranges its pods have addresses from.
    pub pod_ranges: Vec<IpNet>,
    /// It is being deleted or marked for removal, so that load balancers should stop using it (rule 55).
    pub leaving: bool,
}

impl NodeInfo {
    /// A node of which only the name is known.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The primary address of a family.
    #[must_use]
    pub fn primary(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|a| Family::of(*a) == family)
    }
}
