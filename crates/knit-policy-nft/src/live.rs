//! Live connections: which of them policies no longer allow, and which they allow again.

use std::collections::BTreeSet;
use std::net::IpAddr;

use knit_kernel::conntrack::{self, Conntrack, Filter, Flow, L4, TupleFilter};
use knit_policy::model::{Protocol, Traffic};

use crate::layout::CUT;

/// A connection as policies see it: after service addresses were translated, before source addresses were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// Who began it.
    pub source: IpAddr,
    /// Who answers.
    pub destination: IpAddr,
    /// What its first packet carried.
    pub traffic: Traffic,
}

/// Which connections a change is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Touched {
    /// None.
    #[default]
    Nothing,
    /// Those that are cut: some of them may go on.
    Cut,
    /// Those of these addresses, on either side, and those that are cut.
    Addresses(BTreeSet<IpAddr>),
    /// Any.
    All,
}

/// What became of live connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Followed {
    /// So many were cut.
    pub cut: usize,
    /// So many may go on.
    pub resumed: usize,
}

/// What is to be done about flows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan<'a> {
    /// To get the bit.
    pub cut: Vec<&'a Flow>,
    /// To lose it.
    pub resume: Vec<&'a Flow>,
}

impl Connection {
    /// The connection that a flow of the router's connection tracking is.
    #[must_use]
    pub fn of(flow: &Flow) -> Self {
        // The answers come from where the first packet went in the end, and from that port.
        let traffic = match (flow.original.l4, flow.reply.l4) {
            (L4::Ports { protocol, .. }, L4::Ports { src, .. }) => {
                let known = Protocol::ALL.into_iter().find(|known| known.number() == protocol);
                known.map_or(Traffic::Other, |protocol| Traffic::Port(protocol, src))
            }
            (L4::Icmp { protocol: 58, kind, .. }, _) => Traffic::Icmpv6(kind),
            _ => Traffic::Other,
        };
        Self { source: flow.original.src, destination: flow.reply.src, traffic }
    }
}

impl Touched {
    /// Whether it is about no connection at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::Nothing
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nothing, touched) | (touched, Self::Nothing) => touched,
            (Self::Cut, touched) | (touched, Self::Cut) => touched,
            (Self::Addresses(mut some), Self::Addresses(more)) => {
                some.extend(more);
                Self::Addresses(some)
            }
            (Self::All, _) | (_, Self::All) => Self::All,
        }
    }

    fn contains(&self, address: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::Addresses(some) => some.contains(&address),
            Self::Nothing | Self::Cut => false,
        }
    }
}

impl Plan<'_> {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cut.is_empty() && self.resume.is_empty()
    }
}

/// Compares flows with what is allowed: pure logic. Those that carry the bit are always looked at, the others
/// if they are touched.
pub fn plan<'a>(
    flows: impl IntoIterator<Item = &'a Flow>,
    touched: &Touched,
    allowed: impl Fn(&Connection) -> bool,
) -> Plan<'a> {
    let mut plan = Plan::default();
    for flow in flows {
        match fate(flow, touched, &allowed) {
            Fate::Cut => plan.cut.push(flow),
            Fate::Resume => plan.resume.push(flow),
            Fate::Stay => {}
        }
    }
    plan
}

/// What is to become of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Stay,
    Cut,
    Resume,
}

pub(crate) fn fate(flow: &Flow, touched: &Touched, allowed: impl Fn(&Connection) -> bool) -> Fate {
    let connection = Connection::of(flow);
    let is_cut = flow.mark & CUT != 0;
    let of_interest =
        is_cut || touched.contains(connection.source) || touched.contains(connection.destination);
    if !of_interest {
        return Fate::Stay;
    }
    match (is_cut, connection.traffic.always_passes() || allowed(&connection)) {
        (false, false) => Fate::Cut,
        (true, true) => Fate::Resume,
        _ => Fate::Stay,
    }
}

