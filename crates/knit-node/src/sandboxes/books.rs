//! The agent's books: the allocator and the ledger, always changed together. Whoever holds them does nothing
//! slow.

use std::collections::BTreeSet;

use knit_ipam::{
    Cooling, Lease, LeaseError, LeaseKey, Millis, NodeAllocator, NodeConfig, PodRef, Request, Snapshot, Want,
};
use knit_ledger::{LedgerError, NetnsRef, Opaque, SandboxRecord};
use knit_runtime::{Attachment, Dns, Pod, PortMapping, SandboxId};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Reason, Result};
use crate::pipeline::resolve::Wanted;
use crate::request::Door;

/// How long an address rests beyond the usual time if a runtime may still be making its interface: until a
/// pass has looked whether it did, and a good deal longer.
const LATE: Millis = Millis(180_000);

/// Where records are kept: [`crate::files::Files`], or something that stands in for them.
pub trait Store: Send {
    /// Puts a record.
    ///
    /// # Errors
    /// When it cannot be written; then nothing changed.
    fn put(&mut self, record: SandboxRecord) -> Result<(), LedgerError>;
    /// Removes a record; one that is not there is no error.
    ///
    /// # Errors
    /// When that cannot be written; then nothing changed.
    fn remove(&mut self, sandbox: &str) -> Result<(), LedgerError>;
    /// The record of a sandbox.
    fn get(&self, sandbox: &str) -> Option<&SandboxRecord>;
    /// All records.
    fn records(&self) -> Box<dyn Iterator<Item = &SandboxRecord> + '_>;
    /// Keeps addresses that were freed, so that the next agent lets them rest, too. What was freed at
    /// `rested` or before need not be kept any longer.
    ///
    /// # Errors
    /// When it cannot be written; then nothing changed.
    fn rest(&mut self, freed: Vec<Cooling>, rested: Millis) -> Result<(), LedgerError>;
    /// The addresses that were kept; nothing if it is not known any more which those were.
    fn resting(&self) -> Option<Vec<Cooling>>;
}

/// Allocator and ledger.
pub struct Books {
    /// Who has which address.
    pub allocator: NodeAllocator,
    store: Box<dyn Store>,
    /// Leases of records whose addresses another record holds. They take them when that one ends.
    waiting: Vec<Lease>,
}

/// What is kept of an attachment besides what the ledger has a place for: enough to make it again.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Details {
    /// Who asked for it.
    pub door: Door,
    /// Whether it is the pod's main interface.
    #[serde(default)]
    pub main: bool,
    /// Whether the pod's default route goes out there.
    #[serde(default)]
    pub default_route: bool,
    /// Ports of the node that lead there.
    #[serde(default)]
    pub ports: Vec<PortMapping>,
    /// Name servers.
    #[serde(default)]
    pub dns: Dns,
}

/// Why nothing was reserved.
#[derive(Debug)]
pub enum NotReserved {
    /// No address of this Network is free here: a further block may come.
    Exhausted {
        /// The Network.
        network: String,
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
        let leases = store.records().flat_map(SandboxRecord::leases).collect();
        // A time beyond this one is another boot's.
        let resting = store.resting();
        let known = resting.is_some();
        let cooling = resting.into_iter().flatten().filter(|c| c.freed_at <= now.plus(LATE)).collect();
        let snapshot = Snapshot { leases, cooling };
        let mut restored = NodeAllocator::restore(node, NodeConfig::default(), [], [], snapshot);
        if !known {
            restored.allocator.rest_all(now);
        }
        for lease in &restored.clashing {
            tracing::error!(lease = %lease.holder(), network = %lease.network, addresses = %lease.addresses,
                "two records hold the same address: the other one keeps it until its pod ends");
        }
        Self { allocator: restored.allocator, store, waiting: restored.clashing }
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
        self.store.get(sandbox.as_str())
    }

    /// All records.
    pub fn records(&self) -> impl Iterator<Item = &SandboxRecord> {
        self.store.records()
    }

    /// The Networks that have attachments here.
    #[must_use]
    pub fn networks_in_use(&self) -> BTreeSet<String> {
        let plans =
            self.store.records().flat_map(|r| r.attachments().iter().map(|a| a.plan().network.clone()));
        plans.collect()
    }

