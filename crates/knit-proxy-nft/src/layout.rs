//! The table: its sets, its fixed chains, and the small chains of behaviours.
//!
//! A packet's way through it: `prerouting` or `output` jump to `services`, which looks up `address . protocol . port`
//! in `frontends` and gets the number of a behaviour; `dispatch` goes to that one's chain, which `actions` has. The chain
//! draws a slot, and finds the endpoint in `endpoints` under the same key and the slot.
//!
//! Elements of `frontends` and `endpoints` hold plain values. A map of verdicts instead of numbers would save a lookup,
//! but each element written to one makes the kernel walk through all of it (half a millisecond with 10,000 services);
//! here only a behaviour that nobody had before does that. From one rule to the next the number travels in the packet's
//! priority, which is cleared again at once: of a connection to a service, the first packet has no priority of its own.
//! (One rule could do both lookups, but `nft` 1.0.6 aborts when it lists such a rule.)

use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::nft::expr::{CmpOp, LookupResult, MetaKey, SetRef};
use knit_kernel::nft::{
    AddrType, Chain, ChainKind, ChainState, CtStatus, DynsetOp, Element, Expr, FibFlags, Field, Hook, IfName,
    L4Proto, Mark, Name, NatFlags, Port, Reg, Reject, Rule, RuleState, Scalar, Set, SetState, Table, TableId,
    TableState, field,
};
use knit_proxy::model::Family;
use knit_proxy::view::{Masquerade, NodePortMatch, NodeSettings, PodTraffic, Scope};

use crate::backend::{Config, MasqueradeAs};
use crate::behaviour::{Behaviour, LOCAL_SLOTS, Leaf};
use crate::ip::{self, Ip, V4, V6};

pub(crate) const DSTNAT: i32 = -100;
pub(crate) const SRCNAT: i32 = 100;

/// The sets of one table.
#[derive(Debug, Clone)]
pub(crate) struct Sets {
    /// `address . protocol . port : number of a behaviour`
    pub frontends: Set,
    /// `address . protocol . port : number of a service port`, of service ports with affinity.
    pub services: Set,
    /// `number of a behaviour : goto its chain`
    pub actions: Set,
    /// `address . protocol . port . slot : address . port`
    pub endpoints: Set,
    /// `number of a service port . client : address . port`, written by packets.
    pub affinity: Set,
    /// `number of a service port . scope . address . port`, of service ports with affinity.
    pub members: Set,
    /// `address . address` of this node's endpoints, which may call themselves.
    pub hairpin: Set,
    pub cluster_ips: Set,
    /// `address . protocol . port . source`
    pub sources: Set,
}

/// What is fixed for a table as long as the node's settings are.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub family: Family,
    pub id: TableId,
    pub sets: Sets,
    /// The mark bit of packets to masquerade.
    mark: u32,
    pods: PodTraffic,
    masquerade_as: MasqueradeAs,
    node_sources: Vec<IpNet>,
}

/// The packet's priority, which carries a number from one rule to the next.
const PRIORITY: MetaKey = MetaKey(2);

/// How many clients with affinity are remembered at once.
const AFFINITY_SIZE: u32 = 1 << 20;

impl Layout {
    pub(crate) fn new(family: Family, config: &Config, pods: PodTraffic) -> Self {
        let id = TableId::new(ip::table_family(family), config.table.as_str());
        let sets = match family {
            Family::V4 => sets::<V4>(),
            Family::V6 => sets::<V6>(),
        };
        let mark = config.masquerade_bit;
        let masquerade_as = config.masquerade_as.clone();
        let node_sources = config.node_sources.clone();
        Self { family, id, sets, mark, pods, masquerade_as, node_sources }
    }

    /// The table without any service.
    pub(crate) fn skeleton(&self, node: &NodeSettings) -> TableState {
        match self.family {
            Family::V4 => self.skeleton_of::<V4>(node),
            Family::V6 => self.skeleton_of::<V6>(node),
        }
    }

