//! Pools, blocks and leases: which pod has which addresses, as pure logic.
//!
//! Three levels, each with one owner:
//!
//! - a [`Pool`] is what a Network may give out: its subnets, gateways and reserved ranges;
//! - a [`Block`] is a small range of it that one node owns; the controller chooses it with [`next_block`].
//!   The families are paired by index: the pod at index i has the i-th IPv4 and the i-th IPv6 address of the
//!   block;
//! - a [`Lease`] is what one pod interface has; the node agent gives it with [`NodeAllocator`] from its own
//!   blocks and asks nobody.
//!
//! Nothing here reads a clock, a file or the API: time is a parameter ([`Millis`]), blocks are told to it,
//! and the state can be written down with [`NodeAllocator::snapshot`] and built again with
//! [`NodeAllocator::restore`].
//!
//! A pod's MAC follows from its Network's id and its address ([`pod_mac`]), so another node can compute the
//! neighbour and forwarding entries of a whole block before any of its pods exists.

mod address;
mod block;
mod cluster;
mod error;
mod lease;
mod mac;
mod node;
mod overlap;
mod pool;

pub use address::AddressRange;
pub use block::{Block, BlockSize};
pub use cluster::{BlockQuery, Growth, next_block};
pub use error::{BlockError, LeaseError, NextBlockError, NotLeasable, PoolError};
pub use knit_types::{AddressList, Addresses, Family, Mac, ParseMacError, PodRef};
pub use lease::{Cooling, Lease, LeaseKey, LeaseKind, Millis, Request, Snapshot, Want};
pub use mac::{gateway_mac, may_have_mac, pod_mac};
pub use node::{Counts, FamilyCounts, NodeAllocator, NodeConfig, Removal, Restored, Spare, WantsMore};
pub use overlap::outranked;
pub use pool::{Pool, Standing, Subnet};
