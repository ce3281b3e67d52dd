//! What is known of NetworkClasses: whether a node has their runtime, and what all of them can do.

use jiff::Timestamp;
use knit_api::NetworkClassStatus;
use knit_api::conditions::network_class as reasons;

use super::action::{Action, Plan};
use super::index::Index;
use super::status::condition;
use crate::cluster::Cluster;

pub(super) fn statuses(cluster: &Cluster, index: &Index<'_>, now: Timestamp, plan: &mut Plan) {
    for (name, class) in &cluster.classes {
        let runtime = &class.spec.runtime;
        let old = class.status.clone().unwrap_or_default();
        let known = index.runtime(runtime);
        let accepted = known.is_some_and(|known| known.healthy > 0);
        let (reason, message) = if accepted {
            (reasons::REASON_ACCEPTED, String::new())
        } else {
            (
                reasons::REASON_NO_RUNTIME,
                format!("no node has a healthy runtime {runtime}: check its DaemonSet"),
            )
        };
        // What all of them can do.
        let features = known.into_iter().flat_map(|known| {
            known.features.iter().filter(|(_, count)| **count == known.entries).map(|(name, _)| name.clone())
        });
        let generation = class.metadata.generation;
        let status = NetworkClassStatus {
            conditions: vec![condition(
                &old.conditions,
                reasons::ACCEPTED,
                accepted,
                reason,
                message,
                generation,
                now,
            )],
            supported_features: features.collect(),
        };
        if class.status.as_ref() != Some(&status) {
            plan.actions.push(Action::ClassStatus { name: name.clone(), status });
        }
    }
}
