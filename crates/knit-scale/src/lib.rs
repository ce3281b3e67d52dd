//! A large cluster on one machine: simulated nodes around an API that counts, and a report of what they cost.
//!
//! Some nodes are whole: the agent's real watches, model, plan and reports, over a runtime in memory. The
//! others only write what a node writes: its Node, its Lease, its pods and its reports; what they would watch
//! is what whole ones do, times their number. The controller is the real one. Everybody reaches the API
//! through a [`Meter`](meter::Meter), which counts requests, events and bytes by who asked and by kind.
//!
//! | module | is |
//! |---|---|
//! | [`scenario`] | what happens, deterministic from a seed |
//! | [`cluster`] | the API, its objects, and what nodes do by themselves |
//! | [`controller`] | the controller, here or in a process of its own |
//! | [`meter`] | the API with counters in front of it |
//! | [`node`] | a whole node, and the objects that any node writes |
//! | [`probe`] | a whole node in a process of its own |
//! | [`run`] | carries a scenario out |
//! | [`joins`] | nodes that join, and who hears of them |
//! | [`pods`] | pods that come, are attached, and go |
//! | [`report`] | what was found, as values and rows |
//! | [`plot`] | the same over cluster size, as SVG |

pub mod cluster;
pub mod controller;
pub mod joins;
pub mod meter;
pub mod node;
pub mod plot;
pub mod pods;
pub mod probe;
pub mod process;
pub mod report;
pub mod run;
pub mod scenario;
