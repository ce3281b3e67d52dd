//! What a Node says of itself.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use knit_types::{parse_ip, parse_net};

/// The addresses of a Node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeAddresses {
    /// By these other nodes reach it.
    pub internal: Vec<IpAddr>,
    /// Those of any other type, such as `ExternalIP`, that lead to it too.
    pub others: Vec<IpAddr>,
    /// What is written as an address and is none, with its type: nobody can be kept away from it.
    pub unreadable: Vec<String>,
}

impl NodeAddresses {
    /// What is written in the status of a Node. A host name is not an address.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let listed = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        let mut found = Self::default();
        for listed in listed.into_iter().flatten() {
            let Some(address) = parse_ip(&listed.address) else {
                if matches!(listed.type_.as_str(), "InternalIP" | "ExternalIP") {
                    found.unreadable.push(format!("{} {:?}", listed.type_, excerpt(&listed.address)));
                }
                continue;
            };
            let list = if listed.type_ == "InternalIP" { &mut found.internal } else { &mut found.others };
            list.push(address);
        }
        found
    }

    /// All of them: none is ever a pod's.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.internal.iter().chain(&self.others).copied()
    }
}

/// The beginning of what a kubelet wrote, which may be of any length.
fn excerpt(text: &str) -> &str {
    text.char_indices().nth(45).map_or(text, |(end, _)| &text[..end])
}

/// The ranges that the cluster gave a Node for its pods. `podCIDR` is the first of `podCIDRs`, and counts
/// only where those are missing.
#[must_use]
pub fn pod_ranges(node: &Node) -> Vec<IpNet> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let all = spec.pod_cidrs.as_ref().filter(|all| !all.is_empty());
    let listed = all.map_or_else(|| spec.pod_cidr.as_slice(), |all| all.as_slice());
    listed.iter().filter_map(|range| parse_net(range.trim())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(value: serde_json::Value) -> Node {
        serde_json::from_value(value).expect("a Node")
    }

    #[test]
    fn a_node_is_known_by_all_of_its_addresses_and_reached_by_its_internal_ones() {
        let address = |kind: &str, address: &str| json!({"type": kind, "address": address});
        let found = NodeAddresses::of(&node(json!({"status": {"addresses": [
            address("Hostname", "b"),
            address("ExternalIP", "203.0.113.2"),
            address("InternalIP", "192.168.7.2"),
            address("ExternalIP", "2001:db8::2"),
            // As Kubernetes reads them, and so do the service proxy and policies.
            address("InternalIP", "192.168.007.3"),
            address("InternalIP", "::ffff:192.168.7.4"),
        ]}})));
        let texts = |list: &[IpAddr]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&found.internal), ["192.168.7.2", "192.168.7.3", "192.168.7.4"]);
        assert_eq!(texts(&found.others), ["203.0.113.2", "2001:db8::2"]);
        assert_eq!((found.all().count(), found.unreadable.len()), (5, 0), "a host name is not an address");
        assert_eq!(NodeAddresses::of(&node(json!({}))), NodeAddresses::default());
    }

    #[test]
    fn an_address_that_cannot_be_read_was_dropped_without_a_word() {
        let found = NodeAddresses::of(&node(json!({"status": {"addresses": [
            {"type": "InternalIP", "address": "192.168.7.2/24"},
            {"type": "ExternalIP", "address": "é".repeat(100_000)},
            {"type": "Hostname", "address": "b"},
            {"type": "InternalDNS", "address": "b.example"},
            {"type": "InternalIP", "address": "192.168.7.3"},
        ]}})));
        assert_eq!((found.internal.len(), found.others.len()), (1, 0));
        assert_eq!(
            found.unreadable,
            ["InternalIP \"192.168.7.2/24\"", &format!("ExternalIP {:?}", "é".repeat(45))]
        );
    }

    #[test]
    fn pod_cidrs_count_before_pod_cidr() {
        for (spec, expected) in [
            (json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00::/64"]}), 2),
            (json!({"podCIDR": "10.1.0.0/24", "podCIDRs": []}), 1),
            (json!({"podCIDR": "10.1.0.0/24"}), 1),
            (json!({"podCIDRs": ["10.1.0.0/24", "nonsense"]}), 1),
            (json!({"podCIDRs": ["010.1.0.0/24"]}), 1),
            (json!({}), 0),
        ] {
            assert_eq!(pod_ranges(&node(json!({"spec": spec.clone()}))).len(), expected, "{spec}");
        }
    }
}
