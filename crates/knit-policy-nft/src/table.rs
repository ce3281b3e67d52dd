//! The tables of one router, and what keeps them true.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::conntrack::Conntrack;
use knit_kernel::nft::Kernel;
use knit_kernel::watch::Untouched;
use knit_nft::{Error as NftError, Nftables, Transaction, diff, until_current};
use knit_policy::model::Direction;
use knit_policy::sets::{Change, Key, Value};
use knit_types::sync::ReadWrite as _;
use knit_types::{Family, PerFamily, chain};

use crate::classes::Numbers;
use crate::effect::take_in;
use crate::error::{Error, OpenError};
use crate::follow::{Connections, Following};
use crate::ip;
use crate::layout::{Router, TABLE, Which, table_id};
use crate::live::{Followed, Touched};
use crate::plan::{difference, state};
use crate::verdict::Elements;

/// How often a table is read and planned for again because others change the rule set meanwhile.
const ATTEMPTS: u32 = 8;

/// The policies of one router, in its kernel. See the [crate](crate).
pub struct PolicyTable {
    nft: Box<dyn Nftables + Send>,
    connections: Arc<Mutex<Connections>>,
    /// Where it is; none if it is not in a kernel.
    namespace: Option<NetNs>,
    router: Router,
    /// What is to be in force.
    wanted: Arc<RwLock<Elements>>,
    known: PerFamily<Known>,
    /// How this run of the engine's classes are called in the kernel, if anything was ever written for it.
    numbers: PerFamily<Option<Numbers>>,
    /// Somebody else may have changed the tables.
    doubted: bool,
    /// Denied packets are told of; a kernel may not be able to.
    logs: bool,
    others: Untouched,
    repairs: usize,
    /// There may be connections that do not follow what is in force: an earlier run may have ended between a
    /// change and what follows from it, and a change that failed halfway has not said what it is about.
    unfollowed: bool,
}

/// What the kernel has of a family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Known {
    /// Nobody knows.
    #[default]
    Unknown,
    /// No table.
    Nothing,
    /// A table.
    Table,
}

/// Why tables are made as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Because {
    /// They are to be others, or were not known.
    Asked,
    /// They should have been right.
    Damaged,
}

/// What a change came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// How many lists of elements, chains and rules were written; 0 if all was right.
    pub changes: usize,
    /// The live connections that it is about, for [`PolicyTable::follow`].
    pub touched: Touched,
}

/// What was denied to one address in one direction, as far as it is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Denied {
    /// How many packets.
    pub packets: u64,
    /// And bytes.
    pub bytes: u64,
}

// === impl PolicyTable ===

impl PolicyTable {
    /// For a router's namespace. Nothing is read or written yet.
    ///
    /// # Errors
    /// If the kernel gives no sockets for nftables or connection tracking there.
    pub fn open_in(namespace: &NetNs, router: Router) -> Result<Self, OpenError> {
        let nft = Kernel::open_in(namespace).map_err(OpenError::Nftables)?;
        let conntrack = Conntrack::open_in(namespace).map_err(OpenError::Conntrack)?;
        let own = || namespace.try_clone().map_err(OpenError::Namespace);
        let connections = Arc::new(Mutex::new(Connections::new(Some((conntrack, own()?)))));
        Ok(Self { connections, namespace: Some(own()?), ..Self::over(nft, router) })
    }

    /// Over nftables that somebody else brings, as [`Fake`](knit_nft::Fake), without connection tracking.
    #[must_use]
    pub fn over(nft: impl Nftables + Send + 'static, router: Router) -> Self {
        Self {
            nft: Box::new(nft),
            connections: Arc::new(Mutex::new(Connections::new(None))),
            namespace: None,
            router,
            wanted: Arc::default(),
            known: PerFamily::default(),
            numbers: PerFamily::default(),
            doubted: false,
            logs: true,
            others: Untouched::default(),
            repairs: 0,
            unfollowed: true,
        }
    }

