//! A link to be made.

use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use super::{AddrGenMode, Bridge, Change, Details, Link, Macvlan, Peer, PortFlags, Vxlan, ifb, veth};
use crate::error::{Difference, Error, Result};
use crate::name::{IfName, Mac, Mtu};
use crate::netns::NetNs;
use crate::owner;

/// A link to be made, with everything that it is to have from the beginning.
#[derive(Debug, Clone)]
pub struct NewLink<'a> {
    /// The link's name.
    pub name: IfName,
    /// The kind of link.
    pub kind: Kind<'a>,
    /// Its MAC address; `None` lets the kernel choose. Changing a bridge's later flushes its neighbours: set
    /// it here.
    pub mac: Option<Mac>,
    /// Its MTU; `None` is the kernel's default.
    pub mtu: Option<Mtu>,
    /// Its group; the default is [`owner::GROUP`].
    pub group: u32,
    /// Its alias, which is the owner's mark.
    pub alias: Option<String>,
    /// The bridge that it is to be a port of.
    pub master: Option<u32>,
    /// What it is to do as a port; only with `master`.
    pub port: Option<PortFlags>,
    /// How it gets an IPv6 link-local address when it comes up.
    pub addr_gen: Option<AddrGenMode>,
    /// Whether it is to be set up.
    pub up: bool,
}

/// What a link is.
#[derive(Debug, Clone)]
pub enum Kind<'a> {
    /// One end of a pair.
    Veth(Peer<'a>),
    /// A bridge.
    Bridge(Bridge),
    /// A VXLAN device.
    Vxlan(Vxlan),
    /// A child of another link.
    Macvlan(Macvlan<'a>),
    /// What sends at its own pace what others hand it ([`crate::qdisc::Redirect`]).
    Ifb,
}

impl Kind<'_> {
    /// The kernel's word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Veth(_) => "veth",
            Self::Bridge(_) => "bridge",
            Self::Vxlan(_) => "vxlan",
            Self::Macvlan(_) => "macvlan",
            Self::Ifb => "ifb",
        }
    }
}

impl<'a> NewLink<'a> {
    fn new(name: IfName, kind: Kind<'a>) -> Self {
        Self {
            name,
            kind,
            mac: None,
            mtu: None,
            group: owner::GROUP,
            alias: None,
            master: None,
            port: None,
            addr_gen: None,
            up: false,
        }
    }

    /// A veth pair.
    pub fn veth(name: IfName, peer: Peer<'a>) -> Self {
        Self::new(name, Kind::Veth(peer))
    }

    /// A bridge.
    pub fn bridge(name: IfName, bridge: Bridge) -> Self {
        Self::new(name, Kind::Bridge(bridge))
    }

    /// A VXLAN device.
    pub fn vxlan(name: IfName, vxlan: Vxlan) -> Self {
        Self::new(name, Kind::Vxlan(vxlan))
    }

    /// A child of another link.
    pub fn macvlan(name: IfName, macvlan: Macvlan<'a>) -> Self {
        Self::new(name, Kind::Macvlan(macvlan))
    }

    /// What sends at its own pace what others hand it.
    pub fn ifb(name: IfName) -> Self {
        Self::new(name, Kind::Ifb)
    }

