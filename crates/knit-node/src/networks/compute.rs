//! What a runtime has to know of a Network on this node: a pure function of one snapshot.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use knit_api::conditions;
use knit_ipam::{Addresses, Pool, Subnet};
use knit_model::{Network, addresses_of_networks};
use knit_runtime::{Block, NetworkId, Underlay};
use knit_types::NetworkName;
use knit_types::chain;
use knit_types::sync::Locked;

use crate::world::{World, announced};

/// Why a Network cannot be set up here now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Unready {
    /// In one word, as NodeNetwork shows it.
    pub reason: &'static str,
    /// What is wrong and what to do.
    pub message: String,
}

/// What of a Network does not depend on this node's addresses.
#[derive(Clone, Debug)]
pub struct Desired {
    /// What it may give out.
    pub pool: Pool,
    /// The runtime that serves it.
    pub runtime: String,
    /// What the runtime has to know; `router_addresses` are filled in by who has the allocator.
    pub network: knit_runtime::Network,
    /// This node's blocks.
    pub own_blocks: Vec<knit_ipam::Block>,
}

// === impl Unready ===

impl Unready {
    /// Not set up yet, for this reason.
    #[must_use]
    pub fn not_set_up(message: impl Into<String>) -> Self {
        Self { reason: conditions::node_network::REASON_NOT_SET_UP, message: message.into() }
    }
}

/// Whether a Network has pods on this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PodsHere {
    /// None yet.
    New,
    /// Some. What was kept of the lists is in force for them, and better than nothing newer at all.
    InUse,
}

/// All that is known of a Network, for this node.
///
/// # Errors
/// When something is missing or wrong in its objects.
pub fn desired(
    world: &World,
    inside: &ClusterRanges,
    name: &NetworkName,
    node: &str,
    here: PodsHere,
) -> Result<Desired, Unready> {
    let network = world
        .networks
        .get(name)
        .ok_or_else(|| Unready::not_set_up(format!("Network {name} does not exist: create it")))?;
    let runtime = world.runtime_of(network).ok_or_else(|| {
        let class = network.class();
        Unready::not_set_up(format!("NetworkClass {class} of Network {name} does not exist: create it"))
    })?;
    let id = network.id().ok_or_else(|| {
        Unready::not_set_up(format!("Network {name} has no ID (status.id) yet: the controller assigns one"))
    })?;
    // Pods of the default Network reach what their node reaches; it has no outside that could be too large.
    if !network.is_default() {
        check_inside(world, name, here)?;
    }
    let wrong = |problem: String| Unready::not_set_up(format!("Network {name}: {problem}"));
    let id = NetworkId::new(id).map_err(|e| wrong(e.to_string()))?;
    let own_blocks = own_blocks(world, name, node);
    let pool = match network.pool().map_err(|error| wrong(chain(error)))? {
        Some(pool) => pool.clone(),
        None => {
            let block = own_blocks.first().ok_or_else(|| no_block(name))?;
            pool_of_block(name, id, block).map_err(wrong)?
        }
    };
    let underlay = underlay(world, network, node).map_err(wrong)?;
    let families: Vec<knit_ipam::Family> = pool.families().collect();
    let network = knit_runtime::Network {
        name: name.to_owned(),
        id,
        topology: network.topology(),
        subnets: families
            .iter()
            .filter_map(|family| pool.subnet(*family))
            .filter_map(|subnet| {
                let cidr = IpNet::new(first(subnet), subnet.prefix_len()).ok()?;
                // Without a router of ours there is the segment's own, if the operator names one.
                let gateway = network.has_gateway(subnet.range().family()).then(|| subnet.gateway());
                Some(knit_runtime::Subnet { cidr, gateway })
            })
            .collect(),
        mtu: network.mtu(),
        primary: network.is_primary(),
        outside: network.reaches_outside(),
        not_outside: if network.is_default() { inside.of(world).to_vec() } else { inside.and_more(world) },
        cluster_service_ips: if network.is_default() { Vec::new() } else { service_ips(world, network) },
        routes: network.routes().map_err(|error| wrong(chain(error)))?.to_vec(),
        blocks: blocks(world, name),
        router_addresses: Vec::new(),
        announced: announced::for_runtime(world, &inside.announced, name, node),
        underlay,
        parameters: world.class_of(network).and_then(|c| c.spec.parameters.clone()).unwrap_or_default(),
    };
    Ok(Desired { pool, runtime, network, own_blocks })
}

