//! The thin part around the plan: caches in, writes out, by the leader only.

mod caches;
mod devices;
mod writes;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::FutureExt;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use knit_api::AddressBlock;
use knit_objects::{Backoff, Error, EventLimits, EventRecorder, Key, Objects, Reporter, Selection, jitter};
use knit_types::sync::Locked;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::{BlockView, Memory, Now, Numbers, Remembered};
use crate::config::Config;
use crate::leader::{self, Leading};
use crate::peers::{self, SharedCaches};
use crate::plan::{Indexed, Plan, REMEMBER};
use crate::slices;
use crate::whereabouts;
use caches::{Caches, any_change};
use writes::Writers;

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
    /// Counts the times that it began to lead.
    turn: Arc<Mutex<u64>>,
}

type Planner = fn(&mut Indexed, &mut Memory, &Config, Now) -> Plan;

/// What plans are made of, and with: it is on the thread that plans, or at rest.
#[derive(Debug, Default)]
struct PlannerState {
    known: Indexed,
    memory: Memory,
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
    /// Why the last one that failed did; nothing once none is tried again.
    pub last_error: Option<String>,
    /// The last pass found nothing to do.
    pub settled: bool,
    /// Nodes that seem to be without an agent and were not closed, because most of them seem to be.
    pub held_back: usize,
    /// How long the last plan took.
    pub last_plan: Duration,
    /// How long the slowest one took.
    pub slowest_plan: Duration,
    /// How long all of them took.
    pub plans: PlanTimes,
}

/// How long plans took, as a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlanTimes {
    /// So many took at most the time of the same place in [`Self::LIMITS`], and more than that before it;
    /// the last are those that took longer than all limits.
    pub counts: [u64; Self::LIMITS.len() + 1],
    /// All of them together.
    pub sum: Duration,
}

/// The objects are not from a Kubernetes API.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "a folder of objects needs no controller: ids, AddressBlocks and statuses are in its files; specify a \
    kubeconfig to run one for a cluster"
)]
pub struct Unsuitable;

/// Passes are at least this far apart: a burst of changes is one pass.
const PASS_INTERVAL: Duration = Duration::from_millis(50);
/// Leases and NetworkPolicies are looked at this often. They do not start passes by themselves: Leases change
/// all the time, and a policy as often as its author likes.
const QUIET_PASS_INTERVAL: Duration = Duration::from_secs(5);
// === impl PlanTimes ===

impl PlanTimes {
    /// The upper limits of its parts.
    pub const LIMITS: [Duration; 10] = [
        Duration::from_millis(1),
        Duration::from_millis(2),
        Duration::from_millis(5),
        Duration::from_millis(10),
        Duration::from_millis(20),
        Duration::from_millis(50),
        Duration::from_millis(100),
        Duration::from_millis(250),
        Duration::from_secs(1),
        Duration::from_secs(5),
    ];

