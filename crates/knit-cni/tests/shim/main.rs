//! The shim's binary, run as a container runtime runs it.

mod answers;
mod away;
mod common;
