//! The KNI gRPC protocols: `v1alpha1` is Knit's seam between agent and network runtimes; `beta` is the
//! service of the first proof of concept (`kni.KNI`), served for those who built on it.

/// KNI v1alpha1: what a node agent asks of a network runtime, and a KNI client of a node agent.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod v1alpha1 {
    tonic::include_proto!("kni.v1alpha1");
}

/// The service of the KNI proof of concept, with its exact field numbers.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod beta {
    tonic::include_proto!("kni");
}
