//! What the slice of a Network may say that lists the labels which all of its slices tell of: pure.
//!
//! Nodes take a label that a slice does not have for absent as soon as that list has its key. So a key is
//! added only after every slice with a pod that has such a label was written with it, and taken out before
//! any slice is written without it. The API server shows both in the order in which they were written.

use std::collections::{BTreeMap, BTreeSet};

use knit_policy::model::Name;

use super::plan::NetworkAndNode;

/// The lists of all Networks.
#[derive(Debug, Default)]
pub(super) struct KeySlices {
    networks: BTreeMap<Name, OfNetwork>,
}

/// The list of one Network.
#[derive(Debug, Default)]
struct OfNetwork {
    /// What it should say in the end.
    wanted: BTreeSet<Name>,
    /// What it may say now: what it said, and what was sent since, whatever became of that.
    maybe_told: BTreeSet<Name>,
    /// What it says, if that is known.
    told: Option<BTreeSet<Name>>,
    /// Keys that are not told yet. Those that come while some are on their way wait for their turn, so that
    /// there is an end to what those wait for.
    on_their_way: Arriving,
    next: Arriving,
}

/// Keys that are new.
#[derive(Debug, Default)]
struct Arriving {
    keys: BTreeSet<Name>,
    /// The nodes of which the slices have to be written first.
    nodes: BTreeSet<Name>,
}

// === impl KeySlices ===

impl KeySlices {
    /// The slice of a Network says this, or said it a moment ago.
    pub(super) fn read(&mut self, network: &Name, keys: BTreeSet<Name>) {
        match self.networks.get_mut(network) {
            Some(list) if list.told.as_ref() == Some(&keys) => {}
            Some(list) => {
                list.maybe_told.extend(keys);
                list.told = None;
            }
            None if keys.is_empty() => {}
            None => {
                let list = OfNetwork { maybe_told: keys.clone(), told: Some(keys), ..OfNetwork::default() };
                self.networks.insert(network.clone(), list);
            }
        }
    }

    /// Policies of the Networks ask for these keys now, and the slices of these places are others than
    /// before.
    pub(super) fn want<'a>(
        &mut self,
        keys: impl Iterator<Item = (&'a Name, &'a BTreeSet<Name>)>,
        unwritten: &BTreeSet<NetworkAndNode>,
    ) {
        let keys: BTreeMap<&Name, &BTreeSet<Name>> = keys.collect();
        for network in keys.keys() {
            let unsaid = || OfNetwork { told: Some(BTreeSet::new()), ..OfNetwork::default() };
            self.networks.entry((*network).clone()).or_insert_with(unsaid);
        }
        let nothing = BTreeSet::new();
        for (network, list) in &mut self.networks {
            let wanted = keys.get(network).copied().unwrap_or(&nothing);
            if *wanted != list.wanted {
                let from = (network.clone(), Name::default());
                let of_network = unwritten.range(from..).take_while(|(name, _)| name == network);
                let nodes = of_network.map(|(_, node)| node).filter(|node| !node.is_empty());
                list.want(wanted, nodes);
            }
        }
        self.networks.retain(|_, list| !list.is_nothing());
    }

    /// The Networks that have a list, or should have one.
    pub(super) fn networks(&self) -> impl Iterator<Item = &Name> {
        self.networks.keys()
    }

    /// The Networks of which the list is to be written.
    pub(super) fn due(&self) -> impl Iterator<Item = &Name> {
        self.networks
            .iter()
            .filter(|(_, list)| list.told.as_ref() != Some(&list.target()))
            .map(|(name, _)| name)
    }

    /// What is to be written of a Network now, if anything; it counts as sent.
    pub(super) fn send(&mut self, network: &Name) -> Option<BTreeSet<Name>> {
        let list = self.networks.get_mut(network)?;
        let target = list.target();
        if list.told.as_ref() == Some(&target) {
            return None;
        }
        list.told = None;
        list.maybe_told.extend(target.iter().cloned());
        Some(target)
    }

    /// What was sent last was written.
    pub(super) fn sent(&mut self, network: &Name, keys: BTreeSet<Name>) {
        if let Some(list) = self.networks.get_mut(network) {
            list.maybe_told.clone_from(&keys);
            list.told = Some(keys);
        }
    }

    /// Whether no slice of a Network may be written yet: it would leave out labels that are told of.
    pub(super) fn blocks(&self, network: &Name) -> bool {
        self.networks.get(network).is_some_and(|list| !list.maybe_told.is_subset(&list.wanted))
    }

    /// Whether a key waits for the slices of a place.
    pub(super) fn waits_for(&self, (network, node): &NetworkAndNode) -> bool {
        let list = self.networks.get(network);
        list.is_some_and(|list| list.arriving().any(|arriving| arriving.nodes.contains(node)))
    }

    /// The slices of a place were written as they are wanted.
    pub(super) fn written(&mut self, (network, node): &NetworkAndNode) {
        let Some(list) = self.networks.get_mut(network) else { return };
        list.on_their_way.nodes.remove(node);
        list.next.nodes.remove(node);
        list.take_turns();
    }
}

