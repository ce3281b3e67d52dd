//! A change to a link that exists.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoPortData, InfoPortKind, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};

use super::new::{check_alias, check_mac};
use super::{AddrGenMode, PortFlags};
use crate::error::{Error, Result};
use crate::name::{IfName, Mac, Mtu};
use crate::netns::NetNs;

/// Which link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkRef {
    /// By number: never another one by mistake, unless it was replaced.
    Index(u32),
    /// By name.
    Name(IfName),
}

/// What is to become different about a link; `None` leaves as it is.
#[derive(Debug, Clone)]
pub struct Change<'a> {
    /// Which link.
    pub link: LinkRef,
    /// A new name.
    pub rename: Option<IfName>,
    /// The alias; empty takes it away.
    pub alias: Option<String>,
    /// The group.
    pub group: Option<u32>,
    /// The MAC address.
    pub mac: Option<Mac>,
    /// The MTU.
    pub mtu: Option<Mtu>,
    /// The bridge to be a port of; `Some(None)` for none.
    pub master: Option<Option<u32>>,
    /// What it does as a port.
    pub port: Option<PortFlags>,
    /// How it gets an IPv6 link-local address when it comes up.
    pub addr_gen: Option<AddrGenMode>,
    /// Up or down.
    pub up: Option<bool>,
    /// The namespace to be moved to. The kernel sets a link down that moves; further changes must be made
    /// there.
    pub namespace: Option<&'a NetNs>,
}

impl<'a> Change<'a> {
    /// No change yet, to the link with this index.
    pub fn of(index: u32) -> Self {
        Self::to(LinkRef::Index(index))
    }

    /// No change yet, to the link with this name.
    pub fn named(name: IfName) -> Self {
        Self::to(LinkRef::Name(name))
    }

    fn to(link: LinkRef) -> Self {
        Self {
            link,
            rename: None,
            alias: None,
            group: None,
            mac: None,
            mtu: None,
            master: None,
            port: None,
            addr_gen: None,
            up: None,
            namespace: None,
        }
    }

    /// Set up.
    pub fn up(self) -> Self {
        Self { up: Some(true), ..self }
    }

    /// Set down.
    pub fn down(self) -> Self {
        Self { up: Some(false), ..self }
    }

    /// Move to `namespace`, with a new name there if one is given.
    pub fn move_to(self, namespace: &'a NetNs, name: Option<IfName>) -> Self {
        Self { namespace: Some(namespace), rename: name, ..self }
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        let object = self.link.to_string();
        if self.rename.is_some() && matches!(self.link, LinkRef::Name(_)) {
            // A message has one place for a name, and it would be taken for the one to find the link by.
            return Err(Error::invalid(object, "renamed by name", "look its index up and rename it by that"));
        }
        check_alias(&object, self.alias.as_deref())?;
        check_mac(&object, self.mac)
    }

    /// The messages, in an order that the kernel gets right: port flags need the bridge, and coming up needs
    /// everything else. Moving goes last, because the link is not to be found afterwards.
    pub(crate) fn messages(&self) -> Vec<LinkMessage> {
        let mut messages = Vec::with_capacity(3);
        let mut properties = self.message();
        let attributes = &mut properties.attributes;
        attributes.extend(self.alias.clone().map(LinkAttribute::IfAlias));
        attributes.extend(self.group.map(LinkAttribute::Group));
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        attributes.extend(self.mtu.map(|mtu| LinkAttribute::Mtu(mtu.get())));
        attributes.extend(self.master.map(|master| LinkAttribute::Controller(master.unwrap_or(0))));
        attributes.extend(self.addr_gen.map(|mode| {
            let mode = match mode {
                AddrGenMode::Eui64 => In6AddrGenMode::Eui64,
                AddrGenMode::None => In6AddrGenMode::None,
                AddrGenMode::StablePrivacy => In6AddrGenMode::StablePrivacy,
                AddrGenMode::Random => In6AddrGenMode::Random,
            };
            LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(mode)])])
        }));
        if properties.attributes.len() > self.message().attributes.len() {
            messages.push(properties);
        }
        if let Some(port) = self.port {
            let mut message = self.message();
            message.attributes.push(LinkAttribute::LinkInfo(vec![
                LinkInfo::PortKind(InfoPortKind::Bridge),
                LinkInfo::PortData(InfoPortData::BridgePort(port.data())),
            ]));
            messages.push(message);
        }
        if let (Some(name), None) = (&self.rename, self.namespace) {
            // Kernels before 6.2 refuse it for a link that is up; so it comes before that.
            let mut message = self.message();
            message.attributes.push(LinkAttribute::IfName(name.to_string()));
            messages.push(message);
        }
        if let Some(up) = self.up {
            let mut message = self.message();
            message.header.change_mask = LinkFlags::Up;
            message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
            messages.push(message);
        }
        if let Some(namespace) = self.namespace {
            let mut message = self.message();
            message
                .attributes
                .extend(self.rename.as_ref().map(|name| LinkAttribute::IfName(name.to_string())));
            message.attributes.push(LinkAttribute::NetNsFd(namespace.as_fd().as_raw_fd()));
            messages.push(message);
        }
        messages
    }

    fn message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.interface_family = AddressFamily::Unspec;
        match &self.link {
            LinkRef::Index(index) => message.header.index = *index,
            LinkRef::Name(name) => message.attributes.push(LinkAttribute::IfName(name.to_string())),
        }
        message
    }
}

impl fmt::Display for LinkRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "link {index}"),
            Self::Name(name) => write!(f, "link {name}"),
        }
    }
}

impl fmt::Display for Change<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        words.extend(self.rename.as_ref().map(|name| format!("rename to {name}")));
        words.extend(self.namespace.map(|namespace| format!("move to {namespace}")));
        words.extend(self.alias.as_ref().map(|alias| format!("alias {alias:?}")));
        words.extend(self.group.map(|group| format!("group {group}")));
        words.extend(self.mac.map(|mac| format!("address {mac}")));
        words.extend(self.mtu.map(|mtu| format!("mtu {mtu}")));
        words.extend(self.master.map(|master| match master {
            Some(master) => format!("port of link {master}"),
            None => "port of no bridge".into(),
        }));
        words.extend(self.port.map(|_| "port flags".into()));
        words.extend(self.addr_gen.map(|mode| format!("addrgenmode {mode:?}")));
        words.extend(self.up.map(|up| if up { "up".into() } else { "down".into() }));
        write!(f, "change {}: {}", self.link, words.join(", "))
    }
}
