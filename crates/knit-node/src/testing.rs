//! A network runtime in memory, and a life that ends where it is told to: for tests of everything around a
//! runtime.

mod kernel;
mod life;

use std::future::pending;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt as _;
use ipnet::IpNet;
use knit_runtime::routers::{Routers, Steering};
use knit_runtime::{
    AttachRequest, Attachment, Change, Changes, Damage, Disturbance, Error, HostEnd, IfName, Info,
    InterfaceName, Network, NetworkName, NetworkStatus, NetworkUsage, Pod, Protocol, Reason, Result, Runtime,
    SandboxId, Status, Survey, feature,
};
use knit_types::sync::Locked;
use tokio::sync::mpsc;

use crate::netns;

pub use kernel::{FakeKernel, Faults};
pub use life::{Life, MortalStore};

/// The runtime.
#[derive(Clone, Debug)]
pub struct FakeRuntime {
    name: String,
    features: Vec<&'static str>,
    routers: bool,
    kernel: FakeKernel,
    life: Life,
}

// === impl FakeRuntime ===

impl FakeRuntime {
    /// A runtime over a kernel.
    #[must_use]
    pub fn new(name: &str, kernel: &FakeKernel, life: &Life) -> Self {
        let features = vec![
            feature::NETWORK_SETUP,
            feature::LAYER2,
            feature::LAYER3,
            feature::IPV4,
            feature::IPV6,
            feature::STATIC_ADDRESS,
            feature::STATIC_MAC,
            feature::MTU,
            feature::ROUTES,
            feature::HOST_PORTS,
            feature::COLLECT_GARBAGE,
        ];
        Self { name: name.to_owned(), features, routers: false, kernel: kernel.clone(), life: life.clone() }
    }

    /// The same one, with routers that Services could be served in.
    #[must_use]
    pub fn with_routers(self) -> Self {
        Self { routers: true, ..self }
    }

    /// The same one, without some features.
    #[must_use]
    pub fn without(mut self, features: &[&str]) -> Self {
        self.features.retain(|f| !features.contains(f));
        self
    }

    /// The same one, with more features.
    #[must_use]
    pub fn with(mut self, features: &[&'static str]) -> Self {
        self.features.extend(features);
        self
    }

    /// Never ends while calls about Networks are to hang.
    async fn hang_about_networks(&self) {
        if self.kernel.state().faults.hang_networks {
            pending::<()>().await;
        }
    }

    fn make(&self, request: &AttachRequest) -> Result<Attachment> {
        let key = (request.pod.sandbox.clone(), request.interface.clone());
        let mut state = self.kernel.state();
        let Some(network) = state.networks.get(&request.network).cloned() else {
            return Err(Error::new(Reason::NetworkNotFound, "not set up").on(&request.network));
        };
        let Some(namespace) = netns::identify(&request.netns).ok().flatten() else {
            return Err(Error::new(Reason::NamespaceGone, "no namespace there"));
        };
        let number = state.attaches;
        state.attaches += 1;
        if let Some((at, reason)) = state.faults.attach
            && at == number
        {
            // What fails leaves nothing behind.
            state.halves.remove(&key);
            return Err(Error::new(reason, "told to fail").on(&request.network));
        }
        let clash = state.attachments.iter().find(|(k, a)| {
            **k != key
                && a.network == request.network
                && a.addresses.iter().any(|a| request.addresses.iter().any(|b| a.net.addr() == b.net.addr()))
        });
        if let Some(((sandbox, _), _)) = clash {
            return Err(Error::new(Reason::Conflict, format!("sandbox {sandbox} has that address")));
        }
        let attachment = Attachment {
            pod: request.pod.clone(),
            network: request.network.clone(),
            interface: request.interface.clone(),
            addresses: if state.faults.forget_addresses { Vec::new() } else { request.addresses.clone() },
            mac: request.mac.unwrap_or(knit_ipam::Mac([2, 0, 0, 0, 0, 1])),
            mtu: network.mtu.map_or(1500, u32::from),
            routes: request.routes.clone(),
            dns: request.dns.clone(),
            host: HostEnd { name: format!("host{number}"), index: 7, netns_path: None, netns_inode: 1 },
            pod_netns_inode: namespace.inode + u64::from(state.faults.other_namespace),
            ports: request.ports.clone(),
        };
        state.halves.remove(&key);
        state.broken.remove(&key);
        state.attachments.insert(key, attachment.clone());
        Ok(attachment)
    }
}

/// Routers in which nothing is: enough for a service proxy that is none.
#[derive(Debug)]
struct FakeRouters;

impl Routers for FakeRouters {
    fn uplink(&self, _: BorrowedFd<'_>) -> Result<Vec<IpAddr>> {
        Ok(Vec::new())
    }

