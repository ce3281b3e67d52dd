//! The task that feeds all instances, and starts again those that stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipnet::IpNet;
use knit_api::{AddressBlockSpec, names};
use knit_kernel::NetNs;
use knit_node::Core;
use knit_node::proxy::ServicesState;
use knit_node::world::World;
use knit_objects::Objects;
use knit_proxy::backends::Backends;
use knit_proxy::model::{NetworkName, NodeInfo, Protocol, ServiceName};
use knit_proxy::objects::{Feed, Source};
use knit_proxy::source::Event;
use knit_runtime::Network;
use knit_runtime::routers::Routers;
use knit_types::chain;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use crate::entrances::Steering;
use crate::forbidden::Forbidden;
use crate::instance::{self, Changed, Facts, Instance, News, Proxy, Servers, Started, Trouble};
use crate::internal_ports::{InternalPorts, Reserved, is_external, reserved};
use crate::node_ports::NodePorts;
use crate::placement::Placement;
use crate::refusals::Refusals;
use crate::services::{Command, Config, Mode, Registries};
use crate::steerer::Steerer;
use crate::table::{Table, To};

/// How often what failed is tried again, and kube-proxy is looked for.
const LOOK: Duration = Duration::from_secs(5);

/// How long what leads into routers from before stays as it is, while not all of them have said what they
/// serve.
const PATIENCE: Duration = Duration::from_secs(10);

/// What serves a node in place of this agent.
const KUBE_PROXY: &str = "kube-proxy is at work on this node, so the default Network's Services are left to \
                          it; \
                          --services on has this agent serve them";

