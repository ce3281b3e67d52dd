//! Knit beside another CNI plugin, attached through the NRI of a real containerd: by annotation (overlay
//! `secondary`) and by claim (overlay `dra`), with agent and runtime going away and coming back.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use knit_kernel::{Handle, IfName};
use serde_json::{Value, json};

use super::faults::kill_agent;
use super::pods::{self, Pod};
use super::support::{self, Overlay};
use super::talk::{all_ways, none_lost};
use super::traces::{self, Traces};
use super::{claims, proofs};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::machine::control::Stop;
use crate::kube::wait::until;

const SPACE: &str = "beside";
const LIMIT: Duration = Duration::from_secs(90);
/// What pods ask for, and what asks the runtime to hold them back while the agent is away.
const ASKS: &str = "knit.dev/networks";
const REQUIRES: &str = "required-plugins.noderesource.dev";
const PORT: u16 = 8080;

const NETWORK: &str = "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: storage}, spec: \
    {topology: Layer2, subnets: [{cidr: 10.77.0.0/24}], allowedNamespaces: {from: All}}}";

/// By annotation, then by claim, with the overlay of each; the overlays are removed, and nothing is left.
pub fn smoke(bed: &Bed) -> Result<()> {
    let bare = bare(bed)?;
    support::install(bed, Overlay::Secondary)?;
    annotations(bed)?;
    // The agents of one overlay are replaced by those of the other.
    support::install(bed, Overlay::Dra)?;
    claims(bed)?;
    support::uninstall(bed, Overlay::Dra)?;
    as_bare(bed, &bare)
}

/// Pods keep the other plugin's interface and get theirs; what cannot be attached does not start.
fn annotations(bed: &Bed) -> Result<()> {
    // No container runs before the sandbox has what it asks for, and then it starts without anybody's help.
    bed.apply(&pod("early", "n1", &[(ASKS, "later")]))?;
    told(bed, "early", "later")?;
    ensure!(!pods::pod(bed, SPACE, "early")?.ready, "early is ready without its Network");
    for network in [NETWORK.to_owned(), NETWORK.replace("storage", "later").replace("10.77", "10.78")] {
        bed.apply(&network)?;
    }
    bed.apply(&pod("client", "n1", &[(ASKS, "storage")]))?;
    bed.apply(&pod("server", "n2", &[(ASKS, "storage")]))?;
    bed.apply(&pod("plain", "n1", &[]))?;
    support::pods_ready(bed, SPACE)?;
    let (client, server) = (pods::pod(bed, SPACE, "client")?, pods::pod(bed, SPACE, "server")?);
    for pod in [&client, &server, &pods::pod(bed, SPACE, "plain")?] {
        let address = pod.address()?;
        let ranges = bed.pod_ranges(&pod.node)?;
        ensure!(ranges.iter().any(|range| range.contains(&address)), "{} has {address}", pod.name);
    }
    ensure!(!has(&pods::pod(bed, SPACE, "plain")?, "net1")?, "a pod that asks for nothing has net1");
    proofs::hears(&client.space()?, attached(bed, "server")?, "server")?;
    proofs::hears(&server.space()?, (client.address()?, PORT).into(), "client")?;

    ensure!(has(&pods::pod(bed, SPACE, "early")?, "net1")?, "early has no net1");

    bed.kubectl(&["delete", "pod", "-n", SPACE, "--all", "--timeout=60s"])?;
    bed.kubectl(&["delete", "network", "storage", "later", "--timeout=60s"]).map(drop)
}

