//! A CNI error: a code that container runtimes know, and words for people.

use serde::{Deserialize, Serialize};

use crate::version::Version;

/// The codes. Below 100 the specification says what they mean; from 100 on they are Knit's.
pub mod code {
    /// The configuration's version is not spoken here.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field of the configuration is not supported; the message names it and its value.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// The container is unknown or does not exist.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// An environment variable is missing or wrong.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO: u32 = 5;
    /// What came is not JSON, or not of the expected form.
    pub const DECODE: u32 = 6;
    /// The configuration is not valid.
    pub const INVALID_CONFIG: u32 = 7;
    /// The same call may succeed later.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: containers cannot be added now.
    pub const NOT_AVAILABLE: u32 = 50;
    /// STATUS: containers cannot be added, and running ones may have limited connectivity.
    pub const NOT_AVAILABLE_LIMITED: u32 = 51;
    /// The pod's namespace may not use a Network that the pod asks for.
    pub const NOT_ALLOWED: u32 = 100;
    /// The pod asks for something that cannot be had: a Network, an address, a MAC, an interface name.
    pub const REFUSED: u32 = 101;
    /// CHECK: an interface is not as it was made.
    pub const DAMAGED: u32 = 102;
    /// Making the interface failed.
    pub const ATTACH_FAILED: u32 = 103;
    /// Anything else that went wrong inside the agent.
    pub const INTERNAL: u32 = 104;
}

/// An error as a CNI plugin prints it, without its version.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
#[error("{msg}")]
pub struct CniError {
    /// The code; see [`code`].
    pub code: u32,
    /// What happened, to which pod and Network, and what to do.
    pub msg: String,
    /// More, for those who look closer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

// === impl CniError ===

impl CniError {
    /// An error with a code and a message.
    #[must_use]
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// The same error with details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// What a plugin prints on its standard output.
    #[must_use]
    pub fn to_json(&self, version: Version) -> serde_json::Value {
        let mut json = serde_json::json!({ "cniVersion": version, "code": self.code, "msg": self.msg });
        if !self.details.is_empty() {
            json["details"] = self.details.as_str().into();
        }
        json
    }
}