mod permissions;

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
    /// Ports of routers that stand for Services without a node port.
    internal: BTreeMap<NetworkName, InternalPorts>,
    /// Ports that no Service has.
    reserved: Reserved,
    steering: Steering,
    refusals: Refusals,
    steerer: Option<Steerer>,
    news: mpsc::UnboundedSender<News>,
    inbox: mpsc::UnboundedReceiver<News>,
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
        (registries, node_ports): (Registries, Arc<Mutex<NodePorts>>),
    ) -> Result<Self, Trouble> {
        let node = Arc::new(config.namespace.try_clone().map_err(Trouble::Namespace)?);
        let feed = Source::new(NodeInfo::new(&config.node)).open(objects).map_err(Trouble::Objects)?;
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
            internal: BTreeMap::new(),
            reserved,
            steering,
            refusals,
            steerer: None,
            news,
            inbox,
            keeping: BTreeMap::new(),
            changed,
        })
    }

    /// Runs until the agent stops.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        let mut look = tokio::time::interval(LOOK);
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
                }
            }
            self.tell_if_complete();
            self.tell_refused();
            self.steer();
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Start { id, router, network, state } => {
                let (instance, registry) = Instance::new(id, router, network, state);
                self.registries.lock().unwrap_or_else(PoisonError::into_inner).insert(id, registry);
                self.instances.insert(id, instance);
                self.start(id).await;
            }
            Command::Update { id, network } => self.update(id, network).await,
            Command::Compare => {
                let running = self.instances.values().filter_map(|instance| instance.running.as_ref());
                // One that has stopped is started again, and compares then.
                for proxy in running {
                    let _ = proxy.compare();
                }
                self.steerer.iter().for_each(Steerer::compare);
            }
            Command::Stop { id } => {
                self.registries.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                if let Some(instance) = self.instances.remove(&id) {
                    let name = instance.name();
                    end(instance.running).await;
                    if self.instances.values().all(|other| other.name() != name) {
                        self.steering.forget_network(&name);
                        self.internal.remove(&name);
                    }
                }
            }
        }
    }

    async fn update(&mut self, id: u64, network: Network) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let same = instance.same_settings(&network);
        let before = instance.exempt();
        instance.network = network;
        if !same {
            end(instance.running.take()).await;
            self.start(id).await;
        } else if instance.exempt() != before {
            let event = Event::SetExemptVips(instance.exempt());
            send(instance, event);
        }
    }

    /// Starts one that does not run, if it should.
    async fn start(&mut self, id: u64) {
        let Some(instance) = self.instances.get(&id) else { return };
        let own = instance.router.is_none();
        let node = self.table.node().cloned().unwrap_or_else(|| NodeInfo::new(&self.config.node));
        let setup = instance.setup(&self.changed, &self.news, self.counts_repairs());
        let (router, given) = (instance.router.clone(), Arc::clone(&self.node));
        let (near, takes_own) = (self.near(), self.takes_own());
        let yields = own && self.config.mode == Mode::Auto;
        let (backends, routers) = (Arc::clone(&self.config.backends), Arc::clone(&self.routers));
        let started = tokio::task::spawn_blocking(move || {
            let namespace = instance::namespace(router.as_deref(), &given)?;
            let at = Some(namespace.as_fd());
            // Two would both balance, and one of them is not kept up to date.
            if yields && backends.others_at_work(at).map_err(Trouble::Look)?.is_some() {
                backends.remove(at).map_err(Trouble::GiveWay)?;
                return Ok(None);
            }
            let facts = match own {
                true => Facts::of_node(takes_own),
                false => Facts::of_router(&*routers, &namespace, &node, &near)?,
            };
            let running = setup.start((&*backends, &*routers), &namespace, &node, &facts)?;
            // Nothing is programmed before all objects have arrived: until then, what is there is in force.
            let left_over = backends.is_left_over(at).map_err(Trouble::Look)?;
            Ok(Some(Started { running, namespace: namespace.id(), facts, left_over }))
        });
        let started: Result<Option<Started>, Trouble> = match started.await {
            Ok(started) => started,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let Some(instance) = self.instances.get_mut(&id) else { return };
        match started {
            Ok(Some(started)) => {
                if started.left_over && *instance.state.borrow() == ServicesState::Waiting {
                    instance.set_state(ServicesState::Kept, &self.changed);
                }
                let servers = Servers {
                    node: Arc::clone(&self.node),
                    healthz: self.config.healthz,
                    metrics: self.config.metrics,
                    registries: Arc::clone(&self.registries),
                    mode: self.config.backends.name(),
                };
                instance.started(started, servers);
                // Not for one that does not start, which is tried again and again.
                self.keep_limits(id);
                if self.told.is_some() {
                    self.replay(id);
                }
                if own {
                    self.leave_to_others(false);
                }
            }
            Ok(None) => {
                instance.set_state(ServicesState::Off(KUBE_PROXY.to_owned()), &self.changed);
                self.leave_to_others(true);
            }
            Err(trouble) => instance.set_state(ServicesState::Broken(chain(&trouble)), &self.changed),
        }
    }

    /// Keeps the limits of the connection table where a proxy runs as they should be; what somebody changed
    /// is a repair.
    fn keep_limits(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Ok(namespace) = instance::namespace(instance.router.as_deref(), &self.node) else {
            // The next look says what is wrong with it.
            return;
        };
        let first = instance.limits.is_none();
        if first {
            instance.limits = self.config.backends.limits(instance.router.is_some());
        }
        let written = instance.limits.as_mut().map_or(0, |limits| limits.keep(Some(namespace.as_fd())));
        if written > 0 && !first {
            self.core.metrics().repaired("sysctls", written as u64);
        }
    }

    /// Counts what somebody else had changed and is put right.
    fn counts_repairs(&self) -> Box<dyn Fn() + Send> {
        let core = self.core.clone();
        Box::new(move || core.metrics().repaired("services", 1))
    }

    /// Starts what does not run, and anew what runs in a namespace that is gone or beside kube-proxy.
    async fn look_after_all(&mut self) {
        let ids: Vec<u64> = self.instances.keys().copied().collect();
        let node = self.table.node().cloned().unwrap_or_else(|| NodeInfo::new(&self.config.node));
        let (near, takes_own) = (self.near(), self.takes_own());
        for id in ids {
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            if let Some(proxy) = &instance.running {
                let yields = instance.router.is_none() && self.config.mode == Mode::Auto;
                let looked = match instance.router.is_some() {
                    true => out_of_place(instance, proxy, (&self.node, &*self.routers), (&node, &near)),
                    false => {
                        let others = yields.then_some(&*self.config.backends);
                        is_in_the_way(proxy, &self.node, others, takes_own)
                    }
                };
                match looked {
                    Ok(false) => {
                        self.keep_limits(id);
                        continue;
                    }
                    Ok(true) => end(instance.running.take()).await,
                    Err(trouble) => {
                        let network = &instance.network.name;
                        tracing::warn!(
                            network,
                            error = &trouble as &dyn std::error::Error,
                            "a router cannot be looked at"
                        );
                        continue;
                    }
                }
            }
            self.start(id).await;
        }
    }

    fn event(&mut self, event: Event) {
        if let Event::Problem(problem) = &event {
            tracing::warn!("{problem}");
        }
        self.node_ports.lock().unwrap_or_else(PoisonError::into_inner).hear(&event);
        if let Event::SetService(service) = &event
            && !service.external_ips.is_empty()
            && !self.steering.knows_own()
        {
            self.read_own_addresses();
        }
        let service = match &event {
            Event::SetService(service) => Some(service.name.clone()),
            Event::DeleteService(name) => Some(name.clone()),
            _ => None,
        };
        let world = self.world.borrow().clone();
        let before = self.node_addresses();
        let taken = self.table.take(event, |namespace| self.placement.network_of(&world, namespace));
        if let Some(name) = service.filter(|_| self.told.is_some()) {
            self.tell_denied(&world, &name);
        }
        let Some((to, event)) = taken else { return };
        if self.told.is_some() && self.node_addresses() != before {
            self.set_defaults();
        }
        // Before everything has arrived, it is only kept.
        if self.told.is_some() {
            match to {
                To::One(network) => self.send_to(&network, event),
                To::All => self.instances.values_mut().for_each(|i| send(i, event.clone())),
            }
        }
    }

    fn look_at_world(&mut self, seen: &mut Option<Arc<World>>, world: &Arc<World>) {
        let before = seen.replace(Arc::clone(world));
        if !before.as_ref().is_some_and(|seen| Forbidden::same(seen, world)) {
            let forbidden = Forbidden::of(world, &self.routers.uplink_ranges());
            self.steering.set_forbidden(forbidden.clone());
            let filtered = self.table.set_forbidden(forbidden);
            if self.told.is_some() {
                filtered.into_iter().for_each(|(network, event)| self.send_to(&network, event));
            }
        }
        let namespaces = self.placement.look(world);
        if namespaces.is_empty() {
            return;
        }
        let mut moved = self.permit(world);
        let network_of = |namespace: &str| self.placement.network_of(world, namespace);
        moved.extend(self.table.reassign(|namespace| namespaces.contains(namespace), network_of));
        if self.told.is_some() {
            moved.into_iter().for_each(|(network, event)| self.send_to(&network, event));
            self.tell_all_denied(world);
            self.keep_networks();
        }
    }

    fn send_to(&mut self, network: &NetworkName, event: Event) {
        if *network == NetworkName::default() {
            match &event {
                Event::SetService(service) => {
                    let node = self.node_addresses();
                    // With what was left out of it: its author is told.
                    if let Some(service) = self.table.service(&service.name) {
                        self.steering.set_default(&service, &node);
                    }
                }
                Event::DeleteService(name) => self.steering.forget_default(name),
                _ => {}
            }
        }
        if let Event::SetService(service) = &event
            && *network != NetworkName::default()
            && is_external(service, true)
            && self.instances.values().all(|instance| instance.name() != *network)
        {
            self.keep_networks();
        }
        for event in prepared(&mut self.internal, &self.reserved, &self.table, network, event) {
            self.instances.values_mut().filter(|i| i.name() == *network).for_each(|i| send(i, event.clone()));
        }
    }

    /// Tells an instance everything.
    fn replay(&mut self, id: u64) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let name = instance.name();
        let node = self.table.node().map(|node| Event::SetNode(Box::new(node.clone())));
        for event in node.into_iter().chain(self.table.replay(&name)) {
            for event in prepared(&mut self.internal, &self.reserved, &self.table, &name, event) {
                send(instance, event);
            }
        }
        if let Some(proxy) = &instance.running
            && proxy.all_listed().is_err()
        {
            instance.running = None;
        }
    }

    /// Nothing is programmed before all that there is has arrived, and it is known where it belongs.
    fn tell_if_complete(&mut self) {
        if self.told.is_none() && self.table.listed() && self.world.borrow().is_synced() {
            let world = self.world.borrow().clone();
            // Nobody was told anything yet.
            let _ = self.permit(&world);
            let _ = self.placement.look(&world);
            let network_of = |namespace: &str| self.placement.network_of(&world, namespace);
            let _ = self.table.reassign(|_| true, network_of);
            let forbidden = Forbidden::of(&world, &self.routers.uplink_ranges());
            let _ = self.table.set_forbidden(forbidden.clone());
            self.steering.set_forbidden(forbidden);
            self.told = Some(Instant::now());
            self.set_defaults();
            self.tell_all_denied(&world);
            let ids: Vec<u64> = self.instances.keys().copied().collect();
            ids.into_iter().for_each(|id| self.replay(id));
            self.keep_networks();
        }
    }

    /// A router serves these ports now: what clients outside know of them leads there.
    fn in_force(&mut self, news: &News) {
        let Some(instance) = self.instances.get_mut(&news.id) else { return };
        let Some(proxy) = &instance.running else { return };
        let (network, ends) = (instance.name(), &proxy.facts.ends);
        if news.full {
            instance.reported = true;
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
            self.instances.values().any(|instance| instance.name() == *network && instance.reported)
        };
        if told.elapsed() < PATIENCE && !self.table.external_networks().iter().all(reported) {
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
                "traffic to Services of Networks is not led into their routers"
            ),
        }
    }

    /// Sets up the Networks that clients outside reach by this node, whether or not it has pods of them.
    fn keep_networks(&mut self) {
        if self.told.is_none() {
            return;
        }
        self.keeping.retain(|_, task| !task.is_finished());
        let world = self.world.borrow().clone();
        for network in self.table.external_networks() {
            let known = world.networks.contains_key(network.as_str());
            if known && !self.keeping.contains_key(&network) {
                let (core, name) = (self.core.clone(), network.to_string());
                let task = tokio::spawn(async move { core.keep_network(&name).await });
                self.keeping.insert(network, task);
            }
        }
    }

    /// The default Network's ranges: whose traffic comes back through this node's routers only if they
    /// masquerade it. One without subnets has this node's blocks.
    fn near(&self) -> Vec<IpNet> {
        let world = self.world.borrow();
        let default = world.networks.get(names::DEFAULT_NETWORK);
        let subnets = default.into_iter().flat_map(|network| &network.spec.subnets);
        let mut ranges: Vec<IpNet> = subnets.filter_map(|subnet| subnet.cidr.parse().ok()).collect();
        if ranges.is_empty() {
            let own = |block: &&Arc<AddressBlockSpec>| {
                block.network == names::DEFAULT_NETWORK && block.node == self.config.node
            };
            let blocks = world.blocks.values().filter(own);
            let blocks = blocks.flat_map(|block| [&block.ipv4, &block.ipv6]).flatten();
            ranges.extend(blocks.filter_map(|range| range.parse::<IpNet>().ok()));
        }
        ranges.sort_unstable();
        ranges
    }
}

