//! One set of third-party features for every crate's tests; no code.
//!
//! Cargo turns on the features that the selected packages ask for, so `cargo test -p A` and `cargo test -p B`
//! would compile kube, k8s-openapi, tokio and whatever depends on them once each. A crate that has this one
//! as its dev-dependency asks for the same set as the whole workspace does, and shares its builds. What is
//! shipped does not depend on it.
