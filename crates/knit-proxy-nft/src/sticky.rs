//! Service ports with affinity: their endpoints have numbers, by which clients are remembered.
//!
//! An endpoint's slot changes when another one goes, and what is remembered of a client must not. So its
//! number is its own for as long as it is there: `slots` has the numbers to draw from, and `members` the
//! endpoints by number, for each scope that they are in (rule 41).

use std::collections::{BTreeMap, HashMap, HashSet};

use knit_nft::{Data, Element, ElementValue, TableState};
use knit_proxy::diff::Slots;

use crate::ip;
use crate::layout::Sets;
use crate::ports::{EndpointAddress, SetEdit};

/// The numbers of one service port's endpoints. None is ever given to another one.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    of: HashMap<EndpointAddress, u32>,
    next: u32,
}

/// What service ports with affinity have in the kernel, by the number of the service port.
#[derive(Debug, Default)]
pub(crate) struct FoundSticky {
    members: HashMap<u32, BTreeMap<u32, EndpointAddress>>,
    slots: HashMap<u32, BTreeMap<u32, u32>>,
}

/// The elements of one service port with affinity.
#[derive(Debug, Default)]
pub(crate) struct StickyElements {
    pub members: Vec<Element>,
    pub slots: Vec<Element>,
}

impl Numbers {
    /// Numbers for these, who keep theirs if they have one; nobody else has any.
    pub(crate) fn update<'a>(&mut self, places: impl Iterator<Item = &'a EndpointAddress>) {
        let mut known = std::mem::take(&mut self.of);
        for place in places {
            if self.of.contains_key(place) {
                continue;
            }
            let number = known.remove(place).unwrap_or_else(|| {
                self.next = self.next.wrapping_add(1);
                self.next
            });
            self.of.insert(*place, number);
        }
    }

    /// The elements of a service port whose endpoints have these numbers, for the slots of each scope, which
    /// begin at the second part.
    pub(crate) fn elements(
        &self,
        service: u32,
        scopes: [(&Slots<EndpointAddress>, u32); 2],
    ) -> StickyElements {
        let mut found = StickyElements::default();
        for (slots, base) in scopes {
            for (slot, place) in (base..).zip(slots.members()) {
                let Some(number) = self.of.get(place) else { continue };
                let mut member = Element::from_data(ip::marks([service, base, *number]));
                member.value = ElementValue::Data(ip::target(place.0, place.1));
                found.members.push(member);
                let mut drawn = Element::from_data(ip::marks([service, slot]));
                drawn.value = ElementValue::Data(ip::marks([*number]));
                found.slots.push(drawn);
            }
        }
        found
    }
}

impl FoundSticky {
    /// Reads what is there; values that make no sense are left out.
    pub(crate) fn read(state: &TableState, sets: &Sets) -> Self {
        let mut found = Self::default();
        let elements = |set: &knit_nft::Set| {
            state.sets.get(&set.name).into_iter().flat_map(|state| state.elements.values())
        };
        for element in elements(&sets.members) {
            if let ElementValue::Data(value) = &element.value
                && let Some([service, _, number]) = ip::read_marks(&element.key)
                && let Some(place) = ip::read_target(value)
            {
                found.members.entry(service).or_default().insert(number, place);
            }
        }
        for element in elements(&sets.slots) {
            if let ElementValue::Data(value) = &element.value
                && let Some([service, slot]) = ip::read_marks(&element.key)
                && let Some([number]) = ip::read_marks(value)
            {
                found.slots.entry(service).or_default().insert(slot, number);
            }
        }
        found
    }

    /// The numbers that a service port's endpoints have.
    pub(crate) fn numbers(&self, service: u32) -> Numbers {
        let Some(members) = self.members.get(&service) else { return Numbers::default() };
        let next = members.last_key_value().map_or(0, |(number, _)| *number);
        Numbers { of: members.iter().map(|(number, place)| (*place, *number)).collect(), next }
    }

    /// Its endpoints by slot from `base` on, as far as there is no gap.
    pub(crate) fn slots(&self, service: u32, base: u32) -> Slots<EndpointAddress> {
        let (Some(slots), Some(members)) = (self.slots.get(&service), self.members.get(&service)) else {
            return Slots::new();
        };
        let dense = slots.range(base..).zip(base..).take_while(|((slot, _), wanted)| *slot == wanted);
        Slots::found(dense.map_while(|((_, number), _)| members.get(number).copied()).collect())
    }
}

/// Elements of `old` that are not in `new`, and the other way round; an element with another value is another
/// one.
pub(crate) fn swap(edit: &mut SetEdit, old: Vec<Element>, new: Vec<Element>) {
    let same = |list: &[Element], element: &Element| list.iter().any(|e| e == element);
    if old.len().min(new.len()) <= 8 {
        edit.added.extend(new.iter().filter(|e| !same(&old, e)).cloned());
        edit.removed.extend(old.into_iter().filter(|e| !same(&new, e)));
        return;
    }
    let id = |e: &Element| (e.key.clone(), e.key_end.clone(), data(e).cloned());
    let had: HashSet<_> = old.iter().map(id).collect();
    let has: HashSet<_> = new.iter().map(id).collect();
    edit.removed.extend(old.into_iter().filter(|e| !has.contains(&id(e))));
    edit.added.extend(new.into_iter().filter(|e| !had.contains(&id(e))));
}

fn data(element: &Element) -> Option<&Data> {
    match &element.value {
        ElementValue::Data(data) => Some(data),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(last: u8) -> EndpointAddress {
        ([10, 0, 0, last].into(), 80)
    }

    #[test]
    fn rule_41_numbers_stay_with_their_endpoints() {
        let mut numbers = Numbers::default();
        let (one, two, three) = (place(1), place(2), place(3));
        numbers.update([one, two, one].iter());
        let first = numbers.of[&one];
        let second = numbers.of[&two];
        assert_ne!(first, second);
        numbers.update([two, three].iter());
        assert_eq!(numbers.of.get(&one), None);
        assert_eq!(numbers.of[&two], second);
        // One that comes back is not who it was: what was remembered of it led nowhere, and still does.
        numbers.update([one, two, three].iter());
        assert!(![first, second].contains(&numbers.of[&one]));
    }

    #[test]
    fn a_value_that_changes_under_one_key_is_written_in_small_and_large_sets() {
        for size in [2u32, 100] {
            let element = |slot: u32, number: u32| {
                let mut element = Element::from_data(ip::marks([7, slot]));
                element.value = ElementValue::Data(ip::marks([number]));
                element
            };
            let old: Vec<_> = (0..size).map(|n| element(n, n)).collect();
            let mut new = old.clone();
            new[1] = element(1, 1000);
            let mut edit = SetEdit::default();
            swap(&mut edit, old, new);
            assert_eq!((edit.removed, edit.added), (vec![element(1, 1)], vec![element(1, 1000)]));
        }
    }
}
