//! Interfaces of pods that nobody can derive from AddressBlocks: one by one, from their NetworkAttachments.
//!
//! Where a pod's address is follows from the block that it is out of, and so does its MAC. What a pod asked
//! for may be outside of its node's blocks, or have another MAC: then every other node has to be told. Agents
//! say so in the status of its NetworkAttachment, and the controller puts it into the slices of its Network,
//! so that nobody follows all attachments of the cluster.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use knit_api::NetworkAttachment;
use knit_ipam::{Mac, Standing, may_have_mac, pod_mac};
use knit_model::{Network, attached_addresses};
use knit_types::NetworkName;
use knit_types::sync::Locked;
use serde::{Deserialize, Serialize};

use super::World;

/// One interface, as its NetworkAttachment tells it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AnnouncedView {
    /// The Network.
    pub network: NetworkName,
    /// The pod, in words.
    pub pod: String,
    /// The node it is on.
    pub node: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its MAC.
    pub mac: Mac,
}

impl AnnouncedView {
    /// What an object says; nothing while it says none of it.
    #[must_use]
    pub fn of(object: &NetworkAttachment) -> Option<Self> {
        let status = object.status.as_ref()?;
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        Some(Self {
            network: object.spec.network.parse().ok()?,
            pod: format!("pod {namespace}/{}", object.spec.pod),
            node: status.node.clone()?,
            addresses: Some(attached_addresses(status)).filter(|a| !a.is_empty())?,
            mac: status.mac.as_ref()?.parse().ok()?,
        })
    }
}

/// Whether other nodes have to be told of an interface: they cannot derive where it is, or its MAC.
#[must_use]
pub fn is_needed(world: &World, network: &NetworkName, node: &str, addresses: &[IpAddr], mac: Mac) -> bool {
    let Some(object) = world.networks.get(network) else { return false };
    let own = Blocks::of(world, network, |other| other == node);
    cannot_be_derived(object, &own, node, addresses, mac)
}

fn cannot_be_derived(
    object: &Network,
    blocks: &Blocks<'_>,
    node: &str,
    addresses: &[IpAddr],
    mac: Mac,
) -> bool {
    if !addresses.iter().all(|address| blocks.contain(node, *address)) {
        return true;
    }
    // Routed packets go to the node, whatever the pod's MAC.
    let derived = object.id().zip(deciding(addresses)).map(|(id, first)| pod_mac(id, first));
    object.topology().is_switched() && derived.is_some_and(|derived| derived != mac)
}

/// Whether a node may announce this: it says where packets of every other node go. Each address is in a
/// reserved range of the Network, where any node's pods may have one, or in a block of that node; and the MAC
/// is nobody else's.
fn is_believed(object: &Network, blocks: &Blocks<'_>, view: &AnnouncedView) -> bool {
    let deciding = object.id().zip(deciding(&view.addresses));
    let own_mac = deciding.is_some_and(|(id, first)| may_have_mac(id, first, view.mac));
    let pool = object.pool().ok().flatten();
    // Never the subnet's own address, its gateway or broadcast.
    let reserved = |address: IpAddr| pool.is_some_and(|pool| pool.standing(address) == Standing::Reserved);
    let own = |address: &IpAddr| reserved(*address) || blocks.contain(&view.node, *address);
    own_mac && view.addresses.iter().all(own)
}

/// The address that decides an interface's MAC.
fn deciding(addresses: &[IpAddr]) -> Option<IpAddr> {
    addresses.iter().find(|a| a.is_ipv4()).or(addresses.first()).copied()
}

/// Blocks of one Network by node, read once for all that is announced.
struct Blocks<'a>(HashMap<&'a str, Vec<IpNet>>);

impl<'a> Blocks<'a> {
    fn of(world: &'a World, network: &NetworkName, wanted: impl Fn(&str) -> bool) -> Self {
        let mut ranges: HashMap<&str, Vec<IpNet>> = HashMap::new();
        for block in world.blocks.values().filter(|b| b.network() == network && wanted(b.node())) {
            ranges.entry(block.node()).or_default().extend(block.ranges());
        }
        Self(ranges)
    }

