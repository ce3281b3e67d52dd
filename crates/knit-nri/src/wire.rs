//! The messages, as generated, and what is read out of them in more than one place.

#![allow(missing_docs, clippy::all, unused_qualifications)]

include!(concat!(env!("OUT_DIR"), "/nri.pkg.api.v1alpha1.rs"));

/// What ttrpc puts into its frames.
pub mod ttrpc {
    include!(concat!(env!("OUT_DIR"), "/ttrpc.rs"));
}

impl Container {
    /// Whether it runs, or did.
    #[must_use]
    pub fn has_run(&self) -> bool {
        use ContainerState::{ContainerPaused, ContainerRunning, ContainerStopped};
        matches!(self.state(), ContainerPaused | ContainerRunning | ContainerStopped)
    }
}

impl PodSandbox {
    /// Where the sandbox's network namespace can be opened. None for a pod in the node's own network, and in
    /// the last event about a sandbox whose namespace is gone.
    #[must_use]
    pub fn network_namespace(&self) -> Option<&str> {
        let namespaces = self.linux.iter().flat_map(|linux| &linux.namespaces);
        let mut network = namespaces.filter(|n| n.r#type == "network").map(|n| n.path.as_str());
        network.find(|path| !path.is_empty())
    }
}
