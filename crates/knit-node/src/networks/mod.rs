//! The Networks of this node: set up when a pod first wants one, brought up to date when its objects change,
//! taken away when nobody has used it for a while. Node set-up is apart from pod set-up.

mod apply;
pub mod compute;
pub mod give_back;
mod in_force;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use knit_api::conditions;
use knit_ipam::{AddressList, Millis, NodeAllocator};
use knit_runtime::Runtime;
use knit_types::NetworkName;
use knit_types::sync::Locked;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::clock;
use crate::config::CoreConfig;
use crate::error::{Error, Reason};
use crate::policy::{EnforcedRouter, PoliciesState, PolicyEnforcer};
use crate::proxy::{Running, ServiceProxy, ServicesState};
use crate::runtimes::Runtimes;
use crate::sandboxes::Sandboxes;
use crate::world::WorldStore;
use compute::Unready;
use give_back::BlocksSaid;

/// The Networks, and all that setting one up takes.
pub struct Networks {
    config: Arc<CoreConfig>,
    world: Arc<WorldStore>,
    sandboxes: Arc<Sandboxes>,
    runtimes: Arc<Runtimes>,
    /// Service proxies, if there are any.
    proxy: Option<Arc<dyn ServiceProxy>>,
    /// Who enforces policies, if anybody here does.
    policies: Option<Arc<dyn PolicyEnforcer>>,
    /// Counts changes of what NodeNetwork shows.
    shown: watch::Sender<u64>,
    entries: Mutex<BTreeMap<NetworkName, Entry>>,
    inside: compute::ClusterRanges,
    /// Networks for whose gate a pass waits.
    waiting: Mutex<BTreeSet<NetworkName>>,
    /// Wakes whoever follows the objects, although none has changed.
    look: Notify,
    spare: give_back::SpareSince,
}

/// How long a request waits for a Network, or for an address of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitLimit {
    /// Until then.
    Until(Instant),
    /// It is tried once: who asks comes again.
    Once,
}

impl WaitLimit {
    /// When waiting ends.
    pub(crate) fn deadline(self) -> Instant {
        match self {
            Self::Until(deadline) => deadline,
            // A proxy that has just been started needs a moment.
            Self::Once => Instant::now() + Duration::from_secs(3),
        }
    }
}

#[derive(Debug, Default)]
struct Entry {
    /// One set-up at a time.
    gate: Arc<tokio::sync::Mutex<()>>,
    /// What the runtime was told last, successfully.
    applied: Option<Applied>,
    /// What the runtime was told last, and did not do, or not all of it.
    attempted: Option<(String, Arc<knit_runtime::Network>)>,
    /// Why it is not ready, or not up to date.
    problem: Option<Unready>,
    /// When somebody last wanted it.
    used_at: Millis,
    /// A pod found no free address, and nothing has changed since.
    starved: bool,
}

#[derive(Debug)]
struct Applied {
    runtime: String,
    network: Arc<knit_runtime::Network>,
    /// The Network's service proxy, which ends with it.
    proxy: Option<Box<dyn Running>>,
    /// Its policies, which are enforced as long as it is there.
    policies: Option<Box<dyn EnforcedRouter>>,
}

/// How a Network is on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetworkState {
    /// The Network's name.
    pub name: NetworkName,
    /// Why it is not ready; nothing if it is.
    pub problem: Option<Unready>,
    /// A pod found no free address.
    pub starved: bool,
    /// How its Services are; nothing if this agent has no service proxies, or none started.
    pub services: Option<ServicesState>,
    /// How its policies are; nothing if this agent enforces none, or the Network has no router.
    pub policies: Option<PoliciesState>,
}

// === impl Networks ===

impl Networks {
    pub(crate) fn new(
        config: Arc<CoreConfig>,
        world: Arc<WorldStore>,
        sandboxes: Arc<Sandboxes>,
        runtimes: Arc<Runtimes>,
        proxy: Option<Arc<dyn ServiceProxy>>,
        policies: Option<Arc<dyn PolicyEnforcer>>,
        shown: watch::Sender<u64>,
    ) -> Self {
        let (entries, waiting, look) = (Mutex::default(), Mutex::default(), Notify::new());
        let spare = give_back::SpareSince::default();
        let inside = compute::ClusterRanges::with(&config.not_outside);
        Self {
            config,
            world,
            sandboxes,
            runtimes,
            proxy,
            policies,
            shown,
            entries,
            inside,
            waiting,
            look,
            spare,
        }
    }

    /// Has whoever follows the objects begin a pass: something else that Networks depend on has changed.
    pub(crate) fn look_again(&self) {
        self.look.notify_one();
    }

