//! The task that follows objects, Networks and what instances have in force, and what it keeps of them.

mod feeding;
mod instances;
mod onward;
mod permissions;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipnet::IpNet;
use knit_api::names;
use knit_kernel::NetNs;
use knit_node::Core;
use knit_node::world::World;
use knit_objects::Objects;
use knit_proxy::model::{NetworkName, NodeInfo};
use knit_proxy::objects::{Feed, Source};
use knit_proxy::source::Event;
use knit_runtime::routers::Routers;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::entrances::Steering;
use crate::instance::{Changed, Instance, PortNews, StartError};
use crate::internal_ports::{InternalPorts, Reserved, reserved};
use crate::node_ports::NodePorts;
use crate::placement::Placement;
use crate::refusals::Refusals;
use crate::services::{Command, Config, Mode, Registries, Shared};
use crate::steerer::Steerer;
use crate::table::Table;
use onward::AbsentNetwork;

/// How often what failed is tried again, and kube-proxy is looked for.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How long what leads into routers from before stays as it is, while not all of them have said what they
/// serve.
const FIRST_REPORT_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Supervisor {
    config: Config,
    node: Arc<NetNs>,
    /// The routers of the runtime that makes them.
    routers: Arc<dyn Routers>,
    core: Core,
    feed: Feed,
    table: Table,
    /// Which Network each namespace has.
    placement: Placement,
    world: watch::Receiver<Arc<World>>,
    /// When all objects had arrived, and instances were told so.
    told: Option<Instant>,
    instances: BTreeMap<u64, Instance>,
    registries: Registries,
    node_ports: Arc<Mutex<NodePorts>>,
    /// Whether all Services have been listed, and so the owners of node ports are known.
    listed: watch::Sender<bool>,
    /// Ports of routers that stand for Services without a node port.
    internal: BTreeMap<NetworkName, InternalPorts>,
    /// Ports that no Service has.
    reserved: Reserved,
    steering: Steering,
    refusals: Refusals,
    steerer: Option<Steerer>,
    news: mpsc::UnboundedSender<PortNews>,
    inbox: mpsc::UnboundedReceiver<PortNews>,
    /// Networks without a router here.
    absent: BTreeMap<NetworkName, AbsentNetwork>,
    /// Networks that are being set up because clients outside reach their Services by this node.
    keeping: BTreeMap<NetworkName, JoinHandle<()>>,
    changed: Changed,
}

impl Supervisor {
    pub(crate) fn new(
        config: Config,
        core: Core,
        routers: Arc<dyn Routers>,
        objects: &Objects,
        Shared { registries, node_ports, listed }: Shared,
    ) -> Result<Self, StartError> {
        let node = Arc::new(config.namespace.try_clone().map_err(StartError::Namespace)?);
        let feed = Source::new(NodeInfo::new(&config.node)).open(objects).map_err(StartError::Objects)?;
        let refusals = Refusals::new(objects, &config.node);
        let world = core.world().subscribe();
        let shown = core.clone();
        let changed: Changed = Arc::new(move || shown.networks_changed());
        let (news, inbox) = mpsc::unbounded_channel();
        let reserved = reserved(&*routers);
        let mut steering = Steering::new(reserved.clone());
        // Until it is known.
        steering.set_left_to_others(config.mode == Mode::Auto);
        Ok(Self {
            config,
            node,
            routers,
            core,
            feed,
            table: Table::default(),
            placement: Placement::default(),
            world,
            told: None,
            instances: BTreeMap::new(),
            registries,
            node_ports,
            listed,
            internal: BTreeMap::new(),
            reserved,
            steering,
            refusals,
            steerer: None,
            news,
            inbox,
            absent: BTreeMap::new(),
            keeping: BTreeMap::new(),
            changed,
        })
    }

