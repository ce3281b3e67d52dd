//! What a Network may give out: its subnets, its gateways, and what is set aside.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_types::{Addresses, Family, Mac, NetworkName};

use crate::address::{AddressRange, merged, to_address, to_number};
use crate::block::Block;
use crate::error::{NotLeasable, PoolError};
use crate::mac::{self, V6_WINDOW, hashed_mac, pod_mac};

/// One family's range of a Network.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Subnet {
    range: AddressRange,
    prefix_len: u8,
    gateway: IpAddr,
    /// Sorted, disjoint.
    reserved: Vec<(u128, u128)>,
    /// Whether what is reserved is somebody else's, and not for pods that ask for it.
    of_others: bool,
}

/// What a Network may give out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pool {
    network: NetworkName,
    id: u32,
    primary: bool,
    router: bool,
    v4: Option<Subnet>,
    v6: Option<Subnet>,
}

/// What an address is in its pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Standing {
    /// Given out by itself.
    Ordinary,
    /// Never given out by itself; a pod may ask for it.
    Reserved,
    /// No pod ever has it.
    Never(NotLeasable),
    /// Not an address of this pool.
    Outside,
}

// === impl Subnet ===

impl Subnet {
    /// A range with its gateway (the first address behind the range's own if left out) and reserved ranges.
    pub fn new(cidr: IpNet, gateway: Option<IpAddr>, reserved: &[AddressRange]) -> Result<Self, PoolError> {
        if cidr != cidr.trunc() {
            return Err(PoolError::HostBits { cidr, instead: cidr.trunc() });
        }
        let range = AddressRange::from(cidr);
        let (first, last) = range.numbers();
        if last - first < 3 {
            return Err(PoolError::TooSmall { cidr });
        }
        let gateway = gateway.unwrap_or_else(|| to_address(range.family(), first + 1));
        if !range.contains(gateway) {
            return Err(PoolError::GatewayOutside { cidr, gateway });
        }
        if let Some(outside) = reserved.iter().find(|r| !range.covers(r)) {
            return Err(PoolError::ReservedOutside { cidr, reserved: *outside });
        }
        let reserved = merged(reserved.iter().map(AddressRange::numbers).collect());
        Ok(Self { range, prefix_len: cidr.prefix_len(), gateway, reserved, of_others: false })
    }

    /// All addresses of the subnet.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// The length of the prefix, which an interface on a switched Network carries.
    #[must_use]
    pub fn prefix_len(&self) -> u8 {
        self.prefix_len
    }

    /// The anycast gateway.
    #[must_use]
    pub fn gateway(&self) -> IpAddr {
        self.gateway
    }

    /// The part that blocks are cut from: all of it, but at most 2^40 addresses, in which MACs are unique.
    #[must_use]
    pub fn window(&self) -> AddressRange {
        let (first, last) = self.range.numbers();
        AddressRange::of_numbers(self.range.family(), first, last.min(first.saturating_add(V6_WINDOW - 1)))
    }

    /// What an address is in this subnet.
    #[must_use]
    pub fn standing(&self, address: IpAddr) -> Standing {
        let (first, last) = self.range.numbers();
        let number = to_number(address);
        if !self.range.contains(address) {
            Standing::Outside
        } else if address == self.gateway {
            Standing::Never(NotLeasable::Gateway)
        } else if number == first {
            Standing::Never(NotLeasable::SubnetAddress)
        } else if number == last && address.is_ipv4() {
            Standing::Never(NotLeasable::Broadcast)
        } else if self.is_reserved(number) && self.of_others {
            Standing::Never(NotLeasable::OtherHost)
        } else if self.is_reserved(number) {
            Standing::Reserved
        } else {
            Standing::Ordinary
        }
    }

    /// All that is never given out by itself, sorted and disjoint.
    pub(crate) fn set_aside(&self) -> Vec<(u128, u128)> {
        let (first, last) = self.range.numbers();
        let gateway = to_number(self.gateway);
        let mut ranges = self.reserved.clone();
        ranges.extend([(first, first), (gateway, gateway)]);
        if self.range.family() == Family::V4 {
            ranges.push((last, last));
        }
        merged(ranges)
    }

    /// How many addresses are in none of these blocks and may be given out by themselves.
    #[must_use]
    pub fn unassigned(&self, blocks: &[Block]) -> u128 {
        let (first, last) = self.range.numbers();
        let family = self.range.family();
        let mut taken = self.set_aside();
        let prefixes = blocks.iter().filter_map(|block| block.prefix(family));
        taken.extend(prefixes.map(|prefix| AddressRange::from(prefix).numbers()));
        let inside = merged(taken).into_iter().map(|(from, to)| (from.max(first), to.min(last)));
        let inside = inside.filter(|(from, to)| from <= to);
        inside.fold((last - first).saturating_add(1), |left, (from, to)| left.saturating_sub(to - from + 1))
    }

