//! Small types that several kinds share.

use std::fmt;
use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An address family.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, JsonSchema, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Family {
    /// IP version 4.
    IPv4,
    /// IP version 6.
    IPv6,
}

/// A route inside a pod.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// Where packets are to go: an address range, for example `192.0.2.0/24`.
    #[schemars(length(min = 3, max = 43))]
    pub destination: String,
    /// The next hop; the Network's gateway if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 39))]
    pub via: Option<String>,
}

/// How many addresses of one family there are.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AddressCounts {
    /// The family that is counted.
    pub family: Family,
    /// Addresses that pods and routers have.
    pub used: i64,
    /// Addresses that a pod could get; at most 2^53 - 1, which stands for "that many or more".
    pub free: i64,
}

// === impl Family ===

impl Family {
    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::IPv4 } else { Self::IPv6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IPv4 => "IPv4",
            Self::IPv6 => "IPv6",
        })
    }
}
