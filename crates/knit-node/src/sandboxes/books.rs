//! The agent's books: the allocator and the ledger, always changed together. Whoever holds them does nothing
//! slow.

use std::collections::BTreeSet;

use knit_ipam::{
    Cooling, Lease, LeaseError, LeaseKey, Millis, NodeAllocator, NodeConfig, PodRef, Request, Snapshot, Want,
};
use knit_ledger::{
    AttachmentPlan, AttachmentState, Batch, Details, Door, Entry, LedgerError, NetnsRef, SandboxRecord,
    Shared,
};
use knit_runtime::{InterfaceName, Pod, SandboxId};
use knit_types::NetworkName;
use knit_types::Owner;

use super::by_pod::ByPod;
use super::reservations::leased;
pub use super::store::Store;
use crate::error::{Error, Reason, Result};
use crate::pipeline::resolve::Wanted;

/// How long an address rests beyond the usual time if a runtime may still be making its interface: until a
/// pass has looked whether it did, and a good deal longer.
const LATE_ATTACH_DELAY: Millis = Millis(180_000);

/// Allocator and ledger.
pub struct Books {
    /// Who has which address.
    pub allocator: NodeAllocator,
    store: Box<dyn Store>,
    /// Leases of records whose addresses another record holds. They take them when that one ends.
    waiting: Vec<Lease>,
    by_pod: ByPod,
}

/// Why nothing was reserved.
#[derive(Debug)]
pub enum NotReserved {
    /// No address of this Network is free here: a further block may come.
    Exhausted {
        /// The Network.
        network: NetworkName,
        /// The error to give if none comes.
        error: Error,
    },
    /// Waiting does not help.
    Error(Error),
}

// === impl Books ===

impl Books {
    /// The books of a node, with the leases that its records hold.
    #[must_use]
    pub fn open(node: &str, store: Box<dyn Store>, now: Millis) -> Self {
        let mut leases: Vec<Lease> = Vec::new();
        for entry in store.entries() {
            match entry {
                Entry::Sandbox(record) => leases.extend(record.leases()),
                Entry::Reservation(reservation) => leases.extend(reservation.leases()),
            }
        }
        // A time beyond this one is another boot's.
        let resting = store.resting();
        let known = resting.is_some();
        let cooling =
            resting.into_iter().flatten().filter(|c| c.freed_at <= now.plus(LATE_ATTACH_DELAY)).collect();
        let snapshot = Snapshot { leases, cooling };
        let mut restored = NodeAllocator::restore(node, NodeConfig::default(), [], [], snapshot);
        if !known {
            restored.allocator.rest_all(now);
        }
        for lease in &restored.clashing {
            tracing::error!(lease = %lease.holder(), network = %lease.network, addresses = %lease.addresses,
                "two records have the same address: the other record keeps it until its pod ends");
        }
        let by_pod = ByPod::of(&*store);
        let mut books = Self { allocator: restored.allocator, store, waiting: restored.clashing, by_pod };
        books.withhold_unreadable();
        books
    }

    /// Takes the lease of a record that was found running. If another record holds its address, it gets that
    /// when the other one ends; nobody else does.
    pub fn adopt(&mut self, lease: Lease) {
        if let Err(lease) = self.allocator.adopt(lease) {
            tracing::error!(lease = %lease.holder(), network = %lease.network, addresses = %lease.addresses,
                "two sandboxes have the same address");
            self.waiting.push(*lease);
        }
    }

    /// The record of a sandbox.
    #[must_use]
    pub fn get(&self, sandbox: &SandboxId) -> Option<&SandboxRecord> {
        self.store.get(sandbox.as_str()).and_then(Entry::sandbox)
    }

    /// The records of all sandboxes.
    pub fn records(&self) -> impl Iterator<Item = &SandboxRecord> {
        self.store.entries().filter_map(Entry::sandbox)
    }

    /// The records of one pod's sandboxes; several while one goes and another comes.
    pub fn records_of(&self, namespace: &str, name: &str) -> impl Iterator<Item = &SandboxRecord> {
        self.by_pod.of_pod(namespace, name).filter_map(|sandbox| self.get(sandbox))
    }

    /// The records of the sandboxes of a namespace's pods.
    pub(crate) fn records_in(&self, namespace: &str) -> impl Iterator<Item = &SandboxRecord> {
        self.by_pod.of_namespace(namespace).filter_map(|sandbox| self.get(sandbox))
    }

    /// The namespaces whose pods have records.
    pub(crate) fn namespaces(&self) -> BTreeSet<String> {
        self.by_pod.namespaces()
    }

    /// The namespaces in which records have changed since the last call. It has one caller.
    pub(crate) fn take_touched(&mut self) -> BTreeSet<String> {
        self.by_pod.take_touched()
    }

