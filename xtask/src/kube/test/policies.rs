//! NetworkPolicy on a real cluster, in the default Network and in a primary one: denied by default, allowed
//! by label, in force before a container's first instruction, and told by `knit drops` and an event.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::support::{self, Overlay};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;

/// Namespaces, the labels by which one of them has a Network of its own, and the Networks.
const PLACES: [(&str, &str, &str); 2] =
    [("policed-plain", "default", "{}"), ("policed-own", "policed", "{knit-test: policed}")];
const NETWORK: &str = "
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: policed}, spec: {topology: Layer3,
 subnets: [{cidr: 10.99.0.0/16}], allowedNamespaces: {from: All},
 primaryFor: {matchLabels: {knit-test: policed}}}}
";
/// How long a change of policies may take to be in force.
const LIMIT: Duration = Duration::from_secs(20);

pub fn smoke(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Full)?;
    bed.apply(NETWORK)?;
    bed.kubectl(&["wait", "--for=condition=Accepted", "network/policed", "--timeout=30s"])?;
    for (namespace, network, labels) in PLACES {
        let held = one_place(bed, namespace, network, labels);
        held.map_err(|error| error.context(support::logs(bed)).context(format!("in Network {network}")))?;
    }
    for (namespace, ..) in PLACES {
        bed.kubectl(&["delete", "namespace", namespace, "--timeout=90s"])?;
    }
    bed.kubectl(&["delete", "network", "policed", "--timeout=60s"]).map(drop)
}

fn one_place(bed: &Bed, namespace: &str, network: &str, labels: &str) -> Result<()> {
    bed.apply(&format!(
        "{{apiVersion: v1, kind: Namespace, metadata: {{name: {namespace}, labels: {labels}}}}}"
    ))?;
    bed.kubectl(&["wait", "--for=create", "-n", namespace, "serviceaccount/default", "--timeout=30s"])?;
    let pod = |name: &str, node: &str, labels: &str, arguments: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}, labels: \
             {labels}}}, spec: {{nodeName: {node}, restartPolicy: Never, terminationGracePeriodSeconds: 0, \
             containers: [{{name: agnhost, image: {AGNHOST}, args: {arguments}}}]}}}}\n---\n"
        )
    };
    let serve = "[netexec, --http-port=8080]";
    bed.apply(
        &[
            pod("server", "n1", "{app: server}", serve),
            pod("open", "n1", "{app: open}", serve),
            pod("friend", "n2", "{role: friend}", "[pause]"),
            pod("stranger", "n2", "{role: stranger}", "[pause]"),
        ]
        .concat(),
    )?;
    support::pods_ready(bed, namespace)?;
    let address = |name: &str| support::field(bed, namespace, &format!("pod/{name}"), "{.status.podIP}");
    let (server, open) = (format!("{}:8080", address("server")?), format!("{}:8080", address("open")?));
    for client in ["friend", "stranger"] {
        support::reaches(bed, namespace, client, &server)?;
    }
    bed.apply(&format!(
        "
{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: deny, namespace: {namespace}}},
 spec: {{podSelector: {{matchLabels: {{app: server}}}}, policyTypes: [Ingress]}}}}
---
{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: friends, namespace: {namespace}}},
 spec: {{podSelector: {{matchLabels: {{app: server}}}}, policyTypes: [Ingress],
 ingress: [{{from: [{{podSelector: {{matchLabels: {{role: friend}}}}}}], ports: [{{port: 8080}}]}}]}}}}
