//! nftables in memory, with the kernel's rules: what exists, what is missing, what is in use, all or nothing.
//!
//! It checks references and names, not whether an expression makes sense: a rule that compares five bytes of
//! a port is refused by the kernel only.

use std::collections::BTreeMap;

use knit_netlink::{Errno, Refusal};

use crate::data::Data;
use crate::encode::Encoded;
use crate::error::{Error, Result};
use crate::object::{Chain, Element, ElementValue, Name, Table, TableId, Verdict};
use crate::rule::Rule;
use crate::state::{ChainState, RuleState, SetState, TableState};
use crate::transaction::{ElementShape, IfExists, Op, Place, Ranges, Transaction};
use crate::{Generation, Nftables};

/// How deep chains may call each other, the base chain included.
const JUMP_STACK: usize = 16;
/// `ERESTART`.
const ERESTART: i32 = 85;

/// nftables in memory.
#[derive(Clone, Debug, Default)]
pub struct Fake {
    tables: BTreeMap<TableId, TableState>,
    generation: u32,
    handles: u64,
    /// The most bytes that one batch may have; no limit by default.
    limit: Option<usize>,
    /// What was committed, in order.
    log: Vec<Transaction>,
}

type Outcome<T = ()> = std::result::Result<T, i32>;

impl Fake {
    /// No tables.
    pub fn new() -> Self {
        Self::default()
    }

    /// As seen by a process that may send at most this many bytes at once.
    pub fn with_limit(limit: usize) -> Self {
        Self { limit: Some(limit), ..Self::default() }
    }

    /// The transactions that were carried out so far.
    pub fn committed(&self) -> &[Transaction] {
        &self.log
    }

    fn carry_out(&mut self, transaction: &Transaction) -> Result<()> {
        let mut next = self.clone();
        for (index, op) in transaction.ops().iter().enumerate() {
            next.op(op).map_err(|(errno, element)| {
                let operation =
                    element.as_ref().map_or_else(|| op.to_string(), |element| op.describe_element(element));
                refused(operation, Some(index), element.map(|element| element.key), errno)
            })?;
        }
        if let Err(errno) = next.tables.values().try_for_each(check_depth) {
            let first = transaction.ops().first().map(ToString::to_string).unwrap_or_default();
            return Err(refused(first, None, None, errno));
        }
        next.generation += 1;
        next.log.push(transaction.clone());
        *self = next;
        Ok(())
    }

    fn op(&mut self, op: &Op) -> std::result::Result<(), (i32, Option<Element>)> {
        match op {
            Op::AddElements { table, shape, elements, if_exists } => {
                let state = self.table_mut(table).map_err(|errno| (errno, None))?;
                elements.iter().try_for_each(|element| {
                    add_element(state, shape, element, *if_exists)
                        .map_err(|errno| (errno, Some(element.clone())))
                })
            }
            Op::DeleteElements { table, shape, elements } => {
                let state = self.table_mut(table).map_err(|errno| (errno, None))?;
                elements.iter().try_for_each(|element| {
                    delete_element(state, shape, element).map_err(|errno| (errno, Some(element.clone())))
                })
            }
            other => self.object_op(other).map_err(|errno| (errno, None)),
        }
    }

