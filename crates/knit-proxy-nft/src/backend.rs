//! The backend: both tables, and the flows that a change leaves behind.

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::conntrack::Conntrack;
use knit_kernel::nft::Kernel;
use knit_kernel::watch::Untouched;
use knit_nft::{Error, Nftables, TableId};
use knit_proxy::backend::{Backend, Failure, Outcome, Retry};
use knit_proxy::backends::{MasqueradeAs, OnClean, OnRepair, Repaired};
use knit_proxy::conntrack::Cleanup;
use knit_proxy::model::{Family, PerFamily};
use knit_proxy::view::{Changes, NodeView};

use crate::conntrack::delete_stale;
use crate::families::kernel_families;
use crate::ip::table_family;
use crate::layout::Layout;
use crate::table::{FamilyTable, report};

/// The settings of an [`NftBackend`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The name of its tables. A second proxy in the same namespace needs another one.
    pub table: String,
    /// The bit of the packet mark that says "masquerade this" (rule 50). It is cleared again on the way out.
    pub masquerade_bit: u32,
    /// Delete UDP flows that lead to endpoints which are gone (rules 51, 52).
    pub clean_conntrack: bool,
    /// What masqueraded traffic looks like. Without it the kernel chooses, by the interface that it leaves
    /// by.
    pub masquerade_as: MasqueradeAs,
    /// Sources that are the node itself (rule 34), besides the addresses of this namespace: for a router
    /// apart from the node, those of the node.
    pub node_sources: Vec<IpNet>,
    /// How the names of links to routers apart from this namespace begin, if there may be any. External IPs
    /// and load balancers' addresses do not take what comes from there: it is other Networks'.
    pub routers: Option<String>,
    /// External IPs do not take addresses that this namespace itself has, on any interface: what is sent
    /// there is for whoever listens there. kube-proxy takes them, and so does this backend unless told
    /// otherwise.
    pub keeps_own_addresses: bool,
}

/// Why a family is brought to a state as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Because {
    /// Somebody asked for a sync.
    Asked,
    /// What holds for the whole node is different, or the family is tried again.
    Changed,
    /// The kernel refused a change, because something was there or was not.
    Contradicted,
    /// The kernel refused a change for another reason.
    Refused,
}

/// Makes a node view true with nftables. See the [crate](crate).
pub struct NftBackend {
    config: Config,
    nft: Box<dyn Nftables + Send>,
    conntrack: Option<Conntrack>,
    /// Where it is; none if nobody else can be there.
    namespace: Option<NetNs>,
    others: Untouched,
    tables: PerFamily<Option<FamilyTable>>,
    /// Why a family is not in force.
    broken: PerFamily<Option<String>>,
    cleaned: u64,
    changes: u64,
    commits: usize,
    on_clean: Option<OnClean>,
    on_repair: Option<OnRepair>,
}

