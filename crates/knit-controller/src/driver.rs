//! The thin part around the plan: caches in, writes out, by the leader only.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{FutureExt, select_all};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::{NetworkPolicy, ServiceCIDR};
use knit_api::{AddressBlock, Network, NetworkAttachment, NetworkClass, NodeNetwork};
use knit_objects::{
    Backoff, Cache, Error, EventLimits, EventNote, EventRecorder, Key, Objects, Progress, Reporter,
    Selection, jitter,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::{
    AgentLease, AttachmentView, Cluster, Memory, NamespaceView, NodeView, Now, Numbers, PolicyView,
    Remembered, service_ranges,
};
use crate::config::Config;
use crate::leader::{self, Leading};
use crate::plan::{Action, Plan, REMEMBER, plan};

/// The controller of a cluster.
#[derive(Debug)]
pub struct Controller {
    objects: Objects,
    config: Config,
    caches: Caches,
    recorder: EventRecorder,
    state: watch::Sender<ControllerState>,
    /// Where the steady clock begins.
    started: Instant,
    planner: Planner,
}

type Planner = fn(&Cluster, &mut Memory, &Config, Now) -> Plan;

/// How a controller is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControllerState {
    /// Whether it acts, or stands by for another that does.
    pub leading: bool,
    /// Whether the API answered when it last looked at the Lease.
    pub in_touch: bool,
    /// How often it has looked at the cluster.
    pub passes: u64,
    /// Writes that succeeded.
    pub written: u64,
    /// Writes that failed.
    pub failed: u64,
    /// Why the last one that failed did; nothing after a pass in which none did.
    pub last_error: Option<String>,
    /// The last pass found nothing to do.
    pub settled: bool,
    /// Nodes that seem to be without an agent and were not closed, because most of them seem to be.
    pub held_back: usize,
}

/// The objects are not from a Kubernetes API.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "a folder of objects needs no controller: ids, AddressBlocks and statuses come in its files; \
     name a kubeconfig to run one for a cluster"
)]
pub struct Unsuitable;

#[derive(Clone, Debug)]
struct Caches {
    classes: Cache<NetworkClass>,
    networks: Cache<Network>,
    blocks: Cache<AddressBlock>,
    node_networks: Cache<NodeNetwork>,
    nodes: Cache<NodeView>,
    namespaces: Cache<NamespaceView>,
    attachments: Cache<AttachmentView>,
    service_cidrs: Cache<Vec<ipnet::IpNet>>,
    leases: Cache<AgentLease>,
    policies: Cache<PolicyView>,
}

/// Passes are at least this far apart: a burst of changes is one pass.
const BREATH: Duration = Duration::from_millis(50);
/// Leases and NetworkPolicies are looked at this often. They do not start passes by themselves: Leases change
/// all the time, and a policy as often as its author likes.
const LOOK: Duration = Duration::from_secs(5);
/// So many writes are under way at once.
const AT_ONCE: usize = 8;

// === impl Controller ===

impl Controller {
    /// A controller over these objects. Reads from now on, and acts when it runs. Needs a tokio runtime.
    pub fn new(objects: Objects, config: Config) -> Result<Self, Unsuitable> {
        if objects.client().is_none() {
            return Err(Unsuitable);
        }
        let reporter = Reporter { controller: crate::REPORTER.into(), instance: config.identity.clone() };
        let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
        let caches = Caches::start(&objects, &config);
        let (state, started) = (watch::Sender::default(), Instant::now());
        Ok(Self { objects, config, caches, recorder, state, started, planner: plan })
    }

