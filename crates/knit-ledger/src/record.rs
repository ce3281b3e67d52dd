//! What the agent keeps in the ledger: one sandbox, its attachments, and how far each has come.
//!
//! An attachment is planned (recorded, perhaps half made), attached, or being detached; when it is gone it is
//! no longer in the record, and a record with no attachment is removed. Only the steps planned → attached →
//! detaching and planned → detaching exist. Attachments of one sandbox move alone, because a Network can be
//! plugged into a running pod.

use std::path::PathBuf;

use knit_ipam::{Addresses, Cooling, Lease, LeaseKey, LeaseKind, Mac, PodRef};
use serde::{Deserialize, Serialize};

use crate::ledger::Record;
use crate::opaque::Opaque;

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
    /// One of each family of the Network.
    #[serde(flatten)]
    pub addresses: Addresses,
    /// The MAC that goes with them.
    pub mac: Mac,
    /// How it came to them.
    pub kind: LeaseKind,
}

/// What is decided about an attachment before anything of it is made: enough to find and remove all of it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AttachmentPlan {
    /// The interface's name inside the pod; unique in its sandbox.
    pub interface: String,
    /// The Network.
    pub network: String,
    /// The runtime that serves it, such as `knit.dev/linux`.
    pub runtime: String,
    /// Its addresses; none where the runtime gives them itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Leased>,
    /// The name of its other end, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_interface: Option<String>,
    /// What the runtime was told and wants to see again when it detaches. Opaque here.
    #[serde(default, skip_serializing_if = "Opaque::is_none")]
    pub parameters: Opaque,
}

/// How far an attachment has come.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state", content = "made")]
pub enum AttachmentState {
    /// Recorded; some of it may be there.
    Planned,
    /// All of it is there; with what the runtime said about it. Opaque here.
    Attached(Opaque),
    /// It is being removed; some of it may be there.
    Detaching(Opaque),
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
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "RawRecord")]
pub struct SandboxRecord {
    sandbox: String,
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

/// As it is read, before it is checked.
#[derive(Deserialize)]
struct RawRecord {
    sandbox: String,
    #[serde(default)]
    pod: Option<PodRef>,
    netns: NetnsRef,
    created_at: u64,
    attachments: Vec<Attachment>,
}

/// A step that an attachment cannot take.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransitionError {
    /// Two attachments of one name.
    #[error("sandbox {sandbox} has two attachments for interface {interface}: give each a name of its own")]
    Duplicate {
        /// The sandbox.
        sandbox: String,
        /// The interface.
        interface: String,
    },
    /// No attachment of that name.
    #[error("sandbox {sandbox} has no attachment for interface {interface}")]
    Unknown {
        /// The sandbox.
        sandbox: String,
        /// The interface.
        interface: String,
    },
    /// An attachment that is on its way out.
    #[error(
        "interface {interface} of sandbox {sandbox} is being detached: wait until it is gone, then attach \
         again"
    )]
    Leaving {
        /// The sandbox.
        sandbox: String,
        /// The interface.
        interface: String,
    },
    /// Gone before it was marked.
    #[error(
        "interface {interface} of sandbox {sandbox} is forgotten without having been marked as leaving: mark \
         it first"
    )]
    NotLeaving {
        /// The sandbox.
        sandbox: String,
        /// The interface.
        interface: String,
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
}

// === impl SandboxRecord ===

impl SandboxRecord {
    /// A sandbox with what is planned for it. `created_at` is in milliseconds of the clock that leases use.
    pub fn planned(
        sandbox: impl Into<String>,
        pod: Option<PodRef>,
        netns: NetnsRef,
        created_at: u64,
        plans: impl IntoIterator<Item = AttachmentPlan>,
    ) -> Result<Self, TransitionError> {
        let mut record = Self { sandbox: sandbox.into(), pod, netns, created_at, attachments: Vec::new() };
        for plan in plans {
            record.plan(plan)?;
        }
        Ok(record)
    }

    /// Plans one more attachment.
    pub fn plan(&mut self, plan: AttachmentPlan) -> Result<(), TransitionError> {
        let attachment = Attachment { plan, state: AttachmentState::Planned };
        self.insert(attachment)
    }

    /// Notes that all of an attachment is there, with what the runtime says about it. Again is no error.
    pub fn attached(&mut self, interface: &str, made: Opaque) -> Result<(), TransitionError> {
        let sandbox = self.sandbox.clone();
        let attachment = self.find(interface)?;
        if matches!(attachment.state, AttachmentState::Detaching(_)) {
            return Err(TransitionError::Leaving { sandbox, interface: interface.to_owned() });
        }
        attachment.state = AttachmentState::Attached(made);
        Ok(())
    }

    /// Notes that an attachment is about to be removed. Again is no error.
    pub fn detaching(&mut self, interface: &str) -> Result<(), TransitionError> {
        self.find(interface)?.leave();
        Ok(())
    }

    /// Notes that all attachments are about to be removed.
    pub fn detach_all(&mut self) {
        self.attachments.iter_mut().for_each(Attachment::leave);
    }

    /// Notes that nothing of an attachment is left. The record is to be removed once this was the last one.
    pub fn gone(&mut self, interface: &str) -> Result<(), TransitionError> {
        let sandbox = self.sandbox.clone();
        if !matches!(self.find(interface)?.state, AttachmentState::Detaching(_)) {
            return Err(TransitionError::NotLeaving { sandbox, interface: interface.to_owned() });
        }
        self.attachments.retain(|a| a.plan.interface != interface);
        Ok(())
    }

    /// The sandbox's id.
    #[must_use]
    pub fn sandbox(&self) -> &str {
        &self.sandbox
    }

    /// The pod, where it is known.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        self.pod.as_ref()
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
    pub fn attachment(&self, interface: &str) -> Option<&Attachment> {
        self.attachments.iter().find(|a| a.plan.interface == interface)
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
                addresses: leased.addresses,
                mac: leased.mac,
                kind: leased.kind,
            })
        })
    }

    fn insert(&mut self, attachment: Attachment) -> Result<(), TransitionError> {
        let interface = attachment.plan.interface.clone();
        if self.attachment(&interface).is_some() {
            return Err(TransitionError::Duplicate { sandbox: self.sandbox.clone(), interface });
        }
        self.attachments.push(attachment);
        Ok(())
    }

    fn find(&mut self, interface: &str) -> Result<&mut Attachment, TransitionError> {
        let sandbox = &self.sandbox;
        self.attachments.iter_mut().find(|a| a.plan.interface == interface).ok_or_else(|| {
            TransitionError::Unknown { sandbox: sandbox.clone(), interface: interface.to_owned() }
        })
    }
}

impl Attachment {
    fn leave(&mut self) {
        let made = match std::mem::replace(&mut self.state, AttachmentState::Planned) {
            AttachmentState::Planned => Opaque::NONE,
            AttachmentState::Attached(made) | AttachmentState::Detaching(made) => made,
        };
        self.state = AttachmentState::Detaching(made);
    }
}

impl TryFrom<RawRecord> for SandboxRecord {
    type Error = TransitionError;

    fn try_from(raw: RawRecord) -> Result<Self, Self::Error> {
        let RawRecord { sandbox, pod, netns, created_at, attachments } = raw;
        let mut record = Self { sandbox, pod, netns, created_at, attachments: Vec::new() };
        for attachment in attachments {
            record.insert(attachment)?;
        }
        Ok(record)
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

impl Record for SandboxRecord {
    fn key(&self) -> &str {
        &self.sandbox
    }
}
