//! Address families, and one value for each.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// An address family.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Family {
    /// IP version 4.
    #[serde(rename = "IPv4")]
    V4,
    /// IP version 6.
    #[serde(rename = "IPv6")]
    V6,
}

/// What belongs to one address family.
pub trait HasFamily {
    /// Its family.
    fn family(&self) -> Family;
}

/// Lists that hold any number of things of either family, and are looked at one family at a time.
pub trait ByFamily<T> {
    /// Those of one family, in their order.
    fn of_family<'a>(&'a self, family: Family) -> impl Iterator<Item = &'a T>
    where
        T: 'a;

    /// The first one of a family.
    fn first_of(&self, family: Family) -> Option<&T> {
        self.of_family(family).next()
    }

    /// Whether there is one of this family.
    fn has_family(&self, family: Family) -> bool {
        self.first_of(family).is_some()
    }
}

/// One value for each family.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct PerFamily<T> {
    /// The value for IPv4.
    pub v4: T,
    /// The value for IPv6.
    pub v6: T,
}

/// The least MTU that IPv6 works with: below it the kernel turns IPv6 off on a link.
pub const IPV6_MIN_MTU: u32 = 1280;

// === impl Family ===

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub const fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The family of a prefix.
    #[must_use]
    pub fn of_net(net: IpNet) -> Self {
        net.family()
    }

    /// How many bits an address has.
    #[must_use]
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// The name in the Kubernetes API: `IPv4` or `IPv6`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl HasFamily ===

impl HasFamily for IpAddr {
    fn family(&self) -> Family {
        Family::of(*self)
    }
}

impl HasFamily for IpNet {
    fn family(&self) -> Family {
        match self {
            Self::V4(_) => Family::V4,
            Self::V6(_) => Family::V6,
        }
    }
}

// === impl ByFamily ===

impl<T: HasFamily> ByFamily<T> for [T] {
    fn of_family<'a>(&'a self, family: Family) -> impl Iterator<Item = &'a T>
    where
        T: 'a,
    {
        self.iter().filter(move |thing| thing.family() == family)
    }
}

// === impl PerFamily ===

impl<T> PerFamily<T> {
    /// Computes both values.
    pub fn from_fn(mut f: impl FnMut(Family) -> T) -> Self {
        Self { v4: f(Family::V4), v6: f(Family::V6) }
    }

    /// The value for one family.
    pub fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The value for one family, to change it.
    pub fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_several_of_each_family_in_its_own_order() {
        let list: Vec<IpAddr> =
            ["fd00::2", "10.0.0.9", "fd00::1", "10.0.0.1"].map(|a| a.parse().expect("an address")).into();
        let of = |family| list.of_family(family).map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(of(Family::V4), ["10.0.0.9", "10.0.0.1"]);
        assert_eq!(of(Family::V6), ["fd00::2", "fd00::1"]);
        assert_eq!(list.first_of(Family::V6), Some(&list[0]));
        assert!(!list[1..2].has_family(Family::V6));
    }

    #[test]
    fn families_are_written_as_kubernetes_writes_them() {
        assert_eq!(serde_json::to_string(&Family::ALL).expect("JSON"), r#"["IPv4","IPv6"]"#);
        for family in Family::ALL {
            let text = format!("\"{family}\"");
            assert_eq!(serde_json::from_str::<Family>(&text).expect("a family"), family);
        }
        serde_json::from_str::<Family>("\"V4\"").expect_err("no name of Kubernetes");
    }
}
