//! `knit lab`: a whole cluster on one machine with no Kubernetes.
//!
//! [`api`] is the embedded Kubernetes API: an HTTP server over an in-memory store, enough that `kubectl`, agents
//! and controllers work against it. It is a stand-in for tests and first steps; `docs/lab-api.md` says where it
//! differs from a real API server.
//!
//! [`cluster`] is the lab itself: nodes, pods and the small controllers of a cluster, around that API.

pub mod api;
pub mod cluster;
