//! One router as the worker looks after it: what is in force there, and what became of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use knit_kernel::netns::{NetNs, NsId};
use knit_node::policy::RouterApart;
use knit_policy::backend::{Backend, Backends, Denied, Failure, Follow, RouterPlace};
use knit_policy::model::Name;
use knit_policy::sets::{Change, Key, Value};
use knit_types::chain;

use super::Watched;
use crate::metrics::{Metrics, Side};

/// How long to wait before what failed is tried again; it doubles up to the longest.
const RETRY_DELAY: Duration = Duration::from_millis(500);
const LONGEST_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Live connections are looked at this often at most, and again this long after the last change: the
/// first packet of one may have been on its way.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);
/// How soon somebody else's changes are repaired again.
const REPAIR_INTERVAL: Duration = Duration::from_millis(500);

/// What an operator says about policies in a Network.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Settings {
    /// They are enforced here; if not, somebody else does, or nobody.
    pub(crate) enforced: bool,
    /// Live connections follow them.
    pub(crate) cut_connections: bool,
    /// There is a router to enforce them in.
    pub(crate) has_router: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { enforced: true, cut_connections: true, has_router: true }
    }
}

/// Where a router is, and of which kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    /// None for the node's own.
    pub(crate) apart: Option<RouterApart>,
    /// Whether pods of one bridge reach each other in it.
    pub(crate) is_bridged: bool,
}

/// A router.
pub(crate) struct Router {
    id: u64,
    network: Name,
    apart: Option<RouterApart>,
    is_bridged: bool,
    backend: Option<Box<dyn Backend>>,
    /// The namespace that the backend works in.
    namespace: Option<NsId>,
    settings: Settings,
    /// All that was asked for is in force, as far as we know.
    in_force: bool,
    /// What the backend was opened for does not hold what was asked for: it is to be brought whole.
    whole: bool,
    /// What of it is not enforced although it is written, and why.
    gap: Option<String>,
    /// Why it is not in force.
    problem: Option<String>,
    retry: Option<(Instant, Duration)>,
    /// When live connections are to follow, and how often after that.
    follow: Option<(Instant, u8)>,
    /// They are being made to, and so often after that.
    following: Option<u8>,
    followed: Option<Instant>,
    /// Addresses of pods that are about to start: what is alive of them was another pod's.
    fresh: BTreeSet<IpAddr>,
    /// Those of them that live connections are being looked at for.
    looked_for: BTreeSet<IpAddr>,
    /// The packets denied as they were last counted; at first what was counted before this agent.
    denied: Option<Denied>,
    restore_at: Option<Instant>,
    restored: Option<Instant>,
    /// How many elements and subjects it has.
    pub(crate) size: (usize, usize),
}

