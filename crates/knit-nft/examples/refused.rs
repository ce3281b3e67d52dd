//! What nftables does not take, and what is noticed: against the fake, which follows the kernel's rules.
//!
//!     cargo run -p knit-nft --example refused

use knit_nft::{Chain, Error, Fake, Family, Nftables, Rule, TableId, TableState, Transaction};

fn main() -> knit_nft::Result<()> {
    let id = TableId::new(Family::Inet, "shop");
    let mut nft = Fake::new();
    nft.apply(
        &TableState::new(id.clone())
            .chain(Chain::regular("door"), [Rule::new().jump("till")])
            .chain(Chain::regular("till"), [Rule::new().counter().accept()]),
    )?;

    // A transaction is carried out as a whole or not at all, and an error says which change it was.
    let mut changes = Transaction::new();
    changes.add_chain(&id, Chain::regular("window")).delete_chain(&id, "till");
    match nft.commit(&changes) {
        Err(error) if error.is_busy() => println!("{error}: change number {:?}", error.index()),
        other => return other,
    }
    assert!(!nft.has_chain(&id, "window")?, "nothing of it was carried out");

    // What was planned for a state that is no more is refused, if one says which state that was.
    let (generation, found) = nft.snapshot(&id)?;
    nft.apply(&TableState::new(TableId::new(Family::Ip, "of-somebody-else")))?;
    let mut late = Transaction::new();
    late.add_chain(&id, Chain::regular("late"));
    match nft.commit_if(generation, &late) {
        Err(error) if error.is_stale() => println!("{error}: list and plan again"),
        other => return other,
    }
    println!("\nIt is still:\n\n{}", found.map(|table| table.to_string()).unwrap_or_default());

    // A process without privilege can send little at once.
    let mut small = Fake::with_limit(100);
    match small.commit(&changes) {
        Err(error @ Error::TooBig { .. }) => println!("{error}"),
        other => return other,
    }
    Ok(())
}
