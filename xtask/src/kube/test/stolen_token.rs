//! The token of one node's agent, in strange hands: it is that node's, and no other's.

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use knit_kernel::Handle;
use knit_kernel::handle::RouteFilter;
use serde_json::{Value, json};

use super::pods;
use super::support::{self, Overlay};
use crate::kube::bed::Bed;
use crate::kube::images::PAUSE;
use crate::kube::wait::until;

/// An address that is nobody's, to which a thief would lead the traffic of all nodes.
const FOREIGN: &str = "192.0.2.77";
const SPACE: &str = "stolen";
/// How long what must come may take.
const LIMIT: Duration = Duration::from_secs(60);

pub fn one_nodes(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    support::namespace(bed, SPACE)?;
    let thief = Thief::of(bed, "n1")?;
    // What is the node's own: the agent could not do its work without.
    thief.may(&published("own", "n1"), &[])?;
    thief.may(&attached("own", "n1"), &["--subresource=status"])?;
    thief.may(&lease("n1"), &[])?;
    // What is not.
    thief.may_not(&published("others", "n2"), &[])?;
    thief.may_not(&attached("own", "n2"), &["--subresource=status"])?;
    thief.may_not(&lease("n2"), &[])?;
    thief.may_not(&lease("knit-controller"), &[])?;
    thief.may_not(&node_condition("n2"), &["--subresource=status"])?;
    for status in [
        json!({ "images": [{ "names": ["x"], "sizeBytes": 1 }] }),
        json!({ "phase": "Terminated" }),
        json!({ "runtimeHandlers": [{ "name": "x" }] }),
    ] {
        let node =
            json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" }, "status": status });
        thief.may_not(&node, &["--subresource=status"])?;
    }
    thief.may_not(&node_network("n2"), &[])?;
    thief.may_not(&event("n2"), &[])?;
    let other = Thief::of(bed, "n2")?;
    other.may_not(&published("own", "n2"), &[])?;
    ensure!(!other.kubectl(&["delete", "networkattachment", "own", "-n", SPACE], None)?, "n2 deleted n1's");
    ensure!(!thief.kubectl(&["get", "secrets", "-A"], None)?, "an agent reads secrets");

    // It says that a foreign address is on its node; the other node is told, and does not believe it. The
    // Network and the pod come after it, and once the other node's agent has served those, it has seen this.
    until("the foreign address in a slice", LIMIT, || {
        Ok(bed.kubectl(&["get", "blockslices", "-o", "json"])?.contains(FOREIGN).then_some(()))
    })?;
    bed.apply(&network("after").to_string())?;
    bed.apply(&pod("after").to_string())?;
    support::pods_ready(bed, SPACE)?;
    let foreign: IpAddr = FOREIGN.parse()?;
    let routes = Handle::open(&bed.node_ns("n2")?)?.routes(&RouteFilter::default())?;
    let led = routes.iter().find(|route| route.destination.addr() == foreign);
    ensure!(led.is_none(), "n2 sends what is for {FOREIGN} to n1: {led:?}");

    ensure!(thief.kubectl(&["delete", "networkattachment", "own", "-n", SPACE], None)?, "n1 deletes its own");
    pods::delete_namespace(bed, SPACE)?;
    bed.kubectl(&["delete", "network", "after", "--timeout=60s"]).map(drop)
}

/// Whoever has the token of a node's agent, and nothing else.
struct Thief<'a> {
    bed: &'a Bed,
    kubeconfig: String,
}

