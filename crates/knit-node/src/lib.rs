//! The node agent: it owns all networking of its node.
//!
//! One pod's way through it, and the file of each step:
//!
//! | step | where | what |
//! |---|---|---|
//! | front door | [`front_door`] | translates a call into one [`PodRequest`], nothing else |
//! | resolve | [`resolve`] | which Networks, under which interface names: a pure function of one [`world::World`] |
//! | reserve, record | [`record`] | addresses for all of them or for none, and the plan in the ledger, before anything is made |
//! | attach, verify | `attach` | all at once, each by its Network's runtime; or everything taken back |
//! | report | [`report`] | objects, events and numbers, afterwards |
//!
//! [`Core`] is the handle that every door calls. Networks are set up apart from pods ([`networks`]) and kept as they
//! should be ([`level`]); [`reconcile`]
//! compares ledger, runtimes and what really runs, at start and from then on, with the same pass; [`cri`] is what the
//! container runtime says about the latter.

pub mod agent;
mod attach;
pub mod clock;
mod config;
mod core;
pub mod cri;
mod error;
mod fate;
pub mod files;
pub mod front_door;
pub mod hotplug;
pub mod http;
pub mod kernel_tables;
pub mod level;
pub mod locks;
pub mod metrics;
pub mod netns;
pub mod networks;
pub mod proxy;
pub mod readiness;
pub mod reconcile;
pub mod record;
pub mod report;
mod request;
pub mod resolve;
pub mod runtimes;
#[cfg(feature = "testing")]
pub mod testing;
pub mod world;

pub use crate::config::CoreConfig;
pub use crate::core::{Attached, Core, Parts};
pub use crate::error::{Error, Reason, Result};
pub use crate::request::{Door, ObjectDoor, PodRequest, pod_name};