// === impl OfNetwork ===

impl OfNetwork {
    fn want<'a>(&mut self, wanted: &BTreeSet<Name>, unwritten: impl Iterator<Item = &'a Name>) {
        for arriving in [&mut self.on_their_way, &mut self.next] {
            arriving.keys.retain(|key| wanted.contains(key));
        }
        let is_new = |key: &&Name| {
            !self.maybe_told.contains(*key) && !self.arriving().any(|arriving| arriving.keys.contains(*key))
        };
        let new: Vec<Name> = wanted.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            self.next.keys.extend(new);
            self.next.nodes.extend(unwritten.cloned());
        }
        self.wanted.clone_from(wanted);
        self.take_turns();
    }

    fn arriving(&self) -> impl Iterator<Item = &Arriving> {
        [&self.on_their_way, &self.next].into_iter()
    }

    /// What has arrived is let go of, and the next have their turn.
    fn take_turns(&mut self) {
        for _ in 0..2 {
            if self.on_their_way.nodes.is_empty() || self.on_their_way.keys.is_empty() {
                self.on_their_way = std::mem::take(&mut self.next);
            }
        }
    }

    /// What it may say by now: what is wanted, but for what has not arrived.
    fn target(&self) -> BTreeSet<Name> {
        let arriving = |key: &Name| self.arriving().any(|arriving| arriving.keys.contains(key));
        self.wanted.iter().filter(|key| !arriving(key)).cloned().collect()
    }

    fn is_nothing(&self) -> bool {
        self.wanted.is_empty()
            && self.maybe_told.is_empty()
            && self.told.as_ref().is_some_and(BTreeSet::is_empty)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(names: &[&str]) -> BTreeSet<Name> {
        names.iter().copied().map(Name::from).collect()
    }

    fn place(node: &str) -> NetworkAndNode {
        ("blue".into(), node.into())
    }

    fn want(lists: &mut KeySlices, keys: &[&str], changed: &[&str]) {
        let (network, keys) = ("blue".into(), set(keys));
        lists.want([(&network, &keys)].into_iter(), &changed.iter().map(|node| place(node)).collect());
    }

    #[test]
    fn a_key_is_told_after_the_slices_with_such_a_label_and_not_before() {
        let (mut lists, blue) = (KeySlices::default(), Name::from("blue"));
        want(&mut lists, &["app"], &["a", "b"]);
        assert_eq!(lists.send(&blue), None, "nothing is told yet");
        lists.written(&place("a"));
        assert!(lists.waits_for(&place("b")) && !lists.waits_for(&place("a")));
        // Another key comes meanwhile, and no pod has such a label; it does not overtake, nor hold up.
        want(&mut lists, &["app", "role"], &[]);
        assert_eq!(lists.send(&blue), None);
        lists.written(&place("b"));
        assert_eq!(lists.due().collect::<Vec<_>>(), [&blue]);
        assert_eq!(lists.send(&blue), Some(set(&["app", "role"])));
        lists.sent(&blue, set(&["app", "role"]));
        assert_eq!((lists.send(&blue), lists.due().next()), (None, None));
        assert!(!lists.blocks(&blue));
    }

    #[test]
    fn keys_that_keep_coming_do_not_hold_up_those_that_came_first() {
        let (mut lists, blue) = (KeySlices::default(), Name::from("blue"));
        want(&mut lists, &["app"], &["a"]);
        for n in 0..10 {
            want(&mut lists, &["app", &format!("new-{n}")], &["a", "b"]);
        }
        lists.written(&place("a"));
        assert_eq!(lists.send(&blue), Some(set(&["app"])), "what came later waits for b");
    }

    #[test]
    fn a_label_is_left_out_only_after_its_key() {
        let (mut lists, blue) = (KeySlices::default(), Name::from("blue"));
        lists.read(&blue, set(&["app", "old"]));
        want(&mut lists, &["app"], &["a"]);
        assert!(lists.blocks(&blue), "slices without the label would look as if nobody had it");
        assert_eq!(lists.send(&blue), Some(set(&["app"])));
        assert!(lists.blocks(&blue), "whether it was written is not known");
        assert_eq!(lists.send(&blue), Some(set(&["app"])), "it is tried again");
        lists.sent(&blue, set(&["app"]));
        assert!(!lists.blocks(&blue));
        // What is read is older than that: it is written once more.
        lists.read(&blue, set(&["app", "old"]));
        assert!(lists.blocks(&blue) && lists.due().next().is_some());
        // Without any key, there is no list, and then no Network to look after.
        lists.sent(&blue, set(&["app"]));
        lists.want(std::iter::empty(), &BTreeSet::new());
        assert_eq!(lists.send(&blue), Some(BTreeSet::new()));
        lists.sent(&blue, BTreeSet::new());
        lists.want(std::iter::empty(), &BTreeSet::new());
        assert_eq!(lists.networks().count(), 0);
    }

    /// Which labels pods have, by node.
    const PODS: [(&str, &[&str]); 3] = [("a", &["x", "y"]), ("b", &["y"]), ("c", &["z"])];

    #[derive(Clone, Debug)]
    enum Step {
        /// Policies ask for these.
        Want(Vec<bool>),
        /// They ask for the pods of this node, or no longer do: these have no slice then.
        Ask(usize, bool),
        /// What is due is written; these writes are done, and of these nobody hears.
        Write { done: [bool; 4], heard: [bool; 4] },
        /// Another controller goes on.
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => prop::collection::vec(any::<bool>(), 3).prop_map(Step::Want),
            1 => (0..3_usize, any::<bool>()).prop_map(|(node, asked)| Step::Ask(node, asked)),
            5 => (any::<[bool; 4]>(), any::<[bool; 4]>())
                .prop_map(|(done, heard)| Step::Write { done, heard }),
            1 => Just(Step::Restart),
        ]
    }

    proptest! {
        /// Whatever is written when, and whether or not that is heard of: a key that is told is told of by
        /// all.
        #[test]
        fn no_label_was_ever_taken_for_absent(steps in prop::collection::vec(step(), 1..60)) {
            let (blue, keys) = (Name::from("blue"), ["x", "y", "z"]);
            let mut lists = KeySlices::default();
            let mut wanted: BTreeSet<Name> = BTreeSet::new();
            // What the API server has.
            let mut list: BTreeSet<Name> = BTreeSet::new();
            let mut slices: BTreeMap<&str, BTreeSet<Name>> = BTreeMap::new();
            let mut pending: BTreeSet<&str> = BTreeSet::new();
            let mut asked = [true; 3];
            // What a node's slice should be, if it has one.
            let told = |at: usize, wanted: &BTreeSet<Name>, asked: &[bool; 3]| {
                let keys = PODS[at].1.iter().map(|key| Name::from(*key));
                asked[at].then(|| keys.filter(|key| wanted.contains(key)).collect::<BTreeSet<Name>>())
            };
            let mut last: BTreeMap<&str, Option<BTreeSet<Name>>> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Want(which) => {
                        let which = keys.iter().zip(which).filter(|(_, wanted)| *wanted);
                        wanted = which.map(|(key, _)| Name::from(*key)).collect();
                    }
                    Step::Ask(node, is_asked) => asked[node] = is_asked,
                    Step::Restart => {
                        (lists, last) = (KeySlices::default(), BTreeMap::new());
                        lists.read(&blue, list.clone());
                        pending = PODS.iter().map(|(node, _)| *node).collect();
                    }
                    Step::Write { done, heard } => {
                        let nodes: Vec<&str> =
                            pending.iter().copied().filter(|_| !lists.blocks(&blue)).collect();
                        let sent = lists.send(&blue);
                        for (place, (node, _)) in PODS.iter().enumerate() {
                            if nodes.contains(node) && done[place] {
                                match told(place, &wanted, &asked) {
                                    Some(slice) => drop(slices.insert(node, slice)),
                                    None => drop(slices.remove(node)),
                                }
                                if heard[place] {
                                    pending.remove(node);
                                    lists.written(&(blue.clone(), (*node).into()));
                                }
                            }
                        }
                        if let Some(sent) = sent.filter(|_| done[3]) {
                            list.clone_from(&sent);
                            if heard[3] {
                                lists.sent(&blue, sent);
                            }
                        }
                    }
                }
                for (at, (node, _)) in PODS.iter().enumerate() {
                    let now = told(at, &wanted, &asked);
                    if last.insert(node, now.clone()) != Some(now) {
                        pending.insert(node);
                    }
                }
                let unwritten = pending.iter().map(|node| (blue.clone(), Name::from(*node))).collect();
                lists.want([(&blue, &wanted)].into_iter(), &unwritten);
                for (node, has) in PODS {
                    for key in has.iter().filter(|key| list.contains(**key)) {
                        let slice = slices.get(node);
                        prop_assert!(
                            slice.is_none_or(|slice| slice.contains(*key)),
                            "{key} is told, and {node} has it: {slices:?}"
                        );
                    }
                }
            }
            // Once all is written, all is told.
            for _ in 0..4 {
                for node in std::mem::take(&mut pending) {
                    match lists.blocks(&blue) {
                        true => drop(pending.insert(node)),
                        false => {
                            lists.written(&(blue.clone(), node.into()));
                        }
                    }
                }
                if let Some(sent) = lists.send(&blue) {
                    list.clone_from(&sent);
                    lists.sent(&blue, sent);
                }
            }
            prop_assert_eq!(list, wanted);
        }
    }
}
