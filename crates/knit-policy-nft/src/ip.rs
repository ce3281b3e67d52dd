//! Addresses as keys, and the family of a table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use knit_nft::ip::Ip;
use knit_nft::{Data, Family as TableFamily};
use knit_types::Family;

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

/// The family of packets that rules are for.
pub(crate) fn family<I: Ip>() -> Family {
    match I::TABLE {
        TableFamily::Ip6 => Family::V6,
        _ => Family::V4,
    }
}

/// The family of the table for a family of packets.
pub(crate) fn table_family(family: Family) -> TableFamily {
    match family {
        Family::V4 => TableFamily::Ip,
        Family::V6 => TableFamily::Ip6,
    }
}
