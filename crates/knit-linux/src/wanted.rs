//! What is wanted in one namespace besides links and rules: addresses, routes, neighbours, forwarding
//! entries.
//!
//! Entries name their link; what is there is read into the same form, and the two are compared as sets. So
//! the plan is data that can be printed and tested without a kernel.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::Mac;
use knit_kernel::addr::Address;
use knit_kernel::fdb::{FdbEntry, FdbPlace};
use knit_kernel::handle::{NeighbourFilter, RouteFilter};
use knit_kernel::links::Links as LinkSeam;
use knit_kernel::neigh::Neighbour;
use knit_kernel::op::Object;
use knit_kernel::route::{Route, RouteAction};
use knit_kernel::{Handle, Op, owner};

/// Something on a link.
#[derive(Clone, Debug, Eq, PartialEq, Ord, PartialOrd)]
pub(crate) enum Entry {
    /// An address of the link.
    Address {
        /// The link.
        link: String,
        /// The address with its prefix.
        net: IpNet,
    },
    /// A route out of the link.
    Route {
        /// Where to.
        to: IpNet,
        /// The next hop, taken to be on the link.
        via: Option<IpAddr>,
        /// The link.
        link: String,
        /// The source of what the namespace itself sends.
        source: Option<IpAddr>,
    },
    /// A neighbour that is not asked for.
    Neighbour {
        /// The link.
        link: String,
        /// Its address.
        address: IpAddr,
        /// Its MAC.
        mac: Mac,
    },
    /// A VXLAN device's entry: this MAC is at that node.
    Remote {
        /// The device.
        link: String,
        /// The MAC.
        mac: Mac,
        /// The node.
        node: IpAddr,
    },
    /// A bridge's entry: this MAC is behind that port.
    Port {
        /// The port.
        link: String,
        /// The MAC.
        mac: Mac,
    },
}

/// Names and numbers of the links that entries are about.
pub(crate) type Links = BTreeMap<String, u32>;

/// What is different: first to be put, then to be taken away.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct Difference {
    /// Missing, or other than wanted.
    pub put: Vec<Entry>,
    /// There, and wanted no more.
    pub take: Vec<Entry>,
}

impl Entry {
    /// What the kernel calls it; none if its link is not there.
    pub fn object(&self, links: &Links) -> Option<Object> {
        let index = |link: &String| links.get(link).copied();
        Some(match self {
            Self::Address { link, net } => Address::new(index(link)?, *net).into(),
            Self::Route { to, via, link, source } => {
                let mut route = Route::to(*to).dev(index(link)?);
                (route.gateway, route.onlink, route.source) = (*via, via.is_some(), *source);
                route.into()
            }
            Self::Neighbour { link, address, mac } => {
                Neighbour::permanent(index(link)?, *address, *mac).into()
            }
            Self::Remote { link, mac, node } => FdbEntry::remote(index(link)?, *mac, *node).into(),
            Self::Port { link, mac } => FdbEntry::port(index(link)?, *mac).into(),
        })
    }

    /// The link that it is on.
    pub fn link(&self) -> &str {
        match self {
            Self::Address { link, .. }
            | Self::Route { link, .. }
            | Self::Neighbour { link, .. }
            | Self::Remote { link, .. }
            | Self::Port { link, .. } => link,
        }
    }

    /// What there can be only one of: putting another one takes its place.
    fn key(&self) -> (u8, String, String) {
        match self {
            Self::Address { link, net } => (0, link.clone(), net.to_string()),
            Self::Route { to, .. } => (1, String::new(), to.to_string()),
            Self::Neighbour { link, address, .. } => (2, link.clone(), address.to_string()),
            Self::Remote { link, mac, .. } => (3, link.clone(), mac.to_string()),
            Self::Port { mac, .. } => (4, String::new(), mac.to_string()),
        }
    }
}

impl Difference {
    /// Between what is wanted and what is there.
    pub fn between(wanted: &BTreeSet<Entry>, found: &BTreeSet<Entry>) -> Self {
        let put: Vec<Entry> = wanted.difference(found).cloned().collect();
        let replaced: BTreeSet<_> = put.iter().map(Entry::key).collect();
        let take =
            found.difference(wanted).filter(|entry| !replaced.contains(&entry.key())).cloned().collect();
        Self { put, take }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.put.is_empty() && self.take.is_empty()
    }

    /// Makes it so. What is to be taken and is gone already is fine. A route that somebody else made to the
    /// same place stays, behind ours: it counts again when ours is gone.
    pub fn apply(&self, handle: &Handle, links: &Links) -> knit_kernel::Result<()> {
        let put: Vec<Object> = self.put.iter().filter_map(|e| e.object(links)).collect();
        let mut others = Vec::new();
        if put.iter().any(|object| matches!(object, Object::Route(route) if is_v4(route))) {
            others = handle.routes(&RouteFilter { table: Some(Route::MAIN), ..RouteFilter::default() })?;
        }
        let mut ops = Vec::with_capacity(put.len());
        for object in put {
            match object {
                Object::Route(route) if is_v4(&route) => {
                    let here = |other: &&Route| other.destination == route.destination && !has_metric(other);
                    let (ours, theirs): (Vec<&Route>, Vec<&Route>) =
                        others.iter().filter(here).partition(|other| other.protocol == owner::PROTOCOL);
                    if theirs.is_empty() {
                        ops.push(Op::replace(route));
                    } else {
                        ops.extend(ours.into_iter().copied().map(Op::delete));
                        ops.push(Op::Prefer(route));
                    }
                }
                object => ops.push(Op::Replace(object)),
            }
        }
        handle.apply(&ops)?;
        take(handle, links, &self.take)
    }
}

