//! A token of one node's agent, in strange hands, against a real API server with the roles and policies of
//! deploy/: what is not that node's is refused, for every kind that an agent may write, and what is its own
//! works.
//!
//! It needs etcd, kube-apiserver and kubectl, as `cargo xtask kube build` leaves them in its cache, or in the
//! folder that `KNIT_KUBE_BIN` names; and `openssl`. Where they are not, it is skipped.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use knit_api::names::{AGENT_MANAGER, ATTACHMENT_FINALIZER};
use knit_api::{AddressBlock, Network, NetworkAttachment, NodeNetwork, NodeSlice};
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_objects::{Key, Objects, Selection, Source, Write};
use knit_testbed::control_plane::{ADMIN, ControlPlane, START_TIMEOUT};
use serde_json::{Value, json};

/// Nodes, and a pod of the agent on each, as the DaemonSet makes it; and a user's NetworkAttachment.
const OBJECTS: &str = r#"
{apiVersion: v1, kind: Node, metadata: {name: n1}}
---
{apiVersion: v1, kind: Node, metadata: {name: n2}}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-n1, namespace: knit-system}
spec: {nodeName: n1, serviceAccountName: knit-node, containers: [{name: agent, image: knit}]}
---
apiVersion: v1
kind: Pod
metadata: {name: agent-n2, namespace: knit-system}
spec: {nodeName: n2, serviceAccountName: knit-node, containers: [{name: agent, image: knit}]}
---
apiVersion: knit.dev/v1alpha1
kind: NetworkAttachment
metadata: {name: users, namespace: default, finalizers: [example.org/own]}
spec: {pod: web, network: blue}
---
apiVersion: knit.dev/v1alpha1
kind: NetworkAttachment
metadata: {name: orphan, namespace: default, finalizers: [example.org/own]}
spec: {pod: web, network: blue}
"#;

/// Somebody with this token.
fn client(plane: &ControlPlane, runtime: &tokio::runtime::Runtime, name: &str, token: &str) -> Objects {
    let source = Source::Kubeconfig { path: plane.client(name, token), context: None };
    runtime.block_on(Objects::open(source)).expect("objects")
}

/// An API server with what the overlays give agents; nothing, with the reason, where that cannot be.
fn serve(folder: &Path) -> Result<ControlPlane, String> {
    let plane = ControlPlane::start(folder, "RBAC")?;
    plane.write("objects.yaml", OBJECTS);
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let deploy = |name: &str| deploy.join(name).display().to_string();
    plane.apply(&["-k", &deploy("crds")]);
    for file in ["base/common/namespace.yaml", "base/agent/rbac.yaml", "base/agent/policy.yaml"] {
        plane.apply(&["-f", &deploy(file)]);
    }
    plane.apply(&["-f", "objects.yaml"]);
    Ok(plane)
}

fn attachment(name: &str) -> Key {
    Key::namespaced("default", name)
}

/// An attachment with these labels, as an agent publishes it.
fn published(name: &str, labels: &Value, finalizers: &[&str]) -> Write {
    let object: NetworkAttachment = serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {"name": name, "namespace": "default", "labels": labels, "finalizers": finalizers},
        "spec": {"pod": "web", "network": "blue", "interface": "net1"},
    }))
    .expect("a NetworkAttachment");
    Write::apply(&object, AGENT_MANAGER)
}

fn of_node(node: &str) -> Value {
    json!({"app.kubernetes.io/managed-by": "knit", "knit.dev/node": node, "knit.dev/announced": "true"})
}

fn attached(name: &str, node: &str, ready: &str) -> Write {
    let condition = json!({"type": "Ready", "status": ready, "reason": "R", "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let status = json!({
        "node": node, "mac": "02:00:00:00:00:01", "conditions": [condition],
        "addresses": [{"family": "IPv4", "address": "192.0.2.77", "prefix": 32}],
    });
    Write::status::<NetworkAttachment>(attachment(name), &status, AGENT_MANAGER)
}

