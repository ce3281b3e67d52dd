//! The NetworkPolicy family as pure logic.
//!
//! Pods, namespaces, nodes and policies go in: NetworkPolicy, ClusterNetworkPolicy, AdminNetworkPolicy with
//! its baseline, MultiNetworkPolicy, all in one [form](model::Policy). Out come two things from the same
//! data:
//!
//! - [`Cluster::judge`](cluster::Cluster::judge), the verdict function: may this packet pass, by which rule
//!   of which object on which side, or why not; with a record of every tier, rule by rule.
//! - [`sets::Engine`], the sets of each router that make it true: a constant number of them, with elements
//!   that come and go by event, for a packet filter to hold. One remote pod more is one element more.
//!
//! Nothing here needs Kubernetes, an async runtime, or privilege, and nothing here enforces anything: that is
//! done by a [`backend`]. Feature `kubernetes` has the conversion from API objects.
//!
//! "Rule n" in these pages means the n-th rule of docs/network-policy-rules.md.

pub mod backend;
pub mod cluster;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod model;
pub mod sets;
pub mod verdict;
