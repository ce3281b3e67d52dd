//! How a Network comes into force on this node, stays up to date, and goes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use knit_api::{conditions, names};
use knit_ipam::Millis;
use knit_runtime::Reason as RuntimeReason;
use knit_types::NetworkName;
use knit_types::chain;
use knit_types::sync::Locked as _;
use tokio::time::Instant;

use super::compute::{self, Desired, PodsHere, Unready};
use super::{Applied, Networks, WaitLimit};
use crate::clock;
use crate::config::MainInterfaces;
use crate::error::{Error, Reason, Result};
use crate::policy::{EnforcedRouter, RouterApart};
use crate::proxy::{NoRouter, Running};
use crate::world::{World, announced};

/// The shortest time between two passes over all Networks because of changes.
const APPLY_INTERVAL: Duration = Duration::from_millis(100);
/// The time until what failed is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

impl Networks {
    /// Has pods be attached to a Network here: sets it up if nobody wanted it before.
    pub(crate) async fn ensure(&self, name: &NetworkName, patience: WaitLimit) -> Result<()> {
        if name == names::DEFAULT_NETWORK && !self.serves_default() {
            let message = "Network default is not available where another CNI plugin provides the main \
                interface of pods: use another Network";
            return Err(Error::new(Reason::Refused, message));
        }
        self.want(name);
        if self.is_set_up(name) {
            return self.check_runtime(name).await.map_err(|problem| problem.into_error(name));
        }
        match patience {
            WaitLimit::Until(deadline) => self.bring_up_to_date(name, deadline).await,
            WaitLimit::Once => self.apply(name).await.map_err(|problem| problem.into_error(name)),
        }
    }

    /// Sets a Network up here although no pod wants it, and keeps it for a while: something else does, such
    /// as a Service that clients outside reach by this node. Why it is not ready, if it is not, is kept with
    /// the Network.
    pub async fn keep(&self, name: &NetworkName) {
        if name == names::DEFAULT_NETWORK && !self.serves_default() {
            return;
        }
        self.want(name);
        if !self.is_set_up(name) {
            let _ = self.apply(name).await;
        }
    }

    /// Whether the Network of main interfaces is this agent's to serve: its router is the node's own
    /// namespace, where another CNI plugin may be at work.
    fn serves_default(&self) -> bool {
        self.config.main_interfaces == MainInterfaces::Ours
    }

    /// Something that NodeNetwork shows of a Network may have changed.
    pub(crate) fn changed(&self) {
        self.shown.send_modify(|n| *n += 1);
    }

