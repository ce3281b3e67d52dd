//! The cluster of a run: its API, its objects, and what nodes do by themselves.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_api::names::AGENT_MANAGER;
use knit_api::{Network, NodeNetwork};
use knit_apiserver::{Config as ApiConfig, Handle, Server, StoreOptions};
use knit_objects::{Key, Objects, Selection, Source, Write};
use knit_types::sync::Locked as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::meter::{Group, Meter};
use crate::node::{self, NAMESPACE};
use crate::run::Error;
use crate::scenario::{PODS_PER_NODE, Scenario};

/// So many requests of the simulation are under way at once.
pub const AT_ONCE: usize = 16;
/// How often it is looked which nodes that only write have something to report.
const REPORTS: Duration = Duration::from_secs(1);
/// Reports of counts of one of them are at least this far apart, as an agent's are.
const COUNTS_INTERVAL: Duration = Duration::from_secs(60);
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
            Api::Given(source) => {
                let objects = Objects::open(source.clone()).await?;
                // Simulated nodes are written beside real ones, and a real cluster would begin to use them.
                let (origin, nodes) = (objects.origin(), objects.list::<Node>(&Selection::default()).await);
                match nodes.map(|nodes| nodes.len()) {
                    Ok(0) => {}
                    Ok(nodes) => return Err(Error::InUse { origin, nodes }),
                    Err(error) => return Err(Error::Given { origin, source: Box::new(error) }),
                }
                (None, objects)
            }
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
    pub async fn make_objects(&self, scenario: &Scenario, nodes: u32) -> Result<(), Error> {
        for name in ["knit-system", NAMESPACE] {
            self.create::<Namespace>(json!({"metadata": {"name": name}})).await?;
        }
        let networks = (0..scenario.networks).map(|n| {
            json!({"metadata": {"name": node::network_name(n).as_str()}, "spec": {
                "class": "knit", "topology": "Layer3", "subnets": [{"cidr": scenario.subnet(n, nodes)}],
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

    /// A node joins, with so many pods. One that only writes says the first thing of itself, too.
    ///
    /// # Errors
    /// When the API refuses something.
    pub async fn join(&self, number: u32, agent: bool, pods: u32) -> Result<(), Error> {
        write(&self.others, &Write::create(&node::node_object(number))).await?;
        write(&self.others, &node::heartbeat(number, Timestamp::now())).await?;
        let addresses = json!({"status": {"addresses": [
            {"type": "InternalIP", "address": node::address(number).to_string()}]}});
        let key = Key::cluster(node::name(number));
        write(&self.others, &Write::merge_status::<Node>(key, addresses)).await?;
        if !agent {
            self.report(number, pods, &[]).await?;
            let lease = node::lease(number, node::FIRST_LEASE_HOLDS, Timestamp::now());
            write(&self.writers, &lease).await?;
        }
        Ok(())
    }

    /// The nodes of the start join. The first ones have an agent.
    ///
    /// # Errors
    /// When the API refuses something.
    pub async fn join_all(&self, scenario: &Scenario, nodes: u32, agents: u32) -> Result<(), Error> {
        let pods = scenario.pods / nodes;
        let joining = (0..nodes).map(|number| self.join(number, number < agents, pods));
        futures::stream::iter(joining).buffer_unordered(AT_ONCE).try_collect().await
    }

    /// A node that only writes says what it has.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn report(&self, number: u32, pods: u32, networks: &[(u32, u32)]) -> Result<(), Error> {
        let object = NodeNetwork { status: None, ..node::report(number, pods, networks) };
        write(&self.writers, &Write::apply(&object, AGENT_MANAGER)).await?;
        self.report_again(number, pods, networks).await
    }

    /// The same of a node that has said something before.
    async fn report_again(&self, number: u32, pods: u32, networks: &[(u32, u32)]) -> Result<(), Error> {
        let key = Key::cluster(node::name(number));
        let status = node::report(number, pods, networks).status.unwrap_or_default();
        write(&self.writers, &Write::status::<NodeNetwork>(key, &status, AGENT_MANAGER)).await
    }

    /// What nodes do by themselves, forever: heartbeats of all, Leases and reports of those that only write.
    pub async fn live(&self, scenario: &Scenario, nodes: watch::Receiver<std::ops::Range<u32>>, agents: u32) {
        let standing = scenario.pods / nodes.borrow().len().max(1) as u32;
        let (lease, beat) = (f64::from(scenario.lease_seconds), f64::from(scenario.heartbeat_seconds));
        let start = Instant::now();
        let (mut last, mut reported) = (0.0, Instant::now());
        let mut written = std::collections::BTreeMap::new();
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
                if number >= agents && due(number, lease) {
                    let lease = node::lease(number, scenario.lease_holds(), Timestamp::now());
                    writes.push((&self.writers, lease));
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
                let dirty = std::mem::take(&mut *self.dirty.locked());
                let pods = (standing + 1).min(PODS_PER_NODE);
                // As agents do: counts at once after a while of quiet, and later ones when it is over.
                let is_due = |number: &u32| {
                    written.get(number).is_none_or(|at: &Instant| at.elapsed() >= COUNTS_INTERVAL)
                };
                let (due, early): (Vec<u32>, Vec<u32>) = dirty.into_iter().partition(is_due);
                self.dirty.locked().extend(early);
                written.extend(due.iter().map(|number| (*number, Instant::now())));
                let reports: Vec<_> =
                    due.iter().map(|number| self.report_again(*number, pods, &[]).boxed()).collect();
                let _: Vec<_> = futures::stream::iter(reports).buffer_unordered(AT_ONCE).collect().await;
            }
        }
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
            (0..scenario.networks)
                .map(|n| Write::delete::<Network>(Key::cluster(node::network_name(n).as_str()))),
        );
        let pods = scenario.standing(nodes).map(|pod| self.end_pod(pod.number));
        let (): () = futures::stream::iter(pods).buffer_unordered(AT_ONCE).try_collect().await?;
        writes.push(Write::delete::<Namespace>(Key::cluster(NAMESPACE)));
        let all = futures::stream::iter(writes.iter().map(|one| write(&self.others, one)));
        all.buffer_unordered(AT_ONCE).try_collect().await
    }

    /// A pod is gone: its kubelet has ended it, and removes it for good. Without a kubelet an API keeps a pod
    /// that was deleted.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn end_pod(&self, number: u32) -> Result<(), Error> {
        let client =
            self.others.client().cloned().ok_or_else(|| Error::other(knit_controller::Unsuitable))?;
        let pods: kube::Api<Pod> = kube::Api::namespaced(client, NAMESPACE);
        let now = kube::api::DeleteParams::default().grace_period(0);
        match pods.delete(&format!("pod-{number}"), &now).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            done => done.map(drop).map_err(Error::other),
        }
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
