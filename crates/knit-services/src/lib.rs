//! The node agent's service proxies: one for each router, fed by one set of watches.
//!
//! [`Services`] is the agent's [`ServiceProxy`](knit_node::proxy::ServiceProxy). It follows Services,
//! EndpointSlices, ServiceCIDRs and this node's Node once, whatever the number of routers; each object is
//! converted once and goes to the instance of the Network that its namespace has as its primary ([`Table`]).
//! Each instance is a thread of its own, with a backend in its router's namespace that it is handed
//! ([`Config::backends`]). One that fails is started again by and by; pods are attached all the same.
//!
//! A Service of another Network is balanced in that Network's router, but clients outside come to the node:
//! what leads from there into the routers is worked out of what the instances have in force (`entrances`),
//! and written by a thread of its own (`steerer`).
//!
//! Where kube-proxy's tables are found on the node, the default Network's instance is not started, unless
//! [`Mode::On`] says so.

mod absent;
mod entrances;
mod forbidden;
mod instance;
mod internal_ports;
mod node_ports;
mod placement;
mod refusals;
mod services;
mod steerer;
mod supervisor;
mod table;

pub use services::{Config, HEALTHZ, METRICS, Mode, Services};
pub use table::Table;
