//! Claims that are prepared on this node: without their driver, kubelet lets no pod end that has one.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use knit_ledger::{Entry, Scan, Unreadable};
use knit_types::Owner;

/// The most claims that are named.
const NAMED: usize = 10;

/// What to do about them.
const ADVICE: &str = "delete the pods that use them while the agent runs, and try again (if it was deleted \
    already, apply its manifests again first). Without it kubelet cannot release them, and the pods stay \
    Terminating; use --abandon-claims to continue anyway";

/// Refuses while there are some, or may be some, and says which.
pub(super) fn check_none(run_dir: &Path) -> Result<()> {
    let path = run_dir.join("ledger");
    let is_there = path.try_exists();
    if !is_there.with_context(|| format!("cannot look at {}: {ADVICE}", path.display()))? {
        return Ok(());
    }
    let (content, scan) = knit_ledger::read::<Entry>(&path)
        .with_context(|| format!("it is not known whether claims are prepared on this node: {ADVICE}"))?;
    let readable = content.records.values().flat_map(prepared);
    let claims: BTreeSet<String> =
        readable.chain(content.unreadable.values().filter_map(unreadable)).collect();
    if !claims.is_empty() {
        let mut named: Vec<&str> = claims.iter().map(String::as_str).take(NAMED).collect();
        if claims.len() > NAMED {
            named.push("...");
        }
        bail!("{} claims are prepared on this node: {}; {ADVICE}", claims.len(), named.join(", "));
    }
    if matches!(scan, Scan::Corrupt { .. } | Scan::Newer { .. }) {
        bail!(
            "the ledger {} is damaged, and may have had claims that are prepared on this node: {ADVICE}",
            path.display()
        );
    }
    Ok(())
}

/// The claim that a record is about that cannot be read, or the record where it may be about one.
fn unreadable(record: &Unreadable) -> Option<String> {
    if let Some(claim) = record.claim() {
        return Some(claim.to_string());
    }
    let may_be = record.text().get().contains("\"claim\"");
    may_be.then(|| format!("what record {} is about, which cannot be read", record.key()))
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

    /// A record of a form that this version does not read.
    #[derive(Clone, serde::Deserialize, serde::Serialize)]
    struct Newer {
        #[serde(skip)]
        key: String,
        format: u32,
        claim: ObjectRef,
    }

    impl knit_ledger::Record for Newer {
        fn key(&self) -> &str {
            &self.key
        }
    }

    #[test]
    fn claims_whose_records_cannot_be_read_were_taken_for_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("ledger");
        let claim = ObjectRef { namespace: "shop".into(), name: "blue-nic".into(), uid: "u1".into() };
        let newer = Newer { key: Owner::claim(claim.clone()).key(), format: 99, claim };
        let mut ledger = Ledger::<Newer>::open(&path).expect("a ledger").ledger;
        ledger.commit(Batch::new().put(newer)).expect("written");
        drop(ledger);
        let error = check_none(dir.path()).expect_err("one is prepared").to_string();
        assert!(error.contains("shop/blue-nic"), "{error}");

        // A ledger that cannot be read is not one without claims.
        for damage in [&b"not a ledger"[..], b""] {
            std::fs::write(&path, damage).expect("damaged");
            let error = check_none(dir.path()).expect_err("nobody knows").to_string();
            assert!(error.contains("damaged") && error.contains("--abandon-claims"), "{error}");
        }
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("in the way");
        let error = check_none(dir.path()).expect_err("nobody knows").to_string();
        assert!(error.contains("it is not known") && error.contains("--abandon-claims"), "{error}");
    }
}
