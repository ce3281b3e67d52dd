//! What the operator decides about a proxy, as opposed to what the cluster's objects say.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::model::{Family, NetworkName, NodeInfo, PerFamily, Protocol};

/// The settings of a [`View`](super::View).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewConfig {
    /// The Network that is served. Services and endpoints of any other are left alone.
    pub network: NetworkName,
    /// Which families are served.
    pub families: PerFamily<bool>,
    /// On which of the node's addresses node ports answer (rule 24).
    pub node_ports: NodePorts,
    /// How to tell traffic of this node's pods from other traffic (rule 49).
    pub local_traffic: LocalTraffic,
    /// Hide the client's address from endpoints for all traffic to cluster IPs (rule 47).
    pub masquerade_all: bool,
    /// Whether `externalIPs` are served (rule 21; Kubernetes means to switch them off by and by).
    pub external_ips: bool,
    /// Service addresses that are not ours, although they are in the service ranges: those which this Network
    /// sends up its uplink to the default Network, such as the Kubernetes API and DNS. They are neither
    /// served nor dropped.
    pub exempt_vips: Vec<IpAddr>,
    /// Ports that somebody else has on this node, such as a tunnel: on those, only cluster IPs are served.
    pub reserved: Vec<(Protocol, u16)>,
}

/// On which addresses of the node its node ports answer (rule 24).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodePorts {
    /// The node's primary address of each family: what kube-proxy's nftables mode does.
    #[default]
    Primary,
    /// Every address of the node but the loopback ones.
    All,
    /// The node's addresses in these ranges. A family of which no range is given answers on all of its
    /// addresses.
    Ranges(Vec<IpNet>),
}

/// How traffic of this node's pods is recognised (rule 49).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LocalTraffic {
    /// Not at all. Clients outside the cluster cannot be told from pods then.
    #[default]
    Unknown,
    /// By its source address: the cluster's pod ranges.
    Sources(Vec<IpNet>),
    /// By its source address: the pod ranges of this node, as [`NodeInfo::pod_ranges`] says.
    NodePodRanges,
    /// By the bridge it comes from.
    Bridge(Arc<str>),
    /// By how the name of the interface it comes from begins.
    InterfacePrefix(Arc<str>),
}

impl Default for ViewConfig {
    fn default() -> Self {
        Self {
            network: NetworkName::default(),
            families: PerFamily { v4: true, v6: true },
            node_ports: NodePorts::default(),
            local_traffic: LocalTraffic::default(),
            masquerade_all: false,
            external_ips: true,
            exempt_vips: Vec::new(),
            reserved: Vec::new(),
        }
    }
}

/// How a backend recognises traffic of this node's pods, for one family (rule 49).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PodTraffic {
    /// It cannot.
    #[default]
    Unknown,
    /// The source address is in one of these ranges.
    Sources(Box<[IpNet]>),
    /// It comes in by this bridge.
    Bridge(Arc<str>),
    /// It comes in by an interface whose name begins like this.
    InterfacePrefix(Arc<str>),
}

/// On which addresses node ports answer, for one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodePortMatch {
    /// Any address of the node that is not a loopback one (rule 25).
    #[default]
    AnyLocal,
    /// Just these. There may be none.
    Only(Box<[IpAddr]>),
}

/// What holds for the whole node, and not for one service.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeSettings {
    /// The node's name.
    pub name: Arc<str>,
    /// Which families are served.
    pub families: PerFamily<bool>,
    /// The node's primary addresses.
    pub primary: PerFamily<Option<IpAddr>>,
    /// On which addresses node ports, and the health check ports, answer.
    pub node_ports: PerFamily<NodePortMatch>,
    /// How to recognise traffic of this node's pods.
    pub pods: PerFamily<PodTraffic>,
    /// Masquerade all traffic to cluster IPs (rule 47). The frontends say so too; a backend with one rule for
    /// all cluster IPs can go by this.
    pub masquerade_all: bool,
    /// Ranges that service addresses come from. Traffic to an address in one of them that is no active
    /// cluster IP is dropped (rule 27), unless it is exempt.
    pub service_ranges: Box<[IpNet]>,
    /// Addresses to leave alone altogether.
    pub exempt: Box<[IpAddr]>,
    /// The node is about to go: /healthz says so (rule 55), and nothing else changes (rule 56).
    pub leaving: bool,
}

impl NodeSettings {
    /// Works out the settings of one node.
    #[must_use]
    pub(super) fn resolve(config: &ViewConfig, node: &NodeInfo, service_ranges: Vec<IpNet>) -> Self {
        let mut exempt = config.exempt_vips.clone();
        exempt.sort_unstable();
        exempt.dedup();
        let mut ranges = service_ranges;
        ranges.retain(|r| *config.families.get(Family::of_net(*r)));
        ranges.sort_unstable();
        ranges.dedup();
        Self {
            name: Arc::clone(&node.name),
            families: config.families,
            primary: PerFamily::from_fn(|family| node.primary(family)),
            node_ports: PerFamily::from_fn(|family| config.node_ports.resolve(node, family)),
            pods: PerFamily::from_fn(|family| config.local_traffic.resolve(node, family)),
            masquerade_all: config.masquerade_all,
            service_ranges: ranges.into(),
            exempt: exempt.into(),
            leaving: node.leaving,
        }
    }

    /// Whether traffic of this node's pods can be recognised.
    #[must_use]
    pub fn knows_pods(&self, family: Family) -> bool {
        *self.pods.get(family) != PodTraffic::Unknown
    }
}

impl NodePorts {
    pub(super) fn resolve(&self, node: &NodeInfo, family: Family) -> NodePortMatch {
        match self {
            Self::All => NodePortMatch::AnyLocal,
            Self::Primary => NodePortMatch::Only(node.primary(family).into_iter().collect()),
            Self::Ranges(ranges) => {
                let ranges: Vec<_> = ranges.iter().filter(|r| Family::of_net(**r) == family).collect();
                // No range of this family, or one that holds every address, means all of them.
                if ranges.is_empty() || ranges.iter().any(|r| r.prefix_len() == 0) {
                    return NodePortMatch::AnyLocal;
                }
                let mut found: Vec<IpAddr> = (node.addresses.iter().chain(&node.host_addresses).copied())
                    .filter(|a| !a.is_loopback() && ranges.iter().any(|r| r.contains(a)))
                    .collect();
                found.sort_unstable();
                found.dedup();
                NodePortMatch::Only(found.into())
            }
        }
    }
}

impl LocalTraffic {
    fn resolve(&self, node: &NodeInfo, family: Family) -> PodTraffic {
        let sources = |ranges: &[IpNet]| {
            let ranges: Box<[IpNet]> =
                ranges.iter().copied().filter(|r| Family::of_net(*r) == family).collect();
            if ranges.is_empty() { PodTraffic::Unknown } else { PodTraffic::Sources(ranges) }
        };
        match self {
            Self::Unknown => PodTraffic::Unknown,
            Self::Sources(ranges) => sources(ranges),
            Self::NodePodRanges => sources(&node.pod_ranges),
            Self::Bridge(name) => PodTraffic::Bridge(Arc::clone(name)),
            Self::InterfacePrefix(prefix) => PodTraffic::InterfacePrefix(Arc::clone(prefix)),
        }
    }
}
