//! PolicyPeerSlice: what nodes know of each other's pods for the sake of policies.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The pods of one node in one Network that policies of that Network ask for, as far as they ask. Only the
/// controller writes it, and nothing is written while no policy asks.
///
/// One slice of a Network has no node: it says which labels the others tell of. A key is in it only after
/// every slice with a pod that has such a label tells of it, and is out of it before any slice leaves such a
/// label out. So a new key is a new version of this slice and of those whose pods have such a label, and of
/// no other.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "PolicyPeerSlice",
    shortname = "peerslice",
    category = "knit",
    derive = "PartialEq",
    doc = "The pods of one node in one Network that policies of that Network ask for, as far as they ask. \
           Only the controller writes it.",
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPeerSliceSpec {
    /// The Network whose addresses these are; also the label `knit.dev/network`.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The node that the pods run on. The slice without one has no pods, and its `labelKeys` are about all
    /// slices of the Network.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node: String,
    /// The keys of labels that some policy of this Network mentions: of the pods' labels, those with these
    /// keys are here. Which keys these are for all slices of the Network says the one without a node; a list
    /// in another adds to that. Whether a pod has any other is not known to whoever reads this. Without a
    /// list, all labels that matter are here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192), inner(length(max = 317)))]
    pub label_keys: Option<Vec<String>>,
    /// The pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub pods: Vec<PolicyPeer>,
}

/// A pod, as far as policies ask.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPeer {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid: an address may be another pod's later.
    pub uid: String,
    /// When it was made, in seconds: of two pods with one address, the younger has it.
    #[serde(default)]
    pub created: i64,
    /// Its addresses in this Network, of both families.
    pub addresses: Vec<String>,
    /// Those of its labels whose keys some policy of this Network mentions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Those of its ports whose names some policy of this Network mentions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PolicyPeerPort>,
}

/// A port of a container that has a name.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPeerPort {
    /// The name.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The number.
    pub port: u16,
}
