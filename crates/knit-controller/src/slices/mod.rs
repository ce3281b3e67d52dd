//! Tells all nodes of each other, in slices: what of Nodes and AddressBlocks every agent needs, so that no
//! agent has to follow either. Runs beside the plan while this controller leads, and keeps its own state: a
//! change costs the slice that it is in, however large the cluster is.

mod keeper;
mod kinds;
mod run;

pub use keeper::{Keeper, Kept, Order};
pub use kinds::{Blocks, Nodes, SliceKind};
pub(crate) use run::keep;
