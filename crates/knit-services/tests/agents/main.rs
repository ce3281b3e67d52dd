//! Real agents with the reference runtime on two nodes, and their service proxies, with real packets.

mod addresses;
mod flows;
mod in_force;
mod level;
mod onward;
mod services;
mod steering;
mod support;
