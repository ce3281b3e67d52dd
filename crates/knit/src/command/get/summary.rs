//! What a controller would say of Networks, from what the nodes say: for a folder of objects, where there is
//! none.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use knit_api::{AddressCounts, Network, NodeNetwork, NodeNetworkStatusNetwork, conditions};

/// Fills in readiness and addresses where the object has none. A Network that no node has set up stays
/// without.
pub fn fill_in(networks: &mut [Network], nodes: &[NodeNetwork]) {
    for network in networks {
        let name = network.metadata.name.clone().unwrap_or_default();
        let on_nodes: Vec<(&str, &NodeNetworkStatusNetwork)> = nodes
            .iter()
            .flat_map(|node| {
                let node_name = node.metadata.name.as_deref().unwrap_or_default();
                let shown = node.status.iter().flat_map(|status| &status.networks);
                shown.map(move |network| (node_name, network))
            })
            .filter(|(_, shown)| shown.name == name)
            .collect();
        if on_nodes.is_empty() {
            continue;
        }
        let status = network.status.get_or_insert_default();
        if status.addresses.is_empty() {
            status.addresses = sum(on_nodes.iter().flat_map(|(_, shown)| &shown.addresses));
        }
        if !status.conditions.iter().any(|c| c.type_ == conditions::network::READY) {
            status.conditions.push(ready(&on_nodes));
        }
    }
}

fn sum<'a>(counts: impl Iterator<Item = &'a AddressCounts>) -> Vec<AddressCounts> {
    let mut total: Vec<AddressCounts> = Vec::new();
    for count in counts {
        match total.iter_mut().find(|t| t.family == count.family) {
            Some(t) => (t.used, t.free) = (t.used + count.used, t.free + count.free),
            None => total.push(count.clone()),
        }
    }
    total
}

fn ready(on_nodes: &[(&str, &NodeNetworkStatusNetwork)]) -> Condition {
    let behind: Vec<&str> = on_nodes.iter().filter(|(_, n)| !n.ready).map(|(node, _)| *node).collect();
    let (status, reason, message) = if behind.is_empty() {
        ("True", conditions::network::REASON_READY, "set up on every node that needs it".to_owned())
    } else {
        ("False", conditions::network::REASON_NODES_NOT_READY, format!("not ready on {}", behind.join(", ")))
    };
    Condition {
        type_: conditions::network::READY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    }
}