    fn is_reserved(&self, number: u128) -> bool {
        let after = self.reserved.partition_point(|(first, _)| *first <= number);
        after > 0 && number <= self.reserved[after - 1].1
    }
}

// === impl Pool ===

impl Pool {
    /// The pool of a Network with its numeric id: one subnet, or one per family.
    pub fn new(
        network: impl Into<NetworkName>,
        id: u32,
        subnets: impl IntoIterator<Item = Subnet>,
    ) -> Result<Self, PoolError> {
        let network = network.into();
        let (mut v4, mut v6) = (None, None);
        for subnet in subnets {
            let family = subnet.range.family();
            let place = if family == Family::V4 { &mut v4 } else { &mut v6 };
            if place.replace(subnet).is_some() {
                return Err(PoolError::TwoOfOneFamily { network, family });
            }
        }
        if v4.is_none() && v6.is_none() {
            return Err(PoolError::NoSubnet { network });
        }
        Ok(Self { network, id, primary: false, router: false, v4, v6 })
    }

    /// Says whether namespaces may have this Network as their primary: its pods' addresses are then unique on
    /// their node over all such Networks.
    #[must_use]
    pub fn primary(mut self, primary: bool) -> Self {
        self.primary = primary;
        self
    }

    /// Says whether the router needs an address of its own: the first usable index of each block is then its
    /// own.
    #[must_use]
    pub fn with_router(mut self, router: bool) -> Self {
        self.router = router;
        self
    }

    /// Says whether reserved addresses are other hosts': then no pod gets one, whether or not it asks.
    #[must_use]
    pub fn shared_with_others(mut self, shared: bool) -> Self {
        for subnet in self.v4.iter_mut().chain(&mut self.v6) {
            subnet.of_others = shared;
        }
        self
    }

    /// The Network's name.
    #[must_use]
    pub fn network(&self) -> &NetworkName {
        &self.network
    }

