//! One record of the ledger: of a sandbox, or of what is reserved for an owner that has none yet. Each
//! belongs to an [`Owner`], and is found by it.

use knit_ipam::{Lease, LeaseKey};
use knit_types::{InterfaceName, NetworkName, ObjectRef, Owner, PodRef, SandboxId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ledger::Record;
use crate::record::{Attachment, Leased, NetnsRef, SandboxRecord, TransitionError};
use crate::unreadable::newer;

/// The form of records that belong to a claim or an object, that have a lease from one, or several addresses
/// of a family.
pub(crate) const SECOND_FORMAT: u32 = 2;

/// A record of the ledger.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "RawEntry", untagged)]
pub enum Entry {
    /// What was made for a sandbox, or is about to be.
    Sandbox(SandboxRecord),
    /// What is reserved for an owner that has no sandbox.
    Reservation(Reservation),
}

/// What is reserved for a claim or an object that has no sandbox yet, or no longer.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Reservation {
    format: u32,
    #[serde(skip)]
    key: String,
    #[serde(flatten)]
    owner: Owner,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<PodRef>,
    created_at: u64,
    leases: Vec<ReservedLease>,
}

/// One interface that is to be, with its addresses.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ReservedLease {
    /// The interface's name; unique in its reservation.
    pub interface: InterfaceName,
    /// Whether its owner asked for that name: then it is this one or none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub named: bool,
    /// The Network.
    pub network: NetworkName,
    /// The runtime that serves it.
    pub runtime: String,
    /// Whether the pod's default route is to go out there.
    #[serde(default)]
    pub default_route: bool,
    /// Its addresses.
    pub lease: Leased,
}

/// As it is read, before it is checked.
#[derive(Deserialize)]
struct RawEntry {
    #[serde(default)]
    format: Option<u32>,
    #[serde(default)]
    sandbox: Option<SandboxId>,
    #[serde(default)]
    claim: Option<ObjectRef>,
    #[serde(default)]
    object: Option<ObjectRef>,
    #[serde(default)]
    pod: Option<PodRef>,
    #[serde(default)]
    netns: Option<NetnsRef>,
    created_at: u64,
    #[serde(default)]
    attachments: Option<Vec<Attachment>>,
    #[serde(default)]
    leases: Option<Vec<ReservedLease>>,
}

// === impl Reservation ===

impl Reservation {
    /// Nothing yet, for a claim or an object. `None` for a sandbox: what a sandbox has is in its own record.
    #[must_use]
    pub fn new(owner: Owner, created_at: u64) -> Option<Self> {
        let (format, key) = (SECOND_FORMAT, owner.key());
        let reservation = Self { format, key, owner, pod: None, created_at, leases: Vec::new() };
        reservation.owner.sandbox().is_none().then_some(reservation)
    }

    /// Reserves one more.
    ///
    /// # Errors
    /// When there is one by that name.
    pub fn add(&mut self, lease: ReservedLease) -> Result<(), TransitionError> {
        if self.lease(&lease.interface).is_some() {
            let (owner, interface) = (self.owner.clone(), lease.interface);
            return Err(TransitionError::Duplicate { owner, interface });
        }
        self.leases.push(lease);
        Ok(())
    }

    /// Takes one out.
    pub fn take(&mut self, interface: &InterfaceName) -> Option<ReservedLease> {
        let at = self.leases.iter().position(|lease| lease.interface == *interface)?;
        Some(self.leases.remove(at))
    }

    /// Whose it is.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The pod that it is for, or that had it last, where that is known.
    #[must_use]
    pub fn pod(&self) -> Option<&PodRef> {
        self.pod.as_ref()
    }

    /// Notes the pod that it is for.
    pub fn set_pod(&mut self, pod: Option<PodRef>) {
        self.pod = pod;
    }

    /// When it was recorded first.
    #[must_use]
    pub fn created_at(&self) -> u64 {
        self.created_at
    }

