//! `knit lab`: a whole cluster on one machine with no Kubernetes.
//!
//! [`cluster`] is the lab itself: nodes, pods and the small controllers of a cluster, around the embedded
//! Kubernetes API of `knit-apiserver`.

pub mod cluster;
