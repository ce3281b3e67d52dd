//! What the agent keeps of a sandbox: its attachments, and how far each has come.
//!
//! An attachment is planned (recorded, perhaps half made), attached, or being detached; when it is gone it is
//! no longer in the record, and a record with no attachment is removed. Only the steps planned → attached →
//! detaching and planned → detaching exist. Attachments of one sandbox move alone, because a Network can be
//! plugged into a running pod.

use std::path::PathBuf;

use knit_ipam::{Cooling, Lease, LeaseKey, LeaseKind};
use knit_types::{
    AddressList, Attachment as Made, InterfaceName, Mac, NetworkName, Owner, Pod, PodRef, SandboxId,
};
use serde::{Deserialize, Serialize};

use crate::details::{Details, Door};
use crate::ledger::Record;
use crate::shared::Shared;

/// A network namespace: its path may come to mean another one, its inode and device do not while it exists.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct NetnsRef {
    /// Where it is mounted.
    pub path: PathBuf,
    /// Its inode.
    pub inode: u64,
    /// The device of that inode.
    pub device: u64,
}

/// The addresses and the MAC of an attachment.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Leased {
    /// At least one of each family of the Network.
    #[serde(flatten)]
    pub addresses: AddressList,
    /// The MAC that goes with them.
    pub mac: Mac,
    /// How it came to them.
    pub kind: LeaseKind,
}

/// Whom a sandbox has a lease from. It goes back there when the interface is gone.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Loan {
    /// The claim, or the object, that reserved it.
    #[serde(flatten)]
    pub from: Owner,
    /// The interface that it was reserved for.
    pub interface: InterfaceName,
    /// Whether that name was asked for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub named: bool,
}

/// What is decided about an attachment before anything of it is made: enough to find and remove all of it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachmentPlan {
    /// The interface's name inside the pod; unique in its sandbox.
    pub interface: InterfaceName,
    /// The Network.
    pub network: NetworkName,
    /// The runtime that serves it, such as `knit.dev/linux`.
    pub runtime: String,
    /// Its addresses; none where the runtime gives them itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Leased>,
    /// Whom it has them from, where they were a claim's before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loan: Option<Box<Loan>>,
    /// The name of its other end, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_interface: Option<String>,
    /// Who asked for it, and what it takes to make it again.
    #[serde(rename = "parameters")]
    pub details: Shared<Details>,
}

/// How far an attachment has come.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state", content = "made")]
pub enum AttachmentState {
    /// Recorded; some of it may be there.
    Planned,
    /// All of it is there; with what the runtime said about it.
    Attached(Shared<Made>),
    /// It is being removed; some of it may be there. With what the runtime said, if all of it was.
    Detaching(Option<Shared<Made>>),
}

/// One attachment.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Attachment {
    #[serde(flatten)]
    plan: AttachmentPlan,
    #[serde(flatten)]
    state: AttachmentState,
}

/// What was made for one sandbox, or is about to be.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct SandboxRecord {
    /// Only where it has something that the first form has no place for.
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<u32>,
    sandbox: SandboxId,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<PodRef>,
    netns: NetnsRef,
    created_at: u64,
    attachments: Vec<Attachment>,
}

/// An address that was freed a moment ago and rests: another pod gets it only after a while, also from the
/// next agent.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Resting {
    /// The Network and the address.
    key: String,
    #[serde(flatten)]
    cooling: Cooling,
}

/// A step that an attachment cannot take.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransitionError {
    /// Two attachments of one name.
    #[error("{owner} has two attachments for interface {interface}: give each a different name")]
    Duplicate {
        /// The owner.
        owner: Owner,
        /// The interface.
        interface: InterfaceName,
    },
    /// No attachment of that name.
    #[error("{owner} has no attachment for interface {interface}")]
    Unknown {
        /// The owner.
        owner: Owner,
        /// The interface.
        interface: InterfaceName,
    },
    /// An attachment that is on its way out.
    #[error("interface {interface} of {owner} is being detached: wait until it is gone, then attach again")]
    Leaving {
        /// The owner.
        owner: Owner,
        /// The interface.
        interface: InterfaceName,
    },
    /// Gone before it was marked.
    #[error(
        "interface {interface} of {owner} was removed without having been marked as leaving: mark it first"
    )]
    NotLeaving {
        /// The owner.
        owner: Owner,
        /// The interface.
        interface: InterfaceName,
    },
}

// === impl Attachment ===

