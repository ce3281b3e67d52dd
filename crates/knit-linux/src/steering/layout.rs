//! What the table of steering looks like: its chains and rules, and what an entrance is in its sets.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use knit_nft::{
    AddrType, Chain, ChainKind, CtDirection, Data, Element, ElementValue, Family as TableFamily, FibFlags,
    Hook, HopLimit, IcmpxCode, Key, L4Proto, Mark, NatFlags, NfProto, Port, Reg, Reject, Rule, Set, SetState,
    Table, TableId, TableState, Verdict, field,
};
use knit_runtime::Protocol;
use knit_runtime::routers::{Chosen, Entrance, Steered, Way};
use knit_types::Family;

use crate::rules::{HANDED, STEERED, from_ours};
use crate::uplink::NODE_END_PREFIX;

/// After ports of the node that pods have, before service proxies.
const BEFORE_PROXIES: i32 = -105;
/// Before ports of the node that pods have.
const BEFORE_HOST_PORTS: i32 = -115;
/// Before anybody else's translation of sources.
const BEFORE_SRCNAT: i32 = 90;
/// After all of them.
const AFTER_SRCNAT: i32 = 110;

/// How many routers a packet may still pass that is handed over to another node. Nobody begins with a number
/// between this and [`HANDED_LEAST`], and a packet that left with 255 does not get there within a cluster: so
/// it says to the other node that the packet was handed over already.
const HANDED_HOPS: HopLimit = HopLimit(200);
/// So many are left after the longest way between two nodes.
const HANDED_LEAST: HopLimit = HopLimit(161);

/// Into how many parts connections are divided, by a hash.
const PARTS: u32 = Way::MOST_NODES as u32;

const ORIGINAL: CtDirection = CtDirection(0);

pub(super) const CHOSEN: [Chosen; 4] =
    [Chosen::ByOperator, Chosen::OnNode, Chosen::ByProvider, Chosen::ByTenant];

/// The sets of one family and one kind of entrance.
pub(super) struct Sets {
    /// `address . protocol . port : address . port`
    steer: Set,
    /// `address . protocol . port . part : address . port`, of other nodes.
    handed: Set,
    /// The same for the node itself and its pods, which are looked for first.
    near: Set,
    /// `address . protocol . port : verdict`
    refused: Set,
    /// Entrances that not everybody may use, and `address . protocol . port . source`; none where everybody
    /// may.
    checked: Option<(Set, Set)>,
}

/// How the sets of a kind of entrance are called.
fn name(chosen: Chosen) -> &'static str {
    match chosen {
        Chosen::ByOperator => "node",
        Chosen::OnNode => "on-node",
        Chosen::ByProvider => "balanced",
        Chosen::ByTenant => "external",
    }
}

