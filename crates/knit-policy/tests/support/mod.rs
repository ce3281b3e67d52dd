//! What several test files use.

#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod filter;
#[cfg(feature = "kubernetes")]
pub mod lab;
pub mod random;