/// This node has no block of a Network.
#[must_use]
pub fn no_block(name: &NetworkName) -> Unready {
    Unready {
        reason: conditions::node_network::REASON_NO_ADDRESS,
        message: format!(
            "this node has no AddressBlock of Network {name} yet and has requested one: check that the \
            controller is running"
        ),
    }
}

/// The pool of the default Network where it has no subnets and Nodes' podCIDRs are its blocks: this node
/// knows its own one only, and the gateway is the block's second address. Others' are in
/// [`knit_runtime::Network::blocks`].
fn pool_of_block(name: &NetworkName, id: NetworkId, block: &knit_ipam::Block) -> Result<Pool, String> {
    let prefixes = knit_ipam::Family::ALL.into_iter().filter_map(|family| block.prefix(family));
    let subnets: Vec<Subnet> = prefixes
        .map(|prefix| Subnet::new(prefix, None, &[]).map_err(|e| e.to_string()))
        .collect::<Result<_, _>>()?;
    let pool = Pool::new(name, id.get(), subnets).map_err(|e| e.to_string())?;
    Ok(pool.primary(true))
}

fn first(subnet: &Subnet) -> IpAddr {
    subnet.range().first()
}

/// The link of this node that a Network is on, if it is of that kind.
fn underlay(world: &World, network: &Network, node: &str) -> Result<Option<Underlay>, String> {
    if !network.topology().is_on_host_link() {
        return Ok(None);
    }
    let view = world.nodes.get(node).ok_or("this node's Node object has not been received yet; retrying")?;
    let parent = network.parent_on(&view.labels).map_err(|error| chain(&error))?.to_owned();
    Ok(Some(Underlay {
        parent,
        mode: network.underlay_mode(),
        kind: network.underlay_kind(),
        duplicate_check: network.duplicate_check(),
    }))
}

/// This node's blocks of a Network.
fn own_blocks(world: &World, name: &NetworkName, node: &str) -> Vec<knit_ipam::Block> {
    let mine = world.blocks.values().filter(|b| b.network() == name && b.node() == node);
    mine.map(|block| block.block().clone()).collect()
}

/// All blocks of a Network, with their nodes' addresses.
fn blocks(world: &World, name: &NetworkName) -> Vec<Block> {
    let of_network = world.blocks.values().filter(|b| b.network() == name);
    let mut blocks: Vec<Block> = of_network
        .map(|block| {
            let node = block.node();
            let node_addresses = world.nodes.get(node).map(|n| n.addresses.clone()).unwrap_or_default();
            Block { node: node.to_owned(), node_addresses, ipv4: block.ipv4(), ipv6: block.ipv6() }
        })
        .collect();
    blocks.sort_by(|a, b| (&a.node, a.ipv4, a.ipv6).cmp(&(&b.node, b.ipv4, b.ipv6)));
    blocks
}

/// Nothing is let out by half a list of what is inside: what is missing of it would be the outside.
fn check_inside(world: &World, name: &NetworkName, here: PodsHere) -> Result<(), Unready> {
    let missing = world.missing_of_the_inside(name, here == PodsHere::InUse);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unready::not_set_up(format!(
        "not all {} have arrived from the Kubernetes API yet, and without them pods could reach addresses \
         inside the cluster as if they were outside; it will be retried. If this persists, check the agent's \
         log for the API server's answer: the agent's role must allow it to list and watch them \
         (deploy/base/agent/rbac.yaml), ServiceCIDRs need Kubernetes 1.33 or later, and Nodes and \
         BlockSlices come from a controller that is running and not older than this agent",
        missing.join(", ")
    )))
}

