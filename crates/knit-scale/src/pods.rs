//! Pods that come, are attached, and go; and how long it takes until they are reachable.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use knit_api::NetworkAttachment;
use knit_api::names::AGENT_MANAGER;
use knit_objects::{Key, Write};
use knit_types::sync::Locked as _;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::{AT_ONCE, Cluster, write};
use crate::node::{self, NAMESPACE, WholeNode};
use crate::probe::Listener;
use crate::report::{Phase, Quantiles};
use crate::scenario::Pod;

/// How long a pod's address may take to be known elsewhere before it counts as not reachable.
pub const REACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a pod may take to be attached by an agent in a process of its own.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(90);
/// How often it is looked whether a pod is reachable.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Where pods are put.
#[derive(Clone)]
pub struct Nodes {
    /// The API.
    pub cluster: Arc<Cluster>,
    /// Nodes whose agents run here: the first ones.
    pub whole: Vec<Arc<WholeNode>>,
    /// The node whose agent has a process of its own.
    pub probe: Option<Listener>,
}

/// What was found about pods.
#[derive(Default)]
pub struct Found {
    attached: Mutex<Vec<f64>>,
    reachable: Mutex<Vec<f64>>,
    added: Mutex<Vec<f64>>,
    pods: Mutex<Pods>,
}

#[derive(Clone, Copy, Default)]
struct Pods {
    came: u32,
    failed: u32,
    on_whole: u32,
    further: u32,
    further_whole: u32,
}

type Anything = Box<dyn std::error::Error + Send + Sync>;

// === impl Found ===

impl Found {
    /// Puts what was found into a phase's report.
    pub fn fill(&self, phase: &mut Phase) {
        fn take<T: Default>(cell: &Mutex<T>) -> T {
            std::mem::take(&mut *cell.locked())
        }
        let pods = take(&self.pods);
        (phase.pods, phase.failed) = (pods.came, pods.failed);
        phase.on_whole = pods.on_whole;
        (phase.further, phase.further_whole) = (pods.further, pods.further_whole);
        phase.attached = Quantiles::of(take(&self.attached));
        phase.reachable = Quantiles::of(take(&self.reachable));
        phase.added = Quantiles::of(take(&self.added));
    }

    fn came(&self, pod: Pod, whole: bool, failed: bool) {
        let mut pods = self.pods.locked();
        pods.came += 1;
        pods.failed += u32::from(failed);
        pods.on_whole += u32::from(whole);
        pods.further += u32::from(pod.network.is_some());
        pods.further_whole += u32::from(pod.network.is_some() && whole);
    }
}

fn push(cell: &Mutex<Vec<f64>>, value: f64) {
    cell.locked().push(value);
}

// === impl Nodes ===

impl Nodes {
    /// Pods come and go, each after it stayed for this long; until the last one is gone.
    pub async fn churn(self, pods: Vec<Pod>, stays: Duration, found: Arc<Found>) {
        let (start, mut tasks) = (Instant::now(), JoinSet::new());
        for pod in pods {
            tokio::time::sleep_until(start + pod.at).await;
            let (nodes, found) = (self.clone(), Arc::clone(&found));
            tasks.spawn(async move {
                let born = nodes.comes(pod, &found).await;
                let whole = nodes.whole.len() > pod.node as usize;
                found.came(pod, whole, born.is_err());
                if let Err(error) = born {
                    tracing::warn!(
                        error = &*error as &dyn std::error::Error,
                        pod = pod.number,
                        "a pod was not attached"
                    );
                }
                tokio::time::sleep(stays).await;
                if let Err(error) = nodes.goes(pod).await {
                    tracing::warn!(
                        error = &*error as &dyn std::error::Error,
                        pod = pod.number,
                        "a pod was not detached as expected"
                    );
                }
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    /// Pods come and stay.
    ///
    /// # Errors
    /// When one of them cannot be attached.
    pub async fn fill(&self, pods: impl Iterator<Item = Pod>) -> Result<(), Anything> {
        let found = Found::default();
        let coming = pods.map(|pod| self.comes(pod, &found));
        let (): () = futures::stream::iter(coming).buffer_unordered(AT_ONCE).try_collect().await?;
        // Nodes that only write have reported these pods when they joined.
        self.cluster.dirty.locked().clear();
        Ok(())
    }

    async fn comes(&self, pod: Pod, found: &Found) -> Result<(), Anything> {
        let cluster = &self.cluster;
        write(&cluster.others, &Write::create(&node::pod(pod.number, pod.node, pod.network))).await?;
        let scheduled = Instant::now();
        if let Some(mut probe) = self.probe_of(pod) {
            let seconds = probe.attached(pod.number, ATTACH_TIMEOUT).await?;
            push(&found.added, seconds);
            return Ok(());
        }
        let Some(on) = self.whole.get(pod.node as usize) else {
            if let Some(network) = pod.network {
                let published = node::published(pod.number, pod.node, network);
                let status = published.status.clone().unwrap_or_default();
                let object = NetworkAttachment { status: None, ..published };
                write(&cluster.writers, &Write::create(&object)).await?;
                let status = Write::status::<NetworkAttachment>(attachment(pod), &status, AGENT_MANAGER);
                write(&cluster.writers, &status).await?;
            }
            cluster.dirty.locked().insert(pod.node);
            return Ok(());
        };
        let attached = on.add(pod.number, pod.network).await?;
        push(&found.attached, scheduled.elapsed().as_secs_f64());
        // Another whole node that has the Network: when does it know the way?
        for interface in &attached.attachments {
            let network = interface.network.as_str();
            let elsewhere = self.whole.iter().find(|other| other.number != on.number && other.has(network));
            let (Some(elsewhere), Some(address)) = (elsewhere, interface.addresses.first()) else { continue };
            while !elsewhere.reaches(network, address.net.addr()) {
                if scheduled.elapsed() > REACH_TIMEOUT {
                    let name = node::name(elsewhere.number);
                    return Err(format!("{name} has no route to {}", address.net).into());
                }
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            push(&found.reachable, scheduled.elapsed().as_secs_f64());
        }
        Ok(())
    }

    async fn goes(&self, pod: Pod) -> Result<(), Anything> {
        let cluster = &self.cluster;
        if let Some(on) = self.whole.get(pod.node as usize) {
            on.del(pod.number).await?;
        } else if self.probe_of(pod).is_none() {
            if pod.network.is_some() {
                write(&cluster.writers, &Write::delete::<NetworkAttachment>(attachment(pod))).await?;
            }
            cluster.dirty.locked().insert(pod.node);
        }
        Ok(cluster.end_pod(pod.number).await?)
    }

    fn probe_of(&self, pod: Pod) -> Option<Listener> {
        self.probe.clone().filter(|probe| probe.number == pod.node)
    }
}

fn attachment(pod: Pod) -> Key {
    Key::namespaced(NAMESPACE, format!("pod-{}-net1", pod.number))
}
