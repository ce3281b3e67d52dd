//! Nodes with real agents on the reference runtime, and pods that are added by the protocol of the shim.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use knit_cni::protocol::{Command, Response};
use knit_kernel::netns::NetNs;
use knit_node::CoreConfig;
use knit_node::agent::{Agent, AgentConfig};
use knit_objects::{FolderOptions, Source};
use serde_json::{Value, json};

use crate::wire::Wire;
use crate::{SOON, cni};

/// Where pods' namespaces are mounted.
const PODS: &str = "/run/pods";

/// A node on a wire, with directories of its own and the folder of objects of all.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub name: &'static str,
    /// Its network namespace.
    pub space: NetNs,
    /// What is its own: `run`, `state`, and the statuses and events that its agent writes.
    pub dir: PathBuf,
    /// The objects that agents read.
    pub objects: PathBuf,
}

/// A pod, whether or not it was added.
#[derive(Debug)]
pub struct Pod {
    /// Its network namespace.
    pub space: NetNs,
    /// Its name, and its sandbox.
    pub name: &'static str,
    /// Its namespace in Kubernetes.
    pub namespace: &'static str,
    /// What it was given, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Where its network namespace is.
    pub path: PathBuf,
}

/// Nodes `a` and `b` on one wire: 192.168.7.1 and 192.168.7.2, fd07::1 and fd07::2. Objects are in
/// DIR/objects.
pub fn two_nodes(dir: &Path) -> (Wire, [Node; 2]) {
    let wire = Wire::new();
    let node = |name: &'static str, host: u8| {
        let space = wire.host(name, host);
        let node = Node { name, space, dir: dir.join(name), objects: dir.join("objects") };
        std::fs::create_dir_all(&node.dir).expect("a directory");
        node
    };
    let nodes = [node("a", 1), node("b", 2)];
    (wire, nodes)
}

impl Node {
    /// An agent with the reference runtime that reads the folder of objects; without Services, policies and
    /// further front doors.
    pub fn config(&self) -> AgentConfig {
        let (space, name, routers) = (self.namespace(), self.name, self.dir.join("run").join("netns"));
        AgentConfig {
            core: CoreConfig::new(name, self.dir.join("run"), self.dir.join("state")),
            socket: self.socket(),
            source: Source::Folder(self.folder()),
            node_addresses: Vec::new(),
            http: None,
            lock_wait: SOON,
            netns_dirs: vec![PathBuf::from(PODS)],
            runtime: Box::new(move |addresses| {
                std::fs::create_dir_all(&routers).expect("a directory");
                let mut config = knit_linux::Config::new(name, addresses, space);
                config.router_directory = routers;
                Ok(Arc::new(knit_linux::LinuxRuntime::new(config)?))
            }),
            proxy: None,
            nri: None,
            policies: None,
            dra: None,
        }
    }

    /// The folder of objects; what the agent writes goes to one of its own.
    pub fn folder(&self) -> FolderOptions {
        FolderOptions { output: Some(self.dir.join("status")), ..FolderOptions::new(self.objects.clone()) }
    }

    /// Its network namespace, once more.
    pub fn namespace(&self) -> NetNs {
        self.space.try_clone().expect("a clone")
    }

    /// Where its agent hears the shim.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("run").join("cni.sock")
    }

    /// A call of its agent about a pod, with this `runtimeConfig`, and what it answers.
    pub async fn ask(&self, command: Command, pod: &Pod, runtime_config: &Value) -> Response {
        cni::ask(&self.socket(), cni::request(command, pod.about(), runtime_config)).await
    }

    /// The same where it must succeed; the result.
    pub async fn call(&self, command: Command, pod: &Pod, runtime_config: &Value) -> Value {
        cni::call(&self.socket(), command, pod.about(), runtime_config).await
    }

    /// Adds a pod, which learns its addresses; or the error's text.
    pub async fn add(&self, mut pod: Pod, runtime_config: &Value) -> Result<Pod, String> {
        let result = match self.ask(Command::Add, &pod, runtime_config).await {
            Response::Ok(result) => result,
            Response::Err(error) => return Err(format!("{error:?}")),
        };
        let ips = result["ips"].as_array().unwrap_or_else(|| panic!("addresses in {result}"));
        let address = |ip: &Value| {
            let text = ip["address"].as_str().unwrap_or_else(|| panic!("an address in {ip}"));
            text.parse::<IpNet>().unwrap_or_else(|error| panic!("{text}: {error}")).addr()
        };
        pod.addresses = ips.iter().map(address).collect();
        pod.addresses.sort_unstable();
        Ok(pod)
    }

    /// Removes a pod.
    pub async fn del(&self, pod: &Pod) {
        self.call(Command::Del, pod, &json!({})).await;
    }

    /// Starts an agent.
    pub async fn start_as(&self, config: AgentConfig) -> Agent {
        Agent::start(config).await.unwrap_or_else(|error| panic!("agent of {}: {error}", self.name))
    }
}

impl Pod {
    /// One with a network namespace of its own and nothing in it. One that was not added before comes again.
    pub fn new(namespace: &'static str, name: &str) -> Self {
        std::fs::create_dir_all(PODS).expect("a directory");
        let path = Path::new(PODS).join(name);
        let space = match path.exists() {
            true => NetNs::open(&path).expect("a namespace"),
            false => NetNs::create(&path).expect("a namespace"),
        };
        // It lasts as long as the test, as servers that say it do.
        Self { space, name: name.to_owned().leak(), namespace, addresses: Vec::new(), path }
    }

    /// Whom calls about it name.
    pub fn about(&self) -> cni::Pod<'_> {
        cni::Pod { sandbox: self.name, namespace: self.namespace, netns: &self.path }
    }
}
