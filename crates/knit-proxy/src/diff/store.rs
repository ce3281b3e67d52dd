//! A keyed store that says what changed.
//!
//! Two ways to feed it, which may be mixed: single [`set`](Store::set) and [`delete`](Store::delete), or full
//! state between [`begin`](Store::begin) and [`sweep`](Store::sweep), where what was not set again is
//! deleted. What is taken out with [`take`](Store::take) is the least that leads from the state at the last
//! `take` to the one now: a value set twice is one delta, one that came and went again is none, and one that
//! is as it was is none.
//!
//! ```
//! use knit_proxy::diff::{Delta, Store};
//!
//! let mut store = Store::new();
//! store.set("a", 1);
//! store.set("b", 2);
//! assert_eq!(store.take(), [Delta::Set("a", 1), Delta::Set("b", 2)]);
//!
//! store.begin();
//! store.set("b", 2);
//! store.set("c", 3);
//! store.sweep();
//! assert_eq!(store.take(), [Delta::Delete("a"), Delta::Set("c", 3)]);
//! ```

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeBounds;

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta<K, V> {
    /// The key has this value now, and had none or another one before.
    Set(K, V),
    /// The key has no value any more.
    Delete(K),
}

/// Keyed values, and what changed about them since the last [`take`](Self::take).
#[derive(Debug, Clone)]
pub struct Store<K, V> {
    values: BTreeMap<K, Value<V>>,
    /// What the values were at the last `take`, for those that were touched since.
    before: BTreeMap<K, Option<V>>,
    pass: u64,
}

#[derive(Debug, Clone)]
struct Value<V> {
    value: V,
    /// The pass in which it was set last.
    pass: u64,
}

impl<K, V> Delta<K, V> {
    /// The key that it is about.
    pub fn into_key(self) -> K {
        match self {
            Self::Set(key, _) | Self::Delete(key) => key,
        }
    }
}

impl<K, V> Default for Store<K, V> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), before: BTreeMap::new(), pass: 0 }
    }
}

impl<K: Ord + Clone, V: PartialEq + Clone> Store<K, V> {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a value.
    pub fn set(&mut self, key: K, value: V) {
        let pass = self.pass;
        match self.values.entry(key) {
            Entry::Vacant(entry) => {
                self.before.entry(entry.key().clone()).or_insert(None);
                entry.insert(Value { value, pass });
            }
            Entry::Occupied(mut entry) => {
                entry.get_mut().pass = pass;
                if entry.get().value != value {
                    let key = entry.key().clone();
                    let old = std::mem::replace(&mut entry.get_mut().value, value);
                    self.before.entry(key).or_insert(Some(old));
                }
            }
        }
    }

    /// Deletes a value, if there is one.
    pub fn delete(&mut self, key: &K) {
        if let Some((key, old)) = self.values.remove_entry(key) {
            self.before.entry(key).or_insert(Some(old.value));
        }
    }

    /// Begins a full state: what is not set again until [`sweep`](Self::sweep) is deleted then.
    pub fn begin(&mut self) {
        self.pass += 1;
    }

    /// Ends a full state.
    pub fn sweep(&mut self) {
        let gone: Vec<K> =
            self.values.iter().filter(|(_, v)| v.pass != self.pass).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| self.delete(key));
    }

    /// Takes the differences since the last call, sorted by key.
    pub fn take(&mut self) -> Vec<Delta<K, V>> {
        let mut deltas = Vec::with_capacity(self.before.len());
        for (key, before) in std::mem::take(&mut self.before) {
            match (before, self.values.get(&key)) {
                (Some(old), Some(new)) if old == new.value => {}
                (_, Some(new)) => deltas.push(Delta::Set(key, new.value.clone())),
                (Some(_), None) => deltas.push(Delta::Delete(key)),
                (None, None) => {}
            }
        }
        deltas
    }

    /// Whether [`take`](Self::take) may have something to give.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.before.is_empty()
    }

    /// A value.
    #[must_use]
    pub fn get(&self, key: &K) -> Option<&V> {
        self.values.get(key).map(|v| &v.value)
    }

    /// The values whose keys are in a range, sorted by key.
    pub fn range(&self, keys: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        self.values.range(keys).map(|(key, v)| (key, &v.value))
    }

    /// All values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.values.iter().map(|(key, v)| (key, &v.value))
    }

    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Set(u8, u8),
        Delete(u8),
        Full(Vec<(u8, u8)>),
        Take,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u8..8, 0u8..3).prop_map(|(k, v)| Op::Set(k, v)),
            3 => (0u8..8).prop_map(Op::Delete),
            1 => prop::collection::vec((0u8..8, 0u8..3), 0..8).prop_map(Op::Full),
            1 => Just(Op::Take),
        ]
    }

    proptest! {
        /// A follower that applies the deltas has the same state, and no delta is for nothing.
        #[test]
        fn deltas_are_right_and_minimal(ops in prop::collection::vec(op(), 0..60)) {
            let mut store = Store::new();
            let mut truth: BTreeMap<u8, u8> = BTreeMap::new();
            let mut follower: BTreeMap<u8, u8> = BTreeMap::new();
            for op in ops.into_iter().chain([Op::Take]) {
                match op {
                    Op::Set(k, v) => { store.set(k, v); truth.insert(k, v); }
                    Op::Delete(k) => { store.delete(&k); truth.remove(&k); }
                    Op::Full(all) => {
                        store.begin();
                        truth = all.iter().copied().collect();
                        for (k, v) in all { store.set(k, v); }
                        store.sweep();
                    }
                    Op::Take => {
                        for delta in store.take() {
                            match delta {
                                Delta::Set(k, v) => prop_assert_ne!(follower.insert(k, v), Some(v)),
                                Delta::Delete(k) => prop_assert!(follower.remove(&k).is_some()),
                            }
                        }
                        prop_assert_eq!(&follower, &truth);
                        prop_assert!(!store.is_dirty());
                    }
                }
            }
            prop_assert_eq!(store.iter().map(|(k, v)| (*k, *v)).collect::<BTreeMap<_, _>>(), truth);
        }
    }
}
