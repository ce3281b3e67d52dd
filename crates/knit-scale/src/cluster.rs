//! The cluster of a run: its API, its objects, its controller, and what nodes do by themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_api::names::AGENT_MANAGER;
use knit_api::{Network, NodeNetwork};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_controller::{Config, Controller, ControllerState};
use knit_objects::{Key, Objects, Source, Write};
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::meter::{Group, Meter};
use crate::node::{self, NAMESPACE};
use crate::run::Error;
use crate::scenario::Scenario;

/// So many requests of the simulation are under way at once.
pub const AT_ONCE: usize = 16;
/// Reports of nodes that only write are at least this far apart, as an agent's are.
const REPORTS: Duration = Duration::from_secs(5);
/// How often it is looked whose turn it is to renew.
const TICK: Duration = Duration::from_millis(200);

/// Which API.
#[derive(Clone)]
pub enum Api {
    /// The lab's, one per size.
    Embedded,
    /// One that is there, with Knit's CRDs and nothing of Knit running. What is made there is removed again.
    Given(Source),
}

/// The API of one run, with the meter in front of it.
pub struct Cluster {
    /// Counts.
    pub meter: Meter,
    /// For what kubelets and users write.
    pub others: Objects,
    /// For what agents write whose node only writes.
    pub writers: Objects,
    /// Nodes that only write and whose report is to be written.
    pub dirty: Mutex<BTreeSet<u32>>,
    _embedded: Option<Handle>,
}

/// The controller of a run: a task here, or a process of its own.
pub enum Running {
    /// A task, with its state.
    Task(JoinHandle<()>, watch::Receiver<ControllerState>),
    /// A process.
    Process(Child),
}

impl Cluster {
    /// Opens the API.
    ///
    /// # Errors
    /// When it cannot be reached, or does not start.
    pub async fn open(api: &Api) -> Result<Self, Error> {
        let (embedded, objects) = match api {
            Api::Embedded => {
                let mut store = StoreOptions::with_crds(&knit_api::crds()).map_err(Error::other)?;
                // A watch that is slow for a moment does not list again.
                store.log_size = 1 << 16;
                let server = Server::start(ApiConfig { store, ..ApiConfig::default() }).await;
                let server = server.map_err(Error::other)?;
                let url = server.url();
                (Some(server), Objects::open(Source::Url(url)).await?)
            }
            Api::Given(source) => (None, Objects::open(source.clone()).await?),
        };
        let client = objects.client().cloned().ok_or_else(|| Error::other(knit_controller::Unsuitable))?;
        let meter = Meter::new(client);
        let others = Objects::open(Source::Url(meter.open(Group::Others).await?)).await?;
        let writers = Objects::open(Source::Url(meter.open(Group::Writers).await?)).await?;
        Ok(Self { meter, others, writers, dirty: Mutex::default(), _embedded: embedded })
    }

