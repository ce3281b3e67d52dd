//! Where each fact goes, and which slices have to be written for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// One set of slices. It is told of facts that come and go, and says which slices are to be written.
#[derive(Clone, Debug)]
pub struct Packer<K, V> {
    capacity: usize,
    slices: BTreeMap<u32, BTreeMap<K, V>>,
    place: HashMap<K, u32>,
    /// Slices that differ from what was written last.
    dirty: BTreeSet<u32>,
    /// Slices that could not be written.
    unwritable: BTreeSet<u32>,
    /// A slice whose facts were copied into others, and that goes once those are written.
    emptying: Option<u32>,
    /// Whether slice 0 says that the set is complete.
    complete: bool,
    /// Whether slice 0 was written, or found.
    has_head: bool,
}

/// What is to be written for one slice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step<'a, K, V> {
    /// It has these facts.
    Put {
        /// All facts of this slice.
        items: &'a BTreeMap<K, V>,
        /// Whether it says that the set is complete.
        complete: bool,
    },
    /// It is empty, and is deleted.
    Delete,
}

impl<K: Clone + Eq + Hash + Ord, V: Clone + PartialEq> Packer<K, V> {
    /// An empty set whose slices have at most this many facts.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            slices: BTreeMap::from([(0, BTreeMap::new())]),
            place: HashMap::new(),
            dirty: BTreeSet::new(),
            unwritable: BTreeSet::new(),
            emptying: None,
            complete: false,
            has_head: false,
        }
    }

    /// Takes a slice as it was written before, by whoever led then. A fact that is in two slices stays in the
    /// one with the lower number.
    pub fn adopt(&mut self, index: u32, items: impl IntoIterator<Item = (K, V)>, complete: bool) {
        if index == 0 {
            self.has_head = true;
            self.complete |= complete;
        }
        let mut kept = BTreeMap::new();
        for (key, value) in items {
            match self.place.get(&key).copied() {
                Some(other) if other < index => {
                    self.dirty.insert(index);
                    continue;
                }
                Some(other) if other > index => {
                    self.slices.entry(other).or_default().remove(&key);
                    self.dirty.insert(other);
                }
                _ => {}
            }
            self.place.insert(key.clone(), index);
            kept.insert(key, value);
        }
        self.slices.insert(index, kept);
        if index != 0 && self.slices[&index].is_empty() {
            self.dirty.insert(index);
        }
    }

    /// This is a fact now.
    pub fn set(&mut self, key: K, value: V) {
        if let Some(index) = self.place.get(&key) {
            let slice = self.slices.entry(*index).or_default();
            if slice.get(&key) != Some(&value) {
                slice.insert(key, value);
                self.dirty.insert(*index);
            }
            return;
        }
        let index = self.room();
        self.slices.entry(index).or_default().insert(key.clone(), value);
        self.place.insert(key, index);
        self.dirty.insert(index);
    }

    /// This is not a fact any more.
    pub fn remove(&mut self, key: &K) {
        if let Some(index) = self.place.remove(key) {
            self.slices.entry(index).or_default().remove(key);
            self.dirty.insert(index);
        }
        // What is on its way out of another slice must not come back by it.
        if let Some(copy) = self.emptying
            && self.slices.get_mut(&copy).is_some_and(|slice| slice.remove(key).is_some())
        {
            self.dirty.insert(copy);
        }
    }

    /// Forgets every fact for which `is_there` is false.
    pub fn retain(&mut self, is_there: impl Fn(&K) -> bool) {
        let gone: Vec<K> = self.place.keys().filter(|key| !is_there(key)).cloned().collect();
        for key in &gone {
            self.remove(key);
        }
    }

    /// Somebody else changed or removed this slice: it is written again.
    pub fn touch(&mut self, index: u32) {
        if index == 0 {
            // It may have said something else, or may be gone.
            self.has_head = false;
        }
        if self.slices.contains_key(&index) {
            self.dirty.insert(index);
        }
    }

    /// A slice that should not be there: it is deleted.
    pub fn discard(&mut self, index: u32) {
        self.slices.entry(index).or_default();
        self.dirty.insert(index);
    }

    /// The slices that are to be written, in no order. Slice 0 is the last one of a set that is not complete.
    pub fn due(&self) -> impl Iterator<Item = u32> + '_ {
        let only_head = self.dirty.iter().all(|index| *index == 0);
        let is_written = self.has_head && self.complete;
        let head = if is_written { self.dirty.contains(&0) } else { only_head };
        head.then_some(0).into_iter().chain(self.dirty.iter().copied().filter(|index| *index != 0))
    }

    /// What is to be written for a slice.
    #[must_use]
    pub fn step(&self, index: u32) -> Step<'_, K, V> {
        match self.slices.get(&index) {
            Some(items) if index == 0 || !items.is_empty() => Step::Put { items, complete: index == 0 },
            _ => Step::Delete,
        }
    }

    /// A slice was written.
    pub fn written(&mut self, index: u32) {
        self.dirty.remove(&index);
        self.unwritable.remove(&index);
        if index == 0 {
            (self.has_head, self.complete) = (true, true);
        } else if self.slices.get(&index).is_some_and(BTreeMap::is_empty) {
            self.slices.remove(&index);
        }
        if let Some(copy) = self.emptying
            && self.dirty.iter().all(|other| *other == copy)
        {
            self.emptying = None;
            if let Some(slice) = self.slices.get_mut(&copy) {
                slice.clear();
                self.dirty.insert(copy);
            }
        }
    }

    /// A slice could not be written as it is: until it can be, no further fact goes into it.
    pub fn refused(&mut self, index: u32) {
        self.unwritable.insert(index);
    }

    /// Whether everything is written.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.dirty.is_empty() && self.emptying.is_none() && self.has_head && self.complete
    }

    /// Empties one slice into the others, if less than half of the room is used. Nothing is moved while
    /// something is to be written.
    pub fn pack(&mut self) {
        let (slices, items) = (self.slices.len(), self.place.len());
        if !self.is_settled() || slices < 2 || items * 2 > (slices - 1) * self.capacity {
            return;
        }
        // The last one, since facts only move to lower numbers, which count while they are in both.
        let Some((from, moving)) = self.slices.last_key_value().map(|(from, slice)| (*from, slice.clone()))
        else {
            return;
        };
        let others = self.slices.range(..from).map(|(index, slice)| (slice.len(), *index));
        let mut targets: Vec<(usize, u32)> = others.filter(|(len, _)| *len < self.capacity).collect();
        // The fullest first: the fewest slices are written.
        targets.sort_unstable();
        for (key, value) in moving {
            while targets.last().is_some_and(|(len, _)| *len >= self.capacity) {
                targets.pop();
            }
            // There is room: less than half of the others is used.
            let Some((len, index)) = targets.last_mut() else { return };
            *len += 1;
            self.slices.entry(*index).or_default().insert(key.clone(), value);
            self.place.insert(key, *index);
            self.dirty.insert(*index);
        }
        self.emptying = Some(from);
    }

    /// The slice for one more fact: one that is written anyway, else the fullest with room, else a new one.
    fn room(&self) -> u32 {
        let has_room = |index: &u32| {
            Some(*index) != self.emptying
                && !self.unwritable.contains(index)
                && self.slices.get(index).is_some_and(|slice| slice.len() < self.capacity)
        };
        if let Some(index) = self.dirty.iter().copied().find(has_room) {
            return index;
        }
        let fullest = self.slices.iter().filter(|(index, _)| has_room(index));
        let fullest = fullest.max_by_key(|(index, slice)| (slice.len(), u32::MAX - **index));
        if let Some((index, _)) = fullest {
            return *index;
        }
        (0..=u32::MAX).find(|index| !self.slices.contains_key(index)).unwrap_or(0)
    }

    /// All slices, for tests and for whoever compares them with what is there.
    pub fn slices(&self) -> impl Iterator<Item = (u32, &BTreeMap<K, V>)> {
        self.slices.iter().map(|(index, slice)| (*index, slice))
    }

    /// How many facts there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.place.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.place.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slices::Slices;

    const CAPACITY: usize = 4;

    /// Slices as the API has them, with a reader that sees every write.
    #[derive(Default)]
    struct Api {
        slices: BTreeMap<u32, (BTreeMap<u32, u32>, bool)>,
        reader: Slices<u32, u32>,
        seen: BTreeMap<u32, u32>,
        writes: usize,
    }

    impl Api {
        fn tell(&mut self, index: u32) {
            let slice = self.slices.get(&index).cloned();
            let changes = self.reader.change(index, slice);
            self.take(changes);
        }

        fn take(&mut self, changes: Vec<(u32, Option<u32>)>) {
            for (key, value) in changes {
                match value {
                    Some(value) => drop(self.seen.insert(key, value)),
                    None => drop(self.seen.remove(&key)),
                }
            }
        }

        /// One write of one slice.
        fn write(&mut self, packer: &mut Packer<u32, u32>, index: u32) {
            match packer.step(index) {
                Step::Put { items, complete } => {
                    drop(self.slices.insert(index, (items.clone(), complete)));
                }
                Step::Delete => drop(self.slices.remove(&index)),
            }
            self.writes += 1;
            self.tell(index);
            packer.written(index);
        }

        fn settle(&mut self, packer: &mut Packer<u32, u32>, which: impl Fn(usize) -> usize) {
            for _ in 0..1000 {
                let due: Vec<u32> = packer.due().collect();
                if due.is_empty() {
                    return;
                }
                self.write(packer, due[which(due.len())]);
            }
            panic!("there is always something to be written");
        }

        fn adopted(&self) -> Packer<u32, u32> {
            let mut packer = Packer::new(CAPACITY);
            for (index, (items, complete)) in &self.slices {
                packer.adopt(*index, items.clone(), *complete);
            }
            packer
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Happening {
        Set(u32, u32),
        Remove(u32),
        Write(usize),
        Pack,
        NewLeader,
        Lose(u32),
    }

    fn happening() -> impl Strategy<Value = Happening> {
        prop_oneof![
            6 => (0_u32..40, 0_u32..3).prop_map(|(key, value)| Happening::Set(key, value)),
            4 => (0_u32..40).prop_map(Happening::Remove),
            6 => (0_usize..8).prop_map(Happening::Write),
            2 => Just(Happening::Pack),
            1 => Just(Happening::NewLeader),
            1 => (0_u32..8).prop_map(Happening::Lose),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_readers_end_with_all_facts_each_in_one_slice(
            happenings in prop::collection::vec(happening(), 0..120)
        ) {
            let (mut api, mut packer) = (Api::default(), Packer::new(CAPACITY));
            let mut facts = BTreeMap::new();
            // What was removed and came back may have another place.
            let mut came_back = BTreeSet::new();
            api.reader.synced();
            for happening in happenings {
                match happening {
                    Happening::Set(key, value) => {
                        facts.insert(key, value);
                        packer.set(key, value);
                    }
                    Happening::Remove(key) => {
                        facts.remove(&key);
                        came_back.insert(key);
                        packer.remove(&key);
                    }
                    Happening::Write(n) => {
                        let due: Vec<u32> = packer.due().collect();
                        if !due.is_empty() {
                            // Nothing is in no slice while it moves.
                            let before = api.seen.clone();
                            api.write(&mut packer, due[n % due.len()]);
                            for (key, value) in &facts {
                                let same = before.get(key) == Some(value) && !came_back.contains(key);
                                prop_assert!(!same || api.seen.get(key) == Some(value), "lost {}", key);
                            }
                        }
                    }
                    Happening::Pack => packer.pack(),
                    Happening::NewLeader => {
                        packer = api.adopted();
                        packer.retain(|key| facts.contains_key(key));
                        for (key, value) in &facts {
                            packer.set(*key, *value);
                        }
                    }
                    Happening::Lose(index) => {
                        if api.slices.remove(&index).is_some() {
                            api.tell(index);
                            packer.touch(index);
                        }
                    }
                }
            }
            api.settle(&mut packer, |n| n / 2);
            prop_assert_eq!(&api.seen, &facts);
            let items = api.slices.values().flat_map(|(items, _)| items.keys());
            let written: Vec<u32> = items.copied().collect();
            prop_assert_eq!(written.len(), facts.len(), "each in one slice");
            prop_assert!(api.slices.values().all(|(items, _)| items.len() <= CAPACITY));
            prop_assert!(api.reader.is_whole());
            // From here on, one change is one write.
            for (key, value) in [(3, 7), (100, 1), (3, 8)] {
                let before = api.writes;
                packer.set(key, value);
                api.settle(&mut packer, |_| 0);
                prop_assert_eq!(api.writes, before + 1);
            }
            packer.remove(&100);
            let before = api.writes;
            api.settle(&mut packer, |_| 0);
            prop_assert_eq!(api.writes, before + 1);
        }

        #[test]
        fn a_set_that_shrank_is_packed_and_no_reader_misses_anything(
            stay in prop::collection::btree_set(0_u32..64, 0..20)
        ) {
            let (mut api, mut packer) = (Api::default(), Packer::new(CAPACITY));
            api.reader.synced();
            (0..64).for_each(|key| packer.set(key, key));
            api.settle(&mut packer, |n| n - 1);
            packer.retain(|key| stay.contains(key));
            api.settle(&mut packer, |n| n - 1);
            for _ in 0..64 {
                packer.pack();
                loop {
                    let next = packer.due().next();
                    let Some(index) = next else { break };
                    api.write(&mut packer, index);
                    prop_assert_eq!(api.seen.keys().copied().collect::<Vec<_>>(),
                        stay.iter().copied().collect::<Vec<_>>());
                }
            }
            let most = 2 + 2 * stay.len() / CAPACITY;
            prop_assert!(api.slices.len() <= most, "{} slices for {}", api.slices.len(), stay.len());
        }
    }

    #[test]
    fn a_set_is_complete_only_when_all_of_it_is_written() {
        let (mut api, mut packer) = (Api::default(), Packer::new(CAPACITY));
        (0..20).for_each(|key| packer.set(key, key));
        api.reader.synced();
        assert!(packer.due().all(|index| index != 0), "slice 0 is the last one");
        while api.slices.len() < 4 {
            let next = packer.due().next().expect("there is more");
            api.write(&mut packer, next);
            assert!(!api.reader.is_whole());
        }
        assert_eq!(packer.due().collect::<Vec<_>>(), [0]);
        api.write(&mut packer, 0);
        assert!(api.reader.is_whole() && packer.is_settled());
        // Another leader finds it so, and writes nothing.
        assert!(api.adopted().is_settled());
    }

    #[test]
    fn what_joined_went_into_a_slice_that_nobody_could_write() {
        let (mut api, mut packer) = (Api::default(), Packer::new(CAPACITY));
        (0..6).for_each(|key| packer.set(key, key));
        api.settle(&mut packer, |_| 0);
        // One of its facts is too large for the API server.
        packer.set(4, 400);
        packer.refused(1);
        packer.set(10, 10);
        let others: Vec<u32> = packer.due().filter(|index| *index != 1).collect();
        assert_eq!(others.len(), 1, "a slice of its own");
        api.write(&mut packer, others[0]);
        assert!(api.slices.values().any(|(items, _)| items.contains_key(&10)));
        // It can be written again, and is filled.
        packer.set(4, 4);
        api.settle(&mut packer, |_| 0);
        packer.set(11, 11);
        assert_eq!(packer.due().count(), 1);
        assert!(packer.slices().any(|(index, items)| index == 1 && items.contains_key(&11)));
    }

    #[test]
    fn many_changes_at_once_are_few_writes() {
        let (mut api, mut packer) = (Api::default(), Packer::new(100));
        (0..5000).for_each(|key| packer.set(key, 0));
        api.settle(&mut packer, |_| 0);
        let before = api.writes;
        (5000..5100).for_each(|key| packer.set(key, 0));
        api.settle(&mut packer, |_| 0);
        assert_eq!(api.writes - before, 1, "a hundred nodes that join are one slice");
    }
}
