//! What a runtime has to know of a Network on this node: a pure function of one snapshot.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::{Network, Outside, ServiceReference, conditions, names};
use knit_ipam::{AddressRange, Addresses, Pool, Subnet};
use knit_runtime::{Block, NetworkId, Route};

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

/// Whether some namespaces have a Network as their primary.
#[must_use]
pub fn is_primary(name: &str, network: &Network) -> bool {
    name == names::DEFAULT_NETWORK || network.spec.primary_for.is_some()
}

/// Whether a Network has pods on this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Here {
    /// None yet.
    New,
    /// Some. What was kept of the lists is in force for them, and better than nothing newer at all.
    InUse,
}

/// All that is known of a Network, for this node.
///
/// # Errors
/// When something is missing or wrong in its objects.
pub fn desired(world: &World, name: &str, node: &str, here: Here) -> Result<Desired, Unready> {
    let network = world
        .networks
        .get(name)
        .ok_or_else(|| Unready::not_set_up(format!("Network {name} does not exist: create it")))?;
    let runtime = world.runtime_of(network).ok_or_else(|| {
        let class = &network.spec.class;
        Unready::not_set_up(format!("NetworkClass {class} of Network {name} does not exist: create it"))
    })?;
    let id = network.status.as_ref().and_then(|s| s.id).ok_or_else(|| {
        Unready::not_set_up(format!(
            "Network {name} has no number (status.id) yet: the controller gives it one"
        ))
    })?;
    // Pods of the default Network reach what their node reaches; it has no outside that could be too large.
    if name != names::DEFAULT_NETWORK {
        check_inside(world, here)?;
    }
    let wrong = |problem: String| Unready::not_set_up(format!("Network {name}: {problem}"));
    let id = NetworkId::new(id).map_err(|e| wrong(e.to_string()))?;
    let own_blocks = own_blocks(world, name, node);
    let pool = if network.spec.subnets.is_empty() && name == names::DEFAULT_NETWORK {
        let block = own_blocks.first().ok_or_else(|| no_block(name))?;
        pool_of_block(name, id, block).map_err(wrong)?
    } else {
        pool_of(name, network, id).map_err(wrong)?
    };
    let primary = is_primary(name, network);
    let families: Vec<knit_ipam::Family> = pool.families().collect();
    let network = knit_runtime::Network {
        name: name.to_owned(),
        id,
        topology: network.spec.topology,
        subnets: families
            .iter()
            .filter_map(|family| pool.subnet(*family))
            .filter_map(|subnet| {
                let cidr = IpNet::new(first(subnet), subnet.prefix_len()).ok()?;
                Some(knit_runtime::Subnet { cidr, gateway: subnet.gateway() })
            })
            .collect(),
        mtu: network.spec.mtu,
        primary,
        outside: match network.spec.outside {
            Some(Outside::Masquerade) => true,
            Some(Outside::Closed) => false,
            None => primary,
        },
        not_outside: not_outside(world),
        cluster_service_ips: if name == names::DEFAULT_NETWORK {
            Vec::new()
        } else {
            service_ips(world, network)
        },
        routes: routes(network).map_err(wrong)?,
        blocks: blocks(world, name),
        router_addresses: Vec::new(),
        announced: announced::for_runtime(world, name, node),
        parameters: world.class_of(network).and_then(|c| c.spec.parameters.clone()).unwrap_or_default(),
    };
    Ok(Desired { pool, runtime, network, own_blocks })
}

/// This node has no block of a Network.
#[must_use]
pub fn no_block(name: &str) -> Unready {
    Unready {
        reason: conditions::node_network::REASON_NO_ADDRESS,
        message: format!(
            "this node has no AddressBlock of Network {name} yet: it asked for one; see that the controller \
             runs"
        ),
    }
}

