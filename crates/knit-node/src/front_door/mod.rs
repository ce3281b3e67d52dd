//! The ways a request reaches the agent. A door translates, and nothing else.

pub mod cni;
pub mod kni;
mod translate;
