//! What follows from a Network's description and the node's facts: MTU, the way to each other node, MAC
//! addresses.
//!
//! Pure. Everything that cannot work is refused here, before anything is made.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use knit_ipam::{Mac, gateway_mac};
use knit_runtime::{Error, Network, Reason, Result, Route};
use knit_types::{ByFamily as _, Family, HasFamily as _, IPV6_MIN_MTU, fnv1a};

use crate::topology::{self, Driver};

/// What the node is, as far as Networks depend on it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Facts {
    /// The node's name.
    pub node: String,
    /// The node's own addresses.
    pub addresses: Vec<IpAddr>,
    /// The link that the Network goes out by: the one that has them, or its parent.
    pub uplink: String,
    /// Its MTU.
    pub mtu: u32,
    /// The prefixes that are directly on it.
    pub prefixes: Vec<IpNet>,
    /// The UDP port of tunnels.
    pub vxlan_port: u16,
}

/// A Network on this node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    /// As described.
    pub network: Network,
    /// Where its router is.
    pub home: RouterHome,
    /// The MTU of its pods.
    pub mtu: u32,
    /// The other nodes that have blocks.
    pub remotes: Vec<Remote>,
    /// The address that the node's own end of tunnels has.
    pub tunnel_source: Option<IpAddr>,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
}

/// Where a Network's router is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RouterHome {
    /// In the node's own namespace: the default Network.
    Node,
    /// In a namespace of its own.
    Own,
}

/// Another node with blocks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Remote {
    /// The node's name.
    pub node: String,
    /// Its end of tunnels, if there can be one.
    pub tunnel: Option<IpAddr>,
    /// Its ranges, and how they are reached.
    pub ranges: Vec<(IpNet, Path)>,
}

/// How a range of another node is reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Path {
    /// By that node's address on the common segment.
    Direct(IpAddr),
    /// By tunnel.
    Tunnel,
}

/// What a tunnel adds to a packet: outer IPv4, UDP, VXLAN and inner Ethernet headers.
const OVERHEAD_V4: u32 = 50;
/// The same with an outer IPv6 header.
const OVERHEAD_V6: u32 = 70;
/// The least that IPv4 hosts must take.
const MIN_MTU_V4: u32 = 576;

/// How a class may say that nodes reach each other: parameter `path`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PathWish {
    Auto,
    Direct,
    Tunnel,
}

impl Shape {
    /// Works a Network out, or says what cannot work.
    pub fn of(network: &Network, facts: &Facts, home: RouterHome) -> Result<Self> {
        let fail = |message: String| Error::new(Reason::Invalid, message).on(&network.name);
        check_subnets(network).map_err(fail)?;
        topology::of(network.topology).check(network, home).map_err(fail)?;
        let wish = PathWish::of(network, home).map_err(fail)?;
        let source = source(network, facts);
        let routed = network.topology.has_router();
        let remotes = if routed { remotes(network, facts, home, wish, source) } else { Vec::new() };
        let tunnelled = match (home, wish) {
            _ if !routed => false,
            (RouterHome::Own, _) | (RouterHome::Node, PathWish::Tunnel) => true,
            (RouterHome::Node, _) => {
                remotes.iter().any(|remote| remote.ranges.iter().any(|(_, path)| *path == Path::Tunnel))
            }
        };
        let tunnel_source = source.filter(|_| tunnelled);
        let mtu = mtu(network, facts, tunnelled, tunnel_source).map_err(fail)?;
        let node_addresses = facts.addresses.clone();
        Ok(Self { network: network.clone(), home, mtu, remotes, tunnel_source, node_addresses })
    }

