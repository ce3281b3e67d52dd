//! The node agent's service proxies: one for each router, fed by one set of watches.
//!
//! [`Services`] is the agent's [`ServiceProxy`](knit_node::proxy::ServiceProxy). It follows Services, EndpointSlices,
//! ServiceCIDRs and this node's Node once, whatever the number of routers; each object is converted once and goes to the
//! instance of the Network that its namespace has as its primary ([`Table`]). Each instance is a thread of
//! `knit-proxy-nft` in its router's namespace. One that fails is started again by and by; pods are attached all the same.
//!
//! Where kube-proxy's tables are found on the node, the default Network's instance is not started, unless
//! [`Mode::On`] says so.

mod instance;
mod kube_proxy;
mod services;
mod supervisor;
mod table;

pub use services::{Config, Mode, Services};
pub use table::Table;
