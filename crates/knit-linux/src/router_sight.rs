//! Comparing a Network that has a router with what it should be, inside the router and on the node.

use std::path::PathBuf;

use knit_kernel::link::Link;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{IfName, NetNs};
use knit_nft::Family;
use knit_runtime::{InterfaceName, Result, SandboxId};

use crate::default_router;
use crate::links::WantedLink;
use crate::mark::Mark;
use crate::moves::{Comparing, InMotion};
use crate::networks::Net;
use crate::node_tables::compare_part;
use crate::router::{links_with_entries, router_end, router_entries, uplink_entries};
use crate::router_tables;
use crate::rules;
use crate::settings::{self, Setting};
use crate::shape::{Facts, RouterHome, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::survey::{Found, Looked};
use crate::tunnel::{self, ROUTER_TUNNEL};
use crate::uplink::{End, UplinkSlot, node_end};
use crate::wanted::Difference;

/// A Network that is looked at, without what was being changed.
pub(crate) struct Subject<'a> {
    pub net: &'a Net,
    pub shape: &'a Shape,
    pub facts: &'a Facts,
    pub motion: InMotion,
}

/// Looks at a Network with a router; says what of it is not known because it was being changed.
pub(crate) fn compare(
    Looked { net, shape, facts }: Looked<'_>,
    comparing: &Comparing<'_>,
    Found { node, wrong, survey }: Found<'_>,
) -> Result<InMotion> {
    let mut router = match shape.home {
        RouterHome::Node => None,
        RouterHome::Own => Some(NamespaceSight::of(&net.node, &net.space)?),
    };
    // Only now: all is read.
    let moved = comparing.in_motion(&net.name);
    if moved.network {
        return Ok(moved);
    }
    let mut motion = moved.clone();
    let lost = lost(net, router.as_ref().unwrap_or(node), &mut motion);
    let subject = Subject { net, shape, facts, motion };
    let ports = match &mut router {
        None => {
            default_router::compare(&subject, node, wrong)?;
            node.settled(&subject.motion)
        }
        Some(router) => {
            compare_inside(&subject, router, wrong)?;
            compare_uplink(&subject, node, router, wrong);
            router.settled(&subject.motion)
        }
    };
    survey.attachments.extend(lost);
    survey.noticed.extend(switched_off(net));
    survey.attachments.extend(closed_ports(net, &ports, node));
    let seen =
        router.as_mut().map_or_else(|| std::mem::take(&mut node.ports), |r| std::mem::take(&mut r.ports));
    node.seen.insert(net.name.clone(), seen);
    if let Some(mut router) = router {
        let found = router.take_wrong(&net.space);
        if found.is_empty() && moved.is_none() {
            router.rules_are_right(&net.space);
        }
        found.into_iter().for_each(|what| wrong.add("rules", what));
    }
    Ok(moved)
}

fn compare_inside(
    subject: &Subject<'_>,
    router: &mut NamespaceSight,
    wrong: &mut NetworkDamage,
) -> Result<()> {
    let Subject { net, shape, facts, motion } = subject;
    if !net.is_mounted() {
        wrong.add("namespace", "the router's namespace is no longer mounted");
    }
    if let Some(rules) = &mut router.rules {
        router_tables::compare(net, rules, shape, &router.ports, motion);
    }
    let driver = shape.driver();
    let mut wanted = settings::forwarding(shape, None);
    // A kernel that does not have them was said to lack them when the Network was set up.
    let more = driver.settings().into_iter().flat_map(|(settings, _)| settings);
    wanted.extend(more.map(Setting::if_there));
    wrong.settings(&net.space, &wanted)?;
    let master = driver.compare_links(router, shape, wrong);
    compare_ports(subject, router, master, wrong);
    if let Some(lo) = router.links.get("lo") {
        wrong.link(&WantedLink::default(), lo);
    }
    let wanted = tunnel::wanted(shape, facts, tunnel::node_tunnel(shape.id()));
    match (router.links.get(ROUTER_TUNNEL), wanted) {
        (Some(link), Some(wanted)) if tunnel::same(&wanted, link) => {
            wrong.link(&WantedLink::tunnel(shape, master), link);
        }
        _ => wrong.add("links", "the tunnel is missing or was replaced"),
    }
    let inside = router.links.get(router_end().as_str());
    let place = inside.and_then(|link| router.reading.addresses(link.index).find_map(UplinkSlot::of));
    let (Some(inside), Some(place)) = (inside, place) else {
        wrong.add("links", "the uplink is missing in the router, or its addresses are");
        return Ok(());
    };
    wrong.link(&WantedLink::uplink(shape, facts, place, End::Router), inside);
    let wanted = router_entries(shape, facts, place, &router.ports);
    let links = router.links_of(&links_with_entries(shape).collect::<Vec<_>>(), true);
    let mut found = router.reading.found(&links);
    found.extend(router.reading.found_on_own(&links));
    wrong.entries(&Difference::between(&wanted, &found), motion);
    Ok(())
}

