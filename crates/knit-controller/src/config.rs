//! How the controller is set up.

use std::time::Duration;

use knit_api::Subnet;

/// How the controller is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The namespace of the agents' Leases and of the controller's own.
    pub namespace: String,
    /// Who this controller is among several: its pod's name. Must differ between them.
    pub identity: String,
    /// The name of the Lease that the leader holds.
    pub lease_name: String,
    /// How long a leader that has gone silent is waited for.
    pub lease_duration: Duration,
    /// How often the leader renews, and the others look.
    pub renew_every: Duration,
    /// Whether the Network `default` and the NetworkClass `knit` are made if they are missing.
    pub make_defaults: bool,
    /// Whether agents are the cluster's CNI plugin. If not, the Network `default` is not created, and no Node
    /// is tainted: its network is another's.
    pub serves_default: bool,
    /// The subnets of the Network `default` when it is made here and Nodes have no podCIDRs.
    pub default_subnets: Vec<Subnet>,
    /// How long a Node must have been there without podCIDRs before `default_subnets` are used: a cluster
    /// that gives Nodes podCIDRs does so a moment after they join.
    pub pod_cidr_wait: Duration,
    /// How long after a Node is gone its blocks may go to another one. Its pods may still run for a while.
    pub node_gone_grace: Duration,
    /// How often a Network's counts of addresses are written where nothing else changed: they do with every
    /// pod, and each write goes to every node.
    pub counts_every: Duration,
    /// Whether Networks are shown to the scheduler as devices, for claims.
    pub show_devices: bool,
    /// Whether Knit enforces policies in this cluster; as the agents are told.
    pub enforce_policies: bool,
}

impl Config {
    /// The usual set-up.
    #[must_use]
    pub fn new(identity: impl Into<String>) -> Self {
        Self {
            namespace: knit_api::names::SYSTEM_NAMESPACE.into(),
            identity: identity.into(),
            lease_name: "knit-controller".into(),
            lease_duration: Duration::from_secs(15),
            renew_every: Duration::from_secs(3),
            make_defaults: true,
            serves_default: true,
            default_subnets: Vec::new(),
            pod_cidr_wait: Duration::ZERO,
            node_gone_grace: Duration::from_secs(300),
            counts_every: Duration::from_secs(30),
            show_devices: false,
            enforce_policies: true,
        }
    }

    /// The name of the Lease that keeps the highest number of any Network that is gone.
    pub(crate) fn numbers_name(&self) -> String {
        format!("{}-numbers", self.lease_name)
    }
}
