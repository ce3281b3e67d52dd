//! The node view: what this node has to do for every service, with all decisions made.
//!
//! A [`View`] is told of services, endpoint groups and the node, in any order, and answers with [`Changes`]
//! to a [`NodeView`]. The work follows the change: one changed group is work for the service it belongs to;
//! only a change of the node itself (its zone, its name) is work for all (rule 37). The outcome depends on
//! what is there, never on the order in which it came.
//!
//! ```
//! use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
//! use knit_proxy::view::{View, ViewConfig};
//!
//! let mut view = View::new(ViewConfig::default(), NodeInfo::new("node-a"));
//! view.set_service(Service::new("shop/web").cluster_ip("10.0.0.1".parse()?).port(Protocol::Tcp, 80));
//! view.set_group(EndpointGroup::of_addresses(
//!     "shop/web-1", "shop/web", Protocol::Tcp, 8080, &["192.0.2.1".parse()?, "192.0.2.2".parse()?],
//! )); let changes = view.take_changes(); let port = changes.ports[0].new.as_ref().unwrap();
//! assert_eq!(port.frontends[0].to_string(), "cluster IP 10.0.0.1:80");
//! assert_eq!(port.cluster.iter().map(|t| t.to_string()).collect::<Vec<_>>(), ["192.0.2.1:8080",
//! "192.0.2.2:8080"]);
//! # Ok::<(), std::net::AddrParseError>(())
//! ```

mod claims;
mod config;
mod frontends;
mod given;
mod output;
mod parts;
mod select;
mod store;
#[cfg(test)]
mod tests;

pub use config::{LocalTraffic, NodePortMatch, NodePorts, NodeSettings, PodTraffic, ViewConfig};
pub use output::{
    Action, Changes, Client, Frontend, FrontendKind, HealthCheck, Masquerade, NoLocal, NodeView, PortChange,
    PortKey, PortView, Route, Scope, Sources, Target, Targets,
};
pub use select::{Candidate, Decision, Judgement, Pool, TopologyHints, Uses, merge};
pub use store::{ListKind, View};
