//! ResourceClaims: what the scheduler gave a claim is read, reserved before there is a sandbox, found again
//! when the pod that uses the claim starts, and freed when the claim is gone.
//!
//! A claim is a tenant's input. What it may have is decided where it is decided for annotations
//! (`pipeline/resolve/`), by the rights of its namespace.

mod device_files;
mod files;
mod of_pod;
mod source;
mod sweep;
mod told;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_api::names;
use knit_model::allocation::{Allocation, AllocationError, Allotted};
use knit_types::{NetworkName, ObjectRef, Owner, PodRef, SandboxId};
use tokio::time::Instant;

pub use device_files::DeviceFiles;
pub(crate) use files::network_data;
pub use of_pod::PodClaim;
pub(crate) use of_pod::Problem;
pub use source::ClaimSource;

use crate::error::{Error, Reason, Result};
use crate::pipeline::{Occasion, Pipeline};
use crate::request::{Asked, ClaimRequest, Wishes};
use crate::world::World;

/// How long one question to the API server may take: kubelet waits for 45 seconds, a sandbox for less.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// How many claims of other drivers are remembered, so that nobody is asked for them again.
const MAX_FOREIGN_CLAIMS: usize = 4096;

/// The name of a pod's main interface, as kubelet's container runtimes have it.
const MAIN: &str = "eth0";

/// Claims of this node's pods.
pub(crate) struct Claims {
    pipeline: Pipeline,
    source: Arc<dyn ClaimSource>,
    /// Where containers read what their claim has, if they do.
    files: Option<DeviceFiles>,
    /// The ledger was damaged: what was prepared may have been forgotten.
    doubtful: bool,
    /// Claims of other drivers, with the uid of the pod that uses them.
    foreign: Mutex<BTreeSet<(String, String, String)>>,
}

/// Who has what was reserved for a claim.
enum Holder {
    /// Nothing is reserved.
    Nobody,
    /// The claim; whether for a pod that it is for now.
    Claim {
        /// Whether it is.
        same_pod: bool,
    },
    /// The sandbox of a pod that the claim is for.
    Sandbox,
    /// That of a pod that had the claim before.
    Another(SandboxId, PodRef),
}

/// A device that a claim has, prepared.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Prepared {
    /// The request that it answers.
    pub request: String,
    /// Its pool.
    pub pool: String,
    /// The device's name.
    pub device: String,
    /// Which share of it.
    pub share: Option<String>,
    /// What the container runtime adds to containers that name it (CDI).
    pub cdi: Vec<String>,
}

// === impl Claims ===

impl Claims {
    pub(crate) fn new(
        pipeline: Pipeline,
        source: Arc<dyn ClaimSource>,
        files: Option<DeviceFiles>,
        doubtful: bool,
    ) -> Self {
        Self { pipeline, source, files, doubtful, foreign: Mutex::default() }
    }

    /// Reserves what the scheduler gave a claim: all of it, or nothing. The same again changes nothing.
    pub(crate) async fn prepare(
        &self,
        claim: &ObjectRef,
        occasion: &Occasion,
        deadline: Instant,
    ) -> Result<Vec<Prepared>> {
        let allocation = self.allocation(claim, deadline).await?.map_err(|error| {
            let reason = match &error {
                AllocationError::NotAllocated => Reason::NotReady,
                _ => Reason::Refused,
            };
            Error::new(reason, format!("claim {claim} cannot be prepared")).because(error)
        })?;
        self.prepare_allocated(&allocation, occasion, deadline).await?;
        let mut files = self.write_files(&allocation).await?;
        let prepared = |device: &Allotted| Prepared {
            request: device.request.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share: device.share.clone(),
            // With the first device of a request all containers that name it get its file.
            cdi: files.remove(&device.request).into_iter().collect(),
        };
        Ok(allocation.devices.iter().map(prepared).collect())
    }

