//! The container runtime's door, by NRI, where another CNI plugin gives pods their main interface.
//!
//! A sandbox gets its further interfaces in `RunPodSandbox`, after that plugin and before any container. What
//! that event missed (the agent was away, or a runtime that must not be refused there) is made up for when a
//! container is created, which is refused as long as its sandbox lacks something; and by `Synchronize`, at
//! the start of each connection, for sandboxes whose containers run already.
//!
//! `StopPodSandbox` is the usual end, but not every sandbox has one: after a restart containerd never sends
//! it for older ones. What has no sandbox any more is removed by the list of `Synchronize`, and in each pass
//! by its namespace and by what the container runtime's CRI lists.

mod translate;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use knit_nri::plugin::{Deadline, Plugin, Refusal};
use knit_nri::version::RefusedSandbox;
use knit_nri::wire::{ContainerAdjustment, PodSandbox};
use knit_nri::{Client, Identity, Runtime};
use knit_runtime::InterfaceName;
use knit_types::sync::Locked as _;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::core::Core;
use crate::report::PodEvent;
use crate::request::{Door, PodRequest, pod_name};

/// Where container runtimes listen.
pub const SOCKET: &str = "/var/run/nri/nri.sock";

/// By what they know the agent: pods may name it as a plugin that they require.
pub const PLUGIN: &str = "knit";

/// When it is called among plugins: after those that change sandboxes, if there are any.
const INDEX: &str = "50";

/// The interface that CNI plugins make for a pod.
const MAIN: &str = "eth0";

/// How many sandboxes are attached side by side after a connection.
const SANDBOXES_AT_ONCE: usize = 4;

/// The pause before what could not be attached is tried again, at first and at most.
const REPAIR_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Why the agent is not ready before it is connected.
pub(crate) const NOT_CONNECTED: &str = "the container runtime has not connected through NRI: check that NRI \
    is enabled there, and the path of its NRI socket";

/// What the door is told.
#[derive(Clone, Debug)]
pub struct NriConfig {
    /// The container runtime's socket.
    pub socket: PathBuf,
    /// How pods may ask.
    pub served: Served,
}

/// How pods may ask for Networks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Served {
    /// By annotations and by claims.
    AnnotationsAndClaims,
    /// By claims only.
    Claims,
}

/// The door. Clones are the same one.
#[derive(Clone, Debug)]
pub struct NriDoor {
    core: Core,
    served: Served,
    main: InterfaceName,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Who is at the other end, or was last.
    runtime: Runtime,
    /// Sandboxes that containers had run in when the connection began.
    started: BTreeSet<String>,
    /// What looks after sandboxes that were there when the connection began.
    repairing: Option<AbortHandle>,
}

// === impl NriDoor ===

impl NriDoor {
    /// A door of this agent.
    #[must_use]
    pub fn new(core: Core, served: Served) -> Self {
        let main = InterfaceName::new(MAIN).expect("it is a valid name");
        Self { core, served, main, state: Arc::default() }
    }

    /// Serves forever, and connects again whenever the connection ends.
    pub async fn serve(self, socket: PathBuf) {
        let identity = Identity::new(PLUGIN, INDEX).expect("they are valid");
        Client { socket, identity, plugin: Arc::new(self) }.run().await;
    }

    fn request(&self, pod: &PodSandbox) -> Result<Option<PodRequest>, String> {
        translate::pod_request(pod, &self.main, self.served)
    }

