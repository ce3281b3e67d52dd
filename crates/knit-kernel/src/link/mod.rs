//! Links: what there is to say about one, as read from the kernel.
//!
//! Requests are built from netlink-packet-route's message types. Answers are read with
//! [`crate::netlink::attr`] instead: a link carries some sixty attributes of which a dozen matter here, and a
//! listing must not fail because a newer kernel says something about somebody else's link that a parser of
//! everything does not know.

mod bridge;
mod change;
mod ifb;
mod macvlan;
mod new;
mod veth;
mod vxlan;

use std::net::IpAddr;

pub use bridge::{Bridge, PortFlags};
pub use change::{Change, LinkRef};
pub use macvlan::{Macvlan, MacvlanMode};
pub use new::{Kind, NewLink};
pub use veth::Peer;
pub use vxlan::Vxlan;

use crate::name::{IfName, Mac};
use crate::netlink::Message;
use crate::netlink::attr::Attr;
use crate::netlink::attr::Reader;

pub(crate) const RTM_NEWLINK: u16 = 16;
pub(crate) const RTM_DELLINK: u16 = 17;
pub(crate) const RTM_GETLINK: u16 = 18;
pub(crate) const RTNLGRP_LINK: u32 = 1;

pub(crate) const IFLA_ADDRESS: u16 = 1;
pub(crate) const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
pub(crate) const IFLA_MASTER: u16 = 10;
pub(crate) const IFLA_PROTINFO: u16 = 12;
const IFLA_OPERSTATE: u16 = 16;
pub(crate) const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
pub(crate) const IFLA_GROUP: u16 = 27;
pub(crate) const IFLA_EXT_MASK: u16 = 29;
const IFLA_LINK_NETNSID: u16 = 37;
pub(crate) const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
/// Leaves statistics out of answers: half of a link's bytes.
pub(crate) const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;
const IF_OPER_UP: u8 = 6;
const IFF_LOWER_UP: u32 = 1 << 16;

/// A link as the kernel reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its number in its namespace.
    pub index: u32,
    /// The link's name.
    pub name: IfName,
    /// `veth`, `bridge`, `vxlan`...; empty for real devices and `lo`.
    pub kind: String,
    /// Whether it is set up.
    pub up: bool,
    /// Whether it can carry packets: set up, and so is its other end.
    pub running: bool,
    /// Whether there is something at the other end: a cable, a switch. Only where it is set up.
    pub carrier: bool,
    /// Its MAC address, if it has one.
    pub mac: Option<Mac>,
    /// Its MTU.
    pub mtu: u32,
    /// The bridge it is a port of.
    pub master: Option<u32>,
    /// Its group.
    pub group: u32,
    /// Its alias; the owner's mark ([`crate::owner`]) is in there.
    pub alias: Option<String>,
    /// The other end's number (veth), the underlay's (VXLAN) or the parent's (macvlan), in the namespace that
    /// `link_namespace` tells.
    pub link: Option<u32>,
    /// The kernel's number for the namespace of `link`, if that is another one.
    pub link_namespace: Option<i32>,
    /// How IPv6 link-local addresses come about; unknown where IPv6 is off.
    pub addr_gen: Option<AddrGenMode>,
    /// What it has as a bridge's port.
    pub port: Option<PortFlags>,
    /// What only links of its kind have.
    pub details: Details,
}

/// What only links of one kind have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Details {
    /// A bridge.
    Bridge(Bridge),
    /// A VXLAN device.
    Vxlan(Vxlan),
    /// A child of another link.
    Macvlan(MacvlanMode),
    /// Nothing that is of interest here.
    Other,
}

/// How the kernel makes an IPv6 link-local address when a link comes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddrGenMode {
    /// From the MAC address.
    Eui64,
    /// Not at all.
    None,
    /// From a secret.
    StablePrivacy,
    /// At random.
    Random,
}

impl AddrGenMode {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Eui64, Self::None, Self::StablePrivacy, Self::Random].get(usize::from(number)).copied()
    }
}

