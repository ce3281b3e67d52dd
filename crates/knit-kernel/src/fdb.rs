//! Forwarding entries: where a bridge or a VXLAN device sends frames for a MAC address.
//!
//! A remote pod needs two: one of the VXLAN device itself, which names the other node, and one of the bridge,
//! which names the VXLAN device's port.

use std::fmt;
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};

use crate::error::{Difference, Error, Result};
use crate::link::ip;
use crate::name::Mac;
use crate::neigh::{NDA_DST, NDA_LLADDR, RTM_DELNEIGH, RTM_NEWNEIGH};
use crate::netlink::Message;

const NTF_SELF: u8 = 2;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
const NTF_MASTER: u8 = 4;
const NDA_MASTER: u16 = 9;

/// A forwarding entry that is not learned but written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FdbEntry {
    /// The port's or the VXLAN device's index.
    pub interface: u32,
    /// Frames to this address. [`Mac::ZERO`] on a VXLAN device: to every one that has no entry, and there may
    /// be several of those.
    pub mac: Mac,
    /// In whose table, and where to.
    pub place: FdbPlace,
    /// Read only: it was learned from traffic, not written.
    pub learned: bool,
}

/// In whose table an entry is, and where it sends frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FdbPlace {
    /// In the VXLAN device's own: to the node with this address.
    Remote(IpAddr),
    /// In the table of the bridge that the link is a port of: out of this port.
    Bridge,
    /// In the bridge's, as an address of the bridge or port itself: taken in by this machine.
    Local,
}

impl FdbEntry {
    /// A VXLAN device's entry: `mac` is at the node `remote`.
    pub fn remote(interface: u32, mac: Mac, remote: IpAddr) -> Self {
        Self { interface, mac, place: FdbPlace::Remote(remote), learned: false }
    }

    /// A bridge's entry: `mac` is behind this port.
    pub fn port(interface: u32, mac: Mac) -> Self {
        Self { interface, mac, place: FdbPlace::Bridge, learned: false }
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        let any = matches!(self.place, FdbPlace::Remote(_)) && self.mac == Mac::ZERO;
        if self.mac.is_unicast() || any {
            return Ok(());
        }
        let problem = format!("{} is not a unicast MAC address", self.mac);
        Err(Error::invalid(self, problem, "the first byte must be even, and not all bytes zero"))
    }

    /// Several entries may exist for one address; adding another must not replace the first.
    pub(crate) fn appends(&self) -> bool {
        self.mac == Mac::ZERO
    }

    pub(crate) fn message(&self) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        let header = &mut message.header;
        header.family = AddressFamily::Bridge;
        header.ifindex = self.interface;
        (header.flags, header.state) = match self.place {
            FdbPlace::Remote(_) => (NeighbourFlags::Own, NeighbourState::Other(NUD_NOARP | NUD_PERMANENT)),
            FdbPlace::Bridge => (NeighbourFlags::Controller, NeighbourState::Noarp),
            FdbPlace::Local => (NeighbourFlags::Controller, NeighbourState::Permanent),
        };
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(self.mac.0.to_vec()));
        if let FdbPlace::Remote(remote) = self.place {
            message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::from(remote)));
        }
        message
    }

    /// Reads an entry out of a message; `None` if it is something else, damaged, or a kind of entry that has
    /// no place here (a device's own multicast list).
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWNEIGH && message.kind != RTM_DELNEIGH {
            return None;
        }
        let ([family, _, _, _, a, b, c, d, e, g, flags, _], attrs) = message.split::<12>().ok()?;
        if i32::from(family) != libc::AF_BRIDGE {
            return None;
        }
        let (mut mac, mut remote, mut master) = (None, None, false);
        for attr in attrs {
            match attr.kind {
                NDA_DST => remote = ip(&attr),
                NDA_LLADDR => mac = attr.array().ok().map(Mac),
                NDA_MASTER => master = true,
                _ => {}
            }
        }
        let state = u16::from_ne_bytes([e, g]);
        let place = match remote {
            Some(remote) => FdbPlace::Remote(remote),
            None if state & NUD_PERMANENT != 0 && (master || flags & NTF_MASTER != 0) => FdbPlace::Local,
            None if master || flags & NTF_MASTER != 0 => FdbPlace::Bridge,
            None if flags & NTF_SELF != 0 => return None,
            None => FdbPlace::Bridge,
        };
        Some(Self {
            interface: u32::from_ne_bytes([a, b, c, d]),
            mac: mac?,
            place,
            learned: state & (NUD_NOARP | NUD_PERMANENT) == 0,
        })
    }

    pub(crate) fn same_key(&self, other: &Self) -> bool {
        let remote = |entry: &Self| matches!(entry.place, FdbPlace::Remote(_));
        self.mac == other.mac
            && remote(self) == remote(other)
            && (!remote(self) || self.interface == other.interface)
    }

    pub(crate) fn differences(&self, found: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        Difference::check(&mut differences, "interface", &self.interface, &found.interface);
        Difference::check(&mut differences, "place", &self.place, &found.place);
        differences
    }
}

impl fmt::Display for FdbEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "forwarding entry {} on link {}", self.mac, self.interface)?;
        match self.place {
            FdbPlace::Remote(remote) => write!(f, " to node {remote}"),
            FdbPlace::Bridge => f.write_str(" of its bridge"),
            FdbPlace::Local => f.write_str(" of its bridge, local"),
        }
    }
}
