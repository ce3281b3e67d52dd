//! A node with a runtime in memory: its world is made here, its pods' namespaces are plain files.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod claims;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use knit_api::{AddressBlockSpec, NetworkAttachment, NetworkClass, NetworkSpec, NetworkStatus, Subnet};
use knit_ledger::Recovery;
use knit_model::{AddressBlock, Network};
use knit_node::files::Files;
use knit_node::front_door::annotation::wishes;
use knit_node::reconcile::{Outcome, Pass};
use knit_node::testing::{FakeKernel, FakeRuntime, Life, MortalStore};
use knit_node::world::{NodeView, World};
use knit_node::{
    Attached, Core, CoreConfig, Door, Main, MainInterface, MainInterfaces, Parts, PodRequest, Result, Start,
};
use knit_runtime::{Dns, InterfaceName, Pod, SandboxId};
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;

pub const NODE: &str = "node-1";

/// What outlives an agent: files, kernel, and the objects of the cluster.
pub struct Node {
    pub dir: TempDir,
    pub kernel: FakeKernel,
    pub other: FakeKernel,
    pub world: World,
    /// NetworkAttachments that users made.
    pub users: Vec<NetworkAttachment>,
    /// The container runtime's socket; with one, a sandbox is gone when two answers lack it.
    pub cri_socket: Option<PathBuf>,
    /// Who gives its pods their main interface.
    pub main_interfaces: MainInterfaces,
    /// How long a request waits for what is not there; a moment by default.
    pub waits: Option<Duration>,
    /// The namespace of Leases, if it is not the usual one.
    pub namespace: Option<String>,
}

/// One run of an agent.
pub struct Agent {
    pub core: Core,
    pub outcome: Outcome,
}

impl Node {
    /// A node with the Networks `default` (10.1.0.0/16), `blue` (10.2.0.0/16) and `green` (10.2.0.0/16, too).
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut world = World::default();
        let networks = [
            network("default", 1, "10.1.0.0/16", json!({})),
            network("blue", 2, "10.2.0.0/16", json!({"allowedNamespaces": {"from": "All"}})),
            network(
                "green",
                3,
                "10.2.0.0/16",
                json!({"primaryFor": {"matchLabels": {"team": "green"}}, "topology": "Layer2"}),
            ),
            network(
                "other",
                4,
                "10.4.0.0/16",
                json!({"class": "other", "allowedNamespaces": {"from": "All"}}),
            ),
        ];
        world.networks = Arc::new(networks.into_iter().map(|n| (n.name().to_owned(), Arc::new(n))).collect());
        let class: NetworkClass = serde_json::from_value(json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkClass", "metadata": {"name": "other"},
            "spec": {"runtime": "example.com/other"}
        }))
        .expect("a class");
        world.classes = Arc::new(BTreeMap::from([("other".to_owned(), Arc::new(class))]));
        let labels = |pairs: &[(&str, &str)]| {
            Arc::new(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        world.namespaces = Arc::new(BTreeMap::from([
            ("shop".to_owned(), labels(&[])),
            ("forest".to_owned(), labels(&[("team", "green")])),
        ]));
        let blocks = [
            ("default", "10.1.0.0/28"),
            ("blue", "10.2.0.0/28"),
            ("green", "10.2.0.16/28"),
            ("other", "10.4.0.0/28"),
        ];
        let blocks = blocks.into_iter().map(|(n, range)| (format!("{n}-1"), Arc::new(block(n, NODE, range))));
        world.blocks = Arc::new(blocks.collect());
        let view =
            NodeView { addresses: vec!["192.0.2.1".parse().expect("an address")], ..NodeView::default() };
        world.nodes = Arc::new(BTreeMap::from([(NODE.to_owned(), Arc::new(view))]));
        let synced = &mut world.synced;
        for list in [
            &mut synced.networks,
            &mut synced.namespaces,
            &mut synced.blocks,
            &mut synced.nodes,
            &mut synced.service_cidrs,
        ] {
            *list = true;
        }
        Self {
            dir,
            kernel: FakeKernel::default(),
            other: FakeKernel::default(),
            world,
            users: Vec::new(),
            cri_socket: None,
            main_interfaces: MainInterfaces::Ours,
            waits: None,
            namespace: None,
        }
    }

    pub fn config(&self) -> CoreConfig {
        let mut config = CoreConfig::new(NODE, self.dir.path().join("run"), self.dir.path().join("state"));
        config.cache_wait = self.waits.unwrap_or(Duration::from_millis(200));
        // Setting a Network up must be done within it, too.
        config.block_wait = self.waits.unwrap_or(Duration::from_secs(5));
        // However slow the machine is, unless that is what a test is about.
        if self.waits.is_none() {
            config.nri_wait = Duration::from_secs(60);
        }
        config.runtime_deadline = Duration::from_secs(30);
        config.cri_socket.clone_from(&self.cri_socket);
        config.main_interfaces = self.main_interfaces;
        config.sandbox_grace = Duration::ZERO;
        if let Some(namespace) = &self.namespace {
            config.namespace.clone_from(namespace);
        }
        config
    }

    /// Starts an agent whose life may end.
    pub async fn start_with(&self, life: &Life) -> Agent {
        let config = self.config();
        let (files, recovery) = Files::open(&config.ledger()).expect("the ledger");
        let adopt = recovery != Recovery::Clean;
        let store = Box::new(MortalStore::new(Box::new(files), life));
        let core = Core::new(Parts { config, world: self.world.clone(), store, proxy: None, policies: None });
        for (name, kernel) in [("knit.dev/linux", &self.kernel), ("example.com/other", &self.other)] {
            let runtime = FakeRuntime::new(name, kernel, life);
            core.runtimes().add(Arc::new(runtime)).await.expect("a runtime");
        }
        for object in &self.users {
            let key = knit_objects::Key::of(object);
            core.world().users().take(knit_objects::Event::Applied(key, Arc::new(object.clone())));
        }
        core.world().users().take(knit_objects::Event::Synced);
        let pass = Pass { first: true, adopt, netns_dirs: vec![self.dir.path().join("netns")] };
        let outcome = core.begin(&pass).await;
        Agent { core, outcome }
    }

    pub async fn start(&self) -> Agent {
        self.start_with(&Life::default()).await
    }

    /// All that both runtimes have.
    pub fn attachments(&self) -> Vec<knit_runtime::Attachment> {
        self.kernel.attachments().into_iter().chain(self.other.attachments()).collect()
    }

    /// Whether neither runtime has anything.
    pub fn is_clean(&self) -> bool {
        self.kernel.is_clean() && self.other.is_clean()
    }

    /// Makes a pod's namespace.
    pub fn netns(&self, sandbox: &str) -> PathBuf {
        let folder = self.dir.path().join("netns");
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join(sandbox);
        if !path.exists() {
            std::fs::write(&path, b"").expect("a namespace");
        }
        path
    }

    pub fn request(&self, sandbox: &str, namespace: &str, networks: &str) -> PodRequest {
        PodRequest {
            pod: Pod {
                sandbox: id(sandbox),
                namespace: Some(namespace.into()),
                name: Some(format!("pod-{sandbox}")),
                uid: Some(format!("uid-{sandbox}")),
            },
            start: Some(Start {
                netns: self.netns(sandbox),
                main: Main::Ours(MainInterface {
                    interface: InterfaceName::new("eth0").expect("a name"),
                    ports: Vec::new(),
                    addresses: Vec::new(),
                    mac: None,
                    dns: Dns::default(),
                }),
            }),
            wishes: wishes(&BTreeMap::from([("knit.dev/networks".to_owned(), networks.to_owned())])),
            claims: Vec::new(),
            door: Door::Cni("knit".into()),
        }
    }
}

