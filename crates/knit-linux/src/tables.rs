//! Tables of rules: brought to what is wanted, or only compared with it.
//!
//! To bring a table to what is wanted it is read, unless nobody else has touched it since it was last read
//! and made right: then what it has is what this process put there, and the difference between two parts is
//! written without a look.

use std::collections::{BTreeMap, HashMap};

use knit_nft::{self as nft, Nftables, Op, SetState, TableId, TableState, Transaction};
use knit_runtime::Result;

use crate::fail::internal;
use crate::rules::{Elements, SetElement, merge};
use crate::space::NamespaceSockets;

/// How often a table is planned again because somebody else changed it.
const PLAN_ATTEMPTS: u32 = 32;

/// A comparison of the tables of one namespace: each is read once, whoever has a part in it.
#[derive(Default)]
pub(crate) struct Comparison {
    read: HashMap<TableId, Option<TableState>>,
    /// What is not as wanted.
    pub wrong: Vec<String>,
}

impl Comparison {
    /// Reads these tables.
    pub fn of(space: &NamespaceSockets, tables: &[TableId]) -> Result<Self> {
        let mut kernel = space.rules()?;
        let mut read = HashMap::new();
        for id in tables {
            let state = kernel.table(id).map_err(internal(format!("read table {id}")))?;
            read.insert(id.clone(), state);
        }
        Ok(Self { read, wrong: Vec::new() })
    }

    /// Notes what is not as wanted.
    pub fn compare(&mut self, layout: &TableState, elements: &Elements<'_>) {
        let found = self.found(layout.id());
        let wanted = merge(layout.clone(), found, elements);
        let changes = nft::diff(found, &wanted).len();
        if found.is_none() {
            self.wrong.push(format!("table {} is missing", layout.id()));
        } else if changes > 0 {
            self.wrong.push(format!(
                "table {} differs from its desired state in {changes} \
            places",
                layout.id()
            ));
        }
    }

    /// A table as it was found.
    pub fn found(&self, id: &TableId) -> Option<&TableState> {
        self.read.get(id).and_then(Option::as_ref)
    }
}

/// A table that was brought to what is wanted.
pub(crate) struct Applied {
    /// What it is now, as far as it was read and planned.
    pub state: TableState,
    /// It was not there before: nothing is in it that was not put there.
    pub is_new: bool,
}

/// Brings a table to its wanted shape with these elements.
pub(crate) fn apply(
    space: &NamespaceSockets,
    layout: &TableState,
    elements: &Elements<'_>,
) -> Result<Applied> {
    let table = layout.id().clone();
    let failed = || internal::<nft::Error>(format!("update table {table}"));
    let mut kernel = space.rules()?;
    let applied = nft::until_current(&mut *kernel, &table, PLAN_ATTEMPTS, |kernel, attempt, found| {
        let wanted = merge(layout.clone(), found.as_ref(), elements);
        let plan = nft::diff(found.as_ref(), &wanted);
        let applied = Applied { state: wanted, is_new: found.is_none() };
        if plan.is_empty() {
            return Ok(Some(applied));
        }
        tracing::debug!(%table, changes = plan.len(), "rules");
        let elements_only =
            plan.ops().iter().all(|op| matches!(op, Op::AddElements { .. } | Op::DeleteElements { .. }));
        // Nobody else changes elements, so it does not matter for them what else has changed since.
        let at = (!elements_only).then_some(attempt.generation);
        match kernel.commit_planned(at, &plan) {
            Ok(_) => Ok(Some(applied)),
            // What they belong to was there when it was read.
            Err(error) if error.is_not_found() && !attempt.last => Ok(None),
            Err(error) => Err(error),
        }
    });
    applied.map_err(failed())
}

/// Exchanges one part of a table's elements for another, without reading the table. False if they were not
/// there as they were supposed to be: then it must be read.
pub(crate) fn exchange(
    space: &NamespaceSockets,
    layout: &TableState,
    before: &[SetElement],
    wanted: &[SetElement],
) -> Result<bool> {
    let plan = difference(layout, before, wanted);
    if plan.is_empty() {
        return Ok(true);
    }
    let table = layout.id();
    tracing::debug!(%table, changes = plan.len(), "elements");
    match space.rules()?.commit_chunked(&plan) {
        Ok(_) => Ok(true),
        Err(error) => {
            tracing::debug!(%table, %error, "another program changed the table; reading it");
            Ok(false)
        }
    }
}

/// The elements to add and to delete.
pub(crate) fn difference(layout: &TableState, before: &[SetElement], wanted: &[SetElement]) -> Transaction {
    let mut bare = TableState::new(layout.table.clone());
    for put in before.iter().chain(wanted) {
        if let Some(set) = layout.sets.get(&put.set.name) {
            bare.sets
                .entry(put.set.name.clone())
                .or_insert_with(|| SetState { set: set.set.clone(), elements: BTreeMap::new() });
        }
    }
    let with = |puts: &[SetElement]| {
        let mut state = bare.clone();
        for put in puts {
            if let Some(set) = state.sets.get_mut(&put.set.name) {
                set.extend([put.element.clone()]);
            }
        }
        state
    };
    nft::diff(Some(&with(before)), &with(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{node, source_elements};

    #[test]
    fn one_part_for_another_is_elements_only_and_only_those_that_differ() {
        let layout = node::layout(4789, node::Flows { each: 0, together: 0 });
        let mac = knit_ipam::Mac([0x0a, 1, 10, 244, 1, 5]);
        let part = |hosts: &[&str]| -> Vec<SetElement> {
            let address = "10.244.1.5".parse().expect("an address");
            hosts.iter().flat_map(|host| source_elements(host, mac, [address])).collect()
        };
        let plan = difference(&layout, &part(&["one", "two"]), &part(&["two", "three"]));
        let count = |op: &Op| match op {
            Op::AddElements { elements, .. } | Op::DeleteElements { elements, .. } => elements.len(),
            other => panic!("more than elements: {other}"),
        };
        assert_eq!(plan.ops().iter().map(count).collect::<Vec<_>>(), [1, 1], "{plan:?}");
        assert!(difference(&layout, &part(&["one"]), &part(&["one"])).is_empty());
    }
}
