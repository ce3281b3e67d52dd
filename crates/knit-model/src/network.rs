//! A Network, and the rules about one.

mod underlay;

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use knit_api::conditions::network as conditions;
use knit_api::{
    AllowedNamespaces, AllowedNamespacesFrom, NetworkSpec, NetworkStatus, Outside, Permission, Scheduling,
    Topology,
};
use knit_ipam::{AddressRange, Pool, PoolError, Subnet};
use knit_types::{InvalidNetworkName, NetworkName, Route};
use kube::core::{Selector, SelectorExt as _};

use crate::Labels;
use crate::selector::{self, NamespaceSelector, SelectorError};
use underlay::Parent;

pub use underlay::UnderlayError;

/// A Network whose object was read. What is wrong with one part of it does not hide the others: each says its
/// own error.
#[derive(Clone, Debug)]
pub struct Network {
    name: NetworkName,
    object: knit_api::Network,
    ranges: Vec<IpNet>,
    pool: Result<Option<Pool>, NetworkError>,
    routes: Result<Vec<Route>, NetworkError>,
    primary_for: Option<NamespaceSelector>,
    allowed: Allowed,
    parents: Vec<Parent>,
    nodes: Option<Result<Selector, SelectorError>>,
}

/// What is wrong with a Network's object.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NetworkError {
    /// A subnet's range.
    #[error("spec.subnets[{index}].cidr: {text:?} is not a valid CIDR: write one such as 10.77.0.0/16")]
    Cidr {
        /// Which subnet.
        index: usize,
        /// As it was written.
        text: String,
    },
    /// A subnet's gateway.
    #[error(
        "spec.subnets[{index}].gateway: {text:?} is not a valid IP address: write one of the subnet, or \
         leave it out"
    )]
    Gateway {
        /// Which subnet.
        index: usize,
        /// As it was written.
        text: String,
    },
    /// A range that is set aside.
    #[error("spec.subnets[{index}].reserved: {text:?} is not a valid CIDR: write one inside the subnet")]
    Reserved {
        /// Which subnet.
        index: usize,
        /// As it was written.
        text: String,
    },
    /// A subnet of which each field can be read.
    #[error("spec.subnets[{index}] cannot be used")]
    Subnet {
        /// Which one.
        index: usize,
        /// The cause.
        source: PoolError,
    },
    /// Subnets that cannot be together.
    #[error("spec.subnets cannot be used")]
    Subnets(#[source] PoolError),
    /// Where a route leads.
    #[error("spec.routes[{index}].destination: {text:?} is not a valid CIDR: write one such as 192.0.2.0/24")]
    Destination {
        /// Which route.
        index: usize,
        /// As it was written.
        text: String,
    },
    /// The next hop of a route.
    #[error("spec.routes[{index}].via: {text:?} is not a valid IP address: write one, or leave it out")]
    Via {
        /// Which route.
        index: usize,
        /// As it was written.
        text: String,
    },
}

/// Why the controller refuses a Network.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Refusal<'a> {
    /// In one word.
    pub reason: &'a str,
    /// What is wrong and what to do.
    pub message: &'a str,
}

/// Whose pods may attach, besides those of `primaryFor`.
#[derive(Clone, Debug)]
enum Allowed {
    Nobody,
    Everybody,
    Those(NamespaceSelector),
}

/// What pods of a Network reach of the default one's Services unless it says otherwise.
const CLUSTER_SERVICES: [(&str, &str); 2] = [("default", "kubernetes"), ("kube-system", "kube-dns")];

// === impl Network ===

/// Reads an object.
impl TryFrom<knit_api::Network> for Network {
    type Error = InvalidNetworkName;

    fn try_from(object: knit_api::Network) -> Result<Self, InvalidNetworkName> {
        let name = NetworkName::new(object.metadata.name.as_deref().unwrap_or_default())?;
        Ok(Self::of(name, object))
    }
}

impl Network {
    fn of(name: NetworkName, object: knit_api::Network) -> Self {
        let spec = &object.spec;
        let id = object.status.as_ref().and_then(|status| status.id).unwrap_or_default();
        Self {
            ranges: spec.subnets.iter().filter_map(|subnet| subnet.cidr.parse().ok()).collect(),
            pool: pool(&name, id, spec),
            routes: routes(spec),
            primary_for: spec.primary_for.as_ref().map(NamespaceSelector::of),
            allowed: spec.allowed_namespaces.as_ref().map_or(Allowed::Nobody, allowed),
            parents: underlay::parents(spec),
            nodes: spec.node_selector.as_ref().map(selector::read_for_nodes),
            name,
            object,
        }
    }
}

/// Everything in it comes out of the object.
impl PartialEq for Network {
    fn eq(&self, other: &Self) -> bool {
        self.object == other.object
    }
}

