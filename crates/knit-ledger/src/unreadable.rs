//! Records that are whole, by their checksum, but cannot be read: kept as they are, and what they hold stays
//! reserved.
//!
//! A newer agent may have written one, or a bug. It is never taken for nothing: it stays in the ledger word
//! for word until it is removed, its addresses are nobody else's, and whoever opens the ledger is told.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_types::{NetworkName, ObjectRef, Owner, PodRef, SandboxId};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::ledger::Record;
use crate::record::NetnsRef;

/// A record that cannot be read.
#[derive(Clone, Debug)]
pub struct Unreadable {
    key: String,
    why: String,
    text: Box<RawValue>,
}

/// What a record holds that cannot be read, as far as it can be made out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Holding {
    /// The Network; none if that cannot be made out either.
    pub network: Option<NetworkName>,
    /// Addresses. Gateways and name servers may be among them: better too many than one too few.
    pub addresses: Vec<IpAddr>,
}

/// An interface that a record is of that cannot be read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HeldInterface {
    /// The Network.
    pub network: NetworkName,
    /// Whether it is the pod's main one.
    pub main: bool,
    /// The interface's own addresses, and no others.
    pub addresses: Vec<IpAddr>,
}

// === impl Unreadable ===

impl Unreadable {
    /// What is left of a record that could not be read for this reason.
    pub(crate) fn new<R: Record>(text: &RawValue, why: &serde_json::Error) -> Self {
        let value: Value = serde_json::from_str(text.get()).unwrap_or_default();
        let key = R::key_in(&value).unwrap_or_else(
            // Nothing to find it by: the same record has the same key each time.
            || format!("unknown:{:08x}", crc32c::crc32c(text.get().as_bytes())),
        );
        let why = match value.get("format").and_then(Value::as_u64) {
            Some(found) if found > u64::from(R::FORMAT) => newer(found, R::FORMAT),
            _ => why.to_string(),
        };
        Self { key, why, text: text.to_owned() }
    }

    /// What it is found by: the key of its owner, where that can be made out.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Why it cannot be read.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// The record, word for word.
    #[must_use]
    pub fn text(&self) -> &RawValue {
        &self.text
    }

    /// The sandbox that it is of, where that can be made out and is one.
    #[must_use]
    pub fn sandbox(&self) -> Option<SandboxId> {
        SandboxId::new(&self.key).ok()
    }

    /// The claim that it is of, where that can be made out and it is one's.
    #[must_use]
    pub fn claim(&self) -> Option<ObjectRef> {
        let claim: ObjectRef = serde_json::from_value(self.value().get("claim")?.clone()).ok()?;
        (Owner::claim(claim.clone()).key() == self.key).then_some(claim)
    }

    /// The pod that it is of, where that can be made out.
    #[must_use]
    pub fn pod(&self) -> Option<PodRef> {
        serde_json::from_value(self.value().get("pod")?.clone()).ok()
    }

    /// The network namespace that it is of, where that can be made out.
    #[must_use]
    pub fn netns(&self) -> Option<NetnsRef> {
        serde_json::from_value(self.value().get("netns")?.clone()).ok()
    }

    /// What it holds: nobody else may get these addresses.
    #[must_use]
    pub fn holds(&self) -> Vec<Holding> {
        let value = self.value();
        let parts = ["attachments", "leases"].iter().find_map(|field| value.get(*field)?.as_array());
        let Some(parts) = parts else {
            let mut addresses = Vec::new();
            collect(&value, &mut addresses);
            return vec![Holding { network: None, addresses }];
        };
        let holding = |part: &Value| {
            let network = network(part);
            let mut addresses = Vec::new();
            collect(part, &mut addresses);
            Holding { network, addresses }
        };
        parts.iter().map(holding).collect()
    }

    /// The interfaces that it is of, none for a reservation; nothing if one of them cannot be made out.
    #[must_use]
    pub fn interfaces(&self) -> Option<Vec<HeldInterface>> {
        let value = self.value();
        match value.get("attachments") {
            Some(parts) => parts.as_array()?.iter().map(interface).collect(),
            None => value.get("leases").map(|_| Vec::new()),
        }
    }

    /// When its sandbox was made, where that can be made out.
    #[must_use]
    pub fn created_at(&self) -> Option<u64> {
        self.value().get("created_at")?.as_u64()
    }

    fn value(&self) -> Value {
        serde_json::from_str(self.text.get()).unwrap_or_default()
    }
}

/// The same record, word for word.
impl PartialEq for Unreadable {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.text.get() == other.text.get()
    }
}

impl Eq for Unreadable {}

/// What is wrong with a record of a newer form.
pub(crate) fn newer(found: u64, known: u32) -> String {
    format!("it has format {found}, and this agent knows up to {known}: run the newer version again")
}

fn network(part: &Value) -> Option<NetworkName> {
    part.get("network")?.as_str()?.parse().ok()
}

fn interface(part: &Value) -> Option<HeldInterface> {
    let network = network(part)?;
    let main = part.pointer("/parameters/main").and_then(Value::as_bool);
    let main = main.unwrap_or_else(|| part.get("interface").and_then(Value::as_str) == Some("eth0"));
    let mut addresses = Vec::new();
    match part.get("lease").filter(|lease| !lease.is_null()) {
        Some(lease) => ["ipv4", "ipv6", "further"]
            .iter()
            .filter_map(|family| lease.get(*family))
            .for_each(|address| collect(address, &mut addresses)),
        // A runtime that gives out addresses itself says which when it has.
        None => {
            let made = part.pointer("/made/addresses").and_then(Value::as_array);
            made.into_iter().flatten().for_each(|made| match made.get("net") {
                Some(net) => collect(net, &mut addresses),
                None => collect(made, &mut addresses),
            });
        }
    }
    // One that was never attached may have none.
    let may_lack = part.get("state").and_then(Value::as_str).is_some_and(|state| state != "attached");
    (may_lack || !addresses.is_empty()).then_some(HeldInterface { network, main, addresses })
}

/// All addresses that a value mentions, wherever. Of a prefix it is the address that counts, where it is one
/// interface's.
fn collect(value: &Value, found: &mut Vec<IpAddr>) {
    match value {
        Value::String(text) => {
            let prefix =
                || text.parse::<IpNet>().ok().filter(|net| net.addr() != net.network() || whole(net));
            let address = text.parse().ok().or_else(|| prefix().map(|net| net.addr()));
            found.extend(address.filter(|address| !found.contains(address)));
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, found)),
        Value::Object(fields) => fields.values().for_each(|value| collect(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn whole(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}