    async fn prepare_allocated(
        &self,
        allocation: &Allocation,
        occasion: &Occasion,
        deadline: Instant,
    ) -> Result<()> {
        let claim = &allocation.claim;
        let reserved = match self.holder(allocation) {
            Holder::Sandbox => return Ok(()),
            Holder::Another(sandbox, pod) => {
                let message = format!(
                    "claim {claim} is in use by sandbox {sandbox} of pod {pod}, which used it before: it \
                     will be retried once that sandbox is gone"
                );
                return Err(Error::new(Reason::NotReady, message));
            }
            Holder::Claim { same_pod } => {
                if !same_pod {
                    self.check_pods(allocation, deadline).await?;
                }
                true
            }
            Holder::Nobody => {
                self.check_pods(allocation, deadline).await?;
                self.release_namesakes(claim).await;
                false
            }
        };
        let soon = deadline.min(Instant::now() + self.pipeline.config.cache_wait);
        let networks = self.pipeline.world.wait(soon, |world| asked(world, allocation)).await?;
        let pod = allocation.pods.first().cloned();
        let request = ClaimRequest { claim: claim.clone(), networks, pod };
        match self.pipeline.prepare_claim(&request, occasion, deadline).await {
            // What is reserved is of an earlier allocation, whose end nobody told us of.
            Err(error) if reserved && error.reason == Reason::Refused => {
                tracing::info!(%claim, "the claim was allocated again: releasing its previous reservations");
                self.pipeline.free_claim(claim).await?;
                self.pipeline.prepare_claim(&request, occasion, deadline).await?;
            }
            result => drop(result?),
        }
        Ok(())
    }

    /// Who has what was reserved for a claim.
    fn holder(&self, allocation: &Allocation) -> Holder {
        let owner = Owner::claim(allocation.claim.clone());
        let is_its = |pod: Option<&PodRef>| {
            let Some(uid) = pod.and_then(|pod| pod.uid.as_ref()) else { return true };
            allocation.pods.iter().any(|its| its.uid.as_ref().is_none_or(|its| its == uid))
        };
        let books = self.pipeline.sandboxes.books();
        if let Some(record) = books.lent_to(&owner).and_then(|sandbox| books.get(sandbox)) {
            return match record.pod().filter(|pod| !is_its(Some(pod))) {
                Some(pod) => Holder::Another(record.sandbox().clone(), pod.clone()),
                None => Holder::Sandbox,
            };
        }
        match books.reservation(&owner) {
            Some(reservation) => Holder::Claim { same_pod: is_its(reservation.pod()) },
            None => Holder::Nobody,
        }
    }

    /// The claim as it is now, and what it has.
    async fn allocation(
        &self,
        claim: &ObjectRef,
        deadline: Instant,
    ) -> Result<Result<Allocation, AllocationError>> {
        let found = self.get(&claim.namespace, &claim.name, deadline).await?;
        let not_it = |what: String| Error::new(Reason::NotReady, format!("claim {claim} {what}"));
        let Some(found) = found else {
            return Err(not_it("does not exist: it was deleted".into()));
        };
        let uid = found.metadata.uid.as_deref().unwrap_or_default();
        if uid != claim.uid {
            return Err(not_it(format!("now has uid {uid}, not {}: it was recreated", claim.uid)));
        }
        Ok(Allocation::of(&found))
    }

    async fn get(
        &self,
        namespace: &str,
        name: &str,
        deadline: Instant,
    ) -> Result<Option<k8s_openapi::api::resource::v1::ResourceClaim>> {
        let late = |_| {
            let message = format!(
                "claim {namespace}/{name} cannot be read: the Kubernetes API does not answer; it will be \
                 retried"
            );
            Error::new(Reason::NotReady, message)
        };
        let answer_by = deadline.min(Instant::now() + API_TIMEOUT);
        tokio::time::timeout_at(answer_by, self.source.get(namespace, name)).await.map_err(late)?
    }

    /// Whether the pods that a claim is for can have it. A pod on the node's own network would run without
    /// it, since nobody ever asks for its interfaces.
    async fn check_pods(&self, allocation: &Allocation, deadline: Instant) -> Result<()> {
        let claim = &allocation.claim;
        let pod = match &allocation.pods[..] {
            [pod] => pod,
            [] => {
                let message = format!("claim {claim} is not reserved for a pod; it will be retried");
                return Err(Error::new(Reason::NotReady, message));
            }
            pods => {
                let message = format!(
                    "claim {claim} is reserved for {} pods, but a claim of a Network is for one pod at a \
                     time: give each pod its own with a ResourceClaimTemplate",
                    pods.len()
                );
                return Err(Error::new(Reason::Refused, message));
            }
        };
        let soon = deadline.min(Instant::now() + self.pipeline.config.cache_wait);
        let host_network = self.pipeline.world.wait(soon, |world| on_the_nodes_network(world, pod)).await;
        let unknown = || {
            let message =
                format!("claim {claim}: pod {pod} is not known to the node agent yet; it will be retried");
            Error::new(Reason::NotReady, message)
        };
        if host_network.map_err(|()| unknown())? {
            let message = format!(
                "claim {claim}: pod {pod} uses its node's network (hostNetwork), and only a pod with its own \
                 network can have an additional one: leave the claim out"
            );
            return Err(Error::new(Reason::Refused, message));
        }
        Ok(())
    }