    /// What is to be in force, to look at: nothing changes as long as it is held.
    pub fn elements(&self) -> RwLockReadGuard<'_, Elements> {
        self.wanted.reading()
    }

    /// Which router it is for.
    #[must_use]
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Carries out changes, all together or none.
    ///
    /// After an error what was in force before still is, and the table remembers what it should be: the next
    /// call of this, [`Self::sync`] or [`Self::restore`] brings all of it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn apply(&mut self, changes: &[Change]) -> Result<Applied, Error> {
        let touched = take_in(&mut self.wanted.writing(), changes);
        if self.doubted {
            return self.make(self.damaged());
        }
        if Family::ALL.into_iter().any(|family| *self.known.get(family) == Known::Unknown) {
            return self.make(Because::Asked);
        }
        let (tx, after) = self.plan(changes);
        if tx.is_empty() {
            return Ok(Applied::default());
        }
        self.others.written();
        match self.nft.commit(&tx) {
            Ok(()) => {
                self.known = after;
                Ok(Applied { changes: tx.len(), touched })
            }
            Err(error) => {
                let contradicted = error.is_not_found() || error.is_exists();
                tracing::info!(
                    error = chain(&error),
                    "a change of network policies was refused; reading all of them"
                );
                self.make(if contradicted { Because::Damaged } else { Because::Asked })
            }
        }
    }

    /// One transaction for both families, and what is known after it.
    fn plan(&self, changes: &[Change]) -> (Transaction, PerFamily<Known>) {
        let (mut tx, wanted) = (Transaction::new(), self.elements());
        let after = PerFamily::from_fn(|family| {
            let numbers = self.numbers.get(family).clone().unwrap_or_default();
            match (self.known.get(family), wanted.is_empty(family)) {
                (Known::Table, true) => {
                    tx.delete_table(&table_id(family));
                    Known::Nothing
                }
                (Known::Table, false) => {
                    tx.append(difference(family, changes, &numbers));
                    Known::Table
                }
                (_, false) => {
                    let state = state(family, &wanted, &self.router, self.logs, &numbers);
                    tx.append(diff(None, &state));
                    Known::Table
                }
                (_, true) => Known::Nothing,
            }
        });
        (tx, after)
    }

    /// Makes these elements true, from whatever is there: what is right stays. For the start, where a former
    /// run may have left tables with classes of other numbers, and to begin again after an engine was lost.
    /// The first time, all connections are touched even if nothing changes: the former run may have ended
    /// before they followed.
    ///
    /// # Errors
    /// If the kernel refuses. What was in force before still is; see [`Self::apply`].
    pub fn sync(&mut self, wanted: &BTreeMap<Key, Value>) -> Result<Applied, Error> {
        let because = if self.elements().all() == wanted { self.damaged() } else { Because::Asked };
        *self.wanted.writing() = Elements::from(wanted.clone());
        // It may be another run's.
        self.numbers = PerFamily::default();
        self.make(because)
    }

    /// Makes true again what was last asked for, if anything may have changed it, and whatever an error left
    /// undone. Connections that began while it was not in force are touched.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn restore(&mut self) -> Result<Applied, Error> {
        if self.is_intact() { Ok(Applied::default()) } else { self.make(self.damaged()) }
    }

    /// The node's addresses have changed. Nothing for the node's own namespace.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_node(&mut self, now: &[IpNet]) -> Result<Applied, Error> {
        match &mut self.router {
            Router::Node => return Ok(Applied::default()),
            Router::Apart { node, .. } if **node == *now => return Ok(Applied::default()),
            Router::Apart { node, .. } => *node = now.to_vec(),
        }
        // Nobody has asked for anything yet, or there is nothing to exempt the node from.
        let none = |family| *self.known.get(family) != Known::Table;
        if Family::ALL.into_iter().all(none) { Ok(Applied::default()) } else { self.make(Because::Asked) }
    }

    /// Calls `tell` when somebody else changes the table, from a thread of the kernel's watcher: call
    /// [`Self::restore`] then.
    pub fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        let Some(namespace) = &self.namespace else { return };
        if let Err(error) = self.others.watch(namespace, TABLE, tell) {
            let error = chain(&error);
            tracing::warn!(
                error,
                "changes that other programs make to network policies will be noticed late"
            );
        }
    }

    /// Whether everything is in force, and nobody else can have changed it since.
    pub fn is_intact(&mut self) -> bool {
        !self.doubted
            && Family::ALL.into_iter().all(|family| *self.known.get(family) != Known::Unknown)
            && self.nft.generation().is_ok_and(|now| self.others.left_alone(now))
    }

    /// Has the next call look at what is really there.
    pub fn look_again(&mut self) {
        self.doubted = true;
    }

    /// How many changes repaired what somebody else had changed, since this was last asked.
    pub fn take_repairs(&mut self) -> usize {
        std::mem::take(&mut self.repairs)
    }

    /// Takes the table away: nothing is judged in this router any more. Says whether it was there.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&mut self) -> Result<bool, Error> {
        *self.wanted.writing() = Elements::default();
        self.make(Because::Asked).map(|applied| applied.changes > 0)
    }

    /// What was denied to each subject since it became one, or since the table was made.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn counters(&mut self) -> Result<BTreeMap<(Direction, IpAddr), Denied>, Error> {
        let mut all = BTreeMap::new();
        let Some(namespace) = &self.namespace else { return Ok(all) };
        let failed = |source| Error::Read { table: TABLE, source };
        let mut kernel = Kernel::open_in(namespace).map_err(failed)?;
        for family in Family::ALL.into_iter().filter(|family| !self.elements().is_empty(*family)) {
            for direction in Direction::ALL {
                let set = Which::Subjects(direction).set(family);
                let listed = match kernel.elements(&table_id(family), &set) {
                    Err(error) if error.is_not_found() => continue,
                    other => other.map_err(failed)?,
                };
                for item in listed {
                    let Some(address) = ip::read(family, item.element.key.as_slice()) else { continue };
                    let (packets, bytes) = item.counter.unwrap_or_default();
                    all.insert((direction, address), Denied { packets, bytes });
                }
            }
        }
        Ok(all)
    }

    /// What makes live connections follow what is in force, for another thread: calls of the table go on
    /// meanwhile.
    pub fn following(&self, touched: Touched) -> Following {
        let node = match &self.router {
            Router::Node => Vec::new(),
            Router::Apart { node, .. } => node.clone(),
        };
        let (connections, wanted) = (Arc::clone(&self.connections), Arc::clone(&self.wanted));
        Following { connections, wanted, node, touched }
    }

    /// Makes live connections follow what is in force; see [`Following::run`].
    ///
    /// # Errors
    /// If connections cannot be listed or marked. Some of them may have been.
    pub fn follow(&mut self, touched: &Touched) -> Result<Followed, Error> {
        self.following(touched.clone()).run()
    }

    /// Why tables that are not as they should be are made again.
    fn damaged(&self) -> Because {
        let known = |family| *self.known.get(family) != Known::Unknown;
        if Family::ALL.into_iter().all(known) { Because::Damaged } else { Because::Asked }
    }

    /// Makes the tables what they are to be, from whatever is there: one transaction for each family, and one
    /// family's failure is not the other's.
    fn make(&mut self, because: Because) -> Result<Applied, Error> {
        let failed = |source| Error::Write { table: TABLE, source };
        self.known = PerFamily::default();
        self.doubted = false;
        self.others.looking();
        let before = self.nft.generation().map_err(failed)?;
        let (mut changes, mut commits, mut outcome) = (0, 0, Ok(()));
        for family in Family::ALL {
            match self.write_with_or_without_log(family) {
                Ok((known, changed, committed)) => {
                    *self.known.get_mut(family) = known;
                    changes += changed;
                    commits += committed;
                }
                Err(error) => outcome = outcome.and(Err(failed(error))),
            }
        }
        let now = self.nft.generation().map_err(failed)?;
        self.others.looked((now == before.after(commits)).then_some(now));
        if because == Because::Damaged {
            self.repairs += changes;
        }
        // What of this is in force is not known to whoever asked for it.
        self.unfollowed |= outcome.is_err();
        outcome?;
        // Where no policy acts, no connection is cut.
        let unfollowed = std::mem::take(&mut self.unfollowed) && !self.elements().all().is_empty();
        // Whatever began while this was not in force is looked at.
        let touched = if changes > 0 || unfollowed { Touched::All } else { Touched::default() };
        Ok(Applied { changes, touched })
    }

    fn write_with_or_without_log(&mut self, family: Family) -> Result<(Known, usize, usize), NftError> {
        let error = match self.write(family) {
            Err(error) if self.logs && lacks_something(&error) => error,
            other => return other,
        };
        // A kernel without nfnetlink_log knows no such expression. It may be something else, too.
        self.logs = false;
        let written = self.write(family);
        self.logs = written.is_err();
        if written.is_ok() {
            let error = chain(&error);
            tracing::warn!(
                error,
                "the kernel cannot report packets that network policies deny: load nfnetlink_log"
            );
        }
        written
    }

    /// Makes one family's table; says what is known then, how many changes that took, and how many
    /// transactions.
    fn write(&mut self, family: Family) -> Result<(Known, usize, usize), NftError> {
        let Self { nft, wanted, router, logs, numbers, .. } = self;
        let (wanted, kept) = (wanted.reading(), numbers.get_mut(family));
        let id = table_id(family);
        if wanted.is_empty(family) {
            // A router in which no policy acts has no table, and a kernel without IPv6 need not have one.
            let removed = match nft.remove_table(&id) {
                Err(error) if lacks_something(&error) => 0,
                other => usize::from(other?),
            };
            return Ok((Known::Nothing, removed, removed));
        }
        until_current(&mut **nft, &id, ATTEMPTS, |nft, attempt, found| {
            // Whatever others made of the table, this run's classes keep their numbers.
            let matching = || Numbers::matching(family, wanted.all(), found.as_ref());
            let numbers = kept.clone().unwrap_or_else(matching);
            let state = state(family, &wanted, router, *logs, &numbers);
            let plan = diff(found.as_ref(), &state);
            let commits = nft.commit_planned(Some(attempt.generation), &plan)?;
            *kept = Some(numbers);
            Ok(Some((Known::Table, plan.len(), commits)))
        })
    }
}

impl std::fmt::Debug for PolicyTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyTable").field("router", &self.router).finish_non_exhaustive()
    }
}

/// Deletes the tables of both families, whoever made them. Says whether there were any.
///
/// # Errors
/// If the kernel refuses.
pub fn remove_table(nft: &mut dyn Nftables) -> Result<bool, Error> {
    let failed = |source| Error::Write { table: TABLE, source };
    let mut any = false;
    for family in Family::ALL {
        any |= nft.remove_table(&table_id(family)).map_err(failed)?;
    }
    Ok(any)
}

/// The kernel knows no such thing.
fn lacks_something(error: &NftError) -> bool {
    const EOPNOTSUPP: i32 = 95;
    const EAFNOSUPPORT: i32 = 97;
    error.is_not_found() || matches!(error.errno(), Some(EOPNOTSUPP | EAFNOSUPPORT))
}
