//! What slices say together, for whoever reads them.

use std::collections::BTreeMap;

/// All slices of one set, as they arrive, and the facts in them.
#[derive(Clone, Debug)]
pub struct Slices<K, V> {
    slices: BTreeMap<u32, BTreeMap<K, V>>,
    /// What was told.
    visible: BTreeMap<K, V>,
    /// Whether all slices that there were have arrived.
    synced: bool,
    /// Whether slice 0 says that the set is complete.
    complete: bool,
}

/// Facts that are there or have changed, and those that are gone.
type Changes<K, V> = Vec<(K, Option<V>)>;

impl<K, V> Default for Slices<K, V> {
    fn default() -> Self {
        Self { slices: BTreeMap::new(), visible: BTreeMap::new(), synced: false, complete: false }
    }
}

impl<K: Clone + Ord, V: Clone + PartialEq> Slices<K, V> {
    /// Facts that are known from before. They count until the set is whole and says otherwise.
    #[must_use]
    pub fn known(known: impl IntoIterator<Item = (K, V)>) -> Self {
        Self { visible: known.into_iter().collect(), ..Self::default() }
    }

    /// A slice is there with these facts, and with whether it says that the set is complete; or it is gone.
    /// What that changes.
    pub fn change(&mut self, index: u32, slice: Option<(BTreeMap<K, V>, bool)>) -> Changes<K, V> {
        let was_whole = self.is_whole();
        if index == 0 {
            self.complete = slice.as_ref().is_some_and(|(_, complete)| *complete);
        }
        let new = slice.map(|(items, _)| items).unwrap_or_default();
        let old = self.slices.remove(&index).unwrap_or_default();
        let mut touched: Vec<K> = old.keys().filter(|key| new.get(key) != old.get(key)).cloned().collect();
        touched.extend(new.keys().filter(|key| !old.contains_key(*key)).cloned());
        if !new.is_empty() {
            self.slices.insert(index, new);
        }
        if self.is_whole() && !was_whole {
            return self.everything();
        }
        let mut changes = Vec::new();
        for key in touched {
            self.judge(key, &mut changes);
        }
        changes
    }

    /// All slices that there were have arrived. What that changes.
    pub fn synced(&mut self) -> Changes<K, V> {
        let was_whole = self.is_whole();
        self.synced = true;
        if self.is_whole() && !was_whole { self.everything() } else { Vec::new() }
    }

    /// Whether all facts are known: nothing is missing, and what is gone was forgotten.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.synced && self.complete
    }

    /// Everything that is known.
    #[must_use]
    pub fn all(&self) -> &BTreeMap<K, V> {
        &self.visible
    }

    fn everything(&mut self) -> Changes<K, V> {
        let mut keys: Vec<K> = self.visible.keys().cloned().collect();
        keys.extend(self.slices.values().flat_map(|slice| slice.keys().cloned()));
        keys.sort();
        keys.dedup();
        let mut changes = Vec::new();
        for key in keys {
            self.judge(key, &mut changes);
        }
        changes
    }

    fn judge(&mut self, key: K, changes: &mut Changes<K, V>) {
        let value = self.slices.values().find_map(|slice| slice.get(&key)).cloned();
        match value {
            Some(value) => {
                if self.visible.get(&key) != Some(&value) {
                    self.visible.insert(key.clone(), value.clone());
                    changes.push((key, Some(value)));
                }
            }
            // Somebody is still writing, or something was deleted that should not have been.
            None if !self.is_whole() => {}
            None => {
                if self.visible.remove(&key).is_some() {
                    changes.push((key, None));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(items: &[(&'static str, u32)], complete: bool) -> Option<(BTreeMap<&'static str, u32>, bool)> {
        Some((items.iter().copied().collect(), complete))
    }

    #[test]
    fn what_is_known_from_before_stays_until_the_set_is_complete() {
        let mut slices = Slices::known([("a", 1), ("gone", 1)]);
        assert_eq!(slices.change(1, slice(&[("b", 2)], false)), [("b", Some(2))]);
        assert_eq!(slices.synced(), []);
        assert!(!slices.is_whole(), "an old controller writes no slices, or a new one is at it");
        assert_eq!(slices.all().len(), 3);
        assert_eq!(slices.change(0, slice(&[("a", 1)], true)), [("gone", None)]);
        assert!(slices.is_whole());
        assert_eq!(slices.change(1, slice(&[], false)), [("b", None)]);
    }

    #[test]
    fn slices_that_somebody_deletes_take_nothing_with_them() {
        let mut slices = Slices::default();
        slices.change(0, slice(&[("a", 1)], true));
        slices.change(1, slice(&[("b", 2)], false));
        slices.synced();
        // kubectl delete --all, in the order of names.
        assert_eq!(slices.change(0, None), []);
        assert_eq!(slices.change(1, None), []);
        assert_eq!(slices.all().len(), 2);
        // The controller writes them again.
        assert_eq!(slices.change(0, slice(&[("b", 2)], true)), [("a", None)]);
    }

    #[test]
    fn of_a_fact_in_two_slices_the_lower_number_counts() {
        let mut slices = Slices::default();
        slices.change(0, slice(&[], true));
        slices.synced();
        assert_eq!(slices.change(2, slice(&[("a", 1)], false)), [("a", Some(1))]);
        assert_eq!(slices.change(1, slice(&[("a", 2)], false)), [("a", Some(2))]);
        assert_eq!(slices.change(2, None), []);
        assert_eq!(slices.change(1, None), [("a", None)]);
    }
}
