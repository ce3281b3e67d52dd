//! Changes that are planned for the state of a table, and planned again if somebody else was quicker.

use crate::error::{Error, Result};
use crate::object::TableId;
use crate::state::TableState;
use crate::{Generation, Nftables};

/// One of several attempts to change a table as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The state that the table was read at.
    pub generation: Generation,
    /// There will not be another one.
    pub last: bool,
}

/// Reads a table and hands it to `change`, which plans and commits; again, so many times, if somebody else
/// changed the rule set in between ([`Error::is_stale`]), or if `change` returns nothing and so asks for
/// another look.
///
/// # Errors
/// Those of `change`, and [`Error::Unstable`] after the last attempt.
pub fn until_current<N: Nftables + ?Sized, T>(
    nft: &mut N,
    table: &TableId,
    attempts: u32,
    mut change: impl FnMut(&mut N, Attempt, Option<TableState>) -> Result<Option<T>>,
) -> Result<T> {
    for number in 1..=attempts {
        let (generation, found) = nft.snapshot(table)?;
        match change(nft, Attempt { generation, last: number == attempts }, found) {
            Ok(Some(done)) => return Ok(done),
            Ok(None) => {}
            Err(error) if error.is_stale() => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Unstable(attempts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Chain, Fake, Family, Transaction, diff};

    /// nftables of a namespace in which somebody else commits right before each of the next few commits.
    struct Crowded {
        fake: Fake,
        others: u32,
    }

    impl Crowded {
        fn new(others: u32) -> Self {
            Self { fake: Fake::new(), others }
        }
    }

    impl Nftables for Crowded {
        fn commit(&mut self, transaction: &Transaction) -> Result<()> {
            self.fake.commit(transaction)
        }

        fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> Result<()> {
            if self.others > 0 {
                self.others -= 1;
                self.fake.apply(&wanted(&format!("theirs-{}", self.others)))?;
            }
            self.fake.commit_if(generation, transaction)
        }

        fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize> {
            self.fake.commit_chunked(transaction)
        }

        fn generation(&mut self) -> Result<Generation> {
            self.fake.generation()
        }

        fn tables(&mut self) -> Result<Vec<TableId>> {
            self.fake.tables()
        }

        fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
            self.fake.snapshot(table)
        }
    }

    fn wanted(name: &str) -> TableState {
        TableState::new(TableId::new(Family::Inet, name)).chain(Chain::regular("here"), [])
    }

    #[test]
    fn a_table_is_planned_again_as_often_as_others_commit_and_no_more() {
        let ours = wanted("ours");
        let apply = |crowded: &mut Crowded| {
            let mut looks = 0;
            let applied = until_current(crowded, ours.id(), 3, |nft, attempt, found| {
                looks += 1;
                assert_eq!(attempt.last, looks == 3);
                nft.commit_planned(Some(attempt.generation), &diff(found.as_ref(), &ours)).map(Some)
            });
            (looks, applied)
        };
        let (mut quiet, mut busy, mut mad) = (Crowded::new(0), Crowded::new(2), Crowded::new(9));
        assert!(matches!(apply(&mut quiet), (1, Ok(1))));
        assert!(matches!(apply(&mut busy), (3, Ok(1))));
        assert!(matches!(apply(&mut mad), (3, Err(Error::Unstable(3)))));
        assert!(mad.table(ours.id()).expect("a listing").is_none(), "what was planned for another state");
    }

    #[test]
    fn what_asks_for_another_look_gets_one_and_other_errors_end_it() {
        let mut fake = Fake::new();
        let id = wanted("ours").id().clone();
        let mut looks = 0;
        let looked = until_current(&mut fake, &id, 5, |_, _, _| {
            looks += 1;
            Ok((looks == 4).then_some(looks))
        });
        assert!(matches!(looked, Ok(4)));
        let refused = until_current(&mut fake, &id, 5, |nft, _, _| {
            looks += 1;
            let mut missing = Transaction::new();
            missing.delete_table(&id);
            nft.commit(&missing).map(Some)
        });
        assert!(refused.is_err_and(|error| error.is_not_found()));
        assert_eq!(looks, 5, "once");
    }
}