/// A backend that could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no way to nftables.
    #[error("cannot open nftables in the network namespace")]
    Nftables(#[source] Error),
    /// There is no way to connection tracking.
    #[error(
        "cannot open connection tracking in the network namespace; set clean_conntrack to false to do without"
    )]
    Conntrack(#[source] knit_kernel::conntrack::Error),
    /// There is no way to the network namespace itself.
    #[error("cannot open the network namespace")]
    Namespace(#[source] knit_kernel::netns::Error),
}

impl Default for Config {
    /// Table `knit-proxy`, mark bit 0x4000 as kube-proxy, flows cleaned.
    fn default() -> Self {
        Self {
            table: "knit-proxy".to_owned(),
            masquerade_bit: 0x4000,
            clean_conntrack: true,
            masquerade_as: MasqueradeAs::default(),
            node_sources: Vec::new(),
            routers: None,
            keeps_own_addresses: false,
        }
    }
}

impl Config {
    /// For a proxy with a name of its own (`service.kubernetes.io/service-proxy-name`): table
    /// `knit-proxy-NAME`.
    #[must_use]
    pub fn named(proxy: &str) -> Self {
        Self { table: format!("knit-proxy-{proxy}"), ..Self::default() }
    }
}

impl NftBackend {
    /// For the network namespace of the calling thread.
    ///
    /// # Errors
    /// If the kernel gives no sockets for nftables or connection tracking.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        Self::new_in(&NetNs::current().map_err(OpenError::Namespace)?, config)
    }

    /// For another network namespace.
    ///
    /// # Errors
    /// If the kernel gives no sockets for nftables or connection tracking there.
    pub fn new_in(namespace: &NetNs, config: Config) -> Result<Self, OpenError> {
        let nft = Kernel::open_in(namespace).map_err(OpenError::Nftables)?;
        let conntrack = config.clean_conntrack.then(|| Conntrack::open_in(namespace)).transpose();
        let conntrack = conntrack.map_err(OpenError::Conntrack)?;
        let namespace = namespace.try_clone().map_err(OpenError::Namespace)?;
        Ok(Self { conntrack, namespace: Some(namespace), ..Self::over(nft, config) })
    }

    /// Over nftables that somebody else brings, as [`Fake`](knit_nft::Fake), without connection
    /// tracking.
    #[must_use]
    pub fn over(nft: impl Nftables + Send + 'static, config: Config) -> Self {
        Self {
            config,
            nft: Box::new(nft),
            conntrack: None,
            namespace: None,
            others: Untouched::default(),
            tables: PerFamily { v4: None, v6: None },
            broken: PerFamily::default(),
            cleaned: 0,
            changes: 0,
            commits: 0,
            on_clean: None,
            on_repair: None,
        }
    }

    /// Has somebody told of each look at stale flows.
    #[must_use]
    pub fn on_clean(mut self, told: OnClean) -> Self {
        self.on_clean = Some(told);
        self
    }

    /// Has somebody told of each table that others had changed, when it is as it should be again.
    #[must_use]
    pub fn on_repair(mut self, told: OnRepair) -> Self {
        self.on_repair = Some(told);
        self
    }

    /// How many stale flows were deleted so far.
    #[must_use]
    pub fn cleaned(&self) -> u64 {
        self.cleaned
    }

    /// How many changes (chains, rules, lists of elements) were committed so far.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.changes
    }

    fn layout(&self, family: Family, state: &NodeView) -> Layout {
        let pods = state.node.pods.get(family).clone();
        Layout::new(family, &self.config, pods)
    }

    /// Brings one family to a state, from whatever is there.
    fn sync_family(&mut self, family: Family, state: &NodeView, because: Because) -> Vec<Failure> {
        let before = self.tables.get_mut(family).take();
        let expected = because == Because::Asked && before.is_some_and(|table| table.is_for(state));
        let layout = self.layout(family, state);
        match FamilyTable::sync(&mut *self.nft, &layout, state) {
            Ok(synced) => {
                self.changes += synced.changes as u64;
                self.commits += synced.commits;
                if (expected && synced.changes > 0) || because == Because::Contradicted {
                    let (table, changes) = (&layout.id, synced.changes);
                    tracing::warn!(%table, changes, "another program changed the rules of Services; \
                    repairing them");
                    self.on_repair.iter_mut().for_each(|told| told(Repaired { family, changes }));
                }
                *self.tables.get_mut(family) = Some(synced.table);
                *self.broken.get_mut(family) = None;
                let failed = |(key, reason)| Failure { key, reason, retry: Retry::Later };
                synced.refused.into_iter().map(failed).collect()
            }
            Err(error) => {
                *self.broken.get_mut(family) = Some(report(&error));
                Vec::new()
            }
        }
    }

    /// Takes away what is left of a family that is not served.
    fn remove_family(&mut self, family: Family) {
        *self.tables.get_mut(family) = None;
        *self.broken.get_mut(family) = None;
        let id = TableId::new(table_family(family), self.config.table.as_str());
        match self.nft.remove_table(&id) {
            Ok(was_there) => self.commits += usize::from(was_there),
            // A kernel without the family has nothing of it, and cannot say so.
            Err(error) => {
                tracing::info!(
                    error = report(&error),
                    "cannot determine whether the unneeded table {id} exists"
                );
            }
        }
    }

    /// One family's failure is not the other's.
    fn outcome(&self, state: &NodeView, failures: Vec<Failure>) -> Outcome {
        let served = |family: Family| *state.node.families.get(family);
        let broken = |family: Family| self.broken.get(family).as_ref().filter(|_| served(family));
        match (broken(Family::V4), broken(Family::V6)) {
            (None, None) => Outcome::of(failures),
            (Some(v4), Some(v6)) if v4 == v6 => Outcome::Failed(v4.clone()),
            (Some(v4), Some(v6)) => Outcome::Failed(format!("IPv4: {v4}; IPv6: {v6}")),
            (Some(reason), None) if served(Family::V6) => {
                Outcome::FamilyFailed { family: Family::V4, reason: reason.clone(), failures }
            }
            (None, Some(reason)) if served(Family::V4) => {
                Outcome::FamilyFailed { family: Family::V6, reason: reason.clone(), failures }
            }
            (Some(reason), None) | (None, Some(reason)) => Outcome::Failed(reason.clone()),
        }
    }

    fn clean(&mut self, cleanup: &Cleanup) {
        let Some(conntrack) = &mut self.conntrack else { return };
        let mut looks = Vec::new();
        // Where the endpoints are not in force, it cannot be said which flows are stale.
        let known = PerFamily::from_fn(|family| self.tables.get(family).is_some());
        if let Err(error) = delete_stale(conntrack, cleanup, known, &mut looks) {
            // What was not found now is found after the next change, or by the next full sync.
            tracing::warn!(error = report(&error), "stale UDP flows were not all deleted");
        }
        for look in looks {
            self.cleaned += look.deleted as u64;
            if let Some(told) = &mut self.on_clean {
                told(look);
            }
        }
    }
}