impl Network {
    /// Whether pods of a node with these labels may attach.
    ///
    /// # Errors
    /// When its selector cannot be read, and so may have meant the node or not.
    pub fn is_for_node(&self, labels: &Labels) -> Result<bool, &SelectorError> {
        match &self.nodes {
            None => Ok(true),
            Some(Ok(selector)) => Ok(selector.matches(labels)),
            Some(Err(error)) => Err(error),
        }
    }

    /// Why its selector of nodes cannot be read; none if it can, or there is none.
    #[must_use]
    pub fn node_selector_error(&self) -> Option<&SelectorError> {
        self.nodes.as_ref().and_then(|nodes| nodes.as_ref().err())
    }

    /// Whether the scheduler counts its addresses.
    #[must_use]
    pub fn counts_in_scheduling(&self) -> bool {
        self.object.spec.scheduling == Some(Scheduling::Addresses)
    }

    /// The object, for whoever writes it.
    #[must_use]
    pub fn object(&self) -> &knit_api::Network {
        &self.object
    }

    /// Changes the object, all but its name, and reads it again.
    pub fn edit(&mut self, change: impl FnOnce(&mut knit_api::Network)) {
        let mut object = self.object.clone();
        change(&mut object);
        *self = Self::of(self.name.clone(), object);
    }

    /// The Network's name.
    #[must_use]
    pub fn name(&self) -> &NetworkName {
        &self.name
    }

    /// Which one of that name.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    /// The version that was read.
    #[must_use]
    pub fn resource_version(&self) -> &str {
        self.object.metadata.resource_version.as_deref().unwrap_or_default()
    }

    /// Sorts Networks by age, the oldest first; those of one age by name.
    #[must_use]
    pub fn age(&self) -> (Option<&Time>, &str) {
        (self.object.metadata.creation_timestamp.as_ref(), self.name())
    }

    /// Whether it is on its way out.
    #[must_use]
    pub fn is_being_deleted(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    /// What is said of it, if anything is.
    #[must_use]
    pub fn status(&self) -> Option<&NetworkStatus> {
        self.object.status.as_ref()
    }

    /// Its number, once the controller has given it one.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.status().and_then(|status| status.id)
    }

    /// Whether the controller refuses it, and why.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal<'_>> {
        let accepted = self.status()?.conditions.iter().find(|c| c.type_ == conditions::ACCEPTED)?;
        let (reason, message) = (accepted.reason.as_str(), accepted.message.as_str());
        (accepted.status == "False").then_some(Refusal { reason, message })
    }

    /// The name of its NetworkClass.
    #[must_use]
    pub fn class(&self) -> &str {
        &self.object.spec.class
    }

    /// How pods reach each other.
    #[must_use]
    pub fn topology(&self) -> Topology {
        self.object.spec.topology
    }

    /// The largest packet, if it says one.
    #[must_use]
    pub fn mtu(&self) -> Option<u16> {
        self.object.spec.mtu
    }

    /// Whether it is the default Network.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.name.is_default()
    }

    /// Whether namespaces may have it as their primary: no two such Networks have one address on one node.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        is_primary(self.name(), &self.object.spec)
    }

    /// Whether it has subnets of its own. Only the default one may have none: Nodes' podCIDRs are its blocks.
    #[must_use]
    pub fn has_subnets(&self) -> bool {
        !self.object.spec.subnets.is_empty()
    }

    /// Its subnets' ranges, as far as they can be read: they are its own even if nothing can be given out.
    #[must_use]
    pub fn ranges(&self) -> &[IpNet] {
        &self.ranges
    }

    /// What it may give out; nothing if that is not in its subnets. Its number there is 0 until it has one.
    ///
    /// # Errors
    /// When its subnets cannot be used.
    pub fn pool(&self) -> Result<Option<&Pool>, &NetworkError> {
        self.pool.as_ref().map(Option::as_ref)
    }

    /// Further routes of pods.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn routes(&self) -> Result<&[Route], &NetworkError> {
        self.routes.as_deref()
    }

    /// The namespaces whose primary it is to be; which one has it is decided among all Networks
    /// ([`Claims`](crate::Claims)).
    #[must_use]
    pub fn primary_for(&self) -> Option<&NamespaceSelector> {
        self.primary_for.as_ref()
    }

    /// Whether pods of a namespace with these labels may attach, if it is not their namespace's primary one.
    ///
    /// # Errors
    /// When a selector on which that depends cannot be read.
    pub fn admits(&self, labels: &Labels) -> Result<bool, &SelectorError> {
        if let Some(selector) = &self.primary_for
            && selector.selects(labels)?
        {
            return Ok(true);
        }
        match &self.allowed {
            Allowed::Nobody => Ok(false),
            Allowed::Everybody => Ok(true),
            Allowed::Those(selector) => selector.selects(labels),
        }
    }

    /// The Services of the default Network that its pods reach.
    pub fn cluster_services(&self) -> impl Iterator<Item = (&str, &str)> {
        let listed = self.object.spec.cluster_services.as_deref();
        let otherwise = if listed.is_none() { &CLUSTER_SERVICES[..] } else { &[] };
        let listed = listed.unwrap_or_default().iter();
        listed.map(|s| (s.namespace.as_str(), s.name.as_str())).chain(otherwise.iter().copied())
    }

    /// Whether its pods reach what is neither node, service, nor any Network.
    #[must_use]
    pub fn reaches_outside(&self) -> bool {
        match self.object.spec.outside {
            Some(Outside::Masquerade) => true,
            Some(Outside::Closed) => false,
            None => self.is_primary(),
        }
    }

    /// Whether `spec.externalIPs` of Services are served.
    #[must_use]
    pub fn serves_external_ips(&self) -> bool {
        let said = self.object.spec.services.as_ref().and_then(|services| services.external_ips);
        said.map_or_else(|| self.is_default(), |said| said == Permission::Allow)
    }

    /// Whether a load-balancer address may be one of a node's own.
    #[must_use]
    pub fn serves_node_addresses(&self) -> bool {
        let said = self.object.spec.services.as_ref().and_then(|services| services.node_addresses);
        said == Some(Permission::Allow)
    }

    /// Whether the agent writes a NetworkAttachment for each attachment: pods of the default Network show
    /// their addresses themselves.
    #[must_use]
    pub fn publishes_attachments(&self) -> bool {
        self.object.spec.publish_attachments.unwrap_or_else(|| !self.is_default())
    }
}

