//! A table as it is, or as it is wanted: what listings return, what the diff compares, what the fake changes.

use std::collections::BTreeMap;

use crate::data::Data;
use crate::expr::AnonymousSet;
use crate::object::{Chain, Element, Name, Set, Table, TableId};
use crate::rule::Rule;

/// A table with its chains, rules, sets and elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableState {
    /// The table.
    pub table: Table,
    /// Its chains by name.
    pub chains: BTreeMap<Name, ChainState>,
    /// Its named sets and maps. Anonymous ones are part of their rules.
    pub sets: BTreeMap<Name, SetState>,
}

/// A chain with its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainState {
    /// The chain.
    pub chain: Chain,
    /// Its rules in order.
    pub rules: Vec<RuleState>,
}

/// A rule as it stands in a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// What the kernel calls it; 0 for a rule that is only wanted.
    pub handle: u64,
    /// The rule.
    pub rule: Rule,
    /// Packets and bytes of its counter, if it has one.
    pub counter: Option<(u64, u64)>,
}

/// A set or map with its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetState {
    /// The set.
    pub set: Set,
    /// Its elements by key (the first key of a range).
    pub elements: BTreeMap<Data, Element>,
}

impl TableState {
    /// An empty table.
    pub fn new(table: impl Into<Table>) -> Self {
        Self { table: table.into(), chains: BTreeMap::new(), sets: BTreeMap::new() }
    }

    /// Its family and name.
    pub fn id(&self) -> &TableId {
        &self.table.id
    }

    /// With one more chain of these rules.
    pub fn chain(mut self, chain: Chain, rules: impl IntoIterator<Item = Rule>) -> Self {
        let rules = rules.into_iter().map(RuleState::wanted).collect();
        self.chains.insert(chain.name.clone(), ChainState { chain, rules });
        self
    }

    /// With one more set or map of these elements.
    pub fn set(mut self, set: Set, elements: impl IntoIterator<Item = Element>) -> Self {
        let mut state = SetState { set, elements: BTreeMap::new() };
        state.extend(elements);
        self.sets.insert(state.set.name.clone(), state);
        self
    }

    /// The same without what only the kernel knows: handles and counters. Two tables that behave the same are
    /// equal after this.
    pub fn without_handles(mut self) -> Self {
        for chain in self.chains.values_mut() {
            for rule in &mut chain.rules {
                rule.handle = 0;
                rule.counter = None;
            }
        }
        self
    }
}

impl RuleState {
    /// A rule that is not in the kernel yet.
    pub fn wanted(mut rule: Rule) -> Self {
        for AnonymousSet { set, elements } in &mut rule.sets {
            for element in elements.iter_mut() {
                element.make_canonical(set);
            }
        }
        Self { handle: 0, rule, counter: None }
    }
}

impl SetState {
    /// Adds elements, or puts them in the place of those with the same key.
    pub fn extend(&mut self, elements: impl IntoIterator<Item = Element>) {
        for mut element in elements {
            element.make_canonical(&self.set);
            self.elements.insert(element.key.clone(), element);
        }
    }
}

impl Element {
    /// Brings an element to the one form that listings have.
    pub(crate) fn make_canonical(&mut self, set: &Set) {
        if !set.interval || self.key_end.as_deref() == Some(&self.key) {
            self.key_end = None;
        }
        if self.timeout == set.timeout {
            self.timeout = None;
        }
    }
}