/// What is not the outside, which is the same for all Networks: worked out once for each state of things.
#[derive(Debug, Default)]
pub struct ClusterRanges {
    /// What pods of other nodes have, by Network: sorted once for each state of things, too.
    pub announced: announced::ByNetwork,
    /// What the operator says besides, for Networks whose way out is a router's.
    more: Vec<IpNet>,
    /// With the number of the state that it is of.
    known: Mutex<Option<(u64, Arc<[IpNet]>)>>,
}

// === impl ClusterRanges ===

impl ClusterRanges {
    /// The same, and these ranges besides.
    pub(super) fn with(more: &[IpNet]) -> Self {
        Self { more: more.to_vec(), ..Self::default() }
    }

    /// What is not the outside for a Network with a router of its own: for the default one these ranges are
    /// what they are for its node.
    fn and_more(&self, world: &World) -> Vec<IpNet> {
        let mut ranges = self.of(world).to_vec();
        if !self.more.is_empty() {
            ranges.extend(self.more.iter().map(IpNet::trunc));
            ranges = IpNet::aggregate(&ranges);
            ranges.sort();
        }
        ranges
    }

    /// What is not the outside in this snapshot. All snapshots are of one store.
    fn of(&self, world: &World) -> Arc<[IpNet]> {
        let mut known = self.known.locked();
        match &*known {
            Some((revision, ranges)) if *revision == world.networks_revision => Arc::clone(ranges),
            _ => {
                let ranges: Arc<[IpNet]> = not_outside(world).into();
                *known = Some((world.networks_revision, Arc::clone(&ranges)));
                ranges
            }
        }
    }
}

/// What is not the outside: nodes, services, all Networks. A segment that some Network's pods are on is the
/// outside all the same: most of what is there is not the cluster's.
fn not_outside(world: &World) -> Vec<IpNet> {
    let addresses = world.nodes.values().flat_map(|n| n.addresses.iter().chain(&n.others));
    let nodes = addresses.map(|a| IpNet::from(*a));
    let services = world.service_cidrs.values().flatten().copied();
    let networks = addresses_of_networks(&world.networks, &world.blocks);
    let mut ranges = IpNet::aggregate(&nodes.chain(services).chain(networks).collect());
    ranges.sort();
    ranges
}

fn service_ips(world: &World, network: &Network) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = network
        .cluster_services()
        .filter_map(|(namespace, name)| world.services.get(&(namespace.to_owned(), name.to_owned())))
        .flatten()
        .copied()
        .collect();
    ips.sort();
    ips.dedup();
    ips
}

