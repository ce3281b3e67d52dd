//! A table as it is wanted: its fixed shape, what is there and is somebody else's, and what this one wants.

use std::collections::BTreeMap;

use knit_nft::{Element, Name, Set, TableState};

use super::SetElement;

/// What one Network wants in a table that several share.
pub(crate) struct Elements<'a> {
    /// The elements that it wants.
    pub wanted: Vec<SetElement>,
    /// Whether an element that is there is this Network's to keep or remove; others' stay as they are.
    pub owns: &'a dyn Fn(&Name, &Element) -> bool,
}

impl Elements<'static> {
    /// None, and none are owned.
    pub fn none() -> Self {
        Self { wanted: Vec::new(), owns: &|_, _| false }
    }
}

/// The table as it should be.
pub(crate) fn merge(layout: TableState, found: Option<&TableState>, elements: &Elements<'_>) -> TableState {
    let mut wanted = layout;
    for (name, state) in &mut wanted.sets {
        // What rules add comes by itself.
        if state.set.dynamic {
            continue;
        }
        let there =
            found.and_then(|found| found.sets.get(name)).filter(|there| alike(&there.set, &state.set));
        let others = there.into_iter().flat_map(|there| there.elements.values());
        state.extend(others.filter(|element| !(elements.owns)(name, element)).cloned());
    }
    let mut additions: BTreeMap<Name, Vec<Element>> = BTreeMap::new();
    let unchecked = found.map(super::tunnel::unchecked_of).unwrap_or_default();
    let others = unchecked.iter().filter(|put| !(elements.owns)(&put.set.name, &put.element));
    for put in elements.wanted.iter().chain(others) {
        additions.entry(put.set.name.clone()).or_default().push(put.element.clone());
    }
    for (name, more) in additions {
        if let Some(state) = wanted.sets.get_mut(&name) {
            state.extend(more);
        }
    }
    wanted
}

/// Whether the elements of one set can be those of another. A new version may change what else there is of a
/// set (its comment, its size), and other Networks' elements must not be away until each of them is set up
/// again. A key is never changed under its name: such a set gets a new one.
fn alike(a: &Set, b: &Set) -> bool {
    a.key == b.key && a.kind == b.kind && a.interval == b.interval
}

/// The interface that an element is about, if its key begins with one.
pub(crate) fn interface(element: &Element) -> String {
    let key = element.key.as_slice();
    let name = key.get(..16).unwrap_or_default();
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}
