//! The addresses of one interface that are leased together: one of each family that its Network has.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::family::Family;

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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_list_has_at_most_one_address_per_family() {
        let v4: IpAddr = "10.0.0.1".parse().expect("an address");
        let v6: IpAddr = "fd00::1".parse().expect("an address");
        assert_eq!(Addresses::from_list(&[]), None);
        assert_eq!(Addresses::from_list(&[v4, v4]), None);
        assert_eq!(Addresses::from_list(&[v6, v4]).expect("both").iter().collect::<Vec<_>>(), [v4, v6]);
    }

    #[test]
    fn none_at_all_is_not_read() {
        serde_json::from_str::<Addresses>("{}").expect_err("no address");
        serde_json::from_str::<Addresses>(r#"{"ipv4":"fd00::1"}"#).expect_err("the wrong family");
    }

    proptest! {
        #[test]
        fn written_down_and_read_back(v4: Option<u32>, v6: Option<u128>) {
            let Some(addresses) = Addresses::new(v4.map(Into::into), v6.map(Into::into)) else {
                return Ok(()) };
            let text = serde_json::to_string(&addresses).expect("JSON");
            prop_assert_eq!(text.contains("ipv4"), v4.is_some());
            prop_assert_eq!(text.contains("ipv6"), v6.is_some());
            prop_assert_eq!(serde_json::from_str::<Addresses>(&text).expect("addresses"), addresses);
        }
    }
}
