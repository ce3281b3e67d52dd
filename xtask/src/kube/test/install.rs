//! Knit installed by its overlays, with its own image: everything that a cluster's network and services are
//! for, the agent replaced under traffic, and everything taken away again.

use anyhow::{Context as _, Result, ensure};
use knit_kernel::nft::Kernel;
use knit_nft::Nftables as _;

use super::support::{self, Overlay, field, node_reaches, reaches};
use super::talkers::Talkers;
use super::{pods, talk::none_lost, traces};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;

/// A server on each node behind one Service, clients on both; a pod with a port of its node.
pub fn workload(namespace: &str) -> String {
    let server = |node: &str, extra: &str| {
        format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: server-{node}, namespace: {namespace}, labels: {{app: server}}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 1
  initContainers:
  - {{name: first, image: {AGNHOST}, args: [help]}}
  containers:
  - name: agnhost
    image: {AGNHOST}
    args: [netexec, --http-port=8080, --udp-port=8080]
    {extra}
    readinessProbe: {{httpGet: {{path: /healthz, port: 8080}}, periodSeconds: 1}}
    livenessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 5}}
---"
        )
    };
    let client = |node: &str| {
        format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: client-{node}, namespace: {namespace}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 1
  containers:
  - {{name: agnhost, image: {AGNHOST}, args: [pause]}}
---"
        )
    };
    let service = format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: server, namespace: {namespace}}}
spec: {{type: NodePort, selector: {{app: server}}, ports: [{{port: 80, targetPort: 8080}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: each, namespace: {namespace}}}
spec: {{clusterIP: None, selector: {{app: server}}, ports: [{{port: 8080}}]}}
"
    );
    let port = "ports: [{containerPort: 8080, hostPort: 18080}]";
    [server("n1", port), server("n2", ""), client("n1"), client("n2"), service].concat()
}

/// Who reaches whom, in a cluster whose network and services work.
fn everything_works(bed: &Bed, namespace: &str, host_ports: bool) -> Result<()> {
    support::namespace(bed, namespace)?;
    bed.apply(&workload(namespace))?;
    support::pods_ready(bed, namespace)?;
    let pod = |name: &str| field(bed, namespace, &format!("pod/{name}"), "{.status.podIP}");
    let (one, two) = (pod("server-n1")?, pod("server-n2")?);
    let (cluster_ip, node_port) = (
        field(bed, namespace, "service/server", "{.spec.clusterIP}")?,
        field(bed, namespace, "service/server", "{.spec.ports[0].nodePort}")?,
    );
    let node_ip =
        |node: &str| field(bed, "default", &format!("node/{node}"), "{.status.addresses[0].address}");
    let (node_one, node_two) = (node_ip("n1")?, node_ip("n2")?);
    let mut targets = vec![
        format!("{one}:8080"),
        format!("{two}:8080"),
        format!("{cluster_ip}:80"),
        "server:80".into(),
        format!("server.{namespace}.svc.cluster.local:80"),
        format!("each.{namespace}.svc.cluster.local:8080"),
        format!("{node_one}:{node_port}"),
        format!("{node_two}:{node_port}"),
        "kubernetes.default.svc.cluster.local:443".into(),
    ];
    if host_ports {
        targets.push(format!("{node_one}:18080"));
    }
    for client in ["client-n1", "client-n2"] {
        for target in &targets {
            reaches(bed, namespace, client, target).with_context(|| support::logs(bed))?;
        }
    }
    // A server that reaches itself by its Service.
    for server in ["server-n1", "server-n2"] {
        for _ in 0..4 {
            reaches(bed, namespace, server, &format!("{cluster_ip}:80"))?;
        }
    }
    for (node, local) in [("n1", &one), ("n2", &two)] {
        for target in [format!("{local}:8080"), format!("{cluster_ip}:80"), format!("{node_two}:{node_port}")]
        {
            node_reaches(bed, node, &target)?;
        }
    }
    Ok(())
}

/// The overlay `full` on a bare cluster: the network of pods, Services, DNS, ports of the node, probes.
pub fn full(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    everything_works(bed, "full", true)?;
    // What the objects say is what runs.
    let blocks = bed.kubectl(&["get", "addressblocks", "-o", "jsonpath={.items[*].spec.ipv4}"])?;
    for node in bed.nodes() {
        for range in bed.pod_ranges(&node)?.iter().filter(|range| range.addr().is_ipv4()) {
            ensure!(
                blocks.contains(&range.to_string()),
                "no AddressBlock is {range}, the podCIDR of {node}: {blocks}"
            );
        }
        let unavailable = "{.status.conditions[?(@.type==\"NetworkUnavailable\")].status}";
        let status = field(bed, "default", &format!("node/{node}"), unavailable)?;
        ensure!(status == "False", "NetworkUnavailable of {node} is {status}");
        let owner =
            field(bed, "knit-system", &format!("lease/{node}"), "{.metadata.ownerReferences[0].kind}")?;
        ensure!(owner == "Node", "the Lease of {node} is owned by a {owner}");
        let owner =
            field(bed, "default", &format!("nodenetwork/{node}"), "{.metadata.ownerReferences[0].name}")?;
        ensure!(owner == node, "the NodeNetwork of {node} is owned by {owner}");
    }
    agents_write_their_own(bed)?;
    bed.kubectl(&["delete", "namespace", "full", "--timeout=60s"]).map(drop)
}

