//! The ways a request reaches the agent. A door translates, and nothing else: what it is asked into one
//! [`PodRequest`](crate::PodRequest), and what came of it into the words of whoever asked.

pub mod annotation;
pub mod cni;
mod doors;
pub mod dra;
pub mod kni;
pub mod network_attachment;
pub mod nri;
mod translate;

pub use doors::{Doors, DoorsError};
