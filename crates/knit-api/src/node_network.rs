//! NodeNetwork: what one node has.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::common::AddressCounts;

/// What one node has: its runtimes, and its Networks with readiness and free addresses. Its name is the node's.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "NodeNetwork",
    shortname = "nodenet",
    category = "knit",
    status = "NodeNetworkStatus",
    derive = "PartialEq",
    doc = "What one node has: its runtimes, and its Networks with readiness and free addresses. Its name is the node's.",
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agentVersion"),
    printcolumn(name = "Runtime", type_ = "string", json_path = ".status.runtimes[0].name"),
    printcolumn(name = "Networks", type_ = "integer", json_path = ".status.networkCount"),
    printcolumn(name = "Not-Ready", type_ = "integer", json_path = ".status.notReadyCount"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkSpec {}

/// What the node's agent says of it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatus {
    /// The version of the node agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// The network runtimes that the agent found on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runtimes: Vec<NodeRuntime>,
    /// The Networks that this node serves or is asked to serve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NodeNetworkStatusNetwork>,
    /// How many Networks there are, for `kubectl get`.
    #[serde(default)]
    pub network_count: i32,
    /// How many of them are not ready, for `kubectl get`.
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
    /// How many pods of this node are attached to it.
    #[serde(default)]
    pub attachments: i32,
    /// Addresses used and free in this node's blocks, one entry per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AddressCounts>,
    /// How many AddressBlocks of it the node knows. A further one is given only to a node that knows all it has, so
    /// that one wish is not answered twice.
    #[serde(default)]
    pub blocks: i32,
    /// The node asks for a further AddressBlock.
    #[serde(default)]
    pub wants_block: bool,
}
