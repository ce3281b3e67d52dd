//! Links that are there, as they should be: what of one is not so, and the change that makes it so.

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Change, Link, PortFlags};
use knit_kernel::{Handle, IfName, Mtu, owner};
use knit_runtime::Result;

use crate::attachments::Attachments;
use crate::fail::internal;
use crate::mark::{Mark, host_name};
use crate::router::router_end;
use crate::shape::{Facts, Shape};
use crate::topology;
use crate::tunnel;
use crate::uplink::{End, UplinkSlot, node_end};
use crate::wanted::Links;

/// What a link is to be; it is to be up in any case.
#[derive(Debug, Clone, Default)]
pub(crate) struct WantedLink {
    pub name: Option<IfName>,
    pub mtu: Option<u32>,
    pub mac: Option<knit_kernel::Mac>,
    pub group: Option<u32>,
    /// The owner's mark.
    pub alias: Option<String>,
    /// The bridge that it is a port of, and as what.
    pub port: Option<(u32, PortFlags)>,
}

impl WantedLink {
    /// An attachment's host end; `master` is what it is a port of, where its kind of Network has that.
    pub fn host_end(shape: &Shape, mark: &Mark, mtu: Option<u32>, master: Option<u32>) -> Self {
        let flags = mark.driver().master().map(|master| master.pod_port);
        Self {
            name: Some(host_name(&mark.sandbox, &mark.interface)),
            mtu,
            mac: Some(shape.gateway_mac()),
            group: Some(owner::GROUP),
            alias: None,
            port: master.zip(flags),
        }
    }

    /// One end of a Network's uplink.
    pub fn uplink(shape: &Shape, facts: &Facts, place: UplinkSlot, end: End) -> Self {
        let (group, whose) = match end {
            End::Node => (owner::GROUP, "uplink"),
            End::Router => (0, "uplink-end"),
        };
        let alias = Some(owner::alias(&format!("{whose} {}", shape.id())));
        let mac = Some(place.mac(end));
        Self { mtu: Some(facts.mtu), mac, group: Some(group), alias, ..Self::default() }
    }

    /// A tunnel, as far as it can be changed in place.
    pub fn tunnel(shape: &Shape, master: Option<u32>) -> Self {
        let port = master.zip(shape.driver().master().map(|master| master.tunnel_port));
        Self { mtu: Some(shape.mtu), group: Some(tunnel::GROUP), port, ..Self::default() }
    }

    /// What is to change about a link, and what is wrong with it in words; nothing if it is as it should be.
    pub fn fix(&self, link: &Link) -> Option<(Change<'static>, String)> {
        let mut change = Change::of(link.index);
        let mut wrong = Vec::new();
        if let Some(name) = self.name.as_ref().filter(|name| **name != link.name) {
            change.rename = Some(name.clone());
            wrong.push(format!("was {name}"));
        }
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu != link.mtu) {
            change.mtu = Mtu::new(mtu).ok();
            wrong.push(format!("has an MTU of {} and not {mtu}", link.mtu));
        }
        if self.mac.is_some() && self.mac != link.mac {
            change.mac = self.mac;
            wrong.push("has another MAC".to_owned());
        }
        if let Some(group) = self.group.filter(|group| *group != link.group) {
            change.group = Some(group);
            wrong.push("is in another group".to_owned());
        }
        if self.alias.is_some() && self.alias != link.alias {
            change.alias = self.alias.clone();
            wrong.push("has lost its mark".to_owned());
        }
        if let Some((bridge, flags)) = self.port
            && (link.master != Some(bridge) || link.port != Some(flags))
        {
            (change.master, change.port) = (Some(Some(bridge)), Some(flags));
            wrong.push("is no longer a port of its bridge".to_owned());
        }
        if !link.up {
            wrong.push("is down".to_owned());
        }
        change.up = Some(true);
        (!wrong.is_empty()).then(|| (change, format!("{} {}", link.name, wrong.join(", "))))
    }

    /// Makes a link so.
    pub fn settle(&self, handle: &Handle, link: &Link) -> Result<()> {
        let Some((change, wrong)) = self.fix(link) else { return Ok(()) };
        match handle.apply(&[change.into()]) {
            // It has just gone: whoever deleted it takes care of the rest.
            Err(error) if error.is_not_found() => Ok(()),
            other => other.map_err(internal(format!("repair a link: {wrong}"))),
        }
    }
}