    /// Sees to it that a sandbox has what it asks for. It is refused at once while something for it is still
    /// missing: kubelet tries again, and meanwhile other pods start.
    async fn ensure(&self, pod: &PodSandbox, deadline: Instant) -> Result<(), Refusal> {
        let Some(request) = self.request(pod).map_err(Refusal)? else { return Ok(()) };
        let started = self.state.locked().started.contains(&pod.id);
        let result = if started {
            self.core.attach_started(request, deadline).await
        } else {
            self.core.attach(request, deadline).await
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) => Err(Refusal(error.chain())),
        }
    }

    /// Removes what no sandbox has any more, and attaches what runs without something that it asks for, until
    /// nothing is left to do.
    async fn repair(&self, pods: Vec<PodSandbox>) {
        let keep: BTreeSet<String> = pods.iter().map(|pod| pod.id.clone()).collect();
        if let Err(error) = self.core.gc(Door::Nri, keep).await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "not everything that the container runtime no longer has could be removed; retrying"
            );
        }
        let mut left: Vec<PodRequest> =
            pods.iter().filter_map(|pod| self.request(pod).ok().flatten()).collect();
        let mut delay = REPAIR_DELAYS.0;
        loop {
            let attempts = futures::stream::iter(left).map(|request| self.repair_one(request));
            left =
                attempts.buffer_unordered(SANDBOXES_AT_ONCE).filter_map(std::future::ready).collect().await;
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(REPAIR_DELAYS.1);
        }
    }

    /// Attaches a sandbox that runs, if it lacks something. Gives it back where that is to be tried again.
    async fn repair_one(&self, request: PodRequest) -> Option<PodRequest> {
        let netns = request.start.as_ref().map(|start| start.netns.clone()).unwrap_or_default();
        // A sandbox that has stopped is listed as well, until it is removed.
        if !netns.exists() || self.core.has_all(&request).await {
            return None;
        }
        let deadline = Instant::now() + self.core.config().request_deadline;
        match self.core.attach(request.clone(), deadline).await {
            Ok(attached) if attached.attachments.is_empty() => None,
            Ok(_) => {
                let who = pod_name(&request.pod);
                tracing::warn!(
                    "{who} started while the agent was not connected: its networks were attached late"
                );
                let message = "Its sandbox started while the node agent was not connected to the container \
                    runtime: its networks were attached late."
                    .to_owned();
                let reason = "NetworksAttachedLate";
                self.core.report().say(PodEvent { pod: request.pod.clone(), reason, message });
                None
            }
            Err(error) => {
                let who = pod_name(&request.pod);
                tracing::warn!(
                    "{who} is running without networks that it requests: {}; retrying",
                    error.chain()
                );
                Some(request)
            }
        }
    }

    async fn detach(&self, pod: &PodSandbox) -> Result<(), Refusal> {
        self.state.locked().started.remove(&pod.id);
        let sandbox = translate::sandbox(pod).map_err(Refusal)?;
        self.core.detach(sandbox, None).await.map_err(|error| Refusal(error.chain()))
    }
}

#[async_trait]
impl Plugin for NriDoor {
    fn connected(&self, runtime: &Runtime) {
        let leaks = runtime.refused_sandbox() == RefusedSandbox::Leaked;
        tracing::info!(%runtime, "connected to the container runtime through NRI");
        if leaks {
            tracing::warn!(%runtime, "this version of containerd keeps a record of each refused sandbox and \
                cannot restart with it, so containers are refused instead of sandboxes: update it to 2.2.6, \
                2.3.3 or later");
        }
        self.state.locked().runtime = runtime.clone();
        self.core.set_closed_door(None);
    }

    fn disconnected(&self) {
        tracing::warn!("lost the NRI connection: new pods get no networks until it is restored");
        if let Some(repairing) = self.state.locked().repairing.take() {
            repairing.abort();
        }
        self.core.set_closed_door(Some(NOT_CONNECTED.to_owned()));
    }

    fn synchronize(&self, pods: Vec<PodSandbox>, started: BTreeSet<String>) {
        self.state.locked().started = started;
        let door = self.clone();
        let task = tokio::spawn(async move { door.repair(pods).await });
        if let Some(earlier) = self.state.locked().repairing.replace(task.abort_handle()) {
            earlier.abort();
        }
    }

    async fn run_pod_sandbox(&self, pod: PodSandbox, deadline: Deadline) -> Result<(), Refusal> {
        let Err(refusal) = self.ensure(&pod, deadline).await else { return Ok(()) };
        let leaks = self.state.locked().runtime.refused_sandbox() == RefusedSandbox::Leaked;
        if leaks {
            tracing::warn!(
                sandbox = pod.id,
                "its containers are refused until it has its networks: {refusal}"
            );
            return Ok(());
        }
        Err(refusal)
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox, _: Deadline) -> Result<(), Refusal> {
        self.detach(&pod).await
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox, _: Deadline) -> Result<(), Refusal> {
        self.detach(&pod).await
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        _: String,
        deadline: Deadline,
    ) -> Result<Option<ContainerAdjustment>, Refusal> {
        self.ensure(&pod, deadline).await?;
        Ok(None)
    }
}
