//! Pods of tests: many at once, their processes and network namespaces on this machine, what became of them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use knit_kernel::NetNs;
use serde_json::Value;

use super::support::{field, logs};
use crate::kube::bed::Bed;
use crate::kube::images::PAUSE;

/// What tests look at of a pod.
#[derive(Debug, Clone)]
pub struct Pod {
    pub name: String,
    pub node: String,
    pub address: Option<IpAddr>,
    pub ready: bool,
    pub restarts: u64,
    /// What the kubelet calls it: a static pod's is not that of the object.
    uid: String,
}

/// The pods of a namespace.
pub fn pods(bed: &Bed, namespace: &str) -> Result<Vec<Pod>> {
    let list = bed.kubectl_json(&["get", "pods", "-n", namespace])?;
    list["items"].as_array().context("a list of pods")?.iter().map(Pod::of).collect()
}

/// One pod.
pub fn pod(bed: &Bed, namespace: &str, name: &str) -> Result<Pod> {
    Pod::of(&bed.kubectl_json(&["get", "pod", "-n", namespace, name])?)
}

/// The agent's pod of a node.
pub fn agent(bed: &Bed, node: &str) -> Result<Pod> {
    let agents = pods(bed, "knit-system")?;
    let found = agents.into_iter().find(|pod| pod.node == node && pod.name.starts_with("knit-node-"));
    found.with_context(|| format!("{node} has no agent"))
}

impl Pod {
    fn of(object: &Value) -> Result<Self> {
        let text = |path: &str| object.pointer(path).and_then(Value::as_str).map(str::to_owned);
        let conditions = object["status"]["conditions"].as_array();
        let ready = |c: &Value| c["type"] == "Ready" && c["status"] == "True";
        let containers = object["status"]["containerStatuses"].as_array();
        let hash = text("/metadata/annotations/kubernetes.io~1config.hash");
        Ok(Self {
            name: text("/metadata/name").context("a pod has a name")?,
            node: text("/spec/nodeName").unwrap_or_default(),
            address: text("/status/podIP").map(|address| address.parse()).transpose()?,
            ready: conditions.is_some_and(|all| all.iter().any(ready)),
            restarts: containers.into_iter().flatten().filter_map(|c| c["restartCount"].as_u64()).sum(),
            uid: hash.or_else(|| text("/metadata/uid")).context("a pod has a uid")?,
        })
    }

    /// Its address.
    pub fn address(&self) -> Result<IpAddr> {
        self.address.with_context(|| format!("{} has no address", self.name))
    }

    /// Its processes, in this machine's numbers.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let mark = format!("pod{}", self.uid);
        processes(|process| {
            let groups = std::fs::read_to_string(format!("/proc/{process}/cgroup"));
            groups.is_ok_and(|groups| groups.contains(&mark))
        })
    }

    /// Its network namespace.
    pub fn space(&self) -> Result<NetNs> {
        let process = self.processes()?.into_iter().next();
        Ok(NetNs::of_process(process.with_context(|| format!("{} has no process", self.name))?)?)
    }
}

/// All processes of this machine that are such. One that ends meanwhile is none.
pub fn processes(such: impl Fn(u32) -> bool) -> Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc").context("/proc cannot be read")?;
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(numbers.filter(|number| such(*number)).collect())
}

/// Pods that only hold an address, as one set on a node.
pub fn crowd(bed: &Bed, namespace: &str, node: &str, count: usize) -> Result<()> {
    bed.apply(&format!(
        "{{apiVersion: apps/v1, kind: ReplicaSet, metadata: {{name: crowd, namespace: {namespace}}}, spec: \
         {{replicas: {count}, \
         selector: {{matchLabels: {{app: crowd}}}}, template: {{metadata: {{labels: {{app: crowd}}}}, spec: \
         {{nodeName: {node}, \
         terminationGracePeriodSeconds: 1, automountServiceAccountToken: false, enableServiceLinks: false, \
         containers: [{{name: pause, image: '{PAUSE}'}}]}}}}}}}}"
    ))
    .map(drop)
}

