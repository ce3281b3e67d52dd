//! What a backend is told: every service port of this node with all decisions made.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::sync::Arc;

use ipnet::IpNet;

use super::config::NodeSettings;
use crate::model::{Family, PerFamily, Problem, Protocol, ServiceName};

/// Which port of which service, in which family. The two families of a port are two objects (rule 18).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortKey {
    /// The service.
    pub service: ServiceName,
    /// The name of its port; may be empty.
    pub port: Arc<str>,
    /// The port's protocol.
    pub protocol: Protocol,
    /// The family.
    pub family: Family,
}

/// One service port in one family, as this node has to serve it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortView {
    /// Where clients may connect to, sorted. One address and port is in one `PortView` only: of two services
    /// that want it, one has it, and the other a [`Problem`].
    pub frontends: Box<[Frontend]>,
    /// The endpoints for [`Scope::Cluster`], sorted by address and port. Choose among them at random, all
    /// alike (rule 29).
    pub cluster: Targets,
    /// The endpoints for [`Scope::Local`], likewise. Empty where no frontend may use them.
    pub local: Targets,
    /// A client that comes back within this many seconds goes to the same endpoint, through whichever
    /// frontend, as long as that endpoint is in the scope that serves it (rules 40, 41). Each new connection
    /// starts the time again.
    pub affinity_seconds: Option<u32>,
    /// UDP only: every endpoint that can answer, whatever the policies say. A flow to any other one is stale
    /// (rule 51). Empty for other protocols.
    pub serving: Targets,
}

/// Endpoints, sorted by address and port, without duplicates.
pub type Targets = Arc<[Target]>;

/// An endpoint to send traffic to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// It runs on this node: it may be a client of its own service, and is then masqueraded (rule 45).
    pub local: bool,
}

/// Somewhere clients connect to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// What kind of address it is.
    pub kind: FrontendKind,
    /// The address; `None` for a node port on all of its addresses, which [`NodeSettings::node_ports`] has.
    /// Where another service has some of them, there is a frontend for each of the others.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: u16,
    /// What to do with traffic that comes here.
    pub route: Route,
    /// What to do instead with traffic of this node's pods (rule 34).
    pub from_pods: Option<Route>,
    /// What to do instead with traffic of the node itself: its source address is one of the node's (rule 34).
    pub from_node: Option<Route>,
    /// Who may use it, checked first and on the original destination (rule 43). Others are dropped, pods as
    /// well.
    pub sources: Sources,
}

/// Who a client is, as far as its route depends on that (rule 34).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Client {
    /// A pod of this node.
    Pod,
    /// The node itself: the source address is one of the node's.
    Node,
    /// Anybody else.
    Other,
}

/// What kind of address a frontend has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// The service's own virtual address.
    ClusterIp,
    /// An address of a load balancer outside that hands packets on unchanged.
    LoadBalancerIp,
    /// An address somebody routes to the nodes.
    ExternalIp,
    /// A port on the node's own addresses.
    NodePort,
}

/// What to do with traffic, and whether the endpoint may see who sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Where it goes.
    pub action: Action,
    /// Whether the source address is replaced by one of the node's.
    pub masquerade: Masquerade,
}

/// Where traffic goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// To one of the endpoints of this scope, of which there is at least one.
    Endpoints(Scope),
    /// Nowhere, and the client is told at once: TCP reset or ICMP port unreachable (rule 33).
    Reject,
    /// Nowhere, silently: this node has no endpoint, but another one has (rules 31, 32).
    Drop,
}

/// A set of endpoints of a [`PortView`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// [`PortView::cluster`].
    Cluster,
    /// [`PortView::local`].
    Local,
}

/// Whose source address is replaced by the node's, besides that of an endpoint that got itself (rule 45),
/// which always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Masquerade {
    /// Nobody else's (rule 48).
    HairpinOnly,
    /// Everybody's but this node's pods' (rule 47).
    NotPods,
    /// Everybody's (rule 46).
    All,
}

/// Who may use a frontend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sources {
    /// Anyone.
    Any,
    /// Only sources in these ranges, all of the frontend's family (rule 43).
    Only {
        /// The ranges. If there are none, nobody may.
        ranges: Box<[IpNet]>,
        /// The frontend's own address may be the source as well (rule 44).
        and_itself: bool,
    },
}

/// A port on which the node says how many ready endpoints of a service it has (rule 54).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port to answer HTTP on.
    pub port: NonZeroU16,
    /// How many distinct addresses of local ready endpoints there are; per family, since each listens for
    /// itself.
    pub local_ready: PerFamily<usize>,
}