    /// Frees what an earlier claim of the same name left: names are unique, so it is gone.
    async fn release_namesakes(&self, claim: &ObjectRef) {
        let earlier: Vec<ObjectRef> = {
            let books = self.pipeline.sandboxes.books();
            let reserved = books.reservations().filter_map(|reservation| claim_of(reservation.owner()));
            let namesake = |other: &&ObjectRef| {
                other.namespace == claim.namespace && other.name == claim.name && other.uid != claim.uid
            };
            reserved.filter(namesake).cloned().collect()
        };
        for earlier in earlier {
            tracing::info!(claim = %earlier, uid = earlier.uid, "releasing what a deleted claim left behind");
            if let Err(error) = self.release(&earlier).await {
                tracing::warn!(
                    claim = %earlier,
                    "cannot release what a deleted claim left behind: {}",
                    error.chain()
                );
            }
        }
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claims").field("doubtful", &self.doubtful).finish_non_exhaustive()
    }
}

/// The claim that an owner is, if it is one.
fn claim_of(owner: &Owner) -> Option<&ObjectRef> {
    match owner {
        Owner::Claim(claim) => Some(claim),
        Owner::Sandbox(_) | Owner::Object(_) => None,
    }
}

/// Whether a pod uses its node's network, once it is known.
fn on_the_nodes_network(world: &World, pod: &PodRef) -> Result<bool, ()> {
    let known = world.pods.get(&(pod.namespace.clone(), pod.name.clone()));
    known.filter(|view| view.uid == pod.uid).map(|view| view.host_network).ok_or(())
}

/// What an allocation asks for, in the pipeline's words.
fn asked(world: &World, allocation: &Allocation) -> Result<Vec<Asked>> {
    let pod = allocation.pods.first();
    let view = pod.and_then(|pod| world.pods.get(&(pod.namespace.clone(), pod.name.clone())));
    let view = view.filter(|view| pod.is_some_and(|pod| view.uid == pod.uid));
    let by_annotation = match view.map(|view| &view.wishes) {
        Some(Wishes::Said(wish)) => &wish.further[..],
        // What is wrong is answered where the pod starts.
        Some(Wishes::Wrong(_) | Wishes::AsThePodSays) | None => &[],
    };
    let asked = |device| Ok(with_annotation(asked_for(world, &allocation.claim, device)?, by_annotation));
    allocation.devices.iter().map(asked).collect()
}

/// A claim that leaves the interface to the pod reserves what the pod asks for by annotation on the same
/// Network: both are one interface (`pipeline/resolve/lent.rs`).
fn with_annotation(asked: Asked, by_annotation: &[Asked]) -> Asked {
    let says_nothing = asked == Asked { network: asked.network.clone(), ..Asked::default() };
    match by_annotation.iter().find(|own| says_nothing && own.network == asked.network) {
        Some(own) => Asked { interface: None, ..own.clone() },
        None => asked,
    }
}

fn asked_for(world: &World, claim: &ObjectRef, device: &Allotted) -> Result<Asked> {
    let Allotted { request, pool, device, config, .. } = device;
    let refused = |problem: String| {
        Err(Error::new(Reason::Refused, format!("claim {claim}, request {request}: {problem}")))
    };
    if pool != names::NETWORK_POOL {
        return refused(format!("device {device} belongs to pool {pool}, which this agent does not serve"));
    }
    let Some(network) = network_of(world, device) else {
        let message = format!("claim {claim}, request {request}: there is no Network for device {device}");
        return Err(Error::new(Reason::NotReady, message));
    };
    if let Some(meant) = config.network.as_ref().filter(|meant| *meant != network) {
        return refused(format!(
            "its parameters are for Network {meant}, but the scheduler gave it {network}: select the device \
             with device.attributes[\"multinetwork.networking.k8s.io\"].podNetwork == \"{meant}\""
        ));
    }
    if config.interface.as_ref().is_some_and(|name| name.as_str() == MAIN) {
        return refused(format!("{MAIN} is the pod's main interface: use another name"));
    }
    Ok(Asked {
        network: network.clone(),
        interface: config.interface.clone(),
        addresses: config.addresses.clone(),
        mac: config.mac,
        default_route: config.default_route.unwrap_or_default(),
    })
}

/// The Network that a device stands for.
fn network_of<'w>(world: &'w World, device: &str) -> Option<&'w NetworkName> {
    // Most are named like their device.
    if let Some((name, _)) = world.networks.get_key_value(device) {
        return Some(name);
    }
    world.networks.keys().find(|name| names::device_of(name) == device)
}