    /// How many attachments a Network has here.
    #[must_use]
    pub fn attachments_of(&self, network: &str) -> usize {
        self.store
            .records()
            .flat_map(SandboxRecord::attachments)
            .filter(|a| a.plan().network == network)
            .count()
    }

    /// Leases addresses for all wanted interfaces of a sandbox, or for none. They are nobody else's until
    /// they are recorded or given back.
    ///
    /// # Errors
    /// When one cannot be had.
    pub(crate) fn lease(
        &mut self,
        pod: &Pod,
        wanted: &[Wanted],
        now: Millis,
    ) -> Result<Vec<Lease>, NotReserved> {
        let request = Request {
            sandbox: pod.sandbox.as_str().to_owned(),
            pod: pod_ref(pod),
            wants: wanted.iter().map(want).collect(),
        };
        self.allocator
            .lease(&request, now)
            .map_err(|error| lease_error(&crate::request::pod_name(pod), error))
    }

    /// Gives leases back that nothing was made with.
    pub(crate) fn cancel(&mut self, leases: &[Lease]) {
        for lease in leases {
            self.allocator.cancel(&lease.key);
        }
    }

    /// Records what is planned for a sandbox, besides what it has.
    ///
    /// # Errors
    /// When it cannot be recorded; then nothing changed.
    pub(crate) fn plan(
        &mut self,
        pod: &Pod,
        netns: &NetnsRef,
        plans: impl IntoIterator<Item = knit_ledger::AttachmentPlan>,
        now: Millis,
    ) -> Result<SandboxRecord> {
        let who = crate::request::pod_name(pod);
        let sandbox = pod.sandbox.as_str();
        let record = match self.store.get(sandbox) {
            Some(record) => {
                let mut record = record.clone();
                plans.into_iter().try_for_each(|plan| record.plan(plan)).map(|()| record)
            }
            None => SandboxRecord::planned(sandbox, pod_ref(pod), netns.clone(), now.0, plans),
        };
        let record = record.map_err(|error| {
            Error::new(Reason::Refused, format!("{who} cannot be recorded")).because(error)
        })?;
        self.store.put(record.clone()).map_err(|error| ledger_error(&who, error))?;
        Ok(record)
    }

    /// Writes a changed record.
    ///
    /// # Errors
    /// When it cannot be written; then nothing changed.
    pub fn put(&mut self, record: SandboxRecord) -> Result<(), LedgerError> {
        self.store.put(record)
    }

    /// Takes interfaces of which nothing is left out of the record, and frees their addresses. Those in
    /// `late` may still be made by a runtime that was given up: they rest longer.
    ///
    /// # Errors
    /// When that cannot be written: their addresses stay reserved, and a later pass tries again.
    pub fn forget(
        &mut self,
        sandbox: &SandboxId,
        interfaces: &[String],
        late: &[String],
        now: Millis,
    ) -> Result<(), LedgerError> {
        let mut unused: Vec<&String> = Vec::new();
        if let Some(record) = self.store.get(sandbox.as_str()) {
            let mut record = record.clone();
            // What was never attached never had a container: its addresses need no quarantine, and an ADD
            // that fails again and again must not use them all up.
            unused = interfaces
                .iter()
                .filter(|i| !late.contains(i))
                .filter(|i| record.attachment(i.as_str()).is_some_and(|a| never_attached(a.state())))
                .collect();
            let used = interfaces.iter().filter(|i| !unused.contains(i));
            self.keep_at_rest(sandbox, used.map(|i| (i, late.contains(i))), now);
            for interface in interfaces {
                // Both fail only for an interface that is not in the record, which is what is wanted.
                let _ = record.detaching(interface);
                let _ = record.gone(interface);
            }
            if record.is_empty() { self.store.remove(sandbox.as_str())? } else { self.store.put(record)? }
        }
        for interface in interfaces {
            let key = LeaseKey::new(sandbox.as_str(), interface.as_str());
            self.waiting.retain(|lease| lease.key != key);
            if unused.contains(&interface) {
                self.allocator.cancel(&key);
            } else {
                self.allocator.free(&key, freed_at(late.contains(interface), now));
            }
        }
        for lease in std::mem::take(&mut self.waiting) {
            match self.allocator.adopt(lease) {
                Ok(()) => {}
                Err(lease) => self.waiting.push(*lease),
            }
        }
        Ok(())
    }

