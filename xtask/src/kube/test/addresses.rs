//! A node whose addresses of the default Network run out: it gets no new pods, and keeps those that it has.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::support::{self, Overlay, field};
use super::{bad_input, pods};
use crate::kube::bed::Bed;
use crate::kube::images::PAUSE;
use crate::kube::wait::until;

/// Long enough for addresses to rest before they are given out again.
const LIMIT: Duration = Duration::from_secs(120);
/// More than a range of 16 addresses has.
const TOO_MANY: usize = 20;

/// Pods that the scheduler places.
fn scheduled(name: &str, replicas: usize) -> String {
    format!(
        "{{apiVersion: apps/v1, kind: ReplicaSet, metadata: {{name: {name}, namespace: out}}, spec: \
         {{replicas: {replicas}, \
         selector: {{matchLabels: {{app: {name}}}}}, template: {{metadata: {{labels: {{app: {name}}}}}, \
         spec: {{\
         terminationGracePeriodSeconds: 1, automountServiceAccountToken: false, enableServiceLinks: false, \
         containers: [{{name: pause, image: '{PAUSE}'}}]}}}}}}}}"
    )
}

fn taints(bed: &Bed) -> Result<String> {
    let path = "jsonpath={range .spec.taints[*]}{.key}={.value}:{.effect} {end}";
    bed.kubectl(&["get", "node", "n1", "-o", path])
}

pub fn run_out(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, "out")?;
    let range = bed.pod_ranges("n1")?.remove(0);
    ensure!(range.prefix_len() == 28, "the pod range of n1 is {range}");
    bed.apply(&scheduled("many", TOO_MANY))?;
    let taint = "knit.dev/network-unavailable=addresses-exhausted:NoSchedule";
    until("the node is tainted", LIMIT, || Ok(taints(bed)?.contains(taint).then_some(())))?;

    // All of the range are in use: all but the first, the gateway and the last.
    let running = until("all addresses are given out", LIMIT, || {
        let mut running = pods::pods(bed, "out")?;
        running.retain(|pod| pod.ready);
        Ok((running.len() >= 12).then_some(running))
    })?;
    pods::addresses_work(bed, "n1", &running)?;
    // A pod that was scheduled before the taint came waits, and its events say for what.
    let stuck = pods::pods(bed, "out")?.into_iter().find(|pod| !pod.ready && !pod.node.is_empty());
    if let Some(stuck) = &stuck {
        bad_input::event(bed, "out", &stuck.name, "no address of Network default is free")?;
    }
    bed.apply(&scheduled("late", 1))?;
    until("the scheduler keeps pods away", LIMIT, || {
        let late = pods::pods(bed, "out")?.into_iter().find(|pod| pod.name.starts_with("late"));
        let Some(late) = late else { return Ok(None) };
        ensure!(late.node.is_empty(), "{} was scheduled to a node without addresses", late.name);
        let path = "jsonpath={.status.conditions[?(@.type==\"PodScheduled\")].message}";
        let why = bed.kubectl(&["get", "pod", "-n", "out", &late.name, "-o", path])?;
        Ok(why.contains("untolerated taint").then_some(()))
    })?;
    // Nobody is evicted, and the node is as good as before for those who are there.
    let ready = field(bed, "default", "node/n1", "{.status.conditions[?(@.type==\"Ready\")].status}")?;
    ensure!(ready == "True", "n1 is not Ready ({ready}) because its addresses are out");
    pods::not_hurt(&running, &pods::pods(bed, "out")?)?;

    // Fewer pods: addresses rest a little, then new pods come.
    bed.kubectl(&["scale", "-n", "out", "rs/many", "--replicas=4"])?;
    let limit = format!("--timeout={}s", LIMIT.as_secs());
    let late = ["wait", "--for=condition=Ready", "pod", "-n", "out", "-l", "app=late", &limit];
    bed.kubectl(&late).map_err(|error| error.context(support::logs(bed)))?;
    until("the taint is gone", LIMIT, || Ok((!taints(bed)?.contains("knit.dev/")).then_some(())))?;
    let now: Vec<_> = pods::pods(bed, "out")?.into_iter().filter(|pod| pod.ready).collect();
    pods::addresses_work(bed, "n1", &now)?;
    pods::delete_namespace(bed, "out")
}