    fn uplink_ranges(&self) -> Vec<IpNet> {
        Vec::new()
    }

    fn uplink_in_router(&self) -> IfName {
        IfName::new("uplink").expect("a name")
    }

    fn uplink_prefix(&self) -> String {
        "uplink".to_owned()
    }

    fn reserved_ports(&self) -> Vec<(Protocol, u16)> {
        Vec::new()
    }

    fn steering(&self) -> Result<Box<dyn Steering>> {
        Err(Error::new(Reason::Unsupported, "nothing leads into a fake router"))
    }
}

#[async_trait]
impl Runtime for FakeRuntime {
    fn routers(&self) -> Option<Arc<dyn Routers>> {
        self.routers.then(|| Arc::new(FakeRouters) as Arc<dyn Routers>)
    }

    async fn info(&self) -> Result<Info> {
        let features = self.features.iter().map(|f| (*f).to_owned()).collect();
        Ok(Info { name: self.name.clone(), version: "test".into(), features })
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        self.life.live().await;
        self.hang_about_networks().await;
        let mut state = self.kernel.state();
        if let Some(reason) = state.faults.set_up {
            return Err(Error::new(reason, "told to fail").on(&network.name));
        }
        if state.faults.set_ups > 0 {
            state.faults.set_ups -= 1;
            return Err(Error::new(Reason::Internal, "told to fail").on(&network.name));
        }
        state.set_ups += 1;
        state.damaged.iter_mut().for_each(|damaged| _ = damaged.remove(&network.name));
        state.networks.insert(network.name.clone(), network.clone());
        Ok(())
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        self.hang_about_networks().await;
        let mut state = self.kernel.state();
        if state.faults.removals > 0 {
            state.faults.removals -= 1;
            return Err(Error::new(Reason::Internal, "told to fail").on(name));
        }
        if state.attachments.values().any(|a| a.network == name) {
            return Err(Error::new(Reason::InUse, "in use").on(name));
        }
        state.networks.remove(name);
        Ok(())
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        self.life.live().await;
        self.kernel.state().begun += 1;
        let hang = self.kernel.state().faults.hang_on.as_deref() == Some(request.interface.as_str());
        let key = (request.pod.sandbox.clone(), request.interface.clone());
        let fresh = !self.kernel.state().attachments.contains_key(&key);
        if fresh {
            self.kernel.state().halves.insert(key);
        }
        self.life.live().await;
        if hang {
            pending::<()>().await;
        }
        let held = self.kernel.state().faults.hold_on.as_deref() == Some(request.interface.as_str());
        if held {
            tokio::task::block_in_place(|| {
                let (released, told) = &*self.kernel.released;
                drop(told.wait_while(released.locked(), |released| !*released));
            });
        }
        let slow = self.kernel.state().faults.slow_on.clone();
        if let Some((_, duration)) = slow.filter(|(interface, _)| interface == request.interface.as_str()) {
            tokio::time::sleep(duration).await;
        }
        let made = self.make(request);
        self.life.live().await;
        made
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        self.life.live().await;
        if self.kernel.state().faults.hang_detaches {
            pending::<()>().await;
        }
        {
            let mut state = self.kernel.state();
            if state.faults.detaches > 0 {
                state.faults.detaches -= 1;
                return Err(Error::new(Reason::Internal, "told to fail"));
            }
            let stays = |(s, i): &(SandboxId, InterfaceName)| {
                *s != pod.sandbox || interface.is_some_and(|interface| interface != i)
            };
            let gone: Vec<_> = state.attachments.extract_if(.., |key, _| !stays(key)).collect();
            state.halves.retain(stays);
            drop(state);
            for (_, attachment) in gone {
                self.kernel.tell(&Change::Removed(attachment));
            }
        }
        self.life.live().await;
        Ok(())
    }