    /// Who enforces policies, if anybody here does.
    pub(crate) fn policies(&self) -> Option<&dyn PolicyEnforcer> {
        self.policies.as_deref()
    }

    /// The service proxies of this node, if there are any.
    pub(crate) fn proxy(&self) -> Option<&dyn ServiceProxy> {
        self.proxy.as_deref()
    }

    /// Has service proxies and policies compare what they made, as runtimes do.
    pub(crate) fn compare_services_and_policies(&self) {
        self.proxy.iter().for_each(|proxy| proxy.compare());
        self.policies.iter().for_each(|policies| policies.compare());
    }

    /// What is to be said of this node's AddressBlocks, by whoever has the books.
    pub(crate) fn blocks(&self, allocator: &NodeAllocator, now: Millis) -> BlocksSaid {
        let delay = Millis(u64::try_from(self.config.block_grace.as_millis()).unwrap_or(u64::MAX));
        self.spare.look(&self.world, allocator, &self.config.node, (delay, now))
    }

    /// How each Network is.
    #[must_use]
    pub fn states(&self) -> Vec<NetworkState> {
        let state = |(name, entry): (&NetworkName, &Entry)| NetworkState {
            name: name.clone(),
            problem: match (&entry.applied, &entry.problem) {
                (_, Some(problem)) => Some(problem.clone()),
                (None, None) => Some(Unready::not_set_up("setup is in progress")),
                (Some(applied), None) => self.runtimes.problem_with(&applied.runtime, name),
            },
            starved: entry.starved,
            services: entry.applied.as_ref().and_then(|a| a.proxy.as_ref()).map(|proxy| proxy.state()),
            policies: entry.applied.as_ref().and_then(|a| a.policies.as_ref()).map(|p| p.state()),
        };
        self.entries().iter().map(state).collect()
    }

    /// Whether a Network was set up and pods can be attached, whatever became of later changes.
    #[must_use]
    pub fn is_set_up(&self, name: &NetworkName) -> bool {
        self.entries().get(name).is_some_and(|e| e.applied.is_some())
    }

    /// What the runtime was told of a Network.
    #[must_use]
    pub fn applied(&self, name: &NetworkName) -> Option<Arc<knit_runtime::Network>> {
        self.entries().get(name)?.applied.as_ref().map(|a| Arc::clone(&a.network))
    }

    /// Whether a runtime was told this of a Network last, and did it.
    fn is_in_force(&self, name: &NetworkName, network: &knit_runtime::Network) -> bool {
        let entries = self.entries();
        let applied = entries.get(name).filter(|entry| entry.attempted.is_none());
        applied.and_then(|entry| entry.applied.as_ref()).is_some_and(|applied| *applied.network == *network)
    }

    /// The newest that a runtime was told of a Network, whether or not it came to its end. Going back to what
    /// came before would undo what of it is in force.
    pub(crate) fn newest(&self, name: &NetworkName) -> Option<Arc<knit_runtime::Network>> {
        let entries = self.entries();
        let entry = entries.get(name)?;
        let applied = entry.applied.as_ref()?;
        // One that another runtime was told is not for this one to make.
        let attempted = entry.attempted.as_ref().filter(|(runtime, _)| *runtime == applied.runtime);
        Some(Arc::clone(attempted.map_or(&applied.network, |(_, network)| network)))
    }

