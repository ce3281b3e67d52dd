//! The pods that policies can be about: those of this node from the agent's records, those of other nodes
//! from slices, merged into one pod of each name.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use knit_policy::model::{Labels, Name, Pod, PodKey};
use knit_policy::sets::Engine;

/// Where a remote pod is told of: the Network and the name of the slice.
pub(crate) type SliceKey = (Name, Name);

/// Pods, by where they are known from.
#[derive(Debug, Default)]
pub(crate) struct Known {
    local: BTreeMap<PodKey, Pod>,
    remote: BTreeMap<PodKey, BTreeMap<SliceKey, Pod>>,
    slices: BTreeMap<SliceKey, BTreeSet<PodKey>>,
    /// The slices that say which labels all slices of their Network tell of.
    of_networks: BTreeMap<SliceKey, Arc<[Name]>>,
    /// Lists of keys that are in use, so that pods with the same share one.
    lists: HashSet<Arc<[Name]>>,
}

/// What a slice tells.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SliceContent {
    /// Pods of another node. The labels that they are known by may be more: see `of_network`.
    pub(crate) pods: Vec<Pod>,
    /// The keys of labels that all slices of the Network tell of, sorted, if it says that.
    pub(crate) of_network: Option<Arc<[Name]>>,
}

impl Known {
    /// The pods of this node that have a name are these: several while one goes and another comes.
    pub(crate) fn set_named(&mut self, engine: &mut Engine, name: &PodKey, pods: Vec<Pod>) {
        let named = self.local.range(name.clone()..).take_while(|(key, _)| key.is_namesake(name));
        let gone = named.map(|(key, _)| key).filter(|key| pods.iter().all(|pod| pod.key != **key));
        let gone: Vec<PodKey> = gone.cloned().collect();
        gone.iter().for_each(|key| self.set_local(engine, key, None));
        for pod in pods {
            self.set_local(engine, &pod.key.clone(), Some(pod));
        }
    }

    /// A pod of this node is like this; none if it is gone.
    fn set_local(&mut self, engine: &mut Engine, key: &PodKey, pod: Option<Pod>) {
        match pod {
            Some(pod) => drop(self.local.insert(key.clone(), pod)),
            None => drop(self.local.remove(key)),
        }
        self.tell(engine, key);
    }

    /// These are all pods of this node.
    pub(crate) fn set_locals(&mut self, engine: &mut Engine, pods: BTreeMap<PodKey, Pod>) {
        let gone: Vec<PodKey> = self.local.keys().filter(|key| !pods.contains_key(*key)).cloned().collect();
        for key in gone {
            self.set_local(engine, &key, None);
        }
        for (key, pod) in pods {
            if self.local.get(&key) != Some(&pod) {
                self.set_local(engine, &key, Some(pod));
            }
        }
    }

    /// A slice tells this now; nothing if it is gone.
    pub(crate) fn set_slice(&mut self, engine: &mut Engine, slice: &SliceKey, content: SliceContent) {
        let SliceContent { pods, of_network } = content;
        let before = match of_network.clone() {
            Some(keys) => self.of_networks.insert(slice.clone(), keys),
            None => self.of_networks.remove(slice),
        };
        if before != of_network {
            self.lists.retain(|list| Arc::strong_count(list) > 1);
            let told = self.slices.iter().filter(|((network, _), _)| *network == slice.0);
            let told: BTreeSet<PodKey> = told.flat_map(|(_, pods)| pods.iter().cloned()).collect();
            told.iter().for_each(|key| self.tell(engine, key));
        }
        let now: BTreeSet<PodKey> = pods.iter().map(|pod| pod.key.clone()).collect();
        let before = match now.is_empty() {
            true => self.slices.remove(slice),
            false => self.slices.insert(slice.clone(), now.clone()),
        };
        for key in before.unwrap_or_default().difference(&now) {
            if let Some(entries) = self.remote.get_mut(key) {
                entries.remove(slice);
                if entries.is_empty() {
                    self.remote.remove(key);
                }
            }
            self.tell(engine, key);
        }
        for pod in pods {
            let key = pod.key.clone();
            let entries = self.remote.entry(key.clone()).or_default();
            if entries.get(slice) != Some(&pod) {
                entries.insert(slice.clone(), pod);
                self.tell(engine, &key);
            }
        }
    }