fn compare_uplink(
    subject: &Subject<'_>,
    node: &mut NamespaceSight,
    router: &NamespaceSight,
    wrong: &mut NetworkDamage,
) {
    let Subject { net, shape, facts, motion } = subject;
    let uplink = node_end(shape.id());
    if let Some(rules) = &mut node.rules {
        compare_part(&net.node, rules, shape, &[], motion);
    }
    let link = node.links.get(uplink.as_str());
    let place = link.and_then(|link| node.reading.addresses(link.index).find_map(UplinkSlot::of));
    let (Some(link), Some(place)) = (link, place) else {
        wrong.add("links", format!("the uplink {uplink} is missing, or its addresses are"));
        return;
    };
    wrong.link(&WantedLink::uplink(shape, facts, place, End::Node), link);
    let wanted = uplink_entries(shape, &uplink, place, &router.ports);
    let links = node.links_of(&[uplink.as_str()], false);
    let mut found = node.reading.found(&links);
    found.extend(node.reading.found_on_own(&links));
    wrong.entries(&Difference::between(&wanted, &found), motion);
}

/// Compares the host ends of attachments.
pub(crate) fn compare_ports(
    subject: &Subject<'_>,
    sight: &NamespaceSight,
    master: Option<u32>,
    wrong: &mut NetworkDamage,
) {
    let settled = sight.ports.iter().filter(|(link, _)| subject.motion.has_settled(link));
    for (link, mark) in settled.filter(|(link, _)| !subject.net.attachments.is_in_flux(link)) {
        wrong.link(
            &WantedLink::host_end(subject.shape, mark, subject.net.attachments.made_with(link), master),
            link,
        );
    }
}

/// Attachments whose link is gone. What they left is taken away with them, and is not looked at.
fn lost(net: &Net, sight: &NamespaceSight, motion: &mut InMotion) -> Vec<(SandboxId, InterfaceName)> {
    let (known, there) = (net.attachments.known(), sight.hosts());
    let mut lost = Vec::new();
    for (host, known) in known.iter().filter(|(_, known)| known.network == net.name) {
        if !there.contains(host) && !motion.hosts.contains(host) {
            motion.leave_out(host, &known.mark.ips().collect::<Vec<_>>());
            lost.push((known.mark.sandbox.clone(), known.mark.interface.clone()));
        }
    }
    lost
}

/// Attachments for which IPv6 was switched on when they were made, and is off now. That is inside the
/// pod, and only somebody in there, or root on the node, does it: it is the pod's own affair, and is
/// told.
fn switched_off(net: &Net) -> Vec<((SandboxId, InterfaceName), String)> {
    let of_network: Vec<(Mark, PathBuf)> = {
        let known = net.attachments.known();
        let on = known.values().filter(|known| known.ipv6_on && known.network == net.name);
        on.filter_map(|known| Some((known.mark.clone(), known.netns.clone()?))).collect()
    };
    let is_off = |(mark, path): &(Mark, PathBuf)| {
        let name = IfName::new(mark.interface.as_str()).ok()?;
        // A pod that ends takes all of it along.
        let pod = NetNs::open(path).ok().filter(|pod| pod.id().ino == mark.inode)?;
        let off = Sysctl::ipv6_disabled(Scope::Link(&name));
        let value = Sysctls::of(&pod).and_then(|sysctls| sysctls.get(&off)).ok()?;
        (value == "1").then(|| {
            let what = format!(
                "IPv6 was disabled inside the pod ({off} is 1): interface {name} has no IPv6 address. \
                 Knit does not change settings inside pods; restart the pod to restore the address"
            );
            ((mark.sandbox.clone(), mark.interface.clone()), what)
        })
    };
    of_network.iter().filter_map(is_off).collect()
}

/// Attachments whose ports of the node are not led to them as they should be: one is missing, leads
/// elsewhere, or was added.
fn closed_ports(net: &Net, ports: &[(Link, Mark)], node: &NamespaceSight) -> Vec<(SandboxId, InterfaceName)> {
    let Some(rules) = &node.rules else { return Vec::new() };
    let table = rules.found(&rules::table(Family::Inet));
    let there = table.map(rules::ports_in).unwrap_or_default();
    let known = net.attachments.known();
    let as_made = |mark: &Mark| {
        let host = mark.host();
        let there = there.get(host.as_str()).map_or(&[][..], Vec::as_slice);
        match known.get(host.as_str()) {
            Some(known) if known.ports.is_empty() != mark.ports => {
                let ips: Vec<_> = mark.ips().collect();
                rules::same_ports(&rules::port_elements(host.as_str(), &known.ports, &ips), there)
            }
            // Which ones there should be is not known.
            _ => !mark.ports,
        }
    };
    let closed = ports.iter().filter(|(_, mark)| !as_made(mark));
    closed.map(|(_, mark)| (mark.sandbox.clone(), mark.interface.clone())).collect()
}
