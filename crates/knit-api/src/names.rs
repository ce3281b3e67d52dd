//! Names that appear in objects of others: annotations, labels, finalizers, taints, field managers.

use knit_types::fnv1a;

/// The Network that a pod has when nothing says otherwise.
pub const DEFAULT_NETWORK: &str = "default";

/// The namespace that Knit runs in unless told otherwise: Leases of agents and of the controller are there.
pub const SYSTEM_NAMESPACE: &str = "knit-system";

/// The class that a Network has when it names none; the controller makes it at its first start.
pub const DEFAULT_CLASS: &str = "knit";

/// The reference runtime's name in a NetworkClass.
pub const LINUX_RUNTIME: &str = "knit.dev/linux";

/// Pod annotation: further Networks, by name or as JSON (the syntax of the NPWG standard).
pub const NETWORKS_ANNOTATION: &str = "knit.dev/networks";

/// Pod annotation: a primary Network for this pod alone.
pub const PRIMARY_ANNOTATION: &str = "knit.dev/primary";

/// Finalizer that keeps a Network while pods or blocks use it.
pub const NETWORK_FINALIZER: &str = "knit.dev/in-use";

/// Finalizer that keeps a NetworkAttachment until the agent has unplugged it.
pub const ATTACHMENT_FINALIZER: &str = "knit.dev/attached";

/// Label on NetworkAttachments, AddressBlocks and NodeNetworks: the node they belong to.
pub const NODE_LABEL: &str = "knit.dev/node";

/// Label on NetworkAttachments and AddressBlocks: the Network they belong to.
pub const NETWORK_LABEL: &str = "knit.dev/network";

/// Annotation of an AddressBlock that the controller wants back, with a value that is given once only. From
/// then on its node gives out no further address of it, and repeats the value in its NodeNetwork once nobody
/// has one.
pub const RECLAIM_ANNOTATION: &str = "knit.dev/reclaim";

/// Label on NetworkAttachments that other nodes need: where the address is, or its MAC, follows from no
/// AddressBlock.
pub const ANNOUNCED_LABEL: &str = "knit.dev/announced";

/// Label on NetworkAttachments that the agent made: users make theirs without it.
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";

/// Value of [`MANAGED_BY_LABEL`] on what Knit makes.
pub const MANAGED_BY: &str = "knit";

/// Taint on a node whose agent does not answer, or whose addresses of the default Network have run out.
pub const UNSCHEDULABLE_TAINT: &str = "knit.dev/network-unavailable";

/// Field manager of the node agent's writes.
pub const AGENT_MANAGER: &str = "knit-node";

/// Field manager of the controller's writes.
pub const CONTROLLER_MANAGER: &str = "knit-controller";

/// The name of Knit's driver of dynamic resources (DRA).
pub const DRIVER: &str = "knit.dev";

/// The pool of devices that the controller publishes: one device for each Network.
pub const NETWORK_POOL: &str = "knit-networks";

/// What claims of Networks consume of a device.
pub const ADDRESSES_CAPACITY: &str = "addresses";

/// Device attribute of the multi-network API: the name of the Network.
pub const POD_NETWORK_ATTRIBUTE: &str = "multinetwork.networking.k8s.io/podNetwork";

/// Device attribute of the multi-network API: the kind of Network, by group and kind.
pub const POD_NETWORK_KIND_ATTRIBUTE: &str = "multinetwork.networking.k8s.io/podNetworkKind";

/// Value of [`POD_NETWORK_KIND_ATTRIBUTE`] for Networks.
pub const POD_NETWORK_KIND: &str = "knit-dev-network";

/// The DeviceClass of all devices of Knit's, and the beginning of those of single Networks.
pub const DEVICE_CLASS: &str = "knit";

/// The beginning of extended resources, by which pods ask for a Network without naming a claim.
pub const EXTENDED_RESOURCE: &str = "networks.knit.dev/";

/// The device that stands for a Network. Devices are named by DNS labels, so a Network with dots in its name
/// has one that is made of it.
#[must_use]
pub fn device_of(network: &str) -> String {
    if !network.contains('.') {
        return network.to_owned();
    }
    // What matters is that two Networks of one cluster do not meet.
    let hash = fnv1a(network.bytes());
    let readable: String = network.chars().take(46).map(|c| if c == '.' { '-' } else { c }).collect();
    format!("{readable}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_a_label() {
        assert_eq!(device_of("blue"), "blue");
        let (dotted, dashed) = (device_of("team.blue"), device_of("team-blue"));
        assert_ne!(dotted, dashed);
        let long = device_of(&format!("{}.b", "a".repeat(61)));
        for name in [dotted, long] {
            assert!(name.len() <= 63 && !name.contains('.'), "{name}");
        }
    }
}