    /// What is reserved.
    #[must_use]
    pub fn reserved(&self) -> &[ReservedLease] {
        &self.leases
    }

    /// What is reserved for an interface.
    #[must_use]
    pub fn lease(&self, interface: &InterfaceName) -> Option<&ReservedLease> {
        self.leases.iter().find(|lease| lease.interface == *interface)
    }

    /// Whether nothing is left to record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Its leases, as the allocator takes them at start.
    pub fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.leases.iter().map(|reserved| Lease {
            key: LeaseKey::new(self.owner.clone(), reserved.interface.clone()),
            pod: None,
            network: reserved.network.clone(),
            addresses: reserved.lease.addresses.clone(),
            mac: reserved.lease.mac,
            kind: reserved.lease.kind,
        })
    }
}

// === impl Entry ===

impl Entry {
    /// Whose it is.
    #[must_use]
    pub fn owner(&self) -> Owner {
        match self {
            Self::Sandbox(record) => record.owner(),
            Self::Reservation(reservation) => reservation.owner.clone(),
        }
    }

    /// The record of a sandbox, if it is one.
    #[must_use]
    pub fn sandbox(&self) -> Option<&SandboxRecord> {
        match self {
            Self::Sandbox(record) => Some(record),
            Self::Reservation(_) => None,
        }
    }

    /// The reservation, if it is one.
    #[must_use]
    pub fn reservation(&self) -> Option<&Reservation> {
        match self {
            Self::Sandbox(_) => None,
            Self::Reservation(reservation) => Some(reservation),
        }
    }
}

impl From<SandboxRecord> for Entry {
    fn from(record: SandboxRecord) -> Self {
        Self::Sandbox(record)
    }
}

impl From<Reservation> for Entry {
    fn from(reservation: Reservation) -> Self {
        Self::Reservation(reservation)
    }
}

impl Record for Entry {
    const FORMAT: u32 = SECOND_FORMAT;

    fn key(&self) -> &str {
        match self {
            Self::Sandbox(record) => record.sandbox().as_str(),
            Self::Reservation(reservation) => &reservation.key,
        }
    }

    fn key_in(record: &Value) -> Option<String> {
        let object = |field: &str| serde_json::from_value::<ObjectRef>(record.get(field)?.clone()).ok();
        let sandbox = record.get("sandbox").and_then(Value::as_str).map(str::to_owned);
        sandbox
            .or_else(|| object("claim").map(|claim| Owner::claim(claim).key()))
            .or_else(|| object("object").map(|object| Owner::object(object).key()))
    }
}

impl TryFrom<RawEntry> for Entry {
    type Error = String;

    fn try_from(raw: RawEntry) -> Result<Self, Self::Error> {
        if let Some(format) = raw.format.filter(|format| *format > Self::FORMAT) {
            return Err(newer(format.into(), Self::FORMAT));
        }
        let missing = |what: &str| format!("it has no {what}");
        let owner = match (raw.sandbox, raw.claim, raw.object) {
            (Some(sandbox), None, None) => {
                let netns = raw.netns.ok_or_else(|| missing("netns"))?;
                let attachments = raw.attachments.ok_or_else(|| missing("attachments"))?;
                let record = SandboxRecord::checked(sandbox, raw.pod, netns, raw.created_at, attachments);
                return record.map(Self::Sandbox).map_err(|error| error.to_string());
            }
            (None, Some(claim), None) => Owner::claim(claim),
            (None, None, Some(object)) => Owner::object(object),
            (None, None, None) => return Err("it has no owner".to_owned()),
            _ => return Err("it has two owners".to_owned()),
        };
        let mut reservation =
            Reservation::new(owner, raw.created_at).ok_or_else(|| missing("claim or object"))?;
        reservation.set_pod(raw.pod);
        for lease in raw.leases.ok_or_else(|| missing("leases"))? {
            reservation.add(lease).map_err(|error| error.to_string())?;
        }
        Ok(Self::Reservation(reservation))
    }
}