/// What the controller says of a user's attachment.
fn named(name: &str, node: &str) -> Write {
    Write::merge_status::<NetworkAttachment>(attachment(name), json!({"status": {"node": node}}))
}

fn metadata(name: &str, metadata: &Value) -> Write {
    Write::merge::<NetworkAttachment>(attachment(name), json!({"metadata": metadata}))
}

fn lease(name: &str) -> Write {
    Write::lease("knit-system", name, name, Duration::from_secs(100), Timestamp::now(), AGENT_MANAGER)
}

fn condition(node: &str) -> Write {
    Write::node_network_unavailable(node, false, "KnitIsReady", "ready", Timestamp::now(), AGENT_MANAGER)
}

fn node_status(node: &str, patch: Value) -> Write {
    Write::merge_status::<Node>(Key::cluster(node), patch)
}

fn node_network(name: &str) -> Write {
    let object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": name},
        "spec": {}});
    Write::apply(&serde_json::from_value::<NodeNetwork>(object).expect("a NodeNetwork"), AGENT_MANAGER)
}

fn event(name: &str, instance: &str) -> Write {
    let object = json!({
        "metadata": {"name": name, "namespace": "default"}, "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "knit-node", "reportingInstance": instance, "action": "Attach",
            "reason": "Refused",
        "type": "Warning", "note": "n", "regarding": {"kind": "Pod", "name": "web", "namespace": "default"},
    });
    Write::create(&serde_json::from_value::<Event>(object).expect("an Event"))
}

fn repeated(name: &str, instance: &str) -> Write {
    let series = json!({"count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z"});
    let patch = json!({"series": series, "reportingInstance": instance});
    Write::merge::<Event>(attachment(name), patch)
}