    /// What does not work, although the rest does.
    pub fn complaint(&self) -> Option<String> {
        let cut_off = |remote: &&Remote| {
            remote.tunnel.is_none() && remote.ranges.iter().any(|(_, path)| *path == Path::Tunnel)
        };
        let nodes: Vec<&str> =
            self.remotes.iter().filter(cut_off).map(|remote| remote.node.as_str()).collect();
        (!nodes.is_empty()).then(|| {
            format!(
                "no route to the pods of {}: give these nodes an address of the family that tunnels \
                of Network {} use",
                nodes.join(", "),
                self.network.name
            )
        })
    }

    /// The Network's number.
    pub fn id(&self) -> u32 {
        self.network.id.get()
    }

    /// The addresses of another node, as its blocks and announcements name them.
    pub fn addresses_of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = IpAddr> + 'a {
        let blocks = self.network.blocks_of(node).map(|block| &block.node_addresses);
        let announced = self.network.announced.iter().filter(move |announced| announced.node == node);
        let all = blocks.chain(announced.map(|announced| &announced.node_addresses)).flatten().copied();
        all.collect::<std::collections::BTreeSet<_>>().into_iter()
    }

    /// Where its pods are, on whichever node. Where nodes' blocks are what the Network consists of, its
    /// subnet here is this node's block only.
    pub fn pods(&self) -> Vec<IpNet> {
        let subnets = self.network.subnets.iter().map(|subnet| subnet.cidr);
        let blocks = self.network.blocks.iter();
        let blocks = blocks.flat_map(|b| [b.ipv4.map(IpNet::from), b.ipv6.map(IpNet::from)]).flatten();
        subnets.chain(blocks).collect()
    }

    /// What its kind is.
    pub fn driver(&self) -> &'static dyn Driver {
        topology::of(self.network.topology)
    }

    /// The gateway's MAC, the same on every node.
    pub fn gateway_mac(&self) -> Mac {
        gateway_mac(self.id())
    }

    /// Whether the Network has addresses of this family.
    pub fn has(&self, family: Family) -> bool {
        self.network.subnets.has_family(family)
    }

    /// The router's own address of a family.
    pub fn router_address(&self, family: Family) -> Option<IpAddr> {
        self.network.router_addresses.first_of(family).copied()
    }

    /// Where the router asks a pod from, to see whether it answers.
    pub fn echo_source(&self, family: Family) -> Option<IpAddr> {
        match self.home {
            RouterHome::Node => self.node_addresses.first_of(family).copied(),
            RouterHome::Own => self.router_address(family),
        }
    }

    /// Whether links of it have IPv6.
    pub fn has_ipv6(&self) -> bool {
        self.mtu >= IPV6_MIN_MTU
    }

    /// The routes that a pod gets.
    pub fn pod_routes(&self, default_route: bool, extra: &[Route]) -> Vec<Route> {
        let mut routes = Vec::new();
        for subnet in &self.network.subnets {
            let any = match subnet.cidr {
                IpNet::V4(_) => IpNet::V4(Default::default()),
                IpNet::V6(_) => IpNet::V6(Default::default()),
            };
            if default_route {
                // Without a gateway there is nowhere to go.
                routes.extend(subnet.gateway.map(|via| Route { destination: any, via: Some(via) }));
            } else if !self.network.topology.has_subnet_on_link() {
                // Such a pod has nothing on its link but the gateway.
                routes.push(Route { destination: subnet.cidr.trunc(), via: subnet.gateway });
                // The node is the default Network's router: it must be answered by the way that it asks.
                if let Some(node) =
                    self.echo_source(subnet.family()).filter(|_| self.home == RouterHome::Node)
                {
                    routes.push(Route { destination: IpNet::from(node), via: subnet.gateway });
                }
            }
        }
        for route in self.network.routes.iter().chain(extra) {
            let via = route.via.or_else(|| self.network.gateway_for(route.destination.addr()));
            let route = Route { destination: route.destination.trunc(), via };
            if !routes.contains(&route) {
                routes.push(route);
            }
        }
        routes
    }
}

