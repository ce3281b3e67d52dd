//! Listings, filtered by the kernel where it can.

use super::Handle;
use crate::addr::{Address, RTM_GETADDR};
use crate::error::{Error, Result};
use crate::fdb::FdbEntry;
use crate::link::{
    IFLA_EXT_MASK, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINKINFO, IFLA_MASTER, Link, RTEXT_FILTER_SKIP_STATS,
    RTM_GETLINK,
};
use crate::name::IfName;
use crate::neigh::{Neighbour, RTM_GETNEIGH};
use crate::netlink::attr::Writer;
use crate::netlink::{Batch, Error as NetlinkError, Message};
use crate::qdisc::{self, Qdisc, RTM_GETQDISC, RTM_GETTFILTER, Redirect};
use crate::route::{RTA_TABLE, RTM_GETROUTE, Route};
use crate::rule::{RTM_GETRULE, Rule};

const NDA_IFINDEX: u16 = 8;
const FAMILIES: [u8; 2] = [libc::AF_INET as u8, libc::AF_INET6 as u8];

/// Which links to list; `None` and `false` do not restrict.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinkFilter<'a> {
    /// Of this kind: `veth`, `bridge`, `vxlan`. The kernel filters.
    pub kind: Option<&'a str>,
    /// Ports of this bridge. The kernel filters.
    pub master: Option<u32>,
    /// In this group.
    pub group: Option<u32>,
    /// With an alias that says they are ours.
    pub owned: bool,
    /// With an alias that says they are this owner's.
    pub owner: Option<&'a str>,
}

/// Which routes to list; `None` does not restrict. The kernel filters.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouteFilter {
    /// In this table.
    pub table: Option<u32>,
    /// Made by this protocol; [`crate::owner::PROTOCOL`] is ours.
    pub protocol: Option<u8>,
}

/// Which neighbours to list; `None` does not restrict.
#[derive(Debug, Clone, Copy, Default)]
pub struct NeighbourFilter {
    /// On this link. The kernel filters.
    pub interface: Option<u32>,
    /// Made by this protocol; [`crate::owner::PROTOCOL`] is ours.
    pub protocol: Option<u8>,
}

impl LinkFilter<'_> {
    pub(crate) fn accepts(&self, link: &Link) -> bool {
        self.kind.is_none_or(|kind| link.kind == kind)
            && self.master.is_none_or(|master| link.master == Some(master))
            && self.group.is_none_or(|group| link.group == group)
            && (!self.owned || link.owner().is_some())
            && self.owner.is_none_or(|owner| link.owner() == Some(owner))
    }
}

impl Handle {
    /// The link with this index, or `None`.
    pub fn link(&self, index: u32) -> Result<Option<Link>> {
        self.get_link(index, None)
    }

    /// The link with this name, or `None`.
    pub fn link_by_name(&self, name: &IfName) -> Result<Option<Link>> {
        self.get_link(0, Some(name))
    }

    fn get_link(&self, index: u32, name: Option<&IfName>) -> Result<Option<Link>> {
        let mut batch = Batch::new();
        batch.push(RTM_GETLINK, 0, |writer| {
            link_header(writer, index).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
            if let Some(name) = name {
                writer.string(IFLA_IFNAME, name.as_str());
            }
        });
        let answers = self.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        match answers {
            Ok(replies) => Ok(replies.iter().find_map(|(_, _, payload)| Link::parse_payload(payload))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(source) => Err(self.failed("look for a link", source)),
        }
    }

    /// The links that the filter accepts, in the order of their indexes.
    pub fn links(&self, filter: &LinkFilter<'_>) -> Result<Vec<Link>> {
        let body = |writer: &mut Writer<'_>| {
            link_header(writer, 0).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
            if let Some(master) = filter.master {
                writer.u32(IFLA_MASTER, master);
            }
            if let Some(kind) = filter.kind {
                writer.nested(IFLA_LINKINFO, |writer| _ = writer.string(IFLA_INFO_KIND, kind));
            }
        };
        let mut links = self.list("list links", RTM_GETLINK, body, Link::parse)?;
        links.retain(|link| filter.accepts(link));
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    /// Addresses, of all links or of one.
    pub fn addresses(&self, interface: Option<u32>) -> Result<Vec<Address>> {
        let body = |writer: &mut Writer<'_>| {
            let mut header = [0; 8];
            header[4..8].copy_from_slice(&interface.unwrap_or(0).to_ne_bytes());
            writer.fixed(&header);
        };
        let mut addresses = self.list("list addresses", RTM_GETADDR, body, Address::parse)?;
        addresses.retain(|address| interface.is_none_or(|interface| address.interface == interface));
        Ok(addresses)
    }