/// The whole table.
pub(super) fn state(id: &TableId, wanted: &BTreeMap<Entrance, Steered>) -> TableState {
    let table = Table::new(id.clone()).comment("what leads into routers, written by knit-proxy");
    let mut state = TableState::new(table);
    for chosen in CHOSEN {
        for sets in Family::ALL.map(|family| Sets::of(family, chosen)) {
            for set in [sets.steer, sets.handed, sets.near, sets.refused] {
                state = state.set(set, []);
            }
            if let Some((checked, sources)) = sets.checked {
                state = state.set(checked, []).set(sources, []);
            }
        }
    }
    let local = || Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL);
    let not_local = || local().ret().comment("an address of this node");
    let of_routers = || {
        let rule = from_ours(Rule::new()).begins_with(&field::iifname(), NODE_END_PREFIX);
        rule.ret().comment("another Network's")
    };
    let and_by_provider = |rules: fn(Chosen) -> Vec<Rule>| {
        let by_provider = [not_local()].into_iter().chain(rules(Chosen::ByProvider));
        rules(Chosen::ByOperator).into_iter().chain(by_provider).collect::<Vec<_>>()
    };
    let own_pods = |chain: &'static str| from_ours(Rule::new()).jump(chain).comment("pods");
    let mut state = state
        .chain(
            Chain::base("first-in", ChainKind::Nat, Hook::Prerouting, BEFORE_HOST_PORTS),
            [of_routers(), own_pods("near-on-node"), Rule::new().jump("on-node")],
        )
        .chain(
            Chain::base("first-out", ChainKind::Nat, Hook::Output, BEFORE_HOST_PORTS),
            [Rule::new().jump("near-on-node"), Rule::new().jump("on-node")],
        )
        .chain(Chain::regular("near-on-node"), near_rules(Chosen::OnNode))
        .chain(Chain::regular("on-node"), rules(Chosen::OnNode))
        .chain(
            Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, BEFORE_PROXIES),
            [
                of_routers(),
                own_pods("near"),
                Rule::new().jump("steer"),
                from_ours(Rule::new()).ret().comment("pods"),
                local().ret().comment("an address of this node"),
                Rule::new().jump("external"),
            ],
        )
        .chain(
            Chain::base("output", ChainKind::Nat, Hook::Output, BEFORE_PROXIES),
            [Rule::new().jump("near"), Rule::new().jump("steer")],
        )
        .chain(Chain::regular("near"), and_by_provider(near_rules))
        .chain(Chain::regular("steer"), and_by_provider(rules))
        .chain(Chain::regular("external"), rules(Chosen::ByTenant))
        .chain(Chain::regular("refuse"), refuse())
        .chain(
            Chain::base("handed", ChainKind::Nat, Hook::Postrouting, BEFORE_SRCNAT),
            [was_handed()
                .masquerade(NatFlags { fully_random: true, ..NatFlags::default() })
                .comment("answers come back by this node")],
        )
        .chain(
            Chain::base("handed-hops", ChainKind::Filter, Hook::Postrouting, AFTER_SRCNAT),
            [NfProto::IPV4, NfProto::IPV6].map(|family| {
                let rule = was_handed().eq(field::ct_direction(), &ORIGINAL).eq(field::nfproto(), &family);
                if family == NfProto::IPV4 {
                    rule.set_ttl(HANDED_HOPS)
                } else {
                    rule.set_hoplimit(HANDED_HOPS)
                }
            }),
        );
    for (entrance, to) in wanted {
        let sets = Sets::of(Family::of(entrance.address), to.chosen);
        for (set, elements) in elements(&sets, entrance, to) {
            let empty = || SetState { set: set.clone(), elements: BTreeMap::new() };
            state.sets.entry(set.name.clone()).or_insert_with(empty).extend(elements);
        }
    }
    state
}

/// A packet of a connection that this node hands over.
fn was_handed() -> Rule {
    Rule::new().masked_eq(field::ct_mark(), &Mark(HANDED), &Mark(HANDED))
}

fn refuse() -> Vec<Rule> {
    vec![
        Rule::new().eq(field::l4proto(), &L4Proto::TCP).reject(Reject::TcpReset),
        Rule::new().reject(Reject::Icmpx(IcmpxCode::PortUnreachable)),
    ]
}

fn v4() -> Rule {
    Rule::new().eq(field::nfproto(), &NfProto::IPV4)
}

fn v6() -> Rule {
    Rule::new().eq(field::nfproto(), &NfProto::IPV6)
}

/// Where results of maps are: beyond the registers that setting a mark needs.
fn result() -> Reg {
    Reg::new(8).expect("there are sixteen registers")
}

fn rules(chosen: Chosen) -> Vec<Rule> {
    let at = result();
    let (protocol, port) = (field::l4proto, field::th_dport);
    let at4 = (field::ip_daddr(), protocol(), port());
    let at6 = (field::ip6_daddr(), protocol(), port());
    let from4 = (field::ip_daddr(), protocol(), port(), field::ip_saddr());
    let from6 = (field::ip6_daddr(), protocol(), port(), field::ip6_saddr());
    let steer = |rule: Rule| rule.set_ct_mark_bits(STEERED, STEERED);
    let [sets4, sets6] = Family::ALL.map(|family| Sets::of(family, chosen));
    let mut rules = Vec::new();
    if let (Some((checked4, sources4)), Some((checked6, sources6))) = (sets4.checked, sets6.checked) {
        rules.push(v4().in_set(&at4, checked4.name).not_in_set(&from4, sources4.name).drop());
        rules.push(v6().in_set(&at6, checked6.name).not_in_set(&from6, sources6.name).drop());
    }
    rules.push(steer(v4().map_at(at, &at4, sets4.steer.name)).dnat_at(TableFamily::Ip, at));
    rules.push(steer(v6().map_at(at, &at6, sets6.steer.name)).dnat_at(TableFamily::Ip6, at));
    rules.extend(hand_over(&sets4.handed, &sets6.handed));
    rules.push(v4().vmap(&at4, sets4.refused.name));
    rules.push(v6().vmap(&at6, sets6.refused.name));
    rules
}