    /// The slices of a Network that are known.
    pub(crate) fn slices_of(&self, network: &Name) -> Vec<SliceKey> {
        self.slices.keys().chain(self.of_networks.keys()).filter(|(n, _)| n == network).cloned().collect()
    }

    /// Whether a pod of this node has these interfaces.
    pub(crate) fn has(&self, pod: &Pod) -> bool {
        let known = self.local.get(&pod.key);
        known.is_some_and(|known| pod.attachments.iter().all(|a| known.attachments.contains(a)))
    }

    /// Whether a pod of this node has an interface with this address.
    pub(crate) fn has_address(&self, key: &PodKey, network: &Name, address: IpAddr) -> bool {
        let mut attachments = self.local.get(key).into_iter().flat_map(|pod| &pod.attachments);
        attachments.any(|a| a.network == *network && a.addresses.contains(&address))
    }

    /// The pods of this node.
    pub(crate) fn locals(&self) -> impl Iterator<Item = &Pod> {
        self.local.values()
    }

    /// Has the engine know what there is to know of a pod.
    fn tell(&mut self, engine: &mut Engine, key: &PodKey) {
        // A sandbox of this node is subject to policies as long as it is there, whatever others say of its
        // name.
        let Self { local, remote, of_networks, lists, .. } = self;
        let told = || remote.get(key).and_then(|entries| merge(entries, of_networks, lists));
        let pod = local.get(key).cloned().or_else(told);
        match pod {
            Some(pod) => engine.set_pod(pod),
            None => engine.delete_pod(key, None),
        }
    }
}

/// What several slices say of one name. Of two pods that had it one after the other, the younger counts. Each
/// slice has the labels that its own Network's policies ask for: more of them are known, and none is wrong.
fn merge(
    entries: &BTreeMap<SliceKey, Pod>,
    of_networks: &BTreeMap<SliceKey, Arc<[Name]>>,
    lists: &mut HashSet<Arc<[Name]>>,
) -> Option<Pod> {
    let youngest = entries.values().max_by_key(|pod| (pod.created, pod.uid.clone()))?;
    let same: Vec<(&SliceKey, &Pod)> = entries.iter().filter(|(_, pod)| pod.uid == youngest.uid).collect();
    let pods = || same.iter().map(|(_, pod)| *pod);
    let labels: Labels = pods().flat_map(|pod| pod.labels.iter()).map(|(k, v)| (&**k, &**v)).collect();
    let known_labels = known_labels(&same, &labels, of_networks, lists);
    let ports: BTreeSet<_> = pods().flat_map(|pod| pod.ports.iter().cloned()).collect();
    let attachments: BTreeSet<_> = pods().flat_map(|pod| pod.attachments.iter().cloned()).collect();
    Some(Pod {
        labels,
        known_labels,
        ports: ports.into_iter().collect(),
        attachments: attachments.into_iter().collect(),
        ..youngest.clone()
    })
}

/// The keys of the labels that any of these knows, or whose slices all of a Network's know. Pods that are
/// known by the same share one list.
fn known_labels(
    same: &[(&SliceKey, &Pod)],
    labels: &Labels,
    of_networks: &BTreeMap<SliceKey, Arc<[Name]>>,
    lists: &mut HashSet<Arc<[Name]>>,
) -> Option<Arc<[Name]>> {
    // A slice of an earlier controller says nothing of what it does not know.
    let partly: Vec<_> = same.iter().filter_map(|(at, pod)| Some((at, pod.known_labels.as_ref()?))).collect();
    if partly.is_empty() {
        return None;
    }
    let own = partly.iter().map(|(_, keys)| *keys);
    let of_their_networks = partly.iter().flat_map(|((network, _), _)| {
        let from = (network.clone(), Name::default());
        of_networks.range(from..).take_while(move |((n, _), _)| n == network).map(|(_, keys)| keys)
    });
    let told: Vec<&Arc<[Name]>> = own.chain(of_their_networks).filter(|keys| !keys.is_empty()).collect();
    if let Some(first) = told.first()
        && told.iter().all(|keys| Arc::ptr_eq(keys, first))
        && labels.iter().all(|(key, _)| first.binary_search(key).is_ok())
    {
        return Some(Arc::clone(first));
    }
    // What a pod has is known, whether or not it is told yet that all slices tell of it.
    let known: BTreeSet<&Name> =
        told.into_iter().flat_map(|keys| keys.iter()).chain(labels.iter().map(|(key, _)| key)).collect();
    let known: Arc<[Name]> = known.into_iter().cloned().collect();
    let shared = lists.get(&known).cloned();
    Some(shared.unwrap_or_else(|| {
        if lists.len().is_power_of_two() {
            lists.retain(|list| Arc::strong_count(list) > 1);
        }
        lists.insert(Arc::clone(&known));
        known
    }))
}

