//! Claims: what a pod is to get is resolved, reserved and recorded before there is a sandbox. The sandbox
//! gets it when it comes ([`crate::PodRequest::claims`]), gives it back when it ends, and it is free when the
//! claim is released.

use std::collections::BTreeSet;

use knit_ledger::{Reservation, SandboxRecord};
use knit_types::{ObjectRef, Owner};
use tokio::time::Instant;

use super::Pipeline;
use super::prepare::Resolved;
use super::reserve::ForClaim;
use super::resolve::{Missing, resolve_claim};
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::networks::Patience;
use crate::request::{ClaimRequest, PodRequest, pod_name};
use crate::sandboxes::{Began, unreadable};
use crate::world::World;

impl Pipeline {
    /// Reserves what a claim asks for: all of it, or nothing. The same request again changes nothing; nothing
    /// is given while a sandbox has it, or to a request that began before the claim was released.
    pub(crate) async fn prepare_claim(
        &self,
        request: &ClaimRequest,
        began: Began,
        deadline: Instant,
    ) -> Result<Option<Reservation>> {
        let owner = Owner::claim(request.claim.clone());
        let lock = self.sandboxes.locks().lock(owner.clone());
        let _guard = tokio::time::timeout_at(deadline, lock).await.map_err(|_| {
            let message = format!("{owner}: an earlier request for it is still running: try again");
            Error::new(Reason::NotReady, message)
        })?;
        if self.sandboxes.releases().may_have(&request.claim.uid, began) {
            let message = format!("{owner} was released while it was being prepared: prepare it again");
            return Err(Error::new(Reason::NotReady, message));
        }
        {
            let mut books = self.sandboxes.books();
            if let Some(record) = books.unreadable_reservation(&owner) {
                return Err(unreadable::error_of_claim(&owner, record));
            }
            // First: a sandbox that is being removed may have given back a part.
            if books.lent_to(&owner).is_some() {
                return Ok(None);
            }
            if let Some(reservation) = books.reservation(&owner) {
                let reservation = same(reservation, request)?;
                if request.pod.is_none() || reservation.pod() == request.pod.as_ref() {
                    return Ok(Some(reservation));
                }
                return books.reserve_for(reservation, request.pod.clone()).map(Some);
            }
        }
        let look = |world: &World| match resolve_claim(world, request, self.config.main_interfaces) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        };
        let soon = deadline.min(Instant::now() + self.config.cache_wait);
        let wanted = self.world.wait(soon, look).await??;
        self.check_node(&wanted, &owner.to_string())?;
        let patience = Patience::Until(deadline.min(Instant::now() + self.config.block_wait));
        let networks: BTreeSet<&str> = wanted.iter().map(|w| w.network.as_str()).collect();
        let ready = networks.iter().map(|network| self.networks.ensure(network, patience));
        for result in futures::future::join_all(ready).await {
            result.map_err(|error| Error { message: format!("{owner}: {}", error.message), ..error })?;
        }
        wanted.iter().try_for_each(|wanted| self.runtimes.can_have(wanted))?;
        let target = ForClaim { claim: request.claim.clone(), pod: request.pod.clone() };
        let resolved = Resolved { target, wanted };
        let reserved = self.reserve(resolved, patience).await?;
        self.record_claim(reserved).map(Some)
    }

    /// What is reserved for the claims of a request.
    pub(super) fn claimed(&self, request: &PodRequest) -> Result<Vec<Reservation>> {
        let books = self.sandboxes.books();
        let claimed = request.claims.iter().map(|claim| {
            let owner = Owner::claim(claim.clone());
            let not_ready =
                |what: String| Error::new(Reason::NotReady, format!("{}: {what}", pod_name(&request.pod)));
            // First: what one sandbox gave back in part is not all that the claim has.
            if let Some(sandbox) = books.lent_to(&owner) {
                return Err(not_ready(format!(
                    "{owner} is in use by sandbox {sandbox}: only one sandbox can use it at a time"
                )));
            }
            let nothing =
                || not_ready(format!("nothing is reserved for {owner}: it must be prepared first"));
            books.reservation(&owner).cloned().ok_or_else(nothing)
        });
        claimed.collect()
    }

    /// Removes the sandbox that has what was reserved for a claim, if its namespace is gone: kubelet would
    /// not free the claim otherwise, and need not wait for the next pass. Nothing holds two owners' locks:
    /// this one is given back before the claim's is taken.
    async fn take_from_gone(&self, owner: &Owner) {
        let Some(sandbox) = self.sandboxes.books().lent_to(owner).cloned() else { return };
        // If something is being done for it, that settles it.
        let Some(_guard) = self.sandboxes.locks().try_lock(sandbox.clone()) else { return };
        let record = self.sandboxes.books().get(&sandbox).cloned();
        let Some(record) = record.filter(|record| netns::is_gone(record.netns())) else { return };
        tracing::info!(%owner, %sandbox, "its sandbox is gone: removing its networks");
        // What is left of it is tried again by the next pass, and the claim is not freed until then.
        let _ = self.remove(&record).await;
    }

    /// Whether the sandbox of a pod that starts has its networks already: it runs, and another container of
    /// it is to start.
    pub(crate) fn has_networks(&self, request: &PodRequest) -> bool {
        let record = self.sandboxes.books().get(&request.pod.sandbox).cloned();
        let Some((record, start)) = record.zip(request.start.as_ref()) else { return false };
        let netns = netns::identify(&start.netns).ok().flatten();
        record.is_attached() && netns.as_ref() == Some(record.netns())
    }

    /// The same, and whether it has those of all its claims.
    pub(crate) fn has_all(&self, request: &PodRequest) -> bool {
        let record = || self.sandboxes.books().get(&request.pod.sandbox).cloned();
        self.has_networks(request)
            && record().is_some_and(|record| request.claims.iter().all(|claim| has_from(&record, claim)))
    }

    /// Frees what is reserved for a claim, and refuses what still prepares it. Nothing reserved is success.
    pub(crate) async fn release_claim(&self, claim: &ObjectRef) -> Result<()> {
        let owner = Owner::claim(claim.clone());
        self.take_from_gone(&owner).await;
        let _guard = self.sandboxes.locks().lock(owner.clone()).await;
        self.sandboxes.releases().note(&claim.uid);
        self.free(&owner)
    }

    /// Frees what is reserved for a claim by an earlier allocation, so that it can be prepared again.
    pub(crate) async fn free_claim(&self, claim: &ObjectRef) -> Result<()> {
        let owner = Owner::claim(claim.clone());
        self.take_from_gone(&owner).await;
        let _guard = self.sandboxes.locks().lock(owner.clone()).await;
        self.free(&owner)
    }

    /// Who calls has the owner's lock.
    fn free(&self, owner: &Owner) -> Result<()> {
        let released = self.sandboxes.books().release(owner, clock::now());
        self.sandboxes.changed();
        released
    }
}