/// The same for the node itself and its pods.
fn near_rules(chosen: Chosen) -> Vec<Rule> {
    let [sets4, sets6] = Family::ALL.map(|family| Sets::of(family, chosen));
    hand_over(&sets4.near, &sets6.near).into()
}

/// Hands connections over to other nodes, but none that was handed over to this one: two nodes that each take
/// the other for one with a router would play with it.
fn hand_over(set4: &Set, set6: &Set) -> [Rule; 4] {
    let at = result();
    let part = || field::symhash(PARTS);
    let at4 = (field::ip_daddr(), field::l4proto(), field::th_dport(), part());
    let at6 = (field::ip6_daddr(), field::l4proto(), field::th_dport(), part());
    let again4 = v4().between(field::ip_ttl(), &HANDED_LEAST, &HANDED_HOPS);
    let again6 = v6().between(field::ip6_hoplimit(), &HANDED_LEAST, &HANDED_HOPS);
    let hand = |rule: Rule| rule.set_ct_mark_bits(HANDED, HANDED);
    [
        again4.map_at(at, &at4, set4.name.clone()).goto("refuse").comment("handed over already"),
        again6.map_at(at, &at6, set6.name.clone()).goto("refuse"),
        hand(v4().map_at(at, &at4, set4.name.clone())).dnat_at(TableFamily::Ip, at),
        hand(v6().map_at(at, &at6, set6.name.clone())).dnat_at(TableFamily::Ip6, at),
    ]
}

// === impl Sets ===

impl Sets {
    pub(super) fn of(family: Family, chosen: Chosen) -> Self {
        type Place<A> = (A, L4Proto, Port);
        type Part<A> = (A, L4Proto, Port, Mark);
        let digit = if family == Family::V4 { '4' } else { '6' };
        let name = |what: &str| format!("{}{what}{digit}", name(chosen));
        let parts = |what: &str| match family {
            Family::V4 => Set::map::<Part<Ipv4Addr>, (Ipv4Addr, Port)>(name(what)),
            Family::V6 => Set::map::<Part<Ipv6Addr>, (Ipv6Addr, Port)>(name(what)),
        };
        let steer = match family {
            Family::V4 => Set::map::<Place<Ipv4Addr>, (Ipv4Addr, Port)>(name("")),
            Family::V6 => Set::map::<Place<Ipv6Addr>, (Ipv6Addr, Port)>(name("")),
        };
        let refused = match family {
            Family::V4 => Set::verdict_map::<Place<Ipv4Addr>>(name("-refused")),
            Family::V6 => Set::verdict_map::<Place<Ipv6Addr>>(name("-refused")),
        };
        let checked = || match family {
            Family::V4 => Set::of::<Place<Ipv4Addr>>(name("-checked")),
            Family::V6 => Set::of::<Place<Ipv6Addr>>(name("-checked")),
        };
        let sources = || match family {
            Family::V4 => Set::of::<(Ipv4Addr, L4Proto, Port, Ipv4Addr)>(name("-sources")).interval(),
            Family::V6 => Set::of::<(Ipv6Addr, L4Proto, Port, Ipv6Addr)>(name("-sources")).interval(),
        };
        // Rule 43 is about load balancers.
        let checked = (chosen != Chosen::ByTenant).then(|| (checked(), sources()));
        Self { steer, handed: parts("-handed"), near: parts("-near"), refused, checked }
    }
}