/// Who tries what, and whether it is taken.
fn attempts() -> Vec<(&'static str, Write, bool)> {
    let holds = json!({"finalizers": ["example.org/own", ATTACHMENT_FINALIZER]});
    let address = json!({"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.9"}]}});
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let block =
        json!({"metadata": {"name": "b"}, "spec": {"network": "blue", "node": "n1", "ipv4": "10.77.0.0/29"}});
    let block: AddressBlock = serde_json::from_value(block).expect("a block");
    let slice = json!({"metadata": {"name": "nodes-7"}, "spec": {"index": 7, "nodes": [{"name": "n2"}]}});
    let slice: NodeSlice = serde_json::from_value(slice).expect("a slice");
    vec![
        // What an agent publishes.
        ("n1", published("n1s", &of_node("n1"), &[]), true),
        ("n1", attached("n1s", "n1", "True"), true),
        ("n1", published("n2s", &of_node("n2"), &[]), false),
        ("n1", published("nobodys", &json!({}), &[]), false),
        ("n1", published("stays", &of_node("n1"), &["example.org/stay"]), false),
        ("n1", attached("n1s", "n2", "True"), false),
        ("n2", attached("n1s", "n2", "True"), false),
        ("n2", attached("n1s", "n1", "True"), false),
        ("n2", published("n1s", &of_node("n2"), &[]), false),
        ("n2", metadata("n1s", &json!({"labels": {"knit.dev/announced": null}})), false),
        ("n2", metadata("n1s", &json!({"labels": {"app.kubernetes.io/managed-by": null}})), false),
        ("n2", Write::delete::<NetworkAttachment>(attachment("n1s")), false),
        // Nor does anybody else take from it what says whose it is: its agent could not repair that.
        ("admin", metadata("n1s", &json!({"labels": {"app.kubernetes.io/managed-by": null}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"app.kubernetes.io/managed-by": "me"}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"knit.dev/node": "n2"}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"knit.dev/node": null}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"knit.dev/announced": null}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"knit.dev/network": "red"}})), false),
        ("admin", metadata("n1s", &json!({"labels": {"mine": "too"}})), true),
        ("admin", published("forged", &of_node("n1"), &[]), false),
        ("admin", published("plain", &json!({"knit.dev/announced": "true"}), &[]), true),
        ("n1", published("n1s", &of_node("n1"), &[]), true),
        ("admin", metadata("users", &json!({"labels": {"app.kubernetes.io/managed-by": "Helm"}})), true),
        ("admin", metadata("users", &json!({"labels": {"app.kubernetes.io/managed-by": "knit"}})), false),
        ("n1", metadata("n1s", &json!({"finalizers": ["example.org/stay"]})), false),
        ("n1", Write::delete::<NetworkAttachment>(attachment("n1s")), true),
        // What a user made: the finalizer and the status, and nothing else, and that only once the controller
        // says that it is this node's.
        ("n1", metadata("users", &holds), false),
        ("n1", attached("users", "n1", "False"), false),
        ("n1", named("users", "n1"), false),
        ("admin", named("users", "n1"), true),
        ("n2", metadata("users", &holds), false),
        ("n1", metadata("users", &holds), true),
        ("n1", metadata("users", &json!({"finalizers": ["example.org/stay", ATTACHMENT_FINALIZER]})), false),
        ("n1", metadata("users", &json!({"labels": {"knit.dev/announced": "true"}})), false),
        ("n1", metadata("users", &json!({"labels": of_node("n1")})), false),
        ("n1", metadata("users", &json!({"annotations": {"a": "b"}})), false),
        ("n1", attached("users", "n2", "True"), false),
        ("n1", attached("users", "n1", "False"), true),
        // Its pod moved on.
        ("n2", attached("users", "n2", "True"), false),
        ("n2", named("users", "n2"), false),
        ("admin", named("users", "n2"), true),
        ("n2", attached("users", "n2", "True"), true),
        ("n1", attached("users", "n1", "True"), false),
        ("n1", metadata("users", &json!({"finalizers": ["example.org/own"]})), false),
        ("n1", Write::delete::<NetworkAttachment>(attachment("users")), false),
        ("n2", Write::delete::<NetworkAttachment>(attachment("users")), false),
        ("n2", metadata("users", &json!({"finalizers": ["example.org/own"]})), true),
        // A user deletes another while n1, whose machine is dead, has it attached: whoever has its pod now
        // lets it go, and no more.
        ("admin", named("orphan", "n1"), true),
        ("n1", metadata("orphan", &holds), true),
        ("n1", attached("orphan", "n1", "True"), true),
        ("n2", metadata("orphan", &json!({"finalizers": ["example.org/own"]})), false),
        ("admin", Write::delete::<NetworkAttachment>(attachment("orphan")), true),
        ("n2", attached("orphan", "n2", "True"), false),
        ("n2", metadata("orphan", &json!({"finalizers": ["example.org/own"]})), false),
        ("admin", named("orphan", "n2"), true),
        ("n2", metadata("orphan", &json!({"finalizers": [ATTACHMENT_FINALIZER]})), false),
        (
            "n2",
            metadata("orphan", &json!({"finalizers": ["example.org/own"], "annotations": {"a": "b"}})),
            false,
        ),
        ("n2", metadata("orphan", &json!({"finalizers": ["example.org/own"]})), true),
        // Its Node: one condition.
        ("n1", condition("n1"), true),
        ("n1", condition("n2"), false),
        ("n1", node_status("n1", address), false),
        ("n1", node_status("n1", ready), false),
        ("n1", node_status("n1", json!({"status": {"allocatable": {"cpu": "99"}}})), false),
        ("n1", node_status("n1", json!({"status": {"images": [{"names": ["x"], "sizeBytes": 1}]}})), false),
        ("n1", node_status("n1", json!({"status": {"phase": "Terminated"}})), false),
        ("n1", node_status("n1", json!({"status": {"runtimeHandlers": [{"name": "x"}]}})), false),
        ("n1", node_status("n1", json!({"status": {"features": {"supplementalGroupsPolicy": true}}})), false),
        ("n1", node_status("n1", json!({"metadata": {"labels": {"zone": "mine"}}})), false),
        ("n1", Write::merge::<Node>(Key::cluster("n1"), json!({"spec": {"unschedulable": false}})), false),
        // What it says of itself.
        ("n1", lease("n1"), true),
        ("n1", lease("n1"), true),
        ("n1", lease("n2"), false),
        ("n1", lease("knit-controller"), false),
        ("n1", lease("knit-controller-numbers"), false),
        ("n1", Write::delete::<Lease>(Key::namespaced("knit-system", "n1")), false),
        ("n1", node_network("n1"), true),
        ("n1", node_network("n2"), false),
        ("n1", Write::status::<NodeNetwork>(Key::cluster("n1"), &json!({}), AGENT_MANAGER), true),
        ("n2", Write::status::<NodeNetwork>(Key::cluster("n1"), &json!({}), AGENT_MANAGER), false),
        ("n1", event("e", "n1"), true),
        ("n1", event("f", "n2"), false),
        ("n1", repeated("e", "n1"), true),
        ("n2", repeated("e", "n1"), false),
        // What is no agent's to write.
        ("n1", Write::create(&block), false),
        ("n1", Write::create(&slice), false),
        (
            "n1",
            Write::merge::<Network>(Key::cluster("blue"), json!({"metadata": {"labels": {"a": "b"}}})),
            false,
        ),
        ("n1", Write::delete::<Pod>(Key::namespaced("knit-system", "agent-n2")), false),
        // A token that is bound to no pod is nobody's.
        ("nobody", lease("n1"), false),
        ("nobody", published("n1s", &of_node("n1"), &[]), false),
        ("nobody", condition("n1"), false),
        ("nobody", event("g", "n1"), false),
    ]
}