    fn object_op(&mut self, op: &Op) -> Outcome {
        match op {
            Op::AddTable { table, if_exists } => self.add_table(table, *if_exists),
            Op::DeleteTable { table } => self.tables.remove(table).map(|_| ()).ok_or(libc::ENOENT),
            Op::FlushTable { table } => {
                self.table_mut(table)?.chains.values_mut().for_each(|chain| chain.rules.clear());
                Ok(())
            }
            Op::AddChain { table, chain, if_exists } => add_chain(self.table_mut(table)?, chain, *if_exists),
            Op::DeleteChain { table, chain } => delete_chain(self.table_mut(table)?, chain),
            Op::FlushChain { table, chain } => {
                chain_mut(self.table_mut(table)?, chain)?.rules.clear();
                Ok(())
            }
            Op::AddRule { table, chain, rule, place } => {
                let handle = self.next_handle();
                let state = self.table_mut(table)?;
                chain_mut(state, chain)?;
                check_references(state, rule)?;
                let rules = &mut chain_mut(state, chain)?.rules;
                let find =
                    |handle: u64| rules.iter().position(|rule| rule.handle == handle).ok_or(libc::ENOENT);
                let at = match place {
                    Place::Last => rules.len(),
                    Place::First => 0,
                    Place::Before(handle) => find(*handle)?,
                    Place::After(handle) => find(*handle)? + 1,
                };
                rules.insert(at, RuleState { handle, ..RuleState::wanted(rule.clone()) });
                Ok(())
            }
            Op::ReplaceRule { table, chain, handle, rule } => {
                let new = self.next_handle();
                let state = self.table_mut(table)?;
                let at = find_rule(state, chain, *handle)?;
                check_references(state, rule)?;
                chain_mut(state, chain)?.rules[at] =
                    RuleState { handle: new, ..RuleState::wanted(rule.clone()) };
                Ok(())
            }
            Op::DeleteRule { table, chain, handle } => {
                let state = self.table_mut(table)?;
                let at = find_rule(state, chain, *handle)?;
                chain_mut(state, chain)?.rules.remove(at);
                Ok(())
            }
            Op::AddSet { table, set, if_exists } => {
                let sets = &mut self.table_mut(table)?.sets;
                match sets.get_mut(&set.name) {
                    None => {
                        let state = SetState { set: set.clone(), elements: BTreeMap::new() };
                        sets.insert(set.name.clone(), state);
                        Ok(())
                    }
                    Some(old) if *if_exists == IfExists::Keep && same_set(&old.set, set) => {
                        old.set.timeout = set.timeout;
                        old.set.size = set.size.or(old.set.size);
                        Ok(())
                    }
                    Some(_) => Err(libc::EEXIST),
                }
            }
            Op::DeleteSet { table, set } => {
                let state = self.table_mut(table)?;
                if !state.sets.contains_key(set) {
                    return Err(libc::ENOENT);
                }
                if all_rules(state).any(|rule| rule.named_sets().any(|used| used == set)) {
                    return Err(libc::EBUSY);
                }
                state.sets.remove(set);
                Ok(())
            }
            Op::FlushSet { table, set } => {
                self.table_mut(table)?.sets.get_mut(set).ok_or(libc::ENOENT)?.elements.clear();
                Ok(())
            }
            Op::AddElements { .. } | Op::DeleteElements { .. } => Ok(()),
        }
    }

    fn next_handle(&mut self) -> u64 {
        self.handles += 1;
        self.handles
    }

    fn table_mut(&mut self, id: &TableId) -> Outcome<&mut TableState> {
        self.tables.get_mut(id).ok_or(libc::ENOENT)
    }

    fn add_table(&mut self, table: &Table, if_exists: IfExists) -> Outcome {
        match self.tables.get_mut(&table.id) {
            Some(_) if if_exists == IfExists::Fail => Err(libc::EEXIST),
            Some(old) => {
                old.table.dormant = table.dormant;
                Ok(())
            }
            None => {
                self.tables.insert(table.id.clone(), TableState::new(table.clone()));
                Ok(())
            }
        }
    }

    fn encode(transaction: &Transaction) -> Result<usize> {
        let mut encoded = Encoded::begin(None);
        for (index, op) in transaction.ops().iter().enumerate() {
            encoded.op(index, op).map_err(|source| Error::Invalid { operation: op.to_string(), source })?;
        }
        encoded.end();
        Ok(encoded.batch.bytes())
    }
}