/// What an entrance is in the kernel, in the order in which it is written. Addresses of another family lead
/// nowhere.
pub(super) fn elements<'a>(
    sets: &'a Sets,
    entrance: &Entrance,
    to: &Steered,
) -> Vec<(&'a Set, Vec<Element>)> {
    let (protocol, port) = (number(entrance.protocol), Port(entrance.port));
    let key = match entrance.address {
        IpAddr::V4(address) => (address, protocol, port).data(),
        IpAddr::V6(address) => (address, protocol, port).data(),
    };
    let mut ways: Vec<(&Set, Vec<Element>)> = Vec::new();
    match &to.to {
        Way::Router(at) => {
            let data = target(entrance.address, *at).into_iter();
            ways.push((&sets.steer, data.map(|data| leads(key.clone(), data)).collect()));
        }
        Way::Nodes(nodes) => ways.push((&sets.handed, parts(entrance, nodes))),
        Way::Rejected => {
            let verdict = Element::from_data(key.clone()).verdict(Verdict::Goto("refuse".into()));
            ways.push((&sets.refused, vec![verdict]));
        }
        Way::Dropped => {
            ways.push((&sets.refused, vec![Element::from_data(key.clone()).verdict(Verdict::Drop)]));
        }
    }
    ways.extend(to.near.as_deref().map(|nodes| (&sets.near, parts(entrance, nodes))));
    ways.retain(|(_, elements)| !elements.is_empty());
    let mut all = Vec::new();
    if !ways.is_empty()
        && let (Some(sources), Some((checked, allowed))) = (&to.sources, &sets.checked)
    {
        let same = |range: &&IpNet| Family::of_net(**range) == Family::of(entrance.address);
        let ranges: Vec<IpNet> = sources.iter().filter(same).copied().collect();
        let ranges: Vec<Element> =
            IpNet::aggregate(&ranges).into_iter().map(|range| allowed_from(&key, range)).collect();
        if !ranges.is_empty() {
            all.push((allowed, ranges));
        }
        all.push((checked, vec![Element::from_data(key)]));
    }
    all.extend(ways);
    all
}

/// One element for each part of the connections: whatever part a connection is in, it leads somewhere.
fn parts(entrance: &Entrance, nodes: &[SocketAddr]) -> Vec<Element> {
    let targets: Vec<Data> =
        nodes.iter().take(Way::MOST_NODES).filter_map(|at| target(entrance.address, *at)).collect();
    let (protocol, port) = (number(entrance.protocol), Port(entrance.port));
    let one = |(part, data): (u32, Data)| {
        let key = match entrance.address {
            IpAddr::V4(address) => (address, protocol, port, Mark(part)).data(),
            IpAddr::V6(address) => (address, protocol, port, Mark(part)).data(),
        };
        leads(key, data)
    };
    (0..PARTS).zip(targets.iter().cycle().cloned()).map(one).collect()
}

fn leads(key: Data, to: Data) -> Element {
    let mut element = Element::from_data(key);
    element.value = ElementValue::Data(to);
    element
}

/// Where something leads, if that is of the entrance's family.
fn target(entrance: IpAddr, to: SocketAddr) -> Option<Data> {
    match (entrance, to) {
        (IpAddr::V4(_), SocketAddr::V4(to)) => Some((*to.ip(), Port(to.port())).data()),
        (IpAddr::V6(_), SocketAddr::V6(to)) => Some((*to.ip(), Port(to.port())).data()),
        _ => None,
    }
}

/// Those of a range may come to an entrance.
fn allowed_from(entrance: &Data, range: IpNet) -> Element {
    let end = |address| {
        let mut data = entrance.clone();
        match address {
            IpAddr::V4(v4) => data.push(&v4.octets()),
            IpAddr::V6(v6) => data.push(&v6.octets()),
        }
        data
    };
    let mut element = Element::from_data(end(range.network()));
    element.key_end = Some(Box::new(end(range.broadcast())));
    element
}

fn number(protocol: Protocol) -> L4Proto {
    match protocol {
        Protocol::Tcp => L4Proto::TCP,
        Protocol::Udp => L4Proto::UDP,
        Protocol::Sctp => L4Proto::SCTP,
    }
}
