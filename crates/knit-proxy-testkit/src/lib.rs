//! Packet-flow tests for service proxies.
//!
//! A [`Case`] is plain Kubernetes Services and EndpointSlices, and a table of flows: who connects where,
//! which endpoint answers or how it is refused, and whether the endpoint sees the client's address.
//! [`run`](fn@run) makes it so with any [`Backend`](knit_proxy::backend::Backend) and sends the packets, in
//! network namespaces of a [`World`]. Each case names the rules that it proves. [`ours`] are the project's
//! own cases: what every service proxy should pass.
//!
//! ```no_run
//! # struct MyBackend;
//! # impl knit_proxy::backend::Backend for MyBackend {
//! #     fn sync(&mut self, _: &knit_proxy::view::NodeView) -> knit_proxy::backend::Outcome {
//! #         knit_proxy::backend::Outcome::Done
//! #     }
//! # }
//! use knit_proxy_testkit::{World, ours, run};
//!
//! #[test]
//! fn packets_go_where_they_should() {
//!     knit_kernel::testing::in_namespaces(|| {
//!         let world = World::new().unwrap();
//!         let wrong = run(&world, &ours().unwrap(), |node| MyBackend).unwrap();
//!         assert!(wrong.is_empty(), "{}", wrong.join("\n"));
//!     });
//! }
//! ```

mod case;
mod options;
mod run;
mod world;

pub use case::{Case, Config, Destination, Flow, Gets, NodePorts, Pods, ReadError, Step, read};
pub use options::{Options, Report};
pub use run::{run, run_with};
pub use world::{MORE_NODE_ADDRESSES, NODE, NODE_ADDRESSES, NODE_POD_RANGES, POD_RANGES, World, WorldError};

/// The files of the project's own cases, by name.
pub const FILES: [(&str, &str); 5] = [
    ("cluster-ip", include_str!("../cases/cluster-ip.yaml")),
    ("policies", include_str!("../cases/policies.yaml")),
    ("masquerade", include_str!("../cases/masquerade.yaml")),
    ("frontends", include_str!("../cases/frontends.yaml")),
    ("changes", include_str!("../cases/changes.yaml")),
];

/// The project's own cases.
///
/// # Errors
/// Never, as long as the files are right, which a test sees to.
pub fn ours() -> Result<Vec<Case>, ReadError> {
    FILES.iter().map(|(_, text)| read(text)).collect::<Result<Vec<_>, _>>().map(|all| all.concat())
}