    /// Notes that a Network is as its runtime was told.
    pub(crate) fn is_now(&self, network: &Arc<knit_runtime::Network>) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&network.name) else { return };
        if entry.attempted.take_if(|(_, newest)| newest == network).is_some()
            && let Some(applied) = &mut entry.applied
        {
            applied.network = Arc::clone(network);
            applied.proxy.iter().for_each(|proxy| proxy.update(network));
            entry.problem = None;
            drop(entries);
            self.changed();
        }
    }

    /// Notes that a Network which was in force is not any more, and could not be repaired: NodeNetwork says
    /// so, and it is tried again.
    pub(crate) fn is_broken(&self, network: &Arc<knit_runtime::Network>, problem: Unready) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&network.name) else { return };
        let Some(applied) = &entry.applied else { return };
        entry.attempted = Some((applied.runtime.clone(), Arc::clone(network)));
        let news = entry.problem.as_ref() != Some(&problem);
        entry.problem = Some(problem);
        drop(entries);
        if news {
            self.changed();
        }
    }

    /// The Networks that were in force and could not be repaired, with their runtimes.
    pub(crate) fn broken(&self) -> Vec<(String, NetworkName)> {
        let entries = self.entries();
        let broken = entries.iter().filter(|(_, entry)| entry.applied.is_some() && entry.problem.is_some());
        let named =
            |(name, entry): (&NetworkName, &Entry)| Some((entry.attempted.as_ref()?.0.clone(), name.clone()));
        broken.filter_map(named).collect()
    }

    /// The Networks that a runtime was told of.
    pub(crate) fn of_runtime(&self, runtime: &str) -> Vec<NetworkName> {
        let entries = self.entries();
        let told = |entry: &Entry| entry.applied.as_ref().is_some_and(|applied| applied.runtime == runtime);
        entries.iter().filter(|(_, entry)| told(entry)).map(|(name, _)| name.clone()).collect()
    }

    /// What the runtime of a Network that is set up says is wrong with it now.
    pub(crate) async fn check_runtime(&self, name: &NetworkName) -> Result<(), Unready> {
        let Some((runtime, _)) = self.unwell(name) else { return Ok(()) };
        // Perhaps it is well by now.
        self.runtimes.ask_again(&runtime).await;
        self.runtimes.problem_with(&runtime, name).map_or(Ok(()), Err)
    }

    /// The runtime of a Network that is set up, and what it said was wrong with it when it was asked last;
    /// nothing while it is well.
    pub(crate) fn unwell(&self, name: &NetworkName) -> Option<(String, Unready)> {
        let runtime = self.entries().get(name)?.applied.as_ref()?.runtime.clone();
        let problem = self.runtimes.problem_with(&runtime, name)?;
        Some((runtime, problem))
    }

    /// Notes that a pod found no free address.
    pub(crate) fn starved(&self, name: &NetworkName) {
        self.entries().entry(name.to_owned()).or_default().starved = true;
    }

    /// Notes that addresses of a Network were given back. Whoever still finds none says so again.
    pub(crate) fn given_back(&self, name: &NetworkName) {
        if let Some(entry) = self.entries().get_mut(name) {
            entry.starved = false;
        }
    }

    /// Whether the runtime knows the block of an address, or it is not out of a block.
    pub(crate) fn covers(
        &self,
        name: &NetworkName,
        node: &str,
        addresses: &AddressList,
        own: &[knit_ipam::Block],
    ) -> bool {
        let Some(applied) = self.applied(name) else { return false };
        let told = |address: IpAddr| {
            applied.blocks_of(node).any(|b| match address {
                IpAddr::V4(v4) => b.ipv4.is_some_and(|r| r.contains(&v4)),
                IpAddr::V6(v6) => b.ipv6.is_some_and(|r| r.contains(&v6)),
            })
        };
        let in_block = |address: IpAddr| own.iter().any(|b| b.index_of(address).is_some());
        addresses.iter().all(|address| told(address) || !in_block(address))
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<NetworkName, Entry>> {
        self.entries.locked()
    }

    /// Notes that a pod wants a Network.
    fn want(&self, name: &NetworkName) {
        self.world.want(name);
        self.entries().entry(name.to_owned()).or_default().used_at = clock::now();
    }

    /// Has a runtime remove a Network that it has and that neither the API nor this node knows, while nobody
    /// can set it up. Whether it was removed.
    pub(crate) async fn remove_unknown(
        &self,
        runtime: &Arc<dyn Runtime>,
        name: &NetworkName,
    ) -> knit_runtime::Result<bool> {
        // What was wanted here since the agent started goes as any other that nobody uses.
        if self.entries().contains_key(name) {
            return Ok(false);
        }
        let gate = self.gate(name);
        let removed = {
            let _alone = gate.lock().await;
            let is_known = self.world.get().networks.contains_key(name)
                || self.sandboxes.books().networks_in_use().contains(name);
            if is_known { Ok(false) } else { runtime.remove_network(name).await.map(|()| true) }
        };
        let mut entries = self.entries();
        // Unless somebody wants it by now.
        let unused = entries.get(name).is_some_and(|entry| {
            entry.applied.is_none() && entry.attempted.is_none() && Arc::strong_count(&gate) == 2
        });
        if unused {
            entries.remove(name);
        }
        removed
    }

    pub(crate) fn gate(&self, name: &NetworkName) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(&self.entries().entry(name.to_owned()).or_default().gate)
    }
}

// === impl Unready ===

impl Unready {
    /// What a request for the Network is told.
    pub(crate) fn into_error(self, network: &NetworkName) -> Error {
        let reason = match self.reason {
            conditions::node_network::REASON_NO_ADDRESS => Reason::AddressesExhausted,
            _ => Reason::NotReady,
        };
        Error::new(reason, format!("Network {network} is not ready on this node: {}", self.message))
    }
}

impl std::fmt::Debug for Networks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Networks").field("entries", &*self.entries()).finish_non_exhaustive()
    }
}
