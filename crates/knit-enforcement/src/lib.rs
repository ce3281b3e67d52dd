//! The node agent's enforcement of policies: what the NetworkPolicy family asks for is in force in every
//! router of the node, and about a pod before the pod starts.
//!
//! [`Enforcement`] is the agent's [`PolicyEnforcer`](knit_node::policy::PolicyEnforcer). One thread
//! (`worker`) owns a [`knit_policy::sets::Engine`]: it is told of policies, namespaces, the pods of this node
//! and those of others, settles, and has each router's [backend](knit_policy::backend) carry out one batch.
//! Where what it is told comes from:
//!
//! | what | from | file |
//! |---|---|---|
//! | policies, of the kinds that the cluster serves | a watch each | `kinds` |
//! | pods of this node: addresses | the agent's own records | `recorded`, `local` |
//! | labels and named ports of pods of this node; labels of namespaces | the agent's own snapshot | `feed` |
//! | pods of other nodes, in Networks with a router here | slices that the controller writes | `peers` |
//! | what cluster services lead to, for other Networks | watches, once there are policies | `aliases` |
//! | nodes with their labels | a watch, once a policy has nodes as peers | `nodes` |
//! | all of that while the API is away | a file of the last run | `cache` |
//!
//! The kernel's state outlives the agent. Nothing of it is changed before everything that policies depend on
//! has arrived, or is known from the last run while the API is away; and a pod that policies may be about is
//! not admitted before that either.

mod admission;
mod aliases;
mod cache;
mod enforcement;
mod feed;
mod kinds;
mod local;
mod metrics;
mod nodes;
mod peers;
mod recorded;
mod worker;

pub use enforcement::{Config, Enforcement, Mode};
pub use kinds::folder_kinds;
