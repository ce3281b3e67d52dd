//! What several test files use.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::missing_panics_doc)]

pub mod cluster;
pub mod lab;
pub mod packet;
pub mod probe;
pub mod world;