    /// The Networks that have attachments or reservations here.
    #[must_use]
    pub fn networks_in_use(&self) -> BTreeSet<NetworkName> {
        let mut networks = BTreeSet::new();
        for entry in self.store.entries() {
            match entry {
                Entry::Sandbox(record) => {
                    networks.extend(record.attachments().iter().map(|a| a.plan().network.clone()));
                }
                Entry::Reservation(reservation) => {
                    networks.extend(reservation.reserved().iter().map(|lease| lease.network.clone()));
                }
            }
        }
        let unreadable = self.unreadable().flat_map(knit_ledger::Unreadable::holds);
        networks.extend(unreadable.filter_map(|holding| holding.network));
        networks
    }

    /// How many attachments a Network has here.
    #[must_use]
    pub fn attachments_of(&self, network: &NetworkName) -> usize {
        self.records().flat_map(SandboxRecord::attachments).filter(|a| a.plan().network == network).count()
    }

    /// Leases addresses for all wanted interfaces of an owner, or for none. They are nobody else's until they
    /// are recorded or given back. What is on loan stays its lender's until it is recorded.
    ///
    /// # Errors
    /// When one cannot be had.
    pub(crate) fn lease(
        &mut self,
        owner: &Owner,
        pod: Option<PodRef>,
        wanted: &[Wanted],
        now: Millis,
    ) -> Result<Vec<Lease>, NotReserved> {
        let who = pod.as_ref().map_or_else(|| owner.to_string(), |pod| format!("pod {pod}"));
        let on_loan: Vec<Option<Lease>> = wanted
            .iter()
            .map(|w| w.loan.as_ref().map(|loan| self.lease_of_loan(loan, &w.network, &who)).transpose())
            .collect::<Result<_>>()
            .map_err(NotReserved::Error)?;
        let wants = wanted.iter().filter(|w| w.loan.is_none()).map(want).collect();
        let request = Request { owner: owner.clone(), pod, wants };
        let mut new =
            self.allocator.lease(&request, now).map_err(|error| lease_error(&who, error))?.into_iter();
        Ok(on_loan.into_iter().filter_map(|lent| lent.or_else(|| new.next())).collect())
    }

    /// Gives leases back that nothing was made with. What is another's stays there.
    pub(crate) fn cancel(&mut self, owner: &Owner, leases: &[Lease]) {
        for lease in leases.iter().filter(|lease| lease.key.owner == *owner) {
            self.allocator.cancel(&lease.key);
        }
    }

    /// Records what is planned for a sandbox, besides what it has. What is on loan is the sandbox's from then
    /// on: one write takes it from its lender.
    ///
    /// # Errors
    /// When it cannot be recorded; then nothing changed.
    pub(crate) fn plan(
        &mut self,
        pod: &Pod,
        netns: &NetnsRef,
        plans: &[AttachmentPlan],
        now: Millis,
    ) -> Result<SandboxRecord> {
        let who = crate::request::pod_name(pod);
        let record = match self.get(&pod.sandbox) {
            Some(record) => {
                let mut record = record.clone();
                plans.iter().cloned().try_for_each(|plan| record.plan(plan)).map(|()| record)
            }
            None => SandboxRecord::planned(
                pod.sandbox.clone(),
                pod_ref(pod),
                netns.clone(),
                now.0,
                plans.iter().cloned(),
            ),
        };
        let record = record
            .map_err(|error| Error::new(Reason::Refused, format!("cannot record {who}")).because(error))?;
        let batch = self.lend(Batch::new().put(record.clone().into()), plans, &who)?;
        self.commit(batch).map_err(|error| ledger_error(&who, error))?;
        self.lent(&pod.sandbox, record.pod(), plans);
        Ok(record)
    }

    /// Writes a changed record.
    ///
    /// # Errors
    /// When it cannot be written; then nothing changed.
    pub fn put(&mut self, record: SandboxRecord) -> Result<(), LedgerError> {
        self.commit(Batch::new().put(record.into()))
    }

