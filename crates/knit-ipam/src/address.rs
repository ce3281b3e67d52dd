//! Addresses as numbers: families, ranges, and the one or two addresses of an interface.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// An address family.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Family {
    /// IP version 4.
    V4,
    /// IP version 6.
    V6,
}

/// One address of each family that is there: at least one, at most one per family.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "RawAddresses", into = "RawAddresses")]
pub enum Addresses {
    /// IPv4 only.
    V4(Ipv4Addr),
    /// IPv6 only.
    V6(Ipv6Addr),
    /// Both families.
    Dual {
        /// The IPv4 address.
        v4: Ipv4Addr,
        /// The IPv6 address.
        v6: Ipv6Addr,
    },
}

/// How [`Addresses`] are written down.
#[derive(Deserialize, Serialize)]
struct RawAddresses {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv4: Option<Ipv4Addr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv6: Option<Ipv6Addr>,
}

/// Addresses of one family from a first to a last one, both included.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct AddressRange {
    family: Family,
    first: u128,
    last: u128,
}

// === impl Family ===

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

// === impl Addresses ===

impl Addresses {
    /// The addresses that are there; `None` if there is none.
    #[must_use]
    pub fn new(v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> Option<Self> {
        match (v4, v6) {
            (Some(v4), Some(v6)) => Some(Self::Dual { v4, v6 }),
            (Some(v4), None) => Some(Self::V4(v4)),
            (None, Some(v6)) => Some(Self::V6(v6)),
            (None, None) => None,
        }
    }

    /// From a list; `None` if it is empty or has two of one family.
    #[must_use]
    pub fn from_list(list: &[IpAddr]) -> Option<Self> {
        let (mut v4, mut v6) = (None, None);
        for address in list {
            let twice = match address {
                IpAddr::V4(a) => v4.replace(*a).is_some(),
                IpAddr::V6(a) => v6.replace(*a).is_some(),
            };
            if twice {
                return None;
            }
        }
        Self::new(v4, v6)
    }

    /// The IPv4 address.
    #[must_use]
    pub fn v4(&self) -> Option<Ipv4Addr> {
        match self {
            Self::V4(v4) | Self::Dual { v4, .. } => Some(*v4),
            Self::V6(_) => None,
        }
    }

    /// The IPv6 address.
    #[must_use]
    pub fn v6(&self) -> Option<Ipv6Addr> {
        match self {
            Self::V6(v6) | Self::Dual { v6, .. } => Some(*v6),
            Self::V4(_) => None,
        }
    }

    /// The address of a family.
    #[must_use]
    pub fn get(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4().map(IpAddr::V4),
            Family::V6 => self.v6().map(IpAddr::V6),
        }
    }

    /// All addresses, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let this = *self;
        Family::ALL.into_iter().filter_map(move |family| this.get(family))
    }

    /// Whether an address is one of these.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.get(Family::of(address)) == Some(address)
    }

    /// Whether both have the same families.
    #[must_use]
    pub fn same_families(&self, other: &Self) -> bool {
        self.v4().is_some() == other.v4().is_some() && self.v6().is_some() == other.v6().is_some()
    }

    /// The first address there is, IPv4 before IPv6.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        match self {
            Self::V4(v4) | Self::Dual { v4, .. } => IpAddr::V4(*v4),
            Self::V6(v6) => IpAddr::V6(*v6),
        }
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(v4) => write!(f, "{v4}"),
            Self::V6(v6) => write!(f, "{v6}"),
            Self::Dual { v4, v6 } => write!(f, "{v4},{v6}"),
        }
    }
}

impl From<IpAddr> for Addresses {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::V4(v4),
            IpAddr::V6(v6) => Self::V6(v6),
        }
    }
}

impl From<Addresses> for RawAddresses {
    fn from(addresses: Addresses) -> Self {
        Self { ipv4: addresses.v4(), ipv6: addresses.v6() }
    }
}

impl TryFrom<RawAddresses> for Addresses {
    type Error = &'static str;

    fn try_from(raw: RawAddresses) -> Result<Self, Self::Error> {
        Self::new(raw.ipv4, raw.ipv6).ok_or("neither ipv4 nor ipv6 is given")
    }
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
    fn a_list_has_at_most_one_address_per_family() {
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let v6: IpAddr = "fd00::1".parse().unwrap();
        assert_eq!(Addresses::from_list(&[]), None);
        assert_eq!(Addresses::from_list(&[v4, v4]), None);
        assert_eq!(Addresses::from_list(&[v6, v4]).unwrap().iter().collect::<Vec<_>>(), [v4, v6]);
    }

    #[test]
    fn ranges_are_joined_where_they_touch() {
        assert_eq!(merged(vec![(8, 9), (0, 3), (4, 5), (1, 2)]), [(0, 5), (8, 9)]);
        assert_eq!(merged(vec![(5, u128::MAX), (u128::MAX, u128::MAX)]), [(5, u128::MAX)]);
    }

    #[test]
    fn written_down_and_read_back() {
        let dual =
            Addresses::new(Some(Ipv4Addr::new(10, 0, 0, 1)), Some("fd00::1".parse().unwrap())).unwrap();
        let text = serde_json::to_string(&dual).unwrap();
        assert_eq!(text, r#"{"ipv4":"10.0.0.1","ipv6":"fd00::1"}"#);
        assert_eq!(serde_json::from_str::<Addresses>(&text).unwrap(), dual);
        assert!(serde_json::from_str::<Addresses>("{}").is_err());
    }
}