/// A sandbox that has its networks has those of its claims among them, or it must not go on: nothing is added
/// to it any more.
pub(super) fn check_lent(record: &SandboxRecord, request: &PodRequest, who: &str) -> Result<()> {
    let Some(claim) = request.claims.iter().find(|claim| !has_from(record, claim)) else { return Ok(()) };
    let message = format!(
        "{who}: sandbox {} was attached without claim {claim}: delete the pod so that it is recreated with \
         the claim attached",
        record.sandbox()
    );
    Err(Error::new(Reason::Refused, message))
}

/// Whether a sandbox has something from a claim.
fn has_from(record: &SandboxRecord, claim: &ObjectRef) -> bool {
    let mut loans = record.attachments().iter().filter_map(|a| a.plan().loan.as_ref());
    loans.any(|loan| matches!(&loan.from, Owner::Claim(from) if **from == *claim))
}

/// A reservation that is there already, if it is what is asked for.
fn same(reservation: &Reservation, request: &ClaimRequest) -> Result<Reservation> {
    let reserved = reservation.reserved();
    let has = |n: usize| {
        let (asked, lease) = (request.networks.get(n)?, reserved.get(n)?);
        let addresses = asked.addresses.iter().all(|a| lease.lease.addresses.contains(*a));
        let named = asked.interface.as_ref().is_none_or(|name| *name == lease.interface);
        let mac = asked.mac.is_none_or(|mac| mac == lease.lease.mac);
        let same = asked.network == lease.network && asked.default_route == lease.default_route;
        (same && addresses && named && mac).then_some(())
    };
    if reserved.len() == request.networks.len() && (0..reserved.len()).all(|n| has(n).is_some()) {
        return Ok(reservation.clone());
    }
    let message = format!(
        "{} already has reservations that differ from this request: release it first",
        reservation.owner()
    );
    Err(Error::new(Reason::Refused, message))
}
