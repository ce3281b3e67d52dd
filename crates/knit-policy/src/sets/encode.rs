//! From "this traffic is allowed" to as few elements as say so.

use super::element::{Decision, TrafficKey};
use crate::model::{PortRanges, Ports, Protocol};

/// Ranges of up to this many ports become one element for each port, which are cheap to look up and to
/// delete; wider ones become one element of a set of intervals, which is not.
const EXPANDED: u32 = 64;
/// As long as all of a protocol together become so many elements. Whoever lists thousands of ranges gets one
/// element for each.
const MOST_EXPANDED: usize = 256;

/// What some traffic means, narrowest first.
pub(super) type Encoded = Vec<(TrafficKey, Decision)>;

/// What is allowed whoever the other side is, apart from what happens to traffic that no element names: that
/// is what happens to protocols without ports.
pub(super) fn for_anybody(allowed: &Ports) -> (Decision, Encoded) {
    let mut encoded = Encoded::new();
    let rest = if allowed.other { PortRanges::all() } else { PortRanges::default() };
    for protocol in Protocol::ALL {
        of_protocol(protocol, allowed.ranges(protocol), &rest, &mut encoded);
    }
    encoded.sort_unstable();
    (Decision::accept_if(allowed.other), encoded)
}

/// What is allowed for a class, where it differs from what is allowed for anybody.
pub(super) fn for_class(allowed: &Ports, anybody: &Ports) -> Encoded {
    let mut encoded = Encoded::new();
    if allowed == anybody {
        return encoded;
    }
    if allowed.is_all() || allowed.is_empty() {
        return vec![(TrafficKey::All, Decision::accept_if(allowed.other))];
    }
    let wide = allowed.other != anybody.other;
    if wide {
        encoded.push((TrafficKey::All, Decision::accept_if(allowed.other)));
    }
    let rest = if allowed.other { PortRanges::all() } else { PortRanges::default() };
    for protocol in Protocol::ALL {
        let base = if wide { &rest } else { anybody.ranges(protocol) };
        of_protocol(protocol, allowed.ranges(protocol), base, &mut encoded);
    }
    encoded.sort_unstable();
    encoded
}

/// One protocol, where without further elements `base` would be allowed.
fn of_protocol(protocol: Protocol, allowed: &PortRanges, base: &PortRanges, encoded: &mut Encoded) {
    let mostly = |ranges: &PortRanges| ranges.len() > u32::from(u16::MAX) / 2;
    if allowed == base {
        return;
    }
    let (more, less) = if mostly(allowed) == mostly(base) {
        (allowed.difference(base), base.difference(allowed))
    } else {
        let most = mostly(allowed);
        encoded.push((TrafficKey::Protocol(protocol), Decision::accept_if(most)));
        if most {
            (PortRanges::default(), allowed.complement())
        } else {
            (allowed.clone(), PortRanges::default())
        }
    };
    let expand = expanded(&more) + expanded(&less) <= MOST_EXPANDED;
    for (ranges, decision) in [(more, Decision::Accept), (less, Decision::Drop)] {
        for (first, last) in ranges.iter() {
            if first == last || (expand && is_narrow(first, last)) {
                encoded.extend((first..=last).map(|port| (TrafficKey::Port(protocol, port), decision)));
            } else {
                encoded.push((TrafficKey::Range(protocol, first, last), decision));
            }
        }
    }
}

fn is_narrow(first: u16, last: u16) -> bool {
    u32::from(last - first) < EXPANDED
}

/// How many elements ranges become if narrow ones are expanded.
fn expanded(ranges: &PortRanges) -> usize {
    let one =
        |(first, last): (u16, u16)| if is_narrow(first, last) { usize::from(last - first) + 1 } else { 1 };
    ranges.iter().map(one).sum()
}

#[cfg(any(test, feature = "kubernetes"))]
/// How many elements it takes to say that these ports are allowed.
pub(crate) fn elements_of(ports: &Ports) -> usize {
    let of_protocol = |protocol| {
        let ranges = ports.ranges(protocol);
        let expanded = expanded(ranges);
        if expanded <= MOST_EXPANDED { expanded } else { ranges.iter().count() }
    };
    Protocol::ALL.into_iter().map(of_protocol).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_narrow_ranges_are_a_thousand_elements() {
        let narrow = |count: u16| {
            let ranges = (0..count).map(|n| (n * 64 + 1, n * 64 + 20));
            Ports::of(Protocol::Tcp, PortRanges::of(ranges))
        };
        for (ports, elements) in [(narrow(3), 60), (narrow(1000), 1000)] {
            let (_, encoded) = for_anybody(&ports);
            assert_eq!((encoded.len(), elements_of(&ports)), (elements, elements));
        }
    }
}
