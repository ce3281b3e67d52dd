//! What is known of our links while listening: whether a notification says that one of them has changed.

use std::collections::HashMap;

use crate::handle::{Handle, LinkFilter};
use crate::link::{IFLA_PROTINFO, Link, PortFlags, RTM_DELLINK};
use crate::name::Mac;
use crate::netlink::{Error, Message, Result};
use crate::netns::NetNs;

/// What we set of a link. Whether its other end is up is not in it: that is for whoever has the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Set {
    name: String,
    up: bool,
    mtu: u32,
    mac: Option<Mac>,
    master: Option<u32>,
    group: u32,
    alias: Option<String>,
    port: Option<PortFlags>,
}

/// The links of a namespace that carry our mark.
#[derive(Debug, Default)]
pub(super) struct Links(HashMap<u32, Set>);

impl Links {
    /// Those that are there.
    pub fn of(namespace: &NetNs) -> Result<Self> {
        let list = || Handle::open(namespace)?.links(&LinkFilter { owned: true, ..LinkFilter::default() });
        let listed = list().map_err(|error| Error::Receive(std::io::Error::other(error)))?;
        Ok(Self(listed.into_iter().map(|link| (link.index, Set::of(link))).collect()))
    }

    /// Whether a link is ours.
    pub fn is_ours(&self, index: u32) -> bool {
        self.0.contains_key(&index)
    }

    /// Takes a link's message in: whether a link that was ours before is gone or is not what it was.
    pub fn take(&mut self, message: &Message<'_>) -> bool {
        let Some(link) = Link::parse(message) else { return false };
        let of_bridge = message.payload.first().is_some_and(|family| i32::from(*family) == libc::AF_BRIDGE);
        if of_bridge {
            // A bridge tells of its ports in its own words, and of little else.
            return self.take_port(&link, message);
        }
        if message.kind == RTM_DELLINK {
            return self.0.remove(&link.index).is_some();
        }
        let ours = link.owner().is_some();
        match self.0.get_mut(&link.index) {
            Some(known) => {
                let new = Set::of(link);
                let changed = *known != new;
                *known = new;
                changed
            }
            None if ours => {
                self.0.insert(link.index, Set::of(link));
                false
            }
            None => false,
        }
    }

    fn take_port(&mut self, link: &Link, message: &Message<'_>) -> bool {
        let Some(known) = self.0.get_mut(&link.index) else { return false };
        if message.kind == RTM_DELLINK {
            // It is no longer a port; its master is in the link's own message.
            return false;
        }
        let flags = message.split::<16>().ok().and_then(|(_, attrs)| attrs.get(IFLA_PROTINFO));
        let Some(flags) = flags.map(|attr| PortFlags::parse(attr.nested())) else { return false };
        let changed = known.port.is_some_and(|before| before != flags);
        known.port = Some(flags);
        changed
    }
}

impl Set {
    fn of(link: Link) -> Self {
        let Link { name, up, mtu, mac, master, group, alias, port, .. } = link;
        Self { name: name.to_string(), up, mtu, mac, master, group, alias, port }
    }
}
