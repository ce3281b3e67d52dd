//! Faults under load, with the DaemonSet's own image: whatever goes away comes back, no pod is hurt, nothing
//! is left.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use knit_kernel::{Handle, NetNs};
use rustix::process::{Pid, Signal, kill_process};

use super::pods;
use super::support::{self, Overlay, field};
use super::talk::{self, all_ways, none_lost};
use super::talkers::Talkers;
use super::traces::Before;
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;

/// How long what was stopped may take to serve again.
const LIMIT: Duration = Duration::from_secs(120);
/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(60);
/// Where the kubelet looks for static pods.
const STATIC: &str = "/etc/kubernetes/manifests/while-away.json";
/// The port of the static pod, by which its process is known.
const STATIC_PORT: u16 = 8099;

/// Kills the agent of a node as the kernel's out-of-memory killer would, and waits until the next one is
/// ready.
pub fn kill_agent(bed: &Bed, node: &str) -> Result<()> {
    let agent = pods::agent(bed, node)?;
    let is_knit = |process: &u32| {
        std::fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim() == "knit")
    };
    let process = agent.processes()?.into_iter().find(is_knit);
    let process = process.with_context(|| format!("{} has no process named knit", agent.name))?;
    let process = Pid::from_raw(process.cast_signed()).context("a process has a number")?;
    kill_process(process, Signal::KILL).context("cannot kill the agent")?;
    until(&format!("the agent of {node} is back"), LIMIT, || {
        let now = pods::agent(bed, node)?;
        Ok((now.ready && now.restarts > agent.restarts).then_some(()))
    })
}

/// The agent is killed twice while 50 pods start: all come, each with an address that works, and go without a
/// trace.
pub fn agent_killed(bed: &Bed) -> Result<()> {
    const COUNT: usize = 50;
    support::install(bed, Overlay::Full)?;
    let talkers = Talkers::start(bed, "kill-talk")?;
    support::namespace(bed, "kill")?;
    let before = Before::look(bed)?;
    none_lost(&talkers.client, &talkers.flows(), || {
        pods::crowd(bed, "kill", "n1", COUNT)?;
        for some in [1, COUNT / 2] {
            until(&format!("{some} of the pods are ready"), LIMIT, || {
                Ok((pods::crowd_ready(bed, "kill")? >= some).then_some(()))
            })?;
            kill_agent(bed, "n1")?;
        }
        pods::crowd_complete(bed, "kill", COUNT)?;
        let crowd = pods::pods(bed, "kill")?;
        ensure!(crowd.len() == COUNT, "there are {} pods", crowd.len());
        pods::addresses_work(bed, "n1", &crowd)?;
        pods::crowd_gone(bed, "kill")?;
        before.nothing_is_left(bed)
    })?;
    talkers.not_hurt(bed)?;
    pods::delete_namespace(bed, "kill")?;
    pods::delete_namespace(bed, "kill-talk")
}

/// None to a hundred pods on one node, and back.
pub fn hundred_pods(bed: &Bed) -> Result<()> {
    const COUNT: usize = 100;
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, "hundred")?;
    let before = Before::look(bed)?;
    pods::crowd(bed, "hundred", "n1", COUNT)?;
    pods::crowd_complete(bed, "hundred", COUNT)?;
    let crowd = pods::pods(bed, "hundred")?;
    ensure!(crowd.len() == COUNT, "there are {} pods", crowd.len());
    pods::addresses_work(bed, "n1", &crowd)?;
    pods::crowd_gone(bed, "hundred")?;
    before.nothing_is_left(bed)?;
    pods::delete_namespace(bed, "hundred")
}

/// containerd and the kubelet are restarted on both nodes while pods talk.
pub fn node_daemons_restart(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    let talkers = Talkers::start(bed, "restart")?;
    let agents = pods::pods(bed, "knit-system")?;
    let before = Before::look(bed)?;
    none_lost(&talkers.client, &talkers.flows(), || {
        for node in bed.nodes() {
            bed.restart_containerd(&node)?;
            let renewed = renewed(bed, &node)?;
            bed.restart_kubelet(&node)?;
            until(&format!("the kubelet of {node} renews its Lease"), LIMIT, || {
                Ok((self::renewed(bed, &node)? != renewed).then_some(()))
            })?;
        }
        bed.wait_for_nodes(LIMIT)?;
        // New pods come and go as before.
        support::namespace(bed, "restart-new")?;
        pods::crowd(bed, "restart-new", "n1", 3)?;
        pods::crowd_complete(bed, "restart-new", 3)?;
        pods::addresses_work(bed, "n1", &pods::pods(bed, "restart-new")?)?;
        pods::crowd_gone(bed, "restart-new")?;
        before.nothing_is_left(bed)
    })?;
    talkers.not_hurt(bed)?;
    pods::not_hurt(&agents, &pods::pods(bed, "knit-system")?)?;
    pods::delete_namespace(bed, "restart-new")?;
    pods::delete_namespace(bed, "restart")
}

