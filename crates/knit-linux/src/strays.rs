//! Elements of the node's table that belong to nothing on this node: ports that lead to no attachment,
//! uplinks and tunnels of no Network. Another program added them, or what they were for went while no runtime
//! ran.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use knit_kernel::Handle;
use knit_kernel::handle::LinkFilter;
use knit_nft::{Element, Family, Nftables as _, TableState};
use knit_runtime::Result;

use crate::fail::internal;
use crate::moves::Comparing;
use crate::networks::Networks;
use crate::node_tables::NodeTables;
use crate::port::take_elements;
use crate::rules::{self, SetElement};
use crate::shape::RouterHome;
use crate::sight::NamespaceSight;

/// Whoever may have elements in the node's table that are nobody else's.
pub(crate) struct Owners {
    /// Host ends of attachments: of those that are there, that are being made, and whose link is gone.
    hosts: HashSet<String>,
    /// Numbers of Networks.
    networks: HashSet<u32>,
}

impl Owners {
    /// The elements that belong to none of them.
    fn strays(&self, state: &TableState) -> Vec<SetElement> {
        let sets = state.sets.iter().filter(|(_, set)| !set.set.dynamic);
        let elements = sets.flat_map(|(name, set)| {
            let stray = set.elements.values().filter(|element| self.is_stray(name, element));
            stray.map(|element| SetElement::new(set.set.clone(), element.clone()))
        });
        elements.collect()
    }

    fn is_stray(&self, set: &str, element: &Element) -> bool {
        if rules::port_sets().iter().any(|ports| *ports.name == *set) {
            return element.comment.as_deref().is_none_or(|host| !self.hosts.contains(host));
        }
        rules::node::is_by_network(set)
            && rules::node::network_of(set, element).is_none_or(|id| !self.networks.contains(&id))
    }
}

/// Says what is in the node's table and belongs to nothing, if that can be told: nothing while Networks
/// come, change or go. The next set-up takes it away.
pub(crate) fn compare(
    networks: &Networks,
    node: &NamespaceSight,
    comparing: &Comparing<'_>,
) -> Result<Option<usize>> {
    let table = rules::table(Family::Inet);
    let read = node.rules.as_ref().and_then(|rules| rules.found(&table));
    let Some(state) = read else { return Ok(Some(0)) };
    let numbers = numbers(networks, &networks.node.tables())?;
    let mut hosts = hosts(networks)?;
    // Only now: all is read.
    let Some(moved) = comparing.hosts_in_motion() else { return Ok(None) };
    hosts.extend(moved);
    let strays = Owners { hosts, networks: numbers }.strays(state).len();
    if strays > 0 {
        networks.node.space.rules_seen.touch();
        networks.node.strays.store(true, Ordering::Relaxed);
    }
    Ok(Some(strays))
}

/// Takes away what was found to belong to nothing.
pub(crate) fn sweep(networks: &Networks) {
    if !networks.node.strays.swap(false, Ordering::Relaxed) {
        return;
    }
    if let Err(error) = take(networks) {
        networks.node.strays.store(true, Ordering::Relaxed);
        let error = crate::fail::chain(&error);
        tracing::error!(error, "cannot remove elements of the node's table that belong to nothing");
    }
}

fn take(networks: &Networks) -> Result<()> {
    let table = rules::table(Family::Inet);
    // No Network's part changes meanwhile. What is in the table and has no owner afterwards has none.
    let mut tables = networks.node.tables();
    let mut kernel = networks.node.space.rules()?;
    let comparing = networks.moves.compare();
    let state = kernel.table(&table).map_err(internal("read the node's table"))?;
    let Some(state) = state else { return Ok(()) };
    let mut owners = Owners { hosts: hosts(networks)?, networks: numbers(networks, &tables)? };
    // An attachment that was lost may have come back while all others were read.
    owners.hosts.extend(comparing.ports_in_motion());
    take_elements(&mut *kernel, &owners.strays(&state), &table)?;
    tables.forget_left(|id| !owners.networks.contains(&id));
    Ok(())
}

/// Takes away what Networks left in the node's table that went, or got another number, while no runtime
/// ran.
pub(crate) fn sweep_left(networks: &Networks) -> Result<()> {
    let mut tables = networks.node.tables();
    if tables.left().next().is_none() {
        return Ok(());
    }
    let numbers = numbers(networks, &tables)?;
    let gone: Vec<u32> = tables.left().filter(|id| !numbers.contains(id)).collect();
    for id in gone {
        tracing::info!(number = id, "removing the rules of a Network that is gone");
        tables.clear_part(&networks.node, RouterHome::Own, id)?;
    }
    Ok(())
}

/// The host ends that ports of the node may lead to. First what is being made, then what is there:
/// whatever is in neither when its rules were read before is gone.
fn hosts(networks: &Networks) -> Result<HashSet<String>> {
    let mut hosts: HashSet<String> = networks.attachments.making().clone();
    hosts.extend(networks.attachments.known().keys().cloned());
    for net in networks.all()? {
        hosts.extend(net.list()?.iter().map(|(_, mark)| mark.host().to_string()));
    }
    Ok(hosts)
}

/// The numbers of the Networks that are set up, and of those that the kernel has from before.
fn numbers(networks: &Networks, tables: &NodeTables) -> Result<HashSet<u32>> {
    let mut numbers: HashSet<u32> = tables.in_force().collect();
    numbers.extend(networks.set_up().iter().map(|(_, shape, _)| shape.id()));
    numbers.extend(numbers_of_links(&*networks.node.space.links()?)?);
    for net in networks.all()? {
        if net.home == RouterHome::Own && net.shape().is_none() {
            numbers.extend(numbers_of_links(&*net.space.links()?)?);
        }
    }
    Ok(numbers)
}

/// The numbers of the Networks whose uplinks or tunnels are in a namespace.
fn numbers_of_links(handle: &Handle) -> Result<Vec<u32>> {
    let owned = LinkFilter { owned: true, ..LinkFilter::default() };
    let links = handle.links(&owned).map_err(internal("list uplinks and tunnels"))?;
    let number = |owner: &str| {
        let number = owner.strip_prefix("uplink ").or_else(|| owner.strip_prefix("tunnel "))?;
        number.parse().ok()
    };
    Ok(links.iter().filter_map(|link| number(link.owner()?)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::node::{self, uplinks};
    use knit_nft::IfName;

    #[test]
    fn what_belongs_to_no_network_and_to_no_attachment_was_left_alone() {
        let owners = Owners { hosts: ["knita".to_owned()].into(), networks: [7].into() };
        let uplink = |name: &str| Element::new(&IfName::new(name));
        for (name, stray) in [("up-7", false), ("up-8", true), ("eth0", true), ("up-", true)] {
            assert_eq!(owners.is_stray(&uplinks::all().name, &uplink(name)), stray, "{name}");
            assert_eq!(owners.is_stray(&uplinks::outside().name, &uplink(name)), stray, "{name}");
        }
        let pod = std::net::Ipv4Addr::new(10, 244, 1, 5);
        let hairpin = || Element::new(&(pod, pod));
        assert!(owners.is_stray(&node::hairpin4().name, &hairpin()));
        assert!(owners.is_stray(&node::hairpin4().name, &hairpin().comment("knitb")));
        assert!(!owners.is_stray(&node::hairpin4().name, &hairpin().comment("knita")));
        assert!(!owners.is_stray(&node::refused().name, &uplink("up-8")), "packets put it there");
    }
}
