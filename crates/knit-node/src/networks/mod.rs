//! The Networks of this node: set up when a pod first wants one, brought up to date when its objects change, taken
//! away when nobody has used it for a while. Node set-up is apart from pod set-up.

pub mod compute;
mod in_force;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use knit_api::{conditions, names};
use knit_ipam::{Addresses, Millis};
use knit_runtime::Reason as RuntimeReason;
use tokio::time::Instant;

use crate::clock;
use crate::core::Core;
use crate::error::{Error, Reason, Result};
use crate::proxy::{Running, ServicesState};
use crate::world::announced;
use compute::{Desired, Unready};

/// The shortest time between two passes over all Networks because of changes.
const GATHER: Duration = Duration::from_millis(100);

/// What this node has of each Network.
#[derive(Debug, Default)]
pub struct Networks {
    entries: Mutex<BTreeMap<String, Entry>>,
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
}

/// How a Network is on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetworkState {
    /// Its name.
    pub name: String,
    /// Why it is not ready; nothing if it is.
    pub problem: Option<Unready>,
    /// A pod found no free address.
    pub starved: bool,
    /// How its Services are; nothing if this agent has no service proxies, or none started.
    pub services: Option<ServicesState>,
}

// === impl Networks ===

impl Networks {
    /// How each Network is.
    #[must_use]
    pub fn states(&self) -> Vec<NetworkState> {
        let state = |(name, entry): (&String, &Entry)| NetworkState {
            name: name.clone(),
            problem: match (&entry.applied, &entry.problem) {
                (_, Some(problem)) => Some(problem.clone()),
                (None, None) => Some(Unready::not_set_up("it is being set up")),
                (Some(_), None) => None,
            },
            starved: entry.starved,
            services: entry.applied.as_ref().and_then(|a| a.proxy.as_ref()).map(|proxy| proxy.state()),
        };
        self.entries().iter().map(state).collect()
    }

    /// Whether a Network was set up and pods can be attached, whatever became of later changes.
    #[must_use]
    pub fn is_set_up(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|e| e.applied.is_some())
    }

    /// What the runtime was told of a Network.
    #[must_use]
    pub fn applied(&self, name: &str) -> Option<Arc<knit_runtime::Network>> {
        self.entries().get(name)?.applied.as_ref().map(|a| Arc::clone(&a.network))
    }

    /// Whether a runtime was told this of a Network last, and did it.
    fn is_in_force(&self, name: &str, network: &knit_runtime::Network) -> bool {
        let entries = self.entries();
        let applied = entries.get(name).filter(|entry| entry.attempted.is_none());
        applied.and_then(|entry| entry.applied.as_ref()).is_some_and(|applied| *applied.network == *network)
    }

    /// The newest that a runtime was told of a Network, whether or not it came to its end. Going back to what came before
    /// would undo what of it is in force.
    pub(crate) fn newest(&self, name: &str) -> Option<Arc<knit_runtime::Network>> {
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
        }
    }

    /// The Networks that a runtime was told of.
    pub(crate) fn of_runtime(&self, runtime: &str) -> Vec<String> {
        let entries = self.entries();
        let told = |entry: &Entry| entry.applied.as_ref().is_some_and(|applied| applied.runtime == runtime);
        entries.iter().filter(|(_, entry)| told(entry)).map(|(name, _)| name.clone()).collect()
    }

    /// Notes that a pod found no free address.
    pub(crate) fn starved(&self, name: &str) {
        self.entries().entry(name.to_owned()).or_default().starved = true;
    }

    /// Whether the runtime knows the block of an address, or it is not out of a block.
    pub(crate) fn covers(
        &self,
        name: &str,
        node: &str,
        addresses: &Addresses,
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

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a pod wants a Network.
    fn want(&self, name: &str) {
        self.entries().entry(name.to_owned()).or_default().used_at = clock::now();
    }

    pub(crate) fn gate(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(&self.entries().entry(name.to_owned()).or_default().gate)
    }
}

// === impl Unready ===

impl Unready {
    /// What a request for the Network is told.
    pub(crate) fn into_error(self, network: &str) -> Error {
        let reason = match self.reason {
            conditions::node_network::REASON_NO_ADDRESS => Reason::AddressesExhausted,
            _ => Reason::NotReady,
        };
        Error::new(reason, format!("Network {network} is not ready on this node: {}", self.message))
    }
}

// === impl Core ===

impl Core {
    /// Waits until pods can be attached to a Network here; sets it up if nobody wanted it before.
    pub(crate) async fn ensure_network(&self, name: &str, deadline: Instant) -> Result<()> {
        self.networks().want(name);
        if self.networks().is_set_up(name) {
            return Ok(());
        }
        self.bring_up_to_date(name, deadline).await
    }

