//! The router of the default Network, which is the node's own namespace: the routes to other nodes' pods, and
//! the tunnel to those that are not on this node's link.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::link::Link;
use knit_runtime::Result;
use knit_types::Family;

use crate::fail::internal;
use crate::links::{WantedLink, links_of, ports_by_name, settle_ports};
use crate::mark::Mark;
use crate::networks::Net;
use crate::node_tables::compare_part;
use crate::router::take_sources_of_lost;
use crate::router_sight::{Subject, compare_ports};
use crate::rules::{self, SetElement};
use crate::settings;
use crate::shape::{Facts, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::topology;
use crate::tunnel;
use crate::wanted::{Difference, Entry, found, take};

/// Brings the default Network's part of the node's namespace to what is wanted.
pub(crate) fn set_up(net: &Net, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
    let node = &net.node;
    let handle = node.space.links()?;
    let ports = ports_by_name(&net.attachments, &handle)?;
    let made = {
        let mut tables = node.tables();
        tables.settle_part(node, shape, &ports)?;
        tables.take_made()
    };
    // Without pods nothing else belongs there: what was put there just now need not be read back.
    if let Some(at) = made
        && net.attachments.known().is_empty()
        && net.attachments.making().is_empty()
    {
        node.space.rules_seen.compared(at);
    }
    take_sources_of_lost(net, &ports)?;
    settle_ports(&net.attachments, &handle, shape, &ports, None)?;
    settings::settle(&node.space, &settings::forwarding(shape, Some(&facts.uplink)))?;
    let tunnel = tunnel::node_tunnel(shape.id());
    tunnel::ensure_in_node(&handle, shape, facts, &tunnel)?;
    let wanted = entries(shape, facts, &ports, tunnel.as_str());
    let links = links_of(&handle, [facts.uplink.as_str(), tunnel.as_str()], &ports)?;
    let found = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
    let found = found.into_iter().chain(tunnel::found(&handle, &links, &tunnel)?).collect();
    let difference = Difference::between(&wanted, &found);
    if !difference.is_empty() {
        tracing::debug!(network = %shape.network.name, "\n{difference}");
    }
    difference.apply(&handle, &links).map_err(internal("update routes and neighbors"))
}

/// Takes the routes to other nodes and the tunnel away. The node's tables are not touched: uplinks of other
/// Networks may need them.
pub(crate) fn take_down(net: &Net) -> Result<()> {
    let Some(shape) = net.shape() else { return Ok(()) };
    let handle = net.node.space.links()?;
    let tunnel = tunnel::node_tunnel(shape.id());
    let facts = net.node.facts(None)?;
    let links = links_of(&handle, [facts.uplink.as_str(), tunnel.as_str()], &[])?;
    let there = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
    let there: Vec<_> = there.into_iter().collect();
    take(&*handle, &links, &there).map_err(internal("delete the routes to other nodes"))?;
    if let Some(index) = links.get(tunnel.as_str()) {
        handle.delete_link(*index).map_err(internal("delete the tunnel"))?;
    }
    Ok(())
}

/// Compares it and its attachments with what they should be.
pub(crate) fn compare(
    subject: &Subject<'_>,
    node: &mut NamespaceSight,
    wrong: &mut NetworkDamage,
) -> Result<()> {
    let Subject { net, shape, facts, motion } = subject;
    if let Some(rules) = &mut node.rules {
        compare_part(&net.node, rules, shape, &node.ports, motion);
    }
    wrong.settings(&net.node.space, &settings::forwarding(shape, Some(&facts.uplink)))?;
    compare_ports(subject, node, None, wrong);
    let tunnel = tunnel::node_tunnel(shape.id());
    let there = node.links.get(tunnel.as_str());
    match (tunnel::wanted(shape, facts, tunnel.clone()), there) {
        (Some(wanted), Some(link)) if tunnel::same(&wanted, link) => {
            wrong.link(&WantedLink::tunnel(shape, None), link);
        }
        (None, None) => {}
        (Some(_), _) => wrong.add("links", format!("the tunnel {tunnel} is missing or was replaced")),
        (None, Some(_)) => wrong.add("links", format!("the tunnel {tunnel} should not exist")),
    }
    let wanted = entries(shape, facts, &node.ports, tunnel.as_str());
    let links = node.links_of(&[facts.uplink.as_str(), tunnel.as_str()], true);
    let own = node.links_of(&[tunnel.as_str()], false);
    let mut found = node.reading.found(&links);
    found.extend(node.reading.found_on_own(&own));
    wrong.entries(&Difference::between(&wanted, &found), motion);
    Ok(())
}

/// What the default Network wants in the node's table, besides what its pods and tunnels have there.
pub(crate) fn elements(shape: &Shape) -> Vec<SetElement> {
    let network = &shape.network;
    let subnets: Vec<IpNet> = network.subnets.iter().map(|subnet| subnet.cidr).collect();
    let pods = shape.pods();
    let nodes = network.blocks.iter().flat_map(|block| &block.node_addresses).copied().map(IpNet::from);
    let inside: Vec<IpNet> = network.not_outside.iter().chain(&pods).copied().chain(nodes).collect();
    let outward: &[IpNet] = if network.outside { &subnets } else { &[] };
    let mut wanted = Vec::new();
    let mut put = |set: fn() -> knit_nft::Set, nets: &[IpNet], family| {
        wanted.extend(
            rules::range_elements(nets, family).into_iter().map(|element| SetElement::new(set(), element)),
        );
    };
    put(rules::port::pods4, &pods, Family::V4);
    put(rules::port::pods6, &pods, Family::V6);
    put(rules::node::inside4, &inside, Family::V4);
    put(rules::node::inside6, &inside, Family::V6);
    put(rules::node::outward4, outward, Family::V4);
    put(rules::node::outward6, outward, Family::V6);
    wanted
}

/// What the default Network wants besides: the ways to other nodes, and its pods.
pub(crate) fn entries(shape: &Shape, facts: &Facts, ports: &[(Link, Mark)], tunnel: &str) -> BTreeSet<Entry> {
    let mut entries = topology::routed_remote_entries(shape, &facts.uplink, tunnel);
    for (link, mark) in ports {
        entries.extend(shape.driver().pod_entries(link.name.as_str(), mark));
    }
    entries
}