    /// Writes down which addresses are about to rest. Where that fails they rest all the same, as long as
    /// this agent lives.
    fn keep_at_rest<'a>(
        &mut self,
        sandbox: &SandboxId,
        interfaces: impl Iterator<Item = (&'a String, bool)>,
        now: Millis,
    ) {
        let mut freed = Vec::new();
        for (interface, late) in interfaces {
            let key = LeaseKey::new(sandbox.as_str(), interface.as_str());
            let Some(lease) = self.allocator.get(&key) else { continue };
            freed.extend(lease.addresses.iter().map(|address| Cooling {
                network: lease.network.clone(),
                address,
                freed_at: freed_at(late, now),
                pod: lease.pod.clone(),
            }));
        }
        let rested = Millis(now.0.saturating_sub(NodeConfig::default().quarantine.0));
        if !freed.is_empty()
            && let Err(error) = self.store.rest(freed, rested)
        {
            tracing::warn!(
                %sandbox,
                error = &error as &dyn std::error::Error,
                "that addresses rest cannot be recorded: an agent that starts now gives them out at once"
            );
        }
    }
}

impl std::fmt::Debug for Books {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Books").field("records", &self.store.records().count()).finish_non_exhaustive()
    }
}

/// From when on an address rests.
fn freed_at(late: bool, now: Millis) -> Millis {
    if late { now.plus(LATE) } else { now }
}

/// Whether an attachment was planned, and perhaps begun, but never acknowledged.
fn never_attached(state: &knit_ledger::AttachmentState) -> bool {
    match state {
        knit_ledger::AttachmentState::Planned => true,
        knit_ledger::AttachmentState::Attached(_) => false,
        knit_ledger::AttachmentState::Detaching(made) => made.is_none(),
    }
}

/// The pod of a record, as runtimes know it.
///
/// # Errors
/// When the record's sandbox has a name that no sandbox can have.
pub fn pod_of(record: &SandboxRecord) -> Result<Pod> {
    let sandbox = SandboxId::new(record.sandbox())
        .map_err(|error| Error::new(Reason::Internal, "a record has no usable sandbox id").because(error))?;
    let pod = record.pod();
    Ok(Pod {
        sandbox,
        namespace: pod.map(|p| p.namespace.clone()),
        name: pod.map(|p| p.name.clone()),
        uid: pod.and_then(|p| p.uid.clone()),
    })
}

/// What a runtime said when it made an attachment; nothing while it is not made.
#[must_use]
pub fn made(attachment: &knit_ledger::Attachment) -> Option<Attachment> {
    match attachment.state() {
        knit_ledger::AttachmentState::Attached(made) => made.read().ok(),
        _ => None,
    }
}

/// The details of an attachment's plan.
#[must_use]
pub fn details(attachment: &knit_ledger::Attachment) -> Option<Details> {
    attachment.plan().parameters.read().ok()
}

/// What is planned for an interface, with its addresses.
pub(crate) fn plan_of(wanted: &Wanted, door: &Door, lease: &Lease) -> knit_ledger::AttachmentPlan {
    let details = Details {
        door: door.clone(),
        main: wanted.main,
        default_route: wanted.default_route,
        ports: wanted.ports.clone(),
        dns: wanted.dns.clone(),
    };
    knit_ledger::AttachmentPlan {
        interface: wanted.interface.to_string(),
        network: wanted.network.clone(),
        runtime: wanted.runtime.clone(),
        lease: Some(knit_ledger::Leased { addresses: lease.addresses, mac: lease.mac, kind: lease.kind }),
        host_interface: None,
        parameters: Opaque::of(&details).unwrap_or_default(),
    }
}

fn pod_ref(pod: &Pod) -> Option<PodRef> {
    Some(PodRef { namespace: pod.namespace.clone()?, name: pod.name.clone()?, uid: pod.uid.clone() })
}

fn want(wanted: &Wanted) -> Want {
    Want {
        addresses: knit_ipam::Addresses::from_list(&wanted.addresses),
        mac: wanted.mac,
        ..Want::new(wanted.interface.as_str(), wanted.network.as_str())
    }
}

fn lease_error(who: &str, error: LeaseError) -> NotReserved {
    let message = format!("{who} gets no address");
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
    Error::new(reason, format!("{who} cannot be recorded, so nothing is made for it")).because(error)
}
