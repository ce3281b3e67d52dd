//! Whether a Network can be served: what CEL cannot check, because it needs the rest of the cluster.

use std::collections::BTreeMap;
use std::net::IpAddr;

use knit_api::conditions::{network as reasons, network_class};
use knit_api::names::DEFAULT_NETWORK;
use knit_ipam::{Pool, Standing};
use knit_model::{Network, overlap};
use knit_types::{NetworkName, chain};

use super::index::Index;
use super::primary::Primaries;
use crate::cluster::Cluster;

/// What was found out about all Networks.
#[derive(Debug)]
pub(super) struct Verdicts<'a> {
    pub(super) of_network: BTreeMap<&'a str, Verdict<'a>>,
    pub(super) primaries: &'a Primaries,
}

/// What was found out about one Network.
#[derive(Debug)]
pub(super) struct Verdict<'a> {
    /// What it may give out, if that could be told.
    pub(super) pool: Option<&'a Pool>,
    /// What speaks against it: reason and message.
    pub(super) refused: Option<(&'static str, String)>,
}

impl Verdict<'_> {
    /// Whether blocks may be cut from it. That its class has no runtime yet, or that another Network has one
    /// of its namespaces, does not stand against that.
    pub(super) fn may_give_blocks(&self) -> bool {
        self.refused.as_ref().is_none_or(|(reason, _)| {
            *reason == reasons::REASON_NO_CLASS || *reason == reasons::REASON_PRIMARY_CONFLICT
        })
    }
}

pub(super) fn verdicts<'a>(
    cluster: &'a Cluster,
    index: &Index<'a>,
    ids: &BTreeMap<NetworkName, u32>,
) -> Verdicts<'a> {
    let primaries = index.primaries();
    let mut of_network = BTreeMap::new();
    for (name, network) in &cluster.networks {
        let pool = network.pool();
        let refused = match pool {
            Err(problem) => Some((reasons::REASON_INVALID, chain(problem))),
            Ok(pool) => invalid(name, cluster, ids, primaries)
                .or_else(|| network.check_underlay().err().map(|error| chain(&error)))
                .or_else(|| nodes(network))
                .or_else(|| pool.is_none().then(|| no_ranges(cluster)).flatten())
                .map(|message| (reasons::REASON_INVALID, message))
                .or_else(|| overlapping(network, pool, cluster, index).map(|m| (reasons::REASON_OVERLAP, m)))
                .or_else(|| no_class(network, cluster, index).map(|m| (reasons::REASON_NO_CLASS, m)))
                .or_else(|| conflict(name, primaries).map(|m| (reasons::REASON_PRIMARY_CONFLICT, m))),
        };
        of_network.insert(name.as_str(), Verdict { pool: pool.ok().flatten(), refused });
    }
    Verdicts { of_network, primaries }
}

fn invalid(
    name: &str,
    cluster: &Cluster,
    ids: &BTreeMap<NetworkName, u32>,
    primaries: &Primaries,
) -> Option<String> {
    let Some(id) = ids.get(name) else {
        return Some("no free Network ID: delete unused Networks".into());
    };
    // A number that two have, by whatever accident: the older one keeps it.
    let age = |name: &str| cluster.networks.get(name).map(|network| network.age());
    let other =
        ids.iter().find(|(other, theirs)| *theirs == id && other.as_str() != name && age(other) < age(name));
    if let Some((other, _)) = other {
        return Some(format!(
            "its ID {id} belongs to Network {other}: delete this Network and create it again"
        ));
    }
    primaries.invalid.get(name).cloned()
}

/// A selector of nodes that cannot be read: no node would know whether the Network is for it.
fn nodes(network: &Network) -> Option<String> {
    let error = network.node_selector_error()?;
    Some(format!("spec.nodeSelector cannot be read: {}", chain(error)))
}

/// A Network without subnets lives of the Nodes' podCIDRs.
fn no_ranges(cluster: &Cluster) -> Option<String> {
    let none = !cluster.nodes.is_empty() && cluster.nodes.values().all(|node| node.pod_ranges.is_empty());
    none.then(|| {
        "it has no subnets, and no Node has podCIDRs: add subnets to it, or have kube-controller-manager \
        assign podCIDRs to Nodes (--allocate-node-cidrs, --cluster-cidr)"
            .into()
    })
}

fn no_class(network: &Network, cluster: &Cluster, index: &Index<'_>) -> Option<String> {
    let name = network.class();
    let Some(class) = cluster.classes.get(name) else {
        return Some(format!(
            "NetworkClass {name} does not exist: create it, or create the Network with another class"
        ));
    };
    let served = index.runtime(&class.spec.runtime).is_some_and(|known| known.healthy > 0);
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
        "namespace {namespace} already has Network {owner} as its primary Network: let only one of them \
        select it"
    ))
}

/// The addresses of a Network must be nobody else's: not nodes', not services', not the default Network's.
/// Primary Networks may overlap each other.
fn overlapping(
    network: &Network,
    pool: Option<&Pool>,
    cluster: &Cluster,
    index: &Index<'_>,
) -> Option<String> {
    for cidr in network.ranges() {
        // On a segment of the nodes' own they may well be: as long as no pod gets their addresses.
        if !network.topology().has_router() {
            let given_out =
                |address: &IpAddr| pool.is_none_or(|pool| pool.standing(*address) == Standing::Ordinary);
            let taken = index.nodes_inside(*cidr).find(|(address, _)| given_out(address));
            if let Some((address, node)) = taken {
                return Some(format!(
                    "{cidr} contains {address}, the address of node {node}, which could be assigned to a \
                     pod: add it to the subnet's reserved ranges"
                ));
            }
        } else if let Some((address, node)) = index.node_inside(*cidr) {
            return Some(format!("{cidr} contains {address}, the address of node {node}: use another range"));
        }
        if let Some(range) = cluster.service_ranges.iter().find(|r| overlap(r, cidr)) {
            return Some(format!("{cidr} overlaps the service range {range}: use another range"));
        }
        if network.is_default() {
            continue;
        }
        let default = cluster.networks.get(DEFAULT_NETWORK);
        if let Some(range) =
            default.into_iter().flat_map(|network| network.ranges()).find(|r| overlap(r, cidr))
        {
            return Some(format!("{cidr} overlaps {range} of Network {DEFAULT_NETWORK}: use another range"));
        }
        if let Some((range, node)) = index.pod_range_over(*cidr) {
            return Some(format!("{cidr} overlaps {range}, the podCIDR of node {node}: use another range"));
        }
    }
    None
}
