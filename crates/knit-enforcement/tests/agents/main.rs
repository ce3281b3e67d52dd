//! Real agents with the reference runtime and real policies on two nodes, with real packets.

mod cluster;
mod kinds;
mod life;
mod records;
mod support;
