//! Sets of ports: which ports of which protocol, and whether traffic without ports belongs to it.

use std::fmt;

use super::{Protocol, Traffic};

/// Port numbers of one protocol, as ranges: sorted, apart from each other, both ends included.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRanges(Vec<(u16, u16)>);

/// Which traffic: ports of each protocol, and the rest of IP.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    by_protocol: [PortRanges; 3],
    /// ICMP and every other protocol without ports.
    pub other: bool,
}

// === impl PortRanges ===

impl PortRanges {
    /// Every port.
    #[must_use]
    pub fn all() -> Self {
        Self(vec![(0, u16::MAX)])
    }

    /// From one port to another, both included; nothing if they are the wrong way round.
    #[must_use]
    pub fn range(first: u16, last: u16) -> Self {
        if first <= last { Self(vec![(first, last)]) } else { Self::default() }
    }

    /// All of these, each as [`Self::range`] has it.
    #[must_use]
    pub fn of(ranges: impl IntoIterator<Item = (u16, u16)>) -> Self {
        Self(ranges.into_iter().filter(|(first, last)| first <= last).collect()).union(&Self::default())
    }

    /// Whether there is none in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all are in it.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.0 == [(0, u16::MAX)]
    }

    /// The ranges.
    pub fn iter(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        self.0.iter().copied()
    }

    /// How many ports are in it.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.0.iter().map(|(first, last)| u32::from(last - first) + 1).sum()
    }

    /// Whether a port is in it.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < port);
        self.0.get(at).is_some_and(|(first, _)| *first <= port)
    }

    /// What is in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all: Vec<(u16, u16)> = self.0.iter().chain(&other.0).copied().collect();
        all.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::with_capacity(all.len());
        for (first, last) in all {
            match merged.last_mut() {
                Some((_, end)) if u32::from(first) <= u32::from(*end) + 1 => *end = (*end).max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// What is not in it.
    #[must_use]
    pub fn complement(&self) -> Self {
        let mut rest = Vec::with_capacity(self.0.len() + 1);
        let mut next = 0_u32;
        for (first, last) in &self.0 {
            if let Some(before) = first.checked_sub(1)
                && next <= u32::from(before)
            {
                // `next` is at most a u16 here, because it is not above `before`.
                rest.push((next as u16, before));
            }
            next = u32::from(*last) + 1;
        }
        if let Ok(next) = u16::try_from(next) {
            rest.push((next, u16::MAX));
        }
        Self(rest)
    }

    /// What is in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut at, mut found) = (0, Vec::new());
        for (first, last) in &self.0 {
            while other.0.get(at).is_some_and(|(_, end)| end < first) {
                at += 1;
            }
            let overlapping = other.0[at..].iter().take_while(|(start, _)| start <= last);
            found.extend(overlapping.map(|(start, end)| (*first.max(start), *last.min(end))));
        }
        Self(found)
    }

    /// What is in it and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        if self.is_empty() || other.is_empty() {
            return self.clone();
        }
        self.intersection(&other.complement())
    }
}

// === impl Ports ===

impl Ports {
    /// All traffic, protocols without ports included.
    #[must_use]
    pub fn all() -> Self {
        Self { by_protocol: [PortRanges::all(), PortRanges::all(), PortRanges::all()], other: true }
    }

    /// No traffic.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// These ports of one protocol.
    #[must_use]
    pub fn of(protocol: Protocol, ranges: PortRanges) -> Self {
        let mut ports = Self::none();
        ports.by_protocol[protocol as usize] = ranges;
        ports
    }

    /// What is in any of these.
    #[must_use]
    pub fn of_all(all: &[&Self]) -> Self {
        let of_protocol = |p: usize| PortRanges::of(all.iter().flat_map(|ports| ports.by_protocol[p].iter()));
        Self { by_protocol: std::array::from_fn(of_protocol), other: all.iter().any(|ports| ports.other) }
    }

    /// Its ports of one protocol.
    #[must_use]
    pub fn ranges(&self, protocol: Protocol) -> &PortRanges {
        &self.by_protocol[protocol as usize]
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.other && self.by_protocol.iter().all(PortRanges::is_empty)
    }

    /// Whether everything is in it.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.other && self.by_protocol.iter().all(PortRanges::is_all)
    }

    /// Whether this traffic is in it.
    #[must_use]
    pub fn contains(&self, traffic: Traffic) -> bool {
        match traffic {
            Traffic::Port(protocol, port) => self.ranges(protocol).contains(port),
            Traffic::Icmpv6(_) | Traffic::Other => self.other,
        }
    }

    /// What is in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self {
            by_protocol: std::array::from_fn(|p| self.by_protocol[p].union(&other.by_protocol[p])),
            other: self.other || other.other,
        }
    }

    /// What is in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self {
            by_protocol: std::array::from_fn(|p| self.by_protocol[p].intersection(&other.by_protocol[p])),
            other: self.other && other.other,
        }
    }

    /// What is in it and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        Self {
            by_protocol: std::array::from_fn(|p| self.by_protocol[p].difference(&other.by_protocol[p])),
            other: self.other && !other.other,
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("everything");
        }
        let mut parts = Vec::new();
        for protocol in Protocol::ALL {
            let ranges = self.ranges(protocol);
            if ranges.is_all() {
                parts.push(format!("{protocol}"));
                continue;
            }
            parts.extend(ranges.iter().map(|(first, last)| {
                if first == last {
                    format!("{protocol} {first}")
                } else {
                    format!("{protocol} {first}-{last}")
                }
            }));
        }
        if self.other {
            parts.push("other protocols".to_owned());
        }
        f.write_str(if parts.is_empty() { "nothing" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = PortRanges> {
        let edge = prop_oneof![0_u16..12, 65524_u16..=65535];
        prop::collection::vec((edge.clone(), edge), 0..5).prop_map(|list| {
            list.iter().fold(PortRanges::default(), |all, (a, b)| {
                all.union(&PortRanges::range(*a.min(b), *a.max(b)))
            })
        })
    }

    proptest! {
        #[test]
        fn operations_are_those_of_sets(a in ranges(), b in ranges()) {
            let (union, both, without) = (a.union(&b), a.intersection(&b), a.difference(&b));
            for port in (0..20).chain(65500..=65535) {
                let (x, y) = (a.contains(port), b.contains(port));
                prop_assert_eq!(union.contains(port), x || y);
                prop_assert_eq!(both.contains(port), x && y);
                prop_assert_eq!(without.contains(port), x && !y);
                prop_assert_eq!(a.complement().contains(port), !x);
            }
            // One set has one form, so that sets can be compared.
            prop_assert_eq!(&a.complement().complement(), &a);
            prop_assert_eq!(union.len(), a.len() + b.difference(&a).len());
            prop_assert_eq!(both.union(&without), a);
        }
    }
}
