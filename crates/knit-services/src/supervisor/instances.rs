//! The instances: each is started, given what it runs with, started again where it stopped or does not
//! belong, and ended.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::netns::NsId;
use knit_node::proxy::ServicesState;
use knit_proxy::backends::{Backends, Limits};
use knit_proxy::model::NodeInfo;
use knit_proxy::source::Event;
use knit_runtime::Network;
use knit_runtime::routers::Routers;
use knit_types::chain;
use knit_types::sync::Locked;

use super::Supervisor;
use super::feeding::send;
use crate::instance::{self, Answers, Instance, InstanceFacts, Proxy, StartError, Started};
use crate::services::{Command, Mode};
use crate::steerer::Steerer;

/// What serves a node in place of this agent.
const KUBE_PROXY: &str = "kube-proxy is active on this node, so the default Network's Services are \
left to it; use --services on to have this agent serve them";

impl Supervisor {
    pub(super) async fn command(&mut self, command: Command) {
        match command {
            Command::Start { id, router, network, state } => {
                let (instance, registry) = Instance::new(id, router, network, state);
                self.registries.locked().insert(id, registry);
                self.router_comes(&instance.name());
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
                self.registries.locked().remove(&id);
                if let Some(instance) = self.instances.remove(&id) {
                    let name = instance.name();
                    end(instance.running).await;
                    if self.instances.values().all(|other| other.name() != name) {
                        self.absent.remove(&name);
                        self.steering.forget_network(&name);
                        self.internal.remove(&name);
                        self.look_for_absent();
                    }
                }
            }
        }
    }

