//! The reference network runtime, `knit.dev/linux`: routed and switched Networks on plain Linux.
//!
//! Each Network has a router on each node: the node's own namespace for the default Network, a namespace of
//! its own for every other. A pod's interface is one end of a veth pair whose other end is in the router.
//!
//! Kinds of Networks are drivers (`topology`): one file each.
//!
//! From description to kernel in three steps: [`shape`](self) works out what follows from a Network and the
//! node's facts; the wanted state of each namespace is laid down as data (`wanted`, `rules`); and that is
//! compared with what is there and the difference applied (`setup`, `attach`). `survey` compares all of it
//! without changing anything, when the kernel tells of a change that was not ours (`senses`) and from time to
//! time. Nothing is remembered in files: what the runtime made, it recognises by the owner's marks in the
//! kernel, so that setting a Network up again is also its repair.

mod attach;
mod attachments;
mod config;
mod default_router;
mod detach;
mod duplicate;
mod echo;
mod fail;
mod host_ports;
mod inspect;
mod links;
mod listeners;
mod mark;
mod moves;
mod neighbours;
mod networks;
mod node;
mod node_tables;
mod pair;
mod plan;
mod pod_side;
mod port;
mod purge;
mod remove;
mod router;
mod router_sight;
mod router_tables;
mod routers;
mod rules;
mod runtime;
mod senses;
mod settings;
mod setup;
mod shape;
mod sight;
mod space;
mod steering;
mod strays;
mod survey;
mod tables;
mod topology;
mod tunnel;
mod uplink;
mod usage;
mod wanted;
mod watchers;

pub use config::Config;
pub use purge::{Purged, purge};
pub use rules::STEERED;
pub use runtime::LinuxRuntime;
pub use uplink::router_uplink;