impl Link {
    /// Reads a link out of a message; `None` if it is no link's, or lacks index or name.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWLINK && message.kind != RTM_DELLINK {
            return None;
        }
        Self::parse_payload(message.payload)
    }

    pub(crate) fn parse_payload(payload: &[u8]) -> Option<Self> {
        let message = Message { kind: RTM_NEWLINK, flags: 0, sequence: 0, port: 0, payload };
        let (header, attrs) = message.split::<16>().ok()?;
        let number =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (index, flags) = (number(4), number(8));
        let mut link = Self {
            index,
            name: IfName::reported(""),
            kind: String::new(),
            up: flags & libc::IFF_UP as u32 != 0,
            running: false,
            carrier: flags & IFF_LOWER_UP != 0,
            mac: None,
            mtu: 0,
            master: None,
            group: 0,
            alias: None,
            link: None,
            link_namespace: None,
            addr_gen: None,
            port: None,
            details: Details::Other,
        };
        for attr in attrs {
            link.take(&attr);
        }
        (index != 0 && !link.name.as_str().is_empty()).then_some(link)
    }

    fn take(&mut self, attr: &Attr<'_>) {
        match attr.kind {
            IFLA_IFNAME => self.name = IfName::reported(&attr.string()),
            IFLA_ADDRESS => self.mac = attr.array().ok().map(Mac),
            IFLA_MTU => self.mtu = attr.u32().unwrap_or(0),
            IFLA_MASTER => self.master = attr.u32().ok().filter(|index| *index != 0),
            IFLA_GROUP => self.group = attr.u32().unwrap_or(0),
            IFLA_IFALIAS => self.alias = Some(attr.string()),
            IFLA_LINK => self.link = attr.u32().ok().filter(|index| *index != 0),
            IFLA_LINK_NETNSID => self.link_namespace = attr.i32().ok(),
            IFLA_OPERSTATE => self.running = attr.u8() == Ok(IF_OPER_UP),
            IFLA_AF_SPEC => self.addr_gen = addr_gen(attr.nested()),
            IFLA_LINKINFO => self.take_info(&attr.nested()),
            _ => {}
        }
    }

    fn take_info(&mut self, info: &Reader<'_>) {
        self.kind = info.get(IFLA_INFO_KIND).map(|kind| kind.string()).unwrap_or_default();
        if let Some(data) = info.get(IFLA_INFO_DATA) {
            self.details = match self.kind.as_str() {
                "bridge" => Details::Bridge(Bridge::parse(data.nested())),
                "vxlan" => Details::Vxlan(Vxlan::parse(data.nested())),
                "macvlan" => MacvlanMode::parse(data.nested()).map_or(Details::Other, Details::Macvlan),
                _ => Details::Other,
            };
        }
        let port_kind = info.get(IFLA_INFO_SLAVE_KIND).map(|kind| kind.string());
        if let (Some("bridge"), Some(data)) = (port_kind.as_deref(), info.get(IFLA_INFO_SLAVE_DATA)) {
            self.port = Some(PortFlags::parse(data.nested()));
        }
    }

    /// Whose it is, if its alias says that it is ours.
    pub fn owner(&self) -> Option<&str> {
        self.alias.as_deref().and_then(crate::owner::of_alias)
    }
}

fn addr_gen(mut families: Reader<'_>) -> Option<AddrGenMode> {
    let inet6 = families.find(|attr| attr.kind == libc::AF_INET6 as u16)?;
    AddrGenMode::from_number(inet6.nested().get(IFLA_INET6_ADDR_GEN_MODE)?.u8().ok()?)
}

/// An address out of an attribute of 4 or 16 bytes.
pub(crate) fn ip(attr: &Attr<'_>) -> Option<IpAddr> {
    match attr.value.len() {
        4 => attr.array::<4>().ok().map(IpAddr::from),
        16 => attr.array::<16>().ok().map(IpAddr::from),
        _ => None,
    }
}
