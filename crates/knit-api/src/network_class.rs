//! NetworkClass: which runtime serves a Network, and with which parameters.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Which network runtime serves the Networks of this class, and with which parameters.
#[derive(Clone, CustomResource, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "NetworkClass",
    plural = "networkclasses",
    shortname = "netclass",
    category = "knit",
    status = "NetworkClassStatus",
    derive = "PartialEq",
    doc = "Which network runtime serves the Networks of this class, and with which parameters.",
    printcolumn(name = "Runtime", type_ = "string", json_path = ".spec.runtime"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Accepted\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkClassSpec {
    /// The runtime's name as it announces itself, a domain and a path: `knit.dev/linux` is Knit's own.
    #[schemars(
        length(min = 3, max = 253),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9/\-._~]+$")
    )]
    #[x_kube(validation = ("self == oldSelf", "the runtime of a class cannot be changed: create another \
    NetworkClass and move Networks to it"))]
    pub runtime: String,

    /// Parameters passed to the runtime unchanged; their meaning is defined by the runtime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::network_class::any_object")]
    pub parameters: Option<serde_json::Map<String, serde_json::Value>>,
}

/// What the controller knows about a class.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkClassStatus {
    /// `Accepted`: a node has this runtime.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The features that the runtime has on every node, named as KNI capabilities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub supported_features: Vec<String>,
}

/// The schema of an object with arbitrary fields.
fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}
