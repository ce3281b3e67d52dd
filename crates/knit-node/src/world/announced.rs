//! Interfaces of pods that nobody can derive from AddressBlocks: one by one, from their NetworkAttachments.
//!
//! Where a pod's address is follows from the block that it is out of, and so does its MAC. What a pod asked for may be
//! outside of its node's blocks, or have another MAC: then every other node has to be told. Agents publish those
//! attachments with a label of their own, so that nobody has to follow all attachments of the cluster.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::{NetworkAttachment, Topology};
use knit_ipam::{Mac, pod_mac};
use serde::{Deserialize, Serialize};

use super::World;

/// One interface, as its NetworkAttachment tells it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AnnouncedView {
    /// The Network.
    pub network: String,
    /// The pod, in words.
    pub pod: String,
    /// The node it is on.
    pub node: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its MAC.
    pub mac: Mac,
    /// Whether an agent published it for this purpose; if not, it is an object that a user made.
    pub published: bool,
}

impl AnnouncedView {
    /// What an object says; nothing while it says none of it.
    #[must_use]
    pub fn of(object: &NetworkAttachment, published: bool) -> Option<Self> {
        let status = object.status.as_ref()?;
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        let addresses: Vec<IpAddr> = status.addresses.iter().filter_map(|a| a.address.parse().ok()).collect();
        Some(Self {
            network: object.spec.network.clone(),
            pod: format!("pod {namespace}/{}", object.spec.pod),
            node: status.node.clone()?,
            addresses: Some(addresses).filter(|a| !a.is_empty())?,
            mac: status.mac.as_ref()?.parse().ok()?,
            published,
        })
    }
}

/// Whether other nodes have to be told of an interface: they cannot derive where it is, or its MAC.
#[must_use]
pub fn is_needed(world: &World, network: &str, node: &str, addresses: &[IpAddr], mac: Mac) -> bool {
    let Some(object) = world.networks.get(network) else { return false };
    let in_block = |address: &IpAddr| {
        let contains = |range: &Option<String>| {
            let range = range.as_deref().and_then(|r| r.parse::<IpNet>().ok());
            range.is_some_and(|range| range.contains(address))
        };
        let mut own = world.blocks.values().filter(|b| b.network == network && b.node == node);
        own.any(|b| contains(&b.ipv4) || contains(&b.ipv6))
    };
    if !addresses.iter().all(in_block) {
        return true;
    }
    // Routed packets go to the node, whatever the pod's MAC.
    let id = object.status.as_ref().and_then(|s| s.id);
    let first = addresses.iter().find(|a| a.is_ipv4()).or(addresses.first());
    let derived = id.zip(first).map(|(id, first)| pod_mac(id, *first));
    object.spec.topology == Topology::Layer2 && derived.is_some_and(|derived| derived != mac)
}

/// What other nodes have announced of a Network.
fn of_others<'a>(
    world: &'a World,
    network: &'a str,
    node: &'a str,
) -> impl Iterator<Item = &'a AnnouncedView> {
    world.announced.values().map(|view| &**view).filter(move |view| {
        view.network == network
            && view.node != node
            && is_needed(world, network, &view.node, &view.addresses, view.mac)
    })
}

/// The same as a runtime takes it.
#[must_use]
pub fn for_runtime(world: &World, network: &str, node: &str) -> Vec<knit_runtime::Announced> {
    let mut all: Vec<knit_runtime::Announced> = of_others(world, network, node)
        .map(|view| knit_runtime::Announced {
            node: view.node.clone(),
            node_addresses: world.nodes.get(&view.node).map(|n| n.addresses.clone()).unwrap_or_default(),
            addresses: view.addresses.clone(),
            mac: view.mac,
        })
        .collect();
    all.sort_by(|a, b| (&a.addresses, &a.node).cmp(&(&b.addresses, &b.node)));
    all.dedup();
    all
}

/// The addresses that pods of other nodes have so, with a word on who.
#[must_use]
pub fn held(world: &World, network: &str, node: &str) -> BTreeMap<IpAddr, String> {
    of_others(world, network, node)
        .flat_map(|view| view.addresses.iter().map(|a| (*a, format!("{} on node {}", view.pod, view.node))))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use knit_api::{AddressBlockSpec, Network};
    use serde_json::json;

    use super::*;

    fn world(topology: &str) -> World {
        let network: Network = serde_json::from_value(json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "blue"},
            "spec": {"topology": topology, "subnets": [{"cidr": "10.2.0.0/16"}]}, "status": {"id": 7}
        }))
        .expect("a Network");
        let block = |node: &str, range: &str| {
            let spec = AddressBlockSpec {
                network: "blue".into(),
                node: node.into(),
                ipv4: Some(range.into()),
                ipv6: None,
            };
            (format!("blue-{node}"), Arc::new(spec))
        };
        World {
            networks: Arc::new([("blue".to_owned(), Arc::new(network))].into()),
            blocks: Arc::new([block("a", "10.2.1.0/28"), block("b", "10.2.2.0/28")].into()),
            ..World::default()
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn only_what_cannot_be_derived_is_announced() {
        let custom: Mac = "02:00:00:00:00:07".parse().expect("a MAC");
        let derived = |text: &str| pod_mac(7, ip(text));
        let cases = [
            ("Layer3", "10.2.1.5", None, false),
            ("Layer3", "10.2.1.5", Some(custom), false),
            ("Layer2", "10.2.1.5", None, false),
            ("Layer2", "10.2.1.5", Some(custom), true),
            ("Layer3", "10.2.200.5", None, true),
            // Another node's block is not this node's.
            ("Layer3", "10.2.2.5", None, true),
        ];
        for (topology, address, mac, needed) in cases {
            let mac = mac.unwrap_or_else(|| derived(address));
            let found = is_needed(&world(topology), "blue", "a", &[ip(address)], mac);
            assert_eq!(found, needed, "{topology} {address} {mac}");
        }
        assert!(!is_needed(&world("Layer3"), "unknown", "a", &[ip("10.9.0.1")], custom));
    }

    #[test]
    fn ones_own_are_left_out() {
        let mut world = world("Layer3");
        let view = |node: &str, address: &str| {
            let view = AnnouncedView {
                network: "blue".into(),
                pod: format!("pod shop/{node}"),
                node: node.into(),
                addresses: vec![ip(address)],
                mac: pod_mac(7, ip(address)),
                published: true,
            };
            (("shop".to_owned(), node.to_owned()), Arc::new(view))
        };
        world.announced = Arc::new([view("a", "10.2.200.1"), view("b", "10.2.200.2")].into());
        let told = for_runtime(&world, "blue", "a");
        assert_eq!(told.iter().map(|t| t.addresses[0]).collect::<Vec<_>>(), [ip("10.2.200.2")]);
        assert_eq!(held(&world, "blue", "b"), [(ip("10.2.200.1"), "pod shop/a on node a".to_owned())].into());
        assert!(for_runtime(&world, "red", "a").is_empty());
    }
}
