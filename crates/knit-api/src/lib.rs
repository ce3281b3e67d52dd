//! Knit's contracts: the Kubernetes kinds of group `knit.dev` and, with the feature `kni`, the gRPC protocols
//! between the node agent, network runtimes, the container runtime and kubelet. Nothing here acts; every
//! other crate may depend on it.
//!
//! | kind | scope | written by |
//! |---|---|---|
//! | [`NetworkClass`] | cluster | operator |
//! | [`Network`] | cluster | operator |
//! | [`NetworkAttachment`] | namespaced | node agent, or a user who plugs a Network into a running pod |
//! | [`NodeNetwork`] | cluster | node agent |
//! | [`AddressBlock`] | cluster | controller |
//! | [`NodeSlice`], [`BlockSlice`] | cluster | controller, from Nodes and AddressBlocks |
//! | [`PolicyPeerSlice`] | cluster | controller |

#![allow(clippy::duplicated_attributes, reason = "two printer columns of one type are two columns")]

mod address_block;
pub mod attachment_config;
mod common;
pub mod conditions;
#[cfg(feature = "kni")]
pub mod cri;
mod formats;
#[cfg(feature = "kni")]
pub mod kni;
#[cfg(feature = "kni")]
pub mod kubelet;
pub mod names;
mod network;
mod network_attachment;
mod network_class;
mod node_network;
mod policy_peer_slice;
mod router_rules;
mod slices;

pub use address_block::{AddressBlock, AddressBlockSpec};
pub use attachment_config::{AttachmentConfig, ConfigError};
pub use common::{AddressCounts, Route};
pub use knit_types::{Family, Topology, UnderlayKind, UnderlayMode};
pub use network::{
    AllowedNamespaces, AllowedNamespacesFrom, LiveConnections, Network, NetworkPolicySettings,
    NetworkServices, NetworkSpec, NetworkStatus, Outside, Permission, PolicyEnforcement, Scheduling,
    ServiceReference, Subnet, Underlay, UnderlayParent,
};
pub use network_attachment::{
    AttachedAddress, HostInterface, NamespaceReference, NetworkAttachment, NetworkAttachmentSpec,
    NetworkAttachmentStatus,
};
pub use network_class::{NetworkClass, NetworkClassSpec, NetworkClassStatus};
pub use node_network::{
    HeldRanges, NodeNetwork, NodeNetworkPolicies, NodeNetworkSpec, NodeNetworkStatus,
    NodeNetworkStatusNetwork, NodeRuntime, SpareBlock,
};
pub use policy_peer_slice::{PolicyPeer, PolicyPeerPort, PolicyPeerSlice, PolicyPeerSliceSpec};
pub use slices::{
    BlockSlice, BlockSliceSpec, NodeSlice, NodeSliceSpec, SliceBlock, SliceInterface, SliceNode,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// The API group of every Knit kind.
pub const GROUP: &str = "knit.dev";

/// The version of the API that this crate describes.
pub const VERSION: &str = "v1alpha1";

/// Every CustomResourceDefinition of Knit, in the order in which they are documented.
#[must_use]
pub fn crds() -> Vec<CustomResourceDefinition> {
    let all = [
        NetworkClass::crd(),
        Network::crd(),
        NetworkAttachment::crd(),
        NodeNetwork::crd(),
        AddressBlock::crd(),
        NodeSlice::crd(),
        BlockSlice::crd(),
        PolicyPeerSlice::crd(),
    ];
    all.map(formats::known).into()
}
