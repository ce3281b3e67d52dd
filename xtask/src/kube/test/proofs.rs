//! What documentation promises of a real cluster and no other test has seen there: the API that the lab
//! stands in for, nodes that wait for their agent, running pods that are plugged into a Network, and what
//! objects say of them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use knit_kernel::{Handle, IfName, NetNs};
use serde_json::Value;

use super::support::{self, Overlay, field};
use super::{pods, talk};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;
use crate::kube::{knit, net};

const LIMIT: Duration = Duration::from_secs(60);

/// The suite that the embedded API passes in `cargo test`, on the real one.
pub fn client_suite(bed: &Bed) -> Result<()> {
    let output = crate::cargo::command()
        .args(["test", "--quiet", "-p", "knit-apiserver", "--test", "client_suite"])
        .args(["--", "--ignored", "--exact", "real_api_server"])
        .env("KNIT_TEST_KUBECONFIG", bed.state().kubeconfig())
        .output()
        .context("cannot run cargo")?;
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    ensure!(output.status.success(), "the client suite failed:\n{said}");
    ensure!(said.contains("1 passed"), "the client suite did not run:\n{said}");
    Ok(())
}

/// Knit's files are on the nodes and its agents run, but cannot serve yet: nodes are NotReady, and say why.
pub fn not_ready_before(bed: &Bed) -> Result<()> {
    let image = knit::image()?;
    bed.load_image(&image)?;
    // Nobody listens there, so the agents know nothing of the cluster.
    bed.apply(&knit::api_server(net::API_PORT + 1))?;
    knit::apply(bed, Overlay::Full.name())?;
    let words = "node agent";
    for node in bed.nodes() {
        until(&format!("{node} says why it is not ready"), LIMIT, || {
            let list = bed.node_path(&node, "/etc/cni/net.d/05-knit.conflist")?;
            let ready = "{.status.conditions[?(@.type==\"Ready\")].status}";
            let status = field(bed, "default", &format!("node/{node}"), ready)?;
            ensure!(status != "True", "{node} is Ready, and no agent can serve");
            let message = "{.status.conditions[?(@.type==\"Ready\")].message}";
            let message = field(bed, "default", &format!("node/{node}"), message)?;
            Ok((list.exists() && message.contains(words)).then_some(()))
        })
        .map_err(|error| error.context(support::logs(bed)))?;
    }
    bed.apply(&knit::api_server(net::API_PORT))?;
    bed.kubectl(&[
        "rollout",
        "restart",
        "-n",
        "knit-system",
        "daemonset/knit-node",
        "deployment/knit-controller",
    ])?;
    bed.wait_for_nodes(Duration::from_secs(120)).map_err(|error| error.context(support::logs(bed)))?;
    // Once it could serve, an agent that is away makes no node NotReady.
    let away = "{\"spec\": {\"template\": {\"spec\": {\"nodeSelector\": {\"no\": \"such-node\"}}}}}";
    bed.kubectl(&["patch", "-n", "knit-system", "daemonset/knit-node", "-p", away])?;
    let label = "app.kubernetes.io/name=knit-node";
    bed.kubectl(&["wait", "--for=delete", "-n", "knit-system", "pod", "-l", label, "--timeout=90s"])?;
    // The kubelet asks its runtime all the time; two heartbeats after the agents went it has asked again.
    for node in bed.nodes() {
        bed.restart_kubelet(&node)?;
    }
    bed.wait_for_nodes(Duration::from_secs(60)).context("an agent that is away made a node NotReady")
}

/// Networks for what follows: `side` is published, `quiet` is not, and `mine` may be a pod's primary one.
const NETWORKS: &str = "
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: side}, spec: {topology: Layer2,
 subnets: [{cidr: 10.92.0.0/24}], allowedNamespaces: {from: All}}}
---
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: quiet}, spec: {topology: Layer3,
 subnets: [{cidr: 10.93.0.0/16}], allowedNamespaces: {from: All}, publishAttachments: false}}
---
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: mine}, spec: {topology: Layer2,
 subnets: [{cidr: 10.94.0.0/24}], allowedNamespaces: {from: All}, primaryFor: {matchLabels: \
 {proofs: nobody}}}}
";

/// Running pods are plugged into a Network and talk there; a pod's own choice of a primary Network; what is
/// published.
pub fn attachments(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, "proofs")?;
    bed.apply(NETWORKS)?;
    for network in ["side", "quiet", "mine"] {
        bed.kubectl(&["wait", "--for=condition=Accepted", &format!("network/{network}"), "--timeout=30s"])?;
    }
    let pod = |name: &str, node: &str, annotations: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: proofs, annotations: \
             {{{annotations}}}}}, \
             spec: {{nodeName: {node}, terminationGracePeriodSeconds: 1, containers: [{{name: agnhost, \
             image: '{AGNHOST}', \
             args: [netexec, --http-port=8080]}}]}}}}\n---\n"
        )
    };
    let manifests = [
        pod("one", "n1", ""),
        pod("two", "n2", ""),
        pod("quiet", "n1", "knit.dev/networks: quiet"),
        pod("mine-one", "n1", "knit.dev/primary: mine"),
        pod("mine-two", "n2", "knit.dev/primary: mine"),
    ];
    bed.apply(&manifests.concat())?;
    support::pods_ready(bed, "proofs")?;
    hot_plug(bed)?;
    own_primary(bed)?;
    // Its interface is there, and nothing is written about it.
    let quiet = pods::pod(bed, "proofs", "quiet")?.space()?;
    Handle::open(&quiet)?.index_of(&IfName::new("net1")?).context("the pod quiet has no net1")?;
    let names = bed.kubectl(&["get", "networkattachments", "-n", "proofs", "-o", "name"])?;
    ensure!(!names.contains("quiet"), "publishAttachments is false, and there are {names}");
    ensure!(names.contains("mine-one-eth0"), "attachments of mine are published; there are {names}");
    pods::delete_namespace(bed, "proofs")?;
    bed.kubectl(&["delete", "network", "side", "quiet", "mine", "--timeout=60s"]).map(drop)
}

