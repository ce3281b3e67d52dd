//! The service proxies of a node: one for each router, started by the node agent.
//!
//! A namespace's Services are served in its primary Network and nowhere else. Which one that is follows from Networks
//! and Namespaces; when it changes, every proxy reads its Services anew.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Namespace;
use knit_kernel::NetNs;
use knit_node::proxy::{ProxyError, Running, ServiceProxy};
use knit_objects::{Cache, Objects, Source};
use knit_proxy::engine::EngineConfig;
use knit_proxy::model::{NetworkName, NodeInfo};
use knit_proxy::objects;
use knit_proxy::view::{LocalTraffic, ViewConfig};
use knit_runtime::Network;
use kube::core::{Selector, SelectorExt as _};
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::command::proxy::beside::Found;

type Labels = BTreeMap<String, String>;
/// The primary Network of each namespace that has another than the default one.
type Primaries = BTreeMap<String, String>;

/// How long Networks and Namespaces are waited for before Services are read.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts service proxies with nftables.
pub struct Proxies {
    node: NodeInfo,
    source: Source,
    /// Serve the default Network's Services even where kube-proxy is at work.
    regardless: bool,
    shared: OnceCell<Arc<Shared>>,
}

/// Services that another proxy serves.
#[derive(Debug)]
struct LeftToOthers;

/// What all proxies of a node read together.
struct Shared {
    objects: Objects,
    networks: Cache<knit_api::Network>,
    namespaces: Cache<Labels>,
}

/// A proxy and the task that feeds it.
#[derive(Debug)]
struct Fed {
    proxy: Arc<knit_proxy_nft::Running>,
    feeding: JoinHandle<()>,
}

// === impl Proxies ===

impl Proxies {
    /// For this node, with objects from this source.
    pub fn new(node: &str, addresses: Vec<IpAddr>, source: Source) -> Self {
        let node = NodeInfo { addresses, ..NodeInfo::new(node) };
        Self { node, source, regardless: false, shared: OnceCell::new() }
    }

    /// Whether the default Network's Services are served even where kube-proxy is at work.
    pub fn beside_others(self, regardless: bool) -> Self {
        Self { regardless, ..self }
    }

    async fn shared(&self) -> knit_objects::Result<Arc<Shared>> {
        let open = || async {
            let objects = Objects::open(self.source.clone()).await?;
            let networks = objects.watch::<knit_api::Network>().cache()?;
            let namespaces = objects.watch::<Namespace>();
            let namespaces = namespaces.map(|n| Some(n.metadata.labels.unwrap_or_default())).cache()?;
            Ok(Arc::new(Shared { objects, networks, namespaces }))
        };
        self.shared.get_or_try_init(open).await.cloned()
    }
}

#[async_trait]
impl ServiceProxy for Proxies {
    async fn start(
        &self,
        router: Option<PathBuf>,
        network: &Network,
    ) -> Result<Box<dyn Running>, ProxyError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| ProxyError {
            network: network.name.clone(),
            source,
        };
        if router.is_none() && !self.regardless {
            let found = Found::look().map_err(|error| failed(error.into()))?;
            if !found.is_empty() {
                tracing::info!(
                    "kube-proxy is at work here ({found}): the default Network's Services are left to it; --services knit takes them"
                );
                return Ok(Box::new(LeftToOthers));
            }
        }
        let shared = self.shared().await.map_err(|error| failed(error.into()))?;
        let netns = router.map(NetNs::open).transpose().map_err(|error| failed(error.into()))?;
        let view = ViewConfig {
            network: network.name.as_str().into(),
            local_traffic: LocalTraffic::Sources(network.subnets.iter().map(|subnet| subnet.cidr).collect()),
            exempt_vips: network.cluster_service_ips.clone(),
            ..ViewConfig::default()
        };
        let options = knit_proxy_nft::Options {
            engine: EngineConfig { view, ..EngineConfig::default() },
            ..knit_proxy_nft::Options::default()
        };
        let started = knit_proxy_nft::start(netns.as_ref(), self.node.clone(), options);
        let proxy = Arc::new(started.map_err(|error| failed(error.into()))?);
        let feeding = tokio::spawn(feed(shared, self.node.clone(), Arc::clone(&proxy)));
        Ok(Box::new(Fed { proxy, feeding }))
    }
}

impl Running for Fed {}

impl Running for LeftToOthers {}

impl Drop for Fed {
    fn drop(&mut self) {
        self.feeding.abort();
        tracing::debug!(proxy = ?self.proxy, "a service proxy ends");
    }
}

/// Reads Services for a proxy, and anew whenever namespaces move between Networks.
async fn feed(shared: Arc<Shared>, node: NodeInfo, proxy: Arc<knit_proxy_nft::Running>) {
    let mut networks = shared.networks.changes();
    let mut namespaces = shared.namespaces.changes();
    let end = Instant::now() + PATIENCE;
    for synced in [shared.networks.wait_synced(end).await, shared.namespaces.wait_synced(end).await] {
        if let Err(error) = synced {
            tracing::warn!(%error, "Services wait for Networks and Namespaces");
        }
    }
    loop {
        networks.mark_unchanged();
        namespaces.mark_unchanged();
        let primaries = shared.primaries();
        let known = primaries.clone();
        let network_of = move |namespace: &str| -> NetworkName {
            known.get(namespace).map_or_else(NetworkName::default, |network| network.as_str().into())
        };
        let opened = objects::Source::new(node.clone()).networks(network_of).open(&shared.objects);
        let reading = match opened {
            Ok(reading) => reading,
            Err(error) => {
                tracing::error!(%error, "Services cannot be read");
                return;
            }
        };
        let moved = async {
            loop {
                let changed = tokio::select! {
                    changed = networks.changed() => changed,
                    changed = namespaces.changed() => changed,
                };
                if changed.is_err() {
                    return false;
                }
                if shared.primaries() != primaries {
                    return true;
                }
            }
        };
        tokio::select! {
            _ = reading.send_to(proxy.handle()) => return,
            again = moved => if !again { return },
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Where several Networks select a namespace, the oldest has it, as the controller decides.
    fn primaries(&self) -> Primaries {
        let mut selecting = Vec::new();
        self.networks.for_each(|key, network| {
            let selector = network.spec.primary_for.clone().and_then(|s| Selector::try_from(s).ok());
            if let Some(selector) = selector {
                let since = network.metadata.creation_timestamp.clone();
                selecting.push((since, key.name().to_owned(), selector));
            }
        });
        selecting.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        let mut primaries = Primaries::new();
        self.namespaces.for_each(|key, labels| {
            if let Some((_, network, _)) =
                selecting.iter().find(|(_, _, selector)| selector.matches(&**labels))
            {
                primaries.insert(key.name().to_owned(), network.clone());
            }
        });
        primaries
    }
}