    /// How it is doing, now and on changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<ControllerState> {
        self.state.subscribe()
    }

    /// Runs until `shutdown` comes, acting while it is the leader. What goes wrong is logged, told by
    /// [`Self::state`], and tried again.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let (leading, mut leads) = watch::channel(Leading::default());
        let heard = |in_touch| {
            self.state.send_if_modified(|state| {
                let changed = state.in_touch != in_touch;
                state.in_touch = in_touch;
                changed
            });
        };
        let standing = leader::stand(self.objects.clone(), self.config.clone(), leading, heard);
        let acting = async {
            loop {
                if leads.wait_for(|leads| leads.term().is_some()).await.is_err() {
                    return;
                }
                let mut lost = leads.clone();
                self.state.send_modify(|state| state.leading = true);
                tokio::select! {
                    () = self.lead(&leads) => {}
                    _ = lost.wait_for(|leads| leads.term().is_none()) => {}
                }
                self.state.send_modify(|state| state.leading = false);
            }
        };
        tokio::select! {
            () = shutdown => {}
            () = standing => {}
            () = acting => {}
        }
        if let Err(error) = leader::resign(&self.objects, &self.config).await {
            tracing::debug!(%error, "the Lease was not given back; another controller waits for its end");
        }
    }

    /// Looks and acts, for as long as it is polled.
    async fn lead(&self, leading: &watch::Receiver<Leading>) {
        let mut backoff = Backoff::default();
        let mut memory = loop {
            self.caches.wait_synced().await;
            match self.recall().await {
                Ok(memory) => break memory,
                Err(error) => {
                    self.failed(&error);
                    tokio::time::sleep(backoff.next(jitter())).await;
                }
            }
        };
        backoff.reset();
        let mut changes = self.caches.changes();
        loop {
            for change in &mut changes {
                change.mark_unchanged();
            }
            let plan;
            (plan, memory) = self.think(memory).await;
            let failed = self.carry_out(&plan, &mut memory, leading).await;
            let mut next = Instant::now() + LOOK;
            if failed {
                next = next.min(Instant::now() + backoff.next(jitter()));
            } else {
                backoff.reset();
            }
            if let Some(again) = plan.again {
                next = next.min(self.started + again);
            }
            let breath = Instant::now() + BREATH;
            // After a failure only time helps: a change that we caused ourselves must not start the next
            // attempt.
            let changed = if failed { std::future::pending().boxed() } else { any_change(&mut changes) };
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(next) => {}
            }
            tokio::time::sleep_until(breath).await;
        }
    }

    /// One plan, on a thread of its own: however long it takes, the Lease is renewed meanwhile.
    async fn think(&self, mut memory: Memory) -> (Plan, Memory) {
        let (caches, config, planner) = (self.caches.clone(), self.config.clone(), self.planner);
        let started = self.started;
        let thinking = tokio::task::spawn_blocking(move || {
            let now = Now { wall: Timestamp::now(), steady: started.elapsed() };
            let plan = planner(&caches.snapshot(), &mut memory, &config, now);
            (plan, memory)
        });
        match thinking.await {
            Ok(thought) => thought,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is being shut down, and with it this task.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// What was given out before we led, read from the API itself: a cache may lag behind the last leader's
    /// writes.
    async fn recall(&self) -> Result<Memory, Error> {
        let mut memory = Memory::default();
        for network in self.objects.list::<Network>(&Selection::default()).await? {
            if let (Some(uid), Some(id)) = (network.metadata.uid, network.status.and_then(|s| s.id)) {
                memory.ids.insert(uid, id);
            }
        }
        memory.numbers = self.recall_numbers().await?;
        let until = self.started.elapsed().saturating_add(REMEMBER);
        for block in self.objects.list::<AddressBlock>(&Selection::default()).await? {
            let name = block.metadata.name.clone().unwrap_or_default();
            memory.blocks.insert(name, Remembered { block: Arc::new(block), until });
        }
        Ok(memory)
    }

    async fn recall_numbers(&self) -> Result<Numbers, Error> {
        let key = Key::namespaced(self.config.namespace.as_str(), self.config.numbers_name());
        Ok(Numbers::of(self.objects.get::<Lease>(&key).await?))
    }

    /// Whether any write failed that should be tried again.
    async fn carry_out(&self, plan: &Plan, memory: &mut Memory, leading: &watch::Receiver<Leading>) -> bool {
        for note in &plan.notes {
            let note = note.clone();
            self.recorder.tell(EventNote::warning(note.regarding, note.reason, "GiveAddresses", note.text));
        }
        let writes: Vec<_> =
            plan.actions.iter().map(|action| self.attempt(action, leading.clone()).boxed()).collect();
        let results: Vec<_> = futures::stream::iter(writes).buffered(AT_ONCE).collect().await;
        let (mut failed, mut written) = (false, 0);
        for (action, result) in plan.actions.iter().zip(results) {
            if matches!(action, Action::KeepNumber(_)) {
                match self.recall_numbers().await {
                    Ok(numbers) => memory.numbers = numbers,
                    Err(error) => {
                        self.failed(&error);
                        failed = true;
                    }
                }
            }
            match result {
                Some(Ok(())) => {
                    written += 1;
                    continue;
                }
                // An earlier controller, or an earlier run, has told it.
                Some(Err(Error::AlreadyExists { .. })) if matches!(action, Action::Tell { .. }) => continue,
                // Refused for good, as in a namespace that is being deleted: it is not told again, and holds
                // up nothing.
                Some(Err(
                    error @ (Error::Invalid { .. } | Error::Forbidden { .. } | Error::NotFound { .. }),
                )) if matches!(action, Action::Tell { .. }) => {
                    tracing::debug!(%action, error = &error as &dyn std::error::Error, "not told");
                    continue;
                }
                // The cache was behind: what it shows next decides anew.
                Some(Err(Error::Conflict { .. } | Error::AlreadyExists { .. } | Error::NotFound { .. })) => {
                    tracing::debug!(%action, "out of date");
                }
                Some(Err(error)) => {
                    self.failed(&error);
                    // One of a user's many objects is tried again by itself; nothing else waits for it.
                    match action.attachment() {
                        Some(place) => drop(memory.failed.insert(place, self.started.elapsed())),
                        None => failed = true,
                    }
                }
                None => failed = true,
            }
            match action {
                Action::GiveBlock(block) => {
                    memory.blocks.remove(block.metadata.name.as_deref().unwrap_or_default());
                }
                Action::Tell { policy, .. } => {
                    memory.told.remove(policy);
                }
                _ => {}
            }
        }
        self.state.send_modify(|state| {
            state.passes += 1;
            state.written += written;
            state.settled = plan.actions.is_empty();
            if plan.held_back > 0 && state.held_back == 0 {
                tracing::warn!(
                    nodes = plan.held_back,
                    "most agents seem to be away at once: no further node is closed to new pods. Is the API \
                     server slow, \
                     or are the agents' pods not running?"
                );
            }
            state.held_back = plan.held_back;
            if !failed {
                state.last_error = None;
            }
        });
        failed
    }

    /// One write. Nothing if the Lease was lost before it: whoever does not lead any more stops in the
    /// middle.
    fn attempt(
        &self,
        action: &Action,
        leading: watch::Receiver<Leading>,
    ) -> impl Future<Output = Option<Result<(), Error>>> + Send + use<> {
        let (objects, write, text) = (self.objects.clone(), action.write(), action.to_string());
        async move {
            let leading = *leading.borrow();
            let writing = async {
                tracing::info!(action = text, "write");
                objects.write(&write).await.map(|_| ())
            };
            leading.fence(writing).await
        }
    }

    fn failed(&self, error: &Error) {
        let text = error.with_causes();
        tracing::warn!(error = %text, "a write failed; it is tried again");
        self.state.send_modify(|state| {
            state.failed += 1;
            state.last_error = Some(text);
        });
    }
}

// === impl Caches ===

impl Caches {
    fn start(objects: &Objects, config: &Config) -> Self {
        // Only a selector can be wrong, and there is none here.
        let expect = "a watch without selectors starts";
        Self {
            classes: objects.watch().cache().expect(expect),
            networks: objects.watch().cache().expect(expect),
            blocks: objects.watch().cache().expect(expect),
            node_networks: objects.watch().cache().expect(expect),
            nodes: objects
                .watch::<Node>()
                .map(|node| Some(NodeView::of(&node)))
                .cache_of_news()
                .expect(expect),
            namespaces: objects
                .watch::<Namespace>()
                .map(|n| Some(NamespaceView::of(n)))
                .cache_of_news()
                .expect(expect),
            attachments: objects
                .watch::<NetworkAttachment>()
                .map(|attachment| Some(AttachmentView::of(attachment)))
                .cache_of_news()
                .expect(expect),
            service_cidrs: objects
                .watch::<ServiceCIDR>()
                .map(|s| Some(service_ranges(&s)))
                .cache_of_news()
                .expect(expect),
            leases: objects
                .watch::<Lease>()
                .namespace(config.namespace.clone())
                .map(|lease| AgentLease::of(&lease))
                .cache()
                .expect(expect),
            policies: objects.watch::<NetworkPolicy>().map(PolicyView::of).cache().expect(expect),
        }
    }

    async fn wait_synced(&self) {
        fn synced<T>(cache: &Cache<T>) -> watch::Receiver<Progress> {
            cache.changes()
        }
        let mut all = self.changes();
        all.push(synced(&self.leases));
        for progress in &mut all {
            // The sender lives in the cache that we hold.
            let _ = progress.wait_for(|progress| progress.synced.is_some()).await;
        }
    }

    /// Changes that start a pass.
    fn changes(&self) -> Vec<watch::Receiver<Progress>> {
        vec![
            self.classes.changes(),
            self.networks.changes(),
            self.blocks.changes(),
            self.node_networks.changes(),
            self.nodes.changes(),
            self.namespaces.changes(),
            self.attachments.changes(),
            self.service_cidrs.changes(),
        ]
    }

    fn snapshot(&self) -> Cluster {
        fn by_name<T>(cache: &Cache<T>) -> BTreeMap<String, Arc<T>> {
            cache.list().into_iter().map(|(key, object)| (key.name().to_owned(), object)).collect()
        }
        Cluster {
            classes: by_name(&self.classes),
            networks: by_name(&self.networks),
            blocks: by_name(&self.blocks),
            node_networks: by_name(&self.node_networks),
            nodes: by_name(&self.nodes),
            namespaces: by_name(&self.namespaces),
            attachments: self.attachments.list().into_iter().map(|(_, a)| a).collect(),
            service_ranges: self.service_cidrs.list().iter().flat_map(|(_, r)| r.iter().copied()).collect(),
            leases: self
                .leases
                .list()
                .into_iter()
                .map(|(key, lease): (Key, Arc<AgentLease>)| (key.name().to_owned(), (*lease).clone()))
                .collect(),
            hears_agents: self.leases.connection().borrow().is_connected(),
            policies: self.policies.list().into_iter().map(|(_, policy)| policy).collect(),
        }
    }
}

fn any_change(changes: &mut [watch::Receiver<Progress>]) -> futures::future::BoxFuture<'_, ()> {
    select_all(changes.iter_mut().map(|change| change.changed().map(|_| ()).boxed())).map(|_| ()).boxed()
}

