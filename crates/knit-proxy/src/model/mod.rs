//! What a service proxy is told: services, where their traffic may go, and the node it runs on.
//!
//! Nothing here is a Kubernetes type. A [`Service`] is a set of addresses and ports that clients connect to;
//! an [`EndpointGroup`] is a list of places that answer for one service; a [`NodeInfo`] says where this proxy
//! runs. They can be written by hand, and the `kubernetes` feature makes them from API objects.
//!
//! The types are small on purpose (boxed slices, shared strings, no maps): a proxy holds all of them for as
//! long as it runs, and keeps no other copy of the objects they were made from.

mod endpoints;
mod names;
mod node;
mod problem;
mod service;

pub use endpoints::{Conditions, Endpoint, EndpointGroup, GroupPort, Hints};
pub use names::{GroupName, Interner, ServiceName};
pub use node::NodeInfo;
pub use problem::{ObjectRef, Problem};
pub use service::{Affinity, Service, ServicePort, TrafficPolicy};

pub use knit_types::{Family, NetworkName, PerFamily, Protocol};
