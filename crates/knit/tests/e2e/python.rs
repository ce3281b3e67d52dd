//! A network runtime in another language, from examples/python of knit-runtime, as a stranger would run it:
//! it keeps KNI's promises, serves a pod together with the agent's own runtime, and nothing is left by
//! whoever is killed.
//!
//! `KNIT_PYTHON` names a Python that has grpcio, grpcio-status and grpcio-tools, where `python3` has not.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use knit_kernel::Handle;
use knit_kernel::handle::LinkFilter;
use knit_kernel::testing::{eventually, skip};
use knit_runtime::Runtime as _;
use knit_runtime::wire::RemoteRuntime;
use serde_json::json;

use crate::support::{Cluster, Node, Pod, SOON, addresses, block, e2e};

const STUBS: &str = "/run/python-stubs";

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A Python with what the examples need, and the code that is made from the protocol; none where there is
/// none.
fn python() -> Option<PathBuf> {
    let python = PathBuf::from(std::env::var_os("KNIT_PYTHON").unwrap_or("python3".into()));
    let has = Command::new(&python)
        .args(["-c", "import grpc, grpc_status, grpc_tools"])
        .stderr(Stdio::null())
        .status();
    if !has.is_ok_and(|status| status.success()) {
        skip("python3, or what KNIT_PYTHON names, has no grpcio, grpcio-status and grpcio-tools");
        return None;
    }
    std::fs::create_dir_all(STUBS).expect("a folder");
    let made = Command::new(&python)
        .args(["-m", "grpc_tools.protoc", "-I"])
        .arg(repository("crates/knit-api/proto"))
        .args([
            &format!("--python_out={STUBS}"),
            &format!("--grpc_python_out={STUBS}"),
            "kni/v1alpha1/kni.proto",
        ])
        .status();
    assert!(made.expect("python runs").success(), "the protocol's code is not made");
    Some(python)
}

fn script(python: &Path, name: &str) -> Command {
    let mut command = Command::new(python);
    command.arg(repository("crates/knit-runtime/examples/python").join(name)).env("PYTHONPATH", STUBS);
    // The folder of the repository stays as it is.
    command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
    command
}

/// The runtime as a process of the node.
struct Process {
    child: Child,
    socket: PathBuf,
}

impl Process {
    fn start(python: &Path, node: &Node) -> Self {
        let folder = node.run.join("runtimes");
        std::fs::create_dir_all(&folder).expect("a folder");
        let socket = folder.join("python.sock");
        let mut command = script(python, "runtime.py");
        command.arg(&socket).arg("/run/python-runtime");
        let child = node.space.run(|| command.spawn()).expect("a visit").expect("python starts");
        let process = Self { child, socket };
        eventually("the runtime answers", SOON, || process.list().is_ok());
        process
    }

    fn list(&self) -> Result<Vec<knit_runtime::Attachment>, knit_runtime::Error> {
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        tokio.block_on(async { RemoteRuntime::new(&self.socket, Duration::from_secs(5))?.list(None).await })
    }

    fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::new();
    let class = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "NetworkClass",
        "metadata": {"name": "python"}, "spec": {"runtime": "example.com/python"}});
    let subnets = [json!({"cidr": "10.98.0.0/24"}), json!({"cidr": "fd98::/64"})];
    let network = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "lab"},
        "spec": {"class": "python", "topology": "Layer2", "subnets": subnets,
            "allowedNamespaces": {"from": "All"}}, "status": {"id": 9}});
    for object in [class, network, block("lab", "a", "10.98.0.128/25", "fd98::80/121")] {
        cluster.put(&object);
    }
    cluster
}

fn is_empty(pod: &Pod) -> bool {
    let links = Handle::open(&pod.space).and_then(|h| h.links(&LinkFilter::default())).expect("links");
    links.iter().all(|link| link.name.as_str() == "lo")
}