#[cfg(test)]
mod tests {
    use knit_policy::model::Attachment;
    use proptest::prelude::*;

    use super::*;

    fn pod(name: &str, uid: &str, created: i64, node: &str, network: &str, address: u8) -> Pod {
        let attachment = Attachment {
            network: network.into(),
            primary: true,
            addresses: [IpAddr::from([10, 0, 0, address])].into(),
        };
        let labels = Labels::from_iter([("app", name)]);
        let (uid, node) = (uid.into(), node.into());
        Pod { uid, node, created, labels, attachments: [attachment].into(), ..Pod::new("shop", name) }
    }

    fn slice(network: &str, name: &str) -> SliceKey {
        (network.into(), name.into())
    }

    fn of(pods: impl Into<Vec<Pod>>) -> SliceContent {
        SliceContent { pods: pods.into(), of_network: None }
    }

    fn keys(list: &[&str]) -> Arc<[Name]> {
        list.iter().copied().map(Name::from).collect()
    }

    /// What is known of the labels of a pod of shop.
    fn knows(engine: &Engine, name: &str, key: &str) -> bool {
        engine.cluster().pod(&PodKey::new("shop", name)).expect("it is known").knows_label(&key.into())
    }

    #[test]
    fn a_new_key_of_labels_was_told_once_more_by_every_slice() {
        let (mut known, mut engine) = (Known::default(), Engine::new("a"));
        let partly = |name: &str, network: &str, address: u8| Pod {
            known_labels: Some(Arc::default()),
            ..pod(name, name, 1, "b", network, address)
        };
        known.set_slice(
            &mut engine,
            &slice("blue", "b"),
            of([partly("web", "blue", 1), partly("db", "blue", 2)]),
        );
        known.set_slice(&mut engine, &slice("green", "b"), of([partly("job", "green", 3)]));
        assert!(knows(&engine, "web", "app"), "it has it");
        assert!(!knows(&engine, "web", "role") && !knows(&engine, "db", "role"));
        let of_blue = |list: &[&str]| SliceContent { pods: Vec::new(), of_network: Some(keys(list)) };
        known.set_slice(&mut engine, &slice("blue", "keys"), of_blue(&["app", "role"]));
        assert!(knows(&engine, "web", "role") && knows(&engine, "db", "role"));
        assert!(!knows(&engine, "job", "role"), "it is in another Network");
        let list = |name| {
            let key = PodKey::new("shop", name);
            engine.cluster().pod(&key).expect("it is known").known_labels.clone().expect("a list")
        };
        assert!(Arc::ptr_eq(&list("web"), &list("db")), "all share one list");
        // A pod that comes later is known by the same.
        known.set_slice(&mut engine, &slice("blue", "c"), of([partly("late", "blue", 4)]));
        assert!(knows(&engine, "late", "role"));
        // A key that is not told of any more is not known, and neither is any once nobody says so.
        known.set_slice(&mut engine, &slice("blue", "keys"), of_blue(&["app"]));
        assert!(!knows(&engine, "late", "role") && knows(&engine, "late", "app"));
        known.set_slice(&mut engine, &slice("blue", "keys"), SliceContent::default());
        assert!(!knows(&engine, "late", "other") && knows(&engine, "late", "app"), "it has app");
        assert!(known.lists.len() <= 2, "{:?}", known.lists);
    }