fn is_primary(name: &NetworkName, spec: &NetworkSpec) -> bool {
    name.is_default() || spec.primary_for.is_some()
}

fn allowed(allowed: &AllowedNamespaces) -> Allowed {
    match (allowed.from, &allowed.selector) {
        (AllowedNamespacesFrom::All, _) => Allowed::Everybody,
        (AllowedNamespacesFrom::Selector, Some(selector)) => Allowed::Those(NamespaceSelector::of(selector)),
        (AllowedNamespacesFrom::Selector, None) | (AllowedNamespacesFrom::None, _) => Allowed::Nobody,
    }
}

fn pool(name: &NetworkName, id: u32, spec: &NetworkSpec) -> Result<Option<Pool>, NetworkError> {
    if spec.subnets.is_empty() && name.is_default() {
        return Ok(None);
    }
    let subnets = spec.subnets.iter().enumerate().map(|(index, s)| subnet(index, s));
    let subnets: Vec<Subnet> = subnets.collect::<Result<_, _>>()?;
    let pool = Pool::new(name, id, subnets).map_err(NetworkError::Subnets)?;
    // A router needs an address of its own, besides the gateway; the default Network's is the node itself.
    let has_router = spec.topology.has_router();
    // On a link of a node, what is reserved is other hosts' of the segment.
    let pool = pool.primary(is_primary(name, spec)).shared_with_others(spec.topology.is_on_host_link());
    Ok(Some(pool.with_router(has_router && !name.is_default())))
}

fn subnet(index: usize, subnet: &knit_api::Subnet) -> Result<Subnet, NetworkError> {
    let cidr: IpNet =
        subnet.cidr.parse().map_err(|_| NetworkError::Cidr { index, text: subnet.cidr.clone() })?;
    let gateway = |text: &String| {
        text.parse::<IpAddr>().map_err(|_| NetworkError::Gateway { index, text: text.clone() })
    };
    let reserved = |text: &String| match text.parse::<IpNet>() {
        Ok(range) => Ok(AddressRange::from(range)),
        Err(_) => Err(NetworkError::Reserved { index, text: text.clone() }),
    };
    let gateway = subnet.gateway.as_ref().map(gateway).transpose()?;
    let reserved: Vec<AddressRange> = subnet.reserved.iter().map(reserved).collect::<Result<_, _>>()?;
    Subnet::new(cidr, gateway, &reserved).map_err(|source| NetworkError::Subnet { index, source })
}

fn routes(spec: &NetworkSpec) -> Result<Vec<Route>, NetworkError> {
    let route = |(index, route): (usize, &knit_api::Route)| {
        let text = || route.destination.clone();
        let destination =
            route.destination.parse().map_err(|_| NetworkError::Destination { index, text: text() })?;
        let via = |via: &String| via.parse().map_err(|_| NetworkError::Via { index, text: via.clone() });
        Ok(Route { destination, via: route.via.as_ref().map(via).transpose()? })
    };
    spec.routes.iter().enumerate().map(route).collect()
}

#[cfg(test)]
mod tests;
