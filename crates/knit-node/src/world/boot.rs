//! What an agent must know to give pods their networks while the API is away: kept on disk, and read at
//! start.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;
use knit_api::{AddressBlockSpec, Network, NetworkClass};
use knit_ledger::{DurableError, DurableFile, Source};
use knit_model::AddressBlock;
use knit_types::NetworkName;
use serde::{Deserialize, Serialize};

use super::announced::AnnouncedView;
use super::{Before, BlockList, Labels, NodeView, World};

/// The part of a [`World`] that is kept on disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct BootCache {
    networks: Vec<Network>,
    classes: Vec<NetworkClass>,
    namespaces: BTreeMap<String, Labels>,
    blocks: BTreeMap<String, AddressBlockSpec>,
    /// The Networks of which all blocks are there; nothing if all blocks are there.
    #[serde(skip_serializing_if = "Option::is_none")]
    whole: Option<Vec<NetworkName>>,
    nodes: BTreeMap<String, NodeView>,
    service_cidrs: BTreeMap<String, Vec<IpNet>>,
    services: Vec<(String, String, Vec<IpAddr>)>,
    announced: Vec<(String, String, AnnouncedView)>,
}

/// The file.
#[derive(Debug)]
pub struct BootFile {
    file: DurableFile<BootCache>,
}

// === impl BootCache ===

impl BootCache {
    /// What is kept of a snapshot.
    #[must_use]
    pub fn of(world: &World) -> Self {
        Self {
            networks: world.networks.values().map(|n| n.object().clone()).collect(),
            classes: world.classes.values().map(|c| (**c).clone()).collect(),
            namespaces: world.namespaces.iter().map(|(k, v)| (k.clone(), (**v).clone())).collect(),
            blocks: world.blocks.iter().map(|(k, v)| (k.clone(), v.spec())).collect(),
            whole: world.block_lists.as_ref().map(|lists| {
                lists.iter().filter(|(_, list)| list.whole).map(|(name, _)| name.clone()).collect()
            }),
            nodes: world.nodes.iter().map(|(k, v)| (k.clone(), (**v).clone())).collect(),
            service_cidrs: (*world.service_cidrs).clone(),
            services: world
                .services
                .iter()
                .map(|((namespace, name), ips)| (namespace.clone(), name.clone(), ips.clone()))
                .collect(),
            announced: world
                .announced
                .iter()
                .map(|((namespace, name), view)| (namespace.clone(), name.clone(), (**view).clone()))
                .collect(),
        }
    }

    /// A snapshot with what was kept. Nothing counts as synced.
    #[must_use]
    pub fn into_world(self) -> World {
        let name = |meta: &kube::core::ObjectMeta| meta.name.clone().unwrap_or_default();
        let before = Before { kept: !self.is_empty(), ..Before::default() };
        // All of them were read before they were kept.
        let networks = self.networks.into_iter().filter_map(|n| knit_model::Network::try_from(n).ok());
        let kept = BlockList { kept: true, ..BlockList::default() };
        World {
            before,
            block_lists: self.whole.map(|names| Arc::new(names.into_iter().map(|n| (n, kept)).collect())),
            networks: Arc::new(networks.map(|n| (n.name().clone(), Arc::new(n))).collect()),
            classes: Arc::new(self.classes.into_iter().map(|c| (name(&c.metadata), Arc::new(c))).collect()),
            namespaces: Arc::new(self.namespaces.into_iter().map(|(k, v)| (k, Arc::new(v))).collect()),
            blocks: Arc::new(
                self.blocks
                    .into_iter()
                    .filter_map(|(name, spec)| Some((name, Arc::new(AddressBlock::of(&spec).ok()?))))
                    .collect(),
            ),
            nodes: Arc::new(self.nodes.into_iter().map(|(k, v)| (k, Arc::new(v))).collect()),
            service_cidrs: Arc::new(self.service_cidrs),
            services: Arc::new(self.services.into_iter().map(|(ns, n, ips)| ((ns, n), ips)).collect()),
            announced: Arc::new(
                self.announced.into_iter().map(|(ns, n, view)| ((ns, n), Arc::new(view))).collect(),
            ),
            ..World::default()
        }
    }

    /// Whether there is anything in it that pods can be attached to.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }
}

// === impl BootFile ===

impl BootFile {
    /// The file in a state directory.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self { file: DurableFile::new(state_dir.join("boot-cache.json")) }
    }

    /// What was kept; nothing where there is nothing or it cannot be read, which is logged.
    #[must_use]
    pub fn load(&self) -> BootCache {
        match self.file.load() {
            Ok(loaded) => {
                if let Source::Previous { why } = &loaded.source {
                    tracing::warn!(path = %self.file.path().display(), %why, "the cache of Networks is \
                    damaged; using the previous one");
                }
                loaded.value.unwrap_or_default()
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot read the cache of Networks; waiting for the API"
                );
                BootCache::default()
            }
        }
    }

    /// Keeps a snapshot.
    ///
    /// # Errors
    /// When it cannot be written; what was kept before is still there.
    pub fn store(&self, cache: &BootCache) -> Result<(), DurableError> {
        self.file.store(cache)
    }
}
