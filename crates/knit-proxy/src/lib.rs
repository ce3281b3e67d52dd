//! The library to build a service proxy with.
//!
//! A service proxy makes virtual addresses lead to real endpoints. What it must do is the same for everybody:
//! merge endpoint groups, honour traffic policies, topology hints and terminating endpoints, keep source
//! addresses or hide them. How it does it differs: nftables, eBPF, a user-space process, a load balancer in
//! hardware. This crate does the first part, and lets you write the second.
//!
//! A whole proxy, with a backend that only says what it is asked to do:
//!
//! ```
//! use knit_proxy::backend::{Backend, Outcome};
//! use knit_proxy::engine::{Engine, EngineConfig, run};
//! use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
//! use knit_proxy::view::{Action, NodeView};
//!
//! struct Say(Vec<String>);
//!
//! impl Backend for Say {
//!     fn sync(&mut self, state: &NodeView) -> Outcome {
//!         for (key, port) in &state.ports {
//!             for frontend in &port.frontends {
//!                 // The route says which endpoints: all of them, this node's, or none.
//!                 let endpoints: Vec<String> = match frontend.route.action {
//!                     Action::Endpoints(scope) => {
//!                         port.targets(scope).iter().map(|e| e.to_string()).collect()
//!                     }
//!                     Action::Reject | Action::Drop => vec![frontend.route.to_string()],
//!                 };
//!                 self.0.push(format!("{key}: {frontend} -> {}", endpoints.join(" or ")));
//!             }
//!         }
//!         Outcome::Done
//!     }
//! }
//!
//! let (handle, inbox) = knit_proxy::source::handle();
//! handle.set_service(Service::new("shop/web").cluster_ip("10.0.0.1".parse()?).port(Protocol::Tcp, 80))?;
//! let endpoints = ["192.0.2.1".parse()?, "192.0.2.2".parse()?];
//! handle.set_group(EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &endpoints))?;
//! handle.all_listed()?;
//! drop(handle); // Nobody sends any more: the engine does what is due, and ends.
//! let engine = run(Engine::new(EngineConfig::default(), NodeInfo::new("node-a"), Say(Vec::new())), &inbox);
//! assert_eq!(
//!     engine.into_backend().0,
//!     ["shop/web TCP IPv4: cluster IP 10.0.0.1:80 -> 192.0.2.1:8080 or 192.0.2.2:8080"]
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! source → [`model`] → [`view`] → [`diff`] → [`backend`], each usable alone:
//!
//! - [`model`]: plain types for services, endpoints and the node.
//! - [`view`]: told of them, says what this node has to do, all decisions made; incremental.
//! - [`diff`]: a generic store that turns states into differences, and slots for endpoints.
//! - [`backend`]: the trait to write; it gets differences, full state, or both. [`backends`]: what a crate
//!   offers that has one, so that programs need not know it by name.
//! - [`engine`]: owns view and backend, paces the work, retries what failed; without threads or a clock of
//!   its own.
//! - [`start`](mod@start): all of it on a thread.
//! - [`source`]: how objects come in; feature `kubernetes` has the conversion from Kubernetes objects,
//!   feature `objects` a source that reads and follows them in a cluster or a folder.
//! - [`health`]: what to answer on /healthz, /livez and health check node ports; feature `server` has the
//!   servers.
//! - Feature `metrics`: kube-proxy's metrics; with `server`, `vitals` puts health, metrics and their servers
//!   together. Feature `grpc`: the node view as a stream, for backends in any
//!   language.
//! - [`conntrack`]: which UDP flows are stale. [`explain`]: why a service is served the way it is.
//!
//! "Rule n" in these pages means the n-th rule of the list of what a Kubernetes service proxy has to do,
//! which the project's documentation has.
//!
//! Nothing here needs Kubernetes, an async runtime, or privilege. No feature is on by default.

pub mod backend;
pub mod backends;
pub mod conntrack;
pub mod diff;
pub mod elect;
pub mod engine;
pub mod explain;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod health;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod model;
#[cfg(feature = "objects")]
pub mod objects;
pub mod source;
pub mod start;
pub mod view;
#[cfg(all(feature = "metrics", feature = "server"))]
pub mod vitals;
