//! The thin part around the plan: caches in, writes out, by the leader only.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{FutureExt, select_all};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use knit_api::{AddressBlock, Network, NetworkAttachment, NetworkClass, NodeNetwork};
use knit_objects::{
    Backoff, Cache, Error, EventLimits, EventNote, EventRecorder, Key, Objects, Progress, Reporter,
    Selection, jitter,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::{
    AgentLease, AttachmentView, Cluster, Memory, NamespaceView, NodeView, Remembered, service_ranges,
};
use crate::config::Config;
use crate::leader;
use crate::plan::{Action, Plan, REMEMBER, plan};

/// The controller of a cluster.
#[derive(Debug)]
pub struct Controller {
    objects: Objects,
    config: Config,
    caches: Caches,
    recorder: EventRecorder,
    state: watch::Sender<ControllerState>,
}

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
}

/// The objects are not from a Kubernetes API.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "a folder of objects needs no controller: ids, AddressBlocks and statuses come in its files; \
     name a kubeconfig to run one for a cluster"
)]
pub struct Unsuitable;

#[derive(Debug)]
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
}

/// Passes are at least this far apart: a burst of changes is one pass.
const BREATH: Duration = Duration::from_millis(50);
/// Leases are looked at this often. They change all the time, so they do not start passes by themselves.
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
        let reporter =
            Reporter { controller: "knit.dev/controller".into(), instance: config.identity.clone() };
        let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
        let caches = Caches::start(&objects, &config);
        Ok(Self { objects, config, caches, recorder, state: watch::Sender::default() })
    }

    /// How it is doing, now and on changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<ControllerState> {
        self.state.subscribe()
    }

    /// Runs until `shutdown` comes, acting while it is the leader. What goes wrong is logged, told by
    /// [`Self::state`], and tried again.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let (leading, mut leads) = watch::channel(false);
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
                if leads.wait_for(|leads| *leads).await.is_err() {
                    return;
                }
                let mut lost = leads.clone();
                self.state.send_modify(|state| state.leading = true);
                tokio::select! {
                    () = self.lead(&leads) => {}
                    _ = lost.wait_for(|leads| !*leads) => {}
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
    async fn lead(&self, leading: &watch::Receiver<bool>) {
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
            let plan = plan(&self.caches.snapshot(), &mut memory, &self.config, Timestamp::now());
            let failed = self.carry_out(&plan, &mut memory, leading).await;
            let mut next = Instant::now() + LOOK;
            if failed {
                next = next.min(Instant::now() + backoff.next(jitter()));
            } else {
                backoff.reset();
            }
            if let Some(again) = plan.again {
                let wait = again.duration_since(Timestamp::now());
                next = next.min(Instant::now() + Duration::try_from(wait).unwrap_or_default());
            }
            let breath = Instant::now() + BREATH;
            // After a failure only time helps: a change that we caused ourselves must not start the next attempt.
            let changed = if failed { std::future::pending().boxed() } else { any_change(&mut changes) };
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(next) => {}
            }
            tokio::time::sleep_until(breath).await;
        }
    }

    /// What was given out before we led, read from the API itself: a cache may lag behind the last leader's writes.
    async fn recall(&self) -> Result<Memory, Error> {
        let mut memory = Memory::default();
        for network in self.objects.list::<Network>(&Selection::default()).await? {
            if let (Some(uid), Some(id)) = (network.metadata.uid, network.status.and_then(|s| s.id)) {
                memory.ids.insert(uid, id);
            }
        }
        let until = Timestamp::now().saturating_add(REMEMBER).unwrap_or(Timestamp::MAX);
        for block in self.objects.list::<AddressBlock>(&Selection::default()).await? {
            let name = block.metadata.name.clone().unwrap_or_default();
            memory.blocks.insert(name, Remembered { block: Arc::new(block), until });
        }
        Ok(memory)
    }

    /// Whether any write failed that should be tried again.
    async fn carry_out(&self, plan: &Plan, memory: &mut Memory, leading: &watch::Receiver<bool>) -> bool {
        for note in &plan.notes {
            let note = note.clone();
            self.recorder.tell(EventNote::warning(note.regarding, note.reason, "GiveAddresses", note.text));
        }
        let writes: Vec<_> =
            plan.actions.iter().map(|action| self.attempt(action, leading.clone()).boxed()).collect();
        let results: Vec<_> = futures::stream::iter(writes).buffered(AT_ONCE).collect().await;
        let (mut failed, mut written) = (false, 0);
        for (action, result) in plan.actions.iter().zip(results) {
            match result {
                Some(Ok(())) => {
                    written += 1;
                    continue;
                }
                // The cache was behind: what it shows next decides anew.
                Some(Err(Error::Conflict { .. } | Error::AlreadyExists { .. } | Error::NotFound { .. })) => {
                    tracing::debug!(%action, "out of date");
                }
                Some(Err(error)) => {
                    self.failed(&error);
                    failed = true;
                }
                None => failed = true,
            }
            if let Action::GiveBlock(block) = action {
                memory.blocks.remove(block.metadata.name.as_deref().unwrap_or_default());
            }
        }
        self.state.send_modify(|state| {
            state.passes += 1;
            state.written += written;
            state.settled = plan.actions.is_empty();
            if !failed {
                state.last_error = None;
            }
        });
        failed
    }

    /// One write. Nothing if the Lease was lost before it: whoever does not lead any more stops in the middle.
    fn attempt(
        &self,
        action: &Action,
        leading: watch::Receiver<bool>,
    ) -> impl Future<Output = Option<Result<(), Error>>> + Send + use<> {
        let (objects, write, text) = (self.objects.clone(), action.write(), action.to_string());
        async move {
            if !*leading.borrow() {
                return None;
            }
            tracing::info!(action = text, "write");
            Some(objects.write(&write).await.map(|_| ()))
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
            nodes: objects.watch::<Node>().map(|node| Some(NodeView::of(&node))).cache().expect(expect),
            namespaces: objects
                .watch::<Namespace>()
                .map(|n| Some(NamespaceView::of(n)))
                .cache()
                .expect(expect),
            attachments: objects
                .watch::<NetworkAttachment>()
                .map(|attachment| Some(AttachmentView::of(attachment)))
                .cache()
                .expect(expect),
            service_cidrs: objects
                .watch::<ServiceCIDR>()
                .map(|s| Some(service_ranges(&s)))
                .cache()
                .expect(expect),
            leases: objects
                .watch::<Lease>()
                .namespace(config.namespace.clone())
                .map(|lease| AgentLease::of(&lease))
                .cache()
                .expect(expect),
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
                .map(|(key, lease): (Key, Arc<AgentLease>)| (key.name().to_owned(), *lease))
                .collect(),
        }
    }
}

fn any_change(changes: &mut [watch::Receiver<Progress>]) -> futures::future::BoxFuture<'_, ()> {
    select_all(changes.iter_mut().map(|change| change.changed().map(|_| ()).boxed())).map(|_| ()).boxed()
}
