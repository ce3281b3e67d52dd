//! A table as it is wanted: its fixed shape, what is there and is somebody else's, and what this one wants.

use std::collections::BTreeMap;

use knit_kernel::nft::{Element, Name, TableState};

use super::Put;

/// What one Network wants in a table that several share.
pub(crate) struct Elements<'a> {
    /// The elements that it wants.
    pub wanted: Vec<Put>,
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
        let there = found.and_then(|found| found.sets.get(name)).filter(|there| there.set == state.set);
        let others = there.into_iter().flat_map(|there| there.elements.values());
        state.extend(others.filter(|element| !(elements.owns)(name, element)).cloned());
    }
    let mut additions: BTreeMap<Name, Vec<Element>> = BTreeMap::new();
    for put in &elements.wanted {
        additions.entry(put.set.name.clone()).or_default().push(put.element.clone());
    }
    for (name, more) in additions {
        if let Some(state) = wanted.sets.get_mut(&name) {
            state.extend(more);
        }
    }
    wanted
}

/// The interface that an element is about, if its key begins with one.
pub(crate) fn interface(element: &Element) -> String {
    let key = element.key.as_slice();
    let name = key.get(..16).unwrap_or_default();
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}
