//! NodeNetwork: what one node has.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::common::AddressCounts;

/// The runtimes of one node, and its Networks with readiness and free addresses. It is named after the node.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "NodeNetwork",
    shortname = "nodenet",
    category = "knit",
    status = "NodeNetworkStatus",
    derive = "PartialEq",
    doc = "The runtimes of one node, and its Networks with readiness and free addresses. It is named \
           after the node.",
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agentVersion"),
    printcolumn(name = "Runtime", type_ = "string", json_path = ".status.runtimes[0].name"),
    printcolumn(name = "Networks", type_ = "integer", json_path = ".status.networkCount"),
    printcolumn(name = "Not-Ready", type_ = "integer", json_path = ".status.notReadyCount"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkSpec {}

/// What the node's agent reports.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatus {
    /// The version of the node agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// The network runtimes that the agent found on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runtimes: Vec<NodeRuntime>,
    /// The Networks that this node serves or should serve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NodeNetworkStatusNetwork>,
    /// The ranges of addresses that this node has. One whose AddressBlock was deleted stays listed while
    /// pods of this node have addresses of it, and is assigned to no other node meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_ranges: Vec<HeldRanges>,
    /// AddressBlocks that this node can do without: no pod has had an address of them for a while.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spare_blocks: Vec<SpareBlock>,
    /// Number of Networks, for `kubectl get`.
    #[serde(default)]
    pub network_count: i32,
    /// Number of Networks that are not ready, for `kubectl get`.
    #[serde(default)]
    pub not_ready_count: i32,
}

/// A network runtime on a node.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRuntime {
    /// The name it announces, as NetworkClasses name it.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The features it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// Whether it answers and can serve.
    pub healthy: bool,
    /// What is wrong, if it is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// One Network on one node.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatusNetwork {
    /// The Network's name.
    pub name: String,
    /// Whether pods can be attached to it here.
    pub ready: bool,
    /// Why it is ready or not, in one word.
    pub reason: String,
    /// What is wrong and what to do, if it is not ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Number of pods of this node that are attached to it.
    #[serde(default)]
    pub attachments: i32,
    /// Used and free addresses in this node's blocks, one entry per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AddressCounts>,
    /// Number of its AddressBlocks that the node knows. Another one is only assigned to a node that knows all
    /// it has, so that one request is not answered twice.
    #[serde(default)]
    pub blocks: i32,
    /// The node requests another AddressBlock.
    #[serde(default)]
    pub wants_block: bool,
    /// The policies that are in force here; left out where none acts on a pod of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<NodeNetworkPolicies>,
}

/// An AddressBlock that its node can do without.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SpareBlock {
    /// The AddressBlock's name.
    pub name: String,
    /// The value of its annotation `knit.dev/reclaim` for which the node has given it up: no pod has an
    /// address of it, none rests, and none is given out again unless the annotation goes away. Only then
    /// the AddressBlock is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
}

/// What one node has of the addresses of one Network.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldRanges {
    /// The Network's name.
    pub network: String,
    /// The ranges, as CIDRs.
    pub ranges: Vec<String>,
}

/// The policies that are in force in one Network on one node.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkPolicies {
    /// Number of policies that act on pods of this node.
    pub acting: i32,
    /// The highest `metadata.resourceVersion` among them: a policy that acts here is in force in this version
    /// if this is at least as high.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest_resource_version: Option<String>,
    /// Why policies are not in force here, or who enforces them instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