impl Agent {
    pub async fn add(&self, request: PodRequest) -> Result<Attached> {
        self.core.attach(request, Instant::now() + Duration::from_secs(60)).await
    }

    pub async fn del(&self, sandbox: &str) -> Result<()> {
        self.core.detach(id(sandbox), Some(InterfaceName::new("eth0").expect("a name"))).await
    }
}

pub fn id(sandbox: &str) -> SandboxId {
    SandboxId::new(sandbox).expect("an id")
}

pub fn network(name: &str, id: u32, cidr: &str, extra: serde_json::Value) -> Network {
    let mut spec = json!({"topology": "Layer3"});
    if let serde_json::Value::Object(extra) = extra {
        spec.as_object_mut().expect("an object").extend(extra);
    }
    let mut spec: NetworkSpec = serde_json::from_value(spec).expect("a spec");
    spec.subnets = vec![Subnet { cidr: cidr.into(), ..Subnet::default() }];
    let mut network = knit_api::Network::new(name, spec);
    network.status = Some(NetworkStatus { id: Some(id), ..NetworkStatus::default() });
    network.try_into().expect("a name")
}

pub fn block(network: &str, node: &str, range: &str) -> AddressBlock {
    let (network, node) = (network.into(), node.into());
    let spec = AddressBlockSpec { network, node, ipv4: Some(range.into()), ipv6: None };
    AddressBlock::of(&spec).expect("a block")
}

/// The namespace of a pod that starts.
pub fn netns_of(request: &PodRequest) -> &Path {
    &request.start.as_ref().expect("a pod that starts").netns
}

/// The main interface of a pod that starts.
pub fn main_of(request: &mut PodRequest) -> &mut MainInterface {
    match &mut request.start.as_mut().expect("a pod that starts").main {
        Main::Ours(main) => main,
        Main::Foreign(name) => panic!("{name} is another plugin's"),
    }
}

/// The same request, for another namespace.
pub fn in_namespace(mut request: PodRequest, netns: impl Into<PathBuf>) -> PodRequest {
    request.start.as_mut().expect("a pod that starts").netns = netns.into();
    request
}

/// The addresses of an answer, by interface.
pub fn addresses(attached: &Attached) -> Vec<(String, String)> {
    let of = |a: &knit_runtime::Attachment| (a.interface.to_string(), a.addresses[0].net.to_string());
    attached.attachments.iter().map(of).collect()
}