/// Claims are attached, annotations are refused there. A claim keeps its address whoever was killed.
fn claims(bed: &Bed) -> Result<()> {
    bed.apply(&claims::network("blue", "10.79.0.0/24").to_string())?;
    bed.kubectl(&["wait", "--for=create", "deviceclass/knit-blue", "--timeout=60s"])?;
    bed.apply(&claims::template(SPACE).to_string())?;
    let by_template = json!({ "resourceClaimTemplateName": "blue" });
    for (name, node) in [("client", "n1"), ("server", "n2")] {
        let mut pod = claims::pod(SPACE, name, Some(by_template.clone()), None);
        pod["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
        bed.apply(&pod.to_string())?;
    }
    support::pods_ready(bed, SPACE)?;
    let server = claims::address(bed, SPACE, "server", Some("data0"))?;
    let client = claims::address(bed, SPACE, "client", Some("data0"))?;
    let server: SocketAddr = format!("{server}:{PORT}").parse()?;
    proofs::hears(&pods::pod(bed, SPACE, "client")?.space()?, server, "server")?;

    bed.apply(&pod("refused", "n1", &[(ASKS, "blue")]))?;
    told(bed, "refused", "ResourceClaim")?;
    bed.kubectl(&["delete", "pod", "-n", SPACE, "refused", "--timeout=60s"])?;

    // The runtime is killed, and the agent of the same node: the claim and its address stay.
    bed.machine("n1").stop("containerd", Stop::Kill)?;
    bed.machine("n1").start_again("containerd")?;
    bed.wait_for_containerd("n1")?;
    kill_agent(bed, "n1")?;
    ensure!(claims::address(bed, SPACE, "client", Some("data0"))? == client, "another address");
    proofs::hears(&pods::pod(bed, SPACE, "client")?.space()?, server, "server")?;

    pods::delete_namespace(bed, SPACE)?;
    bed.kubectl(&["delete", "network", "blue", "--timeout=60s"]).map(drop)
}

/// Agents are away while pods start, are killed while pods start, and containerd is killed: who runs goes on,
/// who lacks something gets it, and nothing is kept for pods whose end no event told.
pub fn faults(bed: &Bed) -> Result<()> {
    const CROWD: usize = 12;
    let bare = bare(bed)?;
    support::install(bed, Overlay::Secondary)?;
    bed.apply(NETWORK)?;
    bed.apply(&pod("client", "n1", &[(ASKS, "storage")]))?;
    bed.apply(&pod("server", "n2", &[(ASKS, "storage")]))?;
    support::pods_ready(bed, SPACE)?;
    let (client, server) = (pods::pod(bed, SPACE, "client")?, attached(bed, "server")?);

    let old = pods::pods(bed, SPACE)?;
    none_lost(&client.space()?, &all_ways(server), || {
        away(bed)?;
        for name in ["gone", "gap"] {
            bed.apply(&pod(name, "n1", &[(ASKS, "storage")]))?;
        }
        bed.apply(&pod("held", "n1", &[(ASKS, "storage"), (REQUIRES, "[\"knit\"]")]))?;
        // The gap that runtimes leave: nothing asks for a plugin that is not connected, unless the pod does.
        for name in ["gone", "gap"] {
            let ready = ["wait", "--for=condition=Ready", "-n", SPACE, "pod", name, "--timeout=90s"];
            bed.kubectl(&ready)?;
            ensure!(!has(&pods::pod(bed, SPACE, name)?, "net1")?, "somebody attached {name}");
        }
        told(bed, "held", "required plugin")?;
        let held = pods::pod(bed, SPACE, "held")?;
        ensure!(!held.ready, "held is ready while the agent is away");
        // One that ends before the agent is back is nobody's business any more.
        bed.kubectl(&["delete", "pod", "-n", SPACE, "gone", "--timeout=60s"])?;
        back(bed)?;
        told(bed, "gap", "NetworksAttachedLate")?;
        support::pods_ready(bed, SPACE)?;
        for name in ["gap", "held"] {
            wait_for(bed, name, "net1")?;
        }
        proofs::hears(&pods::pod(bed, SPACE, "gap")?.space()?, server, "server")?;

        // containerd is killed. What is deleted afterwards is older than it, so no event tells of its end.
        let containerd = bed.machine("n1");
        containerd.stop("containerd", Stop::Kill)?;
        containerd.start_again("containerd")?;
        bed.wait_for_containerd("n1")?;
        bed.apply(&pod("new", "n1", &[(ASKS, "storage")]))?;
        support::pods_ready(bed, SPACE)?;
        wait_for(bed, "new", "net1")?;
        proofs::hears(&pods::pod(bed, SPACE, "new")?.space()?, server, "server")?;
        let gone = ["delete", "pod", "-n", SPACE, "gap", "held", "new", "--timeout=60s"];
        bed.kubectl(&gone)?;

        // The agent is killed while pods start. Some may start without their Network, and get it then.
        crowd(bed, CROWD)?;
        kill_agent(bed, "n1")?;
        pods::crowd_complete(bed, SPACE, CROWD)?;
        let crowd = pods::pods(bed, SPACE)?;
        for pod in crowd.iter().filter(|pod| pod.name.starts_with("crowd-")) {
            wait_for(bed, &pod.name, "net1")?;
        }
        pods::crowd_gone(bed, SPACE)
    })?;
    pods::not_hurt(&old, &pods::pods(bed, SPACE)?)?;
    pods::delete_namespace(bed, SPACE)?;
    // It stays as long as an agent has anything of it for anybody.
    bed.kubectl(&["delete", "network", "storage", "--timeout=60s"])?;
    support::uninstall(bed, Overlay::Secondary)?;
    as_bare(bed, &bare)
}

/// What nodes have with the other plugin alone. It comes with its first pods, and stays.
fn bare(bed: &Bed) -> Result<Vec<Traces>> {
    support::namespace(bed, SPACE)?;
    bed.apply(&[pod("one", "n1", &[]), pod("two", "n2", &[])].concat())?;
    support::pods_ready(bed, SPACE)?;
    bed.kubectl(&["delete", "pod", "-n", SPACE, "--all", "--timeout=60s"])?;
    bed.nodes().iter().map(|node| traces::of_node(bed, node)).collect()
}

fn as_bare(bed: &Bed, bare: &[Traces]) -> Result<()> {
    for (node, before) in bed.nodes().iter().zip(bare) {
        let mut left = Vec::new();
        let clean = until(&format!("{node} is as before"), LIMIT, || {
            let after = traces::of_node(bed, node)?;
            left = after.difference(before).cloned().collect();
            Ok(left.is_empty().then_some(()))
        });
        clean.with_context(|| format!("{node} still has {}", left.join(", ")))?;
    }
    Ok(())
}

/// Takes the agents of all nodes away, and lets them come back.
fn away(bed: &Bed) -> Result<()> {
    let nowhere = "{\"spec\": {\"template\": {\"spec\": {\"nodeSelector\": {\"no\": \"such-node\"}}}}}";
    bed.kubectl(&["patch", "-n", "knit-system", "daemonset/knit-node", "-p", nowhere])?;
    let label = "app.kubernetes.io/name=knit-node";
    bed.kubectl(&["wait", "--for=delete", "-n", "knit-system", "pod", "-l", label, "--timeout=90s"]).map(drop)
}

fn back(bed: &Bed) -> Result<()> {
    let anywhere = "[{\"op\": \"remove\", \"path\": \"/spec/template/spec/nodeSelector/no\"}]";
    bed.kubectl(&["patch", "-n", "knit-system", "daemonset/knit-node", "--type=json", "-p", anywhere])?;
    let ready = ["rollout", "status", "-n", "knit-system", "daemonset/knit-node", "--timeout=120s"];
    bed.kubectl(&ready).map(drop)
}

/// Waits until an event of a pod has some words.
fn told(bed: &Bed, pod: &str, words: &str) -> Result<()> {
    let of_pod = format!("involvedObject.name={pod}");
    let mut last = String::new();
    let told = until(&format!("an event of {pod} says {words:?}"), LIMIT, || {
        last = bed.kubectl(&["get", "events", "-n", SPACE, "--field-selector", &of_pod])?;
        Ok(last.contains(words).then_some(()))
    });
    told.map_err(|error| error.context(format!("{last}\n{}", support::logs(bed))))
}

fn has(pod: &Pod, interface: &str) -> Result<bool> {
    Ok(Handle::open(&pod.space()?)?.index_of(&IfName::new(interface)?).is_ok())
}

fn wait_for(bed: &Bed, name: &str, interface: &str) -> Result<()> {
    let there = until(&format!("{name} has {interface}"), LIMIT, || {
        Ok(has(&pods::pod(bed, SPACE, name)?, interface)?.then_some(()))
    });
    there.map_err(|error| error.context(support::logs(bed)))
}

/// Where a pod's server is, on its further interface.
fn attached(bed: &Bed, pod: &str) -> Result<SocketAddr> {
    let object = format!("networkattachment/{pod}-net1");
    bed.kubectl(&["wait", "--for=create", "-n", SPACE, &object, "--timeout=60s"])?;
    let path = "jsonpath={.status.addresses[0].address}";
    let address = until(&format!("{object} tells an address"), LIMIT, || {
        let address = bed.kubectl(&["get", "-n", SPACE, &object, "-o", path])?;
        Ok(Some(address).filter(|address| !address.is_empty()))
    })?;
    Ok((address.parse::<std::net::IpAddr>()?, PORT).into())
}

fn pod(name: &str, node: &str, annotations: &[(&str, &str)]) -> String {
    let annotations: Value = annotations.iter().map(|(key, value)| (*key, json!(value))).collect();
    let container = json!({
        "name": "agnhost", "image": AGNHOST, "imagePullPolicy": "Never",
        "args": ["netexec", format!("--http-port={PORT}"), format!("--udp-port={PORT}")],
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": SPACE, "annotations": annotations },
        "spec": { "nodeName": node, "terminationGracePeriodSeconds": 1, "containers": [container] },
    });
    format!("{pod}\n---\n")
}

/// Many pods of n1 that ask for the Network.
fn crowd(bed: &Bed, count: usize) -> Result<()> {
    pods::crowd(bed, SPACE, "n1", 0)?;
    let asks = json!({ "spec": { "replicas": count, "template": { "metadata": {
        "annotations": { ASKS: "storage" } } } } });
    bed.kubectl(&["patch", "-n", SPACE, "rs/crowd", "-p", &asks.to_string()]).map(drop)
}
