//! Ports of the node that lead to pods: opened, closed, and compared with what was asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use knit_kernel::IfName;
use knit_nft::{Element, Family, Nftables as _, Transaction};
use knit_runtime::{AttachRequest, Error, PortMapping, Protocol, Reason, Result};

use crate::attachments::Attachments;
use crate::fail::internal;
use crate::networks::Networks;
use crate::node::Node;
use crate::plan::Plan;
use crate::port::take_elements;
use crate::rules::{self, SetElement};

/// Refuses a port of the node that would take frames of other nodes away from the tunnels.
pub(crate) fn check(request: &AttachRequest, tunnels: u16) -> Result<()> {
    let taken = |port: &PortMapping| port.protocol == Protocol::Udp && port.host_port == tunnels;
    if !request.ports.iter().any(taken) {
        return Ok(());
    }
    let message = format!(
        "host port {tunnels}/UDP is reserved for the VXLAN tunnels between nodes: give sandbox {} another \
         host port",
        request.pod.sandbox
    );
    Err(Error::new(Reason::Invalid, message))
}

/// Opens the ports of the node that lead to an attachment which is about to be made.
pub(crate) fn open(node: &Node, plan: &Plan, request: &AttachRequest) -> Result<()> {
    let host = plan.host.as_str();
    let table = rules::table(Family::Inet);
    let ips: Vec<IpAddr> = plan.mark.ips().collect();
    let ports = rules::port_elements(host, &request.ports, &ips);
    if ports.is_empty() {
        return Ok(());
    }
    // A port of the node that another pod has is refused here.
    let mut transaction = Transaction::new();
    for put in &ports {
        transaction.create_elements(&table, &put.set, vec![put.element.clone()]);
    }
    let mut committed = node.space.rules()?.commit(&transaction);
    if committed.as_ref().is_err_and(knit_nft::Error::is_exists) {
        // They may be this one's own, from before its link went without us.
        close(node, &|owner| owner == host)?;
        committed = node.space.rules()?.commit(&transaction);
    }
    committed.map_err(|error| {
        if error.is_exists() {
            let message = "a port of the node is taken";
            return Error::new(Reason::Conflict, message).because(error);
        }
        internal("open ports of the node")(error)
    })
}

/// Brings the ports of the node that lead to an attachment which is there to what was asked for: somebody
/// closed some of them, changed where they lead, or added others.
pub(crate) fn open_again(
    node: &Node,
    attachments: &Attachments,
    plan: &Plan,
    request: &AttachRequest,
) -> Result<()> {
    let (host, table) = (plan.host.as_str(), rules::table(Family::Inet));
    let ips: Vec<IpAddr> = plan.mark.ips().collect();
    let wanted = rules::port_elements(host, &request.ports, &ips);
    let there = elements(node, &|_| true)?;
    let is_anothers = |owner: &str| {
        owner != host && (attachments.known().contains_key(owner) || attachments.making().contains(owner))
    };
    let in_the_way = |put: &&SetElement| {
        let owner = put.element.comment.as_deref();
        let same_key =
            |wanted: &SetElement| wanted.set.name == put.set.name && wanted.element.key == put.element.key;
        let ours = owner == Some(host);
        let is_wanted = wanted.iter().any(|wanted| rules::is_same(wanted, put));
        !is_wanted && (ours || (wanted.iter().any(same_key) && !owner.is_some_and(is_anothers)))
    };
    let gone: Vec<SetElement> = there.iter().filter(in_the_way).cloned().collect();
    let missing = |put: &&SetElement| !there.iter().any(|there| rules::is_same(put, there));
    let missing: Vec<SetElement> = wanted.iter().filter(missing).cloned().collect();
    if gone.is_empty() && missing.is_empty() {
        return Ok(());
    }
    let mut rules = node.space.rules()?;
    let failed = internal("open ports of the node again");
    // In one transaction: a port that leads elsewhere is closed at no moment.
    let mut both = SetElement::delete(&gone, &table);
    both.append(SetElement::add(&missing, &table));
    match rules.commit(&both) {
        Ok(()) => return Ok(()),
        // Somebody has taken some of them away meanwhile.
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(failed(error)),
    }
    take_elements(&mut *rules, &gone, &table)?;
    rules.commit(&SetElement::add(&missing, &table)).map_err(failed)
}

/// Closes the ports of the node that lead to this host end.
pub(crate) fn close_of(node: &Node, host: &IfName) -> Result<()> {
    close(node, &|owner| owner == host.as_str())
}

/// Closes the ports of the node that lead to these host ends.
fn close(node: &Node, whose: &dyn Fn(&str) -> bool) -> Result<()> {
    let gone = elements(node, &|element| element.comment.as_deref().is_some_and(whose))?;
    take_elements(&mut *node.space.rules()?, &gone, &rules::table(Family::Inet))
}

/// The ports of the node that lead to pods, by their host ends.
pub(crate) fn by_host(node: &Node) -> Result<BTreeMap<String, Vec<PortMapping>>> {
    Ok(rules::ports_of(&elements(node, &|_| true)?))
}

/// Closes the ports of the node whose pod is no more.
pub(crate) fn sweep(networks: &Networks) -> Result<()> {
    // First what is being made, then what is there: whatever is in neither when its rules are read is gone.
    let found = elements(&networks.node, &|_| true)?;
    let mut owners: BTreeSet<String> =
        found.into_iter().filter_map(|put| put.element.comment).map(String::from).collect();
    if owners.is_empty() {
        return Ok(());
    }
    let making = networks.attachments.making().clone();
    for net in networks.all()? {
        for (_, mark) in net.list()? {
            owners.remove(mark.host().as_str());
        }
    }
    owners.retain(|owner| !making.contains(owner));
    if owners.is_empty() {
        return Ok(());
    }
    // One of them may have come back while this was found out: what is looked at next is read anew.
    networks.node.space.rules_seen.touch();
    close(&networks.node, &|owner| owners.contains(owner))
}

/// What the kernel has of ports of the node.
fn elements(node: &Node, is_wanted: &dyn Fn(&Element) -> bool) -> Result<Vec<SetElement>> {
    let mut kernel = node.space.rules()?;
    let table = rules::table(Family::Inet);
    let mut found = Vec::new();
    for set in rules::port_sets() {
        let listed = match kernel.elements(&table, &set) {
            Ok(listed) => listed,
            Err(error) if error.is_not_found() => continue,
            Err(error) => return Err(internal("list ports of the node")(error)),
        };
        let wanted = listed.into_iter().map(|listed| listed.element).filter(is_wanted);
        found.extend(wanted.map(|element| SetElement::new(set.clone(), element)));
    }
    Ok(found)
}