    /// The Network's numeric id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether addresses must be unique on a node over all Networks that are primary.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.primary
    }

    /// Whether routers have an address of their own.
    #[must_use]
    pub fn has_router(&self) -> bool {
        self.router
    }

    /// The subnet of a family.
    #[must_use]
    pub fn subnet(&self, family: Family) -> Option<&Subnet> {
        match family {
            Family::V4 => self.v4.as_ref(),
            Family::V6 => self.v6.as_ref(),
        }
    }

    /// How many addresses blocks are cut from, in the family that has fewest.
    #[must_use]
    pub fn room(&self) -> u128 {
        let sizes = self.families().filter_map(|family| self.subnet(family)).map(|subnet| {
            let (first, last) = subnet.window().numbers();
            last - first + 1
        });
        sizes.min().unwrap_or(0)
    }

    /// The families it has.
    pub fn families(&self) -> impl Iterator<Item = Family> + '_ {
        Family::ALL.into_iter().filter(|family| self.subnet(*family).is_some())
    }

    /// The anycast gateway of each family.
    #[must_use]
    pub fn gateways(&self) -> Addresses {
        let list: Vec<IpAddr> =
            Family::ALL.into_iter().filter_map(|f| self.subnet(f)).map(Subnet::gateway).collect();
        Addresses::from_list(&list).expect("a pool has one subnet or one of each family")
    }

    /// What an address is in this pool.
    #[must_use]
    pub fn standing(&self, address: IpAddr) -> Standing {
        self.subnet(Family::of(address)).map_or(Standing::Outside, |subnet| subnet.standing(address))
    }

    /// The MAC of an interface that has these addresses: [`pod_mac`] of the deciding one, wherever that is
    /// unique.
    #[must_use]
    pub fn mac(&self, addresses: &Addresses) -> Mac {
        let address = mac::deciding(addresses);
        match self.subnet(Family::of(address)) {
            Some(subnet) if address.is_ipv6() && !subnet.window().contains(address) => hashed_mac(address),
            _ => pod_mac(self.id, address),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn each_address_has_its_standing() {
        let reserved = [AddressRange::from(net("10.77.0.16/28"))];
        let v4 = Subnet::new(net("10.77.0.0/24"), None, &reserved).unwrap();
        let v6 = Subnet::new(net("fd77::/64"), Some("fd77::fe".parse().unwrap()), &[]).unwrap();
        let pool = Pool::new("blue", 7, [v4, v6]).unwrap();
        for (address, standing) in [
            ("10.77.0.0", Standing::Never(NotLeasable::SubnetAddress)),
            ("10.77.0.1", Standing::Never(NotLeasable::Gateway)),
            ("10.77.0.2", Standing::Ordinary),
            ("10.77.0.15", Standing::Ordinary),
            ("10.77.0.16", Standing::Reserved),
            ("10.77.0.31", Standing::Reserved),
            ("10.77.0.32", Standing::Ordinary),
            ("10.77.0.255", Standing::Never(NotLeasable::Broadcast)),
            ("10.77.1.0", Standing::Outside),
            ("fd77::", Standing::Never(NotLeasable::SubnetAddress)),
            ("fd77::1", Standing::Ordinary),
            ("fd77::fe", Standing::Never(NotLeasable::Gateway)),
            ("fd77::ffff:ffff:ffff:ffff", Standing::Ordinary),
            ("fd78::1", Standing::Outside),
        ] {
            assert_eq!(pool.standing(address.parse().unwrap()), standing, "{address}");
        }
    }

    #[test]
    fn what_is_reserved_for_other_hosts_is_nobodys_to_ask_for() {
        let reserved = [AddressRange::from(net("10.77.0.16/28"))];
        let v4 = Subnet::new(net("10.77.0.0/24"), None, &reserved).unwrap();
        let v6 = Subnet::new(net("fd77::/64"), None, &[AddressRange::from(net("fd77::10/124"))]).unwrap();
        let pool = Pool::new("lan", 7, [v4, v6]).unwrap().shared_with_others(true);
        let never = Standing::Never(NotLeasable::OtherHost);
        for (address, standing) in [
            ("10.77.0.2", Standing::Ordinary),
            ("10.77.0.1", Standing::Never(NotLeasable::Gateway)),
            ("10.77.0.16", never),
            ("fd77::1f", never),
            ("fd77::20", Standing::Ordinary),
        ] {
            assert_eq!(pool.standing(address.parse().unwrap()), standing, "{address}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        assert!(matches!(Subnet::new(net("10.0.0.1/24"), None, &[]), Err(PoolError::HostBits { .. })));
        assert!(matches!(Subnet::new(net("10.0.0.0/31"), None, &[]), Err(PoolError::TooSmall { .. })));
        let outside = Some("10.0.1.1".parse().unwrap());
        assert!(matches!(
            Subnet::new(net("10.0.0.0/24"), outside, &[]),
            Err(PoolError::GatewayOutside { .. })
        ));
        let reserved = [AddressRange::from(net("10.0.0.0/16"))];
        assert!(matches!(
            Subnet::new(net("10.0.0.0/24"), None, &reserved),
            Err(PoolError::ReservedOutside { .. })
        ));
        let one = Subnet::new(net("10.0.0.0/24"), None, &[]).unwrap();
        assert!(matches!(Pool::new("a", 1, [one.clone(), one]), Err(PoolError::TwoOfOneFamily { .. })));
        assert!(matches!(Pool::new("a", 1, []), Err(PoolError::NoSubnet { .. })));
    }

    #[test]
    fn a_far_static_ipv6_address_has_a_hashed_mac() {
        let pool = Pool::new("six", 7, [Subnet::new(net("fd77::/64"), None, &[]).unwrap()]).unwrap();
        let near: Addresses = "fd77::5".parse::<IpAddr>().unwrap().into();
        let far: Addresses = "fd77::100:0:5".parse::<IpAddr>().unwrap().into();
        assert_eq!(pool.mac(&near), pod_mac(7, near.first()));
        // Their low 40 bits are equal.
        assert_eq!(pod_mac(7, near.first()), pod_mac(7, far.first()));
        assert_ne!(pool.mac(&near), pool.mac(&far));
    }

    proptest! {
        #[test]
        fn unassigned_are_the_ordinary_addresses_that_no_block_has(
            reserved in prop::collection::vec((0_u8..32, 27_u8..=32), 0..3), gateway in 1_u8..31,
            blocks in prop::collection::vec((0_u8..64, 0_u32..4), 0..4),
        ) {
            let at = |n: u8| IpAddr::from([10, 77, 0, n]);
            let reserved: Vec<AddressRange> =
                reserved.iter().map(|(n, len)| IpNet::new(at(*n), *len).unwrap().into()).collect();
            let subnet = Subnet::new(net("10.77.0.0/27"), Some(at(gateway)), &reserved).unwrap();
            // Some of them reach out of the subnet, or are outside.
            let blocks: Vec<Block> = blocks.iter().map(|(n, power)| {
                let net = IpNet::new(at(*n), 32 - u8::try_from(*power).unwrap()).unwrap().trunc();
                let IpNet::V4(net) = net else { panic!("IPv4") };
                Block::from_ranges("blue", "a", Some(net), None).unwrap()
            }).collect();
            let free = |address: IpAddr| subnet.standing(address) == Standing::Ordinary
                && blocks.iter().all(|block| block.index_of(address).is_none());
            let counted = (0..32).filter(|n| free(at(*n))).count();
            prop_assert_eq!(subnet.unassigned(&blocks), counted as u128);
        }
    }
}