    fn note(&mut self, took: Duration) {
        self.counts[Self::LIMITS.partition_point(|limit| *limit < took)] += 1;
        self.sum = self.sum.saturating_add(took);
    }
}

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
        Ok(Self {
            objects,
            config,
            caches,
            recorder,
            state,
            started,
            planner: Indexed::plan,
            turn: Arc::default(),
        })
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
        let state = self.state.clone();
        let heard = move |in_touch| {
            state.send_if_modified(|state| {
                let changed = state.in_touch != in_touch;
                state.in_touch = in_touch;
                changed
            });
        };
        // A task of its own: where the runtime has a second thread, nothing that this one does holds it up.
        let standing = leader::stand(self.objects.clone(), self.config.clone(), leading, heard);
        let mut standing = JoinSet::from_iter([standing]);
        let acting = async {
            loop {
                if leads.wait_for(|leads| leads.term().is_some()).await.is_err() {
                    return;
                }
                let mut lost = leads.clone();
                self.state.send_modify(|state| state.leading = true);
                tokio::select! {
                    () = self.lead(&leads) => {}
                    () = slices::keep(self.objects.clone(), leads.clone()) => {}
                    () = self.show_devices(&leads) => {}
                    () = self.tell_peers(&leads) => {}
                    () = self.tell_nodes(&leads) => {}
                    _ = lost.wait_for(|leads| leads.term().is_none()) => {}
                }
                self.state.send_modify(|state| state.leading = false);
            }
        };
        tokio::select! {
            () = shutdown => {}
            _ = standing.join_next() => {}
            () = acting => {}
        }
        standing.shutdown().await;
        if let Err(error) = leader::resign(&self.objects, &self.config).await {
            tracing::debug!(%error, "the Lease was not released; another controller has to wait until it \
            expires");
        }
    }

    /// Tells users' NetworkAttachments their nodes, for as long as it is polled.
    async fn tell_nodes(&self, leading: &watch::Receiver<Leading>) {
        whereabouts::keep(self.objects.clone(), self.caches.nodes.clone(), leading.clone()).await;
    }

    /// Writes what policies need to know of pods, for as long as it is polled.
    async fn tell_peers(&self, leading: &watch::Receiver<Leading>) {
        let small = SharedCaches {
            namespaces: self.caches.namespaces.clone(),
            networks: self.caches.networks.clone(),
            blocks: self.caches.blocks.clone(),
        };
        let left = peers::LeftToOthers {
            cluster: !self.config.enforce_policies,
            default_network: !self.config.serves_default,
        };
        peers::run(&self.objects, small, left, &self.recorder, leading).await;
        // It ends with the runtime only.
        std::future::pending::<()>().await;
    }

    /// Looks and acts, for as long as it is polled.
    async fn lead(&self, leading: &watch::Receiver<Leading>) {
        let mut backoff = Backoff::default();
        let mut mind = loop {
            self.caches.wait_synced().await;
            match self.recall().await {
                Ok(memory) => break PlannerState { known: Indexed::default(), memory },
                Err(error) => {
                    self.failed(&error);
                    tokio::time::sleep(backoff.next(jitter())).await;
                }
            }
        };
        backoff.reset();
        let turn = {
            let mut turn = self.turn.locked();
            *turn += 1;
            self.caches.track();
            *turn
        };
        let mut changes = self.caches.changes();
        let mut writers = Writers::default();
        loop {
            for change in &mut changes {
                change.mark_unchanged();
            }
            let plan;
            (plan, mind) = self.think(mind, turn).await;
            let mut next = Instant::now() + QUIET_PASS_INTERVAL;
            if let Some(again) = plan.again {
                next = next.min(self.started + again);
            }
            self.begin(plan, &mut mind.memory, leading, &mut writers);
            let breath = Instant::now() + PASS_INTERVAL;
            tokio::select! {
                () = any_change(&mut changes) => {}
                done = writers.next() => self.finish(done, &mut mind.memory),
                () = tokio::time::sleep_until(next) => {}
            }
            tokio::time::sleep_until(breath).await;
            while let Some(done) = writers.next().now_or_never() {
                self.finish(done, &mut mind.memory);
            }
        }
    }

    /// One plan, on a thread of its own: however long it takes, the Lease is renewed meanwhile.
    async fn think(&self, mut mind: PlannerState, turn: u64) -> (Plan, PlannerState) {
        let (caches, config, planner) = (self.caches.clone(), self.config.clone(), self.planner);
        let (started, turns) = (self.started, Arc::clone(&self.turn));
        let thinking = tokio::task::spawn_blocking(move || {
            {
                let newest = turns.locked();
                // A thread that is left over from an earlier term takes nothing from the one that leads now.
                if *newest == turn {
                    caches.catch_up(&mut mind.known);
                }
            }
            let now = Now { wall: Timestamp::now(), steady: started.elapsed() };
            let plan = planner(&mut mind.known, &mut mind.memory, &config, now);
            let took = started.elapsed().saturating_sub(now.steady);
            (plan, mind, took)
        });
        match thinking.await {
            Ok((plan, mind, took)) => {
                self.state.send_modify(|state| {
                    state.last_plan = took;
                    state.slowest_plan = state.slowest_plan.max(took);
                    state.plans.note(took);
                });
                (plan, mind)
            }
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
        for network in self.objects.list::<knit_api::Network>(&Selection::default()).await? {
            if let (Some(uid), Some(id)) = (network.metadata.uid, network.status.and_then(|s| s.id)) {
                memory.ids.insert(uid, id);
            }
        }
        memory.numbers = self.recall_numbers().await?;
        let until = self.started.elapsed().saturating_add(REMEMBER);
        for block in self.objects.list::<AddressBlock>(&Selection::default()).await? {
            let name = block.metadata.name.clone().unwrap_or_default();
            let block = Arc::new(BlockView::of(block));
            memory.blocks.insert(name, Remembered { block, until, again: None });
        }
        Ok(memory)
    }

    async fn recall_numbers(&self) -> Result<Numbers, Error> {
        Ok(Numbers::of(self.objects.get::<Lease>(&self.numbers_key()).await?))
    }

    /// Where the highest number of a Network is kept.
    fn numbers_key(&self) -> Key {
        Key::namespaced(self.config.namespace.as_str(), self.config.numbers_name())
    }
}

#[cfg(test)]
mod tests;