    /// Makes what a cluster has besides nodes.
    ///
    /// # Errors
    /// When the API refuses something.
    pub async fn make_objects(&self, scenario: &Scenario) -> Result<(), Error> {
        for name in ["knit-system", NAMESPACE] {
            self.create::<Namespace>(json!({"metadata": {"name": name}})).await?;
        }
        let networks = (0..scenario.networks).map(|n| {
            let cidr = format!("172.{}.{}.0/20", 16 + n / 16, n % 16 * 16);
            json!({"metadata": {"name": node::network_name(n)}, "spec": {
                "class": "knit", "topology": "Layer3", "subnets": [{"cidr": cidr}],
                "allowedNamespaces": {"from": "All"}}})
        });
        self.create_all::<Network>(networks).await?;
        let services = (0..scenario.services).map(|n| {
            json!({"metadata": {"name": format!("service-{n}"), "namespace": NAMESPACE},
                "spec": {"selector": {"app": "scale"}, "ports": [{"port": 80}]}})
        });
        self.create_all::<Service>(services).await?;
        let slices = (0..scenario.services).map(|n| {
            let endpoints: Vec<Value> =
                (0..5).map(|e| json!({"addresses": [format!("10.128.{}.{}", n % 256, e + 2)]})).collect();
            json!({"metadata": {"name": format!("service-{n}-x"), "namespace": NAMESPACE,
                    "labels": {"kubernetes.io/service-name": format!("service-{n}")}},
                "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 8080}]})
        });
        self.create_all::<EndpointSlice>(slices).await?;
        let policies = (0..scenario.policies).map(|n| {
            json!({"metadata": {"name": format!("policy-{n}"), "namespace": NAMESPACE},
                "spec": {"podSelector": {"matchLabels": {"app": format!("app-{n}")}}}})
        });
        self.create_all::<NetworkPolicy>(policies).await
    }

    /// A node joins. One that only writes says the first thing of itself, too.
    ///
    /// # Errors
    /// When the API refuses something.
    pub async fn join(&self, number: u32, whole: bool) -> Result<(), Error> {
        write(&self.others, &Write::create(&node::node_object(number))).await?;
        write(&self.others, &node::heartbeat(number, Timestamp::now())).await?;
        let addresses = json!({"status": {"addresses": [
            {"type": "InternalIP", "address": node::address(number).to_string()}]}});
        let key = Key::cluster(node::name(number));
        write(&self.others, &Write::merge_status::<Node>(key, addresses)).await?;
        if !whole {
            self.report(number, 0, &[]).await?;
            write(&self.writers, &node::lease(number, Timestamp::now())).await?;
        }
        Ok(())
    }

    /// Many nodes join.
    ///
    /// # Errors
    /// When the API refuses something.
    pub async fn join_all(&self, numbers: std::ops::Range<u32>, whole: u32) -> Result<(), Error> {
        let joining = numbers.map(|number| self.join(number, number < whole));
        futures::stream::iter(joining).buffer_unordered(AT_ONCE).try_collect().await
    }

    /// A node that only writes says what it has.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn report(&self, number: u32, pods: u32, networks: &[(u32, u32)]) -> Result<(), Error> {
        let report = node::report(number, pods, networks);
        let object = NodeNetwork { status: None, ..report.clone() };
        write(&self.writers, &Write::apply(&object, AGENT_MANAGER)).await?;
        let key = Key::cluster(node::name(number));
        let status = report.status.unwrap_or_default();
        write(&self.writers, &Write::status::<NodeNetwork>(key, &status, AGENT_MANAGER)).await
    }

    /// What nodes do by themselves, forever: heartbeats of all, Leases and reports of those that only write.
    pub async fn live(&self, scenario: &Scenario, nodes: watch::Receiver<std::ops::Range<u32>>, whole: u32) {
        let (lease, beat) = (f64::from(scenario.lease_seconds), f64::from(scenario.heartbeat_seconds));
        let start = Instant::now();
        let (mut last, mut reported) = (0.0, Instant::now());
        loop {
            tokio::time::sleep(TICK).await;
            let now = start.elapsed().as_secs_f64();
            let range = nodes.borrow().clone();
            let count = f64::from(range.len().max(1) as u32);
            // Nodes are spread over the interval, each with its own moment in it.
            let due = |number: u32, every: f64| {
                let offset = every * f64::from(number) / count;
                ((now - offset) / every).floor() > ((last - offset) / every).floor()
            };
            let mut writes = Vec::new();
            for number in range {
                if number >= whole && due(number, lease) {
                    writes.push((&self.writers, node::lease(number, Timestamp::now())));
                }
                if due(number, beat) {
                    writes.push((&self.others, node::heartbeat(number, Timestamp::now())));
                }
            }
            last = now;
            let writes: Vec<_> = writes.iter().map(|(objects, one)| write(objects, one).boxed()).collect();
            // While the API is away, nobody is heard: what counts is what arrives.
            let _: Vec<_> = futures::stream::iter(writes).buffer_unordered(AT_ONCE).collect().await;
            if reported.elapsed() >= REPORTS {
                reported = Instant::now();
                let dirty = std::mem::take(
                    &mut *self.dirty.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
                );
                let reports: Vec<_> =
                    dirty.iter().map(|number| self.report(*number, 1, &[]).boxed()).collect();
                let _: Vec<_> = futures::stream::iter(reports).buffer_unordered(AT_ONCE).collect().await;
            }
        }
    }

    /// Starts the controller: of this program if there is one, or here.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_controller(&self, program: Option<&Path>) -> Result<Running, Error> {
        let url = self.meter.open(Group::Controller).await?;
        if let Some(program) = program {
            let arguments = ["controller", "--api-url", &url, "--identity", "scale", "--log", "warn"];
            return Ok(Running::Process(spawn(program, &arguments)?));
        }
        let objects = Objects::open(Source::Url(url)).await?;
        let controller = Controller::new(objects, Config::new("scale")).map_err(Error::other)?;
        let state = controller.state();
        Ok(Running::Task(tokio::spawn(controller.run(std::future::pending())), state))
    }

    /// Starts the agent of a whole node in a process of its own.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_probe(&self, program: &Path, number: u32, directory: &Path) -> Result<Child, Error> {
        let url = self.meter.open(Group::Probe).await?;
        let (number, directory) = (number.to_string(), directory.display().to_string());
        let arguments =
            ["lab", "simulated-node", "--api-url", &url, "--number", &number, "--directory", &directory];
        spawn(program, &arguments)
    }

    /// Removes what was made in an API that stays.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn remove(&self, scenario: &Scenario, nodes: u32) -> Result<(), Error> {
        let mut writes: Vec<Write> = (0..nodes)
            .flat_map(|n| {
                let key = || Key::cluster(node::name(n));
                [Write::delete::<Node>(key()), Write::delete::<NodeNetwork>(key())]
            })
            .collect();
        writes.extend(
            (0..scenario.networks).map(|n| Write::delete::<Network>(Key::cluster(node::network_name(n)))),
        );
        writes.push(Write::delete::<Namespace>(Key::cluster(NAMESPACE)));
        let all = futures::stream::iter(writes.iter().map(|one| write(&self.others, one)));
        all.buffer_unordered(AT_ONCE).try_collect().await
    }

    async fn create<K>(&self, value: Value) -> Result<(), Error>
    where
        K: kube::Resource<DynamicType = ()> + serde::Serialize + serde::de::DeserializeOwned,
    {
        let object: K = serde_json::from_value(value).map_err(Error::other)?;
        write(&self.others, &Write::create(&object)).await
    }

    async fn create_all<K>(&self, values: impl Iterator<Item = Value>) -> Result<(), Error>
    where
        K: kube::Resource<DynamicType = ()> + serde::Serialize + serde::de::DeserializeOwned,
    {
        futures::stream::iter(values.map(|value| self.create::<K>(value)))
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
    }
}

/// Writes. What is there already, or gone already, is as it should be.
///
/// # Errors
/// When the API refuses it for another reason.
pub async fn write(objects: &Objects, write: &Write) -> Result<(), Error> {
    match objects.write(write).await {
        Ok(_) | Err(knit_objects::Error::AlreadyExists { .. } | knit_objects::Error::NotFound { .. }) => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

fn spawn(program: &Path, arguments: &[&str]) -> Result<Child, Error> {
    let mut command = tokio::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    let program: PathBuf = program.to_owned();
    command.spawn().map_err(|source| Error::Program { program, source })
}
