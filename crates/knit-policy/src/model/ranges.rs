//! Sets of addresses given as CIDRs with exceptions: merged, so that overlaps cost nothing later.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::Family;

/// Addresses as ranges: sorted, apart from each other, both ends included, IPv4 before IPv6. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRanges(Arc<[(IpAddr, IpAddr)]>);

/// The address after this one, in its family.
pub(crate) fn next(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(a) => a.to_bits().checked_add(1).map(|n| IpAddr::V4(n.into())),
        IpAddr::V6(a) => a.to_bits().checked_add(1).map(|n| IpAddr::V6(n.into())),
    }
}

/// The address before this one, in its family.
pub(crate) fn previous(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(a) => a.to_bits().checked_sub(1).map(|n| IpAddr::V4(n.into())),
        IpAddr::V6(a) => a.to_bits().checked_sub(1).map(|n| IpAddr::V6(n.into())),
    }
}

// === impl AddressRanges ===

impl AddressRanges {
    /// A CIDR without some others (rule 17: an exception narrows its own block and no other). Bits behind the
    /// prefix are cut off (rule 16).
    #[must_use]
    pub fn block(cidr: IpNet, except: &[IpNet]) -> Self {
        let (family, cidr) = (Family::of(cidr.addr()), ends(cidr));
        let mut holes: Vec<(IpAddr, IpAddr)> =
            except.iter().filter(|e| Family::of(e.addr()) == family).map(|e| ends(*e)).collect();
        holes.sort_unstable();
        let (mut list, mut start) = (Vec::new(), Some(cidr.0));
        for (first, last) in holes {
            let Some(from) = start else { break };
            if last < from {
                continue;
            }
            if first > cidr.1 {
                break;
            }
            if first > from
                && let Some(end) = previous(first)
            {
                list.push((from, end));
            }
            start = next(last);
        }
        if let Some(from) = start
            && from <= cidr.1
        {
            list.push((from, cidr.1));
        }
        Self(list.into())
    }

    /// What is in any of these.
    #[must_use]
    pub fn union(all: &[Self]) -> Self {
        if let [one] = all {
            return one.clone();
        }
        let mut list: Vec<(IpAddr, IpAddr)> = all.iter().flat_map(|r| r.0.iter().copied()).collect();
        list.sort_unstable();
        let mut merged: Vec<(IpAddr, IpAddr)> = Vec::with_capacity(list.len());
        for (first, last) in list {
            match merged.last_mut() {
                // `next` stays in the family, so the end of IPv4 never touches the start of IPv6.
                Some((_, end)) if first <= *end || next(*end) == Some(first) => *end = (*end).max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged.into())
    }

    /// Whether an address is in it.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < address);
        self.0.get(at).is_some_and(|(first, _)| *first <= address)
    }

    /// The ranges that have an address in common with this one.
    pub(crate) fn overlapping(
        &self,
        first: IpAddr,
        last: IpAddr,
    ) -> impl Iterator<Item = (IpAddr, IpAddr)> + '_ {
        let at = self.0.partition_point(|(_, end)| *end < first);
        self.0[at..].iter().take_while(move |(start, _)| *start <= last).copied()
    }

    /// Whether there is none in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, first and last address each.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> + '_ {
        self.0.iter().copied()
    }
}

fn ends(cidr: IpNet) -> (IpAddr, IpAddr) {
    (cidr.network(), cidr.broadcast())
}

impl fmt::Display for AddressRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("a CIDR")
    }

    #[test]
    fn exceptions_are_cut_out_and_overlaps_merged() {
        let block = AddressRanges::block(net("10.0.0.7/24"), &[net("10.0.0.0/28"), net("10.0.0.8/29")]);
        assert_eq!(block.to_string(), "10.0.0.16-10.0.0.255");
        let all = AddressRanges::block(net("0.0.0.0/0"), &[net("10.0.0.0/8"), net("255.255.255.255/32")]);
        assert_eq!(all.to_string(), "0.0.0.0-9.255.255.255, 11.0.0.0-255.255.255.254");
        let both = AddressRanges::union(&[all, AddressRanges::block(net("10.0.0.0/9"), &[]), block]);
        assert_eq!(both.to_string(), "0.0.0.0-10.127.255.255, 11.0.0.0-255.255.255.254");
        let families = [net("::/0"), net("0.0.0.0/0")].map(|n| AddressRanges::block(n, &[]));
        assert_eq!(AddressRanges::union(&families).iter().count(), 2, "the families do not merge");
        assert!(AddressRanges::block(net("10.0.0.0/24"), &[net("10.0.0.0/8")]).is_empty());
    }

    proptest! {
        #[test]
        fn an_address_is_in_a_block_and_in_no_exception(
            blocks in prop::collection::vec((0_u8..32, 26_u8..=32, prop::collection::vec((0_u8..32,
                27_u8..=32), 0..4)), 0..4)
        ) {
            let cidr = |(low, length): (u8, u8)| IpNet::new([10, 0, 0, low].into(), length).expect("a CIDR");
            let built: Vec<AddressRanges> = blocks.iter().map(|(low, length, except)| {
                let except: Vec<IpNet> = except.iter().copied().map(cidr).collect();
                AddressRanges::block(cidr((*low, *length)), &except)
            }).collect();
            let union = AddressRanges::union(&built);
            for low in 0..70 {
                let address: IpAddr = [10, 0, 0, low].into();
                let inside = blocks.iter().any(|(l, n, except)| {
                    cidr((*l, *n)).contains(&address) && !except.iter().any(|e| cidr(*e).contains(&address))
                });
                prop_assert_eq!(union.contains(address), inside, "{}", address);
            }
        }
    }
}