/// The own addresses of a router, as a runtime takes them.
#[must_use]
pub fn router_addresses(router: Option<Addresses>) -> Vec<IpAddr> {
    router.map(|addresses| addresses.iter().collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use knit_api::{AddressBlockSpec, Network, NetworkSpec, NetworkStatus, names};
    use knit_model::AddressBlock;

    use super::*;

    fn desired(world: &World, name: &'static str, node: &str, here: PodsHere) -> Result<Desired, Unready> {
        super::desired(world, &ClusterRanges::default(), &name.into(), node, here)
    }

    fn block(node: &str, ipv4: &str, ipv6: &str) -> Arc<AddressBlock> {
        let range = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
        let spec = AddressBlockSpec {
            network: names::DEFAULT_NETWORK.into(),
            node: node.into(),
            ipv4: range(ipv4),
            ipv6: range(ipv6),
        };
        Arc::new(AddressBlock::of(&spec).expect("a block"))
    }

    fn world(blocks: &[Arc<AddressBlock>]) -> World {
        let spec = NetworkSpec { class: names::DEFAULT_CLASS.into(), ..NetworkSpec::default() };
        let mut network = Network::new(names::DEFAULT_NETWORK, spec);
        network.status = Some(NetworkStatus { id: Some(1), ..NetworkStatus::default() });
        let blocks: BTreeMap<_, _> =
            blocks.iter().enumerate().map(|(i, b)| (i.to_string(), Arc::clone(b))).collect();
        World {
            networks: Arc::new(
                [(NetworkName::default(), Arc::new(network.try_into().expect("a name")))].into(),
            ),
            blocks: Arc::new(blocks),
            ..World::default()
        }
    }

    #[test]
    fn a_default_network_without_subnets_is_this_nodes_block_and_knows_the_others() {
        let world = world(&[
            block("a", "10.244.0.0/24", "fd00:0:0:1::/120"),
            block("b", "10.244.5.0/24", "fd00:0:0:2::/120"),
        ]);
        let found = desired(&world, names::DEFAULT_NETWORK, "b", PodsHere::New).expect("it can be set up");
        let subnets: Vec<String> =
            found.network.subnets.iter().map(|s| format!("{} {}", s.cidr, s.gateway.expect("one"))).collect();
        assert_eq!(subnets, ["10.244.5.0/24 10.244.5.1", "fd00:0:0:2::/120 fd00:0:0:2::1"]);
        assert_eq!(found.own_blocks.len(), 1);
        assert_eq!(found.network.blocks.len(), 2);
        // Pods of other nodes are not the outside.
        for range in ["10.244.0.0/24", "10.244.5.0/24", "fd00:0:0:1::/120"] {
            assert!(found.network.not_outside.contains(&range.parse().unwrap()), "{range}");
        }
    }

    #[test]
    fn a_segment_that_pods_are_on_was_no_longer_the_outside_for_others() {
        let mut world = world(&[block("a", "10.244.0.0/24", "")]);
        for (name, topology) in [("lan", "Underlay"), ("blue", "Layer2")] {
            let cidr = if name == "lan" { "192.168.20.0/24" } else { "10.77.0.0/16" };
            let spec = serde_json::json!({"topology": topology, "subnets": [{"cidr": cidr}]});
            let network = Network::new(name, serde_json::from_value(spec).expect("a spec"));
            Arc::make_mut(&mut world.networks)
                .insert(name.into(), Arc::new(network.try_into().expect("a name")));
        }
        let found = desired(&world, names::DEFAULT_NETWORK, "a", PodsHere::New).expect("it can be set up");
        let inside = |range: &str| found.network.not_outside.contains(&range.parse().expect("a range"));
        assert!(inside("10.77.0.0/16"));
        assert!(!inside("192.168.20.0/24"), "{:?}", found.network.not_outside);
    }

    #[test]
    fn a_node_is_not_the_outside_by_any_of_its_addresses() {
        let ip = |text: &str| text.parse().expect("an address");
        let view = crate::world::NodeView {
            addresses: vec![ip("192.168.7.2"), ip("fd07::2")],
            others: vec![ip("203.0.113.2"), ip("2001:db8::2")],
            ..Default::default()
        };
        let nodes = Arc::new([("b".to_owned(), Arc::new(view))].into());
        let world = World { nodes, ..world(&[block("a", "10.244.0.0/24", "")]) };
        let found = desired(&world, names::DEFAULT_NETWORK, "a", PodsHere::New).expect("it can be set up");
        for address in ["192.168.7.2/32", "fd07::2/128", "203.0.113.2/32", "2001:db8::2/128"] {
            assert!(found.network.not_outside.contains(&address.parse().expect("a prefix")), "{address}");
        }
    }

    #[test]
    fn a_network_was_set_up_while_lists_of_what_is_inside_were_on_their_way() {
        use crate::world::{Before, Synced};
        let mut world = world(&[block("a", "10.244.0.0/24", "")]);
        let spec = serde_json::json!({"topology": "Layer3", "subnets": [{"cidr": "10.7.0.0/16"}]});
        let mut red = Network::new("red", serde_json::from_value(spec).expect("a spec"));
        red.status = Some(NetworkStatus { id: Some(2), ..NetworkStatus::default() });
        Arc::make_mut(&mut world.networks).insert("red".into(), Arc::new(red.try_into().expect("a name")));
        let all = Synced {
            networks: true,
            namespaces: true,
            blocks: true,
            nodes: true,
            service_cidrs: true,
            ..Synced::default()
        };
        world.synced = all;
        desired(&world, "red", "a", PodsHere::New).expect("everything is there");
        let away = Before {
            kept: false,
            networks_away: true,
            namespaces_away: true,
            blocks_away: true,
            nodes_away: true,
            service_cidrs_away: true,
        };
        for (list, synced) in [
            ("Networks", Synced { networks: false, ..all }),
            ("Nodes", Synced { nodes: false, ..all }),
            ("AddressBlocks", Synced { blocks: false, ..all }),
            ("ServiceCIDRs", Synced { service_cidrs: false, ..all }),
        ] {
            (world.synced, world.before) = (synced, Before::default());
            let problem = desired(&world, "red", "a", PodsHere::New).expect_err(list);
            assert!(problem.message.contains(&format!("not all {list} have arrived")), "{}", problem.message);
            desired(&world, names::DEFAULT_NETWORK, "a", PodsHere::New)
                .expect("its pods reach what the node reaches");
            // Kept, but somebody answers who may say more; away, but nothing kept.
            world.before = Before { kept: true, ..Before::default() };
            desired(&world, "red", "a", PodsHere::New).expect_err(list);
            // But what its pods here live by already stays in force, and is repaired.
            desired(&world, "red", "a", PodsHere::InUse).expect("known from before");
            world.before = away;
            desired(&world, "red", "a", PodsHere::InUse).expect_err(list);
            desired(&world, "red", "a", PodsHere::New).expect_err(list);
            world.before = Before { kept: true, ..away };
            desired(&world, "red", "a", PodsHere::New).expect("known from before, and nobody can say more");
        }
    }

    #[test]
    fn what_is_inside_was_worked_out_for_each_network_again() {
        let mut world = world(&[block("a", "10.244.0.0/24", "")]);
        let inside = ClusterRanges::default();
        let first = inside.of(&world);
        assert!(Arc::ptr_eq(&first, &inside.of(&world)), "once for all Networks");
        Arc::make_mut(&mut world.blocks).insert("more".into(), block("b", "10.244.9.0/24", ""));
        world.networks_revision += 1;
        assert_ne!(first, inside.of(&world), "but again when something has changed");
    }

    #[test]
    fn tenants_reached_nodes_at_addresses_that_no_node_lists() {
        let mut world = world(&[block("a", "10.244.0.0/24", "")]);
        let spec = serde_json::json!({"topology": "Layer3", "subnets": [{"cidr": "10.7.0.0/16"}]});
        let mut red = Network::new("red", serde_json::from_value(spec).expect("a spec"));
        red.status = Some(NetworkStatus { id: Some(2), ..NetworkStatus::default() });
        Arc::make_mut(&mut world.networks).insert("red".into(), Arc::new(red.try_into().expect("a name")));
        // Known from before: lists are not what this is about.
        world.before = crate::world::Before { kept: true, ..crate::world::Before::default() };
        let range = |text: &str| text.parse::<IpNet>().expect("a range");
        let management = ["198.51.100.0/24", "198.51.101.9/24"].map(range);
        let inside = ClusterRanges::with(&management);
        let not_outside = |inside: &ClusterRanges, name: &'static str| {
            let desired =
                super::desired(&world, inside, &name.into(), "a", PodsHere::InUse).expect("desired");
            desired.network.not_outside
        };
        assert!(not_outside(&inside, "red").contains(&range("198.51.100.0/23")));
        assert_eq!(not_outside(&inside, "default"), not_outside(&ClusterRanges::default(), "default"));
    }

    #[test]
    fn without_a_block_it_waits_for_one() {
        let world = world(&[block("a", "10.244.0.0/24", "")]);
        let problem =
            desired(&world, names::DEFAULT_NETWORK, "b", PodsHere::New).expect_err("there is no block");
        assert_eq!(problem.reason, conditions::node_network::REASON_NO_ADDRESS);
    }
}
