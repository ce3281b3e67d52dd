//! NetworkPolicies that Knit does not enforce, because it is told to leave them to others: their authors are
//! told, once per object and by one place in the cluster.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use knit_api::PolicyEnforcement;
use knit_api::names::DEFAULT_NETWORK;
use knit_model::{Claims, Network};
use knit_types::NetworkName;

use super::action::{Action, Plan, subject};
use crate::cluster::{Cluster, Memory, Now, PolicyView};
use crate::config::Config;

/// So many are told in one pass: what else is to be written does not wait for thousands of events.
const EVENTS_PER_PASS: usize = 20;
/// And the next ones after this time.
const NEXT_EVENTS_DELAY: Duration = Duration::from_secs(1);

/// Says so on each NetworkPolicy that is new to this controller. What an earlier one said has the same name.
pub(super) fn warn(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Now, plan: &mut Plan) {
    // The usual: there is nothing to say, however many policies there are, and none is looked at.
    let all_are_enforced = config.enforce_policies
        && config.serves_default
        && cluster.networks.values().all(|network| is_enforced_in(network));
    if all_are_enforced && memory.told.is_empty() {
        return;
    }
    let there: HashSet<&str> = cluster.policies.values().map(|policy| policy.uid.as_str()).collect();
    memory.told.retain(|uid| there.contains(uid.as_str()));
    if all_are_enforced {
        return;
    }
    let enforced = enforced(cluster, config);
    let mut left = EVENTS_PER_PASS;
    for policy in cluster.policies.values() {
        // Those that wait for another attempt take nobody's turn.
        if memory.told.contains(&policy.uid)
            || enforced(&policy.namespace)
            || plan.leaves_out(memory, &subject("events", &policy.uid), now)
        {
            continue;
        }
        let Some(fewer) = left.checked_sub(1) else {
            return plan.again_at(now.steady + NEXT_EVENTS_DELAY);
        };
        left = fewer;
        memory.told.insert(policy.uid.clone());
        let event = Box::new(event(policy, &config.identity, now.wall));
        plan.actions.push(Action::Tell { event, policy: policy.uid.clone() });
    }
}

/// Namespaces whose policies Knit enforces: those whose primary Network does not leave it to others, and is
/// not another CNI plugin's.
fn enforced<'a>(cluster: &'a Cluster, config: &Config) -> impl Fn(&str) -> bool + use<'a> {
    let (all, serves_default) = (config.enforce_policies, config.serves_default);
    let claims = Claims::of(cluster.networks.values());
    move |namespace| {
        let labels = cluster.namespaces.get(namespace).map(|view| &view.labels);
        let primary = labels
            .and_then(|labels| claims.selecting(labels).next())
            .map_or(DEFAULT_NETWORK, NetworkName::as_str);
        let ours = primary != DEFAULT_NETWORK || serves_default;
        all && ours && cluster.networks.get(primary).is_none_or(|network| is_enforced_in(network))
    }
}

fn is_enforced_in(network: &Network) -> bool {
    network.object().spec.policy.unwrap_or_default().enforcement == PolicyEnforcement::Knit
}

fn event(policy: &PolicyView, identity: &str, now: Timestamp) -> Event {
    Event {
        metadata: ObjectMeta {
            // Nothing of the policy's own name: cut short, it may not be one that the API takes.
            name: Some(format!("knit-not-enforced-{}", policy.uid)),
            namespace: Some(policy.namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(crate::REPORTER.into()),
        reporting_instance: Some(identity.chars().take(128).collect()),
        action: Some("Enforce".into()),
        reason: Some("NotEnforced".into()),
        type_: Some("Warning".into()),
        note: Some(
            "Knit does not enforce NetworkPolicies in this namespace; unless another component does, this \
             policy has no effect."
                .into(),
        ),
        regarding: Some(ObjectReference {
            api_version: Some("networking.k8s.io/v1".into()),
            kind: Some("NetworkPolicy".into()),
            namespace: Some(policy.namespace.clone()),
            name: Some(policy.name.clone()),
            uid: Some(policy.uid.clone()),
            ..ObjectReference::default()
        }),
        ..Event::default()
    }
}