impl Attachment {
    /// What was decided about it.
    #[must_use]
    pub fn plan(&self) -> &AttachmentPlan {
        &self.plan
    }

    /// How far it has come.
    #[must_use]
    pub fn state(&self) -> &AttachmentState {
        &self.state
    }

    /// Who asked for it, and what it takes to make it again.
    #[must_use]
    pub fn details(&self) -> &Details {
        &self.plan.details
    }

    /// What the runtime said when it made it; nothing while it is not made, or is leaving.
    #[must_use]
    pub fn made(&self) -> Option<&Made> {
        match &self.state {
            AttachmentState::Attached(made) => Some(made),
            AttachmentState::Planned | AttachmentState::Detaching(_) => None,
        }
    }

    fn leave(&mut self) {
        let made = match std::mem::replace(&mut self.state, AttachmentState::Planned) {
            AttachmentState::Planned => None,
            AttachmentState::Attached(made) => Some(made),
            AttachmentState::Detaching(made) => made,
        };
        self.state = AttachmentState::Detaching(made);
    }
}

// === impl SandboxRecord ===

impl SandboxRecord {
    /// A sandbox with what is planned for it. `created_at` is in milliseconds of the clock that leases use.
    pub fn planned(
        sandbox: SandboxId,
        pod: Option<PodRef>,
        netns: NetnsRef,
        created_at: u64,
        plans: impl IntoIterator<Item = AttachmentPlan>,
    ) -> Result<Self, TransitionError> {
        let mut record = Self { format: None, sandbox, pod, netns, created_at, attachments: Vec::new() };
        for plan in plans {
            record.plan(plan)?;
        }
        Ok(record)
    }

    /// As it was read, once it is checked.
    pub(crate) fn checked(
        sandbox: SandboxId,
        pod: Option<PodRef>,
        netns: NetnsRef,
        created_at: u64,
        attachments: Vec<Attachment>,
    ) -> Result<Self, TransitionError> {
        let mut record = Self { format: None, sandbox, pod, netns, created_at, attachments: Vec::new() };
        for attachment in attachments {
            record.insert(attachment)?;
        }
        Ok(record)
    }

    /// Plans one more attachment.
    pub fn plan(&mut self, plan: AttachmentPlan) -> Result<(), TransitionError> {
        self.insert(Attachment { plan, state: AttachmentState::Planned })
    }

    /// Notes that all of an attachment is there, with what the runtime says about it. Again is no error.
    pub fn attached(
        &mut self,
        interface: &InterfaceName,
        made: impl Into<Shared<Made>>,
    ) -> Result<(), TransitionError> {
        let owner = self.owner();
        let attachment = self.find(interface)?;
        if matches!(attachment.state, AttachmentState::Detaching(_)) {
            return Err(TransitionError::Leaving { owner, interface: interface.clone() });
        }
        attachment.state = AttachmentState::Attached(made.into());
        Ok(())
    }

    /// Notes that an attachment is about to be removed. Again is no error.
    pub fn detaching(&mut self, interface: &InterfaceName) -> Result<(), TransitionError> {
        self.find(interface)?.leave();
        Ok(())
    }

    /// Notes that nothing of an attachment is left. The record is to be removed once this was the last one.
    pub fn gone(&mut self, interface: &InterfaceName) -> Result<(), TransitionError> {
        let owner = self.owner();
        if !matches!(self.find(interface)?.state, AttachmentState::Detaching(_)) {
            return Err(TransitionError::NotLeaving { owner, interface: interface.clone() });
        }
        self.attachments.retain(|a| a.plan.interface != *interface);
        self.note_format();
        Ok(())
    }

    /// Notes who asked for an attachment, where that was not known.
    pub fn asked_by(&mut self, interface: &InterfaceName, door: Door) -> Result<(), TransitionError> {
        let attachment = self.find(interface)?;
        let details = Details { door, ..(*attachment.plan.details).clone() };
        attachment.plan.details = Shared::new(details);
        Ok(())
    }

    /// Notes whom an attachment has its lease from, where that was not known.
    pub fn lent(&mut self, interface: &InterfaceName, loan: Loan) -> Result<(), TransitionError> {
        self.find(interface)?.plan.loan = Some(Box::new(loan));
        self.note_format();
        Ok(())
    }

    /// Notes whose sandbox it is, where that was not known.
    pub fn of_pod(&mut self, pod: PodRef) {
        self.pod.get_or_insert(pod);
    }

