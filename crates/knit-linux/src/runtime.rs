//! The runtime as its callers see it. Work that blocks is done on threads that may.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream;
use knit_runtime::routers::Routers;
use knit_runtime::{
    AttachRequest, Attachment, Change, Changes, Disturbance, Error, Info, InterfaceName, Network,
    NetworkUsage, Pod, Reason, Result, Runtime, SandboxId, Status, Survey, feature,
};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

use crate::config::Config;
use crate::core::Core;
use crate::fail::internal;
use crate::routers::LinuxRouters;

/// A bug in it, which must not take the agent along.
const FAILED_INSIDE: &str = "internal error in the runtime; check the agent's log";

/// The reference runtime.
#[derive(Clone, Debug)]
pub struct LinuxRuntime {
    core: Arc<Core>,
    routers: Arc<LinuxRouters>,
}

impl LinuxRuntime {
    /// Its name, as NetworkClasses name it.
    pub const NAME: &str = "knit.dev/linux";

    /// A runtime for this node. It takes over what an earlier one made.
    ///
    /// # Errors
    /// When the node's network namespace cannot be used.
    pub fn new(config: Config) -> Result<Self> {
        let node = config.namespace.try_clone().map_err(internal("open the node's network namespace"))?;
        let routers = Arc::new(LinuxRouters { node, vxlan_port: config.vxlan_port });
        Core::new(config).map(|core| Self { core: Arc::new(core), routers })
    }

    /// Work that waits for the kernel. On a worker of a runtime with several it is done right there, while
    /// another thread looks after the other tasks: a pod would wait for two wake-ups more, there and back.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Core) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread {
            let done = catch_unwind(AssertUnwindSafe(|| tokio::task::block_in_place(|| work(&self.core))));
            // What was thrown has been printed.
            return done.unwrap_or_else(|_| Err(Error::new(Reason::Internal, FAILED_INSIDE)));
        }
        let core = Arc::clone(&self.core);
        let done = tokio::task::spawn_blocking(move || work(&core)).await;
        done.map_err(|error| Error::new(Reason::Internal, FAILED_INSIDE).because(error))?
    }
}

#[async_trait]
impl Runtime for LinuxRuntime {
    fn routers(&self) -> Option<Arc<dyn Routers>> {
        Some(Arc::clone(&self.routers) as Arc<dyn Routers>)
    }

    async fn info(&self) -> Result<Info> {
        let features = [
            feature::NETWORK_SETUP,
            feature::LAYER2,
            feature::LAYER3,
            feature::UNDERLAY,
            feature::IPV4,
            feature::IPV6,
            feature::STATIC_ADDRESS,
            feature::STATIC_MAC,
            feature::MTU,
            feature::ROUTES,
            feature::HOST_PORTS,
            feature::WATCH,
            feature::COLLECT_GARBAGE,
        ];
        Ok(Info {
            name: Self::NAME.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            features: features.map(str::to_owned).into(),
        })
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        let network = network.clone();
        self.blocking(move |core| core.setup_network(&network)).await
    }

    async fn remove_network(&self, name: &str) -> Result<()> {
        let name = name.to_owned();
        self.blocking(move |core| core.remove_network(&name)).await
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        let request = request.clone();
        self.blocking(move |core| core.attach(&request)).await
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        let (pod, interface) = (pod.clone(), interface.cloned());
        self.blocking(move |core| core.detach(&pod, interface.as_ref())).await
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let (pod, netns, interface) = (pod.clone(), netns.map(Path::to_owned), interface.cloned());
        self.blocking(move |core| core.check(&pod, netns.as_deref(), interface.as_ref())).await
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        let sandbox = sandbox.cloned();
        self.blocking(move |core| core.list(sandbox.as_ref())).await
    }

    /// Changes that are made through this runtime. An interface that goes with its pod's namespace is told
    /// when it is detached or collected.
    async fn watch(&self) -> Result<Changes> {
        // Listen first: what happens while the list is made is told twice rather than not at all.
        let changes = BroadcastStream::new(self.core.changes.subscribe());
        let there = self.list(None).await?;
        let before = there.into_iter().map(|attachment| Ok(Change::Added(attachment)));
        let before = before.chain(std::iter::once(Ok(Change::Synced)));
        let after = changes.map(|change| {
            change.map_err(|BroadcastStreamRecvError::Lagged(missed)| {
                let message = format!("{missed} changes arrived faster than they were read: watch again");
                Error::new(Reason::Internal, message)
            })
        });
        Ok(stream::iter(before.collect::<Vec<_>>()).chain(after).boxed())
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        let keep = keep.to_vec();
        self.blocking(move |core| core.collect_garbage(&keep)).await
    }

    async fn status(&self) -> Result<Status> {
        self.blocking(Core::status).await
    }

    async fn survey(&self) -> Result<Survey> {
        self.blocking(|core| Ok(core.survey()?.0)).await
    }

    async fn survey_and_list(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        self.blocking(Core::survey).await
    }

    async fn usage(&self) -> Result<Vec<NetworkUsage>> {
        self.blocking(Core::usage).await
    }

    async fn disturbed(&self) -> Disturbance {
        self.core.node.senses.disturbed().await
    }
}
