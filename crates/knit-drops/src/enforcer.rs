//! An enforcer of policies whose drops are read: everything is left to it, and its routers are listened to.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use knit_kernel::netns::{NetNs, NsId};
use knit_ledger::SandboxRecord;
use knit_node::policy::{EnforcedRouter, PoliciesState, PolicyEnforcer, RouterApart};
use knit_node::proxy::Stopped;
use knit_node::{Core, Result};
use knit_objects::{EventLimits, EventRecorder, Objects, Reporter};
use knit_runtime::{Network, NetworkName};
use knit_types::sync::Locked as _;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::collect::{Drops, Listening};
use crate::socket;

/// An enforcer, and what it drops.
pub struct WithDrops {
    enforcer: Arc<dyn PolicyEnforcer>,
    drops: Drops,
    /// The node's own namespace, the router of the default Network.
    node: NetNs,
    socket: PathBuf,
    routers: Arc<Mutex<Routers>>,
}

/// The routers that are listened to.
#[derive(Debug, Default)]
struct Routers {
    next: u64,
    all: BTreeMap<u64, Router>,
}

#[derive(Debug)]
struct Router {
    network: NetworkName,
    path: Option<PathBuf>,
    /// Which namespace it was when it was last looked at, and the listener there, if it could be made.
    heard: Option<(NsId, Listening)>,
}

/// A router of the enforcer, listened to until this is dropped.
#[derive(Debug)]
struct Held {
    router: Box<dyn EnforcedRouter>,
    id: u64,
    routers: Arc<Mutex<Routers>>,
}

// === impl WithDrops ===

impl WithDrops {
    /// Reads what `enforcer` drops. `socket` is where the list is served.
    #[must_use]
    pub fn new(enforcer: Arc<dyn PolicyEnforcer>, drops: Drops, node: NetNs, socket: PathBuf) -> Self {
        Self { enforcer, drops, node, socket, routers: Arc::default() }
    }

    /// Listens in each router that is another namespace than before, or where it could not be done, or went
    /// wrong.
    fn listen(&self) {
        let mut routers = self.routers.locked();
        for router in routers.all.values_mut() {
            let namespace = match &router.path {
                Some(path) => NetNs::open(path),
                None => self.node.try_clone(),
            };
            // A router that is not there yet, or any more, is looked at again in the next pass.
            let Ok(namespace) = namespace else { continue };
            let heard = router.heard.as_ref();
            if heard.is_some_and(|(id, listening)| *id == namespace.id() && !listening.is_over()) {
                continue;
            }
            match self.drops.listen(&router.network, &namespace) {
                Ok(listening) => router.heard = Some((namespace.id(), listening)),
                Err(error) => {
                    router.heard = None;
                    let (network, error) = (&router.network, &error as &dyn std::error::Error);
                    tracing::warn!(%network, error, "dropped packets of this Network are not reported");
                }
            }
        }
    }
}

#[async_trait]
impl PolicyEnforcer for WithDrops {
    fn follow(&self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>) {
        self.enforcer.follow(core, objects, tasks);
        let controller = knit_api::names::AGENT_MANAGER.to_owned();
        let reporter = Reporter { controller, instance: core.node().to_owned() };
        self.drops.tell_pods(EventRecorder::start(objects, reporter, EventLimits::default()));
        match socket::open(&self.socket) {
            Ok(listener) => drop(tasks.spawn(socket::serve(listener, self.drops.clone()))),
            // Policies are enforced all the same.
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "knit drops will get no answer");
            }
        }
        self.listen();
    }

    fn start(&self, router: Option<RouterApart>, network: &Network) -> Box<dyn EnforcedRouter> {
        let held = self.enforcer.start(router.clone(), network);
        let mut routers = self.routers.locked();
        let id = routers.next;
        routers.next += 1;
        let network = network.name.clone();
        routers.all.insert(id, Router { network, path: router.map(|router| router.namespace), heard: None });
        drop(routers);
        self.listen();
        Box::new(Held { router: held, id, routers: Arc::clone(&self.routers) })
    }

    async fn admit(&self, record: &SandboxRecord, deadline: Instant) -> Result<()> {
        self.enforcer.admit(record, deadline).await
    }

    fn released(&self, namespace: &str, name: &str) {
        self.enforcer.released(namespace, name);
    }

    fn compare(&self) {
        self.enforcer.compare();
        self.listen();
    }

    fn stopped(&self) -> Option<Stopped> {
        self.enforcer.stopped()
    }

    fn metrics(&self) -> String {
        self.enforcer.metrics() + &self.drops.metrics()
    }
}

impl std::fmt::Debug for WithDrops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WithDrops").field("socket", &self.socket).finish_non_exhaustive()
    }
}

// === impl Held ===

impl EnforcedRouter for Held {
    fn state(&self) -> PoliciesState {
        self.router.state()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.routers.locked().all.remove(&self.id);
    }
}
