//! What classes are called in the kernel.
//!
//! An engine numbers classes as it meets them, and a new run numbers them again. The kernel's numbers outlive
//! that: a class keeps the number that its members have there, so that a restart finds everything right and
//! writes nothing. A number that is in use for something else is never given to a class: a packet that is
//! being judged while a transaction is committed must not find another class's rules under the number that it
//! has in hand. Classes of the two families are apart, and so are their numbers.

use std::collections::{BTreeMap, HashMap, HashSet};

use knit_nft::{Element, TableState};
use knit_policy::sets::{Class, Key, Value};
use knit_types::Family;

use crate::elements::{ANYBODY, class_of, value_of};
use crate::ip;
use crate::layout::Which;
use crate::verdict::family_of;

/// From classes to the kernel's numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    kept: HashMap<Class, u32>,
    /// Numbers up to this one are taken by what was in the kernel.
    above: u32,
}

impl Numbers {
    /// The kernel's number of a class.
    pub(crate) fn of(&self, class: Class) -> u32 {
        if class == Class::ITSELF || class.0 == ANYBODY {
            return class.0;
        }
        self.kept.get(&class).copied().unwrap_or_else(|| self.above.wrapping_add(class.0))
    }

    /// Numbers for the elements of a family, as close as can be to those in the kernel.
    pub(crate) fn matching(
        family: Family,
        wanted: &BTreeMap<Key, Value>,
        found: Option<&TableState>,
    ) -> Self {
        let Some(found) = found else { return Self::default() };
        let mut votes: HashMap<(Class, u32), usize> = HashMap::new();
        for (key, value) in wanted.iter().filter(|(key, _)| family_of(key) == family) {
            let Value::Class(class) = value else { continue };
            if let Some(number) = number_in(found, key) {
                *votes.entry((*class, number)).or_default() += 1;
            }
        }
        let mut votes: Vec<((Class, u32), usize)> = votes.into_iter().collect();
        // The number that most members have. Which comes first among equals must not depend on chance.
        votes.sort_by_key(|(pair, count)| (std::cmp::Reverse(*count), *pair));
        let (mut kept, mut taken) = (HashMap::new(), HashSet::from([ANYBODY, Class::ITSELF.0]));
        for ((class, number), _) in votes {
            if !kept.contains_key(&class) && taken.insert(number) {
                kept.insert(class, number);
            }
        }
        Self { kept, above: highest(family, found) }
    }
}

/// The number that a member of a class has in the kernel.
fn number_in(found: &TableState, key: &Key) -> Option<u32> {
    let (which, first, last) = match key {
        Key::Peer(address) => (Which::Peers, *address, None),
        Key::Block(first, last) => (Which::Blocks, *first, Some(*last)),
        _ => return None,
    };
    let element = found.sets.get(&which.name())?.elements.get(&ip::data(first))?;
    let same = last.is_none_or(|last| *element.last_key() == ip::data(last));
    same.then(|| value_of(element)).flatten()
}

/// The highest number of a class that the kernel has for anything.
fn highest(family: Family, found: &TableState) -> u32 {
    let mut highest = Class::ITSELF.0;
    for which in Which::EVERY {
        let set = found.sets.get(&which.name());
        let elements = set.into_iter().flat_map(|set| set.elements.values());
        let number = |element: &Element| match which {
            Which::Subjects(_) | Which::Itself => None,
            Which::Peers | Which::Blocks => value_of(element),
            Which::Ports(_) | Which::Ranges(_) | Which::Protocols(_) | Which::All(_) => {
                class_of(family, &element.key)
            }
        };
        highest = elements.filter_map(number).fold(highest, u32::max);
    }
    highest
}