    fn skeleton_of<I: Ip>(&self, node: &NodeSettings) -> TableState {
        let s = &self.sets;
        let table = Table::new(self.id.clone()).comment("Kubernetes services, written by knit-proxy");
        let mut state = TableState::new(table);
        for set in [
            &s.frontends,
            &s.services,
            &s.actions,
            &s.endpoints,
            &s.affinity,
            &s.members,
            &s.hairpin,
            &s.cluster_ips,
            &s.sources,
        ] {
            state = state.set(set.clone(), []);
        }
        let to_services = || [Rule::new().jump("services")];
        state
            .chain(Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, DSTNAT), to_services())
            .chain(Chain::base("output", ChainKind::Nat, Hook::Output, DSTNAT), to_services())
            .chain(
                Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, SRCNAT),
                self.postrouting::<I>(),
            )
            .chain(Chain::regular("services"), self.services::<I>(node))
            .chain(Chain::regular("dispatch"), [self.dispatch()])
            .chain(Chain::regular("masquerade-unless-pod"), self.unless_pod::<I>())
            .chain(Chain::regular("reject"), reject::<I>())
            .chain(Chain::regular("drop"), [Rule::new().drop()])
    }

    fn services<I: Ip>(&self, node: &NodeSettings) -> Vec<Rule> {
        let act = |rule: Rule, key: &(Field<I::Address>, Field<L4Proto>, Field<Port>)| {
            rule.map(key, self.sets.frontends.name.clone())
                .expr(Expr::MetaSet { sreg: Reg::FIRST, key: PRIORITY })
                .goto("dispatch")
        };
        let mut rules = vec![act(Rule::new(), &key::<I>(false))];
        if *node.node_ports.get(self.family) == NodePortMatch::AnyLocal {
            let here = Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL).not_in_prefix(
                I::daddr(),
                I::LOOPBACK.0,
                I::LOOPBACK.1,
            );
            rules.push(act(here, &key::<I>(true)).comment("node ports"));
        }
        let exempt: Vec<_> = node.exempt.iter().filter(|a| Family::of(**a) == self.family).collect();
        if !exempt.is_empty() {
            let ranges = exempt.into_iter().map(|a| Element::prefix(*a, max_prefix(self.family))).collect();
            rules.push(ranges_rule::<I>(&I::daddr(), ranges).ret().comment("service addresses of others"));
        }
        rules.push(
            Rule::new()
                .in_set(&I::daddr(), self.sets.cluster_ips.name.clone())
                .goto("reject")
                .comment("no such port"),
        );
        let ranges = ranges(node.service_ranges.iter().copied(), self.family);
        if !ranges.is_empty() {
            rules.push(ranges_rule::<I>(&I::daddr(), ranges).drop().comment("no such service"));
        }
        rules
    }

    fn dispatch(&self) -> Rule {
        Rule::new().expr(Expr::Meta { dreg: Reg::FIRST, key: PRIORITY }).expr(Expr::Lookup {
            set: SetRef::Named(self.sets.actions.name.clone()),
            sreg: Reg::FIRST,
            result: LookupResult::Verdict,
        })
    }

    fn postrouting<I: Ip>(&self) -> Vec<Rule> {
        let marked = || Rule::new().any_of(field::mark(), &Mark(self.mark)).set_mark_bits(self.mark, 0);
        let hairpin = Rule::new()
            .any_of(field::ct_status(), &CtStatus::DNAT)
            .in_set(&(I::saddr(), I::daddr()), self.sets.hairpin.name.clone());
        let random = NatFlags::FULLY_RANDOM;
        let address = self.masquerade_as.addresses.iter().find(|a| Family::of(**a) == self.family);
        let towards = ranges(self.masquerade_as.towards.iter().copied(), self.family);
        let mut rules = Vec::new();
        let hairpin = match address {
            Some(address) if !towards.is_empty() => {
                let rule = ranges_rule::<I>(&I::daddr(), towards).any_of(field::mark(), &Mark(self.mark));
                rules.push(rule.set_mark_bits(self.mark, 0).snat_to(*address, random));
                hairpin.snat_to(*address, random)
            }
            _ => hairpin.masquerade(random),
        };
        rules.push(marked().masquerade(random));
        rules.push(hairpin.comment("endpoints that call themselves"));
        rules
    }

    fn unless_pod<I: Ip>(&self) -> Vec<Rule> {
        let mark = Rule::new().set_mark_bits(self.mark, self.mark);
        self.pods_rule::<I>().map(Rule::ret).into_iter().chain([mark]).collect()
    }

    /// A rule that matches traffic of this node's pods; none if it cannot be recognised.
    fn pods_rule<I: Ip>(&self) -> Option<Rule> {
        match &self.pods {
            PodTraffic::Unknown => None,
            PodTraffic::Sources(sources) => {
                Some(ranges_rule::<I>(&I::saddr(), ranges(sources.iter().copied(), self.family)))
            }
            PodTraffic::Bridge(name) => Some(Rule::new().eq(field::iifname(), &IfName::new(name))),
            PodTraffic::InterfacePrefix(prefix) => {
                let data = IfName::new(prefix).bytes();
                let used = prefix.len().min(15);
                let data = knit_kernel::nft::Data::from_slice(&data.as_slice()[..used]);
                let rule = Rule::new().load_at(Reg::FIRST, &field::iifname());
                Some(rule.expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Eq, data }))
            }
        }
    }

    /// The chain of a leaf; none for those that are always there.
    pub(crate) fn leaf(&self, leaf: Leaf) -> Option<(Name, Vec<Rule>)> {
        let rules = match self.family {
            Family::V4 => self.leaf_rules::<V4>(leaf)?,
            Family::V6 => self.leaf_rules::<V6>(leaf)?,
        };
        Some((leaf.to_string().into(), rules))
    }

    fn leaf_rules<I: Ip>(&self, leaf: Leaf) -> Option<Vec<Rule>> {
        let Leaf::Endpoints { scope, count, affinity, masquerade, any_address } = leaf else { return None };
        let forget = Rule::new()
            .expr(Expr::Immediate { dreg: Reg::FIRST, data: Mark(0).bytes() })
            .expr(Expr::MetaSet { sreg: Reg::FIRST, key: PRIORITY });
        let mut rules = vec![forget];
        match masquerade {
            Masquerade::HairpinOnly => {}
            Masquerade::NotPods => rules.push(Rule::new().jump("masquerade-unless-pod")),
            Masquerade::All => rules.push(Rule::new().set_mark_bits(self.mark, self.mark)),
        }
        let key = key::<I>(any_address);
        let r = |index: u8| Reg::new(index).unwrap_or(Reg::FIRST);
        let lookup = |set: &Set, sreg: Reg, result: LookupResult| Expr::Lookup {
            set: SetRef::Named(set.name.clone()),
            sreg,
            result,
        };
        let s = &self.sets;
        let slots = if scope == Scope::Local { LOCAL_SLOTS } else { 0 };
        // The frontend, then the slot; the endpoint goes to `to`.
        let pick = |to: Reg| {
            Rule::new()
                .load_at(Reg::FIRST, &key)
                .expr(Expr::Numgen { dreg: r(2 + I::REGS), modulus: count, random: true, offset: slots })
                .expr(lookup(&s.endpoints, Reg::FIRST, LookupResult::Into(to)))
        };
        if let Some(seconds) = affinity {
            let timeout = Some(Duration::from_secs(seconds.into()));
            // 0: service port, 1: scope, then endpoint address and port; behind them service port and client.
            let endpoint = r(2);
            let client = r(3 + I::REGS);
            let load_client = |rule: Rule| {
                rule.map_at(client, &key, s.services.name.clone()).load_at(r(4 + I::REGS), &I::saddr())
            };
            let remember = |op, key: Reg, data: Reg| Expr::Dynset {
                set: s.affinity.name.clone(),
                op,
                key,
                data: Some(data),
                timeout,
            };
            rules.push(
                load_client(Rule::new().map(&key, s.services.name.clone()))
                    .expr(Expr::Immediate { dreg: r(1), data: Mark(slots).bytes() })
                    .expr(lookup(&s.affinity, client, LookupResult::Into(endpoint)))
                    .expr(lookup(&s.members, Reg::FIRST, LookupResult::Match))
                    .expr(remember(DynsetOp::Update, client, endpoint))
                    .dnat_at(I::TABLE, endpoint)
                    .comment("the same endpoint as before"),
            );
            // An update keeps the value of an element that is there, so one that leads nowhere has to go first. What
            // is given as value does not matter, but the kernel asks for one.
            rules.push(
                Rule::new().map(&key, s.services.name.clone()).load_at(r(1), &I::saddr()).expr(remember(
                    DynsetOp::Delete,
                    Reg::FIRST,
                    Reg::FIRST,
                )),
            );
            rules.push(
                load_client(pick(endpoint))
                    .expr(remember(DynsetOp::Update, client, endpoint))
                    .dnat_at(I::TABLE, endpoint),
            );
        }
        // With affinity, this one is for when nobody more can be remembered.
        rules.push(pick(Reg::FIRST).dnat_at(I::TABLE, Reg::FIRST));
        Some(rules)
    }

    /// The chain of a behaviour that is more than its leaf.
    pub(crate) fn behaviour(&self, behaviour: &Behaviour) -> Option<(Name, Vec<Rule>)> {
        if behaviour.is_plain() {
            return None;
        }
        let rules = match self.family {
            Family::V4 => self.behaviour_rules::<V4>(behaviour),
            Family::V6 => self.behaviour_rules::<V6>(behaviour),
        };
        Some((behaviour.to_string().into(), rules))
    }

    fn behaviour_rules<I: Ip>(&self, behaviour: &Behaviour) -> Vec<Rule> {
        let mut rules = Vec::new();
        if behaviour.checked {
            let source = (I::daddr(), field::l4proto(), field::th_dport(), I::saddr());
            rules.push(Rule::new().not_in_set(&source, self.sets.sources.name.clone()).drop());
        }
        if let Some(leaf) = behaviour.from_node {
            let node = Rule::new().eq(field::fib_addrtype(FibFlags::SADDR), &AddrType::LOCAL);
            rules.push(node.goto(leaf.to_string()));
            let more = ranges(self.node_sources.iter().copied(), self.family);
            if !more.is_empty() {
                rules.push(ranges_rule::<I>(&I::saddr(), more).goto(leaf.to_string()));
            }
        }
        if let (Some(leaf), Some(pods)) = (behaviour.from_pods, self.pods_rule::<I>()) {
            rules.push(pods.goto(leaf.to_string()));
        }
        rules.push(Rule::new().goto(behaviour.route.to_string()));
        rules
    }
}

