//! Finds the selectors that a set of labels could match without trying all of them.

use std::collections::HashMap;

use crate::model::{Labels, Name, Operator, Selector};

/// Selectors, each with a value, by a label that an object must have to match.
#[derive(Debug)]
pub struct SelectorIndex<T> {
    /// By key and value of one label that the selector asks for.
    by_label: HashMap<Name, HashMap<Name, Vec<T>>>,
    /// Those that ask for no label with a value.
    rest: Vec<T>,
}

impl<T> Default for SelectorIndex<T> {
    fn default() -> Self {
        Self { by_label: HashMap::new(), rest: Vec::new() }
    }
}

impl<T: Clone> SelectorIndex<T> {
    /// Adds a selector and what it is for.
    pub fn insert(&mut self, selector: &Selector, value: &T) {
        match required(selector) {
            Some((key, values)) => {
                let by_value = self.by_label.entry(key.clone()).or_default();
                for wanted in values {
                    by_value.entry(wanted.clone()).or_default().push(value.clone());
                }
            }
            None => self.rest.push(value.clone()),
        }
    }

    /// Takes away what was added with this selector, and is this.
    pub fn remove(&mut self, selector: &Selector, is_it: impl Fn(&T) -> bool) {
        let Some((key, values)) = required(selector) else {
            remove_from(&mut self.rest, &is_it);
            return;
        };
        let Some(by_value) = self.by_label.get_mut(key) else { return };
        for wanted in values {
            if let Some(list) = by_value.get_mut(wanted) {
                remove_from(list, &is_it);
                if list.is_empty() {
                    by_value.remove(wanted);
                }
            }
        }
        if by_value.is_empty() {
            self.by_label.remove(key);
        }
    }

    /// The values of all selectors that these labels could match, each once; the selector itself is still to
    /// be asked.
    pub fn candidates<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = &'a T> {
        // A key has one value in an object, so a selector that is listed under several values is found once.
        let listed = labels.iter().filter_map(|(key, value)| self.by_label.get(key)?.get(value));
        listed.flatten().chain(&self.rest)
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_label.is_empty() && self.rest.is_empty()
    }
}

/// The first label that the selector asks for with a value.
pub(crate) fn required(selector: &Selector) -> Option<(&Name, &[Name])> {
    let found = selector.requirements().iter().find(|r| r.operator == Operator::In)?;
    Some((&found.key, &found.values))
}

fn remove_from<T>(list: &mut Vec<T>, is_it: impl Fn(&T) -> bool) {
    if let Some(at) = list.iter().position(is_it) {
        list.swap_remove(at);
    }
}
