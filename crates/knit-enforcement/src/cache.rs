//! What must be known at the next start if the API is away then: policies, their peers, and what pods of this
//! node are. In two files: pods of other nodes are many, and policies do not wait until those are written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_api::PolicyPeerSliceSpec;
use knit_ledger::{DurableFile, Source};
use knit_policy::model::{Alias, AliasEndpoint, Node, Protocol};
use knit_types::sync::Locked;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Notify;

use crate::local::{Facts, Remembered};

/// How long changes are gathered after a write before the next one.
const GATHER_INTERVAL: Duration = Duration::from_secs(2);

/// And how much longer for each pod of another node: their file is written as a whole, and what the whole
/// cluster does to its pods must not keep every disk busy.
const GATHER_PER_PEER: Duration = Duration::from_millis(2);

/// Slices by Network, then by name.
pub(crate) type Slices = BTreeMap<String, BTreeMap<String, PolicyPeerSliceSpec>>;

/// What is kept.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub(crate) struct PolicyCache {
    /// Policies by kind, then by namespace and name.
    pub(crate) policies: BTreeMap<String, BTreeMap<String, Value>>,
    /// Where earlier versions kept slices; they are in a file of their own.
    #[serde(skip_serializing)]
    pub(crate) slices: Slices,
    /// What pods of this node are.
    pub(crate) pods: Vec<(String, String, Facts)>,
    /// Nodes by name, if a policy asks for them.
    pub(crate) nodes: BTreeMap<String, KeptNode>,
    /// What cluster services lead to that some Network reaches over its uplink, by namespace and name.
    pub(crate) aliases: BTreeMap<String, Vec<KeptAlias>>,
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

/// One port of a cluster service.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct KeptAlias {
    address: IpAddr,
    protocol: String,
    port: u16,
    endpoints: Vec<(IpAddr, u16)>,
}

impl KeptAlias {
    pub(crate) fn of(alias: &Alias) -> Self {
        Self {
            address: alias.address,
            protocol: alias.protocol.as_str().to_owned(),
            port: alias.port,
            endpoints: alias.endpoints.iter().map(|end| (end.address, end.port)).collect(),
        }
    }

    pub(crate) fn alias(&self) -> Option<Alias> {
        let end = |(address, port): &(IpAddr, u16)| AliasEndpoint { address: *address, port: *port };
        Some(Alias {
            address: self.address,
            protocol: Protocol::parse(&self.protocol)?,
            port: self.port,
            endpoints: self.endpoints.iter().map(end).collect(),
        })
    }
}

/// The newest of it, and the files.
#[derive(Debug)]
pub(crate) struct Kept {
    file: Arc<DurableFile<PolicyCache>>,
    slices_file: Arc<DurableFile<Slices>>,
    /// What an earlier run left; none if it left nothing, so that nothing can be taken from it.
    pub(crate) before: Option<PolicyCache>,
    /// Whether its slices are in a file of their own.
    slices_apart: bool,
    now: Mutex<PolicyCache>,
    changed: Notify,
    slices: Mutex<Slices>,
    slices_changed: Notify,
}

impl Kept {
    /// Reads the files in a state directory.
    pub(crate) fn open(state_dir: &Path) -> Self {
        let file = DurableFile::new(state_dir.join("policy-cache.json"));
        let slices_file = DurableFile::new(state_dir.join("policy-peers.json"));
        let mut before: Option<PolicyCache> = read(&file).ok().flatten();
        let apart = read(&slices_file);
        let slices_apart = matches!(apart, Ok(Some(_)));
        match apart {
            Ok(None) => {}
            Ok(Some(slices)) => before.iter_mut().for_each(|before| before.slices.clone_from(&slices)),
            // Policies whose peers are not known would deny nobody.
            Err(Damaged) => before = None,
        }
        let mut now = before.clone().unwrap_or_default();
        let slices = std::mem::take(&mut now.slices);
        Self {
            file: Arc::new(file),
            slices_file: Arc::new(slices_file),
            before,
            slices_apart,
            now: Mutex::new(now),
            changed: Notify::new(),
            slices: Mutex::new(slices),
            slices_changed: Notify::new(),
        }
    }