/// A regular chain as it is wanted.
pub(crate) fn chain_state((name, rules): (Name, Vec<Rule>)) -> ChainState {
    ChainState { chain: Chain::regular(name), rules: rules.into_iter().map(RuleState::wanted).collect() }
}

pub(crate) fn elements_of<'a>(state: &'a mut TableState, set: &Set) -> &'a mut SetState {
    state
        .sets
        .entry(set.name.clone())
        .or_insert_with(|| SetState { set: set.clone(), elements: std::collections::BTreeMap::new() })
}

fn sets<I: Ip>() -> Sets {
    Sets {
        frontends: Set::map::<(I::Address, L4Proto, Port), Mark>("frontends"),
        services: Set::map::<(I::Address, L4Proto, Port), Mark>("services"),
        actions: Set::verdict_map::<Mark>("actions"),
        endpoints: Set::map::<(I::Address, L4Proto, Port, Mark), (I::Address, Port)>("endpoints"),
        affinity: Set::map::<(Mark, I::Address), (I::Address, Port)>("affinity")
            .dynamic(AFFINITY_SIZE)
            .timeouts(),
        members: Set::of::<(Mark, Mark, I::Address, Port)>("members"),
        hairpin: Set::of::<(I::Address, I::Address)>("hairpin"),
        cluster_ips: Set::of::<I::Address>("cluster-ips"),
        sources: Set::of::<(I::Address, L4Proto, Port, I::Address)>("sources").interval(),
    }
}

