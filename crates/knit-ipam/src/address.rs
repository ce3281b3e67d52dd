//! Addresses as numbers, and ranges of them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use knit_types::Family;

/// Addresses of one family from a first to a last one, both included.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct AddressRange {
    family: Family,
    first: u128,
    last: u128,
}

// === impl AddressRange ===

impl AddressRange {
    /// From a first to a last address; `None` if they differ in family or are the wrong way round.
    #[must_use]
    pub fn new(first: IpAddr, last: IpAddr) -> Option<Self> {
        let family = Family::of(first);
        (family == Family::of(last) && first <= last).then(|| Self {
            family,
            first: to_number(first),
            last: to_number(last),
        })
    }

    /// From numbers of one family; the caller keeps them in order and, for IPv4, below 2^32.
    pub(crate) fn of_numbers(family: Family, first: u128, last: u128) -> Self {
        debug_assert!(first <= last && (family == Family::V6 || last <= u128::from(u32::MAX)));
        Self { family, first, last }
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> Family {
        self.family
    }

    /// The first address.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        to_address(self.family, self.first)
    }

    /// The last address.
    #[must_use]
    pub fn last(&self) -> IpAddr {
        to_address(self.family, self.last)
    }

    /// First and last as numbers.
    pub(crate) fn numbers(&self) -> (u128, u128) {
        (self.first, self.last)
    }

    /// Whether an address lies in it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family && (self.first..=self.last).contains(&to_number(address))
    }

    /// Whether all of another range lies in it.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.family == other.family && self.first <= other.first && other.last <= self.last
    }

    /// Whether the two have an address in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.family == other.family && self.first <= other.last && other.first <= self.last
    }
}

impl From<IpNet> for AddressRange {
    fn from(net: IpNet) -> Self {
        // `network` and `broadcast` are the first and the last address, for IPv6 too.
        Self {
            family: Family::of(net.addr()),
            first: to_number(net.network()),
            last: to_number(net.broadcast()),
        }
    }
}

impl From<IpAddr> for AddressRange {
    fn from(address: IpAddr) -> Self {
        Self { family: Family::of(address), first: to_number(address), last: to_number(address) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first(), self.last())
    }
}

/// An address as a number.
pub(crate) fn to_number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// A number as an address; an IPv4 number is below 2^32 by construction of every range and block.
pub(crate) fn to_address(family: Family, number: u128) -> IpAddr {
    match family {
        Family::V4 => {
            debug_assert!(number <= u128::from(u32::MAX));
            IpAddr::V4(Ipv4Addr::from_bits(number as u32))
        }
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(number)),
    }
}

/// Sorts ranges and joins those that touch or overlap.
pub(crate) fn merged(mut ranges: Vec<(u128, u128)>) -> Vec<(u128, u128)> {
    ranges.sort_unstable();
    let mut out: Vec<(u128, u128)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match out.last_mut() {
            Some(previous) if first <= previous.1.saturating_add(1) => previous.1 = previous.1.max(last),
            _ => out.push((first, last)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_where_they_touch() {
        assert_eq!(merged(vec![(8, 9), (0, 3), (4, 5), (1, 2)]), [(0, 5), (8, 9)]);
        assert_eq!(merged(vec![(5, u128::MAX), (u128::MAX, u128::MAX)]), [(5, u128::MAX)]);
    }
}