    async fn check(&self, pod: &Pod, _netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        let state = self.kernel.state();
        let mut own =
            state.attachments.keys().filter(|(s, i)| *s == pod.sandbox && interface.is_none_or(|n| n == i));
        match own.next() {
            Some(_) => Ok(()),
            None => Err(Error::new(Reason::Damaged, "the interface is gone")),
        }
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        self.life.live().await;
        let all = self.kernel.attachments();
        Ok(all.into_iter().filter(|a| sandbox.is_none_or(|s| *s == a.pod.sandbox)).collect())
    }

    async fn watch(&self) -> Result<Changes> {
        let (sender, receiver) = mpsc::unbounded_channel();
        for attachment in self.kernel.attachments() {
            // Nobody has closed the other end.
            let _ = sender.send(Change::Added(attachment));
        }
        let _ = sender.send(Change::Synced);
        self.kernel.watchers.locked().push(sender);
        let next = |mut receiver: mpsc::UnboundedReceiver<Change>| async move {
            receiver.recv().await.map(|change| (Ok(change), receiver))
        };
        Ok(futures::stream::unfold(receiver, next).boxed())
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        self.life.live().await;
        if self.kernel.state().faults.hang_garbage {
            pending::<()>().await;
        }
        let mut state = self.kernel.state();
        state.garbage_calls += 1;
        let removed: Vec<Attachment> =
            state.attachments.values().filter(|a| !keep.contains(&a.pod.sandbox)).cloned().collect();
        state.attachments.retain(|(s, _), _| keep.contains(s));
        state.halves.retain(|(s, _)| keep.contains(s));
        Ok(removed)
    }

    async fn status(&self) -> Result<Status> {
        if self.kernel.state().faults.hang_status {
            pending::<()>().await;
        }
        let state = self.kernel.state();
        let network = |name: &NetworkName| {
            let unwell = state.faults.network_unwell.as_ref().filter(|(unwell, _)| unwell == name);
            let message = unwell.map(|(_, why)| why.clone()).unwrap_or_default();
            NetworkStatus { name: name.clone(), ready: unwell.is_none(), message, attachments: 0 }
        };
        Ok(Status {
            ready: state.faults.unwell.is_none(),
            message: state.faults.unwell.clone().unwrap_or_default(),
            networks: state.networks.keys().filter(|_| !state.faults.unlisted).map(network).collect(),
        })
    }

    async fn survey(&self) -> Result<Survey> {
        self.hang_about_networks().await;
        let mut state = self.kernel.state();
        let Some(damaged) = state.damaged.clone() else {
            return Err(Error::new(Reason::Unsupported, "nobody compares"));
        };
        if state.faults.surveys > 0 {
            state.faults.surveys -= 1;
            return Err(Error::new(Reason::Internal, "told to fail"));
        }
        let damage = |name| (name, vec![Damage { kind: "rules", message: "damaged".into() }]);
        let attachments = state.broken.clone();
        Ok(Survey { networks: damaged.into_iter().map(damage).collect(), attachments, ..Survey::default() })
    }

    async fn usage(&self) -> Result<Vec<NetworkUsage>> {
        Ok(self.kernel.state().usage.values().cloned().collect())
    }

    async fn disturbed(&self) -> Disturbance {
        self.kernel.disturbed.notified().await;
        Disturbance::Rules
    }
}