impl NftBackend {
    fn sync_because(&mut self, state: &NodeView, because: Because) -> Outcome {
        let mut failures = Vec::new();
        self.others.looking();
        // If this cannot be said, the first reading says why.
        let before = self.nft.generation().ok();
        self.commits = 0;
        for family in Family::ALL {
            if *state.node.families.get(family) {
                failures.extend(self.sync_family(family, state, because));
            } else {
                self.remove_family(family);
            }
        }
        let expected = before.map(|before| before.after(self.commits));
        self.others.looked(self.nft.generation().ok().filter(|now| Some(*now) == expected));
        self.clean(&Cleanup::full(state));
        self.outcome(state, failures)
    }
}

impl Backend for NftBackend {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        self.sync_because(state, Because::Asked)
    }

    fn families(&self) -> PerFamily<bool> {
        kernel_families()
    }

    fn is_intact(&mut self) -> bool {
        let known = |family| self.tables.get(family).is_some() || self.broken.get(family).is_some();
        if !Family::ALL.into_iter().any(known) {
            return false;
        }
        self.nft.generation().is_ok_and(|now| self.others.left_alone(now))
    }

    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        let Some(namespace) = &self.namespace else { return };
        if let Err(error) = self.others.watch(namespace, &self.config.table, tell) {
            tracing::warn!(
                error = report(&error),
                "changes that other programs make to the rules will be noticed late"
            );
        }
    }

    fn apply(&mut self, changes: &Changes, state: &NodeView) -> Outcome {
        let served = |family: Family| *state.node.families.get(family);
        let strange = |family: Family| {
            let known = self.tables.get(family).is_some() || self.broken.get(family).is_some();
            known != served(family)
        };
        if changes.node || Family::ALL.into_iter().any(strange) {
            return self.sync_because(state, Because::Changed);
        }
        self.others.written();
        let mut failures = Vec::new();
        for family in Family::ALL.into_iter().filter(|family| served(*family)) {
            let again = match self.tables.get_mut(family) {
                Some(table) => match table.apply(&mut *self.nft, changes) {
                    Ok(count) => {
                        self.changes += count as u64;
                        None
                    }
                    // What is there now is anybody's guess: look, and begin from that (rule 57).
                    Err(error) => {
                        tracing::info!(
                            error = report(&error),
                            "a change of {family} was refused; doing a full sync"
                        );
                        let contradicted = error.is_not_found() || error.is_exists();
                        Some(if contradicted { Because::Contradicted } else { Because::Refused })
                    }
                },
                None => (changes.retry == Some(family)).then_some(Because::Changed),
            };
            if let Some(because) = again {
                failures.extend(self.sync_family(family, state, because));
            }
        }
        self.clean(&Cleanup::after(changes, state));
        self.outcome(state, failures)
    }
}

impl std::fmt::Debug for NftBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NftBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Deletes the tables of this name in both families: what a proxy leaves behind that is not to come back,
/// ours or another one's (`kube-proxy`; rule 62). Says whether there were any.
///
/// # Errors
/// If the kernel refuses.
pub fn remove_table(nft: &mut dyn Nftables, name: &str) -> Result<bool, Error> {
    let mut any = false;
    for family in Family::ALL {
        any |= nft.remove_table(&TableId::new(table_family(family), name))?;
    }
    Ok(any)
}
