//! A network runtime of somebody else beside the agent's own: what `knit doctor` says of it, well and not.

#[allow(dead_code, unreachable_pub, reason = "it is a program of its own; its main is not called here")]
#[path = "../../../knit-runtime/examples/bridge.rs"]
mod bridge;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bridge::BridgeRuntime;
use knit_kernel::Handle;
use knit_kernel::testing::eventually;
use knit_runtime::wire;
use serde_json::{Value, json};

use crate::doctor::{doctor, finds, healthy_objects, trouble};
use crate::support::{Cluster, SOON, addresses, block, e2e, name};

/// The runtime in a thread of its own; it ends when this is dropped, and its socket stays, as after a kill.
pub struct Served(Option<tokio::runtime::Runtime>);

impl Served {
    pub fn at(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let path = socket.to_owned();
        runtime.spawn(async move {
            wire::serve(&path, Arc::new(BridgeRuntime::default()), std::future::pending()).await
        });
        eventually("the runtime listens", SOON, || UnixStream::connect(socket).is_ok());
        Self(Some(runtime))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A class of the other runtime, and a Network with room on node a.
fn put_lab(cluster: &Cluster) {
    let class = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "NetworkClass",
        "metadata": {"name": "bridge"}, "spec": {"runtime": "example.com/bridge"}});
    let network = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "lab"},
        "spec": {"class": "bridge", "topology": "Layer2", "subnets": [{"cidr": "10.98.0.0/24"},
            {"cidr": "fd98::/64"}],
            "allowedNamespaces": {"from": "All"}},
        "status": {"id": 9}});
    for object in [class, network, block("lab", "a", "10.98.0.64/26", "fd98::40/122")] {
        cluster.put(&object);
    }
}

fn runtimes_dir(run: &Path) -> PathBuf {
    let folder = run.join("runtimes");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

#[test]
fn doctor_called_a_foreign_attachment_lost_and_a_dead_runtime_nothing() {
    e2e(|| {
        let mut cluster = healthy_objects();
        put_lab(&cluster);
        let socket = runtimes_dir(&cluster.a.run).join("bridge.sock");
        let served = Served::at(&socket);
        cluster.a.start();
        let node = &mut cluster.a;
        let (web, result) = node.add("web", "lab");
        assert_eq!(addresses(&result, "net1").len(), 2);
        let (findings, _) = doctor(node);
        for check in ["attachments", "runtimes"] {
            assert_eq!(trouble(&findings, check), "", "{check} of a node that is well");
        }
        let said: Vec<&Value> = findings.iter().filter(|f| f["check"] == "runtimes").collect();
        assert!(said[0]["message"].as_str().is_some_and(|m| m.contains("example.com/bridge")), "{said:?}");
        // An agent that runs puts some of what follows right.
        node.kill();
        let pod = Handle::open(&web.space).expect("a handle");
        let net1 = pod.index_of(&name("net1")).expect("net1");
        pod.delete_link(net1).expect("deleted");
        finds(node, "attachments", "wrong", "net1 of sandbox web (runtime example.com/bridge)");

        drop(served);
        finds(node, "runtimes", "wrong", "no answer");
        finds(node, "runtimes", "wrong", "pods here are attached by network runtime example.com/bridge");
        // One that hangs: it takes calls, and answers none.
        std::fs::remove_file(&socket).expect("removed");
        let hung = UnixListener::bind(&socket).expect("a socket");
        let mode =
            |mode| std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).expect("a mode");
        mode(0o600);
        finds(node, "runtimes", "wrong", "no answer within 3 s");
        mode(0o666);
        finds(node, "runtimes", "wrong", "mode 0666");
        drop(hung);
    });
}
