//! What claims and objects have before there is a sandbox, and how it goes to a sandbox and back. Each step
//! is one write of the ledger, and the allocator follows it.

use knit_ipam::{Cooling, Lease, LeaseKey, Millis};
use knit_ledger::{AttachmentPlan, Batch, Entry, Leased, Loan, Reservation, ReservedLease, SandboxRecord};
use knit_runtime::{InterfaceName, SandboxId};
use knit_types::{Owner, PodRef};

use super::books::{Books, ledger_error};
use crate::error::{Error, Reason, Result};
use crate::pipeline::resolve::Wanted;

impl Books {
    /// What is reserved for an owner that has no sandbox.
    #[must_use]
    pub fn reservation(&self, owner: &Owner) -> Option<&Reservation> {
        self.store().get(&owner.key()).and_then(Entry::reservation)
    }

    /// All reservations.
    pub fn reservations(&self) -> impl Iterator<Item = &Reservation> {
        self.store().entries().filter_map(Entry::reservation)
    }

    /// Whether any claim has something here, or a sandbox has it.
    #[must_use]
    pub fn has_claims(&self) -> bool {
        let is_claim = |owner: &Owner| matches!(owner, Owner::Claim(_));
        let mut loans = self.records().flat_map(SandboxRecord::attachments).map(|a| a.plan().loan.as_ref());
        self.reservations().any(|reservation| is_claim(reservation.owner()))
            || loans.any(|loan| loan.is_some_and(|loan| is_claim(&loan.from)))
            || self.unreadable().any(|record| record.claim().is_some())
    }

    /// The sandbox that has what was reserved for an owner.
    #[must_use]
    pub fn lent_to(&self, owner: &Owner) -> Option<&SandboxId> {
        let has = |record: &&SandboxRecord| {
            let mut loans = record.attachments().iter().filter_map(|a| a.plan().loan.as_ref());
            loans.any(|loan| loan.from == *owner)
        };
        self.records().find(has).map(SandboxRecord::sandbox)
    }

    /// Records what is reserved for an owner, besides what it has.
    ///
    /// # Errors
    /// When it cannot be recorded; then nothing changed.
    pub(crate) fn record_reservation(
        &mut self,
        owner: &Owner,
        pod: Option<PodRef>,
        wanted: &[Wanted],
        leases: &[Lease],
        now: Millis,
    ) -> Result<Reservation> {
        let who = owner.to_string();
        let known = self.reservation(owner).cloned();
        let reservation = known.or_else(|| Reservation::new(owner.clone(), now.0));
        let mut reservation = reservation.ok_or_else(|| {
            Error::new(Reason::Internal, format!("{who} already has a record: nothing is reserved for it"))
        })?;
        reservation.set_pod(pod);
        for (wanted, lease) in wanted.iter().zip(leases) {
            let lease = ReservedLease {
                interface: wanted.interface.clone(),
                named: wanted.named,
                network: wanted.network.clone(),
                runtime: wanted.runtime.clone(),
                default_route: wanted.default_route,
                lease: leased(lease),
            };
            if reservation.lease(&lease.interface).is_some_and(|known| *known == lease) {
                continue;
            }
            reservation.add(lease).map_err(|error| {
                Error::new(Reason::Refused, format!("cannot record {who}")).because(error)
            })?;
        }
        self.commit(Batch::new().put(reservation.clone().into())).map_err(|e| ledger_error(&who, e))?;
        Ok(reservation)
    }

    /// Records that what is reserved is for another pod than before.
    ///
    /// # Errors
    /// When it cannot be recorded; then nothing changed.
    pub(crate) fn reserve_for(
        &mut self,
        mut reservation: Reservation,
        pod: Option<PodRef>,
    ) -> Result<Reservation> {
        reservation.set_pod(pod);
        let commit = self.commit(Batch::new().put(reservation.clone().into()));
        commit.map_err(|e| ledger_error(&reservation.owner().to_string(), e))?;
        Ok(reservation)
    }

    /// Frees what is reserved for an owner. Nothing reserved is success.
    ///
    /// # Errors
    /// While a sandbox has it, and when that cannot be written; then nothing changed.
    pub(crate) fn release(&mut self, owner: &Owner, now: Millis) -> Result<()> {
        if let Some(sandbox) = self.lent_to(owner) {
            let message = format!(
                "{owner} is in use by sandbox {sandbox}: it is released once that sandbox is detached"
            );
            return Err(Error::new(Reason::NotReady, message));
        }
        let Some(reservation) = self.reservation(owner) else {
            // What cannot be read is gone with its owner, too.
            let discarded = self.discard_by(&owner.key(), now);
            return discarded.map_err(|e| ledger_error(&owner.to_string(), e));
        };
        let keys: Vec<LeaseKey> = reservation.leases().map(|lease| lease.key).collect();
        let rests = keys.iter().flat_map(|key| self.cooling_of(key, now)).collect();
        self.keep_at_rest(rests, now);
        self.commit(Batch::new().remove(owner.key())).map_err(|e| ledger_error(&owner.to_string(), e))?;
        for key in &keys {
            self.allocator.free(key, now);
        }
        self.take_waiting();
        Ok(())
    }