impl Router {
    pub(crate) fn new(id: u64, network: Name, place: Place, settings: Settings) -> Self {
        Self {
            id,
            network,
            apart: place.apart,
            is_bridged: place.is_bridged,
            backend: None,
            namespace: None,
            settings,
            in_force: false,
            whole: true,
            gap: None,
            problem: None,
            retry: None,
            follow: None,
            following: None,
            followed: None,
            fresh: BTreeSet::new(),
            looked_for: BTreeSet::new(),
            denied: None,
            restore_at: None,
            restored: None,
            size: (0, 0),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// All that was asked for is written.
    pub(crate) fn is_written(&self) -> bool {
        self.in_force
    }

    pub(crate) fn is_in_force(&self) -> bool {
        self.in_force && self.gap.is_none()
    }

    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref().or(self.gap.as_deref())
    }

    /// Somebody else changed something.
    pub(crate) fn touched(&mut self, now: Instant) {
        let soonest = self.restored.map_or(now, |at| at + REPAIR_INTERVAL);
        self.restore_at.get_or_insert(soonest.max(now));
    }

    pub(crate) fn settings(&self) -> Settings {
        self.settings
    }

    /// An operator says something else.
    pub(crate) fn set_settings(&mut self, settings: Settings) {
        let before = std::mem::replace(&mut self.settings, settings);
        if before == settings {
            return;
        }
        // What policies denied meanwhile goes on until now, and rules need not change for it to end.
        if let Some(backend) = self.backend.as_mut().filter(|_| !before.cut_connections) {
            backend.touch_all();
        }
        self.bring_whole();
    }

    /// When something is to be done here without news, apart from live connections.
    pub(crate) fn due(&self) -> Option<Instant> {
        let retry = self.retry.filter(|_| !self.in_force).map(|(at, _)| at);
        retry.into_iter().chain(self.restore_at).min()
    }

    /// If the router is another namespace than it was, everything has to be brought there: its links may come
    /// up only after that.
    pub(crate) fn look_for_move(&mut self) {
        let Some(apart) = self.apart.as_ref().filter(|_| self.backend.is_some()) else { return };
        if NetNs::open(&apart.namespace).ok().map(|namespace| namespace.id()) != self.namespace {
            tracing::warn!(network = %self.network, "its router was replaced: writing policies there");
            self.backend = None;
            self.bring_whole();
        }
    }

    /// Somebody waits for it: what failed is tried again now.
    pub(crate) fn try_now(&mut self) {
        if let Some((at, _)) = &mut self.retry {
            *at = Instant::now();
        }
        if self.gap.is_some() {
            self.look_for_gap();
        }
    }

    /// What is written may not be enforced: by a router that does not show its rules all packets.
    fn look_for_gap(&mut self) {
        let gap = self.backend.as_mut().and_then(|backend| backend.gap());
        if let Some(why) = gap.as_ref().filter(|_| gap != self.gap) {
            tracing::error!(network = %self.network, "policies are not in force: {why}");
        }
        self.gap = gap;
    }

    /// A pod is about to start with these addresses.
    pub(crate) fn starts_with(&mut self, addresses: impl IntoIterator<Item = IpAddr>) {
        // Where connections follow policies, these do.
        if !self.settings.cut_connections {
            self.fresh.extend(addresses);
        }
    }

    /// It is to be brought whole at the next occasion.
    pub(crate) fn bring_whole(&mut self) {
        (self.whole, self.in_force, self.retry) = (true, false, None);
    }

    /// Carries out changes; with everything that is wanted, for a router that is to be brought whole.
    pub(crate) fn apply(
        &mut self,
        changes: &[Change],
        all: impl FnOnce() -> BTreeMap<Key, Value>,
        (backends, node, watched): (&Arc<dyn Backends>, &NodePlace, &Watched),
        metrics: &Metrics,
        now: Instant,
    ) {
        let waits = self.retry.is_some_and(|(at, _)| now < at) && changes.is_empty();
        if waits || (self.in_force && changes.is_empty()) {
            return;
        }
        let done = self.open(backends, node, watched).and_then(|()| {
            let Some(backend) = &mut self.backend else { return Ok(()) };
            match (self.settings.enforced, self.whole) {
                (false, _) => backend.sync(&BTreeMap::new()),
                (true, true) => backend.sync(&all()),
                (true, false) if changes.is_empty() => backend.restore().map(drop),
                (true, false) => backend.apply(changes),
            }
        });
        match done {
            Ok(()) => {
                (self.in_force, self.whole, self.problem, self.retry) = (true, false, None, None);
                self.plan_follow(now);
                self.look_for_gap();
                if self.denied.is_none() {
                    self.denied = self.backend.as_mut().and_then(|backend| backend.denied().ok());
                }
            }
            Err(error) => self.failed(&error, metrics, now),
        }
    }

    /// Counts the packets that were denied since that was last done.
    pub(crate) fn count_denied(&mut self, metrics: &Metrics) {
        let Some(backend) = self.backend.as_mut().filter(|_| self.in_force) else { return };
        match backend.denied() {
            Ok(now) => {
                let Some(before) = self.denied.replace(now.clone()) else { return };
                for ((direction, address), packets) in now {
                    let old = before.get(&(direction, address)).copied().unwrap_or_default();
                    // Its rules were made again if there are fewer.
                    let more = packets.checked_sub(old).unwrap_or(packets);
                    metrics.denied.get_or_create(&Side::of(&self.network, direction)).inc_by(more);
                }
            }
            Err(error) => {
                let error = &*error as &dyn std::error::Error;
                tracing::debug!(network = %self.network, error, "denied packets cannot be counted now");
            }
        }
    }

    fn open(
        &mut self,
        backends: &Arc<dyn Backends>,
        node: &NodePlace,
        watched: &Watched,
    ) -> Result<(), Failure> {
        if self.backend.is_some() {
            return Ok(());
        }
        let namespace = match &self.apart {
            Some(apart) => NetNs::open(&apart.namespace)?,
            None => node.namespace.try_clone()?,
        };
        self.namespace = Some(namespace.id());
        let place = RouterPlace {
            network: self.network.clone(),
            namespace: namespace.as_fd(),
            uplink: self.apart.as_ref().map(|apart| apart.uplink.clone()),
            is_bridged: self.is_bridged,
            node: node.addresses.clone(),
        };
        let mut backend = backends.open(&place)?;
        backend.watch(watched.teller(self.network.clone(), self.id));
        self.backend = Some(backend);
        self.whole = true;
        Ok(())
    }

    fn failed(&mut self, error: &Failure, metrics: &Metrics, now: Instant) {
        let why = chain(&**error);
        metrics.failures.inc();
        if self.problem.as_deref() != Some(why.as_str()) {
            tracing::error!(network = %self.network, "policies are not in force: {why}");
        }
        let pause = self.retry.map_or(RETRY_DELAY, |(_, pause)| (pause * 2).min(LONGEST_RETRY_DELAY));
        self.retry = Some((now + pause, pause));
        self.in_force = false;
        self.problem = Some(why);
        // The router may be another namespace by now.
        self.backend = None;
    }

    /// The node's addresses are others now.
    pub(crate) fn set_node(&mut self, node: &[IpNet], metrics: &Metrics, now: Instant) {
        let Some(backend) = &mut self.backend else { return };
        if let Err(error) = backend.set_node(node) {
            self.failed(&error, metrics, now);
        }
    }

    /// Repairs what others have changed, if that is due.
    pub(crate) fn repair_if_due(&mut self, metrics: &Metrics, now: Instant) {
        if self.restore_at.take_if(|at| *at <= now).is_some() {
            self.restore(metrics, now);
        }
    }

    /// When live connections are to follow, if they are.
    pub(crate) fn follow_due(&self) -> Option<Instant> {
        self.follow.map(|(at, _)| at)
    }

    /// What has live connections follow: that may take a while where there are many. Whoever carries it out
    /// says what became of it by [`Self::has_followed`].
    pub(crate) fn follow(&mut self, now: Instant) -> Option<Follow> {
        let (_, rounds) = self.follow.take()?;
        let follow = self.backend.as_mut()?.follow();
        // An address has to be looked for in each round.
        if rounds > 0 {
            self.looked_for.clone_from(&self.fresh);
        }
        (self.following, self.followed) = (Some(rounds), Some(now));
        Some(follow)
    }

    /// Live connections have followed what was in force, or could not.
    pub(crate) fn has_followed(&mut self, outcome: Result<usize, Failure>, metrics: &Metrics, now: Instant) {
        let Some(rounds) = self.following.take() else { return };
        let again = match outcome {
            Ok(cut) => {
                metrics.cut.inc_by(u64::try_from(cut).unwrap_or_default());
                rounds.checked_sub(1)
            }
            Err(error) => {
                tracing::warn!(
                    network = %self.network,
                    error = &*error as &dyn std::error::Error,
                    "cannot apply policies to live connections yet"
                );
                // Until they do.
                Some(rounds)
            }
        };
        // Something has changed meanwhile: all of it is looked at again.
        if self.follow.is_some() {
            return;
        }
        match again {
            Some(rounds) => self.follow = Some((now + FOLLOW_INTERVAL, rounds)),
            None => {
                if let Some(backend) = &mut self.backend {
                    backend.leave_connections(&BTreeSet::new());
                }
                let looked_for = std::mem::take(&mut self.looked_for);
                self.fresh.retain(|address| !looked_for.contains(address));
            }
        }
    }

    /// Compares what is there with what should be, and repairs it.
    pub(crate) fn restore(&mut self, metrics: &Metrics, now: Instant) {
        if !self.in_force {
            return;
        }
        self.restored = Some(now);
        let Some(backend) = &mut self.backend else { return };
        match backend.restore() {
            Ok(0) => self.look_for_gap(),
            Ok(changes) => {
                self.look_for_gap();
                metrics.repairs.inc();
                tracing::warn!(network = %self.network, changes, "policy rules were changed; repaired");
                self.plan_follow(now);
            }
            Err(error) => self.failed(&error, metrics, now),
        }
    }

    fn plan_follow(&mut self, now: Instant) {
        let Some(backend) = &mut self.backend else { return };
        if !backend.has_touched() {
            return;
        }
        if !self.settings.cut_connections {
            backend.leave_connections(&self.fresh);
            if self.fresh.is_empty() {
                return;
            }
        }
        let soonest = self.followed.map_or(now, |at| at + FOLLOW_INTERVAL).max(now);
        let at = self.follow.map_or(soonest, |(at, _)| at.min(soonest));
        self.follow = Some((at, 1));
    }
}

/// The node's own namespace and addresses.
#[derive(Debug)]
pub(crate) struct NodePlace {
    pub(crate) namespace: NetNs,
    pub(crate) addresses: Vec<IpNet>,
}
