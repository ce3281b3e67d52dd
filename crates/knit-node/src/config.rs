//! What the core is told at its start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use knit_api::names;

/// Names, paths and limits.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// This node's name.
    pub node: String,
    /// The namespace of the agents' Leases, which the controller reads.
    pub namespace: String,
    /// The run-time directory: ledger, sockets, spool, readiness marker. A reboot empties it.
    pub run_dir: PathBuf,
    /// The directory for what outlives a reboot.
    pub state_dir: PathBuf,
    /// Who gives this node's pods their main interface.
    pub main_interfaces: MainInterfaces,
    /// How long a request waits for an object that is not known yet.
    pub cache_wait: Duration,
    /// How long a request waits for a further AddressBlock.
    pub block_wait: Duration,
    /// How long a request by NRI always may wait for what is not there yet. The container runtime holds one
    /// lock for the events of all pods of its node: what one tenant's pod waits for, every pod that starts
    /// waits for. More comes from what all requests may wait together.
    pub nri_wait: Duration,
    /// How long one call of a runtime may take.
    pub runtime_deadline: Duration,
    /// How long a runtime may take to detach: less than a container runtime waits for DEL, so that it hears
    /// who is slow.
    pub detach_deadline: Duration,
    /// How long a request may take if its caller says nothing.
    pub request_deadline: Duration,
    /// How long a Network that no pod uses stays set up.
    pub network_grace: Duration,
    /// How long an AddressBlock that the node can do without stays its own.
    pub block_grace: Duration,
    /// How often ledger, runtimes and what really runs are compared.
    pub reconcile_every: Duration,
    /// Ranges that are not the outside for any Network with a router of its own: what nodes, and machines
    /// that trust them, can be reached at and no Node lists.
    pub not_outside: Vec<IpNet>,
    /// The container runtime's socket, if it is to be asked which sandboxes there are.
    pub cri_socket: Option<PathBuf>,
    /// How long the container runtime must not have a sandbox before that counts as gone. A sandbox has its
    /// network before it is listed, and kubelet gives its making four minutes.
    pub sandbox_grace: Duration,
}

/// Who gives the pods of a node their main interface.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum MainInterfaces {
    /// The agent, as the node's CNI plugin: the Network `default` is served, and the node has no network
    /// without it.
    #[default]
    Ours,
    /// Another CNI plugin. The agent makes further interfaces only; the Network `default`, if there is one,
    /// is not served, and whether the node has a network is not the agent's to say.
    Foreign,
}

// === impl CoreConfig ===

impl CoreConfig {
    /// The usual limits, for a node and its directories.
    #[must_use]
    pub fn new(node: impl Into<String>, run_dir: impl Into<PathBuf>, state_dir: impl Into<PathBuf>) -> Self {
        Self {
            node: node.into(),
            namespace: names::SYSTEM_NAMESPACE.to_owned(),
            run_dir: run_dir.into(),
            state_dir: state_dir.into(),
            main_interfaces: MainInterfaces::default(),
            cache_wait: Duration::from_secs(5),
            block_wait: Duration::from_secs(10),
            nri_wait: Duration::from_millis(100),
            runtime_deadline: Duration::from_secs(30),
            detach_deadline: Duration::from_secs(15),
            request_deadline: Duration::from_secs(60),
            network_grace: Duration::from_secs(300),
            block_grace: Duration::from_secs(600),
            reconcile_every: Duration::from_secs(60),
            not_outside: Vec::new(),
            cri_socket: None,
            sandbox_grace: Duration::from_secs(600),
        }
    }

    /// Where the ledger is.
    #[must_use]
    pub fn ledger(&self) -> PathBuf {
        self.run_dir.join("ledger")
    }

    /// Where runtimes' sockets are looked for.
    #[must_use]
    pub fn runtimes_dir(&self) -> PathBuf {
        self.run_dir.join("runtimes")
    }

    /// Where the namespaces of routers are mounted.
    #[must_use]
    pub fn routers_dir(&self) -> PathBuf {
        self.run_dir.join("netns")
    }

    /// Where the run-time directory is.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }
}
