//! NetworkPolicies that nobody enforces: their authors are told, once per object and by one place in the
//! cluster.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::action::{Action, Plan};
use crate::cluster::{Cluster, Memory, Now, PolicyView};
use crate::config::Config;

/// So many are told in one pass: what else is to be written does not wait for thousands of events.
const AT_ONCE: usize = 20;
/// And the next ones after this time.
const PAUSE: Duration = Duration::from_secs(1);

/// Says so on each NetworkPolicy that is new to this controller. What an earlier one said has the same name.
pub(super) fn warn(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Now, plan: &mut Plan) {
    let there: HashSet<&str> = cluster.policies.iter().map(|policy| policy.uid.as_str()).collect();
    memory.told.retain(|uid| there.contains(uid.as_str()));
    let untold = cluster.policies.iter().filter(|policy| !memory.told.contains(&policy.uid));
    let untold: Vec<_> = untold.take(AT_ONCE + 1).cloned().collect();
    if untold.len() > AT_ONCE {
        plan.again_at(now.steady + PAUSE);
    }
    for policy in untold.iter().take(AT_ONCE) {
        memory.told.insert(policy.uid.clone());
        let event = Box::new(event(policy, &config.identity, now.wall));
        plan.actions.push(Action::Tell { event, policy: policy.uid.clone() });
    }
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
            "this version of Knit does not enforce NetworkPolicies: pods stay reachable as if it were not \
             there"
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
