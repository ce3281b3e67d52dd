//! What a case is.

use futures::future::BoxFuture;
use knit_runtime::{Topology, feature};
pub(crate) use knit_types::chain;

use crate::bed::Bed;
use crate::report::Outcome;

/// One promise of the protocol.
pub struct Case {
    /// Its name, in the report forever.
    pub name: &'static str,
    /// Which profile it belongs to.
    pub profile: Profile,
    /// What is promised, in words.
    pub promise: &'static str,
    /// Looks whether it is kept.
    pub(crate) run: for<'a> fn(&'a Bed, Profile) -> BoxFuture<'a, Verdict>,
}

/// A set of promises.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Profile {
    /// What every runtime must do.
    Core,
    /// Networks are set up and removed by calls.
    NetworkSetup,
    /// Networks of a kind.
    Topology(Topology),
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// Wanted addresses.
    StaticAddress,
    /// Wanted MAC addresses.
    StaticMac,
    /// The Network's MTU.
    Mtu,
    /// Extra routes.
    Routes,
    /// Ports of the node.
    HostPorts,
    /// Changes in place.
    Update,
    /// Changes told as they happen.
    Watch,
    /// Attachments of sandboxes that are gone.
    CollectGarbage,
}

/// How a case ended.
pub type Verdict = Result<(), Problem>;

/// Why a case did not pass.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Problem {
    /// The promise is broken.
    Failed(String),
    /// It cannot be looked at here.
    Skipped(String),
}

// === impl Profile ===

impl Profile {
    /// The feature that it comes with; none for the core.
    #[must_use]
    pub fn feature(self) -> Option<&'static str> {
        Some(match self {
            Self::Core => return None,
            Self::NetworkSetup => feature::NETWORK_SETUP,
            Self::Topology(topology) => topology.as_str(),
            Self::Ipv4 => feature::IPV4,
            Self::Ipv6 => feature::IPV6,
            Self::StaticAddress => feature::STATIC_ADDRESS,
            Self::StaticMac => feature::STATIC_MAC,
            Self::Mtu => feature::MTU,
            Self::Routes => feature::ROUTES,
            Self::HostPorts => feature::HOST_PORTS,
            Self::Update => feature::UPDATE,
            Self::Watch => feature::WATCH,
            Self::CollectGarbage => feature::COLLECT_GARBAGE,
        })
    }

    /// Its name: that of its feature, or `Core`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.feature().unwrap_or("Core")
    }
}

// === impl Problem ===

impl From<knit_runtime::Error> for Problem {
    fn from(error: knit_runtime::Error) -> Self {
        Self::Failed(format!("the runtime answered {:?}: {}", error.reason, chain(&error)))
    }
}

impl From<knit_kernel::Error> for Problem {
    fn from(error: knit_kernel::Error) -> Self {
        Self::Failed(format!("looking into the kernel: {}", chain(&error)))
    }
}

impl From<knit_kernel::netns::Error> for Problem {
    fn from(error: knit_kernel::netns::Error) -> Self {
        Self::Failed(format!("a pod's namespace: {}", chain(&error)))
    }
}

impl From<knit_types::InvalidInterfaceName> for Problem {
    fn from(error: knit_types::InvalidInterfaceName) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<knit_types::InvalidSandboxId> for Problem {
    fn from(error: knit_types::InvalidSandboxId) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<Problem> for Outcome {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Failed(why) => Self::Failed(why),
            Problem::Skipped(why) => Self::Skipped(why),
        }
    }
}

/// Ends a case as failed unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err($crate::case::Problem::Failed(format!($($words)+)));
        }
    };
}

/// A list of cases: `Profile Name function "promise"`, with `Topology(..)` where the profile is that of one.
/// A case is named like its function, in camel case.
macro_rules! cases {
    ($($profile:ident$(($topology:ident))? $name:ident $function:ident $promise:literal)+) => {
        pub(crate) fn cases() -> Vec<$crate::case::Case> {
            vec![$($crate::case::Case {
                name: stringify!($name),
                profile: $crate::case::Profile::$profile$((knit_runtime::Topology::$topology))?,
                promise: $promise,
                run: |bed, _| Box::pin($function(bed)),
            }),+]
        }
    };
}

pub(crate) use {cases, ensure};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_feature_of_every_profile_is_known() {
        for case in crate::cases() {
            let feature = case.profile.feature();
            assert!(
                feature.is_none_or(|feature| feature::all().any(|known| known == feature)),
                "{feature:?}"
            );
        }
    }
}
