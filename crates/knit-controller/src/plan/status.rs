//! What is said of each Network.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use knit_api::conditions::network as reasons;
use knit_api::{Network, NetworkStatus};

use super::accept::{Verdict, Verdicts};
use super::action::{Action, Plan};
use super::counts::addresses;
use super::index::Index;
use crate::cluster::Cluster;

pub(super) fn networks(
    cluster: &Cluster,
    index: &Index<'_>,
    ids: &BTreeMap<String, u32>,
    verdicts: &Verdicts,
    now: Timestamp,
    plan: &mut Plan,
) {
    for (name, network) in &cluster.networks {
        let Some(verdict) = verdicts.of_network.get(name) else { continue };
        let old = network.status.clone().unwrap_or_default();
        let primary = verdicts.primaries.count(name, cluster.namespaces.len());
        let status = NetworkStatus {
            conditions: conditions(index, name, network, verdict, &old.conditions, now),
            id: ids.get(name).copied(),
            addresses: addresses(index, name, network),
            primary_namespaces: Some(i32::try_from(primary).unwrap_or(i32::MAX)),
        };
        // A write that comes first in this plan makes another version of the Network, or lets it go.
        let changes_first =
            |action: &Action| matches!(action, Action::Finalizers { name: other, .. } if other == name);
        if network.status.as_ref() != Some(&status) && !plan.actions.iter().any(changes_first) {
            let resource_version = network.metadata.resource_version.clone().unwrap_or_default();
            plan.actions.push(Action::NetworkStatus { name: name.clone(), resource_version, status });
        }
    }
}

fn conditions(
    index: &Index<'_>,
    name: &str,
    network: &Network,
    verdict: &Verdict,
    old: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let generation = network.metadata.generation;
    let (accepted, reason, message) = match &verdict.refused {
        None => (true, reasons::REASON_ACCEPTED, String::new()),
        Some((reason, message)) => (false, *reason, message.clone()),
    };
    let accepted_condition = condition(old, reasons::ACCEPTED, accepted, reason, message, generation, now);
    let (ready, reason, message) = readiness(index, name, network, accepted);
    vec![accepted_condition, condition(old, reasons::READY, ready, reason, message, generation, now)]
}

fn readiness(
    index: &Index<'_>,
    name: &str,
    network: &Network,
    accepted: bool,
) -> (bool, &'static str, String) {
    if network.metadata.deletion_timestamp.is_some()
        && let Some(user) = index.user_of(name)
    {
        return (
            false,
            reasons::REASON_IN_USE,
            format!("being deleted, and used by {user}: remove these pods"),
        );
    }
    if !accepted {
        return (false, reasons::REASON_NOT_ACCEPTED, "see the condition Accepted".into());
    }
    let not_ready: Vec<String> = index
        .said(name)
        .iter()
        .filter(|(_, here)| !here.ready)
        .map(|(node, here)| format!("{node} ({})", here.message.as_deref().unwrap_or(&here.reason)))
        .collect();
    match not_ready.len() {
        0 => (true, reasons::REASON_READY, String::new()),
        n => {
            let mut message = format!("not set up on {}", not_ready[..n.min(3)].join(", "));
            if n > 3 {
                message.push_str(&format!(" and {} more nodes", n - 3));
            }
            (false, reasons::REASON_NODES_NOT_READY, message)
        }
    }
}

/// A condition; its time is that of its last change of status.
pub(super) fn condition(
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
