//! The addresses of one lease: at least one, and any number of each family.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::addresses::Addresses;
use crate::family::{Family, HasFamily as _};

/// The addresses of one interface, none of them twice. The first of each family is the one that others reach
/// the interface by; it may have further ones.
///
/// Written down, the first ones are `ipv4` and `ipv6`, as [`Addresses`] are, and the rest is `further`.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "RawAddressList", into = "RawAddressList")]
pub struct AddressList {
    first: Addresses,
    /// Empty, which takes no allocation, for nearly all.
    further: Box<[IpAddr]>,
}

/// How an [`AddressList`] is written down.
#[derive(Deserialize, Serialize)]
struct RawAddressList {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv4: Option<Ipv4Addr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv6: Option<Ipv6Addr>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    further: Vec<IpAddr>,
}

// === impl AddressList ===

impl AddressList {
    /// From a list, in its order; one that is there twice counts once. `None` if it is empty.
    #[must_use]
    pub fn from_list(list: &[IpAddr]) -> Option<Self> {
        let (mut v4, mut v6, mut further) = (None, None, Vec::new());
        for address in list {
            match address {
                IpAddr::V4(new) if v4.is_none() => v4 = Some(*new),
                IpAddr::V6(new) if v6.is_none() => v6 = Some(*new),
                _ => further.push(*address),
            }
        }
        let first = Addresses::new(v4, v6)?;
        let mut seen = Vec::with_capacity(further.len());
        further.retain(|address| {
            let new = !first.contains(*address) && !seen.contains(address);
            seen.push(*address);
            new
        });
        Some(Self { first, further: further.into() })
    }

    /// The first one of each family.
    #[must_use]
    pub fn firsts(&self) -> &Addresses {
        &self.first
    }

    /// The first one of a family.
    #[must_use]
    pub fn get(&self, family: Family) -> Option<IpAddr> {
        self.first.get(family)
    }

    /// The first IPv4 address.
    #[must_use]
    pub fn v4(&self) -> Option<Ipv4Addr> {
        self.first.v4()
    }

    /// The first IPv6 address.
    #[must_use]
    pub fn v6(&self) -> Option<Ipv6Addr> {
        self.first.v6()
    }

    /// The first address there is, IPv4 before IPv6.
    #[must_use]
    pub fn first(&self) -> IpAddr {
        self.first.first()
    }

    /// All of them: the first ones, IPv4 before IPv6, and then the further ones.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.first.iter().chain(self.further.iter().copied())
    }

    /// Those of one family.
    pub fn of_family(&self, family: Family) -> impl Iterator<Item = IpAddr> + '_ {
        self.iter().filter(move |address| address.family() == family)
    }

    /// Whether an address is one of these.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.first.contains(address) || self.further.contains(&address)
    }

    /// Whether a family has more than one address.
    #[must_use]
    pub fn has_further(&self) -> bool {
        !self.further.is_empty()
    }
}

impl fmt::Display for AddressList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        self.further.iter().try_for_each(|address| write!(f, ",{address}"))
    }
}

impl From<Addresses> for AddressList {
    fn from(first: Addresses) -> Self {
        Self { first, further: Box::default() }
    }
}

impl PartialEq<Addresses> for AddressList {
    fn eq(&self, other: &Addresses) -> bool {
        self.first == *other && self.further.is_empty()
    }
}

impl From<AddressList> for RawAddressList {
    fn from(list: AddressList) -> Self {
        Self { ipv4: list.v4(), ipv6: list.v6(), further: list.further.into_vec() }
    }
}

impl TryFrom<RawAddressList> for AddressList {
    type Error = &'static str;

    fn try_from(raw: RawAddressList) -> Result<Self, Self::Error> {
        let first = raw.ipv4.map(IpAddr::V4).into_iter().chain(raw.ipv6.map(IpAddr::V6));
        let list: Vec<IpAddr> = first.chain(raw.further).collect();
        Self::from_list(&list).ok_or("neither ipv4 nor ipv6 is given")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(texts: &[&str]) -> Option<AddressList> {
        let addresses: Vec<IpAddr> = texts.iter().map(|t| t.parse().expect("an address")).collect();
        AddressList::from_list(&addresses)
    }

    #[test]
    fn each_family_has_a_first_one_and_no_address_is_there_twice() {
        assert_eq!(list(&[]), None);
        let many =
            list(&["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2", "10.0.0.1", "fd00::2"]).expect("some");
        assert_eq!(many.to_string(), "10.0.0.2,fd00::1,10.0.0.1,fd00::2");
        assert_eq!(many.get(Family::V4), "10.0.0.2".parse().ok());
        assert_eq!(many.of_family(Family::V6).count(), 2);
        assert!(many.contains("fd00::2".parse().expect("an address")) && many.has_further());
    }

    #[test]
    fn one_per_family_is_written_as_it_always_was() {
        let pair = list(&["10.0.0.1", "fd00::1"]).expect("two");
        let text = serde_json::to_string(&pair).expect("JSON");
        assert_eq!(text, r#"{"ipv4":"10.0.0.1","ipv6":"fd00::1"}"#);
        assert_eq!(pair, *pair.firsts());
        serde_json::from_str::<AddressList>("{}").expect_err("no address");
    }

    proptest! {
        #[test]
        fn written_down_and_read_back(v4: Vec<u32>, v6: Vec<u128>) {
            let v4 = v4.into_iter().map(|n| IpAddr::V4(n.into()));
            let all: Vec<IpAddr> = v4.chain(v6.into_iter().map(|n| IpAddr::V6(n.into()))).collect();
            let Some(list) = AddressList::from_list(&all) else { return Ok(()) };
            prop_assert!(all.iter().all(|address| list.contains(*address)));
            let text = serde_json::to_string(&list).expect("JSON");
            prop_assert_eq!(serde_json::from_str::<AddressList>(&text).expect("a list"), list);
        }
    }
}