#[cfg(test)]
mod tests {
    use knit_apiserver::{Config as ApiConfig, Server, StoreOptions};
    use knit_objects::{Source, Write};

    use super::*;

    /// Takes longer than the Lease holds.
    fn slow(cluster: &Cluster, memory: &mut Memory, config: &Config, now: Now) -> Plan {
        let (_never, nothing) = std::sync::mpsc::channel::<()>();
        // Waits: somebody holds the other end.
        let _ = nothing.recv_timeout(config.lease_duration * 5 / 3);
        plan(cluster, memory, config, now)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_slow_plan_never_loses_the_lease() {
        let crds = knit_api::crds().iter().map(|crd| serde_json::to_value(crd).expect("JSON")).collect();
        let store = StoreOptions { crds, ..StoreOptions::default() };
        let api = ApiConfig { store, ..ApiConfig::default() };
        let server = Server::start(api).await.expect("an API server");
        let objects = Objects::open(Source::Url(server.url())).await.expect("objects");
        let namespace = serde_json::json!({"metadata": {"name": "knit-system"}});
        let namespace: Namespace = serde_json::from_value(namespace).expect("a Namespace");
        objects.write(&Write::create(&namespace)).await.expect("created");
        let config = |identity: &str| Config {
            lease_duration: Duration::from_secs(3),
            renew_every: Duration::from_millis(200),
            ..Config::new(identity)
        };
        // On one thread, as the program runs it.
        let (url, slow_config) = (server.url(), config("slow"));
        let (tell, told) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let objects = Objects::open(Source::Url(url)).await.expect("objects");
                let mut controller = Controller::new(objects, slow_config).expect("a controller");
                controller.planner = slow;
                let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
                tell.send((controller.state(), stop)).expect("somebody listens");
                controller.run(async move { drop(stopped.await) }).await;
            });
        });
        let (mut state, stop) = told.await.expect("a controller");
        state.wait_for(|state| state.leading).await.expect("a leader");
        // Another one stands by, and takes the Lease as soon as it is not renewed.
        let other = Controller::new(objects, config("other")).expect("a controller");
        let mut others = other.state();
        let standing_by = tokio::spawn(other.run(std::future::pending()));
        tokio::select! {
            state = state.wait_for(|state| state.passes >= 2) => assert!(state.expect("a state").leading),
            _ = others.wait_for(|other| other.leading) => panic!("it lost the Lease while it thought"),
        }
        standing_by.abort();
        stop.send(()).expect("a controller that runs");
        tokio::task::spawn_blocking(move || thread.join()).await.expect("joined").expect("no panic");
    }
}
