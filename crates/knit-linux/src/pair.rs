//! An attachment whose link is a pair: one end in the pod, the other in its Network's router.
//!
//! What of it can be said without a kernel is in `port`.

use std::collections::BTreeSet;
use std::time::Duration;

use knit_kernel::handle::{Created, LinkFilter};
use knit_kernel::link::{Link, NewLink};
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, IfName, Mtu, owner};
use knit_runtime::{Error, HostEnd, InterfaceName, Reason, Result, SandboxId};
use knit_types::Family;

use crate::fail::{damaged, internal};
use crate::links::links_of;
use crate::mark::{Mark, host_name};
use crate::networks::Net;
use crate::plan::Plan;
use crate::pod_side;
use crate::port::{FoundPort, Port, is_half_made};
use crate::router;
use crate::rules;
use crate::shape::RouterHome;
use crate::wanted::{Entry, Links, found, found_on_own};

/// How long a new pod's kernel may take to answer. It is there already, so this is for a loaded machine.
const ECHO_TIMEOUT: Duration = Duration::from_secs(3);

/// The attachments whose host ends are in a namespace.
pub(crate) fn list(handle: &Handle) -> Result<Vec<(Link, Mark)>> {
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

/// The host end of an attachment, found by its name.
pub(crate) fn one(net: &Net, sandbox: &SandboxId, interface: &InterfaceName) -> Result<Option<(Link, Mark)>> {
    let looked = net.space.links()?.link_by_name(&host_name(sandbox, interface));
    let link = looked.map_err(internal("look for the attachment"))?;
    let mark = link.as_ref().and_then(|link| link.owner().and_then(Mark::parse));
    let ours = |(_, mark): &(Link, Mark)| mark.sandbox == *sandbox && mark.interface == *interface;
    Ok(link.zip(mark).filter(ours))
}

/// What is there under the name of a plan's host end; what was half made goes.
pub(crate) fn find(net: &Net, plan: &Plan) -> Result<Option<(Link, Mark)>> {
    let being_made = net.attachments.making().contains(plan.host.as_str());
    let handle = net.space.links()?;
    match plan.port().find(&*handle, being_made)? {
        FoundPort::Nothing => Ok(None),
        FoundPort::HalfMade(index) => {
            tracing::info!(link = %plan.host, "removing a link whose creation was interrupted");
            handle.delete_link(index).map_err(internal("delete an incomplete link"))?;
            Ok(None)
        }
        FoundPort::Ours(found) => Ok(Some(*found)),
    }
}

/// Makes a pair of links between pod and router, with all that is on them.
pub(crate) fn make(net: &Net, plan: &Plan, pod: &NetNs) -> Result<Link> {
    let handle = net.space.links()?;
    let driver = plan.shape.driver();
    let addr_gen = net.node.addr_gen(&plan.shape);
    let mut link = NewLink::veth(plan.host.clone(), plan.peer(pod)?);
    link.mac = Some(plan.shape.gateway_mac());
    link.mtu = Mtu::new(plan.shape.mtu).ok();
    link.alias = Some(plan.mark.alias());
    link.addr_gen = addr_gen;
    link.up = true;
    if let Some(master) = driver.master() {
        let name = IfName::new(master.name).expect("a driver gives its link a name that is one");
        let index = handle.index_of(&name).map_err(internal(format!("find link {name} in the router")))?;
        (link.master, link.port) = (Some(index), Some(master.pod_port));
    }
    let pod_side = |created: Created| {
        let peer = created.peer.ok_or_else(|| {
            let message = format!("the kernel did not report where the other end of {} is", plan.host);
            Error::new(Reason::Internal, message)
        })?;
        pod_side::apply(net, plan, pod, &|| driver.pod_side(plan, peer, addr_gen))
    };
    let created = plan.port().make(&*handle, &mut *net.space.rules()?, &link, pod_side)?;
    router::lead_node_to(net, plan)?;
    let link = handle.link(created.index).map_err(internal("read the new link"))?;
    link.ok_or_else(|| {
        let message = format!("the namespace of sandbox {} disappeared in the meantime", plan.mark.sandbox);
        Error::new(Reason::NamespaceGone, message)
    })
}

/// Sends a packet to each address and waits for the answer.
pub(crate) fn verify(net: &Net, plan: &Plan) -> Result<()> {
    for address in plan.mark.ips() {
        let from = plan.shape.echo_source(Family::of(address));
        let asked = net.space.echo(Family::of(address), from)?.ask(address, ECHO_TIMEOUT);
        asked.map_err(|error| {
            let message = format!(
                "{} of sandbox {} was created with {address}, but nothing answers there: check for rules or \
                 sysctls of other programs that drop packets between {} and the pod",
                plan.mark.interface, plan.mark.sandbox, plan.host
            );
            Error::new(Reason::Internal, message).because(error)
        })?;
    }
    Ok(())
}

/// What a failed making left under a plan's name. Another's link of that name is not ours to delete.
pub(crate) fn leftover(net: &Net, plan: &Plan) -> Result<Option<Link>> {
    let link = net.space.links()?.link_by_name(&plan.host).map_err(internal("look for what was created"))?;
    Ok(link.filter(|link| link.owner().is_none_or(|owner| Mark::parse(owner).is_some())))
}

/// Takes an attachment's host side away: its link first, so that nothing more is sent, then what allowed it
/// to.
pub(crate) fn unmake(net: &Net, link: Option<&Link>, mark: &Mark) -> Result<()> {
    let host = mark.host();
    let port = Port { host: &host, mark };
    port.unmake(&*net.space.links()?, &mut *net.space.rules()?, link.map(|link| link.index))?;
    router::stop_leading_node_to(net, mark)
}

/// Whether a link is an attachment's that a killed runtime did not finish.
fn is_leftover(net: &Net, link: &Link) -> bool {
    is_half_made(link, net.attachments.making().contains(link.name.as_str()))
}

/// Removes host ends whose making was cut off.
pub(crate) fn collect_half_made(net: &Net) -> Result<()> {
    let handle = net.space.links()?;
    let filter = LinkFilter { kind: Some("veth"), group: Some(owner::GROUP), ..LinkFilter::default() };
    for link in handle.links(&filter).map_err(internal("list links"))? {
        if is_leftover(net, &link) {
            tracing::info!(link = %link.name, "removing a link whose creation was interrupted");
            handle.delete_link(link.index).map_err(internal("delete an incomplete link"))?;
        }
    }
    Ok(())
}

/// Looks whether one attachment's host side is as it was made: its link, its routes and neighbours, its
/// rules.
pub(crate) fn inspect(net: &Net, link: &Link, mark: &Mark) -> Result<()> {
    let host = link.name.as_str();
    let mut wrong: Vec<String> = Vec::new();
    if !link.up {
        wrong.push(format!("{host} is down"));
    } else if !link.running {
        wrong.push(format!("the pod's end of {host} is down or missing"));
    }
    let handle = net.space.links()?;
    let mut links: Links = [(host.to_owned(), link.index)].into();
    let (driver, master) = (mark.driver(), mark.driver().master());
    if let Some(master) = &master {
        links.extend(links_of(&handle, [master.name], &[])?);
    }
    let wanted: BTreeSet<Entry> = driver.pod_entries(host, mark).into_iter().collect();
    let mut there = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
    if let Some(master) = &master {
        let forwarding = found_on_own(&handle, &links).map_err(internal("read forwarding entries"))?;
        there.extend(forwarding);
        if link.master.is_none() || link.port != Some(master.pod_port) {
            wrong.push(format!("{host} is no longer a port of {}", master.name));
        }
    }
    wrong.extend(wanted.difference(&there).map(|entry| format!("missing: {entry}")));
    let table = driver.sources();
    let mut kernel = net.space.rules()?;
    for put in rules::source_elements(host, mark.mac, mark.ips()) {
        let listed = match kernel.elements(&table, &put.set) {
            Ok(listed) => listed,
            Err(error) if error.is_not_found() => Vec::new(),
            Err(error) => return Err(internal("list rules")(error)),
        };
        if !listed.iter().any(|listed| listed.element.key == put.element.key) {
            wrong.push(format!("missing in set {}: an address of {host}", put.set.name));
        }
    }
    damaged(mark, &wrong)
}

/// The other end of an attachment's interface.
pub(crate) fn host_end(net: &Net, link: &Link) -> HostEnd {
    HostEnd {
        name: link.name.to_string(),
        index: link.index,
        netns_path: (net.home == RouterHome::Own).then(|| net.path.clone()),
        netns_inode: net.space.namespace().id().ino,
    }
}