    fn contain(&self, node: &str, address: IpAddr) -> bool {
        self.0.get(node).is_some_and(|ranges| ranges.iter().any(|range| range.contains(&address)))
    }
}

/// All that is announced, by Network: sorted once for each state of things, whatever the number of Networks.
#[derive(Debug, Default)]
pub struct ByNetwork {
    /// With the number of the state that it is of.
    known: Mutex<Option<(u64, Arc<Sorted>)>>,
}

type Sorted = BTreeMap<NetworkName, Vec<Arc<AnnouncedView>>>;

// === impl ByNetwork ===

impl ByNetwork {
    /// What is announced in this snapshot. All snapshots are of one store.
    fn of(&self, world: &World) -> Arc<Sorted> {
        let mut known = self.known.locked();
        if let Some((revision, sorted)) = &*known
            && *revision == world.networks_revision
        {
            return Arc::clone(sorted);
        }
        let mut sorted = Sorted::new();
        for view in world.announced.values() {
            sorted.entry(view.network.clone()).or_default().push(Arc::clone(view));
        }
        let sorted = Arc::new(sorted);
        *known = Some((world.networks_revision, Arc::clone(&sorted)));
        sorted
    }
}

/// What other nodes have announced of a Network, as far as it is to be believed.
fn of_others(world: &World, all: &ByNetwork, network: &NetworkName, node: &str) -> Vec<Arc<AnnouncedView>> {
    let (Some(object), all) = (world.networks.get(network), all.of(world)) else { return Vec::new() };
    let of_network = all.get(network).into_iter().flatten();
    let others: Vec<Arc<AnnouncedView>> = of_network.filter(|view| view.node != node).cloned().collect();
    if others.is_empty() {
        return others;
    }
    let blocks = Blocks::of(world, network, |_| true);
    let counts = |view: &Arc<AnnouncedView>| {
        let believed = is_believed(object, &blocks, view);
        if !believed {
            tracing::debug!(%network, node = view.node, pod = view.pod, addresses = ?view.addresses,
                mac = %view.mac,
                "ignoring an announcement of an address that is not the node's own");
        }
        believed && cannot_be_derived(object, &blocks, &view.node, &view.addresses, view.mac)
    };
    others.into_iter().filter(counts).collect()
}

