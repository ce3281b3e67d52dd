//! NodeSlice and BlockSlice: what every node must know of the others, in pieces that only the controller
//! writes. A Node says far more than its addresses and is written all the time; a slice changes when one of
//! these lines does.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A part of the cluster's nodes, with their addresses. The controller writes it; nodes read all of them.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "NodeSlice",
    category = "knit-internal",
    derive = "PartialEq",
    doc = "A part of the cluster's nodes, with their addresses. The controller writes it; do not edit it.",
    printcolumn(name = "Complete", type_ = "boolean", json_path = ".spec.complete"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodeSliceSpec {
    /// Its number. If a node is in two slices, the lower number counts.
    pub index: u32,
    /// Only in slice 0: all slices have been written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
    /// The nodes.
    #[serde(default)]
    #[schemars(length(max = 500))]
    pub nodes: Vec<SliceNode>,
}

/// What other nodes need to know of a node.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceNode {
    /// Its name.
    pub name: String,
    /// Its InternalIPs, by which other nodes reach it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Its other addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// Its uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// A part of the AddressBlocks of one Network. The controller writes it; nodes that have the Network read it.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "BlockSlice",
    category = "knit-internal",
    derive = "PartialEq",
    doc = "A part of the AddressBlocks of one Network. The controller writes it; do not edit it.",
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Complete", type_ = "boolean", json_path = ".spec.complete"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct BlockSliceSpec {
    /// The Network.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// Its number among the Network's slices. If a block is in two slices, the lower number counts.
    pub index: u32,
    /// Only in slice 0: all slices of this Network have been written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
    /// The blocks.
    #[serde(default)]
    #[schemars(length(max = 500))]
    pub blocks: Vec<SliceBlock>,
    /// Pods' interfaces of which the address or the MAC does not follow from the blocks. Missing if the
    /// controller does not write them here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500))]
    pub announced: Option<Vec<SliceInterface>>,
}

/// A pod's interface that other nodes are told of.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceInterface {
    /// Its NetworkAttachment, as `namespace/name`.
    pub attachment: String,
    /// The pod, in the same namespace.
    pub pod: String,
    /// The node that the pod runs on.
    pub node: String,
    /// The interface's addresses, one per family.
    #[serde(default)]
    #[schemars(length(max = 2))]
    pub addresses: Vec<String>,
    /// The interface's MAC address.
    pub mac: String,
}

/// One AddressBlock.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceBlock {
    /// The AddressBlock's name.
    pub name: String,
    /// The node that owns it.
    pub node: String,
    /// Its IPv4 range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<String>,
    /// Its IPv6 range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,
    /// When the AddressBlock was created: of two blocks that overlap, the older one counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<Time>,
}