impl<'a> Thief<'a> {
    fn of(bed: &'a Bed, node: &str) -> Result<Self> {
        let pod = pods::agent(bed, node)?.name;
        let bound = ["--bound-object-kind=Pod", "--bound-object-name", &pod];
        let token =
            bed.kubectl(&[&["create", "token", "knit-node", "-n", "knit-system"], &bound[..]].concat())?;
        let server = json!({ "server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": true });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{ "name": "x", "cluster": server }],
            "users": [{ "name": "x", "user": { "token": token.trim() } }],
            "contexts": [{ "name": "x", "context": { "cluster": "x", "user": "x" } }],
        });
        let path = bed.state().path().join(format!("stolen-{node}.kubeconfig"));
        std::fs::write(&path, config.to_string())?;
        Ok(Self { bed, kubeconfig: path.to_str().context("a path")?.to_owned() })
    }

    fn output(&self, args: &[&str], input: Option<&str>) -> Result<std::process::Output> {
        let mut command = Command::new(self.bed.state().program("kubectl"));
        command.args(args).env("KUBECONFIG", &self.kubeconfig);
        self.bed.in_control_plane(command, input)
    }

    fn kubectl(&self, args: &[&str], input: Option<&str>) -> Result<bool> {
        Ok(self.output(args, input)?.status.success())
    }

    /// Applies an object as the agent does; what it got for an answer, if it was refused.
    fn refused(&self, object: &Value, more: &[&str]) -> Result<Option<String>> {
        let apply = ["apply", "--server-side", "--force-conflicts", "--field-manager=knit-node"];
        let args = [&apply[..], &["--validate=false", "-f", "-"], more].concat();
        let output = self.output(&args, Some(&object.to_string()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((!output.status.success()).then_some(said))
    }

    fn may(&self, object: &Value, more: &[&str]) -> Result<()> {
        let refused = self.refused(object, more)?;
        ensure!(refused.is_none(), "refused: {object}: {}", refused.unwrap_or_default());
        Ok(())
    }

    fn may_not(&self, object: &Value, more: &[&str]) -> Result<()> {
        let said = self.refused(object, more)?.with_context(|| format!("taken: {object}"))?;
        let for_that = said.contains("denied request") || said.contains("forbidden");
        ensure!(for_that, "refused for another reason: {object}: {said}");
        Ok(())
    }
}

fn published(name: &str, node: &str) -> Value {
    let labels = json!({
        "app.kubernetes.io/managed-by": "knit", "knit.dev/node": node, "knit.dev/announced": "true",
        "knit.dev/network": "default",
    });
    json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": { "name": name, "namespace": SPACE, "labels": labels },
        "spec": { "pod": "nobody", "network": "default" },
    })
}

fn attached(name: &str, node: &str) -> Value {
    let ready = json!({ "type": "Ready", "status": "True", "reason": "Attached", "message": "attached",
        "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let address = json!({ "family": "IPv4", "address": FOREIGN, "prefix": 32 });
    json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": { "name": name, "namespace": SPACE },
        "status": { "node": node, "mac": "02:00:00:00:00:01", "addresses": [address], "conditions": [ready] },
    })
}

fn lease(name: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": name, "namespace": "knit-system" },
        "spec": { "holderIdentity": name, "leaseDurationSeconds": 100,
            "renewTime": "2026-01-01T00:00:00.000000Z" },
    })
}

fn node_condition(node: &str) -> Value {
    let condition = json!({ "type": "NetworkUnavailable", "status": "True", "reason": "Stolen",
        "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let status = json!({ "conditions": [condition] });
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node }, "status": status })
}

fn node_network(name: &str) -> Value {
    let metadata = json!({ "name": name });
    json!({ "apiVersion": "knit.dev/v1alpha1", "kind": "NodeNetwork", "metadata": metadata, "spec": {} })
}

fn event(node: &str) -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "name": "stolen",
            "namespace": SPACE },
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "knit-node",
            "reportingInstance": node,
        "action": "A", "reason": "R", "type": "Warning", "note": "n",
        // It has to be in the event's own namespace.
        "regarding": { "kind": "Namespace", "name": SPACE, "namespace": SPACE },
    })
}

fn network(name: &str) -> Value {
    let spec = json!({ "topology": "Layer3", "subnets": [{ "cidr": "10.94.0.0/16" }], "allowedNamespaces": {
        "from": "All" } });
    json!({ "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": { "name": name },
        "spec": spec })
}

fn pod(network: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "after", "namespace": SPACE, "annotations": { "knit.dev/networks": network } },
        "spec": {
            "nodeName": "n2", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false,
            "containers": [{ "name": "pause", "image": PAUSE }],
        },
    })
}
