//! `knit lab`: a whole cluster on one machine with no Kubernetes.
//!
//! [`api`] is the embedded Kubernetes API: an HTTP server over an in-memory store, enough that `kubectl`, agents
//! and controllers work against it. It is a stand-in for tests and first steps; `docs/lab-api.md` says where it
//! differs from a real API server.

pub mod api;
