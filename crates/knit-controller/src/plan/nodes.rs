//! Nodes of which something cannot be read: who operates them is told.

use k8s_openapi::api::core::v1::ObjectReference;

use super::action::{Note, Plan};
use crate::cluster::Cluster;

/// So many addresses are quoted.
const QUOTED: usize = 3;

/// Says on a Node that addresses of it cannot be read. Nobody is kept away from these: pods of Networks that
/// reach the outside, and Services with external IPs, take them for anybody's.
pub(super) fn warn(cluster: &Cluster, plan: &mut Plan) {
    for (name, node) in cluster.nodes.iter().filter(|(_, node)| !node.unreadable.is_empty()) {
        let mut quoted = node.unreadable.iter().take(QUOTED).cloned().collect::<Vec<_>>().join(", ");
        if let Some(more) = node.unreadable.len().checked_sub(QUOTED).filter(|more| *more > 0) {
            quoted.push_str(&format!(" and {more} more"));
        }
        let text = format!(
            "status.addresses of Node {name} has what is not a valid IP address ({quoted}): Knit does not \
             protect it, and pods that reach the outside can reach it; correct --node-ip of its kubelet, or \
             what its cloud provider says"
        );
        let regarding = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(name.clone()),
            ..ObjectReference::default()
        };
        plan.notes.push(Note { regarding, reason: "AddressUnreadable", text });
    }
}
