//! Permanent neighbours: which MAC address an IP address of a link's segment has, without asking.

use std::fmt;
use std::net::IpAddr;

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::RouteProtocol;

use crate::addr::family;
use crate::error::{Difference, Error, Result};
use crate::link::ip;
use crate::name::Mac;
use crate::netlink::Message;
use crate::owner;

pub(crate) const RTM_NEWNEIGH: u16 = 28;
pub(crate) const RTM_DELNEIGH: u16 = 29;
pub(crate) const RTM_GETNEIGH: u16 = 30;

pub(crate) const NDA_DST: u16 = 1;
pub(crate) const NDA_LLADDR: u16 = 2;
const NDA_PROTOCOL: u16 = 12;
const NUD_PERMANENT: u16 = 0x80;

/// A neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neighbour {
    /// The link's index.
    pub interface: u32,
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// Its MAC address; `None` while the kernel does not know it (only when read).
    pub mac: Option<Mac>,
    /// Whether it stays until it is deleted. The kernel forgets others.
    pub permanent: bool,
    /// Who made it; [`owner::PROTOCOL`] is ours, 0 the kernel's.
    pub protocol: u8,
}

impl Neighbour {
    /// A permanent neighbour, marked as ours.
    pub fn permanent(interface: u32, address: IpAddr, mac: Mac) -> Self {
        Self { interface, address, mac: Some(mac), permanent: true, protocol: owner::PROTOCOL }
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        match self.mac {
            Some(mac) if !mac.is_unicast() => {
                let problem = format!("{mac} is not a unicast MAC address");
                Err(Error::invalid(self, problem, "use the neighbor's own MAC address"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn message(&self) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.family = family(self.address);
        message.header.ifindex = self.interface;
        message.header.state =
            if self.permanent { NeighbourState::Permanent } else { NeighbourState::Reachable };
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::from(self.address)));
        message.attributes.extend(self.mac.map(|mac| NeighbourAttribute::LinkLayerAddress(mac.0.to_vec())));
        message.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::from(self.protocol)));
        message
    }

    /// Reads a neighbour out of a message; `None` if it is something else or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWNEIGH && message.kind != RTM_DELNEIGH {
            return None;
        }
        let ([family, _, _, _, a, b, c, d, e, g, _, _], attrs) = message.split::<12>().ok()?;
        if ![libc::AF_INET, libc::AF_INET6].contains(&i32::from(family)) {
            return None;
        }
        let (mut address, mut mac, mut protocol) = (None, None, 0);
        for attr in attrs {
            match attr.kind {
                NDA_DST => address = ip(&attr),
                NDA_LLADDR => mac = attr.array().ok().map(Mac),
                NDA_PROTOCOL => protocol = attr.u8().unwrap_or(0),
                _ => {}
            }
        }
        Some(Self {
            interface: u32::from_ne_bytes([a, b, c, d]),
            address: address?,
            mac,
            permanent: u16::from_ne_bytes([e, g]) & NUD_PERMANENT != 0,
            protocol,
        })
    }

    pub(crate) fn same_key(&self, other: &Self) -> bool {
        self.interface == other.interface && self.address == other.address
    }

    pub(crate) fn differences(&self, found: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        Difference::check(&mut differences, "mac", &self.mac, &found.mac);
        Difference::check(&mut differences, "permanent", &self.permanent, &found.permanent);
        Difference::check(&mut differences, "protocol", &self.protocol, &found.protocol);
        differences
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "neighbor {} on link {}", self.address, self.interface)
    }
}