/// What an instance is to be told: in a router apart from the node, every Service that clients outside reach
/// has a port.
fn prepared(
    internal: &mut BTreeMap<NetworkName, InternalPorts>,
    reserved: &[(Protocol, u16)],
    table: &Table,
    network: &NetworkName,
    event: Event,
) -> Vec<Event> {
    if *network == NetworkName::default() {
        return vec![event];
    }
    let ports = internal.entry(network.clone()).or_insert_with(|| InternalPorts::new(reserved.to_vec()));
    match event {
        Event::SetService(mut service) => {
            let evicted: Vec<ServiceName> = ports.prepare(&mut service);
            let mut events = vec![Event::SetService(service)];
            for mut again in evicted.iter().filter_map(|name| table.handed(name)) {
                // Who is given a port takes none away.
                let _ = ports.prepare(&mut again);
                events.push(Event::SetService(Box::new(again)));
            }
            events
        }
        Event::DeleteService(name) => {
            ports.forget(&name);
            vec![Event::DeleteService(name)]
        }
        other => vec![other],
    }
}

/// Whether a router's proxy runs where it should not: the router was made again, or has other addresses.
fn out_of_place(
    instance: &Instance,
    proxy: &Proxy,
    (node, routers): (&NetNs, &dyn Routers),
    (info, near): (&NodeInfo, &[IpNet]),
) -> Result<bool, Trouble> {
    let namespace = instance::namespace(instance.router.as_deref(), node)?;
    Ok(namespace.id() != proxy.namespace || Facts::of_router(routers, &namespace, info, near)? != proxy.facts)
}

