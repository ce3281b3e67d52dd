//! The node agent: it owns all networking of its node.
//!
//! A front door ([`front_door`]) translates what it is asked into one [`PodRequest`], and nothing else; the
//! [`pipeline`] carries it out, step by step; [`report`] tells objects, events and numbers afterwards.
//!
//! [`Core`] is the handle that every door calls, and its page lists the parts. Networks are set up apart from
//! pods ([`networks`]) and kept as they should be ([`level`]); [`reconcile`] compares ledger, runtimes and
//! what really runs, at start and from then on, with the same pass; [`cri`] is what the container runtime
//! says about the latter.

pub mod agent;
mod claims;
pub mod clock;
mod config;
mod core;
pub mod cri;
mod error;
pub mod files;
pub mod front_door;
pub mod http;
pub mod kernel_tables;
pub mod level;
pub mod metrics;
pub mod netns;
pub mod networks;
pub mod pipeline;
pub mod policy;
pub mod proxy;
pub mod readiness;
pub mod reconcile;
pub mod report;
mod request;
pub mod runtimes;
pub mod sandboxes;
#[cfg(feature = "testing")]
pub mod testing;
pub mod world;

pub use crate::claims::{ClaimSource, DeviceFiles, PodClaim, Prepared};
pub use crate::config::{CoreConfig, MainInterfaces};
pub use crate::core::{Core, Parts};
pub use crate::error::{Error, Reason, Result};
pub use crate::pipeline::{Attached, resolve};
pub use crate::request::{
    Asked, ClaimRequest, Door, Main, MainInterface, ObjectDoor, PodRequest, Start, Wish, Wishes, pod_name,
};