/// When a node's kubelet was last heard of.
fn renewed(bed: &Bed, node: &str) -> Result<String> {
    field(bed, "kube-node-lease", &format!("lease/{node}"), "{.spec.renewTime}")
}

/// The API server is away for a minute: pods go on, a pod that the kubelet starts by itself meanwhile gets
/// its network, and everything that changed arrives afterwards.
pub fn api_away(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    let talkers = Talkers::start(bed, "away")?;
    bed.apply(&format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: late, namespace: away}}, spec: {{selector: \
         {{app: late}}, \
         ports: [{{port: 80, targetPort: {STATIC_PORT}}}]}}}}"
    ))?;
    let agents = pods::pods(bed, "knit-system")?;
    let manifest = bed.node_path("n2", STATIC)?;
    std::fs::create_dir_all(manifest.parent().context("a folder")?)?;
    // Pods go on all the time. Services are watched while the server is away only: afterwards Kubernetes
    // itself may take a node for lost for a moment, and its endpoints away.
    let address = none_lost(&talkers.client, &all_ways(talkers.direct), || {
        bed.stop_api()?;
        let stopped = Instant::now();
        let address = none_lost(&talkers.client, &talkers.flows(), || {
            std::fs::write(&manifest, static_pod())?;
            let process = until("the kubelet starts the static pod", LIMIT, static_process)?;
            let address = main_address(&NetNs::of_process(process)?)?;
            let to = (address, STATIC_PORT).into();
            until("a pod of another node reaches the static pod", LIMIT, || {
                Ok(talk::http(&talkers.client, to, "/hostname")?.map(drop))
            })?;
            until("the time is over", AWAY * 2, || Ok((stopped.elapsed() >= AWAY).then_some(())))?;
            Ok(address)
        })?;
        bed.start_api()?;
        Ok(address)
    })?;
    bed.kubectl(&["wait", "--for=create", "-n", "away", "pod/late-n2", "--timeout=90s"])?;
    support::pods_ready(bed, "away")?;
    let late = pods::pod(bed, "away", "late-n2")?;
    ensure!(late.address()? == address, "late-n2 has {address}, and the API says {:?}", late.address);
    // It is behind a Service now, which all nodes hear of.
    let service = (pods::cluster_ip(bed, "away", "late")?, 80).into();
    until("the Service of the static pod", LIMIT, || {
        Ok(talk::http(&talkers.client, service, "/hostname")?.map(drop))
    })?;
    talkers.not_hurt(bed)?;
    pods::not_hurt(&agents, &pods::pods(bed, "knit-system")?)?;
    // Agents are heard of again, so pods are scheduled again.
    until("no node is tainted", LIMIT, || {
        let taints = bed.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].spec.taints[*].key}"])?;
        Ok(taints.is_empty().then_some(()))
    })?;
    std::fs::remove_file(&manifest)?;
    bed.kubectl(&["wait", "--for=delete", "-n", "away", "pod/late-n2", "--timeout=90s"])?;
    pods::delete_namespace(bed, "away")
}

/// A pod that only the kubelet knows of at first, and a label by which a Service finds it.
fn static_pod() -> String {
    serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "late", "namespace": "away", "labels": { "app": "late" } },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "agnhost", "image": AGNHOST,
                "args": ["netexec", format!("--http-port={STATIC_PORT}"), "--udp-port=-1"],
            }],
        },
    })
    .to_string()
}

fn static_process() -> Result<Option<u32>> {
    let mark = format!("--http-port={STATIC_PORT}");
    let found = pods::processes(|process| {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())
    })?;
    Ok(found.first().copied())
}

/// The IPv4 address of `eth0`.
fn main_address(space: &NetNs) -> Result<std::net::IpAddr> {
    let handle = Handle::open(space)?;
    let eth0 = handle.index_of(&knit_kernel::IfName::new("eth0")?)?;
    let addresses = handle.addresses(Some(eth0))?;
    let v4 = addresses.iter().map(|address| address.address.addr()).find(std::net::IpAddr::is_ipv4);
    v4.context("eth0 has no IPv4 address")
}