#[test]
fn a_stolen_token_is_one_nodes() {
    in_namespaces(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let server = match serve(folder.path()) {
            Ok(server) => server,
            Err(why) => return skip(why),
        };
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let of_pod = |node: &str| {
            let pod = format!("agent-{node}");
            let bound = ["--bound-object-kind=Pod", "--bound-object-name", &pod];
            let args = [&["create", "token", "knit-node", "-n", "knit-system"], &bound[..]].concat();
            client(&server, &runtime, node, &server.kubectl(&args).expect("a token"))
        };
        let unbound =
            server.kubectl(&["create", "token", "knit-node", "-n", "knit-system"]).expect("a token");
        let clients = [
            ("n1", of_pod("n1")),
            ("n2", of_pod("n2")),
            ("nobody", client(&server, &runtime, "nobody", &unbound)),
            ("admin", client(&server, &runtime, "somebody", ADMIN)),
        ];
        let attempt = |who: &str, write: &Write| {
            let (_, client) = clients.iter().find(|(name, _)| *name == who).expect("a client");
            runtime.block_on(client.write(write)).map(drop)
        };
        // Policies come into force a moment after they are written, each by itself.
        for (who, write) in [
            ("n1", lease("probe")),
            ("n1", published("probe", &of_node("n2"), &[])),
            ("n1", condition("n2")),
            ("n1", event("probe", "n2")),
        ] {
            eventually(&format!("{write} is refused"), START_TIMEOUT, || attempt(who, &write).is_err());
        }
        attempt("n1", &published("labelled", &of_node("n1"), &[])).expect("its own");
        let mut number = 0;
        eventually("labels of what an agent published are not changed", START_TIMEOUT, || {
            // Another one each time: the same again is no change.
            number += 1;
            let labels = json!({"labels": {"knit.dev/node": format!("n{number}")}});
            attempt("admin", &metadata("labelled", &labels)).is_err()
        });
        let mut wrong = Vec::new();
        for (who, write, taken) in attempts() {
            let result = attempt(who, &write);
            match &result {
                Ok(()) if taken => {}
                // Refused, and not missing or misspelt.
                Err(error) if !taken => {
                    let said = error.with_causes();
                    let refused = said.contains("denied request") || said.contains("forbidden");
                    if !refused {
                        wrong.push(format!("{who}: {write}: {said}"));
                    }
                }
                _ => wrong.push(format!("{who}: {write}: {result:?}")),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        let (_, n1) = &clients[0];
        let secrets = runtime.block_on(n1.list::<Secret>(&Selection::default()));
        assert!(secrets.is_err(), "it reads {secrets:?}");
    });
}