    /// Sets a Network up here if nobody wanted it before, and waits for nothing else: who asks comes again.
    pub(crate) async fn network_now(&self, name: &str) -> Result<()> {
        self.networks().want(name);
        if self.networks().is_set_up(name) {
            return Ok(());
        }
        self.apply_network(name).await.map_err(|problem| problem.into_error(name))
    }

    /// Sets a Network up here although no pod wants it, and keeps it for a while: something else does, such as a Service
    /// that clients outside reach by this node. Why it is not ready, if it is not, is kept with the Network.
    pub async fn keep_network(&self, name: &str) {
        self.networks().want(name);
        if !self.networks().is_set_up(name) {
            let _ = self.apply_network(name).await;
        }
    }

    /// Waits until a Network's newest state is in force here.
    pub(crate) async fn bring_up_to_date(&self, name: &str, deadline: Instant) -> Result<()> {
        let mut changes = self.world().subscribe();
        loop {
            changes.borrow_and_update();
            let problem = match tokio::time::timeout_at(deadline, self.apply_network(name)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(problem)) => problem,
                Err(_) => Unready::not_set_up("setting it up takes longer than the request may"),
            };
            if !matches!(tokio::time::timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                return Err(problem.into_error(name));
            }
        }
    }

    /// Brings one Network to its newest state.
    pub(crate) async fn apply_network(&self, name: &str) -> Result<(), Unready> {
        let gate = self.networks().gate(name);
        let _one_at_a_time = gate.lock().await;
        let result = self.try_apply(name).await;
        let changed = {
            let mut entries = self.networks().entries();
            let entry = entries.entry(name.to_owned()).or_default();
            let problem = result.as_ref().err().cloned();
            let changed = entry.problem != problem;
            entry.problem = problem;
            changed
        };
        if changed {
            if let Err(problem) = &result {
                tracing::warn!(
                    network = name,
                    reason = problem.reason,
                    "Network is not ready: {}",
                    problem.message
                );
            }
            self.networks_changed();
        }
        result
    }

    async fn try_apply(&self, name: &str) -> Result<(), Unready> {
        let world = self.world().get();
        let Desired { pool, runtime, mut network, own_blocks } = compute::desired(&world, name, self.node())?;
        {
            let mut books = self.books();
            let allocator = &mut books.allocator;
            allocator.set_network(pool);
            let known: Vec<knit_ipam::Block> = allocator.blocks(name).cloned().collect();
            for gone in known.iter().filter(|block| !own_blocks.contains(block)) {
                allocator.remove_block(name, &gone.start());
            }
            let mut grown = false;
            for block in own_blocks {
                grown |= !known.contains(&block);
                if let Err(error) = allocator.add_block(block) {
                    tracing::warn!(
                        network = name,
                        error = &error as &dyn std::error::Error,
                        "an AddressBlock cannot be used"
                    );
                }
            }
            // Blocks that are being emptied are no longer in the API, but pods still have addresses of them.
            for block in allocator.blocks(name) {
                let told = network.blocks_of(self.node()).any(|b| {
                    b.ipv4.map(|r| r.addr()) == block.start().v4()
                        && b.ipv6.map(|r| r.addr()) == block.start().v6()
                });
                if !told {
                    network.blocks.push(as_runtime_block(&world, self.node(), block));
                }
            }
            network.router_addresses = compute::router_addresses(allocator.router(name).map(|(a, _)| a));
            // What two nodes gave out at the same moment stays with the pod that is here.
            network.announced.retain(|announced| {
                let mut here = allocator.leases().filter(|l| l.network == name);
                let twice = here.find(|l| announced.addresses.iter().any(|a| l.addresses.contains(*a)));
                if let Some(lease) = twice {
                    tracing::error!(network = name, here = %lease.holder(), node = announced.node, addresses = %lease.addresses, "an address is in use on another node, too: delete one of the two pods");
                }
                twice.is_none()
            });
            allocator.set_elsewhere(name, announced::held(&world, name, self.node()));
            if grown {
                self.networks().entries().entry(name.to_owned()).or_default().starved = false;
                self.books_changed();
            }
        }
        if network.blocks_of(self.node()).next().is_none() {
            return Err(compute::no_block(name));
        }
        if self.networks().is_in_force(name, &network) {
            return Ok(());
        }
        let Some(implementation) = self.runtimes().get(&runtime) else {
            return Err(Unready {
                reason: conditions::node_network::REASON_RUNTIME_DOWN,
                message: format!("network runtime {runtime} does not answer on this node: start it"),
            });
        };
        let limit = self.config().runtime_deadline;
        let network = Arc::new(network);
        self.networks().entries().entry(name.to_owned()).or_default().attempted =
            Some((runtime.clone(), Arc::clone(&network)));
        match tokio::time::timeout(limit, implementation.setup_network(&network)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.reason == RuntimeReason::Unsupported => {
                let reason = conditions::node_network::REASON_UNSUPPORTED;
                return Err(Unready { reason, message: chain(&error) });
            }
            Ok(Err(error)) => return Err(Unready::not_set_up(chain(&error))),
            Err(_) => {
                return Err(Unready {
                    reason: conditions::node_network::REASON_RUNTIME_DOWN,
                    message: format!(
                        "network runtime {runtime} did not set it up within {} s",
                        limit.as_secs()
                    ),
                });
            }
        }
        let first = !self.networks().is_set_up(name);
        let proxy = if first { self.start_proxy(&network).await } else { None };
        let mut entries = self.networks().entries();
        let entry = entries.entry(name.to_owned()).or_default();
        let proxy = entry.applied.take().and_then(|a| a.proxy).inspect(|p| p.update(&network)).or(proxy);
        entry.attempted = None;
        entry.applied = Some(Applied { runtime, network, proxy });
        drop(entries);
        if first {
            tracing::info!(network = name, "Network is set up");
            self.networks_changed();
        }
        Ok(())
    }

    /// One pass over all Networks that this node needs: sets up, updates, and removes what was not used for a while.
    pub async fn pass_over_networks(&self) {
        let world = self.world().get();
        let mut needed: BTreeSet<String> = self.books().networks_in_use();
        if world.networks.contains_key(names::DEFAULT_NETWORK) {
            needed.insert(names::DEFAULT_NETWORK.to_owned());
        }
        let now = clock::now();
        let grace = Millis(u64::try_from(self.config().network_grace.as_millis()).unwrap_or(u64::MAX));
        let (mut keep, mut remove) = (needed.clone(), Vec::new());
        for (name, entry) in self.networks().entries().iter() {
            if !needed.contains(name) {
                if now < entry.used_at.plus(grace) && world.networks.contains_key(name) {
                    keep.insert(name.clone());
                } else {
                    remove.push(name.clone());
                }
            }
        }
        // Each result is kept with its Network.
        let _ = futures::future::join_all(keep.iter().map(|name| self.apply_network(name))).await;
        for name in remove {
            self.remove_network(&name).await;
        }
    }

    async fn remove_network(&self, name: &str) {
        let gate = self.networks().gate(name);
        let _one_at_a_time = gate.lock().await;
        if self.books().networks_in_use().contains(name) {
            return;
        }
        let runtime =
            self.networks().entries().get_mut(name).and_then(|e| e.applied.take()).map(|a| a.runtime);
        if let Some(runtime) = runtime.as_ref().and_then(|runtime| self.runtimes().get(runtime))
            && let Err(error) = runtime.remove_network(name).await
            && error.reason != RuntimeReason::NetworkNotFound
        {
            tracing::warn!(
                network = name,
                error = &error as &dyn std::error::Error,
                "an unused Network cannot be removed yet"
            );
            return;
        }
        // Fails only while leases are there, which a pod that came meanwhile may have.
        if self.books().allocator.remove_network(name).is_ok() {
            self.networks().entries().remove(name);
            tracing::info!(network = name, "unused Network is removed");
            self.networks_changed();
        }
    }

    /// Follows the objects that Networks are made of, for ever.
    pub async fn follow_networks(&self) {
        let mut changes = self.world().subscribe();
        let mut seen = None;
        let mut next = Instant::now();
        loop {
            let revision = changes.borrow_and_update().networks_revision;
            let behind = self.networks().states().iter().any(|s| s.problem.is_some());
            if seen != Some(revision) || behind {
                seen = Some(revision);
                // The first change is taken at once; those that come right behind it are taken together.
                tokio::time::sleep_until(next).await;
                next = Instant::now() + GATHER;
                self.pass_over_networks().await;
            }
            // A pass now and then even with no news: for what failed, and what is no longer used.
            let pause = if behind { Duration::from_secs(1) } else { self.config().network_grace / 2 };
            let news = tokio::time::timeout(pause, changes.changed()).await;
            match news {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return,
                Err(_) => seen = None,
            }
        }
    }
}

fn as_runtime_block(
    world: &crate::world::World,
    node: &str,
    block: &knit_ipam::Block,
) -> knit_runtime::Block {
    let size = block.size();
    let start = block.start();
    let v4 = start.v4().and_then(|a| ipnet::Ipv4Net::new(a, size.prefix_len(knit_ipam::Family::V4)).ok());
    let v6 = start.v6().and_then(|a| ipnet::Ipv6Net::new(a, size.prefix_len(knit_ipam::Family::V6)).ok());
    let node_addresses = world.nodes.get(node).map(|n| n.addresses.clone()).unwrap_or_default();
    knit_runtime::Block { node: node.to_owned(), node_addresses, ipv4: v4, ipv6: v6 }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
