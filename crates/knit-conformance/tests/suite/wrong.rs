//! A runtime that is right but for one thing.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use async_trait::async_trait;
use knit_ipam::Mac;
use knit_kernel::addr::Address as KernelAddress;
use knit_kernel::link::Change;
use knit_kernel::{Handle, IfName, NetNs};
use knit_runtime::{
    Address, AttachRequest, Attachment, Dns, Error, Info, InterfaceName, Network, NetworkName, Pod, Reason,
    Result, Runtime, SandboxId, Status,
};
use knit_types::sync::Locked;
use tokio::sync::Barrier;

use crate::bridge::BridgeRuntime;

/// What is wrong.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Defect {
    Nameless,
    NeverReady,
    LinkDown,
    NotIdempotent,
    NoConflict,
    AllInternal,
    HalfStays,
    OneAtATime,
    DetachLies,
    DetachTakesAll,
    DetachNotFound,
    ListsAll,
    BlindCheck,
    CheckKnowsAll,
    GarbageStays,
    GarbageTakesAll,
    RemovesInUse,
    OtherMac,
    OtherMtu,
    NoRoutes,
    Boasts,
    NoDefaultRoute,
    AlwaysDefaultRoute,
    NoDns,
    AddressesOfItsOwn,
    OneAddressMore,
    OtherHostEnd,
    PodsForgotten,
    NeverCounts,
    BlindToDown,
    BlindToOtherNamespace,
    NetworkStays,
}

pub struct Wrong {
    inner: BridgeRuntime,
    defect: Defect,
    just_failed: AtomicBool,
    busy: AtomicUsize,
    meeting: Barrier,
    /// What was not let go.
    kept: Mutex<Vec<NetNs>>,
}

impl Wrong {
    pub fn new(inner: BridgeRuntime, defect: Defect) -> Self {
        Self {
            inner,
            defect,
            just_failed: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            meeting: Barrier::new(2),
            kept: Mutex::default(),
        }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    /// What an error becomes on its way out.
    fn out<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|mut error| {
            if self.is(Defect::AllInternal) {
                error.reason = Reason::Internal;
            }
            error
        })
    }

    fn kept(&self) -> MutexGuard<'_, Vec<NetNs>> {
        self.kept.locked()
    }

    /// What is told of an attachment.
    fn told(&self, mut attachment: Attachment) -> Attachment {
        match self.defect {
            Defect::OtherHostEnd => attachment.host.index += 1000,
            Defect::PodsForgotten => {
                let sandbox = attachment.pod.sandbox;
                attachment.pod = Pod { sandbox, namespace: None, name: None, uid: None };
            }
            Defect::NetworkStays => {
                // Where it is kept, it can be seen.
                let inode = attachment.host.netns_inode;
                if let Some(kept) = self.kept().iter().find(|space| space.id().ino == inode) {
                    let fd = kept.as_fd().as_raw_fd();
                    let path = format!("/proc/{}/fd/{fd}", std::process::id());
                    attachment.host.netns_path = Some(path.into());
                }
            }
            _ => {}
        }
        attachment
    }

    async fn listed(&self, pod: &Pod, interface: &InterfaceName) -> Result<Option<Attachment>> {
        let all = self.inner.list(Some(&pod.sandbox)).await?;
        Ok(all.into_iter().find(|a| a.interface == *interface))
    }
}

#[async_trait]
impl Runtime for Wrong {
    async fn info(&self) -> Result<Info> {
        let mut info = self.inner.info().await?;
        match self.defect {
            Defect::Nameless => info.name = "bridge".into(),
            Defect::Boasts => info.features.extend(["Watch".into(), "Update".into()]),
            _ => {}
        }
        Ok(info)
    }

    async fn setup_network(&self, network: &Network) -> Result<()> {
        let mut network = network.clone();
        if self.is(Defect::OtherMtu) {
            network.mtu = Some(1400);
        }
        self.inner.setup_network(&network).await
    }

    async fn remove_network(&self, name: &NetworkName) -> Result<()> {
        let result = self.inner.remove_network(name).await;
        if self.is(Defect::RemovesInUse) { Ok(()) } else { self.out(result) }
    }

