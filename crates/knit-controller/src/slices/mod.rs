//! Tells all nodes of each other, in slices: what of Nodes, AddressBlocks and NetworkAttachments every agent
//! needs, so that no agent has to follow them. Runs beside the plan while this controller leads, and keeps
//! its own state: a change costs the slice that it is in, however large the cluster is.

mod announced;
mod keeper;
mod kinds;
mod run;

pub use keeper::{Keeper, Kept, Order};
pub use kinds::{BlockItem, Blocks, Nodes, SliceKind};
pub(crate) use run::keep;