    /// Waits until a Network's newest state is in force here.
    pub(crate) async fn bring_up_to_date(&self, name: &NetworkName, deadline: Instant) -> Result<()> {
        let mut changes = self.world.subscribe();
        loop {
            changes.borrow_and_update();
            let problem = match tokio::time::timeout_at(deadline, self.apply(name)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(problem)) => problem,
                Err(_) => Unready::not_set_up("setup takes longer than the request allows"),
            };
            if !matches!(tokio::time::timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                return Err(problem.into_error(name));
            }
        }
    }

    /// Brings one Network to its newest state.
    pub(crate) async fn apply(&self, name: &NetworkName) -> Result<(), Unready> {
        let gate = self.gate(name);
        let _one_at_a_time = gate.lock().await;
        self.apply_alone(name).await
    }

    /// The same, for whoever has the Network's gate.
    async fn apply_alone(&self, name: &NetworkName) -> Result<(), Unready> {
        let result = self.try_apply(name).await;
        let changed = {
            let mut entries = self.entries();
            let entry = entries.entry(name.to_owned()).or_default();
            let problem = result.as_ref().err().cloned();
            let changed = entry.problem != problem;
            entry.problem = problem;
            changed
        };
        if changed {
            if let Err(problem) = &result {
                tracing::warn!(
                    network = %name,
                    reason = problem.reason,
                    "Network is not ready: {}",
                    problem.message
                );
            }
            self.changed();
        }
        result
    }

    async fn try_apply(&self, name: &NetworkName) -> Result<(), Unready> {
        let world = self.world.get();
        let in_use = self.sandboxes.books().networks_in_use().contains(name);
        let here = if in_use { PodsHere::InUse } else { PodsHere::New };
        let desired = compute::desired(&world, &self.inside, name, &self.config.node, here)?;
        let runtime = desired.runtime.clone();
        let network = self.take_addresses(&world, name, desired);
        if network.blocks_of(&self.config.node).next().is_none() {
            return Err(compute::no_block(name));
        }
        if self.is_in_force(name, &network) {
            return Ok(());
        }
        let network = Arc::new(network);
        self.tell_runtime(&runtime, &network).await?;
        let first = !self.is_set_up(name);
        let proxy = if first { self.start_proxy(&runtime, &network).await } else { None };
        let policies = if first { self.start_policies(&runtime, &network) } else { None };
        let mut entries = self.entries();
        let entry = entries.entry(name.to_owned()).or_default();
        let (old_proxy, old_policies) = entry.applied.take().map(|a| (a.proxy, a.policies)).unzip();
        let proxy = old_proxy.flatten().inspect(|p| p.update(&network)).or(proxy);
        let policies = old_policies.flatten().or(policies);
        entry.attempted = None;
        entry.applied = Some(Applied { runtime, network, proxy, policies });
        drop(entries);
        if first {
            tracing::info!(network = %name, "Network is set up");
            self.changed();
        }
        Ok(())
    }

    /// Tells the allocator what of a Network is this node's, and completes the Network with what the
    /// allocator knows: the router's addresses, blocks that are being emptied, and which addresses are in use
    /// here.
    fn take_addresses(&self, world: &World, name: &NetworkName, desired: Desired) -> knit_runtime::Network {
        let Desired { pool, mut network, mut own_blocks, .. } = desired;
        let node = self.config.node.as_str();
        // Nothing that takes long while a pod waits for the books.
        let elsewhere = announced::held(world, &self.inside.announced, name, node);
        drop(self.world.own_blocks(node));
        let mut books = self.sandboxes.books();
        let allocator = &mut books.allocator;
        // A block that went meanwhile may have been said not to be held any more: under this lock, too.
        let own = self.world.own_blocks(node);
        let of_network = || own.values().filter(|own| own.block.network() == name);
        own_blocks.retain(|block| of_network().any(|own| own.block.block() == block));
        allocator.set_network(pool);
        let known: Vec<knit_ipam::Block> = allocator.blocks(name).cloned().collect();
        for gone in known.iter().filter(|block| !own_blocks.contains(block)) {
            allocator.remove_block(name, &gone.start());
        }
        let (mut grown, mut closed) = (false, false);
        for block in own_blocks {
            grown |= !known.contains(&block);
            if let Err(error) = allocator.add_block(block) {
                tracing::warn!(
                    network = %name,
                    error = &error as &dyn std::error::Error,
                    "cannot use an AddressBlock"
                );
            }
        }
        for own in of_network() {
            let is_wanted = own.reclaim.is_some();
            let news = allocator.set_wanted_back(name, &own.block.block().start(), is_wanted);
            // Addresses of it can be leased again, or what is to be said of it is another.
            grown |= news && !is_wanted;
            closed |= news && is_wanted;
        }
        // Blocks that are being emptied are no longer in the API, but pods still have addresses of them.
        for block in allocator.blocks(name) {
            let told = network.blocks_of(node).any(|b| {
                b.ipv4.map(|r| r.addr()) == block.start().v4()
                    && b.ipv6.map(|r| r.addr()) == block.start().v6()
            });
            if !told {
                network.blocks.push(as_runtime_block(world, node, block));
            }
        }
        network.router_addresses = compute::router_addresses(allocator.router(name).map(|(a, _)| a));
        // What two nodes gave out at the same moment stays with the pod that is here.
        network.announced.retain(|announced| {
            let mut here = announced.addresses.iter().filter_map(|a| allocator.holder(name, *a));
            let twice = here.next();
            if let Some(lease) = twice {
                tracing::error!(
                    network = %name,
                    here = %lease.holder(),
                    node = announced.node,
                    addresses = %lease.addresses,
                    "an address is also in use on another node: delete one of the two pods"
                );
            }
            twice.is_none()
        });
        allocator.set_elsewhere(name, elsewhere);
        if grown {
            self.entries().entry(name.to_owned()).or_default().starved = false;
            self.sandboxes.changed();
        }
        if closed {
            self.changed();
        }
        network
    }

    async fn tell_runtime(&self, runtime: &str, network: &Arc<knit_runtime::Network>) -> Result<(), Unready> {
        let Some(implementation) = self.runtimes.get(runtime) else {
            return Err(Unready {
                reason: conditions::node_network::REASON_RUNTIME_DOWN,
                message: format!("network runtime {runtime} does not answer on this node: start it"),
            });
        };
        self.entries().entry(network.name.clone()).or_default().attempted =
            Some((runtime.to_owned(), Arc::clone(network)));
        let limit = self.config.runtime_deadline;
        match tokio::time::timeout(limit, implementation.setup_network(network)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if error.reason == RuntimeReason::Unsupported => {
                let reason = conditions::node_network::REASON_UNSUPPORTED;
                Err(Unready { reason, message: chain(&error) })
            }
            Ok(Err(error)) => Err(Unready::not_set_up(chain(&error))),
            Err(_) => Err(Unready {
                reason: conditions::node_network::REASON_RUNTIME_DOWN,
                message: format!("network runtime {runtime} did not set it up within {} s", limit.as_secs()),
            }),
        }
    }

    async fn start_proxy(
        &self,
        runtime: &str,
        network: &Arc<knit_runtime::Network>,
    ) -> Option<Box<dyn Running>> {
        let proxy = self.proxy.as_ref()?;
        if !network.topology.has_router() {
            return Some(Box::new(NoRouter::of_topology(network.topology)));
        }
        if !self.has_routers(runtime) {
            return Some(Box::new(NoRouter::of_runtime(runtime)));
        }
        match proxy.start(self.router_of(network), network).await {
            Ok(running) => Some(running),
            Err(error) => {
                tracing::error!(
                    network = %network.name,
                    error = &error as &dyn std::error::Error,
                    "no Services in this Network"
                );
                None
            }
        }
    }

    /// Has policies enforced in a Network's router, if it has one. It returns at once.
    fn start_policies(
        &self,
        runtime: &str,
        network: &knit_runtime::Network,
    ) -> Option<Box<dyn EnforcedRouter>> {
        let policies = self.policies.as_ref().filter(|_| network.topology.has_router())?;
        let uplink = self.runtimes.get(runtime)?.routers()?.uplink_in_router();
        let router = self.router_of(network).map(|namespace| RouterApart { namespace, uplink });
        Some(policies.start(router, network))
    }

    /// Whether a runtime makes routers that the agent can use.
    fn has_routers(&self, runtime: &str) -> bool {
        self.runtimes.get(runtime).is_some_and(|runtime| runtime.routers().is_some())
    }

    /// Where the namespace of a Network's router is; none for the node's own.
    fn router_of(&self, network: &knit_runtime::Network) -> Option<std::path::PathBuf> {
        let own = network.name == names::DEFAULT_NETWORK;
        (!own).then(|| self.config.routers_dir().join(network.name.as_str()))
    }

    /// One pass over all Networks that this node needs: sets up, updates, and removes what was not used for a
    /// while.
    pub async fn pass(&self) {
        let world = self.world.get();
        let mut needed: BTreeSet<NetworkName> = self.sandboxes.books().networks_in_use();
        if self.serves_default() && world.networks.contains_key(names::DEFAULT_NETWORK) {
            needed.insert(NetworkName::default());
        }
        let now = clock::now();
        let grace = Millis(u64::try_from(self.config.network_grace.as_millis()).unwrap_or(u64::MAX));
        let (mut keep, mut remove) = (needed.clone(), Vec::new());
        for (name, entry) in self.entries().iter() {
            if !needed.contains(name) {
                if now < entry.used_at.plus(grace) && world.networks.contains_key(name) {
                    keep.insert(name.clone());
                } else {
                    remove.push(name.clone());
                }
            }
        }
        keep.iter().for_each(|name| self.world.want(name));
        let keep = keep.iter().map(|name| self.in_turn(name, Step::Apply));
        let remove = remove.iter().map(|name| self.in_turn(name, Step::Remove));
        futures::future::join_all(keep.chain(remove)).await;
    }

    /// What a pass does about one Network, unless another pass waits to do so already: that one will find the
    /// newest state when its turn comes. So a Network whose runtime hangs has at most one that waits, however
    /// many passes there are.
    async fn in_turn(&self, name: &NetworkName, step: Step) {
        let Some(ticket) = self.wait_for_turn(name) else { return };
        let gate = self.gate(name);
        let _one_at_a_time = gate.lock().await;
        drop(ticket);
        match step {
            // The result is kept with the Network.
            Step::Apply => _ = self.apply_alone(name).await,
            Step::Remove => self.remove_alone(name).await,
        }
    }

    fn wait_for_turn<'a>(&'a self, name: &'a NetworkName) -> Option<Ticket<'a>> {
        let free = self.waiting.locked().insert(name.clone());
        free.then(|| Ticket { waiting: &self.waiting, name })
    }

    /// Removes a Network that nobody uses, for whoever has its gate.
    async fn remove_alone(&self, name: &NetworkName) {
        if self.sandboxes.books().networks_in_use().contains(name) {
            return;
        }
        // Its proxy ends first. What a runtime was told and did not do whole is there as well.
        let told = self.entries().get_mut(name).and_then(|entry| {
            let applied = entry.applied.take().map(|applied| (applied.runtime, applied.network));
            applied.or_else(|| entry.attempted.take())
        });
        if let Some((runtime, network)) = told
            && let Err(why) = self.remove_from(&runtime, name).await
        {
            // Nothing is forgotten that a runtime may still have: the next pass tries again.
            let news = {
                let mut entries = self.entries();
                let entry = entries.entry(name.to_owned()).or_default();
                entry.attempted = Some((runtime.clone(), network));
                let problem = Unready::not_set_up(format!("it cannot be removed: {why}"));
                entry.problem.replace(problem.clone()) != Some(problem)
            };
            if news {
                tracing::warn!(network = %name, runtime, "cannot remove an unused Network yet: {why}");
                self.changed();
            }
            return;
        }
        // Fails only while leases are there, which a pod that came meanwhile may have.
        if self.sandboxes.books().allocator.remove_network(name).is_ok() {
            self.entries().remove(name);
            self.world.unwant(name);
            tracing::info!(network = %name, "removed an unused Network");
            self.changed();
        }
    }

    async fn remove_from(&self, runtime: &str, name: &NetworkName) -> Result<(), String> {
        let Some(runtime) = self.runtimes.get(runtime) else {
            return Err("its network runtime does not answer on this node".to_owned());
        };
        let limit = self.config.runtime_deadline;
        match tokio::time::timeout(limit, runtime.remove_network(name)).await {
            Ok(Err(error)) if error.reason != RuntimeReason::NetworkNotFound => Err(chain(&error)),
            Ok(_) => Ok(()),
            Err(_) => Err(format!("it was not removed within {} s", limit.as_secs())),
        }
    }

    /// Follows the objects that Networks are made of, forever.
    ///
    /// News are acted on while earlier passes still go on: a runtime that hangs delays its own Networks only.
    pub async fn follow(&self) {
        let mut changes = self.world.subscribe();
        let mut passes = FuturesUnordered::new();
        let mut seen = None;
        let mut next = Instant::now();
        loop {
            let revision = changes.borrow_and_update().networks_revision;
            if seen != Some(revision) {
                seen = Some(revision);
                // The first change is taken at once; those that come right behind it are taken together.
                let pause = tokio::time::sleep_until(next);
                tokio::pin!(pause);
                loop {
                    tokio::select! {
                        () = &mut pause => break,
                        Some(()) = passes.next() => {}
                    }
                }
                next = Instant::now() + APPLY_INTERVAL;
                passes.push(self.pass());
            }
            // A pass now and then even with no news: for what failed, and what is no longer used.
            let mut again = Instant::now() + self.pause();
            loop {
                tokio::select! {
                    news = changes.changed() => match news {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    () = self.look.notified() => {
                        seen = None;
                        break;
                    }
                    () = tokio::time::sleep_until(again) => {
                        seen = None;
                        break;
                    }
                    Some(()) = passes.next() => again = again.min(Instant::now() + self.pause()),
                }
            }
        }
    }

    /// How long until the next pass if there are no news.
    fn pause(&self) -> Duration {
        let behind = self.entries().values().any(|entry| entry.problem.is_some() || entry.applied.is_none());
        if behind { RETRY_DELAY } else { self.config.network_grace / 2 }
    }
}

/// What a pass does about a Network.
#[derive(Clone, Copy, Debug)]
enum Step {
    Apply,
    Remove,
}

/// Who waits for a Network's gate within a pass; given up when it is dropped.
struct Ticket<'a> {
    waiting: &'a Mutex<BTreeSet<NetworkName>>,
    name: &'a str,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.waiting.locked().remove(self.name);
    }
}

fn as_runtime_block(world: &World, node: &str, block: &knit_ipam::Block) -> knit_runtime::Block {
    let size = block.size();
    let start = block.start();
    let v4 = start.v4().and_then(|a| ipnet::Ipv4Net::new(a, size.prefix_len(knit_ipam::Family::V4)).ok());
    let v6 = start.v6().and_then(|a| ipnet::Ipv6Net::new(a, size.prefix_len(knit_ipam::Family::V6)).ok());
    let node_addresses = world.nodes.get(node).map(|n| n.addresses.clone()).unwrap_or_default();
    knit_runtime::Block { node: node.to_owned(), node_addresses, ipv4: v4, ipv6: v6 }
}
