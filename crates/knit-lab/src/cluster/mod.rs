//! A cluster on one machine: nodes as namespaces with the real agent, pods as namespaces with real processes.
//!
//! It must run inside a [`knit_kernel::sandbox::Sandbox`]: everything it makes ends with that. The parts:
//! [`wire`] joins the nodes, [`node`] is one of them, `pods` does a kubelet's work through the real [`shim`],
//! `controllers` has the small controllers of any cluster, `controller` runs the real knit-controller,
//! [`manifests`] reads what users write.

mod container;
pub mod control;
mod controller;
mod controllers;
pub mod error;
mod events;
pub mod manifests;
pub mod node;
mod objects;
mod pods;
mod probe;
pub mod shim;
mod wait;
pub mod wire;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use knit_types::sync::Locked;
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

pub use error::{Error, Result};
pub use manifests::Manifests;
pub use node::Node;
pub use pods::RunningPod;

use knit_apiserver::exec::{Exec, pipe_all};
use knit_apiserver::{Config, Handle, Server, Store, StoreOptions, log};
use node::Wanted;
use objects::{NODE, POD};
use shim::Shim;
use wire::Wire;

/// The port of the lab's API on the wire.
const API_PORT: u16 = 6443;

/// How a lab is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many nodes.
    pub nodes: u16,
    /// The program that is agent, shim and built-in server.
    pub program: PathBuf,
    /// Where everything is kept, on a file system that goes with the lab.
    pub dir: PathBuf,
    /// What agents log.
    pub agent_log: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 2,
            program: "/proc/self/exe".into(),
            dir: "/run/knit-lab".into(),
            agent_log: "info".to_owned(),
        }
    }
}

/// A running lab. Clones are the same lab.
#[derive(Clone, Debug)]
pub struct Lab {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: Options,
    store: Store,
    server: tokio::sync::Mutex<Option<Handle>>,
    wire: Wire,
    nodes: BTreeMap<u16, Arc<Node>>,
    nodes_changed: Notify,
    pods: pods::Pods,
    counter: AtomicU64,
    tasks: Mutex<Vec<AbortHandle>>,
}

impl Lab {
    /// Starts the API and the nodes, and waits until pods can be given networks on all of them.
    pub async fn start(options: Options) -> Result<Self> {
        let logs = options.dir.join("log");
        std::fs::create_dir_all(&logs).map_err(Error::io(format!("cannot create {}", logs.display())))?;
        let crds = StoreOptions::with_crds(&knit_api::crds())
            .map_err(|error| Error::io("cannot encode the CRDs as JSON")(error.into()))?;
        let store = Store::new(&crds).map_err(|error| Error::Api(error.into()))?;
        let wire = Wire::lay()?;
        let nodes =
            (0..options.nodes).map(|index| (index, Arc::new(Node::new(index, &options.dir)))).collect();
        let inner = Inner {
            options,
            store,
            server: tokio::sync::Mutex::new(None),
            wire,
            nodes,
            nodes_changed: Notify::new(),
            pods: pods::Pods::default(),
            counter: AtomicU64::new(0),
            tasks: Mutex::default(),
        };
        let lab = Self { inner: Arc::new(inner) };
        lab.set_api(true).await?;
        for node in lab.nodes() {
            lab.write_node(&node)?;
        }
        controller::start(&lab).await?;
        let command = node::AgentCommand {
            program: lab.program(),
            api: format!("http://{}", api_address()),
            log: lab.inner.options.agent_log.clone(),
        };
        let mut booting = JoinSet::new();
        for node in lab.nodes() {
            lab.spawn(Arc::clone(&node).supervise(command.clone()));
            let lab = lab.clone();
            booting.spawn(async move { lab.return_node(&node.name).await });
        }
        while let Some(booted) = booting.join_next().await {
            booted.map_err(|error| Error::io("a node did not boot")(std::io::Error::other(error)))??;
        }
        lab.spawn(controllers::schedule(lab.clone()));
        lab.spawn(controllers::deployments(lab.clone()));
        lab.spawn(controllers::endpoints(lab.clone()));
        lab.spawn(pods::run(lab.clone()));
        Ok(lab)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let handle = tokio::spawn(task).abort_handle();
        self.inner.tasks.locked().push(handle);
    }

