//! What the worlds of tests are made of, each part once: a wire with nodes on it ([`wire`]), real agents on
//! them with pods (`agents`), servers that answer ([`echo`]), calls of the CNI shim's protocol ([`cni`]),
//! tables and what others do to them ([`tables`]), objects as files ([`objects`]), a real Kubernetes API
//! server ([`control_plane`]), and waiting for a condition in async code ([`wait`]).
//!
//! Everything here panics where it fails: it runs in tests, in namespaces of their own
//! (`knit_kernel::testing::in_namespaces`). What only one crate's tests need stays with that crate.

#[cfg(feature = "agents")]
pub mod agents;
pub mod cni;
pub mod control_plane;
pub mod echo;
pub mod objects;
pub mod tables;
pub mod wait;
pub mod wire;

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::IfName;

/// How long something may take that must happen, on a busy machine.
pub const SOON: Duration = Duration::from_secs(60);
/// How long something is waited for that must not happen.
pub const NEVER: Duration = Duration::from_millis(300);

/// An address.
#[track_caller]
pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not an IP address"))
}

/// An address with a prefix length.
#[track_caller]
pub fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not an address with a prefix"))
}

/// The name of an interface.
#[track_caller]
pub fn name(text: &str) -> IfName {
    IfName::new(text).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}