    /// Routes of both families.
    pub fn routes(&self, filter: &RouteFilter) -> Result<Vec<Route>> {
        let mut all = Vec::new();
        for family in FAMILIES {
            let body = |writer: &mut Writer<'_>| {
                let mut header = [0; 12];
                (header[0], header[5]) = (family, filter.protocol.unwrap_or(0));
                writer.fixed(&header);
                if let Some(table) = filter.table {
                    writer.u32(RTA_TABLE, table);
                }
            };
            match self.list("list routes", RTM_GETROUTE, body, Route::parse) {
                Ok(routes) => all.extend(routes),
                // A table that has never been used does not exist; a family may be switched off.
                Err(error) if error.is_not_found() || unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
        all.retain(|route: &Route| {
            filter.table.is_none_or(|table| route.table == table)
                && filter.protocol.is_none_or(|protocol| route.protocol == protocol)
        });
        Ok(all)
    }

    /// Policy rules of both families, of everybody or of one protocol ([`crate::owner::PROTOCOL`] is ours).
    pub fn rules(&self, protocol: Option<u8>) -> Result<Vec<Rule>> {
        let mut all = Vec::new();
        for family in FAMILIES {
            let body = |writer: &mut Writer<'_>| {
                let mut header = [0; 12];
                header[0] = family;
                writer.fixed(&header);
            };
            match self.list("list rules", RTM_GETRULE, body, Rule::parse) {
                Ok(rules) => all.extend(rules),
                Err(error) if unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
        all.retain(|rule: &Rule| protocol.is_none_or(|protocol| rule.protocol == protocol));
        Ok(all)
    }

    /// Neighbours of both families.
    pub fn neighbours(&self, filter: &NeighbourFilter) -> Result<Vec<Neighbour>> {
        let mut all = Vec::new();
        for family in FAMILIES {
            let body = |writer: &mut Writer<'_>| {
                let mut header = [0; 12];
                header[0] = family;
                writer.fixed(&header);
                if let Some(interface) = filter.interface {
                    writer.u32(NDA_IFINDEX, interface);
                }
            };
            match self.list("list neighbours", RTM_GETNEIGH, body, Neighbour::parse) {
                Ok(neighbours) => all.extend(neighbours),
                Err(error) if unsupported(&error) => {}
                Err(error) => return Err(error),
            }
        }
        all.retain(|neighbour: &Neighbour| {
            filter.interface.is_none_or(|interface| neighbour.interface == interface)
                && filter.protocol.is_none_or(|protocol| neighbour.protocol == protocol)
        });
        Ok(all)
    }

    /// Forwarding entries of bridges and VXLAN devices, of all links or of one.
    pub fn fdb(&self, interface: Option<u32>) -> Result<Vec<FdbEntry>> {
        let body = |writer: &mut Writer<'_>| {
            let mut header = [0; 12];
            header[0] = libc::AF_BRIDGE as u8;
            header[4..8].copy_from_slice(&interface.unwrap_or(0).to_ne_bytes());
            writer.fixed(&header);
        };
        let mut entries = self.list("list forwarding entries", RTM_GETNEIGH, body, FdbEntry::parse)?;
        entries.retain(|entry| interface.is_none_or(|interface| entry.interface == interface));
        Ok(entries)
    }

    /// Queueing disciplines, of all links or of one. The kernel's own default ones are left out.
    pub fn qdiscs(&self, interface: Option<u32>) -> Result<Vec<Qdisc>> {
        let body = |writer: &mut Writer<'_>| _ = qdisc::header(writer, interface.unwrap_or(0), 0, 0, 0);
        let mut found = self.list("list queues", RTM_GETQDISC, body, Qdisc::parse)?;
        // Kernels answer with all of them, or with those of one link.
        found.retain(|found| interface.is_none_or(|interface| found.interface() == interface));
        Ok(found)
    }

    /// Where packets that arrive on a link are sent instead.
    pub fn redirects(&self, interface: u32) -> Result<Vec<Redirect>> {
        let body = |writer: &mut Writer<'_>| qdisc::list_arriving(writer, interface);
        match self.list("list redirects", RTM_GETTFILTER, body, Redirect::parse) {
            // The link is gone.
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            other => other,
        }
    }

    pub(super) fn list<T>(
        &self,
        attempted: &'static str,
        kind: u16,
        body: impl Fn(&mut Writer<'_>),
        parse: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>> {
        self.dump(kind, body, parse).map_err(|source| self.failed(attempted, source))
    }

    pub(super) fn dump<T>(
        &self,
        kind: u16,
        body: impl Fn(&mut Writer<'_>),
        parse: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        let each = |into: &mut Vec<T>, message: Message<'_>| {
            into.extend(parse(&message));
            Ok::<(), NetlinkError>(())
        };
        self.socket().dump(kind, body, Vec::new, each)
    }
}

pub(super) fn link_header<'a, 'b>(writer: &'a mut Writer<'b>, index: u32) -> &'a mut Writer<'b> {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    writer.fixed(&header)
}

fn unsupported(error: &Error) -> bool {
    let codes = [libc::EOPNOTSUPP, libc::EAFNOSUPPORT];
    matches!(error, Error::Refused { source, .. } if codes.contains(&source.errno.0))
}
