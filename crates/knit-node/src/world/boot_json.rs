//! The cache of Networks as agents of earlier versions kept it: all of it in one file, which is read once and
//! then removed. An agent of an earlier version that comes back writes it again.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use knit_api::{AddressBlockSpec, Network, NetworkClass};
use knit_ledger::{DurableFile, Source};
use knit_model::AddressBlock;
use knit_types::NetworkName;
use serde::{Deserialize, Serialize};

use super::announced::AnnouncedView;
use super::{Before, BlockList, Labels, NodeView, World};

/// The part of a [`World`] that was kept.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub(super) struct BootCache {
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

/// Where it is in a state directory.
pub(super) fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("boot-cache.json")
}

/// What was kept; nothing where there is nothing or it cannot be read, which is logged.
pub(super) fn load(path: &Path) -> Option<BootCache> {
    match DurableFile::<BootCache>::new(path).load() {
        Ok(loaded) => {
            if let Source::Previous { why } = &loaded.source {
                tracing::warn!(path = %path.display(), %why, "the cache of Networks is damaged; using the \
                previous one");
            }
            loaded.value
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot read the cache of Networks that an earlier version kept"
            );
            None
        }
    }
}

/// Removes it, for good. The one before it goes first: alone it would count.
///
/// # Errors
/// When it is still there, or may come back.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let previous = path.with_extension("json.previous");
    for path in [previous.as_path(), path] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

// === impl BootCache ===

impl BootCache {
    /// A snapshot with what was kept. Nothing counts as synced.
    pub(super) fn into_world(self) -> World {
        let name = |meta: &kube::core::ObjectMeta| meta.name.clone().unwrap_or_default();
        let before = Before { kept: !self.networks.is_empty(), ..Before::default() };
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
}
