//! Against the kernel: restarts, stale flows, many services, a proxy on a thread of its own.

mod connections;
mod limits;
mod support;
