//! Names that appear in objects of others: annotations, labels, finalizers, taints, field managers.

/// The Network that a pod has when nothing says otherwise.
pub const DEFAULT_NETWORK: &str = "default";

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

/// Label on NetworkAttachments that other nodes need: where the address is, or its MAC, follows from no AddressBlock.
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