    /// What pods of this node were when the last run ended.
    pub(crate) fn pods(&self) -> Vec<(String, String, Facts)> {
        self.before.as_ref().map(|before| before.pods.clone()).unwrap_or_default()
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

    /// Changes what is kept of slices.
    pub(crate) fn update_slices(&self, change: impl FnOnce(&mut Slices)) {
        change(&mut self.slices.locked());
        self.slices_changed.notify_one();
    }

    /// Pods of this node, or what is known of them, may have changed.
    pub(crate) fn pods_changed(&self) {
        self.changed.notify_one();
    }

    /// Writes it whenever it has changed, forever. Nothing is written before `complete` is done: what the
    /// last run left is whole, and what has arrived so far is not.
    pub(crate) async fn write(&self, remembered: &Remembered, complete: impl Future<Output = bool>) {
        if !complete.await {
            return;
        }
        let mut written = self.before.as_ref().filter(|_| self.slices_apart).map(|b| b.slices.clone());
        if written.is_none() {
            // The other file is about to be written without them.
            self.write_slices(&mut written).await;
        }
        tokio::join!(self.write_all_slices(written), self.write_all_else(remembered));
    }

    /// Everything but slices.
    async fn write_all_else(&self, remembered: &Remembered) {
        let mut written = self.before.clone().filter(|before| self.slices_apart || before.slices.is_empty());
        written.iter_mut().for_each(|written| written.slices.clear());
        loop {
            let mut now = self.now.locked().clone();
            // Without policies nobody asks what pods are, and pods that come and go cost no write.
            if now.is_without_policies() {
                now.pods.clear();
            } else {
                now.pods = remembered.all();
            }
            if written.as_ref() != Some(&now) && store(&self.file, &now).await {
                written = Some(now);
            }
            // The first change after a quiet time is written at once: an agent that is killed right behind it
            // starts with it, even if the API is away by then.
            tokio::time::sleep(GATHER_INTERVAL).await;
            self.changed.notified().await;
        }
    }

    async fn write_all_slices(&self, mut written: Option<Slices>) {
        loop {
            let peers = self.write_slices(&mut written).await;
            tokio::time::sleep(GATHER_INTERVAL + GATHER_PER_PEER * peers).await;
            self.slices_changed.notified().await;
        }
    }

    /// Writes slices if they are others than those; says how many pods they have.
    async fn write_slices(&self, written: &mut Option<Slices>) -> u32 {
        let now = self.slices.locked().clone();
        let peers: usize = now.values().flat_map(BTreeMap::values).map(|slice| slice.pods.len()).sum();
        if written.as_ref() != Some(&now) && store(&self.slices_file, &now).await {
            *written = Some(now);
        }
        u32::try_from(peers).unwrap_or(u32::MAX)
    }
}

/// A file cannot be read, nor what it was before.
struct Damaged;

/// What a file has, if it is there.
fn read<T: DeserializeOwned + Serialize>(file: &DurableFile<T>) -> Result<Option<T>, Damaged> {
    match file.load() {
        Ok(loaded) => {
            let Source::Previous { why } = &loaded.source else { return Ok(loaded.value) };
            tracing::warn!(%why, "the cache of policies is damaged; using the previous one");
            loaded.value.ok_or(Damaged).map(Some)
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot read the cache of policies; waiting for the API"
            );
            Err(Damaged)
        }
    }
}

/// Writes a file; says whether it could.
async fn store<T>(file: &Arc<DurableFile<T>>, content: &T) -> bool
where
    T: Clone + DeserializeOwned + Serialize + Send + 'static,
{
    let (file, content) = (Arc::clone(file), content.clone());
    match tokio::task::spawn_blocking(move || file.store(&content)).await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot write the cache of policies");
            false
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(pod: &str) -> PolicyPeerSliceSpec {
        let pod = json!({"namespace": "shop", "name": pod, "uid": "u", "created": 1, "addresses": []});
        serde_json::from_value(json!({"network": "default", "node": "b", "pods": [pod]})).expect("a slice")
    }

    #[tokio::test(start_paused = true)]
    async fn a_policy_is_on_disk_at_once_however_many_pods_of_other_nodes_there_are() {
        let dir = tempfile::tempdir().expect("a folder");
        let kept = Kept::open(dir.path());
        let many = PolicyPeerSliceSpec { pods: vec![slice("web").pods[0].clone(); 60_000], ..slice("web") };
        kept.update_slices(|slices| {
            slices.entry("default".to_owned()).or_default().insert("b".to_owned(), many);
        });
        let remembered = Remembered::default();
        let began = tokio::time::Instant::now();
        let write = kept.write(&remembered, async { true });
        tokio::pin!(write);
        let put = |name: &str| {
            let name = name.to_owned();
            kept.update(|cache| {
                cache.policies.entry("NetworkPolicy".to_owned()).or_default().insert(name, json!({}));
            });
        };
        let is_there = |name: &str| {
            let text = std::fs::read_to_string(dir.path().join("policy-cache.json")).unwrap_or_default();
            text.contains(name)
        };
        for name in ["shop/first", "shop/second"] {
            put(name);
            while !is_there(name) {
                let tick = tokio::time::sleep(Duration::from_millis(100));
                tokio::select! {
                    () = &mut write => unreachable!("it goes on"),
                    () = tick => {}
                }
            }
        }
        // By the clock that the intervals are of.
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let next = Kept::open(dir.path()).before.expect("it was kept");
        assert_eq!(next.slices["default"]["b"].pods.len(), 60_000);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_earlier_version_kept_in_one_file_is_kept_on_and_taken_apart() {
        let dir = tempfile::tempdir().expect("a folder");
        let old = json!({"policies": {"NetworkPolicy": {"shop/deny": {}}},
            "slices": {"default": {"b": slice("web")}}});
        DurableFile::<Value>::new(dir.path().join("policy-cache.json")).store(&old).expect("written");
        let kept = Kept::open(dir.path());
        assert_eq!(kept.before.as_ref().expect("it is read").slices["default"]["b"], slice("web"));
        let remembered = Remembered::default();
        let write = kept.write(&remembered, async { true });
        tokio::pin!(write);
        let text = || std::fs::read_to_string(dir.path().join("policy-cache.json")).expect("a file");
        while text().contains("slices") {
            tokio::select! {
                () = &mut write => unreachable!("it goes on"),
                () = tokio::time::sleep(Duration::from_millis(100)) => {}
            }
        }
        let next = Kept::open(dir.path()).before.expect("it was kept");
        assert_eq!(next.slices["default"]["b"], slice("web"));
        assert!(next.policies["NetworkPolicy"].contains_key("shop/deny"));
        // Without peers, policies would deny nobody: then nothing is taken from it.
        std::fs::write(dir.path().join("policy-peers.json"), "{").expect("damaged");
        let _ = std::fs::remove_file(dir.path().join("policy-peers.json.previous"));
        assert!(Kept::open(dir.path()).before.is_none());
    }
}
