//! Calls of an agent in the protocol of the CNI shim, without the shim.

use std::os::unix::net::UnixStream;
use std::path::Path;

use knit_cni::protocol::{self, Command, PROTOCOL_VERSION, Request, Response};
use knit_cni::{Args, NetworkConfig};
use serde_json::{Value, json};

/// Whom a call is about.
#[derive(Debug, Clone, Copy)]
pub struct Pod<'a> {
    /// Its sandbox, and its name.
    pub sandbox: &'a str,
    /// Its namespace in Kubernetes.
    pub namespace: &'a str,
    /// Where its network namespace is.
    pub netns: &'a Path,
}

/// What containerd passes on of a pod with this annotation `knit.dev/networks`.
pub fn networks(annotation: &str) -> Value {
    json!({"io.kubernetes.cri.pod-annotations": {"knit.dev/networks": annotation}})
}

/// A call as containerd would make it, with this `runtimeConfig`.
pub fn request(command: Command, pod: Pod<'_>, runtime_config: &Value) -> Request {
    let config = json!({"cniVersion": "1.1.0", "name": "knit", "runtimeConfig": runtime_config});
    Request {
        version: PROTOCOL_VERSION,
        command,
        container_id: pod.sandbox.to_owned(),
        netns: pod.netns.display().to_string(),
        ifname: "eth0".into(),
        args: Args {
            pod_namespace: Some(pod.namespace.to_owned()),
            pod_name: Some(pod.sandbox.to_owned()),
            pod_uid: None,
            infra_container_id: None,
        },
        path: String::new(),
        config: NetworkConfig::parse(config.to_string().as_bytes()).expect("a configuration"),
        timeout_ms: Some(60_000),
    }
}

/// A call of the agent at this socket that must succeed; its result.
pub async fn call(socket: &Path, command: Command, pod: Pod<'_>, runtime_config: &Value) -> Value {
    match ask(socket, request(command, pod, runtime_config)).await {
        Response::Ok(value) => value,
        Response::Err(error) => panic!("{command:?} of {}: {error:?}", pod.sandbox),
    }
}

/// A call of the agent at this socket, and what it answers.
pub async fn ask(socket: &Path, request: Request) -> Response {
    let socket = socket.to_owned();
    let asked = tokio::task::spawn_blocking(move || {
        let mut stream = UnixStream::connect(socket).expect("connected");
        protocol::send(&mut stream, &request).expect("sent");
        protocol::receive::<Response>(&mut stream).expect("an answer")
    });
    asked.await.expect("asked")
}