    /// The lease that a loan is about, with the key that its lender has it by.
    pub(super) fn lease_of_loan(&self, loan: &Loan, network: &str, who: &str) -> Result<Lease> {
        let lease = self.allocator.get(&lender_key(loan)).filter(|lease| lease.network == network);
        lease.cloned().ok_or_else(|| no_such_loan(loan, who))
    }

    /// The changes of reservations that go with plans: what a sandbox gets, its lender no longer has.
    pub(super) fn lend(
        &self,
        mut batch: Batch<Entry>,
        plans: &[AttachmentPlan],
        who: &str,
    ) -> Result<Batch<Entry>> {
        let mut changed: Vec<Reservation> = Vec::new();
        for loan in plans.iter().filter_map(|plan| plan.loan.as_deref()) {
            if !changed.iter().any(|reservation| *reservation.owner() == loan.from) {
                let reservation = self.reservation(&loan.from).ok_or_else(|| no_such_loan(loan, who))?;
                changed.push(reservation.clone());
            }
            let own = changed.iter_mut().find(|reservation| *reservation.owner() == loan.from);
            own.and_then(|own| own.take(&loan.interface)).ok_or_else(|| no_such_loan(loan, who))?;
        }
        for reservation in changed {
            batch = put_or_remove(batch, reservation);
        }
        Ok(batch)
    }

    /// Has the allocator follow [`Books::lend`].
    pub(super) fn lent(&mut self, sandbox: &SandboxId, pod: Option<&PodRef>, plans: &[AttachmentPlan]) {
        for plan in plans {
            let Some(loan) = &plan.loan else { continue };
            let here = LeaseKey::new(sandbox.clone(), plan.interface.clone());
            if !self.allocator.transfer(&lender_key(loan), &here, pod) {
                tracing::error!(from = %loan.from, to = %here, "a lease does not match the ledger");
            }
        }
    }

    /// The changes of reservations that go with interfaces which are gone: their lenders have them again.
    /// With the loans that this is about; the others are freed.
    pub(super) fn take_back(
        &self,
        mut batch: Batch<Entry>,
        record: &SandboxRecord,
        gone: &[InterfaceName],
        now: Millis,
    ) -> (Batch<Entry>, Vec<(InterfaceName, Loan)>) {
        let (mut changed, mut back): (Vec<Reservation>, Vec<_>) = (Vec::new(), Vec::new());
        for plan in gone.iter().filter_map(|interface| Some(record.attachment(interface)?.plan())) {
            let (Some(loan), Some(lease)) = (&plan.loan, &plan.lease) else { continue };
            if !changed.iter().any(|reservation| *reservation.owner() == loan.from) {
                let known = self.reservation(&loan.from).cloned();
                let Some(mut own) = known.or_else(|| Reservation::new(loan.from.clone(), now.0)) else {
                    continue;
                };
                // Who had it last: the next one may be given something else.
                own.set_pod(record.pod().cloned());
                changed.push(own);
            }
            let Some(own) = changed.iter_mut().find(|own| *own.owner() == loan.from) else { continue };
            let lease = ReservedLease {
                interface: loan.interface.clone(),
                named: loan.named,
                network: plan.network.clone(),
                runtime: plan.runtime.clone(),
                // A main interface has it for the pod's sake, not the claim's.
                default_route: plan.details.default_route && !plan.details.main,
                lease: lease.clone(),
            };
            if own.add(lease).is_ok() {
                back.push((plan.interface.clone(), (**loan).clone()));
            }
        }
        for reservation in changed {
            batch = put_or_remove(batch, reservation);
        }
        (batch, back)
    }

    /// Has the allocator follow [`Books::take_back`].
    pub(super) fn taken_back(&mut self, sandbox: &SandboxId, back: &[(InterfaceName, Loan)]) {
        for (interface, loan) in back {
            let here = LeaseKey::new(sandbox.clone(), interface.clone());
            if !self.allocator.transfer(&here, &lender_key(loan), None) {
                tracing::error!(from = %here, to = %loan.from, "a lease does not match the ledger");
            }
        }
    }

    /// What rests once a lease is freed.
    pub(super) fn cooling_of(&self, key: &LeaseKey, freed_at: Millis) -> Vec<Cooling> {
        let Some(lease) = self.allocator.get(key) else { return Vec::new() };
        let rests = lease.addresses.iter().map(|address| Cooling {
            network: lease.network.clone(),
            address,
            freed_at,
            pod: lease.pod.clone(),
        });
        rests.collect()
    }
}

/// What is recorded of a lease.
pub(crate) fn leased(lease: &Lease) -> Leased {
    Leased { addresses: lease.addresses.clone(), mac: lease.mac, kind: lease.kind }
}

fn lender_key(loan: &Loan) -> LeaseKey {
    LeaseKey::new(loan.from.clone(), loan.interface.clone())
}

fn put_or_remove(batch: Batch<Entry>, reservation: Reservation) -> Batch<Entry> {
    if reservation.is_empty() {
        batch.remove(reservation.owner().key())
    } else {
        batch.put(reservation.into())
    }
}

fn no_such_loan(loan: &Loan, who: &str) -> Error {
    let message = format!(
        "{who}: nothing is reserved for interface {} of {}: another sandbox uses it, or it was released",
        loan.interface, loan.from
    );
    Error::new(Reason::NotReady, message)
}
