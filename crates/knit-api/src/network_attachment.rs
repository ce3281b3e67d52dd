//! NetworkAttachment: one pod interface on one Network.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_types::Family;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::common::Route;

/// One pod interface on one Network: written by the node agent, or by a user to attach a running pod to a
/// Network.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "NetworkAttachment",
    namespaced,
    shortname = "netattach",
    category = "knit",
    status = "NetworkAttachmentStatus",
    derive = "PartialEq",
    selectable = ".spec.network",
    selectable = ".spec.pod",
    selectable = ".status.node",
    selectable = ".status.announced",
    doc = "One pod interface on one Network: written by the node agent, or by a user to attach a \
    running pod to a Network.",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.pod"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Interface", type_ = "string", json_path = ".status.interface"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0].address"),
    printcolumn(
        name = "Address-2",
        type_ = "string",
        json_path = ".status.addresses[1].address",
        priority = 1
    ),
    printcolumn(name = "MAC", type_ = "string", json_path = ".status.mac", priority = 1),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.node"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.spec == oldSelf.spec")
        .message("an attachment cannot be changed in place: delete this NetworkAttachment and create \
        another one")
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkAttachmentSpec {
    /// The pod, in this object's namespace.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,

    /// The Network.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,

    /// The interface's name in the pod. Defaults to the next free `netN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$"))]
    #[x_kube(validation = Rule::new("self != 'lo' && self != 'eth0'")
        .message("lo and eth0 are already used in every pod: use another name, for example net1"))]
    pub interface: Option<String>,

    /// Addresses that the interface must have, at most one per family. Defaults to free ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), inner(length(min = 2, max = 39)))]
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a))")
            .message("must be IP addresses without a prefix length, for example 10.77.0.9"),
        validation = Rule::new("size(self) < 2 || !self.all(a, isIP(a)) || ip(self[0]).family() != \
        ip(self[1]).family()")
            .message("at most one address per family is allowed: one IPv4 and one IPv6 address"),
    )]
    pub addresses: Vec<String>,

    /// The MAC address that the interface must have. Defaults to one derived from its address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$"))]
    pub mac: Option<String>,
}

/// What the node agent created.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkAttachmentStatus {
    /// `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The node the pod runs on. Of an attachment that a user made, the controller says which node that is;
    /// the node's agent does the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Whether other nodes must be told of the interface, because its address or its MAC does not follow from
    /// its node's AddressBlocks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub announced: bool,
    /// The container runtime's id of the pod's sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// The interface's name in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The interface's addresses, one per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AttachedAddress>,
    /// The interface's MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The interface's MTU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The routes through this interface.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// The other end of the interface, where tools can observe the pod's traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_interface: Option<HostInterface>,
    /// The pod's network namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_namespace: Option<NamespaceReference>,
}

/// One address of an interface.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachedAddress {
    /// The address's family.
    #[schemars(schema_with = "crate::common::family_schema")]
    pub family: Family,
    /// The address, without its prefix length.
    pub address: String,
    /// The prefix length of the address on the interface.
    pub prefix: u8,
    /// The gateway of this family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// The host's end of a pod's interface.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostInterface {
    /// Its name.
    pub name: String,
    /// Its index in the namespace it lives in.
    pub index: u32,
    /// The network namespace it lives in: the node's own for the default Network, a router's for any other.
    pub namespace: NamespaceReference,
}

/// A network namespace of the node.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceReference {
    /// Its path on the node; the node's own namespace has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Its inode number, as `ls -Li` of the path and `/proc/PID/ns/net` show it.
    pub inode: u64,
}