    /// The namespace that it is made in, where that is not the handle's.
    pub(crate) fn elsewhere(&self) -> Option<&'a NetNs> {
        match &self.kind {
            Kind::Macvlan(macvlan) => macvlan.namespace,
            _ => None,
        }
    }

    /// In words, for errors and plans.
    pub fn describe(&self) -> String {
        format!("{} {}", self.kind.name(), self.name)
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        let object = self.describe();
        check_alias(&object, self.alias.as_deref())?;
        check_mac(&object, self.mac)?;
        if self.port.is_some() && self.master.is_none() {
            return Err(Error::invalid(
                object,
                "port flags without a bridge",
                "set `master` to the bridge's index",
            ));
        }
        match &self.kind {
            Kind::Veth(peer) if peer.namespace.is_none() && peer.name == self.name => {
                Err(Error::invalid(object, "both ends have one name in one namespace", "rename one of them"))
            }
            Kind::Veth(peer) => check_mac(&format!("{object}'s peer {}", peer.name), peer.mac),
            Kind::Vxlan(vxlan) => vxlan.validate(&object),
            Kind::Macvlan(_) if self.elsewhere().is_some() && (self.needs_change() || self.up) => {
                let problem = "alias, address generation mode or state for a link in another namespace";
                Err(Error::invalid(object, problem, "set them from inside that namespace"))
            }
            Kind::Bridge(_) | Kind::Macvlan(_) | Kind::Ifb => Ok(()),
        }
    }

    /// Whether something remains to be said after the message that makes it. The kernel ignores alias, port
    /// flags and address generation mode in that message, and IPv6 must know the latter before the link is
    /// up.
    pub(crate) fn needs_change(&self) -> bool {
        self.alias.is_some() || self.port.is_some() || self.addr_gen.is_some()
    }

    /// What remains to be said, once the index is known.
    pub(crate) fn change(&self, index: u32) -> Change<'static> {
        Change {
            alias: self.alias.clone(),
            port: self.port,
            addr_gen: self.addr_gen,
            up: self.up.then_some(true),
            ..Change::of(index)
        }
    }

    pub(crate) fn message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        if self.up && !self.needs_change() {
            message.header.flags = LinkFlags::Up;
            message.header.change_mask = LinkFlags::Up;
        }
        let attributes = &mut message.attributes;
        attributes.push(LinkAttribute::IfName(self.name.to_string()));
        attributes.push(LinkAttribute::Group(self.group));
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        attributes.extend(self.mtu.map(|mtu| LinkAttribute::Mtu(mtu.get())));
        attributes.extend(self.master.map(LinkAttribute::Controller));
        let (kind, data) = match &self.kind {
            Kind::Veth(peer) => {
                attributes.extend(veth::ONE_QUEUE);
                (InfoKind::Veth, Some(peer.data()))
            }
            Kind::Bridge(bridge) => (InfoKind::Bridge, Some(bridge.data())),
            Kind::Vxlan(vxlan) => (InfoKind::Vxlan, Some(vxlan.data())),
            Kind::Macvlan(macvlan) => {
                attributes.push(LinkAttribute::Link(macvlan.parent));
                let elsewhere = macvlan.namespace.map(|namespace| namespace.as_fd().as_raw_fd());
                attributes.extend(elsewhere.map(LinkAttribute::NetNsFd));
                (InfoKind::MacVlan, Some(macvlan.data()))
            }
            Kind::Ifb => {
                attributes.extend(ifb::ONE_QUEUE);
                (InfoKind::Ifb, None)
            }
        };
        let info = std::iter::once(LinkInfo::Kind(kind)).chain(data.map(LinkInfo::Data));
        attributes.push(LinkAttribute::LinkInfo(info.collect()));
        message
    }

    /// How an existing link differs from this one. What is left to the kernel here is not compared.
    pub(crate) fn differences(&self, found: &Link) -> Vec<Difference> {
        let mut differences = Vec::new();
        let into = &mut differences;
        Difference::check(into, "kind", &self.kind.name(), &found.kind.as_str());
        match (&self.kind, &found.details) {
            (Kind::Bridge(wanted), Details::Bridge(found)) => wanted.compare(found, into),
            (Kind::Vxlan(wanted), Details::Vxlan(found)) => wanted.compare(found, into),
            (Kind::Macvlan(wanted), Details::Macvlan(found)) => wanted.compare(*found, into),
            _ => {}
        }
        if self.mac.is_some() {
            Difference::check(into, "mac", &self.mac, &found.mac);
        }
        if let Some(mtu) = self.mtu {
            Difference::check(into, "mtu", &mtu.get(), &found.mtu);
        }
        Difference::check(into, "group", &self.group, &found.group);
        if self.alias.is_some() {
            Difference::check(into, "alias", &self.alias, &found.alias);
        }
        Difference::check(into, "master", &self.master, &found.master);
        if self.port.is_some() {
            Difference::check(into, "port", &self.port, &found.port);
        }
        if let (Some(wanted), Some(found)) = (self.addr_gen, found.addr_gen) {
            Difference::check(into, "addr_gen", &wanted, &found);
        }
        differences
    }
}

pub(super) fn check_alias(object: &str, alias: Option<&str>) -> Result<()> {
    match alias {
        Some(alias) if alias.len() > owner::ALIAS_MAX => {
            let problem = format!("the alias has {} bytes, {} is the most", alias.len(), owner::ALIAS_MAX);
            Err(Error::invalid(object, problem, "shorten what names its owner"))
        }
        Some(alias) if alias.contains('\0') => {
            Err(Error::invalid(object, "the alias contains a NUL", "use printable text"))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_mac(object: &str, mac: Option<Mac>) -> Result<()> {
    match mac {
        Some(mac) if !mac.is_unicast() => {
            let problem = format!("{mac} is not a unicast MAC address");
            Err(Error::invalid(object, problem, "the first byte must be even, and not all bytes zero"))
        }
        _ => Ok(()),
    }
}
