//! Keeping new pods away from nodes that cannot give them a network. Pods that run are never touched.
//!
//! An agent is away when its Lease has not changed for as long as it holds, by the controller's own clock,
//! while the controller would have heard of a change: its own renewals come by the same watch. If most agents
//! seem to be away at once, it is more likely that something is wrong with the API server or with the
//! controller, and no further node is closed.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;
use knit_api::conditions::node_network;
use knit_api::names::{DEFAULT_NETWORK, UNSCHEDULABLE_TAINT};

use super::action::{Action, Plan, subject};
use crate::cluster::{AgentLease, Agents, Cluster, Memory, Now, SeenLease};
use crate::config::Config;
use crate::rate;

const NO_SCHEDULE: &str = "NoSchedule";
/// Passes that are further apart than this were not the controller's own will: it was stopped, or starved.
/// After this time without its own renewal, nothing arrives at all.
const OWN_RENEWAL_TIMEOUT: Duration = Duration::from_secs(30);
/// So many agents may be away together in a cluster of any size.
const TOLERATED_AWAY_AGENTS: usize = 2;

/// Why a node gets no new pods: the value of the taint, and words for the log.
#[derive(Clone, Copy)]
struct TaintReason {
    value: &'static str,
    text: &'static str,
}

const AGENT_AWAY: TaintReason = TaintReason { value: "agent-away", text: "its agent does not answer" };
const NO_ADDRESS: TaintReason =
    TaintReason { value: "addresses-exhausted", text: "no address of the default Network is free" };

/// What is known of an agent.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Agent {
    Alive,
    Away,
    /// Not heard of yet, but there was not enough time for it either.
    Unknown,
}

pub(super) fn on_nodes(
    cluster: &Cluster,
    config: &Config,
    memory: &mut Memory,
    (now, heard): (Now, bool),
    plan: &mut Plan,
) {
    let agents = memory.agents.judge(cluster, (now, heard), plan);
    let away = agents.values().filter(|agent| **agent == Agent::Away).count();
    let most = away > TOLERATED_AWAY_AGENTS && away * 2 > agents.len();
    for (name, node) in &cluster.nodes {
        let ours = |t: &Taint| t.key == UNSCHEDULABLE_TAINT && t.effect == NO_SCHEDULE;
        let has = node.taints.iter().find(|t| ours(t)).map(|t| t.value.as_deref().unwrap_or_default());
        let closed = has == Some(AGENT_AWAY.value);
        // A node without a Lease never had an agent: that is not for us to judge.
        let agent = agents.get(name.as_str());
        let away = match agent {
            Some(Agent::Away) if most && !closed => {
                plan.held_back += 1;
                false
            }
            Some(Agent::Away) => true,
            Some(Agent::Unknown) => closed,
            Some(Agent::Alive) | None => false,
        };
        // Where another CNI plugin is the network of Nodes, what an earlier installation closed is opened.
        let why = if !config.serves_default {
            None
        } else if away {
            Some(AGENT_AWAY)
        } else {
            out_of_addresses(cluster, name).then_some(NO_ADDRESS)
        };
        if has == why.map(|w| w.value) {
            continue;
        }
        if plan.leaves_out(memory, &subject("nodes", name), now) {
            continue;
        }
        if let Err(next) = memory.rates.taints.take(rate::TAINTS, now.steady) {
            plan.again_at(next);
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
            why: why.map_or("the network is available again", |w| w.text).into(),
        });
    }
}

fn out_of_addresses(cluster: &Cluster, node: &str) -> bool {
    let status = cluster.node_networks.get(node).and_then(|object| object.status.as_ref());
    let networks = status.map_or(&[][..], |status| status.networks.as_slice());
    let Some(default) = networks.iter().find(|n| n.name == DEFAULT_NETWORK) else { return false };
    let out = default.addresses.iter().any(|a| a.free == 0 && a.used > 0);
    out || default.reason == node_network::REASON_NO_ADDRESS
}

// === impl Agents ===

impl Agents {
    /// Whether the controller would have heard of a renewal since its last pass. Called once per pass.
    pub(super) fn listen(&mut self, cluster: &Cluster, config: &Config, now: Now) -> bool {
        let gap = self.last_pass.replace(now.steady).map(|last| now.steady.saturating_sub(last));
        let hears_itself = self.hears_itself(cluster.leases.get(&config.lease_name), now);
        cluster.hears_agents && gap.is_some_and(|gap| gap <= OWN_RENEWAL_TIMEOUT) && hears_itself
    }

    /// What is known of the agents of nodes that are there.
    fn judge<'a>(
        &mut self,
        cluster: &'a Cluster,
        (now, heard): (Now, bool),
        plan: &mut Plan,
    ) -> HashMap<&'a str, Agent> {
        self.leases.retain(|node, _| cluster.leases.contains_key(node));
        let here = cluster.leases.iter().filter(|(node, _)| cluster.nodes.contains_key(*node));
        here.map(|(node, lease)| {
            let seen = self.leases.entry(node.clone()).or_insert_with(|| SeenLease::first(lease, now));
            (node.as_str(), seen.look(lease, heard, now, plan))
        })
        .collect()
    }

    /// Whether the controller's own renewals arrive. A watch may be open and say nothing any more: then they
    /// do not.
    fn hears_itself(&mut self, lease: Option<&AgentLease>, now: Now) -> bool {
        let Some(lease) = lease else { return false };
        if self.own.as_ref().is_none_or(|(version, _)| *version != lease.version) {
            self.own = Some((lease.version.clone(), now.steady));
        }
        self.own.as_ref().is_some_and(|(_, since)| now.steady.saturating_sub(*since) <= OWN_RENEWAL_TIMEOUT)
    }
}

// === impl SeenLease ===

impl SeenLease {
    fn first(lease: &AgentLease, now: Now) -> Self {
        Self { version: lease.version.clone(), since: now.steady, renewed: false }
    }

    fn look(&mut self, lease: &AgentLease, heard: bool, now: Now, plan: &mut Plan) -> Agent {
        if self.version != lease.version {
            *self = Self { renewed: true, ..Self::first(lease, now) };
        } else if !heard {
            // Renewals may have passed us by: the agent gets its whole time again.
            *self = Self::first(lease, now);
        }
        let over = self.since.saturating_add(lease.holds);
        if now.steady >= over {
            return Agent::Away;
        }
        plan.again_at(over);
        if self.renewed { Agent::Alive } else { Agent::Unknown }
    }
}
