//! A token of one node's agent, in strange hands, against a real API server with the roles and policies of
//! deploy/: what is not that node's is refused, for every kind that an agent may write, and what is its own
//! works.
//!
//! It needs etcd, kube-apiserver and kubectl, as `cargo xtask kube build` leaves them in its cache, or in the
//! folder that `KNIT_KUBE_BIN` names; and `openssl`. Where they are not, it is skipped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use knit_api::names::{AGENT_MANAGER, ATTACHMENT_FINALIZER};
use knit_api::{AddressBlock, Network, NetworkAttachment, NodeNetwork};
use knit_kernel::addr::Address;
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_kernel::{Handle, IfName, Op};
use knit_objects::{Key, Objects, Selection, Source, Write};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(100);

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

/// Programs that are ended with the value.
struct Server {
    folder: PathBuf,
    kubectl: PathBuf,
    children: Vec<Child>,
}

impl Server {
    fn start(&mut self, program: &Path, args: &[&str]) {
        let name = program.file_name().expect("a name").to_string_lossy().into_owned();
        let log = File::create(self.folder.join(format!("{name}.log"))).expect("a file");
        let mut command = Command::new(program);
        command.args(args).current_dir(&self.folder).stdin(Stdio::null());
        let child = command.stdout(log.try_clone().expect("a file")).stderr(log).spawn();
        self.children.push(child.expect("it starts"));
    }

    fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.kubectl);
        let output = command.arg("--kubeconfig").arg(self.folder.join("admin")).args(args).output();
        let output = output.expect("kubectl runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Somebody with this token.
    fn client(&self, runtime: &tokio::runtime::Runtime, name: &str, token: &str) -> Objects {
        let path = self.folder.join(name);
        fs::write(&path, kubeconfig(token)).expect("a file");
        let source = Source::Kubeconfig { path, context: None };
        runtime.block_on(Objects::open(source)).expect("objects")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn kubeconfig(token: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
         clusters: [{{name: x, cluster: {{server: 'https://127.0.0.1:6443', insecure-skip-tls-verify: \
         true}}}}]\n\
         users: [{{name: x, user: {{token: '{token}'}}}}]\n\
         contexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n"
    )
}

/// A program of the folder that somebody named, or the newest that the test bed's cache has.
fn find(name: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("KNIT_KUBE_BIN") {
        return Some(PathBuf::from(folder).join(name)).filter(|path| path.is_file());
    }
    let cache = std::env::var_os("KNIT_KUBE_CACHE").map(PathBuf::from).or_else(|| {
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
        let folder = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(folder.join("knit/kube"))
    })?;
    let folders = fs::read_dir(cache.join("bin")).ok()?.flatten();
    let built = folders.map(|folder| folder.path().join(name)).filter(|path| path.is_file());
    built.max_by_key(|path| fs::metadata(path).and_then(|m| m.modified()).ok())
}

/// An API server with what the overlays give agents; nothing, with the reason, where that cannot be.
fn serve(folder: &Path) -> Result<Server, String> {
    let program = |name: &str| {
        find(name).ok_or_else(|| {
            format!(
                "there is no {name}: `cargo xtask kube build` makes it, or KNIT_KUBE_BIN names its folder"
            )
        })
    };
    let (etcd, api, kubectl) = (program("etcd")?, program("kube-apiserver")?, program("kubectl")?);
    let path = |name: &str| folder.join(name).display().to_string();
    let key = Command::new("openssl").args(["genpkey", "-algorithm", "RSA", "-out", &path("key")]).output();
    if !key.is_ok_and(|output| output.status.success()) {
        return Err("there is no openssl to make a key with".into());
    }
    let handle = Handle::current().expect("a handle");
    let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
    let own = Op::create(Address::new(lo, "192.0.2.1/32".parse().expect("an address")));
    handle.apply(&[own]).expect("an address");
    fs::write(path("admin"), kubeconfig("secret")).expect("a file");
    fs::write(path("tokens"), "secret,admin,1,system:masters\n").expect("a file");
    fs::write(path("objects.yaml"), OBJECTS).expect("a file");
    let mut server = Server { folder: folder.to_owned(), kubectl, children: Vec::new() };
    server.start(
        &etcd,
        &[
            "--data-dir=etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        ],
    );
    server.start(
        &api,
        &[
            "--etcd-servers=http://127.0.0.1:2379",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=key",
            "--service-account-signing-key-file=key",
            "--cert-dir=certificates",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=RBAC",
            "--token-auth-file=tokens",
            "--disable-admission-plugins=ServiceAccount",
        ],
    );
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let deploy = |name: &str| deploy.join(name).display().to_string();
    let apply = |flag: &str, what: &str| {
        let mut said = String::new();
        eventually(&format!("the API server takes {what}"), PATIENCE, || {
            let applied = server.kubectl(&["apply", "--server-side", flag, what]);
            said = applied.err().unwrap_or_default();
            said.is_empty()
        });
    };
    apply("-k", &deploy("crds"));
    for file in ["base/common/namespace.yaml", "base/agent/rbac.yaml", "base/agent/policy.yaml"] {
        apply("-f", &deploy(file));
    }
    apply("-f", &path("objects.yaml"));
    Ok(server)
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
        ("n1", metadata("n1s", &json!({"finalizers": ["example.org/stay"]})), false),
        ("n1", Write::delete::<NetworkAttachment>(attachment("n1s")), true),
        // What a user made: the finalizer and the status, and nothing else.
        ("n1", metadata("users", &holds), true),
        ("n1", metadata("users", &json!({"finalizers": ["example.org/stay", ATTACHMENT_FINALIZER]})), false),
        ("n1", metadata("users", &json!({"labels": {"knit.dev/announced": "true"}})), false),
        ("n1", metadata("users", &json!({"labels": of_node("n1")})), false),
        ("n1", metadata("users", &json!({"annotations": {"a": "b"}})), false),
        ("n1", attached("users", "n2", "True"), false),
        ("n1", attached("users", "n1", "False"), true),
        // Its pod moved on.
        ("n2", attached("users", "n2", "True"), true),
        ("n1", attached("users", "n1", "True"), false),
        ("n1", metadata("users", &json!({"finalizers": ["example.org/own"]})), false),
        ("n1", Write::delete::<NetworkAttachment>(attachment("users")), false),
        ("n2", Write::delete::<NetworkAttachment>(attachment("users")), false),
        ("n2", metadata("users", &json!({"finalizers": ["example.org/own"]})), true),
        // A user deletes another while n1, whose machine is dead, has it attached: whoever has its pod now
        // lets it go, and no more.
        ("n1", metadata("orphan", &holds), true),
        ("n1", attached("orphan", "n1", "True"), true),
        ("n2", metadata("orphan", &json!({"finalizers": ["example.org/own"]})), false),
        ("admin", Write::delete::<NetworkAttachment>(attachment("orphan")), true),
        ("n2", attached("orphan", "n2", "True"), false),
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
            server.client(&runtime, node, &server.kubectl(&args).expect("a token"))
        };
        let unbound =
            server.kubectl(&["create", "token", "knit-node", "-n", "knit-system"]).expect("a token");
        let clients = [
            ("n1", of_pod("n1")),
            ("n2", of_pod("n2")),
            ("nobody", server.client(&runtime, "nobody", &unbound)),
            ("admin", server.client(&runtime, "somebody", "secret")),
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
            eventually(&format!("{write} is refused"), PATIENCE, || attempt(who, &write).is_err());
        }
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
