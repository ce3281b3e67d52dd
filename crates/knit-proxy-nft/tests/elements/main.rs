//! What is written for which change, against nftables in memory.

mod changes;
mod refused;
mod support;
