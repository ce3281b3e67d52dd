//! What is said of each Network.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use knit_api::NetworkStatus;
use knit_api::conditions::network as reasons;
use knit_model::Network;
use knit_types::NetworkName;

use super::accept::{Verdict, Verdicts};
use super::action::{Action, Plan, subject};
use super::counts::addresses;
use super::index::Index;
use crate::cluster::{Cluster, Memory, Now};
use crate::config::Config;
use crate::rate;

/// What statuses are made of.
pub(super) struct Known<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) index: &'a Index<'a>,
    pub(super) ids: &'a BTreeMap<NetworkName, u32>,
    pub(super) verdicts: &'a Verdicts<'a>,
}

pub(super) fn networks(known: &Known<'_>, memory: &mut Memory, config: &Config, now: Now, plan: &mut Plan) {
    let Known { cluster, index, ids, verdicts } = known;
    let there: HashSet<&str> = cluster.networks.values().map(|n| n.uid()).collect();
    memory.counted.retain(|uid, _| there.contains(uid.as_str()));
    let primary_in = verdicts.primaries.counts(cluster.namespaces.len());
    for (name, network) in &cluster.networks {
        let Some(verdict) = verdicts.of_network.get(name.as_str()) else { continue };
        let old = network.status().cloned().unwrap_or_default();
        let primary = primary_in.get(name.as_str()).copied().unwrap_or(0);
        let status = NetworkStatus {
            conditions: conditions(index, name, network, verdict, &old.conditions, now.wall),
            id: ids.get(name).copied(),
            addresses: addresses(index, name, network),
            primary_namespaces: Some(i32::try_from(primary).unwrap_or(i32::MAX)),
        };
        // A write that comes first in this plan makes another version of the Network, or lets it go.
        let changes_first =
            |action: &Action| matches!(action, Action::Finalizers { name: other, .. } if other == name);
        if network.status() == Some(&status) || plan.actions.iter().any(changes_first) {
            continue;
        }
        let next = memory.counted.get(network.uid()).map(|last| last.saturating_add(config.counts_every));
        if let Some(next) = next.filter(|next| now.steady < *next && is_only_counts(&old, &status)) {
            plan.again_at(next);
            continue;
        }
        if plan.leaves_out(memory, &subject("networks/status", name), now) {
            continue;
        }
        if let Err(next) = memory.rates.statuses.take(rate::STATUSES, now.steady) {
            plan.again_at(next);
            continue;
        }
        memory.counted.insert(network.uid().to_owned(), now.steady);
        let resource_version = network.resource_version().to_owned();
        plan.actions.push(Action::NetworkStatus { name: name.to_string(), resource_version, status });
    }
}

/// Whether two statuses differ in numbers and in words alone. That no address is free, or one is again, is
/// more than a number; a message names nodes, of which another one is not ready every second while agents are
/// replaced.
fn is_only_counts(old: &NetworkStatus, new: &NetworkStatus) -> bool {
    let rest = |status: &NetworkStatus| {
        let mut rest = status.clone();
        rest.primary_namespaces = None;
        for condition in &mut rest.conditions {
            condition.message.clear();
        }
        for counts in &mut rest.addresses {
            (counts.used, counts.free) = (0, counts.free.min(1));
        }
        rest
    };
    rest(old) == rest(new)
}

fn conditions(
    index: &Index<'_>,
    name: &str,
    network: &Network,
    verdict: &Verdict<'_>,
    old: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let generation = network.object().metadata.generation;
    let (accepted, reason, message) = match &verdict.refused {
        None => (true, reasons::REASON_ACCEPTED, String::new()),
        Some((reason, message)) => (false, *reason, message.clone()),
    };
    let accepted_condition = condition(old, reasons::ACCEPTED, accepted, reason, message, generation, now);
    let (ready, reason, message) = readiness(index, name, network, accepted);
    let mut all =
        vec![accepted_condition, condition(old, reasons::READY, ready, reason, message, generation, now)];
    if !network.topology().has_router() {
        for (type_, message) in NOT_THERE {
            let reason = reasons::REASON_NO_ROUTER;
            all.push(condition(old, type_, false, reason, message.into(), generation, now));
        }
    }
    all
}

/// What a Network without a router does not have, and what that means.
const NOT_THERE: [(&str, &str); 2] = [
    (
        reasons::SERVICES_SERVED,
        "Services are not available on this Network: its pods are attached directly to a link of their node, \
         without a Knit router",
    ),
    (
        reasons::POLICY_ENFORCED,
        "NetworkPolicies do not apply to this Network: its pods are attached directly to a node's link and \
         reachable by anyone on that segment",
    ),
];

fn readiness(
    index: &Index<'_>,
    name: &str,
    network: &Network,
    accepted: bool,
) -> (bool, &'static str, String) {
    if network.is_being_deleted()
        && let Some(user) = index.user_of(name)
    {
        return (
            false,
            reasons::REASON_IN_USE,
            format!("being deleted, but still used by {user}: remove these pods"),
        );
    }
    if !accepted {
        return (false, reasons::REASON_NOT_ACCEPTED, "see the condition Accepted".into());
    }
    let first: Vec<String> = index
        .not_ready(name)
        .take(3)
        .map(|(node, here)| format!("{node} ({})", here.message.as_deref().unwrap_or(&here.reason)))
        .collect();
    match index.not_ready_count(name) {
        0 => (true, reasons::REASON_READY, String::new()),
        n => {
            let mut message = format!("not set up on {}", first.join(", "));
            if n > 3 {
                message.push_str(&format!(" and {} more nodes", n - 3));
            }
            (false, reasons::REASON_NODES_NOT_READY, message)
        }
    }
}

/// A condition; its time is that of its last change of status.
pub(crate) fn condition(
    old: &[Condition],
    type_: &str,
    status: bool,
    reason: &str,
    message: String,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    let status = if status { "True" } else { "False" };
    let before = old.iter().find(|c| c.type_ == type_ && c.status == status);
    // Kubernetes keeps whole seconds; a plan that kept more would never be done.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: before.map_or(Time(now), |c| c.last_transition_time.clone()),
    }
}