    /// Takes interfaces of which nothing is left out of the record, and frees their addresses; what was on
    /// loan goes back to its lender, in the same write. Those in `late` may still be made by a runtime that
    /// was given up, or have an address that somebody else was found to have: they rest longer.
    ///
    /// # Errors
    /// When that cannot be written: their addresses stay reserved, and a later pass tries again.
    pub fn forget(
        &mut self,
        sandbox: &SandboxId,
        interfaces: &[InterfaceName],
        late: &[InterfaceName],
        now: Millis,
    ) -> Result<(), LedgerError> {
        let key = |interface: &InterfaceName| LeaseKey::new(sandbox.clone(), interface.clone());
        let (mut unused, mut back): (Vec<&InterfaceName>, Vec<_>) = (Vec::new(), Vec::new());
        if let Some(record) = self.get(sandbox) {
            let mut record = record.clone();
            let batch;
            (batch, back) = self.take_back(Batch::new(), &record, interfaces, now);
            // What was never attached never had a container: its addresses need no quarantine, and an ADD
            // that fails again and again must not use them all up.
            unused = interfaces
                .iter()
                .filter(|i| !late.contains(i))
                .filter(|i| record.attachment(i).is_some_and(|a| never_attached(a.state())))
                .collect();
            let is_back = |i: &InterfaceName| back.iter().any(|(interface, _)| interface == i);
            let used = interfaces.iter().filter(|i| !unused.contains(i) && !is_back(i));
            let rests =
                used.flat_map(|i| self.cooling_of(&key(i), freed_at(late.contains(i), now))).collect();
            self.keep_at_rest(rests, now);
            for interface in interfaces {
                // Both fail only for an interface that is not in the record, which is what is wanted.
                let _ = record.detaching(interface);
                let _ = record.gone(interface);
            }
            let batch =
                if record.is_empty() { batch.remove(sandbox.as_str()) } else { batch.put(record.into()) };
            self.commit(batch)?;
        }
        self.taken_back(sandbox, &back);
        for interface in interfaces.iter().filter(|i| !back.iter().any(|(interface, _)| interface == *i)) {
            let key = key(interface);
            self.waiting.retain(|lease| lease.key != key);
            if unused.contains(&interface) {
                self.allocator.cancel(&key);
            } else {
                self.allocator.free(&key, freed_at(late.contains(interface), now));
            }
        }
        self.take_waiting();
        Ok(())
    }

    /// Has leases take their addresses that waited for another record to end.
    pub(super) fn take_waiting(&mut self) {
        for lease in std::mem::take(&mut self.waiting) {
            match self.allocator.adopt(lease) {
                Ok(()) => {}
                Err(lease) => self.waiting.push(*lease),
            }
        }
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(super) fn commit(&mut self, batch: Batch<Entry>) -> Result<(), LedgerError> {
        let moves = ByPod::moves(&*self.store, &batch);
        self.store.commit(batch)?;
        self.by_pod.carry_out(moves);
        Ok(())
    }

    /// Writes down which addresses are about to rest. Where that fails they rest all the same, as long as
    /// this agent lives.
    pub(super) fn keep_at_rest(&mut self, freed: Vec<Cooling>, now: Millis) {
        let rested = Millis(now.0.saturating_sub(NodeConfig::default().quarantine.0));
        if !freed.is_empty()
            && let Err(error) = self.store.rest(freed, rested)
        {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot record that addresses are held back: an agent that starts now would reuse them \
                immediately"
            );
        }
    }
}

impl std::fmt::Debug for Books {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Books").field("records", &self.store.entries().count()).finish_non_exhaustive()
    }
}

/// From when on an address rests.
fn freed_at(late: bool, now: Millis) -> Millis {
    if late { now.plus(LATE_ATTACH_DELAY) } else { now }
}

/// Whether an attachment was planned, and perhaps begun, but never acknowledged.
fn never_attached(state: &AttachmentState) -> bool {
    match state {
        AttachmentState::Planned => true,
        AttachmentState::Attached(_) => false,
        AttachmentState::Detaching(made) => made.is_none(),
    }
}

/// What is planned for an interface, with its addresses.
pub(crate) fn plan_of(wanted: &Wanted, door: &Door, lease: &Lease) -> AttachmentPlan {
    let details = Details {
        door: door.clone(),
        main: wanted.main,
        default_route: wanted.default_route,
        ports: wanted.ports.clone(),
        dns: wanted.dns.clone(),
    };
    AttachmentPlan {
        interface: wanted.interface.clone(),
        network: wanted.network.clone(),
        runtime: wanted.runtime.clone(),
        lease: Some(leased(lease)),
        loan: wanted.loan.clone().map(Box::new),
        host_interface: None,
        details: Shared::new(details),
    }
}

pub(crate) fn pod_ref(pod: &Pod) -> Option<PodRef> {
    Some(PodRef { namespace: pod.namespace.clone()?, name: pod.name.clone()?, uid: pod.uid.clone() })
}

fn want(wanted: &Wanted) -> Want {
    Want {
        addresses: wanted.addresses.clone(),
        mac: wanted.mac,
        ..Want::new(wanted.interface.clone(), &wanted.network)
    }
}

fn lease_error(who: &str, error: LeaseError) -> NotReserved {
    let message = format!("no address for {who}");
    match &error {
        LeaseError::Exhausted { network, .. } => NotReserved::Exhausted {
            network: network.clone(),
            error: Error::new(Reason::AddressesExhausted, message).because(error),
        },
        LeaseError::UnknownNetwork { .. } => {
            NotReserved::Error(Error::new(Reason::NotReady, message).because(error))
        }
        _ => NotReserved::Error(Error::new(Reason::Refused, message).because(error)),
    }
}

/// An error of the ledger: nothing may be made that is not recorded.
pub(crate) fn ledger_error(who: &str, error: LedgerError) -> Error {
    let reason = if error.retryable() { Reason::NotReady } else { Reason::Internal };
    Error::new(reason, format!("cannot record {who}, so nothing is created for it")).because(error)
}
