//! The controller: what only one place in the cluster can decide.
//!
//! It numbers Networks, cuts their subnets into AddressBlocks for nodes, says whether a Network can be served
//! ([`knit_api::conditions`]), counts its addresses, keeps it while it is in use, tells which Network is a
//! namespace's primary, and keeps new pods away from nodes that cannot give them a network.
//!
//! Everything is decided in [`plan()`], which is pure: the cluster as it is goes in ([`Cluster`]), typed
//! writes come out ([`Action`]). [`Controller::run`] is the thin part around it: caches, leader election,
//! carrying writes out. The same pass runs at start and after every change.
//!
//! What policies need to know of pods comes and goes with pods, and is apart from that: `peers`. So is the
//! node of each NetworkAttachment that a user made: `whereabouts`.
//!
//! What its role must allow, and nothing more:
//!
//! | resources | verbs |
//! |---|---|
//! | networkclasses, networks | get, list, watch, create, patch |
//! | networkclasses/status, networks/status, networkattachments/status | patch |
//! | addressblocks | list, watch, create, delete |
//! | nodeslices, blockslices | list, watch, create, update, delete |
//! | networkattachments | list, watch, patch, delete |
//! | policypeerslices | list, watch, create, patch, delete |
//! | nodenetworks, namespaces, servicecidrs | list, watch |
//! | networkpolicies, and the other kinds of policies where they are served | list, watch |
//! | pods, while some policy asks for pods, or in namespaces with users' NetworkAttachments | list, watch |
//! | nodes | list, watch, patch |
//! | leases, in its own namespace | get, list, watch, create, update |
//! | events (events.k8s.io) | create, patch |
//! | resourceslices, deviceclasses, where claims are served | list, create, patch, delete |

/// Who tells, in events.
pub(crate) const REPORTER: &str = "knit.dev/controller";

mod cluster;
mod config;
mod driver;
mod leader;
mod peers;
mod plan;
mod rate;
pub mod slices;
mod whereabouts;

pub use cluster::{
    AgentLease, Agents, AttachmentView, BlockView, Cluster, Gone, Memory, NamespaceView, NamespacedName,
    NodeView, Now, Numbers, PolicyView, Remembered, SeenLease,
};
pub use config::Config;
pub use driver::{Controller, ControllerState, PlanTimes, Unsuitable};
pub use plan::{Action, Change, Indexed, Note, Plan, Primaries, plan, primaries};
pub use rate::{Bucket, Rates};
