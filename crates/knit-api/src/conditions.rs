//! Condition types and reasons, in one place, so that what is written and what is waited for cannot differ.

/// Conditions of a NetworkClass.
pub mod network_class {
    /// The controller knows a runtime of this name on at least one node.
    pub const ACCEPTED: &str = "Accepted";
    /// Reason of `Accepted`: a runtime answers on at least one node.
    pub const REASON_ACCEPTED: &str = "Accepted";
    /// Reason of `Accepted=False`: no node has a runtime of this name.
    pub const REASON_NO_RUNTIME: &str = "NoRuntime";
}

/// Conditions of a Network.
pub mod network {
    /// The Network can be served: its class exists and its addresses do not conflict with anything.
    pub const ACCEPTED: &str = "Accepted";
    /// Every node that has pods of it has it set up.
    pub const READY: &str = "Ready";

    /// Services are served in the Network. Said only where they are not.
    pub const SERVICES_SERVED: &str = "ServicesServed";
    /// NetworkPolicies hold in the Network. Said only where its kind rules that out.
    pub const POLICY_ENFORCED: &str = "NetworkPolicyEnforced";
    /// Reason of `ServicesServed=False` and `NetworkPolicyEnforced=False`: nothing of Knit's is between a pod
    /// and the segment.
    pub const REASON_NO_ROUTER: &str = "NoRouter";

    /// Reason of `Accepted`: there is no objection to the Network.
    pub const REASON_ACCEPTED: &str = "Accepted";
    /// Reason of `Accepted=False`: the NetworkClass does not exist or is not accepted.
    pub const REASON_NO_CLASS: &str = "ClassNotFound";
    /// Reason of `Accepted=False`: its subnets overlap nodes, services, the default Network or, if one pod
    /// has both, another Network.
    pub const REASON_OVERLAP: &str = "SubnetOverlap";
    /// Reason of `Accepted=False`: a namespace that it selects already has another primary Network.
    pub const REASON_PRIMARY_CONFLICT: &str = "PrimaryConflict";
    /// Reason of `Accepted=False`: something that the schema cannot express is wrong; the message says what.
    pub const REASON_INVALID: &str = "Invalid";
    /// Reason of `Ready`: set up on every node that needs it.
    pub const REASON_READY: &str = "Ready";
    /// Reason of `Ready=False`: some node is not done yet; the message names it.
    pub const REASON_NODES_NOT_READY: &str = "NodesNotReady";
    /// Reason of `Ready=False`: the Network is not accepted.
    pub const REASON_NOT_ACCEPTED: &str = "NotAccepted";
    /// Reason of `Ready=False`: being deleted, and still in use.
    pub const REASON_IN_USE: &str = "InUse";
}

/// Conditions of ClusterNetworkPolicy, AdminNetworkPolicy and BaselineAdminNetworkPolicy.
pub mod policy {
    /// Knit takes the policy as it is written.
    pub const ACCEPTED: &str = "knit.dev/Accepted";
    /// Reason of `Accepted`: all of it is understood.
    pub const REASON_ACCEPTED: &str = "Accepted";
    /// Reason of `Accepted`: parts of it are ignored; the message names them.
    pub const REASON_PARTLY_IGNORED: &str = "PartlyIgnored";
    /// Reason of `Accepted=False`: nothing of it is used; the message says why.
    pub const REASON_INVALID: &str = "Invalid";
    /// Reason of `Accepted=False`: Knit leaves policies to others, in all or some of the Networks concerned.
    pub const REASON_NOT_ENFORCED: &str = "NotEnforced";
}

/// Conditions of a NetworkAttachment.
pub mod network_attachment {
    /// The interface exists and carries traffic.
    pub const READY: &str = "Ready";

    /// Reason of `Ready`: attached and verified.
    pub const REASON_ATTACHED: &str = "Attached";
    /// Reason of `Ready=False`: the pod does not exist or has no network of its own.
    pub const REASON_NO_POD: &str = "PodNotFound";
    /// Reason of `Ready=False`: the Network does not exist.
    pub const REASON_NO_NETWORK: &str = "NetworkNotFound";
    /// Reason of `Ready=False`: the pod's namespace may not use the Network.
    pub const REASON_NOT_ALLOWED: &str = "NotAllowed";
    /// Reason of `Ready=False`: no address is left.
    pub const REASON_NO_ADDRESS: &str = "AddressesExhausted";
    /// Reason of `Ready=False`: a requested address, MAC or interface name is not available.
    pub const REASON_REFUSED: &str = "RequestRefused";
    /// Reason of `Ready=False`: the runtime failed; the agent retries.
    pub const REASON_FAILED: &str = "AttachFailed";
}

/// Reasons of a Network's readiness on one node, as NodeNetwork shows it.
pub mod node_network {
    /// Set up, and pods can be attached.
    pub const REASON_READY: &str = "Ready";
    /// Not set up yet, or setup failed; the message says why.
    pub const REASON_NOT_SET_UP: &str = "NotSetUp";
    /// Set up, but no address is free.
    pub const REASON_NO_ADDRESS: &str = "AddressesExhausted";
    /// The runtime of its class does not answer.
    pub const REASON_RUNTIME_DOWN: &str = "RuntimeDown";
    /// The runtime of its class lacks a feature that it needs; the message names it.
    pub const REASON_UNSUPPORTED: &str = "Unsupported";
}
