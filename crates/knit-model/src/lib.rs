//! The cluster as Knit understands it. An object of the Kubernetes API is read here once per version, into
//! types that cannot be wrong; what is wrong with it is a typed error that conditions, events and logs are
//! made of. The agent, the controller and the services of a node decide over these types, so that a rule
//! about them is written once and they cannot differ in it. Nothing here acts.
//!
//! | object | is read into |
//! |---|---|
//! | Network | [`Network`]: its [`Pool`](knit_ipam::Pool), routes, whose primary it is, who may attach |
//! | all Networks | [`Claims`]: which one is a namespace's primary |
//! | AddressBlock | [`AddressBlock`] |
//! | Node | [`NodeAddresses`], [`pod_ranges`] |
//! | ServiceCIDR | [`service_ranges`] |
//! | NetworkAttachment | [`attached_addresses`] |
//! | ResourceClaim | [`allocation::Allocation`]: which Networks it was given, and with what parameters |
//! | a selector of labels | [`selector::read`] |
//! | NodeSlice, BlockSlice | [`slices`]: packed by the controller, put together by nodes |
//!
//! The service proxy reads Services, EndpointSlices and its own Node itself (`knit_proxy::kubernetes`): it
//! follows kube-proxy's rules, not Knit's, and is a library for others too.

pub mod allocation;
mod attachment;
mod block;
mod claims;
mod network;
mod node;
mod ranges;
pub mod selector;
pub mod slices;

pub use attachment::attached_addresses;
pub use block::{AddressBlock, AddressBlockError};
pub use claims::{Claim, Claims};
pub use network::{Network, NetworkError, Refusal, UnderlayError};
pub use node::{NodeAddresses, pod_ranges};
pub use ranges::{addresses_of_networks, addresses_on_segments, overlap, service_ranges};

/// A set of labels.
pub type Labels = std::collections::BTreeMap<String, String>;
