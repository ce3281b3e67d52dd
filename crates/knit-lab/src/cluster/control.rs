//! How other processes talk to a running lab: one request per connection of a Unix socket, as a line of JSON,
//! with the caller's standard streams beside it where a command is to be run. The answer is a line of JSON,
//! too.

use std::io::{self, BufRead as _, BufReader, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::sync::Notify;

use super::error::{Error, Result};
use super::{Lab, Manifests};

/// The longest request.
const MAX_REQUEST: usize = 16 << 20;

/// What can be asked of a lab.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", tag = "do")]
pub enum Request {
    /// Run a command in a pod, with the caller's standard streams.
    Exec {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
        /// The command.
        line: Vec<String>,
    },
    /// What a pod's processes have printed.
    Logs {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
        /// One container; all if there is none.
        container: Option<String>,
    },
    /// What the agent of a node has logged.
    AgentLog {
        /// The node.
        node: String,
    },
    /// What there is.
    Status,
    /// Break something, or mend it again.
    Fail {
        /// The failure.
        what: Failure,
        /// Which node; none for the API.
        node: Option<String>,
        /// Mend it.
        heal: bool,
    },
    /// Apply objects.
    Apply {
        /// The text of manifests.
        text: String,
    },
    /// Replace a node's agent by that of another program.
    Upgrade {
        /// The node.
        node: String,
        /// The program.
        program: PathBuf,
    },
    /// Serve the API on a connection, which comes with the request.
    Api,
    /// End.
    Down,
}

/// What can fail.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Failure {
    /// A node loses its power.
    Node,
    /// A node's agent is killed.
    Agent,
    /// A node's link is cut.
    Link,
    /// The API is away.
    Api,
}

#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(default)]
    value: Value,
}

/// Serves a lab's socket on threads of its own, until the process ends. `down` is told when the lab is to
/// end.
pub fn serve(lab: Lab, listener: UnixListener, down: Arc<Notify>) {
    let runtime = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (lab, down, runtime) = (lab.clone(), Arc::clone(&down), runtime.clone());
            std::thread::spawn(move || {
                if let Err(error) = serve_one(&lab, stream, &down, &runtime) {
                    tracing::debug!(%error, "a client of the lab disconnected");
                }
            });
        }
    });
}

fn serve_one(
    lab: &Lab,
    stream: UnixStream,
    down: &Notify,
    runtime: &tokio::runtime::Handle,
) -> io::Result<()> {
    let (request, streams) = receive(&stream)?;
    let answer = match request {
        Request::Api => {
            let Some(connection) = streams.into_iter().next() else { return Ok(()) };
            return runtime.block_on(lab.serve_api(TcpStream::from(connection)));
        }
        Request::Exec { namespace, name, line } => {
            let watched = stream.try_clone()?;
            runtime.block_on(exec(lab, &namespace, &name, &line, streams, watched))
        }
        Request::Logs { namespace, name, container } => {
            lab.pod_logs(&namespace, &name, container.as_deref()).map(Value::String)
        }
        Request::AgentLog { node } => lab.node(&node).and_then(|node| {
            let what = format!("the agent of {} has no log", node.name);
            std::fs::read_to_string(node.log()).map(Value::String).map_err(Error::io(what))
        }),
        Request::Status => Ok(status(lab)),
        Request::Fail { what, node, heal } => runtime.block_on(fail(lab, what, node, heal)),
        Request::Upgrade { node, program } => {
            runtime.block_on(lab.upgrade_agent(&node, &program)).map(|()| Value::Null)
        }
        Request::Apply { text } => {
            let applied = Manifests::parse("(what was sent)", &text).and_then(|m| lab.apply(&m));
            applied.map(|()| Value::Null)
        }
        Request::Down => {
            // Answered first: the process may end before a later line of this thread is run.
            let told = tell(stream, Ok(Value::Null));
            down.notify_one();
            return told;
        }
    };
    tell(stream, answer)
}

/// Sends an answer.
fn tell(mut stream: UnixStream, answer: Result<Value>) -> io::Result<()> {
    let answer = match answer {
        Ok(value) => Answer { error: None, value },
        Err(error) => {
            let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            Answer { error: Some(format!("{error}{source}")), value: Value::Null }
        }
    };
    writeln!(stream, "{}", serde_json::to_string(&answer)?)
}

/// Runs a command in a pod until it ends, or until who asked for it goes away.
async fn exec(
    lab: &Lab,
    namespace: &str,
    name: &str,
    line: &[String],
    streams: Vec<OwnedFd>,
    caller: UnixStream,
) -> Result<Value> {
    let pod = lab.pod(namespace, name)?;
    let mut command = lab.pod_command(&pod, line);
    let mut streams = streams.into_iter().map(Stdio::from);
    command.stdin(streams.next().unwrap_or_else(Stdio::null));
    command.stdout(streams.next().unwrap_or_else(Stdio::null));
    command.stderr(streams.next().unwrap_or_else(Stdio::null));
    let mut child = lab.spawn_in_pod(&pod, command)?;
    let what = || Error::io(format!("cannot wait for the command in pod {namespace}/{name}"));
    caller.set_nonblocking(true).map_err(what())?;
    let mut caller = tokio::net::UnixStream::from_std(caller).map_err(what())?;
    let mut byte = [0];
    let ended = tokio::select! {
        ended = child.wait() => ended.map_err(what())?,
        _ = caller.read(&mut byte) => {
            child.kill().await.map_err(what())?;
            return Ok(json!({"code": 130}));
        }
    };
    let into_blocking = caller.into_std().and_then(|stream| stream.set_nonblocking(false));
    into_blocking.map_err(what())?;
    Ok(json!({"code": ended.code().unwrap_or(137)}))
}