/// Whether the node's own proxy should not run as it does: kube-proxy has come, or it may have other
/// addresses.
fn is_in_the_way(
    proxy: &Proxy,
    node: &NetNs,
    yields_to_others: Option<&dyn Backends>,
    takes_own: bool,
) -> Result<bool, Trouble> {
    if node.id() != proxy.namespace || proxy.facts.takes_own != takes_own {
        return Ok(true);
    }
    let Some(backends) = yields_to_others else { return Ok(false) };
    Ok(backends.others_at_work(Some(node.as_fd())).map_err(Trouble::Look)?.is_some())
}

/// Sends to one that runs. One that has stopped is started again at the next look, with everything.
fn send(instance: &mut Instance, event: Event) {
    let own = instance.router.is_none();
    let Some(proxy) = &instance.running else { return };
    let event = match event {
        Event::SetNode(node) => Event::SetNode(Box::new(proxy.facts.node(own, &node))),
        other => other,
    };
    if proxy.send(event).is_err() {
        let network = &instance.network.name;
        tracing::error!(network, "the service proxy stopped by itself; it is started again");
        instance.running = None;
    }
}

/// Ends a proxy; what it made stays.
async fn end(proxy: Option<Proxy>) {
    if let Some(proxy) = proxy {
        // Its thread may be busy in the kernel for a while. Whether it panicked is in the log.
        let _ = tokio::task::spawn_blocking(move || drop(proxy)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use knit_proxy::model::{Protocol, Service, ServicePort};

    use super::*;
    use crate::forbidden::Forbidden;

    #[test]
    fn a_service_that_lost_its_port_got_external_ips_that_are_a_nodes() {
        let [node, outside] = [[192, 0, 2, 1], [203, 0, 113, 1]].map(IpAddr::from);
        let blue = NetworkName::from("blue");
        let mut table = Table::default();
        table.set_open(BTreeSet::from([blue.clone()]));
        table.set_forbidden(Forbidden::new([], [node]));
        let mut internal = BTreeMap::new();
        let mut told = |service: Service| -> Vec<Service> {
            let event = Event::SetService(Box::new(service));
            let (_, event) = table.take(event, |_| Some(blue.clone())).expect("an event");
            let events = prepared(&mut internal, &[], &table, &blue, event);
            let services = events.into_iter().map(|event| match event {
                Event::SetService(service) => *service,
                other => panic!("{other:?}"),
            });
            services.collect()
        };
        let port = |number| ServicePort::new("web", Protocol::Tcp, 80).node_port(number);
        let mut one = Service::new("sky/one").add_port(port(0));
        one.external_ips = Box::new([node, outside]);
        let first = told(one);
        assert_eq!((first.len(), &*first[0].external_ips), (1, &[outside][..]));
        let given = first[0].ports[0].node_port.expect("a port");
        // Another one names that port.
        let both = told(Service::new("sky/two").add_port(port(given.get())));
        assert_eq!((both.len(), both[1].name.to_string()), (2, "sky/one".to_owned()));
        assert_ne!(both[1].ports[0].node_port, Some(given));
        assert_eq!(*both[1].external_ips, [outside], "the node's own address is not its");
    }
}
