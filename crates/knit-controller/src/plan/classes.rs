//! What is known of NetworkClasses: whether a node has their runtime, and what all of them can do.

use std::collections::BTreeSet;

use jiff::Timestamp;
use knit_api::conditions::network_class as reasons;
use knit_api::{NetworkClassStatus, NodeRuntime};

use super::action::{Action, Plan};
use super::status::condition;
use crate::cluster::Cluster;

/// Every node's runtime of this name.
pub(super) fn runtimes<'a>(cluster: &'a Cluster, name: &'a str) -> impl Iterator<Item = &'a NodeRuntime> {
    cluster
        .node_networks
        .values()
        .filter_map(|node| node.status.as_ref())
        .flat_map(|status| &status.runtimes)
        .filter(move |runtime| runtime.name == name)
}

pub(super) fn statuses(cluster: &Cluster, now: Timestamp, plan: &mut Plan) {
    for (name, class) in &cluster.classes {
        let runtime = &class.spec.runtime;
        let old = class.status.clone().unwrap_or_default();
        let accepted = runtimes(cluster, runtime).any(|r| r.healthy);
        let (reason, message) = if accepted {
            (reasons::REASON_ACCEPTED, String::new())
        } else {
            (
                reasons::REASON_NO_RUNTIME,
                format!("no node has a healthy runtime {runtime}: is its DaemonSet there?"),
            )
        };
        let mut features: Option<BTreeSet<String>> = None;
        for runtime in runtimes(cluster, runtime) {
            let here: BTreeSet<String> = runtime.features.iter().cloned().collect();
            features = Some(features.map_or(here.clone(), |all| all.intersection(&here).cloned().collect()));
        }
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
            supported_features: features.unwrap_or_default().into_iter().collect(),
        };
        if class.status.as_ref() != Some(&status) {
            plan.actions.push(Action::ClassStatus { name: name.clone(), status });
        }
    }
}
