//! Many small facts in few objects, as EndpointSlices do it: the controller packs them ([`Packer`]), nodes
//! put them together again ([`Slices`]). Both are pure, and generic over what is in the slices.
//!
//! The rules that both keep:
//! - A fact stays in the slice that it is in, so one change is one write of one slice.
//! - Between two writes a fact may be in two slices, never in none. The slice with the lower number counts.
//! - Slice 0 says that the set is complete. It says so only after all others were written, and until then a
//!   reader forgets nothing that it knew before.

mod pack;
mod read;

pub use pack::{Packer, Step};
pub use read::Slices;