    /// Whether it was made of what was found in the kernel after the ledger was lost, and it is not known
    /// which pod's it is.
    #[must_use]
    pub fn is_a_strangers(&self) -> bool {
        let found = |attachment: &Attachment| match &attachment.details().door {
            Door::Cni(configuration) => configuration.is_empty(),
            // Those are always for a pod.
            Door::Object(_) => true,
            Door::Kni | Door::Nri => false,
        };
        self.pod.is_none() && self.attachments.iter().any(found)
    }

    /// The sandbox's id.
    #[must_use]
    pub fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }

    /// Whose leases its are.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::Sandbox(self.sandbox.clone())
    }

    /// Whom an attachment goes with: the sandbox as a whole, or the object or claim that it is there for.
    #[must_use]
    pub fn goes_with(&self, attachment: &Attachment) -> Owner {
        match (&attachment.plan.loan, &attachment.details().door) {
            (Some(loan), _) => loan.from.clone(),
            (None, Door::Object(door)) => Owner::object(door.object()),
            (None, Door::Cni(_) | Door::Kni | Door::Nri) => self.owner(),
        }
    }

    /// The pod, where it is known.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        self.pod.as_ref()
    }

    /// The pod, as runtimes know it.
    #[must_use]
    pub fn runtime_pod(&self) -> Pod {
        let pod = self.pod.as_ref();
        Pod {
            sandbox: self.sandbox.clone(),
            namespace: pod.map(|p| p.namespace.clone()),
            name: pod.map(|p| p.name.clone()),
            uid: pod.and_then(|p| p.uid.clone()),
        }
    }

    /// Its network namespace.
    #[must_use]
    pub fn netns(&self) -> &NetnsRef {
        &self.netns
    }

    /// When it was recorded first.
    #[must_use]
    pub fn created_at(&self) -> u64 {
        self.created_at
    }

    /// Its attachments, in the order in which they were planned.
    #[must_use]
    pub fn attachments(&self) -> &[Attachment] {
        &self.attachments
    }

    /// The attachment of an interface.
    #[must_use]
    pub fn attachment(&self, interface: &InterfaceName) -> Option<&Attachment> {
        self.attachments.iter().find(|a| a.plan.interface == *interface)
    }

    /// Whether nothing is left to record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.attachments.is_empty()
    }

    /// Whether all of it is there and none of it is leaving.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.attachments.iter().all(|a| matches!(a.state, AttachmentState::Attached(_)))
    }

    /// Its leases, as the allocator takes them at start. Those that are leaving are among them: their
    /// addresses are free only when they are gone.
    pub fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.attachments.iter().filter_map(|attachment| {
            let plan = &attachment.plan;
            let leased = plan.lease.as_ref()?;
            Some(Lease {
                key: LeaseKey::new(self.sandbox.clone(), plan.interface.clone()),
                pod: self.pod.clone(),
                network: plan.network.clone(),
                addresses: leased.addresses.clone(),
                mac: leased.mac,
                kind: leased.kind,
            })
        })
    }

    fn insert(&mut self, attachment: Attachment) -> Result<(), TransitionError> {
        let interface = attachment.plan.interface.clone();
        if self.attachment(&interface).is_some() {
            return Err(TransitionError::Duplicate { owner: self.owner(), interface });
        }
        self.attachments.push(attachment);
        self.note_format();
        Ok(())
    }

    fn find(&mut self, interface: &InterfaceName) -> Result<&mut Attachment, TransitionError> {
        let owner = Owner::Sandbox(self.sandbox.clone());
        let found = self.attachments.iter_mut().find(|a| a.plan.interface == *interface);
        found.ok_or_else(|| TransitionError::Unknown { owner, interface: interface.clone() })
    }

    /// An agent that knows the first form only must not take this for one of those.
    fn note_format(&mut self) {
        let second = |attachment: &Attachment| {
            let plan = &attachment.plan;
            plan.loan.is_some() || plan.lease.as_ref().is_some_and(|lease| lease.addresses.has_further())
        };
        self.format = self.attachments.iter().any(second).then_some(crate::entry::SECOND_FORMAT);
    }
}

// === impl Resting ===

impl Resting {
    /// What is kept of a freed address.
    #[must_use]
    pub fn new(cooling: Cooling) -> Self {
        Self { key: format!("{} {}", cooling.network, cooling.address), cooling }
    }

    /// The address, since when, and whose it was.
    #[must_use]
    pub fn cooling(&self) -> &Cooling {
        &self.cooling
    }
}

impl Record for Resting {
    fn key(&self) -> &str {
        &self.key
    }
}