    /// Runs until the agent stops.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        let mut look = tokio::time::interval(RETRY_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut world = self.world.clone();
        let mut seen: Option<Arc<World>> = None;
        loop {
            tokio::select! {
                command = inbox.recv() => match command {
                    Some(command) => self.command(command).await,
                    None => return,
                },
                events = self.feed.next() => match events {
                    Some(events) => {
                        let moved = events.iter().any(|event| matches!(event, Event::SetNode(_)));
                        events.into_iter().for_each(|event| self.event(event));
                        if moved {
                            self.look_after_all().await;
                        }
                    }
                    None => return,
                },
                change = world.changed() => match change {
                    Ok(()) => {
                        // Let go of before it is looked at: that reads it again, and would wait for a writer
                        // that waits for us.
                        let now = world.borrow_and_update().clone();
                        self.look_at_world(&mut seen, &now);
                    }
                    Err(_) => return,
                },
                // There is always a sender: this one.
                Some(news) = self.inbox.recv() => self.in_force(&news),
                _ = look.tick() => {
                    self.look_after_all().await;
                    self.look_at_own_addresses();
                    self.keep_networks();
                    self.look_for_absent();
                }
            }
            self.tell_if_complete();
            self.lead_absent();
            self.tell_refused();
            self.steer();
        }
    }

    /// A router serves these ports now: what clients outside know of them leads there.
    fn in_force(&mut self, news: &PortNews) {
        let Some(instance) = self.instances.get_mut(&news.id) else { return };
        let Some(proxy) = &instance.running else { return };
        let (network, ends) = (instance.name(), &proxy.facts.ends);
        if news.full {
            instance.reported = true;
            self.absent.remove(&network);
            let there: BTreeSet<_> = news.ports.iter().map(|(key, _)| key).collect();
            for key in self.steering.ports_of(&network).iter().filter(|key| !there.contains(key)) {
                self.steering.set_port(&network, key, None, ends);
            }
        }
        for (key, view) in &news.ports {
            let service = self.table.service(&key.service);
            self.steering.set_port(&network, key, view.as_deref().zip(service.as_ref()), ends);
        }
    }

    /// Has written what leads into routers. What is there from before stays until all routers said what they
    /// serve.
    fn steer(&mut self) {
        if let Some(steerer) = &self.steerer {
            let changes = self.steering.take_changed();
            if !changes.is_empty() {
                steerer.update(changes);
            }
            return;
        }
        let Some(told) = self.told else { return };
        let reported = |network: &NetworkName| {
            self.absent.contains_key(network)
                || self.instances.values().any(|instance| instance.name() == *network && instance.reported)
        };
        if told.elapsed() < FIRST_REPORT_TIMEOUT && !self.table.external_networks().iter().all(reported) {
            return;
        }
        let routers = Arc::clone(&self.routers);
        match Steerer::start(routers, self.steering.wanted(), self.counts_repairs()) {
            Ok(steerer) => {
                let _ = self.steering.take_changed();
                self.steerer = Some(steerer);
            }
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                "traffic to Services of Networks is not steered into their routers"
            ),
        }
    }

    /// Sets up the Networks with Services that only a router on this node can lead clients outside to,
    /// whether or not it has pods of them.
    fn keep_networks(&mut self) {
        if self.told.is_none() {
            return;
        }
        for network in self.table.networks_that_need_routers(&self.reserved) {
            self.keep_network(&network);
        }
    }

    fn keep_network(&mut self, network: &NetworkName) {
        self.keeping.retain(|_, task| !task.is_finished());
        let known = self.world.borrow().networks.contains_key(network);
        if known && !self.keeping.contains_key(network) {
            let (core, name) = (self.core.clone(), network.clone());
            let task = tokio::spawn(async move { core.keep_network(&name).await });
            self.keeping.insert(network.clone(), task);
        }
    }

    /// The default Network's ranges: whose traffic comes back through this node's routers only if they
    /// masquerade it. One without subnets has this node's blocks.
    fn near(&self) -> Vec<IpNet> {
        let world = self.world.borrow();
        let default = world.networks.get(names::DEFAULT_NETWORK);
        let mut ranges = default.map_or_else(Vec::new, |network| network.ranges().to_vec());
        if ranges.is_empty() {
            let (network, node) = (names::DEFAULT_NETWORK, self.config.node.as_str());
            let own = world.blocks.values().filter(|b| b.network() == network && b.node() == node);
            ranges.extend(own.flat_map(|block| block.ranges()));
        }
        ranges.sort_unstable();
        ranges
    }
}