/// The flows that are cut, and of those that may be touched the ones to keep.
pub(crate) fn flows(
    conntrack: &mut Conntrack,
    touched: &Touched,
    keep: impl Fn(&Flow) -> bool,
) -> conntrack::Result<Vec<Flow>> {
    /// Each filter is a walk through the kernel's whole table: beyond a few, one that sees all is cheaper.
    const MAX_FILTERS: usize = 4;
    let nobody = BTreeSet::new();
    let addresses = match touched {
        Touched::Addresses(addresses) if addresses.len() <= MAX_FILTERS => addresses,
        Touched::Nothing | Touched::Cut => &nobody,
        Touched::Addresses(_) | Touched::All => {
            return conntrack.list_where(&Filter::all(), |flow| flow.mark & CUT != 0 || keep(flow));
        }
    };
    let mut flows = conntrack.list(&Filter::all().mark(CUT, CUT))?;
    for address in addresses {
        let of = || Filter::family_of(*address);
        let tuple = || TupleFilter::new().src(*address);
        // Whoever began it, and whoever answers. What carries the bit is in the list already.
        for filter in [of().original(tuple()), of().reply(tuple())] {
            flows.extend(conntrack.list_where(&filter.mark(0, CUT), &keep)?);
        }
    }
    flows.sort_by_key(|flow| (flow.original, flow.zone));
    flows.dedup_by(|a, b| a.original == b.original && a.zone == b.zone);
    Ok(flows)
}

#[cfg(test)]
mod tests {
    use knit_kernel::conntrack::{Status, Tuple};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn flow(original: Tuple, reply: Tuple, mark: u32) -> Flow {
        Flow {
            original,
            reply,
            status: Status::default(),
            mark,
            zone: 0,
            timeout: None,
            id: None,
            tcp_state: None,
        }
    }

    #[test]
    fn a_connection_is_seen_between_both_translations() {
        let (pod, service, endpoint, node) =
            (ip("10.0.0.1"), ip("10.96.0.1"), ip("10.0.0.2"), ip("192.0.2.1"));
        let original = Tuple::new(6, (pod, 40000), (service, 80));
        let reply = Tuple::new(6, (endpoint, 8080), (node, 50000));
        let seen = Connection::of(&flow(original, reply, 0));
        assert_eq!((seen.source, seen.destination), (pod, endpoint));
        assert_eq!(seen.traffic, Traffic::Port(Protocol::Tcp, 8080));
    }

    #[test]
    fn only_what_is_touched_or_cut_is_asked_about() {
        let pair = |a: &str, b: &str, mark| {
            let original = Tuple::new(17, (ip(a), 5), (ip(b), 53));
            flow(original, original.reversed(), mark)
        };
        let flows = [
            pair("10.0.0.1", "10.0.0.2", 0x10),
            pair("10.0.0.3", "10.0.0.1", CUT),
            pair("10.0.0.4", "10.0.0.5", CUT | 0x10),
            pair("10.0.0.6", "10.0.0.7", 0),
        ];
        let touched = Touched::Addresses([ip("10.0.0.1")].into());
        let denied = plan(&flows, &touched, |_| false);
        assert_eq!(denied.cut, [&flows[0]]);
        assert_eq!(denied.resume, [] as [&Flow; 0]);
        let allowed = plan(&flows, &touched, |_| true);
        assert_eq!(allowed.cut, [] as [&Flow; 0]);
        assert_eq!(allowed.resume, [&flows[1], &flows[2]]);
        assert_eq!(plan(&flows, &Touched::All, |_| false).cut, [&flows[0], &flows[3]]);
    }

    #[test]
    fn neighbour_discovery_is_never_cut() {
        let original = Tuple {
            src: ip("fd00::1"),
            dst: ip("fd00::2"),
            l4: L4::Icmp { protocol: 58, id: 0, kind: 135, code: 0 },
        };
        let flows = [flow(original, original.reversed(), 0)];
        assert!(plan(&flows, &Touched::All, |_| false).is_empty());
    }
}
