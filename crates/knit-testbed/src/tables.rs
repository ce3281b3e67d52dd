//! Tables of nftables as others see them, and what others do to the rule set.

use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::as_stranger;
use knit_nft::{Family, Nftables as _, TableId, Transaction};

/// A table as text, without what differs from one making to the next. It must be there.
#[track_caller]
pub fn read(space: &NetNs, id: &TableId) -> String {
    let table = Kernel::open_in(space).expect("nftables").table(id).expect("read");
    table.expect("the table is there").without_handles().to_string()
}

/// Commits as another program would.
#[track_caller]
pub fn commit_as_stranger(space: &NetNs, tx: &Transaction) {
    as_stranger(|| Kernel::open_in(space).expect("nftables").commit(tx).expect("done"));
}

/// A change that has nothing to do with us: a table of this name.
pub fn elsewhere_in_the_rule_set(name: &str) -> Transaction {
    let mut tx = Transaction::new();
    tx.add_table(TableId::new(Family::Inet, name));
    tx
}