fn hot_plug(bed: &Bed) -> Result<()> {
    for name in ["one", "two"] {
        bed.apply(&format!(
            "{{apiVersion: knit.dev/v1alpha1, kind: NetworkAttachment, metadata: {{name: {name}-side, \
             namespace: proofs}}, \
             spec: {{pod: {name}, network: side, interface: side0}}}}"
        ))?;
    }
    let mut addresses = Vec::new();
    for (name, node) in [("one", "n1"), ("two", "n2")] {
        let object = format!("networkattachment/{name}-side");
        let ready = bed.kubectl(&["wait", "--for=condition=Ready", "-n", "proofs", &object, "--timeout=60s"]);
        ready.map_err(|error| error.context(support::logs(bed)))?;
        let attachment = bed.kubectl_json(&["get", "-n", "proofs", &object])?;
        check_references(bed, name, node, &attachment["status"])?;
        let address = attachment["status"]["addresses"][0]["address"].as_str().context("an address")?;
        addresses.push(address.parse::<IpAddr>()?);
    }
    // Real packets, between nodes, on the interface that was not there when the pods started.
    for (from, to, name) in [("one", addresses[1], "two"), ("two", addresses[0], "one")] {
        hears(&pods::pod(bed, "proofs", from)?.space()?, (to, 8080).into(), name)?;
    }
    // And away again, while the pods go on.
    bed.kubectl(&["delete", "-n", "proofs", "networkattachment/one-side", "--timeout=60s"])?;
    let one = pods::pod(bed, "proofs", "one")?;
    let handle = Handle::open(&one.space()?)?;
    let side = IfName::new("side0")?;
    until("side0 of the pod one is gone", LIMIT, || Ok(handle.index_of(&side).is_err().then_some(())))?;
    let two = pods::pod(bed, "proofs", "two")?;
    hears(&two.space()?, (one.address()?, 8080).into(), "one")?;
    ensure!(one.restarts + two.restarts == 0, "pods were restarted");
    Ok(())
}

/// What the status says of interfaces and namespaces is so on the node.
fn check_references(bed: &Bed, pod: &str, node: &str, status: &Value) -> Result<()> {
    let text = |path: &str| {
        status.pointer(path).and_then(Value::as_str).with_context(|| format!("no {path}: {status}"))
    };
    let number = |path: &str| {
        status.pointer(path).and_then(Value::as_u64).with_context(|| format!("no {path}: {status}"))
    };
    ensure!(text("/node")? == node && text("/interface")? == "side0", "{status}");
    let space = pods::pod(bed, "proofs", pod)?.space()?;
    ensure!(space.id().ino == number("/podNamespace/inode")?, "podNamespace of {pod}: {status}");
    let router = NetNs::open(bed.node_path(node, text("/hostInterface/namespace/path")?)?)?;
    let inode = number("/hostInterface/namespace/inode")?;
    ensure!(router.id().ino == inode, "hostInterface's namespace of {pod}: {status}");
    let name = IfName::new(text("/hostInterface/name")?)?;
    let index = Handle::open(&router)?.index_of(&name).context("the host's interface")?;
    ensure!(
        u64::from(index) == number("/hostInterface/index")?,
        "hostInterface of {pod} is {index}: {status}"
    );
    Ok(())
}

/// `knit.dev/primary` in a namespace whose pods are otherwise on the default Network.
fn own_primary(bed: &Bed) -> Result<()> {
    let one = pods::pod(bed, "proofs", "mine-one")?;
    let two = pods::pod(bed, "proofs", "mine-two")?;
    for pod in [&one, &two] {
        let address = pod.address()?;
        let inside = matches!(address, IpAddr::V4(v4) if v4.octets()[..3] == [10, 94, 0]);
        ensure!(inside, "{} asked for mine and has {address}", pod.name);
    }
    hears(&one.space()?, (two.address()?, 8080).into(), "mine-two")?;
    let other = pods::pod(bed, "proofs", "two")?;
    let crossed = talk::http(&one.space()?, (other.address()?, 8080).into(), "/hostname")?;
    ensure!(crossed.is_none(), "a pod of mine reached a pod of the default Network: {crossed:?}");
    Ok(())
}

/// Waits until a pod's `netexec` says its name to a client there.
pub fn hears(from: &NetNs, to: SocketAddr, name: &str) -> Result<()> {
    let mut last = None;
    let heard = until(&format!("{name} answers at {to}"), LIMIT, || {
        last = talk::http(from, to, "/hostname")?;
        Ok((last.as_deref() == Some(name)).then_some(()))
    });
    heard.with_context(|| format!("last heard: {last:?}"))
}