    /// Ends everything: pods and agents at once. What is left goes with the sandbox.
    pub async fn stop(self) {
        for task in self.inner.tasks.locked().drain(..) {
            task.abort();
        }
        if let Some(server) = self.inner.server.lock().await.take() {
            server.shutdown().await;
        }
    }

    /// The API's objects, in process.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// The nodes.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.inner.nodes.values().cloned().collect()
    }

    /// A node by its name.
    pub fn node(&self, name: &str) -> Result<Arc<Node>> {
        let found = self.inner.nodes.values().find(|node| node.name == name);
        found.cloned().ok_or_else(|| Error::NoSuchNode { name: name.to_owned() })
    }

    fn ready_nodes(&self) -> Vec<Arc<Node>> {
        self.nodes().into_iter().filter(|node| node.is_joined()).collect()
    }

    async fn nodes_changed(&self) {
        self.inner.nodes_changed.notified().await;
    }

    fn pods(&self) -> &pods::Pods {
        &self.inner.pods
    }

    fn program(&self) -> PathBuf {
        self.inner.options.program.clone()
    }

    fn next_number(&self) -> u64 {
        self.inner.counter.fetch_add(1, Ordering::Relaxed)
    }

    /// Where the output of pods goes.
    fn logs(&self) -> PathBuf {
        self.inner.options.dir.join("log")
    }

    /// What a pod's processes have printed: one container's, or all of them one after another.
    pub fn pod_logs(&self, namespace: &str, name: &str, container: Option<&str>) -> Result<String> {
        let who = format!("{namespace}/{name}");
        let pod = objects::get(self.store(), POD, namespace, name);
        let pod = pod.ok_or_else(|| Error::NoSuchPod { name: who.clone() })?;
        let containers = pod.value["spec"]["containers"].as_array().into_iter().flatten();
        let names: Vec<&str> = containers.filter_map(|c| c["name"].as_str()).collect();
        let wanted: Vec<&str> = match container {
            Some(one) if !names.contains(&one) => {
                return Err(Error::NoSuchContainer { pod: who, name: one.to_owned(), has: names.join(", ") });
            }
            Some(one) => vec![one],
            None => names,
        };
        let mut text = String::new();
        for one in &wanted {
            if wanted.len() > 1 {
                text.push_str(&format!("== container {one}\n"));
            }
            match std::fs::read(log::file(&self.logs(), &pod, one)) {
                Ok(printed) => text.push_str(&String::from_utf8_lossy(&printed)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(format!("cannot read the log of pod {who}"))(error)),
            }
        }
        Ok(text)
    }

    /// Where everything of the lab is kept.
    pub fn dir(&self) -> &Path {
        &self.inner.options.dir
    }

    /// Applies manifests, after all of them were checked.
    pub fn apply(&self, manifests: &Manifests) -> Result<()> {
        manifests.check_in(self.store())?;
        manifests.apply(self.store())
    }

    /// A pod that runs.
    pub fn pod(&self, namespace: &str, name: &str) -> Result<RunningPod> {
        let found = self.pods().find(namespace, name);
        found.ok_or_else(|| Error::NoSuchPod { name: format!("{namespace}/{name}") })
    }

    /// A command in a pod, ready to be given its input and output; `knit` is this very program.
    pub fn pod_command(&self, pod: &RunningPod, line: &[String]) -> Command {
        let program = match line.first().map(String::as_str) {
            Some("knit") | None => self.program(),
            Some(other) => other.into(),
        };
        let mut command = Command::new(program);
        command.args(line.iter().skip(1)).kill_on_drop(true).process_group(0);
        command.env("POD_NAME", &pod.name).env("POD_NAMESPACE", &pod.namespace).env("NODE_NAME", &pod.node);
        command.env("POD_IP", pod.addresses.first().map(ToString::to_string).unwrap_or_default());
        command
    }

    /// Starts a command in a pod's namespace.
    pub fn spawn_in_pod(&self, pod: &RunningPod, command: Command) -> Result<Child> {
        let name = format!("{}/{}", pod.namespace, pod.name);
        let netns = pod.netns.as_ref().ok_or_else(|| Error::NoSuchPod { name: name.clone() })?;
        node::spawn_in(netns, command, &format!("the command in pod {name}"))
    }

    /// Runs a command in a pod and returns what it printed, and whether it succeeded.
    pub async fn exec(&self, namespace: &str, name: &str, line: &[&str]) -> Result<(bool, String)> {
        let pod = self.pod(namespace, name)?;
        let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        let mut command = self.pod_command(&pod, &line);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = self.spawn_in_pod(&pod, command)?;
        let what = format!("cannot wait for the command in pod {namespace}/{name}");
        let output = child.wait_with_output().await.map_err(Error::io(what))?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        Ok((output.status.success(), text))
    }

    /// Takes the API away (connections are closed, watches end), or brings it back with all its objects.
    pub async fn set_api(&self, up: bool) -> Result<()> {
        let mut server = self.inner.server.lock().await;
        match (up, server.take()) {
            (true, None) => {
                let config = Config {
                    listen: api_address(),
                    logs: Some(self.logs()),
                    exec: Some(Arc::new(Commands(Arc::downgrade(&self.inner)))),
                    ..Config::default()
                };
                let handle = Server::serve(self.store().clone(), &config).await.map_err(Error::Api)?;
                *server = Some(handle);
            }
            (false, Some(handle)) => handle.shutdown().await,
            (_, unchanged) => *server = unchanged,
        }
        Ok(())
    }

    /// Serves the API on a connection that was accepted outside; while the API is away, it is closed.
    pub async fn serve_api(&self, connection: std::net::TcpStream) -> std::io::Result<()> {
        match self.inner.server.lock().await.as_ref() {
            Some(server) => server.serve_connection(connection),
            None => Ok(()),
        }
    }

    /// Ends a node's agent with SIGKILL.
    pub async fn kill_agent(&self, node: &str) -> Result<()> {
        self.node(node)?.set_agent(Wanted::Killed).await;
        Ok(())
    }

    /// Replaces a node's agent by that of another program: the old one is asked to end, the new one takes
    /// over.
    pub async fn upgrade_agent(&self, node: &str, program: &Path) -> Result<()> {
        let found = self.node(node)?;
        std::fs::metadata(program)
            .map_err(Error::io(format!("cannot use {} as the agent of {node}", program.display())))?;
        found.set_program(program.to_owned());
        found.set_agent(Wanted::Ended).await;
        self.start_agent(node).await
    }

    /// Starts a node's agent, and waits until it serves.
    pub async fn start_agent(&self, node: &str) -> Result<()> {
        let node = self.node(node)?;
        node.set_agent(Wanted::Running).await;
        self.wait_for_agent(&node).await
    }

    /// Takes a node's link down, or brings it up again.
    pub fn set_link(&self, node: &str, up: bool) -> Result<()> {
        let node = self.node(node)?;
        node.set_link(&self.inner.wire, up)?;
        self.write_node(&node)?;
        self.inner.nodes_changed.notify_waiters();
        Ok(())
    }

    /// A power cut: agent, pods and namespaces of a node are gone at once. Its pods' objects stay.
    pub async fn lose_node(&self, name: &str) -> Result<()> {
        let node = self.node(name)?;
        node.cut();
        node.set_agent(Wanted::Killed).await;
        self.pods().lose(name).await;
        let (wire, lost) = (self.clone(), Arc::clone(&node));
        blocking("a node was not removed", move || lost.lose(&wire.inner.wire)).await?;
        self.write_node(&node)
    }

    /// Boots a node: its agent starts, and its pods start again.
    pub async fn return_node(&self, name: &str) -> Result<()> {
        let node = self.node(name)?;
        if node.namespace().is_none() {
            let (wire, booted) = (self.clone(), Arc::clone(&node));
            blocking("a node did not boot", move || booted.boot(&wire.inner.wire)).await?;
        }
        self.start_agent(name).await?;
        self.write_node(&node)?;
        self.inner.nodes_changed.notify_waiters();
        Ok(())
    }

    async fn wait_for_agent(&self, node: &Node) -> Result<()> {
        let shim = Shim { program: self.program(), socket: knit_cni::paths::socket(&node.run_dir()) };
        let limit = Duration::from_secs(20);
        let end = Instant::now() + limit;
        loop {
            // Asked only once somebody can listen: each question is a process.
            let error = if shim.socket.exists() && node.agent_pid().is_some() {
                match tokio::net::UnixStream::connect(&shim.socket).await {
                    Ok(_) => match shim.status().await {
                        Ok(()) => return Ok(()),
                        Err(error) => error.to_string(),
                    },
                    Err(error) => error.to_string(),
                }
            } else {
                "its socket does not exist".to_owned()
            };
            if Instant::now() > end {
                let log = std::fs::read_to_string(node.log()).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(8).collect();
                let tail = tail.into_iter().rev().map(|line| format!("\n  {line}")).collect::<String>();
                return Err(Error::TooLate {
                    seconds: limit.as_secs(),
                    what: format!("the agent of {} is not serving: {error}", node.name),
                    details: tail,
                });
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Writes the Node object of a node as it is now.
    fn write_node(&self, node: &Node) -> Result<()> {
        let addresses = node.addresses();
        let object = json!({"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}}});
        manifests::apply(self.store(), &object)?;
        let mut list: Vec<Value> =
            addresses.iter().map(|ip| json!({"type": "InternalIP", "address": ip.to_string()})).collect();
        list.push(json!({"type": "Hostname", "address": node.name}));
        let found = objects::get(self.store(), NODE, "", &node.name);
        let others = found
            .iter()
            .flat_map(|n| n.value["status"]["conditions"].as_array().cloned().unwrap_or_default());
        let mut conditions: Vec<Value> = others.filter(|c| c["type"] != "Ready").collect();
        let (status, reason) =
            if node.is_joined() { ("True", "KubeletReady") } else { ("False", "NodeLost") };
        let now = knit_apiserver::store::seconds(self.store().now());
        conditions
            .push(json!({"type": "Ready", "status": status, "reason": reason, "message": "said by knit lab",
            "lastHeartbeatTime": now, "lastTransitionTime": now}));
        let status = json!({"addresses": list, "conditions": conditions,
            "nodeInfo": {"kubeletVersion": knit_apiserver::VERSION, "osImage": "knit lab",
                "kernelVersion": "", "machineID": "",
                "systemUUID": "", "bootID": "", "containerRuntimeVersion": "knit-lab://0",
                    "kubeProxyVersion": "",
                "operatingSystem": "linux", "architecture": std::env::consts::ARCH}});
        objects::set_status(self.store(), NODE, "", &node.name, &status).map_err(|error| Error::Refused {
            kind: "Node".to_owned(),
            name: node.name.clone(),
            error: Box::new(error),
        })
    }
}

/// Runs the commands that come through the API. The lab owns the server, so the server does not own the lab.
#[derive(Debug)]
struct Commands(Weak<Inner>);

impl Exec for Commands {
    fn start(&self, namespace: &str, name: &str, _: &str, line: &[String]) -> Result<Child, String> {
        let lab = Lab { inner: self.0.upgrade().ok_or("the lab is ending")? };
        let started = lab.pod(namespace, name).and_then(|pod| {
            let mut command = lab.pod_command(&pod, line);
            pipe_all(&mut command);
            lab.spawn_in_pod(&pod, command)
        });
        started.map_err(|error| {
            let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            format!("{error}{source}")
        })
    }
}

/// Where the API is, on the wire.
pub fn api_address() -> SocketAddr {
    SocketAddr::new(Wire::gateway(), API_PORT)
}

async fn blocking(what: &'static str, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::io(what)(std::io::Error::other(error)))?
}