/// The kernel keeps routes of one metric to one place in order for IPv4 only; for IPv6 they would share the
/// traffic.
fn is_v4(route: &Route) -> bool {
    route.destination.addr().is_ipv4()
}

/// One with a metric stands behind ours anyway.
fn has_metric(route: &Route) -> bool {
    route.metric.is_some_and(|metric| metric != 0)
}

/// Puts entries that are new.
pub(crate) fn put(handle: &dyn LinkSeam, links: &Links, entries: &[Entry]) -> knit_kernel::Result<()> {
    let ops: Vec<Op<'_>> = entries.iter().filter_map(|e| e.object(links)).map(Op::Replace).collect();
    handle.apply(&ops)
}

/// Takes entries away; those that are gone already are fine.
pub(crate) fn take(handle: &dyn LinkSeam, links: &Links, entries: &[Entry]) -> knit_kernel::Result<()> {
    let ops: Vec<Op<'_>> = entries.iter().filter_map(|e| e.object(links)).map(Op::Delete).collect();
    match handle.apply(&ops) {
        Err(knit_kernel::Error::Refused { failures, .. })
            if failures.iter().all(|failure| failure.refusal.is_not_found()) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// All of one namespace that entries can be made of, read once.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
    forwarding: Vec<FdbEntry>,
}

impl Reading {
    /// Of the namespace of this handle.
    pub fn of(handle: &Handle) -> knit_kernel::Result<Self> {
        Ok(Self {
            addresses: handle.addresses(None)?,
            routes: routes(handle)?,
            neighbours: neighbours(handle)?,
            forwarding: handle.fdb(None)?,
        })
    }

    /// The addresses of a link.
    pub fn addresses(&self, interface: u32) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter(move |a| a.interface == interface).map(|a| a.address.addr())
    }

    /// What is there on these links and is ours.
    pub fn found(&self, links: &Links) -> BTreeSet<Entry> {
        marked(links, &self.routes, &self.neighbours)
    }

    /// What is there on links that are ours altogether.
    pub fn found_on_own(&self, links: &Links) -> BTreeSet<Entry> {
        unmarked(links, &self.addresses, &self.forwarding)
    }
}

/// What is there on these links and is ours.
pub(crate) fn found(handle: &Handle, links: &Links) -> knit_kernel::Result<BTreeSet<Entry>> {
    Ok(marked(links, &routes(handle)?, &neighbours(handle)?))
}

/// What is there on links that are ours altogether: addresses and forwarding entries, which have no mark.
pub(crate) fn found_on_own(handle: &Handle, links: &Links) -> knit_kernel::Result<BTreeSet<Entry>> {
    Ok(unmarked(links, &handle.addresses(None)?, &handle.fdb(None)?))
}

fn routes(handle: &Handle) -> knit_kernel::Result<Vec<Route>> {
    handle.routes(&RouteFilter { table: Some(Route::MAIN), protocol: Some(owner::PROTOCOL) })
}

fn neighbours(handle: &Handle) -> knit_kernel::Result<Vec<Neighbour>> {
    handle.neighbours(&NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() })
}

/// The links' names by their numbers.
fn names(links: &Links) -> HashMap<u32, &String> {
    links.iter().map(|(name, index)| (*index, name)).collect()
}

fn marked(links: &Links, routes: &[Route], neighbours: &[Neighbour]) -> BTreeSet<Entry> {
    let names = names(links);
    let name = |index: u32| names.get(&index).map(|name| (*name).clone());
    let mut entries = BTreeSet::new();
    for route in routes {
        let Some(link) = route.interface.and_then(name) else { continue };
        if route.action == RouteAction::Unicast {
            let Route { destination: to, gateway: via, source, .. } = *route;
            entries.insert(Entry::Route { to, via, link, source });
        }
    }
    for neighbour in neighbours {
        let (Some(link), Some(mac)) = (name(neighbour.interface), neighbour.mac) else { continue };
        entries.insert(Entry::Neighbour { link, address: neighbour.address, mac: Mac(mac.0) });
    }
    entries
}

fn unmarked(links: &Links, addresses: &[Address], forwarding: &[FdbEntry]) -> BTreeSet<Entry> {
    let names = names(links);
    let mut entries = BTreeSet::new();
    for address in addresses {
        let kernels = address.address.addr().is_loopback();
        if let Some(link) = names.get(&address.interface).filter(|_| !kernels) {
            entries.insert(Entry::Address { link: (*link).clone(), net: address.address });
        }
    }
    for entry in forwarding.iter().filter(|entry| !entry.learned) {
        let Some(link) = names.get(&entry.interface) else { continue };
        let (link, mac) = ((*link).clone(), Mac(entry.mac.0));
        match entry.place {
            FdbPlace::Remote(node) => entries.insert(Entry::Remote { link, mac, node }),
            FdbPlace::Bridge => entries.insert(Entry::Port { link, mac }),
            FdbPlace::Local => false,
        };
    }
    entries
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { link, net } => write!(f, "{link}: address {net}"),
            Self::Route { to, via, link, source } => {
                write!(f, "{link}: route to {to}")?;
                via.map_or(Ok(()), |via| write!(f, " via {via}"))?;
                source.map_or(Ok(()), |source| write!(f, " from {source}"))
            }
            Self::Neighbour { link, address, mac } => write!(f, "{link}: neighbor {address} is {mac}"),
            Self::Remote { link, mac, node } => write!(f, "{link}: {mac} is at {node}"),
            Self::Port { link, mac } => write!(f, "{link}: {mac} is behind this port"),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.put {
            writeln!(f, "+ {entry}")?;
        }
        for entry in &self.take {
            writeln!(f, "- {entry}")?;
        }
        Ok(())
    }
}
