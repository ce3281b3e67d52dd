//! The smallest transaction from what is there to what is wanted.
//!
//! Its order is such that it may also be sent in chunks: new chains and sets, elements, rules of regular
//! chains, base chains and their rules; then deletions, users before what they use.

use std::collections::BTreeSet;

use crate::object::{Chain, Element, Name, Set, TableId};
use crate::rule::Rule;
use crate::state::{ChainState, RuleState, SetState, TableState};
use crate::transaction::{Place, Transaction};

/// What turns `found` (none: no such table) into `wanted`.
///
/// Objects that are equal are left alone, which keeps counters, dynamic elements and connections. A chain
/// whose hook changed and a set whose type changed are deleted and made again, with the rules that use them.
/// Elements that rules added to a dynamic set are nobody's wish, and stay.
pub fn diff(found: Option<&TableState>, wanted: &TableState) -> Transaction {
    let mut tx = Transaction::new();
    let id = wanted.id();
    let found = match found {
        // A comment or flag of the table cannot be changed in place.
        Some(found) if found.table != wanted.table => {
            tx.delete_table(id);
            None
        }
        other => other,
    };
    let empty = TableState::new(wanted.table.clone());
    let found = found.unwrap_or_else(|| {
        tx.create_table(wanted.table.clone());
        &empty
    });
    if must_rebuild(found, wanted) {
        // Something was remade under its old name: everything that refers to it would have to let go first.
        // Rare (a new version of the layout), so the table is made again as a whole, in one transaction.
        tx.delete_table(id).create_table(wanted.table.clone());
        Differ { id, found: &empty, wanted, tx }.run()
    } else {
        Differ { id, found, wanted, tx }.run()
    }
}

struct Differ<'a> {
    id: &'a TableId,
    found: &'a TableState,
    wanted: &'a TableState,
    tx: Transaction,
}

/// Whether an object is there under its name, but as something else.
fn must_rebuild(found: &TableState, wanted: &TableState) -> bool {
    let chain = |name: &Name, new: &ChainState| {
        found.chains.get(name).is_some_and(|old| !same_chain_but_policy(&old.chain, &new.chain))
    };
    let set = |name: &Name, new: &SetState| found.sets.get(name).is_some_and(|old| old.set != new.set);
    wanted.chains.iter().any(|(name, new)| chain(name, new))
        || wanted.sets.iter().any(|(name, new)| set(name, new))
}

fn same_chain_but_policy(a: &Chain, b: &Chain) -> bool {
    let mut a = a.clone();
    if let (Some(a), Some(b)) = (&mut a.base, &b.base) {
        a.policy = b.policy;
    }
    a == *b
}

