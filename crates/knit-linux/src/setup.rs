//! Node set-up: brings this node's side of a Network to what is described, whatever is there.
//!
//! The same pass makes, changes, repairs and upgrades: it lays down what is wanted, reads what is there and is ours,
//! and applies the difference. Rules come first, so that nothing is ever reachable that should not be.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};

use ipnet::IpNet;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::Link;
use knit_kernel::nft::{Element, Name};
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{Handle, IfName};
use knit_runtime::{Error, Network, Reason, Result};

use crate::core::Core;
use crate::fail::internal;
use crate::layer3;
use crate::mark::Mark;
use crate::rules::{self, Elements, Put};
use crate::shape::{Facts, Home, Shape};
use crate::space::Space;
use crate::tables::Tables;
use crate::wanted::{Difference, Entry, Links, found};

impl Core {
    /// Makes this node ready for a Network's pods, or brings it to what has changed.
    pub fn setup_network(&self, network: &Network) -> Result<()> {
        let _moving = self.moves.begin();
        let facts = self.facts()?;
        let shape = Arc::new(Shape::of(network, &facts, self.home(&network.name))?);
        match shape.home {
            Home::Node => self.setup_default(&shape, &facts),
            Home::Own => self.setup_router(&shape, &facts),
        }
        .map_err(|error| error.on(network.name.as_str()))
    }

    /// What the node is: read anew each time, since addresses and MTUs change.
    pub fn facts(&self) -> Result<Facts> {
        let handle = self.node.links()?;
        let addresses = handle.addresses(None).map_err(internal("list the node's addresses"))?;
        let own = self.config.addresses.iter();
        let uplink = own.clone().find_map(|own| addresses.iter().find(|found| found.address.addr() == *own));
        let Some(uplink) = uplink else {
            let own: Vec<String> = own.map(IpAddr::to_string).collect();
            let message = format!(
                "no interface of node {} has an address of {}: give the node's addresses as its interfaces have them",
                self.config.node,
                own.join(", ")
            );
            return Err(Error::new(Reason::NotReady, message));
        };
        let link = handle.link(uplink.interface).map_err(internal("read the node's uplink"))?;
        let link = link.ok_or_else(|| Error::new(Reason::NotReady, "the node's uplink has just gone"))?;
        let prefixes = addresses.iter().filter(|found| found.interface == uplink.interface);
        let global = |net: &IpNet| !matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
        Ok(Facts {
            node: self.config.node.clone(),
            addresses: self.config.addresses.clone(),
            uplink: link.name.to_string(),
            mtu: link.mtu,
            prefixes: prefixes.map(|found| found.address).filter(global).collect(),
            vxlan_port: self.config.vxlan_port,
        })
    }

    fn setup_default(&self, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
        let net = self.adopt(&shape.network.name, Arc::clone(&self.node));
        let _alone = net.gate.write().unwrap_or_else(PoisonError::into_inner);
        let handle = self.node.links()?;
        let ports = ports(&handle)?;
        {
            let _layout = self.layout();
            self.default_rules(shape, &ports, &mut Tables::Apply)?;
        }
        self.settle_ports(&handle, shape, &ports, None)?;
        forwarding(&self.node, shape, Some(&facts.uplink))?;
        let tunnel = crate::tunnel::node_tunnel(shape.id());
        crate::tunnel::ensure_in_node(&handle, shape, facts, &tunnel)?;
        let wanted = default_entries(shape, facts, &ports, tunnel.as_str());
        let links = links_of(&handle, [facts.uplink.as_str(), tunnel.as_str()], &ports)?;
        let found = found(&handle, &links).map_err(internal("read routes and neighbours"))?;
        let found = found.into_iter().chain(crate::tunnel::found(&handle, &links, &tunnel)?).collect();
        let difference = Difference::between(&wanted, &found);
        if !difference.is_empty() {
            tracing::debug!(network = shape.network.name, "\n{difference}");
        }
        difference
            .apply(&handle, &links)
            .map_err(internal("bring routes and neighbours to what is wanted"))?;
        net.set_shape(Arc::clone(shape), facts);
        self.sweep_ports()
    }

    /// The default Network's part of the node's tables.
    pub fn default_rules(&self, shape: &Shape, ports: &[(Link, Mark)], tables: &mut Tables) -> Result<()> {
        let owns = |set: &Name, element: &Element| rules::node::is_default(set, element, shape.id());
        self.node_rules(&Elements { wanted: default_elements(shape, ports), owns: &owns }, tables)
    }

    /// The node's tables, with these elements of one Network.
    pub fn node_rules(&self, elements: &Elements<'_>, tables: &mut Tables) -> Result<()> {
        tables.settle(
            &self.node,
            &rules::node::layout(self.config.vxlan_port, self.config.uplink_connections),
            elements,
        )?;
        tables.settle(&self.node, &rules::port::no_arp(), &Elements::none())
    }
}