/// All that a backend has to make true.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeView {
    /// What holds for the whole node.
    pub node: Arc<NodeSettings>,
    /// Every service port.
    pub ports: BTreeMap<PortKey, Arc<PortView>>,
    /// Every active cluster IP, with the number of service ports that have it. Traffic to another port of one
    /// of them is rejected (rule 27).
    pub cluster_ips: BTreeMap<IpAddr, u32>,
    /// Health checks by service.
    pub health_checks: BTreeMap<ServiceName, HealthCheck>,
    /// How many ports drop traffic for want of local endpoints.
    pub no_local: PerFamily<NoLocal>,
    /// The number of the last state of a source that counts its states; 0 if it does not.
    pub revision: u64,
}

/// How many service ports drop traffic for want of local endpoints (rules 31, 32).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NoLocal {
    /// Traffic to their cluster IP.
    pub internal: usize,
    /// Traffic to their other addresses.
    pub external: usize,
}

/// What changed in a [`NodeView`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// The node's settings are other ones than before.
    pub node: bool,
    /// Service ports that are new, changed or gone, sorted by key.
    pub ports: Vec<PortChange>,
    /// Cluster IPs that are new.
    pub cluster_ips_added: Vec<IpAddr>,
    /// Cluster IPs that are gone.
    pub cluster_ips_removed: Vec<IpAddr>,
    /// Services whose health check is new, changed or gone.
    pub health_checks: Vec<ServiceName>,
    /// Problems that were not there before.
    pub problems: Vec<Problem>,
    /// When the endpoint changes happened that led here, in milliseconds since 1970 (rule 61).
    pub triggered_ms: Vec<u64>,
    /// A family that failed altogether is to be tried again: all of it (see
    /// [`Outcome::FamilyFailed`](crate::backend::Outcome::FamilyFailed)).
    pub retry: Option<Family>,
}

/// One service port that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortChange {
    /// Which one.
    pub key: PortKey,
    /// What it was.
    pub old: Option<Arc<PortView>>,
    /// What it is now; `None` if it is gone.
    pub new: Option<Arc<PortView>>,
}

impl Changes {
    /// Whether nothing is there for a backend to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.node
            && self.ports.is_empty()
            && self.cluster_ips_added.is_empty()
            && self.cluster_ips_removed.is_empty()
            && self.health_checks.is_empty()
            && self.retry.is_none()
    }
}

impl PortView {
    /// The endpoints of a scope.
    #[must_use]
    pub fn targets(&self, scope: Scope) -> &Targets {
        match scope {
            Scope::Cluster => &self.cluster,
            Scope::Local => &self.local,
        }
    }

    /// Whether it drops traffic to its cluster IP, and to its other addresses, for want of local endpoints.
    pub(super) fn no_local(&self) -> NoLocal {
        let drops = |cluster_ip: bool| {
            (self.frontends.iter())
                .any(|f| f.route.action == Action::Drop && (f.kind == FrontendKind::ClusterIp) == cluster_ip)
        };
        NoLocal { internal: usize::from(drops(true)), external: usize::from(drops(false)) }
    }

    /// Every endpoint that some frontend may send to: both scopes together, which may differ (rule 38),
    /// sorted.
    #[must_use]
    pub fn reachable(&self) -> Vec<Target> {
        let mut all: Vec<Target> = self.cluster.iter().chain(self.local.iter()).copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

impl Frontend {
    /// Whether a client with this source address may use it (rules 43, 44). One that may not is dropped.
    #[must_use]
    pub fn admits(&self, source: IpAddr) -> bool {
        match &self.sources {
            Sources::Any => true,
            Sources::Only { ranges, and_itself } => {
                ranges.iter().any(|range| range.contains(&source))
                    || (*and_itself && self.address == Some(source))
            }
        }
    }

    /// What to do with traffic of this client (rule 34).
    #[must_use]
    pub fn route_for(&self, client: Client) -> Route {
        let own = match client {
            Client::Pod => self.from_pods,
            Client::Node => self.from_node,
            Client::Other => None,
        };
        own.unwrap_or(self.route)
    }
}

impl Target {
    /// Address and port together.
    #[must_use]
    pub fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket().fmt(f)
    }
}

/// `shop/web:http TCP IPv4`.
impl fmt::Display for PortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.service)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        write!(f, " {} {}", self.protocol, self.family)
    }
}

impl fmt::Display for FrontendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterIp => "cluster IP",
            Self::LoadBalancerIp => "load-balancer IP",
            Self::ExternalIp => "external IP",
            Self::NodePort => "node port",
        })
    }
}

/// `cluster IP 10.0.0.1:80`.
impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{} {}", self.kind, SocketAddr::new(address, self.port)),
            None => write!(f, "{} {}", self.kind, self.port),
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.action {
            Action::Endpoints(Scope::Cluster) => "cluster endpoints",
            Action::Endpoints(Scope::Local) => "local endpoints",
            Action::Reject => return f.write_str("reject"),
            Action::Drop => return f.write_str("drop"),
        })?;
        f.write_str(match self.masquerade {
            Masquerade::HairpinOnly => "",
            Masquerade::NotPods => ", masqueraded unless from a pod",
            Masquerade::All => ", masqueraded",
        })
    }
}