impl Nftables for Fake {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        if transaction.is_empty() {
            return Ok(());
        }
        let bytes = Self::encode(transaction)?;
        match self.limit {
            Some(limit) if bytes > limit => Err(Error::TooBig { bytes, limit }),
            _ => self.carry_out(transaction),
        }
    }

    fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> Result<()> {
        if !transaction.is_empty() && generation.0 != self.generation {
            let first = transaction.ops().first().map(ToString::to_string).unwrap_or_default();
            return Err(refused(first, None, None, ERESTART));
        }
        self.commit(transaction)
    }

    fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize> {
        let total = transaction.len();
        let bytes = Self::encode(transaction)?;
        match self.limit {
            _ if transaction.is_empty() => Ok(0),
            Some(limit) if bytes > limit => {
                // One change at a time: the finest cut that a caller must be able to live with.
                for (done, op) in transaction.ops().iter().enumerate() {
                    let mut one = Transaction::new();
                    one.push(op.clone());
                    self.carry_out(&one).map_err(|mut source| {
                        if let Error::Refused { index: Some(index), .. } = &mut source {
                            *index = done;
                        }
                        match done {
                            0 => source,
                            _ => Error::Partial { done, total, source: Box::new(source) },
                        }
                    })?;
                }
                Ok(total)
            }
            _ => self.carry_out(transaction).map(|()| 1),
        }
    }

    fn generation(&mut self) -> Result<Generation> {
        Ok(Generation(self.generation))
    }

    fn tables(&mut self) -> Result<Vec<TableId>> {
        Ok(self.tables.keys().cloned().collect())
    }

    fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
        Ok((Generation(self.generation), self.tables.get(table).cloned()))
    }
}

fn chain_mut<'a>(state: &'a mut TableState, chain: &Name) -> Outcome<&'a mut ChainState> {
    state.chains.get_mut(chain).ok_or(libc::ENOENT)
}

fn find_rule(state: &mut TableState, chain: &Name, handle: u64) -> Outcome<usize> {
    chain_mut(state, chain)?.rules.iter().position(|rule| rule.handle == handle).ok_or(libc::ENOENT)
}

fn all_rules(state: &TableState) -> impl Iterator<Item = &Rule> {
    state.chains.values().flat_map(|chain| chain.rules.iter().map(|rule| &rule.rule))
}

/// What the kernel compares when a set is added again; size and timeout it changes.
fn same_set(old: &crate::object::Set, new: &crate::object::Set) -> bool {
    old.key == new.key
        && old.kind == new.kind
        && old.interval == new.interval
        && old.constant == new.constant
        && old.timeouts == new.timeouts
        && old.dynamic == new.dynamic
        && old.counter == new.counter
}

fn add_chain(state: &mut TableState, chain: &Chain, if_exists: IfExists) -> Outcome {
    let Some(old) = state.chains.get_mut(&chain.name) else {
        state.chains.insert(chain.name.clone(), ChainState { chain: chain.clone(), rules: Vec::new() });
        return Ok(());
    };
    if if_exists == IfExists::Fail {
        return Err(libc::EEXIST);
    }
    match (&mut old.chain.base, &chain.base) {
        (_, None) => Ok(()),
        (None, Some(_)) => Err(libc::EEXIST),
        (Some(old), Some(new)) if (old.hook, old.priority) != (new.hook, new.priority) => {
            Err(libc::EOPNOTSUPP)
        }
        (Some(old), Some(new)) if old.kind == new.kind => {
            old.policy = new.policy;
            Ok(())
        }
        (Some(_), Some(_)) => Err(libc::EEXIST),
    }
}

fn delete_chain(state: &mut TableState, chain: &Name) -> Outcome {
    if !state.chains.contains_key(chain) {
        return Err(libc::ENOENT);
    }
    let leads_there = |verdict: &Verdict| verdict.chain() == Some(chain);
    // Its own rules go with it, and still a jump of theirs to itself is in the way. (No commit would let it
    // pass, but it can be made and deleted in one transaction.)
    let from_rules = state
        .chains
        .values()
        .flat_map(|other| &other.rules)
        .any(|rule| rule.rule.chains().any(|to| to == chain));
    let from_elements = state
        .sets
        .values()
        .flat_map(|set| set.elements.values())
        .any(|element| matches!(&element.value, ElementValue::Verdict(verdict) if leads_there(verdict)));
    if from_rules || from_elements {
        return Err(libc::EBUSY);
    }
    state.chains.remove(chain);
    Ok(())
}

/// Jumps lead to regular chains that are there; named sets are there.
fn check_references(state: &TableState, rule: &Rule) -> Outcome {
    rule.chains().try_for_each(|chain| check_target(state, chain))?;
    if rule.named_sets().all(|set| state.sets.contains_key(set)) { Ok(()) } else { Err(libc::ENOENT) }
}

