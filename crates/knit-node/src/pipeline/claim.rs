//! Claims: what a pod is to get is resolved, reserved and recorded before there is a sandbox. The sandbox
//! gets it when it comes ([`crate::PodRequest::claims`]), gives it back when it ends, and it is free when the
//! claim is released.

use std::collections::BTreeSet;

use knit_ledger::{Loan, Reservation, ReservedLease, SandboxRecord};
use knit_runtime::{InterfaceName, SandboxId};
use knit_types::{NetworkName, ObjectRef, Owner};
use tokio::time::Instant;

use super::Pipeline;
use super::prepare::Resolved;
use super::reserve::ForClaim;
use super::resolve::{Missing, resolve_claim};
use crate::clock;
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::networks::WaitLimit;
use crate::request::{Asked, ClaimRequest, PodRequest, pod_name};
use crate::sandboxes::books::ledger_error;
use crate::sandboxes::{Began, unreadable};
use crate::world::World;

/// Why a claim is prepared now.
#[derive(Clone, Debug)]
pub(crate) struct Occasion {
    /// When the request began.
    pub(crate) began: Began,
    /// The sandbox that the claim is looked up for; none where kubelet has it prepared.
    pub(crate) sandbox: Option<SandboxId>,
}

impl Pipeline {
    /// Reserves what a claim asks for: all of it, or nothing. The same request again changes nothing; nothing
    /// is given while a sandbox has it, or to a request that began before the claim was released.
    pub(crate) async fn prepare_claim(
        &self,
        request: &ClaimRequest,
        occasion: &Occasion,
        deadline: Instant,
    ) -> Result<Option<Reservation>> {
        let owner = Owner::claim(request.claim.clone());
        let lock = self.sandboxes.locks().lock(owner.clone());
        let _guard = tokio::time::timeout_at(deadline, lock).await.map_err(|_| {
            let message = format!("{owner}: an earlier request for it is still running: try again");
            Error::new(Reason::NotReady, message)
        })?;
        if self.sandboxes.releases().may_have(&request.claim.uid, occasion.began) {
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
        if self.lend_adopted(request, &owner, occasion)? {
            return Ok(None);
        }
        let look = |world: &World| match resolve_claim(world, request, self.config.main_interfaces) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        };
        let soon = deadline.min(Instant::now() + self.config.cache_wait);
        let wanted = self.world.wait(soon, look).await??;
        self.check_node(&wanted, &owner.to_string())?;
        let patience = WaitLimit::Until(deadline.min(Instant::now() + self.config.block_wait));
        let networks: BTreeSet<&NetworkName> = wanted.iter().map(|w| &w.network).collect();
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
            let nothing = || not_ready(format!("nothing is reserved for {owner}: it must be prepared first"));
            books.reservation(&owner).cloned().ok_or_else(nothing)
        });
        claimed.collect()
    }

    /// After the ledger was lost: a sandbox of the claim's pod may have all that the claim asks for, without
    /// a record of whom it has that from. It has it from the claim then, and nothing is reserved a second
    /// time. Whether there is one. The sandbox's lock is not waited for, since the claim's is held.
    fn lend_adopted(&self, request: &ClaimRequest, owner: &Owner, occasion: &Occasion) -> Result<bool> {
        let is_its = |record: &&SandboxRecord| match (record.pod(), &request.pod) {
            (Some(has), Some(asks)) => {
                let uids = has.uid.as_ref().zip(asks.uid.as_ref());
                has.same_name(asks) && uids.is_none_or(|(has, asks)| has == asks)
            }
            _ => occasion.sandbox.as_ref() == Some(record.sandbox()),
        };
        let has_all = |record: &&SandboxRecord| adopted(record, &request.networks).is_some();
        let sandbox = {
            let books = self.sandboxes.books();
            books.records().filter(is_its).find(has_all).map(|record| record.sandbox().clone())
        };
        let Some(sandbox) = sandbox else { return Ok(false) };
        let Some(_guard) = self.sandboxes.locks().try_lock(sandbox.clone()) else {
            let message = format!("{owner}: sandbox {sandbox} is being attached or detached: try again");
            return Err(Error::new(Reason::NotReady, message));
        };
        let mut books = self.sandboxes.books();
        let Some(mut record) = books.get(&sandbox).cloned() else { return Ok(false) };
        let Some(interfaces) = adopted(&record, &request.networks) else { return Ok(false) };
        for (interface, asked) in interfaces.into_iter().zip(&request.networks) {
            let named = asked.interface.is_some();
            let loan = Loan { from: owner.clone(), interface: interface.clone(), named };
            record.lent(&interface, loan).map_err(|error| {
                Error::new(Reason::Internal, format!("cannot record {owner}")).because(error)
            })?;
        }
        books.put(record).map_err(|error| ledger_error(&owner.to_string(), error))?;
        drop(books);
        tracing::info!(%owner, %sandbox, "its sandbox has what it asks for, from before the ledger was lost");
        self.sandboxes.changed();
        Ok(true)
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
        record.is_attached() && netns.is_some_and(|netns| netns::is_same(record.netns(), &netns))
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

/// The interfaces of a sandbox that a claim may be about which asks for these: one for each, of those that
/// were found in the kernel after the ledger was lost. None if one is missing.
fn adopted(record: &SandboxRecord, asked: &[Asked]) -> Option<Vec<InterfaceName>> {
    if asked.is_empty() || !record.is_attached() {
        return None;
    }
    let find = |asked: &Asked| {
        let is_it = |a: &&knit_ledger::Attachment| {
            let plan = a.plan();
            let fits = plan.lease.as_ref().is_some_and(|lease| {
                asked.addresses.iter().all(|address| lease.addresses.contains(*address))
                    && asked.mac.is_none_or(|mac| mac == lease.mac)
            });
            let named = asked.interface.as_ref().is_none_or(|name| *name == plan.interface);
            let found = plan.loan.is_none() && a.details().door.is_forgotten();
            found && fits && named && plan.network == asked.network
        };
        record.attachments().iter().find(is_it).map(|a| a.plan().interface.clone())
    };
    // A claim names each Network once.
    asked.iter().map(find).collect()
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

/// A reservation that is there already, if it is what is asked for, in whatever order: what sandboxes give
/// back comes back in theirs.
fn same(reservation: &Reservation, request: &ClaimRequest) -> Result<Reservation> {
    let mut left: Vec<&ReservedLease> = reservation.reserved().iter().collect();
    let mut has = |asked: &Asked| {
        let fits = |lease: &&ReservedLease| {
            let addresses = asked.addresses.iter().all(|a| lease.lease.addresses.contains(*a));
            let named = asked.interface.as_ref().is_none_or(|name| *name == lease.interface);
            let mac = asked.mac.is_none_or(|mac| mac == lease.lease.mac);
            let same = asked.network == lease.network && asked.default_route == lease.default_route;
            same && addresses && named && mac
        };
        left.iter().position(fits).map(|n| left.swap_remove(n)).is_some()
    };
    if request.networks.iter().all(&mut has) && left.is_empty() {
        return Ok(reservation.clone());
    }
    let message = format!(
        "{} already has reservations that differ from this request: release it first",
        reservation.owner()
    );
    Err(Error::new(Reason::Refused, message))
}
