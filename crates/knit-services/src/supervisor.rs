//! The task that feeds all instances, and starts again those that stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use knit_kernel::NetNs;
use knit_node::Core;
use knit_node::proxy::ServicesState;
use knit_node::resolve::primary_network;
use knit_node::world::World;
use knit_objects::Objects;
use knit_proxy::model::{NetworkName, NodeInfo};
use knit_proxy::objects::{Feed, Source};
use knit_proxy::source::Event;
use knit_runtime::Network;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::instance::{self, Changed, Instance, Proxy, Trouble};
use crate::kube_proxy;
use crate::services::{Command, Config, Mode};
use crate::table::{Table, To};

/// How often what failed is tried again, and kube-proxy is looked for.
const LOOK: Duration = Duration::from_secs(5);

/// What serves a node in place of this agent.
const KUBE_PROXY: &str = "kube-proxy is at work on this node, so the default Network's Services are left to it; \
                          --services on has this agent serve them";

pub(crate) struct Supervisor {
    config: Config,
    feed: Feed,
    table: Table,
    world: watch::Receiver<Arc<World>>,
    /// All objects have arrived, and instances were told so.
    told: bool,
    instances: BTreeMap<u64, Instance>,
    changed: Changed,
}

impl Supervisor {
    pub(crate) fn new(config: Config, core: Core, objects: &Objects) -> knit_objects::Result<Self> {
        let feed = Source::new(NodeInfo::new(&config.node)).open(objects)?;
        let world = core.world().subscribe();
        let changed: Changed = Arc::new(move || core.networks_changed());
        let (table, instances) = (Table::default(), BTreeMap::new());
        Ok(Self { config, feed, table, world, told: false, instances, changed })
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
                    Some(events) => events.into_iter().for_each(|event| self.event(event)),
                    None => return,
                },
                change = world.changed() => match change {
                    Ok(()) => self.look_at_world(&mut seen, &world.borrow_and_update().clone()),
                    Err(_) => return,
                },
                _ = look.tick() => self.look_after_all().await,
            }
            self.tell_if_complete();
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Start { id, router, network, state } => {
                self.instances.insert(id, Instance { router, network, state, running: None });
                self.start(id).await;
            }
            Command::Update { id, network } => self.update(id, network).await,
            Command::Stop { id } => {
                if let Some(instance) = self.instances.remove(&id) {
                    end(instance.running).await;
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
        let (node, options) = (instance.node(&node), instance.options(&self.changed));
        let (router, given) = (instance.router.clone(), self.config.namespace.try_clone());
        let yields = own && self.config.mode == Mode::Auto;
        let started = tokio::task::spawn_blocking(move || {
            let given = given.map_err(Trouble::Namespace)?;
            let namespace = instance::namespace(router.as_deref(), &given)?;
            if yields && kube_proxy::is_there(&namespace)? {
                kube_proxy::give_way(&namespace, &options.nft.table)?;
                return Ok(None);
            }
            Proxy::start(&namespace, node, options).map(Some)
        });
        let started = match started.await {
            Ok(started) => started,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let Some(instance) = self.instances.get_mut(&id) else { return };
        match started {
            Ok(Some(proxy)) => {
                instance.running = Some(proxy);
                if self.told {
                    replay(instance, &self.table);
                }
            }
            Ok(None) => instance.set_state(ServicesState::Off(KUBE_PROXY.to_owned()), &self.changed),
            Err(trouble) => instance.set_state(ServicesState::Broken(chain(&trouble)), &self.changed),
        }
    }

    /// Starts what does not run, and anew what runs in a namespace that is gone or beside kube-proxy.
    async fn look_after_all(&mut self) {
        let ids: Vec<u64> = self.instances.keys().copied().collect();
        for id in ids {
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            if let Some(proxy) = &instance.running {
                let yields = instance.router.is_none() && self.config.mode == Mode::Auto;
                match out_of_place(instance, proxy, &self.config.namespace, yields) {
                    Ok(false) => continue,
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
        let world = self.world.borrow().clone();
        let Some((to, event)) = self.table.take(event, |namespace| network_of(&world, namespace)) else {
            return;
        };
        // Before everything has arrived, it is only kept.
        if self.told {
            match to {
                To::One(network) => self.send_to(&network, event),
                To::All => self.instances.values_mut().for_each(|instance| send(instance, event.clone())),
            }
        }
    }

    fn look_at_world(&mut self, seen: &mut Option<Arc<World>>, world: &Arc<World>) {
        let same = seen.as_ref().is_some_and(|seen| {
            Arc::ptr_eq(&seen.networks, &world.networks) && Arc::ptr_eq(&seen.namespaces, &world.namespaces)
        });
        *seen = Some(Arc::clone(world));
        if same {
            return;
        }
        let moved = self.table.reassign(|namespace| network_of(world, namespace));
        if self.told {
            moved.into_iter().for_each(|(network, event)| self.send_to(&network, event));
        }
    }

    fn send_to(&mut self, network: &NetworkName, event: Event) {
        let mut of_network = self.instances.values_mut().filter(|i| i.name() == *network).peekable();
        while let Some(instance) = of_network.next() {
            if of_network.peek().is_none() {
                return send(instance, event);
            }
            send(instance, event.clone());
        }
    }

    /// Nothing is programmed before all that there is has arrived, and it is known where it belongs.
    fn tell_if_complete(&mut self) {
        if !self.told && self.table.listed() && self.world.borrow().is_synced() {
            let world = self.world.borrow().clone();
            // Nobody was told anything yet.
            let _ = self.table.reassign(|namespace| network_of(&world, namespace));
            self.told = true;
            self.instances.values_mut().for_each(|instance| replay(instance, &self.table));
        }
    }
}

fn network_of(world: &World, namespace: &str) -> Option<NetworkName> {
    primary_network(world, namespace).map(|name| NetworkName::from(name.as_str()))
}

/// Whether a proxy runs where it should not: its router was made anew, or kube-proxy has come.
fn out_of_place(instance: &Instance, proxy: &Proxy, node: &NetNs, yields: bool) -> Result<bool, Trouble> {
    let namespace = instance::namespace(instance.router.as_deref(), node)?;
    Ok(namespace.id() != proxy.namespace || (yields && kube_proxy::is_there(&namespace)?))
}

/// Tells an instance everything.
fn replay(instance: &mut Instance, table: &Table) {
    let node = table.node().map(|node| Event::SetNode(Box::new(instance.node(node))));
    let name = instance.name();
    for event in node.into_iter().chain(table.replay(&name)) {
        if !send_as_is(instance, event) {
            return;
        }
    }
    if let Some(proxy) = &instance.running
        && proxy.all_listed().is_err()
    {
        instance.running = None;
    }
}

fn send(instance: &mut Instance, event: Event) {
    let event = match event {
        Event::SetNode(node) => Event::SetNode(Box::new(instance.node(&node))),
        other => other,
    };
    send_as_is(instance, event);
}

/// Sends to one that runs. One that has stopped is started again at the next look, with everything.
fn send_as_is(instance: &mut Instance, event: Event) -> bool {
    let Some(proxy) = &instance.running else { return false };
    if proxy.send(event).is_ok() {
        return true;
    }
    tracing::error!(network = %instance.network.name, "the service proxy stopped by itself; it is started again");
    instance.running = None;
    false
}

/// Ends a proxy; what it made stays.
async fn end(proxy: Option<Proxy>) {
    if let Some(proxy) = proxy {
        // Its thread may be busy in the kernel for a while. Whether it panicked is in the log.
        let _ = tokio::task::spawn_blocking(move || drop(proxy)).await;
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
