//! Which slices of one kind have to be written, and when. Time comes from the caller.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use knit_model::slices::{Packer, Step};

use super::kinds::{SliceKey, SliceKind};

/// The shortest time between two writes of one slice: what changes meanwhile is written together.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// How long after a write that failed it is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(3);

/// All slices of one kind.
pub struct Keeper<S: SliceKind> {
    sets: BTreeMap<String, Set<S>>,
    /// The set that each item is in.
    set_of: HashMap<String, String>,
    /// Sets that are there even without items.
    wanted: BTreeSet<String>,
}

struct Set<S: SliceKind> {
    packer: Packer<String, S::Item>,
    /// The slices that are there.
    found: BTreeMap<u32, Kept>,
    /// When a slice may be written next.
    next: BTreeMap<u32, Duration>,
}

/// A slice as it is in the API.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Kept {
    /// The object's name.
    pub name: String,
    /// Which one of that name.
    pub uid: String,
    /// Its version.
    pub version: String,
}

/// One write that is to be made.
#[derive(Clone, Debug, PartialEq)]
pub enum Order<O> {
    /// Create it.
    Create(SliceKey, Box<O>),
    /// Put it in place of this version.
    Replace(SliceKey, Kept, Box<O>),
    /// Delete it.
    Delete(SliceKey, Kept),
}

impl<O> Order<O> {
    /// The slice that it is about.
    pub fn place(&self) -> &SliceKey {
        match self {
            Self::Create(place, _) | Self::Replace(place, ..) | Self::Delete(place, _) => place,
        }
    }
}

impl<S: SliceKind> Default for Keeper<S> {
    fn default() -> Self {
        Self { sets: BTreeMap::new(), set_of: HashMap::new(), wanted: BTreeSet::new() }
    }
}

impl<S: SliceKind> Keeper<S> {
    /// Begins with the slices as they are, and with all items there are.
    pub fn begin(slices: Vec<(Kept, S::Object)>, items: Vec<(String, S::Item)>) -> Self {
        let mut keeper = Self::default();
        for (kept, object) in slices {
            let (place, complete, listed) = S::read(&object);
            let set = keeper.set(&place.set);
            let listed = listed.into_iter().map(|item| (S::key(&item).to_owned(), item));
            set.packer.adopt(place.index, listed, complete);
            set.found.insert(place.index, kept);
        }
        let there: HashMap<&str, &str> =
            items.iter().map(|(set, item)| (S::key(item), set.as_str())).collect();
        for (name, set) in &mut keeper.sets {
            set.packer.retain(|key| there.get(key.as_str()) == Some(&name.as_str()));
        }
        drop(there);
        for (set, item) in items {
            keeper.put(&set, item);
        }
        keeper
    }

    fn set(&mut self, name: &str) -> &mut Set<S> {
        self.sets.entry(name.to_owned()).or_insert_with(|| Set {
            packer: Packer::new(S::CAPACITY),
            found: BTreeMap::new(),
            next: BTreeMap::new(),
        })
    }

    /// A set is there, even if nothing is in it; or need not be.
    pub fn want(&mut self, set: &str, wanted: bool) {
        if wanted {
            self.wanted.insert(set.to_owned());
            self.set(set);
        } else {
            self.wanted.remove(set);
        }
    }

    /// Whether a set is there even if nothing is in it.
    pub fn wants(&self, set: &str) -> bool {
        self.wanted.contains(set)
    }

    /// An item is there.
    pub fn put(&mut self, set: &str, item: S::Item) {
        let key = S::key(&item).to_owned();
        if self.set_of.get(&key).is_some_and(|before| before != set) {
            self.remove(&key);
        }
        self.set_of.insert(key.clone(), set.to_owned());
        self.set(set).packer.set(key, item);
    }

    /// An item is gone.
    pub fn remove(&mut self, key: &str) {
        if let Some(set) = self.set_of.remove(key)
            && let Some(set) = self.sets.get_mut(&set)
        {
            set.packer.remove(&key.to_owned());
        }
    }