fn check_target(state: &TableState, chain: &Name) -> Outcome {
    match state.chains.get(chain) {
        None => Err(libc::ENOENT),
        Some(target) if target.chain.base.is_some() => Err(libc::EOPNOTSUPP),
        Some(_) => Ok(()),
    }
}

fn add_element(
    state: &mut TableState,
    shape: &ElementShape,
    element: &Element,
    if_exists: IfExists,
) -> Outcome {
    if let ElementValue::Verdict(verdict) = &element.value
        && let Some(chain) = verdict.chain()
    {
        state.sets.get(&shape.set).ok_or(libc::ENOENT)?;
        check_target(state, chain)?;
    }
    let used = all_rules(state).any(|rule| rule.named_sets().any(|used| *used == shape.set));
    let set = state.sets.get_mut(&shape.set).ok_or(libc::ENOENT)?;
    if set.set.constant && used {
        return Err(libc::EBUSY);
    }
    let mut element = element.clone();
    element.make_canonical(&set.set);
    if let Some(old) = set.elements.get(&element.key).filter(|old| old.last_key() == element.last_key()) {
        let same = old.value == element.value && if_exists == IfExists::Keep;
        return if same { Ok(()) } else { Err(libc::EEXIST) };
    }
    let overlaps = |old: &Element| old.key <= *element.last_key() && element.key <= *old.last_key();
    if shape.ranges == Ranges::Pairs && set.elements.values().any(overlaps) {
        return Err(libc::EEXIST);
    }
    // A set of concatenations looks only whether either end is inside of another element, and has its own way
    // to say so. (The last field is the one that has ranges here, so that the order of bytes is that of
    // elements.)
    let inside = |old: &Element, key: &Data| old.key <= *key && *key <= *old.last_key();
    let ends_inside = |old: &Element| inside(old, &element.key) || inside(old, element.last_key());
    if shape.ranges == Ranges::Concat && set.elements.values().any(ends_inside) {
        return Err(libc::ENOTEMPTY);
    }
    if set.set.size.is_some_and(|size| set.elements.len() >= size as usize) {
        return Err(libc::ENFILE);
    }
    set.elements.insert(element.key.clone(), element);
    Ok(())
}

fn delete_element(state: &mut TableState, shape: &ElementShape, element: &Element) -> Outcome {
    let set = state.sets.get_mut(&shape.set).ok_or(libc::ENOENT)?;
    match set.elements.get(&element.key) {
        Some(old) if old.last_key() == element.last_key() || shape.ranges == Ranges::None => {
            set.elements.remove(&element.key);
            Ok(())
        }
        _ => Err(libc::ENOENT),
    }
}

/// No way from a base chain is longer than the kernel's jump stack; a loop is endless.
fn check_depth(state: &TableState) -> Outcome {
    fn targets<'a>(state: &'a TableState, chain: &'a ChainState) -> Vec<&'a Name> {
        let rules = || chain.rules.iter().map(|rule| &rule.rule);
        let mapped = rules().flat_map(Rule::named_sets).filter_map(|set| state.sets.get(set));
        let mapped =
            mapped.flat_map(|set| set.elements.values()).filter_map(|element| match &element.value {
                ElementValue::Verdict(verdict) => verdict.chain(),
                _ => None,
            });
        rules().flat_map(Rule::chains).chain(mapped).collect()
    }
    fn walk(state: &TableState, name: &Name, depth: usize) -> Outcome {
        if depth >= JUMP_STACK {
            return Err(libc::EMLINK);
        }
        let Some(chain) = state.chains.get(name) else { return Ok(()) };
        targets(state, chain).into_iter().try_for_each(|next| walk(state, next, depth + 1))
    }
    let base = state.chains.iter().filter(|(_, chain)| chain.chain.base.is_some());
    base.map(|(name, _)| name).try_for_each(|name| walk(state, name, 0))
}

fn refused(operation: String, index: Option<usize>, element: Option<Data>, errno: i32) -> Error {
    let source = Refusal { errno: Errno(errno), message: None, offset: None, attribute: None };
    Error::Refused { operation, index, element: element.map(Box::new), source }
}