/// Puts the host ends of attachments right.
pub(crate) fn settle_ports(
    attachments: &Attachments,
    handle: &Handle,
    shape: &Shape,
    ports: &[(Link, Mark)],
    master: Option<u32>,
) -> Result<()> {
    for (link, mark) in ports.iter().filter(|(link, _)| !attachments.is_in_flux(link)) {
        WantedLink::host_end(shape, mark, attachments.made_with(link), master).settle(handle, link)?;
    }
    Ok(())
}

/// The attachments whose host ends are in a namespace, after all links of ours there have got the names
/// back that somebody took from them: the mark says which is which, and everything else is found by name.
pub(crate) fn ports_by_name(attachments: &Attachments, handle: &Handle) -> Result<Vec<(Link, Mark)>> {
    let filter = LinkFilter { owned: true, ..LinkFilter::default() };
    let mut links = handle.links(&filter).map_err(internal("list links"))?;
    for link in links.iter_mut().filter(|link| !attachments.is_in_flux(link)) {
        let Some(name) = own_name(link).filter(|name| *name != link.name) else { continue };
        tracing::warn!(link = %link.name, was = %name, "a link was renamed");
        rename(handle, link, &name)?;
        link.name = name;
    }
    let mark = |link: Link| marked(&link).map(|mark| (link, mark));
    Ok(links.into_iter().filter_map(mark).collect())
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

/// The mark of an attachment's host end.
pub(crate) fn marked(link: &Link) -> Option<Mark> {
    link.owner().filter(|_| link.kind == "veth").and_then(Mark::parse)
}

/// The name that a link of ours was given, as its mark says.
fn own_name(link: &Link) -> Option<IfName> {
    if let Some(mark) = marked(link) {
        return Some(host_name(&mark.sandbox, &mark.interface));
    }
    let (whose, network) = link.owner()?.split_once(' ')?;
    let id: u32 = network.parse().ok()?;
    match whose {
        "uplink" => Some(node_end(id)),
        "uplink-end" => Some(router_end()),
        other => topology::masters().find(|name| *name == other).and_then(|name| IfName::new(name).ok()),
    }
}

/// The link with this name; if somebody renamed it, it gets its name back, and with it everything that is on
/// it.
pub(crate) fn find_renamed(handle: &Handle, name: &IfName, owner: &str) -> Result<Option<Link>> {
    let failed = || internal::<knit_kernel::Error>(format!("look for link {name}"));
    let named = handle.link_by_name(name).map_err(failed())?;
    if named.is_some() {
        return Ok(named);
    }
    let filter = LinkFilter { owner: Some(owner), ..LinkFilter::default() };
    let Some(link) = handle.links(&filter).map_err(failed())?.pop() else { return Ok(None) };
    tracing::warn!(link = %link.name, was = %name, "a link was renamed");
    rename(handle, &link, name)?;
    handle.link_by_name(name).map_err(failed())
}

/// Gives a link another name. Kernels before 6.2 rename only what is down.
fn rename(handle: &Handle, link: &Link, name: &IfName) -> Result<()> {
    let change = || Change { rename: Some(name.clone()), ..Change::of(link.index) };
    let renamed = match handle.apply(&[change().into()]) {
        Err(error) if !error.is_not_found() => {
            let up = Change { up: link.up.then_some(true), ..change() };
            handle.apply(&[Change::of(link.index).down().into(), up.into()])
        }
        other => other,
    };
    match renamed {
        Err(error) if error.is_not_found() => Ok(()),
        other => other.map_err(internal(format!("rename link {} to {name} again", link.name))),
    }
}