impl PathWish {
    fn of(network: &Network, home: RouterHome) -> Result<Self, String> {
        let wish = match network.parameters.get("path").map(|value| value.as_str()) {
            None => Self::Auto,
            Some(Some("auto")) => Self::Auto,
            Some(Some("direct")) => Self::Direct,
            Some(Some("tunnel")) => Self::Tunnel,
            Some(_) => {
                return Err("parameter path of its NetworkClass: must be auto, direct or \
            tunnel"
                    .into());
            }
        };
        if home == RouterHome::Own && wish == PathWish::Direct {
            return Err("direct routes between nodes are only for the default Network: leave \
            parameter path of its NetworkClass out"
                .into());
        }
        Ok(wish)
    }
}

fn check_subnets(network: &Network) -> Result<(), String> {
    let name = &network.name;
    if network.subnets.is_empty() {
        return Err(format!("Network {name} has no subnet: give it one per family"));
    }
    for family in Family::ALL {
        if network.subnets.of_family(family).count() > 1 {
            return Err(format!("Network {name} has two subnets of one family: use at most one"));
        }
    }
    for subnet in &network.subnets {
        match subnet.gateway {
            Some(gateway) if !subnet.cidr.contains(&gateway) => {
                return Err(format!("the gateway {gateway} of Network {name} is not in {}", subnet.cidr));
            }
            None if network.topology.has_router() => {
                return Err(format!("subnet {} of Network {name} has no gateway: give it one", subnet.cidr));
            }
            _ => {}
        }
    }
    for route in &network.routes {
        check_route(network, route)?;
    }
    Ok(())
}

/// Refuses a route that could not work in a pod.
pub(crate) fn check_route(network: &Network, route: &Route) -> Result<(), String> {
    if !network.subnets.has_family(route.destination.family()) {
        return Err(format!(
            "route to {} on Network {}, which has no subnet of that family: give it one or leave the route \
             out",
            route.destination, network.name
        ));
    }
    let gateway = network.gateway_for(route.destination.addr());
    let Some(via) = route.via.or(gateway) else {
        return Err(format!(
            "route to {} on Network {}, which has no gateway of that family: set via",
            route.destination, network.name
        ));
    };
    if let Some(gateway) = gateway.filter(|gateway| *gateway != via)
        && !network.topology.has_subnet_on_link()
    {
        return Err(format!(
            "route to {} via {via}: a pod of the routed Network {} has only its gateway {gateway} on its \
             link; leave via out",
            route.destination, network.name
        ));
    }
    let on_link = network.subnets.iter().any(|subnet| subnet.cidr.contains(&via));
    if !on_link {
        return Err(format!(
            "route to {} via {via}, which is in no subnet of Network {}: use an address of the Network",
            route.destination, network.name
        ));
    }
    Ok(())
}

/// The other nodes, each with all of its blocks and what else it announced.
fn remotes(
    network: &Network,
    facts: &Facts,
    home: RouterHome,
    wish: PathWish,
    source: Option<IpAddr>,
) -> Vec<Remote> {
    let on_segment = |address: &IpAddr| facts.prefixes.iter().any(|prefix| prefix.contains(address));
    let way = |node_addresses: &[IpAddr], to: IpAddr| {
        let address = node_addresses.first_of(Family::of(to)).copied();
        match (home, wish, address) {
            (RouterHome::Node, PathWish::Direct, Some(address)) => Path::Direct(address),
            (RouterHome::Node, PathWish::Auto, Some(address)) if on_segment(&address) => {
                Path::Direct(address)
            }
            _ => Path::Tunnel,
        }
    };
    let mut nodes: BTreeMap<&str, Remote> = BTreeMap::new();
    for block in network.blocks.iter().filter(|block| block.node != facts.node) {
        let remote = nodes.entry(&block.node).or_insert_with(|| Remote {
            node: block.node.clone(),
            tunnel: source.and_then(|source| block.node_addresses.first_of(source.family()).copied()),
            ranges: Vec::new(),
        });
        let ranges = block.ipv4.map(IpNet::from).into_iter().chain(block.ipv6.map(IpNet::from));
        for range in ranges {
            remote.ranges.push((range, way(&block.node_addresses, range.addr())));
        }
    }
    for announced in network.announced.iter().filter(|announced| announced.node != facts.node) {
        let remote = nodes.entry(&announced.node).or_insert_with(|| Remote {
            node: announced.node.clone(),
            tunnel: source.and_then(|source| announced.node_addresses.first_of(source.family()).copied()),
            ranges: Vec::new(),
        });
        for address in &announced.addresses {
            if !remote.ranges.iter().any(|(range, _)| range.contains(address)) {
                remote.ranges.push((IpNet::from(*address), way(&announced.node_addresses, *address)));
            }
        }
    }
    let mut remotes: Vec<_> = nodes.into_values().collect();
    for remote in &mut remotes {
        remote.ranges.sort_by_key(|(range, _)| *range);
        remote.ranges.dedup();
    }
    remotes
}