async fn fail(lab: &Lab, what: Failure, node: Option<String>, heal: bool) -> Result<Value> {
    let node = node.unwrap_or_default();
    match (what, heal) {
        (Failure::Node, false) => lab.lose_node(&node).await?,
        (Failure::Node, true) => lab.return_node(&node).await?,
        (Failure::Agent, false) => lab.kill_agent(&node).await?,
        (Failure::Agent, true) => lab.start_agent(&node).await?,
        (Failure::Link, heal) => lab.set_link(&node, heal)?,
        (Failure::Api, heal) => lab.set_api(heal).await?,
    }
    Ok(Value::Null)
}

/// What there is, for people and scripts.
fn status(lab: &Lab) -> Value {
    let list = |api: &str, kind: &str| {
        let found = lab.store().kind(api, kind).and_then(|kind| lab.store().list(&kind, &Default::default()));
        found.map(|list| list.items).unwrap_or_default()
    };
    let nodes: Vec<Value> = lab
        .nodes()
        .iter()
        .map(|node| {
            let agent = if node.agent_pid().is_some() { "running" } else { "away" };
            let state = match (node.namespace(), node.is_joined()) {
                (None, _) => "lost",
                (_, false) => "link cut",
                _ => "up",
            };
            json!({"name": node.name, "addresses": node.addresses(), "state": state, "agent": agent,
                "agentPid": node.agent_pid(), "agentProgram": node.agent_program()})
        })
        .collect();
    let networks = list("knit.dev/v1alpha1", "Network");
    let networks = networks.iter().map(|network| {
        let conditions = network.value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready =
            conditions.iter().find(|c| c["type"] == "Ready").map_or(Value::Null, |c| c["status"].clone());
        json!({"name": network.name(), "topology": network.value["spec"]["topology"], "ready": ready,
            "subnets": network.value["spec"]["subnets"].as_array().into_iter().flatten().map(|s|
                &s["cidr"]).collect::<Vec<_>>()})
    });
    let pods = list("v1", "Pod");
    let pods = pods.iter().map(|pod| {
        let status = &pod.value["status"];
        json!({"namespace": pod.namespace(), "name": pod.name(), "node": pod.value["spec"]["nodeName"],
            "phase": status["phase"], "ready": super::controllers::is_ready(pod),
                "message": status["message"],
            "addresses": status["podIPs"].as_array().into_iter().flatten().map(|ip|
                &ip["ip"]).collect::<Vec<_>>()})
    });
    let services = list("v1", "Service");
    let services = services.iter().map(|service| {
        let ports = service.value["spec"]["ports"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|p| &p["port"])
            .collect::<Vec<_>>();
        json!({"namespace": service.namespace(), "name": service.name(), "ports": ports,
            "addresses": service.value["spec"]["clusterIPs"]})
    });
    json!({"nodes": nodes, "networks": networks.collect::<Vec<_>>(), "pods": pods.collect::<Vec<_>>(),
        "services": services.collect::<Vec<_>>()})
}

/// Sends a request to the lab at `socket`, with these streams, and returns its answer.
pub fn ask(
    socket: &Path,
    request: &Request,
    streams: &[BorrowedFd<'_>],
) -> io::Result<Result<Value, String>> {
    let stream = send(socket, request, streams)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the lab ended before it answered"));
    }
    let answer: Answer = serde_json::from_str(&line)?;
    Ok(match answer.error {
        Some(error) => Err(error),
        None => Ok(answer.value),
    })
}

/// Has the lab at `socket` serve its API on a connection that was accepted here.
pub fn hand_over(socket: &Path, connection: &TcpStream) -> io::Result<()> {
    send(socket, &Request::Api, &[connection.as_fd()]).map(drop)
}

fn send(socket: &Path, request: &Request, streams: &[BorrowedFd<'_>]) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    let line = serde_json::to_string(request)? + "\n";
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !streams.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(streams));
    }
    let sent = sendmsg(&stream, &[IoSlice::new(line.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL)?;
    stream.write_all(&line.as_bytes()[sent..])?;
    Ok(stream)
}

fn receive(stream: &UnixStream) -> io::Result<(Request, Vec<OwnedFd>)> {
    let mut text = Vec::new();
    let mut streams = Vec::new();
    let mut chunk = vec![0; 64 * 1024];
    while text.last() != Some(&b'\n') {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut chunk)];
        let got = recvmsg(stream.as_fd(), &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                streams.extend(descriptors);
            }
        }
        if got == 0 || text.len() > MAX_REQUEST {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        text.extend_from_slice(&chunk[..got]);
    }
    Ok((serde_json::from_slice(&text)?, streams))
}