impl Differ<'_> {
    fn run(mut self) -> Transaction {
        let (regular, base): (Vec<_>, Vec<_>) =
            self.wanted.chains.values().partition(|state| state.chain.base.is_none());
        for state in &regular {
            self.chain(state);
        }
        for state in self.wanted.sets.values() {
            if !self.found.sets.contains_key(&state.set.name) {
                self.tx.add_set(self.id, state.set.clone());
            }
        }
        // Values before verdicts: where this goes out in chunks, a verdict map is what sends packets
        // somewhere.
        let (values, verdicts): (Vec<_>, Vec<_>) =
            self.wanted.sets.values().partition(|state| state.set.kind != crate::object::SetKind::VerdictMap);
        for state in values {
            self.elements(state);
        }
        for state in &regular {
            self.rules(state);
        }
        for state in verdicts {
            self.elements(state);
        }
        for state in &base {
            self.chain(state);
            self.rules(state);
        }
        self.deletions();
        self.tx
    }

    fn chain(&mut self, wanted: &ChainState) {
        if self.found.chains.get(&wanted.chain.name).is_none_or(|old| old.chain != wanted.chain) {
            self.tx.add_chain(self.id, wanted.chain.clone());
        }
    }

    /// Deletes, inserts and appends so that the rules that are there in order stay as they are.
    fn rules(&mut self, wanted: &ChainState) {
        let name = &wanted.chain.name;
        let old: &[RuleState] = self.found.chains.get(name).map_or(&[], |state| &state.rules);
        let kept = longest_common(old, &wanted.rules);
        let stays: BTreeSet<usize> = kept.iter().map(|(old, _)| *old).collect();
        for (index, rule) in old.iter().enumerate() {
            if !stays.contains(&index) {
                self.tx.delete_rule(self.id, name.clone(), rule.handle);
            }
        }
        let mut kept = kept.into_iter().peekable();
        for (index, rule) in wanted.rules.iter().enumerate() {
            match kept.peek() {
                Some((_, at)) if *at == index => {
                    kept.next();
                }
                Some((next, _)) => {
                    let place = Place::Before(old[*next].handle);
                    self.tx.place_rule(self.id, name.clone(), rule.rule.clone(), place);
                }
                None => {
                    self.tx.add_rule(self.id, name.clone(), rule.rule.clone());
                }
            }
        }
    }

    fn elements(&mut self, wanted: &SetState) {
        let set: &Set = &wanted.set;
        let old = self.found.sets.get(&set.name);
        let same = |key: &Element| old.is_some_and(|old| old.elements.get(&key.key) == Some(key));
        let added: Vec<Element> =
            wanted.elements.values().filter(|element| !same(element)).cloned().collect();
        let mut removed = Vec::new();
        for element in old.into_iter().flat_map(|old| old.elements.values()) {
            let stays = match wanted.elements.get(&element.key) {
                Some(new) => new == element,
                None => set.dynamic,
            };
            if !stays {
                removed.push(element.clone());
            }
        }
        if !removed.is_empty() {
            self.tx.delete_elements(self.id, set, removed);
        }
        if !added.is_empty() {
            self.tx.add_elements(self.id, set, added);
        }
    }

    fn deletions(&mut self) {
        let gone: Vec<&ChainState> = self
            .found
            .chains
            .iter()
            .filter(|(name, _)| !self.wanted.chains.contains_key(*name))
            .map(|(_, s)| s)
            .collect();
        for state in &gone {
            if !state.rules.is_empty() {
                self.tx.flush_chain(self.id, state.chain.name.clone());
            }
        }
        for name in self.found.sets.keys() {
            if !self.wanted.sets.contains_key(name) {
                self.tx.delete_set(self.id, name.clone());
            }
        }
        for state in &gone {
            self.tx.delete_chain(self.id, state.chain.name.clone());
        }
    }
}

/// Pairs of places of the longest list of rules that both have in the same order.
fn longest_common(old: &[RuleState], new: &[RuleState]) -> Vec<(usize, usize)> {
    let same = |a: &RuleState, b: &RuleState| -> bool {
        let (a, b): (&Rule, &Rule) = (&a.rule, &b.rule);
        a == b
    };
    // Mostly nothing or little has changed: what both ends share needs no table.
    let head = old.iter().zip(new).take_while(|(a, b)| same(a, b)).count();
    let (old_rest, new_rest) = (&old[head..], &new[head..]);
    let tail = old_rest.iter().rev().zip(new_rest.iter().rev()).take_while(|(a, b)| same(a, b)).count();
    let old_mid = &old_rest[..old_rest.len() - tail];
    let new_mid = &new_rest[..new_rest.len() - tail];

    let width = new_mid.len() + 1;
    let mut lengths = vec![0u32; (old_mid.len() + 1) * width];
    for (i, a) in old_mid.iter().enumerate().rev() {
        for (j, b) in new_mid.iter().enumerate().rev() {
            lengths[i * width + j] = if same(a, b) {
                lengths[(i + 1) * width + j + 1] + 1
            } else {
                lengths[(i + 1) * width + j].max(lengths[i * width + j + 1])
            };
        }
    }
    let mut pairs: Vec<(usize, usize)> = (0..head).map(|index| (index, index)).collect();
    let (mut i, mut j) = (0, 0);
    while i < old_mid.len() && j < new_mid.len() {
        if same(&old_mid[i], &new_mid[j]) {
            pairs.push((head + i, head + j));
            i += 1;
            j += 1;
        } else if lengths[(i + 1) * width + j] >= lengths[i * width + j + 1] {
            i += 1;
        } else {
            j += 1;
        }
    }
    let (old_tail, new_tail) = (old.len() - tail, new.len() - tail);
    pairs.extend((0..tail).map(|index| (old_tail + index, new_tail + index)));
    pairs
}
