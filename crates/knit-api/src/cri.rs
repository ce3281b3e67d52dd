//! The part of the container runtime interface (CRI v1) that the node agent asks: which sandboxes there are.

/// CRI v1, with its exact package, names and field numbers.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod v1 {
    tonic::include_proto!("runtime.v1");
}
