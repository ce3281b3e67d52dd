//! Claims that are prepared on this node: without their driver, kubelet lets no pod end that has one.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, bail};
use knit_ledger::Entry;
use knit_output::{Note, note};
use knit_types::Owner;

/// The most claims that are named.
const NAMED: usize = 10;

/// Refuses while there are some, and says which.
pub(super) fn check_none(run_dir: &Path) -> Result<()> {
    let path = run_dir.join("ledger");
    if !path.exists() {
        return Ok(());
    }
    let (content, _) = match knit_ledger::read::<Entry>(&path) {
        Ok(read) => read,
        Err(error) => {
            note(Note::Warning, format!("{error}; it is not known whether claims are prepared here"));
            return Ok(());
        }
    };
    let claims: BTreeSet<String> = content.records.values().flat_map(prepared).collect();
    if claims.is_empty() {
        return Ok(());
    }
    let mut named: Vec<&str> = claims.iter().map(String::as_str).take(NAMED).collect();
    if claims.len() > NAMED {
        named.push("...");
    }
    bail!(
        "{} claims are prepared on this node: {}; delete the pods that use them while the agent runs, and \
         try again. Without it kubelet cannot release them, and the pods stay Terminating; use \
         --abandon-claims to continue anyway",
        claims.len(),
        named.join(", ")
    );
}

/// The claims that a record is about.
fn prepared(entry: &Entry) -> Vec<String> {
    let of = |owner: &Owner| match owner {
        Owner::Claim(claim) => Some(claim.to_string()),
        Owner::Sandbox(_) | Owner::Object(_) => None,
    };
    match entry {
        Entry::Reservation(reservation) => of(reservation.owner()).into_iter().collect(),
        Entry::Sandbox(record) => {
            let loans = record.attachments().iter().filter_map(|a| a.plan().loan.as_ref());
            loans.filter_map(|loan| of(&loan.from)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use knit_ledger::{Batch, Ledger, Reservation};
    use knit_types::ObjectRef;

    use super::*;

    #[test]
    fn prepared_claims_are_named_and_keep_knit_where_it_is() {
        let dir = tempfile::tempdir().expect("a directory");
        check_none(dir.path()).expect("nothing there");
        let mut ledger = Ledger::<Entry>::open(dir.path().join("ledger")).expect("a ledger").ledger;
        check_none(dir.path()).expect("no claims");
        let claim = ObjectRef { namespace: "shop".into(), name: "blue-nic".into(), uid: "u1".into() };
        let reservation = Reservation::new(Owner::claim(claim), 1).expect("a reservation");
        ledger.commit(Batch::new().put(reservation.into())).expect("written");
        let error = check_none(dir.path()).expect_err("one is prepared").to_string();
        assert!(error.contains("shop/blue-nic") && error.contains("--abandon-claims"), "{error}");
    }
}
