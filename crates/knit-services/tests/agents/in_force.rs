//! A pod is answered when the Services of its Network are in force, and not before; what an agent before left
//! is in force. Looking after routers keeps no thread that others wait for.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::backends::{BackendSetup, Backends, Limits, Namespace, OpenError};
use knit_proxy::view::{Changes, NodeView};
use knit_proxy_nft::NftBackends;

use crate::flows::*;
use crate::steering::{Bed, STOP, with_bed};
use crate::support::Serving as _;

/// Backends that do nothing before they are let.
#[derive(Debug, Clone, Default)]
struct Held(Arc<(Mutex<bool>, Condvar)>);

struct HeldBackend {
    held: Held,
    inner: Box<dyn Backend + Send>,
}

impl Held {
    fn release(&self) {
        *self.0.0.lock().expect("no panic") = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let free = self.0.0.lock().expect("no panic");
        drop(self.0.1.wait_while(free, |free| !*free).expect("no panic"));
    }
}

impl Backend for HeldBackend {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        self.held.wait();
        self.inner.sync(state)
    }

    fn apply(&mut self, changes: &Changes, state: &NodeView) -> Outcome {
        self.held.wait();
        self.inner.apply(changes, state)
    }
}

impl Backends for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn open(&self, setup: BackendSetup<'_>) -> Result<Box<dyn Backend + Send>, OpenError> {
        Ok(Box::new(HeldBackend { held: self.clone(), inner: NftBackends.open(setup)? }))
    }

    fn is_left_over(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        NftBackends.is_left_over(at)
    }

    fn remove(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        NftBackends.remove(at)
    }

    fn others_at_work(&self, at: Namespace<'_>) -> Result<Option<String>, OpenError> {
        NftBackends.others_at_work(at)
    }
}

#[test]
fn a_pod_is_answered_when_the_services_of_its_network_are_in_force_and_not_before() {
    with_bed(|Bed { objects, nodes: [a, _], .. }| async move {
        ServiceSpec::new("sky", "web").ports(&[("tcp", "TCP", 80, 0)]).ip(70).write(&objects);
        let held = Held::default();
        let agent = a.start_with(Arc::new(held.clone())).await;
        let answered = {
            let mut answer = std::pin::pin!(a.pod("sky-a", "sky"));
            // What was a second of patience: no answer however long that is, within reason.
            let early = tokio::time::timeout(Duration::from_secs(3), &mut answer).await;
            let state = crate::support::services(&agent, "blue");
            assert!(early.is_err(), "a pod was answered before its Services were in force: {state:?}");
            held.release();
            answer.await
        };
        let (sky, _) = answered;
        serve_tcp(&sky.space, 9080, sky.name);
        slices(&objects, ("sky", "web"), &[("tcp", "TCP", 9080)], &[(&sky, "a")]);
        wait("its Service", || names_at(&sky.space, Tcp, (ip("10.96.0.70"), 80), &["sky-a"])).await;
        agent.stop(STOP).await;
        // What this agent made is in force: the next one answers pods although it has not looked at it yet.
        let held = Held::default();
        let agent = a.start_with(Arc::new(held.clone())).await;
        let (other, _) = a.pod("sky-b", "sky").await;
        names_at(&other.space, Tcp, (ip("10.96.0.70"), 80), &["sky-a"]).expect("as it was left");
        held.release();
        agent.stop(STOP).await;
    });
}

/// Backends that note each look after a router: whether it was on a thread of tasks, where nobody may block.
#[derive(Debug, Clone, Default)]
struct Watched(Arc<Mutex<Vec<bool>>>);

#[derive(Debug)]
struct WatchedLimits {
    looks: Watched,
    /// The first time is when its proxy is started.
    started: bool,
}

impl Limits for WatchedLimits {
    fn keep(&mut self, _: Namespace<'_>) -> usize {
        if std::mem::replace(&mut self.started, true) {
            // Threads change their parts, so that their names say nothing; but only among tasks this panics.
            let among_tasks = std::panic::catch_unwind(|| {
                tokio::runtime::Handle::current().block_on(async {});
            });
            self.looks.0.lock().expect("no panic").push(among_tasks.is_err());
        }
        0
    }
}

impl Backends for Watched {
    fn name(&self) -> &'static str {
        "watched"
    }

    fn open(&self, setup: BackendSetup<'_>) -> Result<Box<dyn Backend + Send>, OpenError> {
        NftBackends.open(setup)
    }

    fn is_left_over(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        NftBackends.is_left_over(at)
    }

    fn remove(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        NftBackends.remove(at)
    }

    fn others_at_work(&self, at: Namespace<'_>) -> Result<Option<String>, OpenError> {
        NftBackends.others_at_work(at)
    }

    fn limits(&self, _: bool) -> Option<Box<dyn Limits>> {
        Some(Box::new(WatchedLimits { looks: self.clone(), started: false }))
    }
}

#[test]
fn each_look_after_all_routers_kept_a_thread_that_everything_else_waits_for() {
    with_bed(|Bed { nodes: [a, _], .. }| async move {
        let watched = Watched::default();
        let agent = a.start_with(Arc::new(watched.clone())).await;
        a.pod("sky-a", "sky").await;
        let looks = || watched.0.lock().expect("no panic").clone();
        wait("a look after routers", || {
            if looks().is_empty() { Err("nobody looked".to_owned()) } else { Ok(()) }
        })
        .await;
        assert!(!looks().contains(&true), "a look was on a thread of tasks");
        agent.stop(STOP).await;
    });
}