---
{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: racers, namespace: {namespace}}},
 spec: {{podSelector: {{matchLabels: {{race: \"yes\"}}}}, policyTypes: [Egress]}}}}
"
    ))?;
    until("a stranger is denied", LIMIT, || {
        let output = bed.kubectl_output(&connect(namespace, "stranger", &server), None)?;
        Ok((!output.status.success()).then_some(()))
    })?;
    // Denied stays denied, and allowed allowed.
    for _ in 0..3 {
        let output = bed.kubectl_output(&connect(namespace, "stranger", &server), None)?;
        ensure!(!output.status.success(), "a stranger reaches the server again");
        support::reaches(bed, namespace, "friend", &server)?;
    }
    support::reaches(bed, namespace, "stranger", &open)?;
    start_race(bed, namespace, &open, &pod)?;
    drops(bed, namespace, network, &address("stranger")?)
}

fn connect<'a>(namespace: &'a str, pod: &'a str, target: &'a str) -> [&'a str; 9] {
    ["exec", "-n", namespace, pod, "--", "/agnhost", "connect", "--timeout=2s", target]
}

/// Pods whose first instruction connects: those that a policy isolates never succeed, others do.
fn start_race(
    bed: &Bed,
    namespace: &str,
    open: &str,
    pod: &dyn Fn(&str, &str, &str, &str) -> String,
) -> Result<()> {
    let arguments = format!("[connect, --timeout=2s, '{open}']");
    let mut all = String::new();
    for number in 0..4 {
        let node = if number % 2 == 0 { "n1" } else { "n2" };
        all += &pod(&format!("racer-{number}"), node, "{race: 'yes'}", &arguments);
        all += &pod(&format!("free-{number}"), node, "{race: 'no'}", &arguments);
    }
    bed.apply(&all)?;
    for (kind, wanted) in [("racer", "Failed"), ("free", "Succeeded")] {
        for number in 0..4 {
            let name = format!("pod/{kind}-{number}");
            until(&format!("{name} ends"), Duration::from_secs(60), || {
                let phase =
                    bed.kubectl(&["get", "-n", namespace, &name, "-o", "jsonpath={.status.phase}"])?;
                Ok(["Succeeded", "Failed"].contains(&phase.as_str()).then_some(()))
            })?;
            let phase = support::field(bed, namespace, &name, "{.status.phase}")?;
            ensure!(phase == wanted, "{name} is {phase}, and should be {wanted}");
        }
    }
    Ok(())
}

/// What was dropped is listed with the policy's name on the server's node, and told on the server.
fn drops(bed: &Bed, namespace: &str, network: &str, stranger: &str) -> Result<()> {
    let agent = bed.kubectl(&[
        "get",
        "pod",
        "-n",
        "knit-system",
        "-l",
        "app.kubernetes.io/name=knit-node",
        "--field-selector=spec.nodeName=n1",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    ])?;
    let mut last = String::new();
    let found = until("knit drops lists it", LIMIT, || {
        last = bed.kubectl(&["exec", "-n", "knit-system", &agent, "--", "knit", "drops", "-o", "json"])?;
        let lines = last.lines().map(serde_json::from_str::<Value>);
        let lines: Vec<Value> = lines.collect::<Result<_, _>>().context("a line is not JSON")?;
        let is_it = |line: &&Value| {
            line["network"] == network
                && line["direction"] == "ingress"
                && line["from"]["address"] == stranger
                && line["to"]["name"] == format!("{namespace}/server")
                && line["port"] == 8080
        };
        Ok(lines.iter().find(is_it).cloned())
    });
    let found = found.map_err(|error| error.context(last))?;
    let policies = found["policies"].to_string();
    for policy in ["deny", "friends"] {
        let name = format!("NetworkPolicy {namespace}/{policy}");
        ensure!(policies.contains(&name), "{name} is not among those that decided: {found}");
    }
    explain_agrees(bed, namespace, network, &found)?;
    until("the server has an event", Duration::from_secs(30), || {
        let select = "--field-selector=involvedObject.name=server,reason=PolicyDropped";
        let events = bed.kubectl(&["get", "events", "-n", namespace, select, "-o", "name"])?;
        Ok((!events.trim().is_empty()).then_some(()))
    })
}

/// `knit explain`, from objects of the API alone, comes to the same.
fn explain_agrees(bed: &Bed, namespace: &str, network: &str, dropped: &Value) -> Result<()> {
    let mut command = Command::new(crate::shim::target_dir().join("debug/knit"));
    command.args(["explain", &format!("{namespace}/stranger"), &format!("{namespace}/server:8080")]);
    command.args(["-o", "json", "--kubeconfig"]).arg(bed.state().kubeconfig());
    let output = bed.in_control_plane(command, None)?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "knit explain failed: {words}");
    let explained: Value = serde_json::from_slice(&output.stdout).context("knit explain's answer")?;
    let one = &explained[0];
    ensure!(one["allowed"] == false && one["network"] == network && one["enforced"] == true, "{explained}");
    ensure!(
        one["ingress"]["reason"] == dropped["reason"],
        "explain and drops differ: {explained}, {dropped}"
    );
    Ok(())
}
