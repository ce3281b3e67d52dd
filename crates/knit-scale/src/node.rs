//! Simulated nodes: the objects that any node writes, and the agent of a whole one over a runtime in memory.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use knit_api::names::{AGENT_MANAGER, DEFAULT_NETWORK, LINUX_RUNTIME, MANAGED_BY, MANAGED_BY_LABEL};
use knit_api::{NetworkAttachment, NodeNetwork};
use knit_node::agent::{Agent, AgentConfig, StartError};
use knit_node::testing::{FakeKernel, FakeRuntime, Life};
use knit_node::world::World;
use knit_node::{Asked, Attached, CoreConfig, Door, Main, MainInterface, PodRequest, Start, Wishes};
use knit_objects::{Key, Source, Write};
use knit_runtime::{Dns, InterfaceName, NetworkName, SandboxId};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

/// The namespace of all simulated pods.
pub const NAMESPACE: &str = "scale";
/// How long the first Lease of a node holds, which is renewed once the others know it.
pub const FIRST_LEASE_HOLDS: Duration = Duration::from_secs(100);
/// The further Networks of a pod.
const NETWORKS_ANNOTATION: &str = "knit.dev/networks";

/// A whole node: its agent, and what stands in for its kernel.
pub struct WholeNode {
    /// Its number.
    pub number: u32,
    agent: Agent,
    kernel: FakeKernel,
    directory: PathBuf,
}

/// The name of a node.
#[must_use]
pub fn name(number: u32) -> String {
    format!("node-{number:05}")
}

/// The number of the node of this name, if it is one of the simulation's.
#[must_use]
pub fn number_of(name: &str) -> Option<u32> {
    name.strip_prefix("node-")?.parse().ok()
}

/// The name of a Network besides the default one.
#[must_use]
pub fn network_name(number: u32) -> NetworkName {
    format!("net-{number:03}").parse().expect("a short name")
}

/// A node's own address.
#[must_use]
pub fn address(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(0x6440_0000 + number + 1))
}

/// A node's podCIDR.
#[must_use]
pub fn pod_cidr(number: u32) -> String {
    format!("{}/24", Ipv4Addr::from(0x0a80_0000 + number * 256))
}

/// An object from what it looks like. What is wrong with it is this program's mistake.
fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("the simulation's objects have their kinds' fields")
}

/// A Node as a kubelet writes it: with images and conditions, which are most of its size.
#[must_use]
pub fn node_object(number: u32) -> Node {
    let images: Vec<Value> = (0..50)
        .map(|i| {
            let names =
                [format!("registry.example/team-{}/app-{i}@sha256:{:064x}", i % 7, i), format!("app-{i}:1")];
            json!({"names": names, "sizeBytes": 123_456_789_u64 + i})
        })
        .collect();
    object(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name(number), "labels": {"kubernetes.io/hostname": name(number)}},
        "spec": {"podCIDR": pod_cidr(number), "podCIDRs": [pod_cidr(number)]},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address(number).to_string()}],
            "allocatable": {"pods": "110"}, "capacity": {"pods": "110"},
            "conditions": [heartbeat_condition(Timestamp::now())], "images": images,
        }
    }))
}

fn heartbeat_condition(now: Timestamp) -> Value {
    let time = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is ready",
        "lastHeartbeatTime": time, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// A kubelet's sign of life in its Node's status.
#[must_use]
pub fn heartbeat(number: u32, now: Timestamp) -> Write {
    let patch = json!({"status": {"conditions": [heartbeat_condition(now)]}});
    Write::merge_status::<Node>(Key::cluster(name(number)), patch)
}

/// An agent's sign of life, which holds for so long.
#[must_use]
pub fn lease(number: u32, holds: Duration, now: Timestamp) -> Write {
    let name = name(number);
    Write::lease("knit-system", &name, &name, holds, now, AGENT_MANAGER)
}

/// What an agent says of its node: so many pods of the default Network, and these Networks.
#[must_use]
pub fn report(number: u32, pods: u32, networks: &[(u32, u32)]) -> NodeNetwork {
    let entry = |name: &str, attachments: u32, blocks: u32, wants: bool| {
        json!({"name": name, "ready": true, "reason": "Ready", "attachments": attachments, "blocks": blocks,
            "wantsBlock": wants, "addresses": [{"family": "IPv4", "used": attachments, "free": 200}]})
    };
    let mut all = vec![entry(DEFAULT_NETWORK, pods, 1, false)];
    all.extend(networks.iter().map(|(n, pods)| entry(&network_name(*n), *pods, 0, true)));
    object(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NodeNetwork",
        "metadata": {"name": name(number)}, "spec": {},
        "status": {"networks": all, "runtimes": [{"name": LINUX_RUNTIME, "version": "1", "healthy": true,
            "features": ["layer2", "layer3"]}]}
    }))
}

/// A pod that the scheduler has bound.
#[must_use]
pub fn pod(number: u32, node: u32, network: Option<u32>) -> Pod {
    let networks = network.map(network_name).unwrap_or_default();
    object(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{number}"), "namespace": NAMESPACE, "labels": {"app": "scale"},
            "annotations": {NETWORKS_ANNOTATION: networks}},
        "spec": {"nodeName": name(node), "containers": [{"name": "app", "image": "app:1"}]}
    }))
}

/// The number in a simulated pod's name.
#[must_use]
pub fn pod_number(name: &str) -> Option<u32> {
    name.strip_prefix("pod-")?.parse().ok()
}

/// The further Network that a simulated pod asks for.
#[must_use]
pub fn network_of(pod: &Pod) -> Option<u32> {
    let annotation = pod.metadata.annotations.as_ref()?.get(NETWORKS_ANNOTATION)?;
    annotation.strip_prefix("net-")?.parse().ok()
}

