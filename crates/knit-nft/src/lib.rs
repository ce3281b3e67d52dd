//! nftables as types: objects, rules that read like `nft` text, atomic transactions, the difference of two
//! tables, the bytes that the kernel wants to hear, and nftables in memory for tests.
//!
//! What one wants is a [`TableState`]; [`Nftables::apply`] brings nftables there with the smallest
//! transaction, so that a restart touches nothing that is right already. Callers that know what changed build
//! a [`Transaction`] themselves.
//!
//! [`Nftables`] is the seam: [`Fake`] is nftables in memory, with the kernel's rules about what exists, what
//! is missing and what is in use. This crate has no socket and no `unsafe`; the kernel's nftables is
//! `knit_kernel::nft::Kernel`. Whoever brings another socket finds what to send in [`encode`], and what was
//! received is read by [`decode`].
//!
//! Names of types and methods are those of `nft(8)`. Everything that is written here reads well in
//! `nft list ruleset`: sets have their right types, comments are where `nft` looks for them.
//!
//! ```
//! use knit_nft::{
//!     Chain, ChainKind, CtState, Fake, Family, Hook, L4Proto, Nftables, Policy, Port, Rule, TableId,
//!     TableState, field,
//! };
//!
//! # fn main() -> knit_nft::Result<()> {
//! let input = Chain::base("input", ChainKind::Filter, Hook::Input, 0).policy(Policy::Drop);
//! let wanted = TableState::new(TableId::new(Family::Inet, "guard")).chain(
//!     input,
//!     [
//!         Rule::new().any_of(field::ct_state(), &CtState::ESTABLISHED).accept(),
//!         Rule::new().eq(field::l4proto(), &L4Proto::TCP).eq(field::th_dport(), &Port(22)).accept(),
//!     ],
//! );
//! let mut nft = Fake::new();
//! let plan = nft.apply(&wanted)?;
//! println!("{plan}");
//! assert!(nft.apply(&wanted)?.is_empty(), "all is right already");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod current;
mod data;
mod datatype;
pub mod decode;
mod decode_expr;
mod diff;
pub mod encode;
mod encode_expr;
mod error;
pub mod expr;
mod fake;
pub mod field;
pub mod ip;
mod object;
mod render;
mod rule;
mod state;
#[cfg(test)]
mod tests;
mod transaction;
pub mod wire;

pub use current::{Attempt, until_current};
pub use data::{
    AddrType, ArpOp, Boolean, CgroupId, CtDirection, CtState, CtStatus, Data, EtherAddr, EtherType, Exists,
    Gid, HopLimit, Icmp6Type, IcmpType, IfIndex, IfName, Key, L4Proto, Mark, NfProto, PktType, Port, Scalar,
    TcpFlags, Uid, Vni, Zone,
};
pub use datatype::{Datatype, KeyType};
pub use decode::ListedElement;
pub use diff::diff;
pub use error::{ChannelError, Error, Invalid, Result};
pub use expr::{Direction, DynsetOp, Expr, IcmpxCode, NatFlags, NatKind, Reg, Reject};
pub use fake::Fake;
pub use field::{FibFlags, Field, Fields};
pub use object::{
    BaseChain, Chain, ChainKind, Element, ElementValue, Family, Hook, MAX_COMMENT, Name, Policy, Set,
    SetKind, Table, TableId, Verdict,
};
pub use rule::Rule;
pub use state::{ChainState, RuleState, SetState, TableState};
pub use transaction::{ElementShape, IfExists, Op, Place, Ranges, Transaction};

/// The example of the README is tried, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct ReadmeExamples;

/// Reads what the decoders make of a netlink datagram; for fuzzing and property tests.
#[doc(hidden)]
pub fn decode_any(bytes: &[u8]) -> usize {
    let mut found = 0;
    for message in knit_netlink::Messages::new(bytes).flatten() {
        let Ok(([family, ..], attrs)) = message.split::<4>() else { continue };
        let family = Family::from_number(family).unwrap_or(Family::Inet);
        let set = decode::set(&attrs).map(|(_, listed)| listed.set);
        let elements: Vec<_> = decode::elements(&attrs).collect();
        found += elements.len() + usize::from(set.is_some());
        if let Some(set) = set {
            found += decode::join_ranges(&set, elements).len();
        }
        if let Some((_, listed)) = decode::rule(&attrs) {
            found += render::rule_text(&listed.state.rule).len();
        }
        found += usize::from(decode::table(family, &attrs).is_some());
        found += usize::from(decode::chain(family, &attrs).is_some());
    }
    found
}

