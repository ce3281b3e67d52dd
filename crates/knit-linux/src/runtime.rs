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
    NetworkName, NetworkUsage, Pod, Reason, Result, Runtime, SandboxId, Status, Survey, feature,
};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

use crate::attach::attach;
use crate::config::Config;
use crate::detach::{collect_garbage, detach};
use crate::fail::internal;
use crate::inspect::{check, list, status};
use crate::networks::Networks;
use crate::remove::remove_network;
use crate::routers::LinuxRouters;
use crate::setup::setup_network;
use crate::survey::survey;
use crate::usage::usage;
use crate::watchers::Watchers;

/// A bug in it, which must not take the agent along.
const FAILED_INSIDE: &str = "internal error in the runtime; check the agent's log";

/// The reference runtime.
#[derive(Clone, Debug)]
pub struct LinuxRuntime {
    networks: Arc<Networks>,
    watchers: Arc<Watchers>,
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
        let networks = Arc::new(Networks::new(config)?);
        Ok(Self { networks, watchers: Arc::default(), routers })
    }

    /// Work that waits for the kernel. On a worker of a runtime with several it is done right there, while
    /// another thread looks after the other tasks: a pod would wait for two wake-ups more, there and back.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Networks, &Watchers) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread {
            let done = catch_unwind(AssertUnwindSafe(|| {
                tokio::task::block_in_place(|| work(&self.networks, &self.watchers))
            }));
            // What was thrown has been printed.
            return done.unwrap_or_else(|_| Err(Error::new(Reason::Internal, FAILED_INSIDE)));
        }
        let (networks, watchers) = (Arc::clone(&self.networks), Arc::clone(&self.watchers));
        let done = tokio::task::spawn_blocking(move || work(&networks, &watchers)).await;
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
            features: features.into_iter().chain(feature::topologies()).map(str::to_owned).collect(),
        })
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        let network = network.clone();
        self.blocking(move |networks, _| setup_network(networks, &network)).await
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        let name = name.to_owned();
        self.blocking(move |networks, _| remove_network(networks, &name)).await
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        let request = request.clone();
        self.blocking(move |networks, watchers| attach(networks, watchers, &request)).await
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        let (pod, interface) = (pod.clone(), interface.cloned());
        self.blocking(move |networks, watchers| detach(networks, watchers, &pod, interface.as_ref())).await
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let (pod, netns, interface) = (pod.clone(), netns.map(Path::to_owned), interface.cloned());
        self.blocking(move |networks, _| check(networks, &pod, netns.as_deref(), interface.as_ref())).await
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        let sandbox = sandbox.cloned();
        self.blocking(move |networks, _| list(networks, sandbox.as_ref())).await
    }

    /// Changes that are made through this runtime. An interface that goes with its pod's namespace is told
    /// when it is detached or collected.
    async fn watch(&self) -> Result<Changes> {
        // Listen first: what happens while the list is made is told twice rather than not at all.
        let changes = BroadcastStream::new(self.watchers.subscribe());
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
        self.blocking(move |networks, watchers| collect_garbage(networks, watchers, &keep)).await
    }

    async fn status(&self) -> Result<Status> {
        self.blocking(|networks, _| status(networks)).await
    }

    async fn survey(&self) -> Result<Survey> {
        self.blocking(|networks, _| Ok(survey(networks)?.0)).await
    }

    async fn survey_and_list(&self) -> Result<(Survey, Option<Vec<Attachment>>)> {
        self.blocking(|networks, _| survey(networks)).await
    }

    async fn usage(&self) -> Result<Vec<NetworkUsage>> {
        self.blocking(|networks, _| usage(networks)).await
    }

    async fn disturbed(&self) -> Disturbance {
        self.networks.node.senses.disturbed().await
    }
}
