//! AddressBlock: a range of addresses that one node owns in one Network.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// A range of addresses that one node owns in one Network. The families are paired by index: the pod with the
/// i-th IPv4 address has the i-th IPv6 address.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "AddressBlock",
    shortname = "block",
    category = "knit",
    derive = "PartialEq",
    selectable = ".spec.network",
    selectable = ".spec.node",
    doc = "A range of addresses that one node owns in one Network. The families are paired by index.",
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node"),
    printcolumn(name = "IPv4", type_ = "string", json_path = ".spec.ipv4"),
    printcolumn(name = "IPv6", type_ = "string", json_path = ".spec.ipv6"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.spec == oldSelf.spec")
        .message("an AddressBlock cannot be changed: delete it once it is empty; the controller creates \
        another")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.ipv4) || has(self.ipv6)").message("a block needs ipv4, ipv6 or both"),
)]
pub struct AddressBlockSpec {
    /// The Network whose addresses these are.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The node that assigns them to pods.
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// The IPv4 range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 9, max = 18))]
    #[x_kube(validation = Rule::new("isCIDR(self) && cidr(self).ip().family() == 4 && cidr(self) == \
    cidr(self).masked()")
        .message("must be an IPv4 CIDR, for example 10.77.0.16/28"))]
    pub ipv4: Option<String>,
    /// The IPv6 range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 4, max = 43))]
    #[x_kube(validation = Rule::new("isCIDR(self) && cidr(self).ip().family() == 6 && cidr(self) == \
    cidr(self).masked()")
        .message("must be an IPv6 CIDR, for example fd77::10/124"))]
    pub ipv6: Option<String>,
}