/// The state of the whole rule set at one moment: it moves on with every transaction of anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(pub u32);

impl Generation {
    /// The state after so many transactions, if nobody else has any in between.
    #[must_use]
    pub fn after(self, transactions: usize) -> Self {
        let transactions = u32::try_from(transactions).unwrap_or(u32::MAX);
        Self(self.0.wrapping_add(transactions))
    }
}

impl Generation {
    /// Whether it is that one or a later one. The kernel counts around.
    #[must_use]
    pub fn reaches(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0) < 1 << 31
    }
}

/// How often [`Nftables::apply`] plans again because somebody else changed the rule set in between.
const APPLY_ATTEMPTS: u32 = 8;

/// nftables of one network namespace, real or not.
pub trait Nftables {
    /// Carries out all changes together, or none and says why. Fails with [`Error::TooBig`] if they do not
    /// fit into one batch.
    fn commit(&mut self, transaction: &Transaction) -> Result<()>;

    /// Like [`commit`](Self::commit), but only if nothing has changed since `generation`.
    fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> Result<()>;

    /// Carries out all changes in order, in as many batches as needed, and returns how many that were.
    ///
    /// One batch if it fits. If not (a process without privilege may send about 200 KB at once), packets see
    /// the states in between: every beginning of the transaction, cut between changes or within a list of
    /// elements, must be a state that one can live with. For a service proxy that means: chains and endpoint
    /// elements first, the dispatch map last; and when deleting, the dispatch map first. A failure after the
    /// first batch is [`Error::Partial`] and leaves those before it in force.
    fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize>;

    /// The state that the rule set has now. It costs one system call, whatever there is.
    fn generation(&mut self) -> Result<Generation>;

    /// All tables of all families.
    fn tables(&mut self) -> Result<Vec<TableId>>;

    /// Whether a chain is there, without a look at anything else of its table.
    fn has_chain(&mut self, table: &TableId, chain: &str) -> Result<bool> {
        Ok(self.table(table)?.is_some_and(|state| state.chains.keys().any(|name| &**name == chain)))
    }

    /// A table with everything in it, none if it is not there, and the generation that it was read at.
    fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)>;

    /// A table with everything in it.
    fn table(&mut self, table: &TableId) -> Result<Option<TableState>> {
        self.snapshot(table).map(|(_, state)| state)
    }

    /// Removes a table with everything in it. Says whether it was there.
    fn remove_table(&mut self, table: &TableId) -> Result<bool> {
        if !self.tables()?.contains(table) {
            return Ok(false);
        }
        let mut transaction = Transaction::new();
        transaction.delete_table(table);
        match self.commit(&transaction) {
            Err(error) if error.is_not_found() => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Carries out changes that were planned for the state `at`, if one is given: only if that is still the
    /// state, in as many batches as needed. Returns how many that were.
    ///
    /// What does not fit into one batch is sent in chunks, as [`commit_chunked`](Self::commit_chunked) does,
    /// whatever the state is by then. That is safe for a table that is being made: chains at hooks come last.
    fn commit_planned(&mut self, at: Option<Generation>, transaction: &Transaction) -> Result<usize> {
        let committed = match at {
            Some(generation) => self.commit_if(generation, transaction),
            None => self.commit(transaction),
        };
        match committed {
            Err(Error::TooBig { .. }) => self.commit_chunked(transaction),
            other => other.map(|()| usize::from(!transaction.is_empty())),
        }
    }

    /// Brings a table to the wanted state with the smallest transaction, and returns it: empty if all was
    /// right.
    ///
    /// A change by somebody else in between is noticed, and planned for again. What does not fit into one
    /// batch is sent in chunks, as [`commit_planned`](Self::commit_planned) does.
    fn apply(&mut self, wanted: &TableState) -> Result<Transaction> {
        until_current(self, wanted.id(), APPLY_ATTEMPTS, |nft, attempt, found| {
            let plan = diff(found.as_ref(), wanted);
            nft.commit_planned(Some(attempt.generation), &plan)?;
            Ok(Some(plan))
        })
    }
}
