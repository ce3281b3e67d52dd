//! Tables of rules: brought to what is wanted, or only compared with it.

use std::collections::HashMap;

use knit_kernel::nft::{self, Nftables, Op, TableId, TableState};
use knit_runtime::{Error, Reason, Result};

use crate::fail::internal;
use crate::rules::{Elements, merge};
use crate::space::Space;

/// How often a table is planned again because somebody else changed it.
const ATTEMPTS: u32 = 32;

/// What is done about tables that are not as wanted.
pub(crate) enum Tables {
    /// They are made so.
    Apply,
    /// They are only compared.
    Compare(Comparison),
}

/// A comparison of the tables of one namespace: each is read once, whoever has a part in it.
#[derive(Default)]
pub(crate) struct Comparison {
    read: HashMap<TableId, Option<TableState>>,
    /// What is not as wanted.
    pub wrong: Vec<String>,
}

impl Tables {
    /// Brings a table to its wanted shape with these elements, or notes that it is not so.
    pub fn settle(&mut self, space: &Space, layout: &TableState, elements: &Elements<'_>) -> Result<()> {
        match self {
            Self::Apply => apply(space, layout, elements),
            Self::Compare(comparison) => comparison.add(space, layout, elements),
        }
    }
}

impl Comparison {
    fn add(&mut self, space: &Space, layout: &TableState, elements: &Elements<'_>) -> Result<()> {
        let found = self.read(space, layout.id())?;
        let wanted = merge(layout.clone(), found, elements);
        let changes = nft::diff(found, &wanted).len();
        if found.is_none() {
            self.wrong.push(format!("table {} is missing", layout.id()));
        } else if changes > 0 {
            self.wrong.push(format!("table {} is not as it was made, in {changes} places", layout.id()));
        }
        Ok(())
    }

    /// A table as it was found.
    pub fn read(&mut self, space: &Space, id: &TableId) -> Result<Option<&TableState>> {
        if !self.read.contains_key(id) {
            let read = space.rules()?.table(id).map_err(internal(format!("read table {id}")))?;
            self.read.insert(id.clone(), read);
        }
        Ok(self.read.get(id).and_then(Option::as_ref))
    }
}

fn apply(space: &Space, layout: &TableState, elements: &Elements<'_>) -> Result<()> {
    let table = layout.id().clone();
    let failed = || internal::<nft::Error>(format!("bring table {table} to its wanted state"));
    let mut kernel = space.rules()?;
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let (generation, found) = kernel.snapshot(&table).map_err(failed())?;
        let wanted = merge(layout.clone(), found.as_ref(), elements);
        let plan = nft::diff(found.as_ref(), &wanted);
        if plan.is_empty() {
            return Ok(());
        }
        tracing::debug!(%table, changes = plan.len(), "rules");
        let elements_only =
            plan.ops().iter().all(|op| matches!(op, Op::AddElements { .. } | Op::DeleteElements { .. }));
        let committed = if elements_only {
            // Nobody else changes these, so it does not matter what else has changed since.
            kernel.commit_chunked(&plan).map(|_| ())
        } else {
            match kernel.commit_if(generation, &plan) {
                Err(nft::Error::TooBig { .. }) => kernel.commit_chunked(&plan).map(|_| ()),
                other => other,
            }
        };
        match committed {
            Ok(()) => return Ok(()),
            Err(error) if error.is_stale() || error.is_not_found() => last = Some(error),
            Err(error) => return Err(failed()(error)),
        }
    }
    Err(last
        .map_or_else(|| Error::new(Reason::Internal, format!("table {table} never came to rest")), failed()))
}
