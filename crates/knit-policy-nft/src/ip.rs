//! The two families: one set of rules, written once, for both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use knit_nft::{Data, Family as TableFamily, Field, Key, Scalar, field};
use knit_types::Family;

/// What differs between IPv4 and IPv6 in a rule.
pub(crate) trait Ip {
    /// The type of addresses.
    type Address: Scalar + Key + Clone;
    /// The family.
    const FAMILY: Family;
    /// How many registers an address takes.
    const REGS: u8;

    fn saddr() -> Field<Self::Address>;
    fn daddr() -> Field<Self::Address>;
}

pub(crate) enum V4 {}
pub(crate) enum V6 {}

impl Ip for V4 {
    type Address = Ipv4Addr;
    const FAMILY: Family = Family::V4;
    const REGS: u8 = 1;

    fn saddr() -> Field<Ipv4Addr> {
        field::ip_saddr()
    }

    fn daddr() -> Field<Ipv4Addr> {
        field::ip_daddr()
    }
}

impl Ip for V6 {
    type Address = Ipv6Addr;
    const FAMILY: Family = Family::V6;
    const REGS: u8 = 4;

    fn saddr() -> Field<Ipv6Addr> {
        field::ip6_saddr()
    }

    fn daddr() -> Field<Ipv6Addr> {
        field::ip6_daddr()
    }
}

/// An address as the beginning of a key.
pub(crate) fn data(address: IpAddr) -> Data {
    match address {
        IpAddr::V4(v4) => Data::from_slice(&v4.octets()),
        IpAddr::V6(v6) => Data::from_slice(&v6.octets()),
    }
}

/// The address that a key begins with.
pub(crate) fn read(family: Family, key: &[u8]) -> Option<IpAddr> {
    match family {
        Family::V4 => key.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets).into()),
        Family::V6 => key.first_chunk::<16>().map(|octets| Ipv6Addr::from(*octets).into()),
    }
}

/// The family of the table for a family of packets.
pub(crate) fn table_family(family: Family) -> TableFamily {
    match family {
        Family::V4 => TableFamily::Ip,
        Family::V6 => TableFamily::Ip6,
    }
}
