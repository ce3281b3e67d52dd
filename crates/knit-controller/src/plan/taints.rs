//! Keeping new pods away from nodes that cannot give them a network. Pods that run are never touched.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Taint;
use knit_api::conditions::node_network;
use knit_api::names::{DEFAULT_NETWORK, UNSCHEDULABLE_TAINT};

use super::action::{Action, Plan};
use crate::cluster::Cluster;

const NO_SCHEDULE: &str = "NoSchedule";

/// Why a node gets no new pods: the value of the taint, and words for the log.
#[derive(Clone, Copy)]
struct Why {
    value: &'static str,
    text: &'static str,
}

const AGENT_AWAY: Why = Why { value: "agent-away", text: "its agent does not answer" };
const NO_ADDRESS: Why =
    Why { value: "addresses-exhausted", text: "no address of the default Network is free" };

pub(super) fn on_nodes(cluster: &Cluster, now: Timestamp, plan: &mut Plan) {
    for (name, node) in &cluster.nodes {
        let why = reason(cluster, name, now, plan);
        let ours = |t: &Taint| t.key == UNSCHEDULABLE_TAINT && t.effect == NO_SCHEDULE;
        let has = node.taints.iter().find(|t| ours(t));
        if has.map(|t| t.value.as_deref().unwrap_or_default()) == why.map(|w| w.value) {
            continue;
        }
        let mut taints: Vec<Taint> = node.taints.iter().filter(|t| !ours(t)).cloned().collect();
        if let Some(why) = why {
            taints.push(Taint {
                key: UNSCHEDULABLE_TAINT.into(),
                value: Some(why.value.into()),
                effect: NO_SCHEDULE.into(),
                time_added: None,
            });
        }
        plan.actions.push(Action::Taints {
            node: name.clone(),
            resource_version: node.resource_version.clone(),
            taints,
            why: why.map_or("the network is there again", |w| w.text).into(),
        });
    }
}

fn reason(cluster: &Cluster, node: &str, now: Timestamp, plan: &mut Plan) -> Option<Why> {
    // A node without a Lease never had an agent: that is not for us to judge.
    if let Some(lease) = cluster.leases.get(node) {
        if lease.expires <= now {
            return Some(AGENT_AWAY);
        }
        plan.again_at(lease.expires);
    }
    let status = cluster.node_networks.get(node)?.status.as_ref()?;
    let default = status.networks.iter().find(|n| n.name == DEFAULT_NETWORK)?;
    let out = default.addresses.iter().any(|a| a.free == 0 && a.used > 0);
    (out || default.reason == node_network::REASON_NO_ADDRESS).then_some(NO_ADDRESS)
}