    /// A slice is there in this version. If it is not as it should be, it is written again.
    pub fn seen(&mut self, kept: Kept, object: &S::Object) {
        let (place, complete, listed) = S::read(object);
        let set = self.set(&place.set);
        if set.found.get(&place.index).is_some_and(|found| is_newer(&found.version, &kept.version)) {
            return;
        }
        let listed: BTreeMap<String, S::Item> =
            listed.into_iter().map(|item| (S::key(&item).to_owned(), item)).collect();
        let same = match set.packer.step(place.index) {
            Step::Put { items, complete: whole } => *items == listed && (complete || !whole),
            Step::Delete => false,
        };
        let other_name = S::object(&place, Vec::new(), false);
        let right_name = kube::Resource::meta(&other_name).name.as_deref() == Some(kept.name.as_str());
        if !right_name {
            // Somebody made it; ours has another name.
            return;
        }
        set.found.insert(place.index, kept);
        if !same {
            set.packer.touch(place.index);
            if set.packer.step(place.index) == Step::Delete {
                set.packer.discard(place.index);
            }
        }
    }

    /// A slice of this name is gone.
    pub fn lost(&mut self, name: &str) {
        for set in self.sets.values_mut() {
            let index = set.found.iter().find(|(_, kept)| kept.name == name).map(|(index, _)| *index);
            if let Some(index) = index {
                set.found.remove(&index);
                set.packer.touch(index);
                return;
            }
        }
    }

    /// What is to be written now, and when there will be more.
    pub fn orders(&mut self, now: Duration) -> (Vec<Order<S::Object>>, Option<Duration>) {
        let (mut orders, mut again) = (Vec::new(), None::<Duration>);
        let wanted = &self.wanted;
        self.sets
            .retain(|name, set| !set.found.is_empty() || !set.packer.is_empty() || wanted.contains(name));
        for (name, set) in &mut self.sets {
            let ended = set.packer.is_empty() && !wanted.contains(name);
            if !ended {
                set.packer.pack();
            }
            let due: Vec<u32> =
                if ended { set.found.keys().copied().collect() } else { set.packer.due().collect() };
            for index in due {
                if let Some(next) = set.next.get(&index).copied().filter(|next| *next > now) {
                    again = Some(again.map_or(next, |known| known.min(next)));
                    continue;
                }
                let place = SliceKey { set: name.clone(), index };
                let found = set.found.get(&index).cloned();
                let step = if ended { Step::Delete } else { set.packer.step(index) };
                match (step, found) {
                    (Step::Put { items, complete }, found) => {
                        let object = Box::new(S::object(&place, items.values().cloned().collect(), complete));
                        orders.push(match found {
                            Some(found) => Order::Replace(place, found, object),
                            None => Order::Create(place, object),
                        });
                    }
                    (Step::Delete, Some(found)) => orders.push(Order::Delete(place, found)),
                    (Step::Delete, None) => set.packer.written(index),
                }
            }
        }
        (orders, again)
    }

    /// A write was made; the slice is there in this version, or is gone.
    pub fn done(&mut self, place: &SliceKey, kept: Option<Kept>, now: Duration) {
        let Some(set) = self.sets.get_mut(&place.set) else { return };
        match kept {
            Some(kept) => {
                set.found.insert(place.index, kept);
                set.next.insert(place.index, now.saturating_add(WRITE_INTERVAL));
            }
            None => {
                set.found.remove(&place.index);
                set.next.remove(&place.index);
            }
        }
        set.packer.written(place.index);
    }

    /// A write failed. Another version may be there, of which news will come.
    pub fn failed(&mut self, place: &SliceKey, now: Duration) {
        if let Some(set) = self.sets.get_mut(&place.set) {
            set.next.insert(place.index, now.saturating_add(RETRY_DELAY));
        }
    }

    /// What a slice says was refused: nothing further goes into it until it can be written.
    pub fn refused(&mut self, place: &SliceKey) {
        if let Some(set) = self.sets.get_mut(&place.set) {
            set.packer.refused(place.index);
        }
    }

    /// Whether everything is written.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.sets.values().all(|set| set.packer.is_settled())
    }
}

impl<S: SliceKind> std::fmt::Debug for Keeper<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("sets", &self.sets.len()).field("items", &self.set_of.len()).finish()
    }
}

/// Whether one version is newer than another. Versions are numbers wherever Kubernetes is; where they are not
/// nothing can be said.
fn is_newer(one: &str, other: &str) -> bool {
    one.parse::<u64>().ok().zip(other.parse::<u64>().ok()).is_some_and(|(one, other)| one > other)
}
