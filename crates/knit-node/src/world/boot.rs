//! What an agent must know to give pods their networks while the API is away: kept on disk, and read at
//! start. It is a log of changes, so that one change of the cluster is one record, and not all of it again.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use knit_api::{AddressBlockSpec, NetworkClass};
use knit_ledger::{Batch, Ledger, LedgerError, Options, Record, Recovery};
use knit_model::{AddressBlock, Network};
use knit_types::NetworkName;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::announced::AnnouncedView;
use super::boot_json::{self, BootCache};
use super::{Before, BlockList, Labels, NodeView, World};

/// The file's name in a state directory.
const FILE: &str = "boot-cache.log";
/// How many changes are written at once. More are written in several steps, and what is kept only counts once
/// the last of them is.
const MOST_AT_ONCE: usize = 1024;
/// The key of the record that says that all others are there.
const COMPLETE: &str = "complete";

/// One thing that is kept.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct BootRecord {
    key: String,
    item: Item,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
enum Item {
    Network(#[serde(with = "network")] Arc<Network>),
    Class(#[serde(with = "shared")] Arc<NetworkClass>),
    Namespace(#[serde(with = "shared")] Arc<Labels>),
    Block {
        #[serde(flatten)]
        spec: AddressBlockSpec,
        /// The controller wants it back.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reclaim: Option<String>,
    },
    Node(#[serde(with = "shared")] Arc<NodeView>),
    ServiceCidr(Vec<IpNet>),
    Service(Vec<IpAddr>),
    Announced(#[serde(with = "shared")] Arc<AnnouncedView>),
    /// Everything is there.
    Complete {
        /// The Networks of which all blocks are there; nothing if all blocks are there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        whole: Option<Vec<NetworkName>>,
    },
}

/// What is on disk of one world, and the file that it is in.
#[derive(Debug)]
pub struct BootLog {
    ledger: Ledger<BootRecord>,
    /// What the file has, to find out what has changed.
    base: World,
    complete: Option<Option<Vec<NetworkName>>>,
    /// A write failed: the file may have more or less than `base`.
    is_doubtful: bool,
    /// What an agent of an earlier version left, which counts as long as it is there.
    earlier: Option<PathBuf>,
}

/// A log with what it had.
#[derive(Debug)]
pub struct OpenedLog {
    /// The log.
    pub log: BootLog,
    /// What was known when it was written last; nothing of it counts as synced.
    pub world: World,
    /// What else may be read at the next start, if this agent writes nothing: what an agent of an earlier
    /// version left is newer, as long as it is there.
    pub other: Option<World>,
}

// === impl BootRecord ===

impl Record for BootRecord {
    fn key(&self) -> &str {
        &self.key
    }

    fn key_in(record: &Value) -> Option<String> {
        record.get("key").and_then(Value::as_str).map(str::to_owned)
    }
}

// === impl BootLog ===

impl BootLog {
    /// Opens the log of a state directory, and makes it if it is not there.
    ///
    /// # Errors
    /// When it cannot be read or made, or another agent has it.
    pub fn open(state_dir: &Path) -> Result<OpenedLog, LedgerError> {
        let options = Options { compact_at: 256 << 10, compact_factor: 2, sync: true };
        let opened = Ledger::open_with(knit_ledger::RealFs, state_dir.join(FILE), options)?;
        let (mut ledger, recovery) = (opened.ledger, opened.recovery);
        // A part of what was known is no state that ever was: nothing of it may be believed.
        let is_damaged =
            matches!(recovery, Recovery::SetAside { .. }) || ledger.unreadable().next().is_some();
        if is_damaged {
            tracing::warn!(path = %ledger.path().display(), ?recovery,
                "the cache of Networks is damaged, or was written by another version: waiting for the API");
            wipe(&mut ledger)?;
        }
        let (base, complete) = world_of(ledger.records());
        let world = if complete.is_some() { base.clone() } else { World::default() };
        let earlier = boot_json::path(state_dir);
        let found = boot_json::load(&earlier);
        let earlier = earlier.exists().then_some(earlier);
        let log = Self { ledger, base, complete, is_doubtful: false, earlier };
        // An agent of this version removes that file: if it is there, it was written after the log.
        match found.map(BootCache::into_world) {
            Some(newer) => Ok(OpenedLog { log, world: newer, other: Some(world) }),
            None => Ok(OpenedLog { log, world, other: None }),
        }
    }

    /// What an agent keeps on disk, without opening it: for those who only want to look. Nothing if there is
    /// nothing.
    #[must_use]
    pub fn read(state_dir: &Path) -> Option<World> {
        if let Some(earlier) = boot_json::load(&boot_json::path(state_dir)) {
            return Some(earlier.into_world());
        }
        let (content, _) = knit_ledger::read::<BootRecord>(&state_dir.join(FILE)).ok()?;
        let (world, complete) = world_of(content.records.values());
        complete.map(|_| world)
    }

    /// Keeps a snapshot: what is different from the last one is written. How many changes that were.
    ///
    /// # Errors
    /// When it cannot be written. Then a part of it may be on disk, which counts only if nothing more was to
    /// be written.
    pub fn store(&mut self, world: &World) -> Result<usize, LedgerError> {
        let whole = world.block_lists.as_ref().map(|lists| {
            lists
                .iter()
                .filter(|(_, list)| list.whole)
                .map(|(name, _)| name.clone())
                .collect::<Vec<NetworkName>>()
        });
        if std::mem::replace(&mut self.is_doubtful, true) {
            (self.base, self.complete) = world_of(self.ledger.records());
        }
        let mut changes = Changes::default();
        self.compare(world, &mut changes);
        let complete = (self.complete.as_ref() != Some(&whole))
            .then(|| BootRecord { key: COMPLETE.to_owned(), item: Item::Complete { whole: whole.clone() } });
        let count = changes.0.len() + usize::from(complete.is_some());
        if count > MOST_AT_ONCE {
            self.ledger.commit(Batch::new().remove(COMPLETE))?;
            let mut all = changes.0.into_iter().peekable();
            while all.peek().is_some() {
                self.ledger.commit(batch(all.by_ref().take(MOST_AT_ONCE)))?;
            }
            let item = Item::Complete { whole: whole.clone() };
            self.ledger.put(BootRecord { key: COMPLETE.to_owned(), item })?;
        } else {
            let complete = complete.map(|record| (record.key.clone(), Some(record.item)));
            self.ledger.commit(batch(changes.0.into_iter().chain(complete)))?;
        }
        self.base = kept_of(world);
        (self.complete, self.is_doubtful) = (Some(whole), false);
        if let Some(earlier) = &self.earlier {
            boot_json::remove(earlier).map_err(|source| LedgerError::Io {
                path: earlier.clone(),
                doing: "removing what an earlier version kept",
                source,
            })?;
            self.earlier = None;
        }
        Ok(count)
    }

    /// What is different from what the file has.
    fn compare(&self, world: &World, changes: &mut Changes) {
        let base = &self.base;
        changes.of("network", &base.networks, &world.networks, ToString::to_string, |v| {
            Item::Network(Arc::clone(v))
        });
        changes.of("class", &base.classes, &world.classes, Clone::clone, |v| Item::Class(Arc::clone(v)));
        changes.of("namespace", &base.namespaces, &world.namespaces, Clone::clone, |v| {
            Item::Namespace(Arc::clone(v))
        });
        changes.of("node", &base.nodes, &world.nodes, Clone::clone, |v| Item::Node(Arc::clone(v)));
        changes.of("service-cidr", &base.service_cidrs, &world.service_cidrs, Clone::clone, |v| {
            Item::ServiceCidr(v.clone())
        });
        let pair = |(namespace, name): &(String, String)| format!("{namespace}/{name}");
        changes.of("service", &base.services, &world.services, pair, |v| Item::Service(v.clone()));
        changes.of("announced", &base.announced, &world.announced, pair, |v| Item::Announced(Arc::clone(v)));
        changes.of("block", &base.blocks, &world.blocks, Clone::clone, |v| Item::Block {
            spec: v.spec(),
            reclaim: None,
        });
        if !Arc::ptr_eq(&base.reclaimed, &world.reclaimed) {
            let names = base.reclaimed.keys().chain(world.reclaimed.keys());
            let other = |name: &&String| base.reclaimed.get(*name) != world.reclaimed.get(*name);
            for name in names.filter(other) {
                if let Some(block) = world.blocks.get(name) {
                    let item = Item::Block { spec: block.spec(), reclaim: None };
                    changes.0.insert(format!("block/{name}"), Some(item));
                }
            }
        }
        for (name, value) in &*world.reclaimed {
            if let Some(Some(Item::Block { reclaim, .. })) = changes.0.get_mut(&format!("block/{name}")) {
                *reclaim = Some(value.clone());
            }
        }
    }
}

/// Changes by key.
#[derive(Debug, Default)]
struct Changes(BTreeMap<String, Option<Item>>);

impl Changes {
    /// What is different in one map. Maps that nobody touched are the same one.
    fn of<K: Ord, V: PartialEq>(
        &mut self,
        kind: &str,
        before: &Arc<BTreeMap<K, V>>,
        now: &Arc<BTreeMap<K, V>>,
        name: impl Fn(&K) -> String,
        item: impl Fn(&V) -> Item,
    ) {
        if Arc::ptr_eq(before, now) {
            return;
        }
        let mut old = before.iter().peekable();
        for (key, value) in &**now {
            while let Some((gone, _)) = old.next_if(|(known, _)| *known < key) {
                self.0.insert(format!("{kind}/{}", name(gone)), None);
            }
            let same = old.next_if(|(known, _)| *known == key);
            if same.is_none_or(|(_, known)| known != value) {
                self.0.insert(format!("{kind}/{}", name(key)), Some(item(value)));
            }
        }
        for (gone, _) in old {
            self.0.insert(format!("{kind}/{}", name(gone)), None);
        }
    }
}

fn batch(changes: impl Iterator<Item = (String, Option<Item>)>) -> Batch<BootRecord> {
    changes.fold(Batch::new(), |batch, (key, item)| match item {
        Some(item) => batch.put(BootRecord { key, item }),
        None => batch.remove(key),
    })
}

fn wipe(ledger: &mut Ledger<BootRecord>) -> Result<(), LedgerError> {
    let unreadable = ledger.unreadable().map(|record| record.key().to_owned());
    let keys: Vec<String> = ledger.records().map(|record| record.key.clone()).chain(unreadable).collect();
    // What says that all is there goes first, and with it all the rest.
    ledger.remove(COMPLETE)?;
    keys.chunks(MOST_AT_ONCE).try_for_each(|keys| {
        ledger.commit(keys.iter().fold(Batch::new(), |batch, key| batch.remove(key.as_str())))
    })
}

/// The part of a snapshot that is kept.
fn kept_of(world: &World) -> World {
    World {
        networks: Arc::clone(&world.networks),
        classes: Arc::clone(&world.classes),
        namespaces: Arc::clone(&world.namespaces),
        blocks: Arc::clone(&world.blocks),
        reclaimed: Arc::clone(&world.reclaimed),
        nodes: Arc::clone(&world.nodes),
        service_cidrs: Arc::clone(&world.service_cidrs),
        services: Arc::clone(&world.services),
        announced: Arc::clone(&world.announced),
        ..World::default()
    }
}

/// The snapshot that records make, and what the record says that is there when all are.
fn world_of<'a>(records: impl Iterator<Item = &'a BootRecord>) -> (World, Option<Option<Vec<NetworkName>>>) {
    let (mut networks, mut classes, mut namespaces) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (mut blocks, mut reclaimed, mut nodes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (mut service_cidrs, mut services, mut announced) =
        (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut complete = None;
    for record in records {
        let name = record.key.split_once('/').map_or("", |(_, name)| name).to_owned();
        let pair = || name.split_once('/').map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
        match &record.item {
            Item::Network(network) => drop(networks.insert(network.name().clone(), Arc::clone(network))),
            Item::Class(class) => drop(classes.insert(name, Arc::clone(class))),
            Item::Namespace(labels) => drop(namespaces.insert(name, Arc::clone(labels))),
            Item::Block { spec, reclaim } => {
                if let Ok(block) = AddressBlock::of(spec) {
                    reclaimed.extend(reclaim.clone().map(|value| (name.clone(), value)));
                    blocks.insert(name, Arc::new(block));
                }
            }
            Item::Node(view) => drop(nodes.insert(name, Arc::clone(view))),
            Item::ServiceCidr(ranges) => drop(service_cidrs.insert(name, ranges.clone())),
            Item::Service(addresses) => services.extend(pair().map(|pair| (pair, addresses.clone()))),
            Item::Announced(view) => announced.extend(pair().map(|pair| (pair, Arc::clone(view)))),
            Item::Complete { whole } => complete = Some(whole.clone()),
        }
    }
    let kept = BlockList { kept: true, ..BlockList::default() };
    let whole = complete.clone().flatten();
    let world = World {
        before: Before { kept: complete.is_some() && !networks.is_empty(), ..Before::default() },
        block_lists: whole.map(|names| Arc::new(names.into_iter().map(|name| (name, kept)).collect())),
        networks: Arc::new(networks),
        classes: Arc::new(classes),
        namespaces: Arc::new(namespaces),
        blocks: Arc::new(blocks),
        reclaimed: Arc::new(reclaimed),
        nodes: Arc::new(nodes),
        service_cidrs: Arc::new(service_cidrs),
        services: Arc::new(services),
        announced: Arc::new(announced),
        ..World::default()
    };
    (world, complete)
}

/// What is shared in a snapshot is kept as itself.
mod shared {
    use super::{Arc, Deserialize, Serialize};

    pub(super) fn serialize<T: Serialize, S: serde::Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        (**value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// A Network is kept as its object.
mod network {
    use super::{Arc, Deserialize, Network, Serialize};

    pub(super) fn serialize<S: serde::Serializer>(
        value: &Arc<Network>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.object().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<Network>, D::Error> {
        let object = knit_api::Network::deserialize(deserializer)?;
        Network::try_from(object).map(Arc::new).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use knit_ledger::DurableFile;
    use serde_json::json;

    use super::*;

    fn world(blocks: &[(&str, &str, Option<&str>)]) -> World {
        let mut red = knit_api::Network::new(
            "red",
            serde_json::from_value(json!({"topology": "Layer3"})).expect("a spec"),
        );
        red.metadata.uid = Some("u".into());
        let block = |network: &str, range: &str| {
            let ipv4 = Some(range.to_owned());
            let spec = AddressBlockSpec { network: network.into(), node: "n1".into(), ipv4, ipv6: None };
            Arc::new(AddressBlock::of(&spec).expect("a block"))
        };
        let view = NodeView { addresses: vec![IpAddr::from([192, 0, 2, 1])], ..NodeView::default() };
        let whole = BlockList { whole: true, ..BlockList::default() };
        let wish =
            |(name, _, wish): &(&str, &str, Option<&str>)| Some(((*name).to_owned(), (*wish)?.to_owned()));
        World {
            networks: Arc::new(
                [(NetworkName::from("red"), Arc::new(red.try_into().expect("a Network")))].into(),
            ),
            namespaces: Arc::new([("shop".to_owned(), Arc::new(Labels::default()))].into()),
            blocks: Arc::new(
                blocks.iter().map(|(n, range, _)| ((*n).to_owned(), block("red", range))).collect(),
            ),
            reclaimed: Arc::new(blocks.iter().filter_map(wish).collect()),
            nodes: Arc::new([("n1".to_owned(), Arc::new(view))].into()),
            services: Arc::new([(("shop".into(), "db".into()), vec![IpAddr::from([10, 96, 0, 1])])].into()),
            block_lists: Some(Arc::new([(NetworkName::from("red"), whole)].into())),
            ..World::default()
        }
    }

    /// What of a snapshot is kept.
    fn text(world: &World) -> String {
        let lists: Vec<_> = world.block_lists.iter().flat_map(|lists| lists.keys()).collect();
        format!("{:?} {lists:?}", kept_of(world))
    }

    fn open(dir: &Path) -> OpenedLog {
        BootLog::open(dir).expect("a log")
    }

    #[test]
    fn one_change_is_one_record_and_all_of_them_are_there_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let (one, two) = (("b1", "10.0.0.0/29", None), ("b2", "10.0.0.8/29", None));
        let mut log = open(dir.path()).log;
        assert_eq!(log.store(&world(&[one])).expect("stored"), 6, "five objects, and that these are all");
        assert_eq!(log.store(&world(&[one])).expect("stored"), 0);
        assert_eq!(log.store(&world(&[one, two])).expect("stored"), 1);
        let wished = world(&[one, ("b2", "10.0.0.8/29", Some("w"))]);
        assert_eq!(log.store(&wished).expect("stored"), 1);
        drop(log);
        let OpenedLog { mut log, world: found, other } = open(dir.path());
        assert_eq!((text(&found), other.is_none()), (text(&wished), true));
        assert!(found.before.kept && found.block_lists.expect("lists")["red"].kept);
        assert_eq!(log.store(&wished).expect("stored"), 0, "nothing is written again after a restart");
        assert_eq!(log.store(&world(&[two])).expect("stored"), 2, "one went, and one is not wanted any more");
        drop(log);
        assert_eq!(text(&BootLog::read(dir.path()).expect("a cache")), text(&world(&[two])));
    }

    /// Wherever the file ends, it is one of the states that were written, and not a part of one.
    #[test]
    fn a_file_that_was_cut_off_anywhere_is_an_earlier_state_or_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut log = open(dir.path()).log;
        let states = [
            world(&[("b1", "10.0.0.0/29", None)]),
            world(&[("b1", "10.0.0.0/29", Some("w")), ("b2", "10.0.0.8/29", None)]),
            world(&[("b2", "10.0.0.8/29", None)]),
        ];
        for state in &states {
            log.store(state).expect("stored");
        }
        drop(log);
        let bytes = std::fs::read(dir.path().join(FILE)).expect("a file");
        let (mut seen, expected) = (0, states.each_ref().map(text));
        for len in 0..=bytes.len() {
            let cut = tempfile::tempdir().expect("a directory");
            std::fs::write(cut.path().join(FILE), &bytes[..len]).expect("written");
            let found = open(cut.path()).world;
            match expected.iter().position(|state| *state == text(&found)) {
                Some(at) => {
                    assert!(at >= seen, "{len}: an earlier state again");
                    seen = at;
                }
                None => assert!(seen == 0 && found.networks.is_empty() && !found.before.kept, "{len}"),
            }
        }
        assert_eq!(seen, 2);
        // A byte that somebody else changed: a part of what was known is no state that ever was.
        for at in [20, bytes.len() / 2, bytes.len() - 3] {
            let damaged = tempfile::tempdir().expect("a directory");
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            std::fs::write(damaged.path().join(FILE), &bytes).expect("written");
            for start in ["first", "second"] {
                let found = open(damaged.path()).world;
                assert!(found.networks.is_empty() && !found.before.kept, "{start} start, byte {at}");
            }
        }
    }

    #[test]
    fn many_changes_are_all_there_or_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut log = open(dir.path()).log;
        let names: Vec<(String, String)> = (0..2 * MOST_AT_ONCE)
            .map(|n| (format!("b{n}"), format!("10.{}.{}.0/29", n / 256, n % 256)))
            .collect();
        let many: Vec<_> = names.iter().map(|(name, range)| (name.as_str(), range.as_str(), None)).collect();
        let count = log.store(&world(&many)).expect("stored");
        assert_eq!(count, many.len() + 5);
        drop(log);
        let bytes = std::fs::read(dir.path().join(FILE)).expect("a file");
        assert_eq!(open(dir.path()).world.blocks.len(), many.len());
        for len in [bytes.len() - 1, bytes.len() / 2] {
            std::fs::write(dir.path().join(FILE), &bytes[..len]).expect("written");
            let OpenedLog { mut log, world: found, .. } = open(dir.path());
            assert!(found.blocks.is_empty() && !found.before.kept);
            // What a part of is there is written whole the next time.
            let few = world(&[("b1", "10.0.1.0/29", None)]);
            log.store(&few).expect("stored");
            drop(log);
            assert_eq!(text(&open(dir.path()).world), text(&few));
        }
    }

    #[test]
    fn what_an_earlier_version_kept_counts_until_the_log_has_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |range: &str| {
            let object = json!({"networks": [{"apiVersion": "knit.dev/v1alpha1", "kind": "Network",
                "metadata": {"name": "red"}, "spec": {"topology": "Layer3"}}], "whole": ["red"],
                "blocks": {"b1": {"network": "red", "node": "n1", "ipv4": range}}});
            let file = DurableFile::<Value>::new(boot_json::path(dir.path()));
            file.store(&object).expect("stored");
            file.store(&object).expect("stored again, so that there is one before it");
        };
        write("10.0.0.0/29");
        let OpenedLog { mut log, world: found, .. } = open(dir.path());
        assert_eq!(found.blocks["b1"].to_string(), "10.0.0.0/29");
        assert!(found.before.kept);
        log.store(&found).expect("stored");
        drop(log);
        assert!(!boot_json::path(dir.path()).exists(), "nobody finds what is old any more");
        let OpenedLog { log, world: found, other } = open(dir.path());
        assert_eq!((found.blocks["b1"].to_string().as_str(), other.is_none()), ("10.0.0.0/29", true));
        drop(log);
        // An agent of the earlier version was at it again: what it kept is newer.
        write("10.0.0.8/29");
        let OpenedLog { world: found, other, .. } = open(dir.path());
        assert_eq!(found.blocks["b1"].to_string(), "10.0.0.8/29");
        assert_eq!(other.expect("the log").blocks["b1"].to_string(), "10.0.0.0/29");
    }
}
