//! What has to be written: a whole table, or what a change makes of it. Pure logic.

use std::collections::BTreeMap;

use knit_nft::{Element, TableState, Transaction};
use knit_policy::sets::{Change, Value};
use knit_types::Family;

use crate::classes::Numbers;
use crate::elements::puts;
use crate::layout::{Router, Which, elements_of, skeleton, table_id};
use crate::verdict::{Elements, family_of};

/// The whole table of a family.
pub(crate) fn state(
    family: Family,
    wanted: &Elements,
    router: &Router,
    logs: bool,
    numbers: &Numbers,
) -> TableState {
    let mut state = skeleton(family, router, logs);
    let mut by_set: BTreeMap<Which, Vec<Element>> = BTreeMap::new();
    for (key, value) in wanted.all().iter().filter(|(key, _)| family_of(key) == family) {
        for put in puts(key, *value, numbers) {
            by_set.entry(put.which).or_default().push(put.element);
        }
    }
    for (which, elements) in by_set {
        elements_of(&mut state, which.set(family)).extend(elements);
    }
    state
}

/// Only what differs. An element that says something else is deleted and made again in one transaction, so
/// that no packet finds it missing.
pub(crate) fn difference(family: Family, changes: &[Change], numbers: &Numbers) -> Transaction {
    let mut gone: BTreeMap<Which, Vec<Element>> = BTreeMap::new();
    let mut come: BTreeMap<Which, Vec<Element>> = BTreeMap::new();
    for change in changes.iter().filter(|change| family_of(&change.key) == family) {
        let all = |value: Option<Value>| value.map(|v| puts(&change.key, v, numbers)).unwrap_or_default();
        let (old, new) = (all(change.old), all(change.new));
        for put in old.iter().filter(|put| !new.contains(put)) {
            gone.entry(put.which).or_default().push(put.element.clone());
        }
        for put in new.iter().filter(|put| !old.contains(put)) {
            come.entry(put.which).or_default().push(put.element.clone());
        }
    }
    let (id, mut tx) = (table_id(family), Transaction::new());
    for (which, elements) in gone {
        tx.delete_elements(&id, &which.set(family), elements);
    }
    for (which, elements) in come {
        tx.create_elements(&id, &which.set(family), elements);
    }
    tx
}