    pub(super) async fn update(&mut self, id: u64, network: Network) {
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
    pub(super) async fn start(&mut self, id: u64) {
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
            if yields && backends.others_at_work(at).map_err(StartError::Look)?.is_some() {
                backends.remove(at).map_err(StartError::GiveWay)?;
                return Ok(None);
            }
            let facts = match own {
                true => InstanceFacts::of_node(takes_own),
                false => InstanceFacts::of_router(&*routers, &namespace, &node, &near)?,
            };
            let running = setup.start((&*backends, &*routers), &namespace, &node, &facts)?;
            // Nothing is programmed before all objects have arrived: until then, what is there is in force.
            let left_over = backends.is_left_over(at).map_err(StartError::Look)?;
            Ok(Some(Started { running, namespace: namespace.id(), facts, left_over }))
        });
        let started: Result<Option<Started>, StartError> = match started.await {
            Ok(started) => started,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let Some(instance) = self.instances.get_mut(&id) else { return };
        match started {
            Ok(Some(started)) => {
                if started.left_over && *instance.state.borrow() == ServicesState::Waiting {
                    instance.set_state(ServicesState::Kept, &self.changed);
                }
                let answers = Answers {
                    node: Arc::clone(&self.node),
                    healthz: self.config.healthz,
                    metrics: self.config.metrics,
                    registries: Arc::clone(&self.registries),
                    mode: self.config.backends.name(),
                };
                instance.started(started, answers);
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
    pub(super) fn keep_limits(&mut self, id: u64) {
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

    /// Counts what somebody else had changed and is repaired.
    pub(super) fn counts_repairs(&self) -> Box<dyn Fn() + Send> {
        let core = self.core.clone();
        Box::new(move || core.metrics().repaired("services", 1))
    }

    /// Starts what does not run, and again what runs in a namespace that is gone or beside kube-proxy.
    pub(super) async fn look_after_all(&mut self) {
        let ids: Vec<u64> = self.instances.keys().copied().collect();
        let looked = self.look_at_all().await;
        for id in ids {
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            match looked.get(&id) {
                Some(Ok(false)) => continue,
                Some(Ok(true)) => end(instance.running.take()).await,
                Some(Err(trouble)) => {
                    let network = &instance.network.name;
                    tracing::warn!(
                        %network,
                        error = trouble as &dyn std::error::Error,
                        "cannot inspect a router"
                    );
                    continue;
                }
                // It does not run.
                None => {}
            }
            self.start(id).await;
        }
    }

    /// Whether what runs should not run where it does, or as it does. Limits of the connection table are kept
    /// where it should. All of that reads what the kernel has of each router, so it is not done on a thread
    /// that others wait for.
    async fn look_at_all(&mut self) -> BTreeMap<u64, Result<bool, StartError>> {
        let info = self.table.node().cloned().unwrap_or_else(|| NodeInfo::new(&self.config.node));
        let (near, takes_own) = (self.near(), self.takes_own());
        let yields = self.config.mode == Mode::Auto;
        let (node, routers) = (Arc::clone(&self.node), Arc::clone(&self.routers));
        let backends = Arc::clone(&self.config.backends);
        let looks = self.instances.iter_mut().filter_map(|(id, instance)| {
            let proxy = instance.running.as_ref()?;
            let (namespace, facts) = (proxy.namespace, proxy.facts.clone());
            let (router, limits) = (instance.router.clone(), instance.limits.take());
            Some((*id, Look { router, namespace, facts, limits }))
        });
        let looks: Vec<(u64, Look)> = looks.collect();
        let looked = tokio::task::spawn_blocking(move || {
            let look_at = |(id, mut look): (u64, Look)| {
                let mut limits = look.limits.take();
                let wrong = match look.router.is_some() {
                    true => look.is_out_of_place((&node, &*routers), (&info, &near)),
                    false => look.is_in_the_way(&node, yields.then_some(&*backends), takes_own),
                };
                let space = instance::namespace(look.router.as_deref(), &node).ok();
                let Some(space) = space.filter(|_| matches!(wrong, Ok(false))) else {
                    return (id, wrong, limits, 0);
                };
                let first = limits.is_none();
                limits = limits.or_else(|| backends.limits(look.router.is_some()));
                let written = limits.as_mut().map_or(0, |limits| limits.keep(Some(space.as_fd())));
                let written = if first { 0 } else { written };
                (id, wrong, limits, written)
            };
            looks.into_iter().map(look_at).collect::<Vec<_>>()
        });
        let looked = match looked.await {
            Ok(looked) => looked,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let mut found = BTreeMap::new();
        for (id, wrong, limits, written) in looked {
            if let Some(instance) = self.instances.get_mut(&id) {
                instance.limits = limits;
            }
            if written > 0 {
                self.core.metrics().repaired("sysctls", written as u64);
            }
            found.insert(id, wrong);
        }
        found
    }
}

/// What is known of a proxy that runs, to be compared with where it should run.
struct Look {
    /// Where its router is mounted; none for the node's own.
    router: Option<PathBuf>,
    /// Where it runs.
    namespace: NsId,
    /// What it was told about that.
    facts: InstanceFacts,
    /// What keeps the limits there, if it was looked at already.
    limits: Option<Box<dyn Limits>>,
}

impl Look {
    /// Whether a router's proxy runs where it should not: the router was made again, or has other addresses.
    fn is_out_of_place(
        &self,
        (node, routers): (&NetNs, &dyn Routers),
        (info, near): (&NodeInfo, &[IpNet]),
    ) -> Result<bool, StartError> {
        let namespace = instance::namespace(self.router.as_deref(), node)?;
        Ok(namespace.id() != self.namespace
            || InstanceFacts::of_router(routers, &namespace, info, near)? != self.facts)
    }

    /// Whether the node's own proxy should not run as it does: kube-proxy has come, or it may have other
    /// addresses.
    fn is_in_the_way(
        &self,
        node: &NetNs,
        yields_to_others: Option<&dyn Backends>,
        takes_own: bool,
    ) -> Result<bool, StartError> {
        if node.id() != self.namespace || self.facts.takes_own != takes_own {
            return Ok(true);
        }
        let Some(backends) = yields_to_others else { return Ok(false) };
        Ok(backends.others_at_work(Some(node.as_fd())).map_err(StartError::Look)?.is_some())
    }
}

/// Ends a proxy; what it made stays.
async fn end(proxy: Option<Proxy>) {
    if let Some(proxy) = proxy {
        // Its thread may be busy in the kernel for a while. Whether it panicked is in the log.
        let _ = tokio::task::spawn_blocking(move || drop(proxy)).await;
    }
}