/// The same as a runtime takes it.
#[must_use]
pub fn for_runtime(
    world: &World,
    all: &ByNetwork,
    network: &NetworkName,
    node: &str,
) -> Vec<knit_runtime::Announced> {
    let mut all: Vec<knit_runtime::Announced> = of_others(world, all, network, node)
        .into_iter()
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
pub fn held(world: &World, all: &ByNetwork, network: &NetworkName, node: &str) -> BTreeMap<IpAddr, String> {
    let who = |view: &AnnouncedView| format!("{} on node {}", view.pod, view.node);
    let others = of_others(world, all, network, node);
    others.iter().flat_map(|view| view.addresses.iter().map(|a| (*a, who(view)))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use knit_api::AddressBlockSpec;
    use knit_model::AddressBlock;
    use serde_json::json;

    use super::*;

    fn world(topology: &str) -> World {
        let network: knit_api::Network = serde_json::from_value(json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": "blue"},
            "spec": {"topology": topology, "subnets": [{"cidr": "10.2.0.0/16", "reserved": ["10.2.0.0/29",
                "10.2.200.0/24"]}]}, "status": {"id": 7}
        }))
        .expect("a Network");
        let block = |node: &str, range: &str| {
            let spec = AddressBlockSpec {
                network: "blue".into(),
                node: node.into(),
                ipv4: Some(range.into()),
                ipv6: None,
            };
            (format!("blue-{node}"), Arc::new(AddressBlock::of(&spec).expect("a block")))
        };
        World {
            networks: Arc::new([("blue".into(), Arc::new(network.try_into().expect("a name")))].into()),
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
            let found = is_needed(&world(topology), &"blue".into(), "a", &[ip(address)], mac);
            assert_eq!(found, needed, "{topology} {address} {mac}");
        }
        assert!(!is_needed(&world("Layer3"), &"unknown".into(), "a", &[ip("10.9.0.1")], custom));
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
            };
            (("shop".to_owned(), node.to_owned()), Arc::new(view))
        };
        world.announced = Arc::new([view("a", "10.2.200.1"), view("b", "10.2.200.2")].into());
        let told = for_runtime(&world, &ByNetwork::default(), &"blue".into(), "a");
        assert_eq!(told.iter().map(|t| t.addresses[0]).collect::<Vec<_>>(), [ip("10.2.200.2")]);
        assert_eq!(
            held(&world, &ByNetwork::default(), &"blue".into(), "b"),
            [(ip("10.2.200.1"), "pod shop/a on node a".to_owned())].into()
        );
        assert!(for_runtime(&world, &ByNetwork::default(), &"red".into(), "a").is_empty());
    }

    #[test]
    fn a_node_announces_only_what_its_pods_may_have() {
        let plain: Mac = "02:00:00:00:00:07".parse().expect("a MAC");
        let derived = |text: &str| pod_mac(7, ip(text));
        // Node b says that this address and this MAC are of a pod of its own.
        let cases = [
            ("Layer3", "10.2.200.1", derived("10.2.200.1"), true),
            ("Layer2", "10.2.200.1", plain, true),
            ("Layer2", "10.2.2.5", plain, true),
            // Outside of the Network: the API server, a name server, anything.
            ("Layer3", "192.0.2.77", plain, false),
            // Another node's pod, and one that anybody might get.
            ("Layer3", "10.2.1.5", derived("10.2.1.5"), false),
            ("Layer3", "10.2.77.5", derived("10.2.77.5"), false),
            // Reserved, but never a pod's: the Network's own address and its gateway.
            ("Layer3", "10.2.0.0", plain, false),
            ("Layer3", "10.2.0.1", plain, false),
            ("Layer3", "10.2.0.2", plain, true),
            // The MAC of another pod, of the gateway, of a tunnel, of a group.
            ("Layer2", "10.2.200.1", derived("10.2.1.5"), false),
            ("Layer2", "10.2.200.1", knit_ipam::gateway_mac(7), false),
            ("Layer2", "10.2.200.1", "06:76:c0:00:02:01".parse().expect("a MAC"), false),
            ("Layer2", "10.2.200.1", "01:00:5e:00:00:01".parse().expect("a MAC"), false),
        ];
        for (topology, address, mac, believed) in cases {
            let mut world = world(topology);
            let view = AnnouncedView {
                network: "blue".into(),
                pod: "pod evil/x".into(),
                node: "b".into(),
                addresses: vec![ip(address)],
                mac,
            };
            world.announced = Arc::new([(("evil".to_owned(), "x".to_owned()), Arc::new(view))].into());
            let told = for_runtime(&world, &ByNetwork::default(), &"blue".into(), "a");
            assert_eq!(told.len(), usize::from(believed), "{topology} {address} {mac}");
            assert_eq!(
                held(&world, &ByNetwork::default(), &"blue".into(), "a").len(),
                usize::from(believed),
                "{topology} {address} {mac}"
            );
        }
    }

    #[test]
    fn every_announcement_was_looked_at_for_every_network() {
        let mut world = world("Layer3");
        let view = |network: &'static str, node: &str, address: &str| {
            let view = AnnouncedView {
                network: network.into(),
                pod: format!("pod shop/{node}"),
                node: node.into(),
                addresses: vec![ip(address)],
                mac: pod_mac(7, ip(address)),
            };
            ((network.to_owned(), format!("{node}-{address}")), Arc::new(view))
        };
        let many = (0..200).map(|n| view("red", "b", &format!("10.9.0.{n}")));
        world.announced = Arc::new(many.chain([view("blue", "b", "10.2.200.2")]).collect());
        let all = ByNetwork::default();
        assert_eq!(for_runtime(&world, &all, &"blue".into(), "a").len(), 1);
        let sorted = all.of(&world);
        assert_eq!((sorted["blue"].len(), sorted["red"].len()), (1, 200));
        assert!(Arc::ptr_eq(&sorted, &all.of(&world)), "sorted once for each state");
        Arc::make_mut(&mut world.announced).retain(|(network, _), _| network == "red");
        world.networks_revision += 1;
        assert!(for_runtime(&world, &all, &"blue".into(), "a").is_empty());
    }
}
