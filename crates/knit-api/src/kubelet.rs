//! Kubelet's gRPC protocols for drivers of dynamic resources (DRA): registration, claims, health.

/// How a plugin makes itself known.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// What is asked of a driver, since Kubernetes 1.34.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// What is asked of a driver, before that.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// The health of devices, since Kubernetes 1.37.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod health_v1 {
    tonic::include_proto!("v1");
}

/// The health of devices, before that.
#[allow(
    missing_docs,
    unused_qualifications,
    clippy::all,
    reason = "generated; the documentation is in the .proto file"
)]
pub mod health_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}
