//! Small types that several kinds share.

use knit_types::{Family, Topology, UnderlayKind, UnderlayMode};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A route inside a pod.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// Where packets are to go: an address range, for example `192.0.2.0/24`.
    #[schemars(length(min = 3, max = 43))]
    pub destination: String,
    /// The next hop; the Network's gateway if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 39))]
    pub via: Option<String>,
}

/// How many addresses of one family there are.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AddressCounts {
    /// The family that is counted.
    #[schemars(schema_with = "family_schema")]
    pub family: Family,
    /// Addresses that pods and routers have.
    pub used: i64,
    /// Addresses that a pod could get; at most 2^53 - 1, which stands for "that many or more".
    pub free: i64,
}

/// The schema of a family. The type itself is in knit-types, which knows no schemas.
pub(crate) fn family_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": Family::ALL.map(Family::as_str)})
}

/// The schema of how pods of one node reach each other on a link of the node.
pub(crate) fn underlay_mode_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": UnderlayMode::ALL.map(UnderlayMode::as_str)})
}

/// The schema of what an interface on a link of its node is.
pub(crate) fn underlay_kind_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": UnderlayKind::ALL.map(UnderlayKind::as_str)})
}

/// The schema of a topology.
pub(crate) fn topology_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": Topology::ALL.map(Topology::as_str)})
}
