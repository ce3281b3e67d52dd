//! The two families of IP: rules for both are written once, over [`Ip`].
//!
//! ```
//! use knit_nft::Rule;
//! use knit_nft::ip::{Ip, V4, V6};
//!
//! /// Takes what comes from the machine itself.
//! fn from_loopback<I: Ip>() -> Rule {
//!     Rule::new().in_prefix(I::saddr(), I::LOOPBACK.0, I::LOOPBACK.1).accept()
//! }
//!
//! let (v4, v6) = (from_loopback::<V4>(), from_loopback::<V6>());
//! assert_ne!(v4, v6);
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Family, Field, Key, Scalar, field};

/// What differs between IPv4 and IPv6 in a rule.
pub trait Ip {
    /// The type of addresses.
    type Address: Scalar + Key + Clone;
    /// The family of the table.
    const TABLE: Family;
    /// How many registers an address takes.
    const REGS: u8;
    /// The ICMP code that says that nobody listens on a port.
    const PORT_UNREACHABLE: u8;
    /// No address.
    const ANY: Self::Address;
    /// The loopback range.
    const LOOPBACK: (IpAddr, u8);

    /// Where a packet comes from.
    fn saddr() -> Field<Self::Address>;
    /// Where it goes to.
    fn daddr() -> Field<Self::Address>;
}

/// IPv4.
#[derive(Debug)]
pub enum V4 {}

/// IPv6.
#[derive(Debug)]
pub enum V6 {}

impl Ip for V4 {
    type Address = Ipv4Addr;
    const TABLE: Family = Family::Ip;
    const REGS: u8 = 1;
    const PORT_UNREACHABLE: u8 = 3;
    const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
    const LOOPBACK: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);

    fn saddr() -> Field<Ipv4Addr> {
        field::ip_saddr()
    }

    fn daddr() -> Field<Ipv4Addr> {
        field::ip_daddr()
    }
}

impl Ip for V6 {
    type Address = Ipv6Addr;
    const TABLE: Family = Family::Ip6;
    const REGS: u8 = 4;
    const PORT_UNREACHABLE: u8 = 4;
    const ANY: Ipv6Addr = Ipv6Addr::UNSPECIFIED;
    const LOOPBACK: (IpAddr, u8) = (IpAddr::V6(Ipv6Addr::LOCALHOST), 128);

    fn saddr() -> Field<Ipv6Addr> {
        field::ip6_saddr()
    }

    fn daddr() -> Field<Ipv6Addr> {
        field::ip6_daddr()
    }
}