/// What an agent publishes of a pod's further interface.
#[must_use]
pub fn published(number: u32, node: u32, network: u32) -> NetworkAttachment {
    object(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {"name": format!("pod-{number}-net1"), "namespace": NAMESPACE,
            "labels": {MANAGED_BY_LABEL: MANAGED_BY}},
        "spec": {"pod": format!("pod-{number}"), "network": network_name(network).as_str(),
            "interface": "net1"},
        "status": {"node": name(node), "interface": "net1",
            "conditions": [{"type": "Ready", "status": "True", "reason": "Attached", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    }))
}

// === impl WholeNode ===

impl WholeNode {
    /// Starts the agent of a node whose Node is there. It works in a directory of its own below this one.
    ///
    /// # Errors
    /// When the agent does not start.
    pub async fn start(number: u32, api: &str, directory: &Path) -> Result<Self, StartError> {
        let directory = directory.join(name(number));
        let make = |path: &Path| {
            std::fs::create_dir_all(path)
                .map_err(|source| StartError::Directory { path: path.to_owned(), source })
        };
        make(&directory.join("netns"))?;
        let mut core = CoreConfig::new(name(number), directory.join("run"), directory.join("state"));
        // Comparing with the processes of this machine is of no use here.
        core.reconcile_every = Duration::from_secs(3600);
        core.block_wait = Duration::from_secs(60);
        let kernel = FakeKernel::default();
        let runtime = FakeRuntime::new(LINUX_RUNTIME, &kernel, &Life::default());
        let agent = Agent::start(AgentConfig {
            core,
            socket: directory.join("cni.sock"),
            source: Source::Url(api.to_owned()),
            node_addresses: vec![address(number)],
            http: None,
            lock_wait: Duration::ZERO,
            netns_dirs: Vec::new(),
            runtime: Box::new(move |_| Ok(Arc::new(runtime))),
            proxy: None,
            policies: None,
            dra: None,
            nri: None,
        })
        .await?;
        Ok(Self { number, agent, kernel, directory })
    }

    /// Attaches a pod, as its kubelet would through the container runtime.
    ///
    /// # Errors
    /// When it cannot have its networks.
    pub async fn add(&self, number: u32, network: Option<u32>) -> knit_node::Result<Attached> {
        self.add_in(NAMESPACE, number, network).await
    }

    /// The same for a pod of another namespace.
    ///
    /// # Errors
    /// When it cannot have its networks.
    pub async fn add_in(
        &self,
        namespace: &str,
        number: u32,
        network: Option<u32>,
    ) -> knit_node::Result<Attached> {
        let sandbox = sandbox(number);
        let netns = self.directory.join("netns").join(sandbox.as_str());
        // What cannot be made is told by the attach that needs it.
        let _ = std::fs::write(&netns, b"");
        let further = network.map(|n| Asked { network: network_name(n), ..Asked::default() });
        let request = PodRequest {
            pod: knit_runtime::Pod {
                sandbox,
                namespace: Some(namespace.into()),
                name: Some(format!("pod-{number}")),
                uid: Some(format!("uid-{number}")),
            },
            start: Some(Start {
                netns,
                main: Main::Ours(MainInterface {
                    interface: main_interface(),
                    ports: Vec::new(),
                    addresses: Vec::new(),
                    mac: None,
                    dns: Dns::default(),
                }),
            }),
            wishes: Wishes::further(further.into_iter().collect()),
            claims: Vec::new(),
            door: Door::Cni("knit".into()),
        };
        self.agent.core().attach(request, Instant::now() + Duration::from_secs(90)).await
    }

    /// Detaches a pod.
    ///
    /// # Errors
    /// When something of it cannot be removed.
    pub async fn del(&self, number: u32) -> knit_node::Result<()> {
        let gone = self.agent.core().detach(sandbox(number), Some(main_interface())).await;
        let _ = std::fs::remove_file(self.directory.join("netns").join(sandbox(number).as_str()));
        gone
    }

    /// What its agent knows of the cluster.
    #[must_use]
    pub fn world(&self) -> Arc<World> {
        self.agent.core().world().get()
    }

    /// How often Networks were set up in its kernel.
    #[must_use]
    pub fn set_ups(&self) -> usize {
        self.kernel.set_ups()
    }

    /// Whether its kernel knows where an address of a Network is: packets from here would reach it.
    #[must_use]
    pub fn reaches(&self, network: &str, address: IpAddr) -> bool {
        self.kernel.look_at(network, |network| {
            let blocks = network.map_or(&[][..], |network| network.blocks.as_slice());
            blocks.iter().any(|block| match address {
                IpAddr::V4(address) => block.ipv4.is_some_and(|range| range.contains(&address)),
                IpAddr::V6(address) => block.ipv6.is_some_and(|range| range.contains(&address)),
            })
        })
    }

    /// Whether it has set a Network up.
    #[must_use]
    pub fn has(&self, network: &str) -> bool {
        self.kernel.look_at(network, |network| network.is_some())
    }

    /// Takes those out of these nodes that its kernel has a way to in a Network.
    pub fn strike_reached(&self, network: &str, nodes: &mut BTreeSet<u32>) {
        self.kernel.look_at(network, |network| {
            for block in network.map_or(&[][..], |network| network.blocks.as_slice()) {
                if let Some(number) = number_of(&block.node) {
                    nodes.remove(&number);
                }
            }
        });
    }

    /// Stops its agent.
    pub async fn stop(self) {
        self.agent.stop(Duration::from_secs(5)).await;
    }
}

fn sandbox(number: u32) -> SandboxId {
    SandboxId::new(format!("{number:064x}")).expect("hexadecimal digits are an id")
}

fn main_interface() -> InterfaceName {
    InterfaceName::new("eth0").expect("a name")
}