/// How many of them are ready.
pub fn crowd_ready(bed: &Bed, namespace: &str) -> Result<usize> {
    let ready =
        bed.kubectl(&["get", "rs", "-n", namespace, "crowd", "-o", "jsonpath={.status.readyReplicas}"])?;
    Ok(if ready.is_empty() { 0 } else { ready.parse()? })
}

/// Waits until all of them are ready.
pub fn crowd_complete(bed: &Bed, namespace: &str, count: usize) -> Result<()> {
    let all = format!("--for=jsonpath={{.status.readyReplicas}}={count}");
    let complete = bed.kubectl(&["wait", &all, "-n", namespace, "rs/crowd", "--timeout=240s"]);
    complete.map(drop).map_err(|error| {
        let events = bed.kubectl(&["get", "events", "-n", namespace, "--field-selector=type=Warning"]);
        error.context(format!("{}\n{}", events.unwrap_or_default(), logs(bed)))
    })
}

/// Takes all of them away, and waits until they are gone.
pub fn crowd_gone(bed: &Bed, namespace: &str) -> Result<()> {
    bed.kubectl(&["scale", "-n", namespace, "rs/crowd", "--replicas=0"])?;
    bed.kubectl(&["wait", "--for=delete", "pod", "-n", namespace, "-l", "app=crowd", "--timeout=120s"])?;
    bed.kubectl(&["delete", "-n", namespace, "rs/crowd", "--timeout=30s"]).map(drop)
}

/// Every pod has an address of its own out of its node's range, and the node reaches it there.
pub fn addresses_work(bed: &Bed, node: &str, pods: &[Pod]) -> Result<()> {
    let (ranges, space) = (bed.pod_ranges(node)?, bed.node_ns(node)?);
    let mut seen = BTreeSet::new();
    for pod in pods {
        let address = pod.address()?;
        ensure!(seen.insert(address), "{address} is given twice, the second time to {}", pod.name);
        ensure!(
            ranges.iter().any(|range| range.contains(&address)),
            "{} has {address}, which is outside of {ranges:?}",
            pod.name
        );
        // Nothing listens there: the pod's own kernel refuses, which it can only if it was reached.
        let reached = super::talk::answers(&space, (address, 9).into())?;
        ensure!(reached, "{node} does not reach {} at {address}", pod.name);
    }
    Ok(())
}

/// That nothing was started again since `before`.
pub fn not_hurt(before: &[Pod], after: &[Pod]) -> Result<()> {
    for old in before {
        let new = after.iter().find(|new| new.name == old.name);
        let new = new.with_context(|| format!("{} is gone", old.name))?;
        ensure!(new.uid == old.uid, "{} is another pod than before", old.name);
        ensure!(
            new.restarts == old.restarts,
            "{} was restarted {} times",
            old.name,
            new.restarts - old.restarts
        );
        ensure!(
            new.address == old.address,
            "{} has {:?} in place of {:?}",
            old.name,
            new.address,
            old.address
        );
    }
    Ok(())
}

/// Deletes a namespace with all in it.
pub fn delete_namespace(bed: &Bed, name: &str) -> Result<()> {
    bed.kubectl(&["delete", "namespace", name, "--timeout=90s"]).map(drop).map_err(|error| {
        let left = bed.kubectl(&["get", "pods,networkattachments", "-n", name, "-o", "wide"]);
        error.context(format!("{}\n{}", left.unwrap_or_default(), logs(bed)))
    })
}

/// The address of a Service.
pub fn cluster_ip(bed: &Bed, namespace: &str, service: &str) -> Result<IpAddr> {
    Ok(field(bed, namespace, &format!("service/{service}"), "{.spec.clusterIP}")?.parse()?)
}
