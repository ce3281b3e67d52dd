//! Dense slots for the members of a set, kept with as few writes as can be.
//!
//! A backend that picks an endpoint by a random number needs its endpoints at 0, 1 .. n-1. When the set
//! changes, the slots should change as little as possible: a member that goes while another comes is one slot
//! written, a new one is one slot appended, and one that goes leaves its slot to the last one.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// The members of a set, each in its slot.
#[derive(Debug, Clone)]
pub struct Slots<T> {
    members: Vec<T>,
}

/// What to write so that slots follow their set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotChange<T> {
    /// How many slots there were.
    pub old_len: usize,
    /// How many there are now. Where this differs, whoever draws the random number must know.
    pub new_len: usize,
    /// What to write, each slot at most once: first the replaced ones, then the appended, then the removed.
    pub ops: Vec<SlotOp<T>>,
}

/// One slot to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotOp<T> {
    /// The slot had one member and has another now.
    Replace {
        /// The slot.
        slot: usize,
        /// Who was there.
        old: T,
        /// Who is there now.
        new: T,
    },
    /// The slot is new.
    Append {
        /// The slot.
        slot: usize,
        /// Who is there.
        new: T,
    },
    /// The slot is no more.
    Remove {
        /// The slot.
        slot: usize,
        /// Who was there.
        old: T,
    },
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { members: Vec::new() }
    }
}

impl<T: Clone + Eq + Hash> Slots<T> {
    /// No members.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Slots as they were found, after a restart: member `i` is in slot `i`.
    ///
    /// Members that are there twice, as a kernel table written by somebody else may have them, are repaired
    /// by the next [`update`](Self::update).
    #[must_use]
    pub fn found(members: Vec<T>) -> Self {
        Self { members }
    }

    /// The members, by slot.
    #[must_use]
    pub fn members(&self) -> &[T] {
        &self.members
    }

    /// Makes the members those of `wanted` (duplicates count once), and says what to write.
    ///
    /// The number of writes is the larger of the numbers of members that go and that come; where the set only
    /// shrinks, those moved into free slots come on top, at most one for each that goes.
    pub fn update<'a>(&mut self, wanted: impl IntoIterator<Item = &'a T>) -> SlotChange<T>
    where
        T: 'a,
    {
        // Who is wanted and not there yet, in the order given.
        let mut missing: HashMap<&T, bool> = HashMap::new();
        let mut order: Vec<&T> = Vec::new();
        for member in wanted {
            if missing.insert(member, true).is_none() {
                order.push(member);
            }
        }
        let mut free = BTreeSet::new();
        for (slot, member) in self.members.iter().enumerate() {
            match missing.get_mut(member) {
                Some(still) if *still => *still = false,
                _ => {
                    free.insert(slot);
                }
            }
        }
        let old_len = self.members.len();
        let new_len = order.len();
        let mut coming = order.iter().filter(|m| missing[**m]).map(|m| (*m).clone());
        let mut ops = Vec::new();
        // Low slots first, so that those at the end are the ones left over to be cut off.
        let mut moved: Vec<SlotOp<T>> = Vec::new();
        let mut last = old_len;
        for &slot in &free {
            if slot >= new_len {
                break;
            }
            let new = coming.next().or_else(|| {
                // Nobody new: the last member that stays moves down.
                last = (0..last).rev().find(|s| !free.contains(s))?;
                Some(self.members[last].clone())
            });
            if let Some(new) = new {
                moved.push(SlotOp::Replace { slot, old: self.members[slot].clone(), new });
            }
        }
        ops.append(&mut moved);
        for (i, new) in coming.enumerate() {
            ops.push(SlotOp::Append { slot: old_len + i, new });
        }
        for slot in (new_len..old_len).rev() {
            ops.push(SlotOp::Remove { slot, old: self.members[slot].clone() });
        }
        for op in &ops {
            match op {
                SlotOp::Replace { slot, new, .. } => self.members[*slot] = new.clone(),
                SlotOp::Append { new, .. } => self.members.push(new.clone()),
                SlotOp::Remove { .. } => {
                    self.members.pop();
                }
            }
        }
        SlotChange { old_len, new_len, ops }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_for_another_is_one_write() {
        let mut slots = Slots::found(vec!['a', 'b', 'c']);
        let change = slots.update(&['a', 'x', 'c']);
        assert_eq!(change.ops, [SlotOp::Replace { slot: 1, old: 'b', new: 'x' }]);
    }

    #[test]
    fn one_more_is_appended_and_one_less_moves_the_last() {
        let mut slots = Slots::found(vec!['a', 'b', 'c']);
        assert_eq!(slots.update(&['a', 'b', 'c', 'd']).ops, [SlotOp::Append { slot: 3, new: 'd' }]);
        let change = slots.update(&['b', 'c', 'd']);
        assert_eq!(
            change.ops,
            [SlotOp::Replace { slot: 0, old: 'a', new: 'd' }, SlotOp::Remove { slot: 3, old: 'd' }]
        );
        assert_eq!((change.old_len, change.new_len), (4, 3));
        assert_eq!(slots.members(), ['d', 'b', 'c']);
    }

    #[test]
    fn duplicates_found_at_a_restart_are_put_right() {
        let mut slots = Slots::found(vec!['a', 'a', 'b']);
        slots.update(&['a', 'b']);
        let set: HashSet<_> = slots.members().iter().copied().collect();
        assert_eq!((slots.members().len(), set), (2, HashSet::from(['a', 'b'])));
    }

    proptest! {
        #[test]
        fn slots_follow_the_set_with_few_writes(
            sets in prop::collection::vec(prop::collection::hash_set(0u8..30, 0..20), 1..20),
        ) {
            let mut slots = Slots::new();
            let mut table: HashMap<usize, u8> = HashMap::new();
            let mut before = HashSet::new();
            for wanted in sets {
                let change = slots.update(&wanted);
                let mut written = HashSet::new();
                for op in &change.ops {
                    match op {
                        SlotOp::Replace { slot, old, new } => {
                            prop_assert_eq!(table.insert(*slot, *new), Some(*old));
                            prop_assert_ne!(old, new);
                            prop_assert!(written.insert(*slot));
                        }
                        SlotOp::Append { slot, new } => {
                            prop_assert_eq!(table.insert(*slot, *new), None);
                            prop_assert!(written.insert(*slot));
                        }
                        SlotOp::Remove { slot, old } => {
                            prop_assert_eq!(table.remove(slot), Some(*old));
                            prop_assert!(written.insert(*slot));
                        }
                    }
                }
                let gone = before.difference(&wanted).count();
                let came = wanted.difference(&before).count();
                let moves = gone.saturating_sub(came);
                prop_assert!(change.ops.len() <= gone.max(came) + moves);
                prop_assert_eq!(table.len(), wanted.len());
                prop_assert_eq!((0..wanted.len()).map(|s| table[&s]).collect::<HashSet<_>>(), wanted.clone());
                prop_assert_eq!(slots.members().len(), wanted.len());
                before = wanted;
            }
        }
    }
}