/// The pool of the default Network where it has no subnets and Nodes' podCIDRs are its blocks: this node
/// knows its own one only, and the gateway is the block's second address. Others' are in
/// [`knit_runtime::Network::blocks`].
fn pool_of_block(name: &str, id: NetworkId, block: &knit_ipam::Block) -> Result<Pool, String> {
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

fn pool_of(name: &str, network: &Network, id: NetworkId) -> Result<Pool, String> {
    let mut subnets = Vec::new();
    for subnet in &network.spec.subnets {
        let range = |text: &str| {
            text.parse::<IpNet>()
                .map_err(|_| format!("{text:?} is no address range: write one such as 10.77.0.0/16"))
        };
        let gateway = match &subnet.gateway {
            Some(text) => Some(text.parse().map_err(|_| format!("gateway {text:?} is no address"))?),
            None => None,
        };
        let reserved: Vec<AddressRange> =
            subnet.reserved.iter().map(|r| range(r).map(AddressRange::from)).collect::<Result<_, _>>()?;
        subnets.push(Subnet::new(range(&subnet.cidr)?, gateway, &reserved).map_err(|e| e.to_string())?);
    }
    let pool = Pool::new(name, id.get(), subnets).map_err(|e| e.to_string())?;
    Ok(pool.primary(is_primary(name, network)).with_router(name != names::DEFAULT_NETWORK))
}

/// This node's blocks of a Network. One that cannot be is left out, with a word in the log.
fn own_blocks(world: &World, name: &str, node: &str) -> Vec<knit_ipam::Block> {
    let mine = world.blocks.iter().filter(|(_, b)| b.network == name && b.node == node);
    let parsed = mine.filter_map(|(object, spec)| {
        let (ipv4, ipv6) = ranges(spec);
        match knit_ipam::Block::from_ranges(name, node, ipv4, ipv6) {
            Ok(block) => Some(block),
            Err(error) => {
                tracing::warn!(address_block = %object, error = &error as &dyn std::error::Error, "an \
                    AddressBlock cannot be used");
                None
            }
        }
    });
    parsed.collect()
}

fn ranges(spec: &knit_api::AddressBlockSpec) -> (Option<ipnet::Ipv4Net>, Option<ipnet::Ipv6Net>) {
    (spec.ipv4.as_deref().and_then(|t| t.parse().ok()), spec.ipv6.as_deref().and_then(|t| t.parse().ok()))
}

/// All blocks of a Network, with their nodes' addresses.
fn blocks(world: &World, name: &str) -> Vec<Block> {
    let of_network = world.blocks.values().filter(|b| b.network == name);
    let mut blocks: Vec<Block> = of_network
        .filter_map(|spec| {
            let (ipv4, ipv6) = ranges(spec);
            if ipv4.is_none() && ipv6.is_none() {
                return None;
            }
            let node_addresses = world.nodes.get(&spec.node).map(|n| n.addresses.clone()).unwrap_or_default();
            Some(Block { node: spec.node.clone(), node_addresses, ipv4, ipv6 })
        })
        .collect();
    blocks.sort_by(|a, b| (&a.node, a.ipv4, a.ipv6).cmp(&(&b.node, b.ipv4, b.ipv6)));
    blocks
}

/// Nothing is let out by half a list of what is inside: what is missing of it would be the outside.
fn check_inside(world: &World, here: Here) -> Result<(), Unready> {
    let missing = world.missing_of_the_inside(here == Here::InUse);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unready::not_set_up(format!(
        "not all {} have arrived from the Kubernetes API yet, and without them pods would reach what is not \
         the outside: \
         it tries again. If this stays, see the agent's log for the answer of the API: the agent's role must \
         allow it to \
         list and watch them (deploy/base/agent/rbac.yaml), and ServiceCIDRs need Kubernetes 1.33 or newer",
        missing.join(", ")
    )))
}

/// What is not the outside: nodes, services, all Networks.
fn not_outside(world: &World) -> Vec<IpNet> {
    let addresses = world.nodes.values().flat_map(|n| n.addresses.iter().chain(&n.others));
    let nodes = addresses.map(|a| IpNet::from(*a));
    let services = world.service_cidrs.values().flatten().copied();
    let networks =
        world.networks.values().flat_map(|n| n.spec.subnets.iter().filter_map(|s| s.cidr.parse().ok()));
    // A Network without subnets is where its blocks are.
    let without = |name: &str| world.networks.get(name).is_some_and(|n| n.spec.subnets.is_empty());
    let blocks = world.blocks.values().filter(|b| without(&b.network)).flat_map(|b| {
        let (ipv4, ipv6) = ranges(b);
        ipv4.map(IpNet::from).into_iter().chain(ipv6.map(IpNet::from))
    });
    let mut ranges = IpNet::aggregate(&nodes.chain(services).chain(networks).chain(blocks).collect());
    ranges.sort();
    ranges
}

/// The Services of the default Network that pods of a Network reach.
#[must_use]
pub fn cluster_services(network: &Network) -> Vec<ServiceReference> {
    network.spec.cluster_services.clone().unwrap_or_else(|| {
        let service =
            |namespace: &str, name: &str| ServiceReference { namespace: namespace.into(), name: name.into() };
        vec![service("default", "kubernetes"), service("kube-system", "kube-dns")]
    })
}

fn service_ips(world: &World, network: &Network) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = cluster_services(network)
        .into_iter()
        .filter_map(|s| world.services.get(&(s.namespace, s.name)))
        .flatten()
        .copied()
        .collect();
    ips.sort();
    ips.dedup();
    ips
}