/// An agent cannot write for another node.
fn agents_write_their_own(bed: &Bed) -> Result<()> {
    let pods = bed.kubectl(&[
        "get",
        "pods",
        "-n",
        "knit-system",
        "-l",
        "app.kubernetes.io/name=knit-node",
        "--field-selector=spec.nodeName=n1",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    ])?;
    let uid = field(bed, "knit-system", &format!("pod/{pods}"), "{.metadata.uid}")?;
    let token = bed.kubectl(&[
        "create",
        "token",
        "knit-node",
        "-n",
        "knit-system",
        "--bound-object-kind=Pod",
        &format!("--bound-object-name={pods}"),
        &format!("--bound-object-uid={uid}"),
    ])?;
    let token = format!("--token={}", token.trim());
    // Server-side apply, as the agent itself writes: a plain `kubectl patch` would read first, which it may
    // not.
    let write = |node: &str| {
        let object = format!(
            "apiVersion: knit.dev/v1alpha1\nkind: NodeNetwork\nmetadata: {{name: {node}, labels: {{test: \
             x}}}}\n"
        );
        let args = [
            "--kubeconfig=/dev/null",
            "--insecure-skip-tls-verify",
            "--server=https://127.0.0.1:6443",
            &token,
            "apply",
            "--server-side",
            "--field-manager=test",
            "--validate=false",
            "-f",
            "-",
        ];
        bed.kubectl_output(&args, Some(&object))
    };
    let own = write("n1")?;
    ensure!(
        own.status.success(),
        "the agent of n1 cannot write for n1: {}",
        String::from_utf8_lossy(&own.stderr)
    );
    let other = write("n2")?;
    let words = String::from_utf8_lossy(&other.stderr);
    ensure!(
        !other.status.success() && words.contains("may not write n2"),
        "the agent of n1 may write for n2: {words}"
    );
    Ok(())
}

/// Agents are replaced while pods talk: nothing is lost, and no pod is hurt.
pub fn agents_replaced(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    let talkers = Talkers::start(bed, "replace")?;
    none_lost(&talkers.client, &talkers.flows(), || {
        bed.kubectl(&["rollout", "restart", "-n", "knit-system", "daemonset/knit-node"])?;
        bed.kubectl(&["rollout", "status", "-n", "knit-system", "daemonset/knit-node", "--timeout=120s"])
    })?;
    talkers.not_hurt(bed)?;
    pods::delete_namespace(bed, "replace")
}

/// Installed, used with a Network of its own besides, and removed: nodes are as before, and the cluster knows
/// no more of it.
pub fn removed(bed: &Bed) -> Result<()> {
    let before: Vec<_> = bed.nodes().iter().map(|node| traces::of_node(bed, node)).collect::<Result<_>>()?;
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, "remove")?;
    bed.kubectl(&["label", "namespace", "remove", "team=remove"])?;
    bed.apply(
        "{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: remove}, spec: {topology: Layer2, \
         subnets: [{cidr: 10.77.0.0/24}], primaryFor: {matchLabels: {team: remove}}}}",
    )?;
    bed.kubectl(&["wait", "--for=condition=Accepted", "network/remove", "--timeout=30s"])?;
    bed.apply(&workload("remove"))?;
    support::pods_ready(bed, "remove")?;
    reaches(
        bed,
        "remove",
        "client-n1",
        &format!("{}:8080", field(bed, "remove", "pod/server-n2", "{.status.podIP}")?),
    )?;
    // Pods of other Networks are left running: removal must not need them gone.
    support::uninstall(bed, Overlay::Full)?;
    for (node, before) in bed.nodes().iter().zip(&before) {
        let left: Vec<_> = traces::of_node(bed, node)?.difference(before).cloned().collect();
        ensure!(left.is_empty(), "{node} still has {}", left.join(", "));
    }
    let crds = bed.kubectl(&["get", "crds", "-o", "name"])?;
    ensure!(!crds.contains("knit.dev"), "CRDs are left: {crds}");
    let taints = bed.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].spec.taints[*].key}"])?;
    ensure!(!taints.contains("knit.dev"), "Nodes are tainted: {taints}");
    // The pods stay: containerd ends no sandbox while no network plugin is configured, and the bed is this
    // test's own.
    Ok(())
}

/// The overlay `cni` beside kube-proxy: kube-proxy serves Services, and the agent leaves them alone.
pub fn cni(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Cni)?;
    everything_works(bed, "cni", true)?;
    for node in bed.nodes() {
        let tables = Kernel::open_in(&bed.node_ns(&node)?)?.tables()?;
        let names: Vec<String> = tables.iter().map(ToString::to_string).collect();
        ensure!(
            names.iter().any(|name| name.contains("kube-proxy")),
            "{node} has no table of kube-proxy: {names:?}"
        );
        ensure!(
            !names.iter().any(|name| name.contains("knit-proxy")),
            "{node} has two service proxies: {names:?}"
        );
    }
    bed.kubectl(&["delete", "namespace", "cni", "--timeout=60s"]).map(drop)
}

/// The overlay `proxy` beside another network plugin.
pub fn proxy(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Proxy)?;
    everything_works(bed, "proxy", true)?;
    bed.kubectl(&["delete", "namespace", "proxy", "--timeout=60s"]).map(drop)
}
