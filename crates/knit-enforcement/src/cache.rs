//! What must be known at the next start if the API is away then: policies, their peers, and what pods of this
//! node are.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_api::PolicyPeerSliceSpec;
use knit_ledger::{DurableFile, Source};
use knit_policy::model::Node;
use knit_types::sync::Locked;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Notify;

use crate::local::{Facts, Remembered};

/// How long changes are gathered after a write before the next one.
const GATHER_INTERVAL: Duration = Duration::from_secs(2);

/// And how much longer for each pod of another node: the file is written as a whole, and what the whole
/// cluster does to its pods must not keep every disk busy.
const GATHER_PER_PEER: Duration = Duration::from_millis(2);

/// What is kept.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub(crate) struct PolicyCache {
    /// Policies by kind, then by namespace and name.
    pub(crate) policies: BTreeMap<String, BTreeMap<String, Value>>,
    /// Slices by Network, then by name.
    pub(crate) slices: BTreeMap<String, BTreeMap<String, PolicyPeerSliceSpec>>,
    /// What pods of this node are.
    pub(crate) pods: Vec<(String, String, Facts)>,
    /// Nodes by name, if a policy asks for them.
    pub(crate) nodes: BTreeMap<String, KeptNode>,
}

impl PolicyCache {
    fn is_without_policies(&self) -> bool {
        self.policies.values().all(BTreeMap::is_empty)
    }
}

/// A node as policies see it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(crate) struct KeptNode {
    labels: BTreeMap<String, String>,
    addresses: Vec<IpAddr>,
}

impl KeptNode {
    pub(crate) fn of(node: &Node) -> Self {
        let labels = node.labels.iter().map(|(k, v)| (k.as_ref().to_owned(), v.as_ref().to_owned()));
        Self { labels: labels.collect(), addresses: node.addresses.to_vec() }
    }

    pub(crate) fn named(&self, name: &str) -> Node {
        let labels = self.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        Node { name: name.into(), labels: labels.collect(), addresses: self.addresses.clone().into() }
    }
}

/// The newest of it, and the file.
#[derive(Debug)]
pub(crate) struct Kept {
    file: Arc<DurableFile<PolicyCache>>,
    /// What an earlier run left; none if it left nothing, so that nothing can be taken from it.
    pub(crate) before: Option<PolicyCache>,
    now: Mutex<PolicyCache>,
    changed: Notify,
}

impl Kept {
    /// Reads the file in a state directory.
    pub(crate) fn open(state_dir: &Path) -> Self {
        let file = DurableFile::new(state_dir.join("policy-cache.json"));
        let before = match file.load() {
            Ok(loaded) => {
                if let Source::Previous { why } = &loaded.source {
                    tracing::warn!(%why, "the cache of policies is damaged; using the previous one");
                }
                loaded.value
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot read the cache of policies; waiting for the API"
                );
                None
            }
        };
        let now = Mutex::new(before.clone().unwrap_or_default());
        Self { file: Arc::new(file), before, now, changed: Notify::new() }
    }

    /// What pods of this node were when the last run ended.
    pub(crate) fn pods(&self) -> BTreeMap<(String, String), Facts> {
        let pods = self.before.iter().flat_map(|before| before.pods.iter().cloned());
        pods.map(|(namespace, name, facts)| ((namespace, name), facts)).collect()
    }

    /// Whether an earlier run left a list of policies, and none was in it.
    pub(crate) fn had_no_policies(&self) -> bool {
        self.before.as_ref().is_some_and(PolicyCache::is_without_policies)
    }

    /// Changes what is kept.
    pub(crate) fn update(&self, change: impl FnOnce(&mut PolicyCache)) {
        change(&mut self.now.locked());
        self.changed.notify_one();
    }

    /// Pods of this node, or what is known of them, may have changed.
    pub(crate) fn pods_changed(&self) {
        self.changed.notify_one();
    }

    /// Writes it whenever it has changed, for ever. Nothing is written before `complete` is done: what the
    /// last run left is whole, and what has arrived so far is not.
    pub(crate) async fn write(&self, remembered: &Remembered, complete: impl Future<Output = bool>) {
        if !complete.await {
            return;
        }
        let mut written = self.before.clone();
        loop {
            let mut now = self.now.locked().clone();
            // Without policies nobody asks what pods are, and pods that come and go cost no write.
            if now.is_without_policies() {
                now.pods.clear();
            } else {
                let pods = remembered.all().into_iter();
                now.pods = pods.map(|((namespace, name), facts)| (namespace, name, facts)).collect();
            }
            let slices = now.slices.values().flat_map(BTreeMap::values);
            let peers =
                u32::try_from(slices.map(|slice| slice.pods.len()).sum::<usize>()).unwrap_or(u32::MAX);
            if written.as_ref() != Some(&now) {
                let (file, content) = (Arc::clone(&self.file), now.clone());
                match tokio::task::spawn_blocking(move || file.store(&content)).await {
                    Ok(Ok(())) => written = Some(now),
                    Ok(Err(error)) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot write the cache of policies"
                    ),
                    Err(_) => return,
                }
            }
            // The first change after a quiet time is written at once: an agent that is killed right behind it
            // starts with it, even if the API is away by then.
            tokio::time::sleep(GATHER_INTERVAL + GATHER_PER_PEER * peers).await;
            self.changed.notified().await;
        }
    }
}