fn routes(network: &Network) -> Result<Vec<Route>, String> {
    let route = |r: &knit_api::Route| {
        let wrong = || format!("route {:?} via {:?} cannot be read", r.destination, r.via);
        let via = r.via.as_ref().map(|via| via.parse().map_err(|_| wrong())).transpose()?;
        Ok(Route { destination: r.destination.parse().map_err(|_| wrong())?, via })
    };
    network.spec.routes.iter().map(route).collect()
}

/// The own addresses of a router, as a runtime takes them.
#[must_use]
pub fn router_addresses(router: Option<Addresses>) -> Vec<IpAddr> {
    router.map(|addresses| addresses.iter().collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use knit_api::{AddressBlockSpec, NetworkSpec, NetworkStatus};

    use super::*;

    fn block(node: &str, ipv4: &str, ipv6: &str) -> Arc<AddressBlockSpec> {
        let range = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
        Arc::new(AddressBlockSpec {
            network: names::DEFAULT_NETWORK.into(),
            node: node.into(),
            ipv4: range(ipv4),
            ipv6: range(ipv6),
        })
    }

    fn world(blocks: &[Arc<AddressBlockSpec>]) -> World {
        let spec = NetworkSpec { class: names::DEFAULT_CLASS.into(), ..NetworkSpec::default() };
        let mut network = Network::new(names::DEFAULT_NETWORK, spec);
        network.status = Some(NetworkStatus { id: Some(1), ..NetworkStatus::default() });
        let blocks: BTreeMap<_, _> =
            blocks.iter().enumerate().map(|(i, b)| (i.to_string(), Arc::clone(b))).collect();
        World {
            networks: Arc::new([(names::DEFAULT_NETWORK.to_owned(), Arc::new(network))].into()),
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
        let found = desired(&world, names::DEFAULT_NETWORK, "b", Here::New).expect("it can be set up");
        let subnets: Vec<String> =
            found.network.subnets.iter().map(|s| format!("{} {}", s.cidr, s.gateway)).collect();
        assert_eq!(subnets, ["10.244.5.0/24 10.244.5.1", "fd00:0:0:2::/120 fd00:0:0:2::1"]);
        assert_eq!(found.own_blocks.len(), 1);
        assert_eq!(found.network.blocks.len(), 2);
        // Pods of other nodes are not the outside.
        for range in ["10.244.0.0/24", "10.244.5.0/24", "fd00:0:0:1::/120"] {
            assert!(found.network.not_outside.contains(&range.parse().unwrap()), "{range}");
        }
    }

    #[test]
    fn a_node_is_not_the_outside_by_any_of_its_addresses() {
        let ip = |text: &str| text.parse().expect("an address");
        let view = crate::world::NodeView {
            addresses: vec![ip("192.168.7.2"), ip("fd07::2")],
            others: vec![ip("203.0.113.2"), ip("2001:db8::2")],
            uid: None,
        };
        let nodes = Arc::new([("b".to_owned(), Arc::new(view))].into());
        let world = World { nodes, ..world(&[block("a", "10.244.0.0/24", "")]) };
        let found = desired(&world, names::DEFAULT_NETWORK, "a", Here::New).expect("it can be set up");
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
        Arc::make_mut(&mut world.networks).insert("red".to_owned(), Arc::new(red));
        let all = Synced {
            networks: true,
            namespaces: true,
            blocks: true,
            nodes: true,
            service_cidrs: true,
            ..Synced::default()
        };
        world.synced = all;
        desired(&world, "red", "a", Here::New).expect("everything is there");
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
            let problem = desired(&world, "red", "a", Here::New).expect_err(list);
            assert!(problem.message.contains(&format!("not all {list} have arrived")), "{}", problem.message);
            desired(&world, names::DEFAULT_NETWORK, "a", Here::New)
                .expect("its pods reach what the node reaches");
            // Kept, but somebody answers who may say more; away, but nothing kept.
            world.before = Before { kept: true, ..Before::default() };
            desired(&world, "red", "a", Here::New).expect_err(list);
            // But what its pods here live by already stays in force, and is repaired.
            desired(&world, "red", "a", Here::InUse).expect("known from before");
            world.before = away;
            desired(&world, "red", "a", Here::InUse).expect_err(list);
            desired(&world, "red", "a", Here::New).expect_err(list);
            world.before = Before { kept: true, ..away };
            desired(&world, "red", "a", Here::New).expect("known from before, and nobody can say more");
        }
    }

    #[test]
    fn without_a_block_it_waits_for_one() {
        let world = world(&[block("a", "10.244.0.0/24", "")]);
        let problem = desired(&world, names::DEFAULT_NETWORK, "b", Here::New).expect_err("there is no block");
        assert_eq!(problem.reason, conditions::node_network::REASON_NO_ADDRESS);
    }
}
