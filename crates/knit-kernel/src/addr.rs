//! Addresses of links.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};

use crate::error::Difference;
use crate::link::ip;
use crate::netlink::Message;

pub(crate) const RTM_NEWADDR: u16 = 20;
pub(crate) const RTM_DELADDR: u16 = 21;
pub(crate) const RTM_GETADDR: u16 = 22;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 0x02;
const IFA_F_DADFAILED: u32 = 0x08;
const IFA_F_TENTATIVE: u32 = 0x40;
const IFA_F_NOPREFIXROUTE: u32 = 0x200;

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// The link's index.
    pub interface: u32,
    /// The address with its prefix length.
    pub address: IpNet,
    /// No duplicate address detection: the address is usable at once instead of after a second or two. IPv6
    /// only.
    pub no_dad: bool,
    /// No route to the prefix is made along with it.
    pub no_prefix_route: bool,
    /// Read only: it is not usable, because duplicate address detection still runs or has failed.
    pub tentative: bool,
}

impl Address {
    /// An address that is usable at once, with a route to its prefix.
    pub fn new(interface: u32, address: IpNet) -> Self {
        let no_dad = address.addr().is_ipv6();
        Self { interface, address, no_dad, no_prefix_route: false, tentative: false }
    }

    /// The same without a route to its prefix.
    pub fn without_prefix_route(self) -> Self {
        Self { no_prefix_route: true, ..self }
    }

    pub(crate) fn message(&self) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.family = family(self.address.addr());
        message.header.prefix_len = self.address.prefix_len();
        message.header.index = self.interface;
        message.attributes.push(AddressAttribute::Address(self.address.addr()));
        message.attributes.push(AddressAttribute::Local(self.address.addr()));
        let mut flags = 0;
        if self.no_dad && self.address.addr().is_ipv6() {
            flags |= IFA_F_NODAD;
        }
        if self.no_prefix_route {
            flags |= IFA_F_NOPREFIXROUTE;
        }
        if flags != 0 {
            message.attributes.push(AddressAttribute::Flags(AddressFlags::from_bits_retain(flags)));
        }
        message
    }

    /// Reads an address out of a message; `None` if it is something else or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWADDR && message.kind != RTM_DELADDR {
            return None;
        }
        let ([_, prefix, flags, _, a, b, c, d], attrs) = message.split::<8>().ok()?;
        let (mut flags, mut address, mut local) = (u32::from(flags), None, None);
        for attr in attrs {
            match attr.kind {
                IFA_ADDRESS => address = ip(&attr),
                IFA_LOCAL => local = ip(&attr),
                IFA_FLAGS => flags = attr.u32().unwrap_or(flags),
                _ => {}
            }
        }
        // Where the two differ, IFA_ADDRESS is the other end of a point-to-point link.
        Some(Self {
            interface: u32::from_ne_bytes([a, b, c, d]),
            address: IpNet::new(local.or(address)?, prefix).ok()?,
            no_dad: flags & IFA_F_NODAD != 0,
            no_prefix_route: flags & IFA_F_NOPREFIXROUTE != 0,
            tentative: flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED) != 0,
        })
    }

    pub(crate) fn same_key(&self, other: &Self) -> bool {
        self.interface == other.interface && self.address == other.address
    }

    pub(crate) fn differences(&self, found: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        Difference::check(&mut differences, "no_prefix_route", &self.no_prefix_route, &found.no_prefix_route);
        differences
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "address {} on link {}", self.address, self.interface)
    }
}

pub(crate) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