    async fn attach(&self, request: &AttachRequest) -> Result<Attachment> {
        let before = self.listed(&request.pod, &request.interface).await?;
        if let (Some(_), Defect::NotIdempotent) = (&before, self.defect) {
            return Err(Error::new(Reason::Conflict, "it is there already"));
        }
        if let (Some(before), Defect::NoConflict) = (&before, self.defect) {
            return Ok(before.clone());
        }
        if self.is(Defect::OneAtATime) {
            if self.busy.fetch_add(1, Ordering::SeqCst) > 0 {
                self.meeting.wait().await;
                return Err(Error::new(Reason::NotReady, "another pod is being attached"));
            }
            // Alone for a moment; whoever comes in meanwhile is turned away.
            let _ = tokio::time::timeout(std::time::Duration::from_millis(200), self.meeting.wait()).await;
        }
        let mut request = request.clone();
        match self.defect {
            Defect::OtherMac if request.mac.is_some() => request.mac = Some(Mac([2, 0, 0, 0, 0, 9])),
            Defect::NoRoutes => request.routes.clear(),
            _ => {}
        }
        match self.defect {
            Defect::NoDefaultRoute => request.default_route = false,
            Defect::AlwaysDefaultRoute if request.interface.as_str() == "eth0" => {
                request.default_route = true;
            }
            Defect::NoDns => request.dns = Dns::default(),
            Defect::AddressesOfItsOwn if request.addresses.is_empty() => {
                let net = "198.18.5.250/23".parse().expect("an address");
                request.addresses = vec![Address { net, gateway: None }];
            }
            _ => {}
        }
        let mut result = self.inner.attach(&request).await;
        if let (Ok(made), Defect::NetworkStays) = (&result, self.defect) {
            let path = made.host.netns_path.as_ref().expect("a path");
            self.kept().push(NetNs::open(path).expect("the Network's namespace"));
        }
        if let (Ok(_), Defect::OneAddressMore) = (&result, self.defect) {
            let space = NetNs::open(&request.netns).expect("the pod");
            let handle = Handle::open(&space).expect("a handle");
            let name = IfName::new(request.interface.as_str()).expect("a name");
            let index = handle.index_of(&name).expect("the interface");
            let more = KernelAddress::new(index, "203.0.113.9/32".parse().expect("an address"));
            handle.ensure(more).expect("one more");
        }
        if let Ok(made) = &mut result {
            *made = self.told(made.clone());
        }
        self.busy.store(0, Ordering::SeqCst);
        self.just_failed.store(result.is_err(), Ordering::SeqCst);
        if self.is(Defect::LinkDown) && result.is_ok() {
            let space = NetNs::open(&request.netns).expect("the pod");
            let handle = Handle::open(&space).expect("a handle");
            let name = IfName::new(request.interface.as_str()).expect("a name");
            handle.apply(&[Change::named(name).down().into()]).expect("down");
        }
        self.out(result)
    }

    async fn detach(&self, pod: &Pod, interface: Option<&InterfaceName>) -> Result<()> {
        let known = !self.inner.list(Some(&pod.sandbox)).await?.is_empty();
        match self.defect {
            // An agent that takes back what the first half of a call made is not listened to.
            Defect::HalfStays if self.just_failed.swap(false, Ordering::SeqCst) => return Ok(()),
            Defect::DetachLies if interface.is_some() => return Ok(()),
            Defect::DetachNotFound if !known && interface.is_some() => {
                return Err(Error::new(Reason::AttachmentNotFound, "it is not there"));
            }
            _ => {}
        }
        let interface = if self.is(Defect::DetachTakesAll) { None } else { interface };
        self.inner.detach(pod, interface).await
    }

    async fn check(&self, pod: &Pod, netns: Option<&Path>, interface: Option<&InterfaceName>) -> Result<()> {
        match self.inner.check(pod, netns, interface).await {
            Err(error)
                if error.reason == Reason::Damaged
                    && self.is(Defect::BlindToDown)
                    && netns.zip(interface).is_some_and(|(path, name)| is_there(path, name)) =>
            {
                Ok(())
            }
            Err(error) if error.reason == Reason::NamespaceGone && self.is(Defect::BlindToOtherNamespace) => {
                Ok(())
            }
            Err(error) if error.reason == Reason::Damaged && self.is(Defect::BlindCheck) => Ok(()),
            // With its link down nothing can be whole; that is not this defect's business.
            Err(error) if error.reason == Reason::AttachmentNotFound && self.is(Defect::CheckKnowsAll) => {
                Ok(())
            }
            other => self.out(other),
        }
    }

    async fn list(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Attachment>> {
        // Two that are there are needed to see it.
        let all = self.inner.list(None).await?;
        if self.is(Defect::ListsAll) && all.len() > 1 && all.iter().any(|a| Some(&a.pod.sandbox) == sandbox) {
            let pods: std::collections::BTreeSet<_> = all.iter().map(|a| a.pod.sandbox.clone()).collect();
            if pods.len() == 2 {
                return Ok(all);
            }
        }
        Ok(self.inner.list(sandbox).await?.into_iter().map(|a| self.told(a)).collect())
    }

    async fn collect_garbage(&self, keep: &[SandboxId]) -> Result<Vec<Attachment>> {
        let removed = match self.defect {
            Defect::GarbageStays => Vec::new(),
            Defect::GarbageTakesAll => self.inner.collect_garbage(&[]).await?,
            _ => self.inner.collect_garbage(keep).await?,
        };
        Ok(removed.into_iter().map(|a| self.told(a)).collect())
    }

    async fn status(&self) -> Result<Status> {
        let mut status = self.inner.status().await?;
        status.ready &= !self.is(Defect::NeverReady);
        if self.is(Defect::NeverCounts) {
            status.networks.iter_mut().for_each(|n| n.attachments = 0);
        }
        Ok(status)
    }
}

/// Whether a pod has an interface of that name, up or down.
fn is_there(pod: &Path, interface: &InterfaceName) -> bool {
    let name = IfName::new(interface.as_str()).expect("a name");
    let space = NetNs::open(pod).expect("the pod");
    Handle::open(&space).expect("a handle").link_by_name(&name).expect("an answer").is_some()
}
