//! The uplink between a Network's router and the node: names and addresses.
//!
//! Its two addresses come out of a range that is used on this node only. Which pair of them a Network has
//! follows from its number where that is free, and is read back from the kernel afterwards.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_ipam::Mac;
use knit_kernel::name::IfName;
use knit_kernel::{Handle, NetNs};
use knit_types::Family;

/// How many uplinks a node can have.
pub(crate) const COUNT: u16 = 1 << 12;

/// The router's end, in the router.
pub(crate) const ROUTER_END: &str = "uplink";

/// How the names of the node's ends begin.
pub const NODE_END_PREFIX: &str = "up-";

/// The ranges that uplinks have their addresses from; they are used on each node for itself.
#[must_use]
pub fn ranges() -> (Ipv4Net, Ipv6Net) {
    let v4 = Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 192, 0), 18);
    let v6 = Ipv6Net::new_assert(Ipv6Addr::new(0xfd6b, 0x6e69, 0x7400, 0, 0, 0, 0, 0), 64);
    (v4, v6)
}

/// The addresses of a router's end of its uplink, at most one per family: what the node steers into the
/// router goes there. None if the namespace is no router of this runtime's.
///
/// # Errors
/// When the kernel does not say.
pub fn router_uplink(router: &NetNs) -> Result<Vec<IpAddr>, knit_kernel::Error> {
    let handle = Handle::open(router)?;
    let name = IfName::new(ROUTER_END).expect("uplink is a name");
    let Some(link) = handle.link_by_name(&name)? else { return Ok(Vec::new()) };
    let addresses = handle.addresses(Some(link.index))?.into_iter().map(|found| found.address.addr());
    let mut own: Vec<IpAddr> = addresses.filter(|address| UplinkSlot::of(*address).is_some()).collect();
    own.sort_unstable();
    Ok(own)
}

/// One uplink's place in those ranges.
#[derive(Clone, Copy, Debug, Eq, PartialEq, PartialOrd, Ord)]
pub(crate) struct UplinkSlot(u16);

/// One end of an uplink.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// The node's.
    Node = 1,
    /// The router's.
    Router = 2,
}

impl UplinkSlot {
    /// The place that a Network has unless somebody else is there: `taken` says so.
    pub fn choose(network: u32, taken: impl Fn(Self) -> bool) -> Option<Self> {
        let first = (network % u32::from(COUNT)) as u16;
        (0..COUNT).map(|step| Self((first + step) % COUNT)).find(|place| !taken(*place))
    }

    /// The place that has this address.
    pub fn of(address: IpAddr) -> Option<Self> {
        let (v4, v6) = ranges();
        match address {
            IpAddr::V4(address) if v4.contains(&address) => {
                Some(Self(((address.to_bits() - v4.network().to_bits()) >> 2) as u16))
            }
            IpAddr::V6(address) if v6.contains(&address) => {
                u16::try_from((address.to_bits() - v6.network().to_bits()) >> 2).ok().map(Self)
            }
            _ => None,
        }
    }

    /// The addresses of one end, IPv4 and IPv6.
    pub fn addresses(self, end: End) -> [IpNet; 2] {
        let (v4, v6) = ranges();
        let offset = (u32::from(self.0) << 2) + end as u32;
        let v4 = Ipv4Addr::from_bits(v4.network().to_bits() + offset);
        let v6 = Ipv6Addr::from_bits(v6.network().to_bits() + u128::from(offset));
        [
            IpNet::new(v4.into(), 30).expect("30 bits fit an IPv4 address"),
            IpNet::new(v6.into(), 126).expect("126 bits fit an IPv6 address"),
        ]
    }

    /// The address of one end and a family.
    pub fn address(self, end: End, family: Family) -> IpAddr {
        let [v4, v6] = self.addresses(end);
        match family {
            Family::V4 => v4.addr(),
            Family::V6 => v6.addr(),
        }
    }

    /// The MAC of one end: both know the other's, so nobody asks.
    pub fn mac(self, end: End) -> Mac {
        let [a, b] = self.0.to_be_bytes();
        Mac([0x06, b'u', 0, a, b, end as u8])
    }
}

/// The node's end of a Network's uplink.
pub(crate) fn node_end(network: u32) -> IfName {
    IfName::new(format!("{NODE_END_PREFIX}{network}")).expect("a prefix and eight digits are a name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_addresses_follow_from_each_other() {
        let (v4, v6) = ranges();
        for place in [UplinkSlot(0), UplinkSlot(1), UplinkSlot(COUNT - 1)] {
            for end in [End::Node, End::Router] {
                let [a, b] = place.addresses(end);
                assert_eq!(UplinkSlot::of(a.addr()), Some(place));
                assert_eq!(UplinkSlot::of(b.addr()), Some(place));
                assert!(IpNet::from(v4).contains(&a.addr()) && IpNet::from(v6).contains(&b.addr()));
            }
        }
        assert_eq!(UplinkSlot::of("10.0.0.1".parse().expect("an address")), None);
    }

    #[test]
    fn two_networks_do_not_share_a_place() {
        let first = UplinkSlot::choose(7, |_| false).expect("free");
        let second = UplinkSlot::choose(7 + u32::from(COUNT), |place| place == first).expect("free");
        assert_ne!(first, second);
        assert_eq!(UplinkSlot::choose(7, |_| true), None);
    }
}