/// The attachments whose host ends are in a namespace.
pub(crate) fn ports(handle: &Handle) -> Result<Vec<(Link, Mark)>> {
    let filter = LinkFilter { kind: Some("veth"), owned: true, ..LinkFilter::default() };
    let links = handle.links(&filter).map_err(internal("list attachments"))?;
    Ok(links
        .into_iter()
        .filter_map(|link| {
            let mark = link.owner().and_then(Mark::parse)?;
            Some((link, mark))
        })
        .collect())
}

/// What the default Network wants in the node's table.
pub(crate) fn default_elements(shape: &Shape, ports: &[(Link, Mark)]) -> Vec<Put> {
    let network = &shape.network;
    let subnets: Vec<IpNet> = network.subnets.iter().map(|subnet| subnet.cidr).collect();
    // Where nodes' blocks are what the Network consists of, its subnet here is this node's block only.
    let blocks = network.blocks.iter().flat_map(|b| [b.ipv4.map(IpNet::from), b.ipv6.map(IpNet::from)]);
    let pods: Vec<IpNet> = subnets.iter().copied().chain(blocks.flatten()).collect();
    let nodes = network.blocks.iter().flat_map(|block| &block.node_addresses).copied().map(IpNet::from);
    let inside: Vec<IpNet> = network.not_outside.iter().chain(&pods).copied().chain(nodes).collect();
    let outward: &[IpNet] = if network.outside { &subnets } else { &[] };
    let mut wanted = Vec::new();
    let mut put = |set: fn() -> knit_kernel::nft::Set, nets: &[IpNet], v4| {
        wanted.extend(rules::range_elements(nets, v4).into_iter().map(|element| Put::new(set(), element)));
    };
    put(rules::port::pods4, &pods, true);
    put(rules::port::pods6, &pods, false);
    put(rules::node::inside4, &inside, true);
    put(rules::node::inside6, &inside, false);
    put(rules::node::outward4, outward, true);
    put(rules::node::outward6, outward, false);
    for (link, mark) in ports {
        wanted.extend(rules::source_elements(link.name.as_str(), mark.mac, mark.ips()));
    }
    wanted.extend(rules::tunnel::elements(shape));
    wanted
}

/// What the default Network wants besides: the ways to other nodes, and its pods.
pub(crate) fn default_entries(
    shape: &Shape,
    facts: &Facts,
    ports: &[(Link, Mark)],
    tunnel: &str,
) -> BTreeSet<Entry> {
    let mut entries = layer3::remote_entries(shape, &facts.uplink, tunnel);
    for (link, mark) in ports {
        entries.extend(layer3::pod_entries(link.name.as_str(), mark.mac, mark.ips()));
    }
    entries
}

/// The numbers of links, with those of all ports.
pub(crate) fn links_of<'a>(
    handle: &Handle,
    names: impl IntoIterator<Item = &'a str>,
    ports: &[(Link, Mark)],
) -> Result<Links> {
    let mut links: Links = ports.iter().map(|(link, _)| (link.name.to_string(), link.index)).collect();
    for name in names {
        // A name that the kernel gave, or that we chose.
        let Ok(name) = IfName::new(name) else { continue };
        let link = handle.link_by_name(&name).map_err(internal(format!("look for link {name}")))?;
        links.extend(link.map(|link| (name.to_string(), link.index)));
    }
    Ok(links)
}

/// The settings of a namespace that are not as a Network needs them. With IPv6 forwarding the kernel stops to take router
/// advertisements, unless told otherwise on the link that they come by.
pub(crate) fn wrong_sysctls(
    space: &Space,
    shape: &Shape,
    uplink: Option<&str>,
) -> Result<Vec<(Sysctl, String)>> {
    let sysctls = Sysctls::of(space.namespace()).map_err(internal("reach the sysctls of a namespace"))?;
    let mut wrong = Vec::new();
    let mut check = |name: Sysctl| -> Result<()> {
        let found = sysctls.get(&name).map_err(internal(format!("read sysctl {name}")))?;
        if found != "1" {
            wrong.push((name, "1".to_owned()));
        }
        Ok(())
    };
    if shape.has(true) {
        check(Sysctl::ipv4_forwarding())?;
    }
    if shape.has(false) {
        check(Sysctl::ipv6_forwarding())?;
        let uplink = uplink.and_then(|name| IfName::new(name).ok());
        if let Some(name) = &uplink {
            let accept = Sysctl::accept_ra(Scope::Link(name));
            if sysctls.get(&accept).is_ok_and(|found| found == "1") {
                // Before forwarding, which would end them.
                wrong.insert(0, (accept, "2".to_owned()));
            }
        }
    }
    Ok(wrong)
}

/// Turns forwarding on.
pub(crate) fn forwarding(space: &Space, shape: &Shape, uplink: Option<&str>) -> Result<()> {
    let wrong = wrong_sysctls(space, shape, uplink)?;
    if wrong.is_empty() {
        return Ok(());
    }
    let sysctls = Sysctls::of(space.namespace()).map_err(internal("reach the sysctls of a namespace"))?;
    sysctls.set_all(&wrong).map_err(internal("turn forwarding on"))
}
