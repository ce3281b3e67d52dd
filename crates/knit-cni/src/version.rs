//! The versions of the CNI specification that Knit speaks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A version of the CNI specification. Later ones are greater.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum Version {
    /// 0.3.1: results with interfaces.
    V0_3_1,
    /// 0.4.0: CHECK.
    V0_4_0,
    /// 1.0.0: addresses without a version.
    V1_0_0,
    /// 1.1.0: GC, STATUS, MTU in results.
    V1_1_0,
}

/// A version that Knit does not speak.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("CNI version {0:?} is not supported: set cniVersion to one of 0.3.1, 0.4.0, 1.0.0, 1.1.0")]
pub struct UnsupportedVersion(pub String);

// === impl Version ===

impl Version {
    /// All versions, the oldest first.
    pub const ALL: [Self; 4] = [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    /// The newest version.
    pub const LATEST: Self = Self::V1_1_0;

    /// The version as the specification writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl FromStr for Version {
    type Err = UnsupportedVersion;

    fn from_str(text: &str) -> Result<Self, UnsupportedVersion> {
        let found = Self::ALL.into_iter().find(|v| v.as_str() == text);
        found.ok_or_else(|| UnsupportedVersion(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for Version {
    type Error = UnsupportedVersion;

    fn try_from(text: String) -> Result<Self, UnsupportedVersion> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.as_str().to_owned()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