    #[test]
    fn every_pod_had_a_copy_of_all_keys_of_labels() {
        let (mut known, mut engine) = (Known::default(), Engine::new("a"));
        let pods = |from: u8| {
            let each = (from..from + 3).map(|n| Pod {
                known_labels: Some(Arc::default()),
                labels: Labels::from_iter([("app", "web"), ("new", "yes")]),
                ..pod(&format!("p{n}"), "u", 1, "b", "blue", n)
            });
            each.collect::<Vec<_>>()
        };
        // A label that is told of already, and is not yet said to be told of by all.
        let content = SliceContent { pods: Vec::new(), of_network: Some(keys(&["app", "role"])) };
        known.set_slice(&mut engine, &slice("blue", "keys"), content);
        known.set_slice(&mut engine, &slice("blue", "b"), of(pods(1)));
        known.set_slice(&mut engine, &slice("blue", "c"), of(pods(11)));
        let lists: Vec<_> = known
            .remote
            .keys()
            .map(|key| engine.cluster().pod(key).expect("it is known").known_labels.clone().expect("a list"))
            .collect();
        assert_eq!(lists.len(), 6);
        assert!(lists.iter().all(|list| Arc::ptr_eq(list, &lists[0])), "all share one list");
        assert_eq!(*lists[0], *keys(&["app", "new", "role"]));
    }

    #[test]
    fn a_pod_of_two_networks_has_both_addresses_and_an_older_one_of_its_name_none() {
        let (mut known, mut engine) = (Known::default(), Engine::new("a"));
        known.set_slice(&mut engine, &slice("blue", "b"), of([pod("web", "u2", 2, "b", "blue", 5)]));
        known.set_slice(&mut engine, &slice("default", "b"), of([pod("web", "u2", 2, "b", "default", 6)]));
        known.set_slice(&mut engine, &slice("default", "c"), of([pod("web", "u1", 1, "c", "default", 7)]));
        let key = PodKey::new("shop", "web");
        let found = engine.cluster().pod(&key).expect("it is known").clone();
        assert_eq!((found.attachments.len(), &*found.uid, &*found.node), (2, "u2", "b"));
        known.set_slice(&mut engine, &slice("default", "b"), of([]));
        known.set_slice(&mut engine, &slice("blue", "b"), of([]));
        let found = engine.cluster().pod(&key).expect("the older one is still told of").clone();
        assert_eq!(&*found.uid, "u1");
        known.set_slice(&mut engine, &slice("default", "c"), of([]));
        assert!(engine.cluster().pod(&key).is_none());
    }

    #[test]
    fn a_pod_of_this_node_stays_a_subject_whatever_slices_say_of_its_name() {
        let (mut known, mut engine) = (Known::default(), Engine::new("a"));
        let key = PodKey::new("shop", "web");
        known.set_named(&mut engine, &key, vec![pod("web", "u1", 1, "a", "default", 4)]);
        known.set_slice(&mut engine, &slice("default", "b"), of([pod("web", "u2", 2, "b", "default", 5)]));
        assert_eq!(&*engine.cluster().pod(&key).expect("known").node, "a");
        known.set_locals(&mut engine, BTreeMap::new());
        assert_eq!(&*engine.cluster().pod(&key).expect("known").node, "b");
    }

    proptest! {
        #[test]
        fn any_order_of_events_ends_in_the_same_pods(
            events in prop::collection::vec((0..3_usize, 0..3_usize, 0..4_u8), 1..24),
            seed in any::<u64>(),
        ) {
            let names = ["web", "db", "job"];
            let places = [slice("default", "b"), slice("default", "c"), slice("blue", "b")];
            // What each place says last, in some other order of places.
            let mut last: BTreeMap<SliceKey, Vec<Pod>> = BTreeMap::new();
            let (mut known, mut engine) = (Known::default(), Engine::new("a"));
            for (place, name, uid) in &events {
                let place = &places[*place];
                let uid_text = format!("u{uid}");
                let pods = match uid {
                    0 => Vec::new(),
                    _ => vec![pod(names[*name], &uid_text, i64::from(*uid), &place.1, &place.0, *uid)],
                };
                known.set_slice(&mut engine, place, of(pods.clone()));
                last.insert(place.clone(), pods);
            }
            let (mut other, mut fresh) = (Known::default(), Engine::new("a"));
            let mut order: Vec<_> = last.into_iter().collect();
            let by = usize::try_from(seed % 3).unwrap_or_default().min(order.len());
            order.rotate_left(by);
            for (place, pods) in order {
                other.set_slice(&mut fresh, &place, of(pods));
            }
            for name in names {
                let key = PodKey::new("shop", name);
                prop_assert_eq!(engine.cluster().pod(&key), fresh.cluster().pod(&key));
            }
        }
    }
}