/// The node's own end of the Network's tunnels. One device has one family: IPv4, whose header is shorter,
/// unless a node has none and all have IPv6.
fn source(network: &Network, facts: &Facts) -> Option<IpAddr> {
    let all = |family| {
        let mut others = network.blocks.iter().filter(|block| block.node != facts.node);
        others.all(|block| block.node_addresses.has_family(family))
    };
    let ours = |family| facts.addresses.first_of(family).copied();
    let of_all = Family::ALL.into_iter().find_map(|family| ours(family).filter(|_| all(family)));
    of_all.or_else(|| Family::ALL.into_iter().find_map(ours))
}

fn mtu(network: &Network, facts: &Facts, tunnelled: bool, source: Option<IpAddr>) -> Result<u32, String> {
    let overhead = match (tunnelled, source) {
        (false, _) => 0,
        (true, Some(IpAddr::V6(_))) => OVERHEAD_V6,
        (true, _) => OVERHEAD_V4,
    };
    let most = facts.mtu.saturating_sub(overhead);
    let mtu = network.mtu.map_or(most, u32::from);
    if mtu > most {
        return Err(format!(
            "the MTU {mtu} of Network {} does not fit: {} of node {} has {}, and a tunnel takes \
            {overhead} of it; set at most {most}, or raise the MTU of the interface",
            network.name, facts.uplink, facts.node, facts.mtu
        ));
    }
    let v6 = network.subnets.iter().any(|subnet| subnet.cidr.addr().is_ipv6());
    let least = if v6 { IPV6_MIN_MTU } else { MIN_MTU_V4 };
    if mtu < least {
        return Err(format!(
            "Network {} would have an MTU of {mtu}, but it needs at least {least}: raise that of \
            {}, which has {}",
            network.name, facts.uplink, facts.mtu
        ));
    }
    Ok(mtu)
}

/// The MAC of a node's end of a routed Network's tunnels. It follows from the address, so nobody must
/// announce it.
pub(crate) fn tunnel_mac(end: IpAddr) -> Mac {
    match end {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            Mac([0x06, b'v', a, b, c, d])
        }
        IpAddr::V6(v6) => {
            let [.., a, b, c, d, e] = fnv1a(v6.octets()).to_be_bytes();
            Mac([0x16, a, b, c, d, e])
        }
    }
}

/// The next hop by which a routed Network's ranges at that end are reached, inside the tunnel. An IPv6 one
/// serves IPv4 too; an IPv4 one becomes link-local for IPv6.
pub(crate) fn tunnel_hop(end: IpAddr, destination: IpNet) -> IpAddr {
    match (end, destination) {
        (IpAddr::V4(end), IpNet::V6(_)) => {
            let [a, b, c, d] = end.octets().map(u16::from);
            Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, (a << 8) | b, (c << 8) | d).into()
        }
        _ => end,
    }
}

#[cfg(test)]
#[path = "shape_tests.rs"]
mod tests;