/// Where a client connects to, as a key.
fn key<I: Ip>(any_address: bool) -> (Field<I::Address>, Field<L4Proto>, Field<Port>) {
    let address = if any_address { field::constant(&I::ANY) } else { I::daddr() };
    (address, field::l4proto(), field::th_dport())
}

fn reject<I: Ip>() -> [Rule; 2] {
    [
        Rule::new().eq(field::l4proto(), &L4Proto::TCP).reject(Reject::TcpReset),
        Rule::new().reject(Reject::Icmp(I::PORT_UNREACHABLE)),
    ]
}

fn max_prefix(family: Family) -> u8 {
    match family {
        Family::V4 => 32,
        Family::V6 => 128,
    }
}

/// Ranges as elements, joined where they overlap or touch, as the kernel wants them.
fn ranges(ranges: impl Iterator<Item = IpNet>, family: Family) -> Vec<Element> {
    let ranges: Vec<IpNet> = ranges.filter(|range| Family::of_net(*range) == family).collect();
    let ranges = IpNet::aggregate(&ranges);
    ranges.iter().map(|range| Element::prefix(range.network(), range.prefix_len())).collect()
}

fn ranges_rule<I: Ip>(field: &Field<I::Address>, ranges: Vec<Element>) -> Rule {
    if let [only] = &ranges[..]
        && let Some(rule) = whole(only)
    {
        return rule;
    }
    Rule::new().in_ranges::<I::Address>(field, ranges)
}

/// A range that holds every address needs no match.
fn whole(element: &Element) -> Option<Rule> {
    let all = |data: &[u8], byte: u8| data.iter().all(|b| *b == byte);
    (all(element.key.as_slice(), 0) && all(element.last_key().as_slice(), 0xff)).then(Rule::new)
}