#[test]
fn a_runtime_in_another_language_keeps_its_promises() {
    e2e(|| {
        let Some(python) = python() else { return };
        let cluster = cluster();
        let runtime = Process::start(&python, &cluster.a);
        let mut conformance = cluster.a.command("conformance");
        conformance.arg("--runtime").arg(&runtime.socket).args([
            "--namespaces",
            "/run/conformance",
            "--node",
            "a",
        ]);
        let output = conformance.output().expect("knit runs");
        let table = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{table}{}", String::from_utf8_lossy(&output.stderr));
        assert!(table.contains("example.com/python 0.1.0 meets all requirements"), "{table}");
    });
}

#[test]
fn two_runtimes_in_one_pod_and_everybody_is_killed() {
    e2e(|| {
        let Some(python) = python() else { return };
        let mut cluster = cluster();
        let mut runtime = Process::start(&python, &cluster.a);
        cluster.a.start();
        let (web, result) = cluster.a.add("web", "lab");
        let (db, other) = cluster.a.add("db", "lab");
        let talk = |what: &str| {
            for interface in ["eth0", "net1"] {
                for to in addresses(&other, interface) {
                    assert!(web.talks(&db.space, to, SOON), "{what}: {interface} to {to}");
                }
            }
        };
        assert_eq!((addresses(&result, "eth0").len(), addresses(&result, "net1").len()), (2, 2));
        talk("both are there");

        // A client in that language on the agent's own socket: it is served, and understands what is refused.
        let ask = |sandbox: &str| {
            let socket = cluster.a.run.join("kni.sock");
            let output = script(&python, "client.py").arg(socket).arg(sandbox).output().expect("python runs");
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
        };
        let said = ask("db");
        assert!(
            said.contains("knit.dev/node speaks v1alpha1") && said.contains("net1 on lab: 10.98.0."),
            "{said}"
        );
        assert!(said.contains("as it was made"), "{said}");
        let said = ask("nobody");
        assert!(said.contains("ATTACHMENT_NOT_FOUND: sandbox nobody"), "{said}");

        // The agent is killed while pods come and go.
        let mut pods = Vec::new();
        for round in 0..6 {
            let pod = Pod::new(&format!("round{round}"));
            let (caller, path) = (cluster.a.caller(), pod.path.clone());
            let command = if round % 2 == 0 { "ADD" } else { "DEL" };
            if command == "DEL" {
                assert!(cluster.a.cni("ADD", &pod, "lab").ok);
            }
            std::thread::scope(|scope| {
                let pod = &pod;
                let call = scope.spawn(move || caller.cni(command, pod, "lab"));
                // As far as it has come: each round somewhere else.
                eventually("something is made or taken away", SOON, || {
                    call.is_finished() || is_empty(pod) != (command == "ADD")
                });
                cluster.a.kill();
                call.join().expect("the shim ends");
            });
            assert!(path.exists());
            cluster.a.start();
            pods.push(pod);
        }
        // So is the runtime, and an ADD meanwhile says whom it waits for.
        runtime.kill();
        talk("nobody needs the runtime to talk");
        let late = Pod::new("late");
        let refused = cluster.a.cni("ADD", &late, "lab");
        assert!(!refused.ok && refused.json.to_string().contains("runtime"), "{}", refused.json);
        assert!(is_empty(&late), "half of a pod's networks");
        drop(runtime);
        let runtime = Process::start(&python, &cluster.a);
        eventually("it is used again", SOON, || cluster.a.cni("ADD", &late, "lab").ok);
        talk("the runtime goes on where it was");

        for pod in pods.iter().chain([&late, &web, &db]) {
            cluster.a.del(pod);
            eventually("a pod's interfaces are gone", SOON, || is_empty(pod));
        }
        eventually("the runtime has nothing left", SOON, || runtime.list().is_ok_and(|list| list.is_empty()));
        cluster.a.audit(&[].into());
    });
}
