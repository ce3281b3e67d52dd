//! Whether a Network can be served: what CEL cannot check, because it needs the rest of the cluster.

use std::collections::BTreeMap;

use ipnet::IpNet;
use knit_api::Network;
use knit_api::conditions::{network as reasons, network_class};
use knit_api::names::DEFAULT_NETWORK;
use knit_ipam::{AddressRange, Pool, Subnet};

use super::index::Index;
use super::primary::{Primaries, primaries};
use crate::cluster::Cluster;

/// What was found out about all Networks.
#[derive(Debug)]
pub(super) struct Verdicts {
    pub(super) of_network: BTreeMap<String, Verdict>,
    pub(super) primaries: Primaries,
}

/// What was found out about one Network.
#[derive(Debug)]
pub(super) struct Verdict {
    /// What it may give out, if that could be told.
    pub(super) pool: Option<Pool>,
    /// What speaks against it: reason and message.
    pub(super) refused: Option<(&'static str, String)>,
}

impl Verdict {
    /// Whether blocks may be cut from it. That its class has no runtime yet, or that another Network has one
    /// of its namespaces, does not stand against that.
    pub(super) fn may_give_blocks(&self) -> bool {
        self.refused.as_ref().is_none_or(|(reason, _)| {
            *reason == reasons::REASON_NO_CLASS || *reason == reasons::REASON_PRIMARY_CONFLICT
        })
    }
}

pub(super) fn verdicts(cluster: &Cluster, index: &Index<'_>, ids: &BTreeMap<String, u32>) -> Verdicts {
    let primaries = primaries(&cluster.networks, &cluster.namespaces);
    let mut of_network = BTreeMap::new();
    for (name, network) in &cluster.networks {
        let pool = pool(name, network, ids.get(name).copied().unwrap_or_default());
        let refused = match &pool {
            Err(problem) => Some((reasons::REASON_INVALID, problem.clone())),
            Ok(pool) => invalid(name, cluster, ids, &primaries)
                .or_else(|| pool.is_none().then(|| no_ranges(cluster)).flatten())
                .map(|message| (reasons::REASON_INVALID, message))
                .or_else(|| overlap(name, network, cluster, index).map(|m| (reasons::REASON_OVERLAP, m)))
                .or_else(|| no_class(network, cluster).map(|m| (reasons::REASON_NO_CLASS, m)))
                .or_else(|| conflict(name, &primaries).map(|m| (reasons::REASON_PRIMARY_CONFLICT, m))),
        };
        of_network.insert(name.clone(), Verdict { pool: pool.ok().flatten(), refused });
    }
    Verdicts { of_network, primaries }
}

/// What a Network may give out. The default one may have no subnets of its own, and then nothing is cut from
/// it.
fn pool(name: &str, network: &Network, id: u32) -> Result<Option<Pool>, String> {
    let mut subnets = Vec::new();
    for (i, subnet) in network.spec.subnets.iter().enumerate() {
        let field = |field: &str, problem: String| format!("spec.subnets[{i}].{field}: {problem}");
        let cidr: IpNet =
            subnet.cidr.parse().map_err(|e| field("cidr", format!("{:?}: {e}", subnet.cidr)))?;
        let gateway = subnet.gateway.as_deref().map(str::parse).transpose();
        let gateway = gateway.map_err(|e| field("gateway", format!("{e}: write an address")))?;
        let mut reserved = Vec::new();
        for range in &subnet.reserved {
            let range: IpNet = range.parse().map_err(|e| field("reserved", format!("{range:?}: {e}")))?;
            reserved.push(AddressRange::from(range));
        }
        subnets.push(Subnet::new(cidr, gateway, &reserved).map_err(|e| field("cidr", e.to_string()))?);
    }
    if subnets.is_empty() && name == DEFAULT_NETWORK {
        return Ok(None);
    }
    // A router needs an address of its own, besides the gateway; the default Network's is the node itself.
    let pool = Pool::new(name, id, subnets).map_err(|e| e.to_string())?;
    Ok(Some(pool.primary(network.spec.primary_for.is_some()).with_router(name != DEFAULT_NETWORK)))
}

fn invalid(
    name: &str,
    cluster: &Cluster,
    ids: &BTreeMap<String, u32>,
    primaries: &Primaries,
) -> Option<String> {
    let Some(id) = ids.get(name) else {
        return Some("no number is left for it: delete Networks that are not needed".into());
    };
    // A number that two have, by whatever accident: the older one keeps it.
    let age =
        |n: &str| (cluster.networks.get(n).and_then(|n| n.metadata.creation_timestamp.clone()), n.to_owned());
    let other =
        ids.iter().find(|(other, theirs)| *theirs == id && other.as_str() != name && age(other) < age(name));
    if let Some((other, _)) = other {
        return Some(format!(
            "its number {id} is Network {other}'s: delete this Network and create it again"
        ));
    }
    primaries.invalid.get(name).cloned()
}

/// A Network without subnets lives of the Nodes' podCIDRs.
fn no_ranges(cluster: &Cluster) -> Option<String> {
    let none = !cluster.nodes.is_empty() && cluster.nodes.values().all(|node| node.pod_ranges.is_empty());
    none.then(|| {
        "it has no subnets, and no Node has podCIDRs: add subnets to it, or let kube-controller-manager give \
         Nodes \
         podCIDRs (--allocate-node-cidrs, --cluster-cidr)"
            .into()
    })
}

fn no_class(network: &Network, cluster: &Cluster) -> Option<String> {
    let name = &network.spec.class;
    let Some(class) = cluster.classes.get(name) else {
        return Some(format!(
            "there is no NetworkClass {name}: create it, or create the Network with another class"
        ));
    };
    let served = super::classes::runtimes(cluster, &class.spec.runtime).any(|r| r.healthy);
    (!served).then(|| {
        format!(
            "no node has the runtime {} of NetworkClass {name} ({})",
            class.spec.runtime,
            network_class::ACCEPTED
        )
    })
}

fn conflict(name: &str, primaries: &Primaries) -> Option<String> {
    let (namespace, owner) = primaries.conflicts.get(name)?;
    Some(format!(
        "namespace {namespace} has Network {owner} as its primary already: let only one of them select it"
    ))
}

/// The addresses of a Network must be nobody else's: not nodes', not services', not the default Network's.
/// Primary Networks may overlap each other.
fn overlap(name: &str, network: &Network, cluster: &Cluster, index: &Index<'_>) -> Option<String> {
    let mine: Vec<IpNet> = network.spec.subnets.iter().filter_map(|s| s.cidr.parse().ok()).collect();
    for cidr in &mine {
        if let Some((address, node)) = index.node_inside(*cidr) {
            return Some(format!("{cidr} holds {address}, the address of node {node}: use another range"));
        }
        if let Some(range) = cluster.service_ranges.iter().find(|r| overlaps(r, cidr)) {
            return Some(format!(
                "{cidr} overlaps {range}, where Services have their addresses: use another range"
            ));
        }
        if name == DEFAULT_NETWORK {
            continue;
        }
        let default = cluster.networks.get(DEFAULT_NETWORK);
        let default =
            default.iter().flat_map(|n| &n.spec.subnets).filter_map(|s| s.cidr.parse::<IpNet>().ok());
        if let Some(range) = default.into_iter().find(|r| overlaps(r, cidr)) {
            return Some(format!("{cidr} overlaps {range} of Network {DEFAULT_NETWORK}: use another range"));
        }
        if let Some((range, node)) = index.pod_range_over(*cidr) {
            return Some(format!("{cidr} overlaps {range}, the podCIDR of node {node}: use another range"));
        }
    }
    None
}

fn overlaps(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}
