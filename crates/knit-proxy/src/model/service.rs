//! A service: what clients connect to, and how their traffic may be spread.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::sync::Arc;

use ipnet::IpNet;

use super::{Family, NetworkName, Protocol, ServiceName};

/// Addresses and ports that clients connect to, and the rules for spreading what arrives there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The Service's name.
    pub name: ServiceName,
    /// The Network it belongs to; its endpoints belong to the same one.
    pub network: NetworkName,
    /// When it was made, in seconds since 1970. Where two services want one address and port, the older has
    /// it.
    pub created: u64,
    /// Its own virtual IPv4 address. Without one the service has no IPv4 at all (rule 18).
    pub cluster_ip_v4: Option<Ipv4Addr>,
    /// Its own virtual IPv6 address. Without one the service has no IPv6 at all (rule 18).
    pub cluster_ip_v6: Option<Ipv6Addr>,
    /// Further addresses, which somebody else routes to the nodes (rule 21).
    pub external_ips: Box<[IpAddr]>,
    /// Addresses of a load balancer outside that sends packets on unchanged (rule 22).
    pub load_balancer_ips: Box<[IpAddr]>,
    /// Addresses of a load balancer that makes connections of its own (`ipMode: Proxy`). They are not served
    /// here (rule 22), and are kept to say so.
    pub proxied_ips: Box<[IpAddr]>,
    /// Who may use the load-balancer addresses (rule 43). `None`: anyone. An empty list: nobody, which is
    /// what a restriction becomes of which no part could be understood.
    pub source_ranges: Option<Box<[IpNet]>>,
    /// Its ports.
    pub ports: Box<[ServicePort]>,
    /// Which endpoints serve traffic to the cluster IPs (rule 31).
    pub internal_policy: TrafficPolicy,
    /// Which endpoints serve traffic to all other addresses and the node ports (rule 32).
    pub external_policy: TrafficPolicy,
    /// Whether a client stays with the endpoint it got first (rule 40).
    pub affinity: Option<Affinity>,
    /// The port on which this node says over HTTP how many ready local endpoints it has (rule 54).
    pub health_check_port: Option<NonZeroU16>,
}

/// One port of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; may be empty where there is only one. Endpoint groups are matched by it (rule 11).
    pub name: Arc<str>,
    /// Its protocol. One number on two protocols is two ports (rule 20).
    pub protocol: Protocol,
    /// The number clients connect to.
    pub port: u16,
    /// The port on every node that leads to it as well, if any (rule 24).
    pub node_port: Option<NonZeroU16>,
}

/// Which endpoints may be used for a kind of traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum TrafficPolicy {
    /// Any endpoint of the cluster.
    #[default]
    Cluster,
    /// Only endpoints on the node where the traffic arrived.
    Local,
}

/// A client, known by its address, stays with one endpoint per port (rule 40).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Affinity {
    /// How long after a client's last new connection it is remembered.
    pub timeout_seconds: u32,
}

impl Affinity {
    /// What Kubernetes uses where nothing is said: three hours.
    pub const DEFAULT_TIMEOUT_SECONDS: u32 = 10_800;
}

impl Default for Affinity {
    fn default() -> Self {
        Self { timeout_seconds: Self::DEFAULT_TIMEOUT_SECONDS }
    }
}

impl Service {
    /// A service in the default Network, without addresses and ports.
    #[must_use]
    pub fn new(name: impl Into<ServiceName>) -> Self {
        Self {
            name: name.into(),
            network: NetworkName::default(),
            created: 0,
            cluster_ip_v4: None,
            cluster_ip_v6: None,
            external_ips: Box::default(),
            load_balancer_ips: Box::default(),
            proxied_ips: Box::default(),
            source_ranges: None,
            ports: Box::default(),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity: None,
            health_check_port: None,
        }
    }

    /// Gives it a cluster IP, of the family of the address.
    #[must_use]
    pub fn cluster_ip(mut self, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => self.cluster_ip_v4 = Some(v4),
            IpAddr::V6(v6) => self.cluster_ip_v6 = Some(v6),
        }
        self
    }

    /// Adds a port without a name and node port.
    #[must_use]
    pub fn port(self, protocol: Protocol, port: u16) -> Self {
        self.add_port(ServicePort { name: "".into(), protocol, port, node_port: None })
    }

    /// Adds a port.
    #[must_use]
    pub fn add_port(mut self, port: ServicePort) -> Self {
        let mut ports = self.ports.into_vec();
        ports.push(port);
        self.ports = ports.into_boxed_slice();
        self
    }

    /// The cluster IP of one family.
    #[must_use]
    pub fn cluster_ip_of(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.cluster_ip_v4.map(IpAddr::V4),
            Family::V6 => self.cluster_ip_v6.map(IpAddr::V6),
        }
    }
}

impl ServicePort {
    /// A port with a name.
    #[must_use]
    pub fn new(name: &str, protocol: Protocol, port: u16) -> Self {
        Self { name: name.into(), protocol, port, node_port: None }
    }

    /// Gives it a node port; 0 means none.
    #[must_use]
    pub fn node_port(mut self, port: u16) -> Self {
        self.node_port = NonZeroU16::new(port);
        self
    }
}
