//! The table: its sets, its fixed chains, and the small chains of behaviours.
//!
//! A packet's way through it: `prerouting` or `output` jump to `services`, which looks up
//! `address . protocol . port` in `frontends`, gets the number of a behaviour, and goes to that one's chain,
//! which `actions` has. The chain draws a slot, and finds the endpoint in `endpoints` under the same key and
//! the slot. With affinity it looks for the client in an `affinity` set first; see [`sticky`].
//!
//! Elements of `frontends` and `endpoints` hold plain values. A map of verdicts instead of numbers would save
//! a lookup, but each element written to one makes the kernel walk through all of it (half a millisecond with
//! 10,000 services); here only a behaviour that nobody had before does that.
//!
//! A value that came from one map and is part of a key or of an element of another goes through the packet's
//! mark on its way ([`through_mark`]), and the mark is put back within the same rule. The kernel does not
//! need that. But `nft` 1.0.6, which Debian 12 has, aborts when it lists a rule that uses a map's value in
//! another way than as the operand of a statement (it believes the value to be zero bits long), and an
//! administrator's `nft list ruleset` must not end like that because of us.

use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::owner;
use knit_nft::expr::{LookupResult, MetaKey, SetRef};
use knit_nft::ip::{Ip, V4, V6};
use knit_nft::{
    AddrType, Chain, ChainKind, ChainState, CtStatus, DynsetOp, Element, Expr, FibFlags, Field, Hook, IfName,
    L4Proto, Mark, Name, NatFlags, Port, Reg, Reject, Rule, RuleState, Scalar, Set, SetState, Table, TableId,
    TableState, field,
};
use knit_proxy::backends::MasqueradeAs;
use knit_proxy::model::Family;
use knit_proxy::view::{Masquerade, NodePortMatch, NodeSettings, PodTraffic, Scope};

use crate::backend::Config;
use crate::behaviour::{Behaviour, LOCAL_SLOTS, Leaf, Sticky};
use crate::ip;

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
    /// `address . protocol . port . slot : address . port`, of service ports without affinity.
    pub endpoints: Set,
    /// `number of a service port . client : number of an endpoint`, written by packets. The first of many,
    /// each for one service port as far as they reach: [`Layout::affinity`].
    affinity: Set,
    /// `number of a service port . slot : number of an endpoint`, of service ports with affinity.
    pub slots: Set,
    /// `number of a service port . scope . number of an endpoint : address . port`, likewise.
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
    routers: Option<String>,
    /// External IPs leave addresses of this namespace alone.
    pub keeps_own_addresses: bool,
}

/// Where traffic to an address of the namespace goes that an external IP does not take.
const OWN_ADDRESS: &str = "own-address";

/// Where the packet's own mark is kept while it carries something else.
const SAVED: Reg = Reg::LAST;

/// How many clients of one service port with affinity are remembered at once.
const AFFINITY_SIZE: u32 = 1 << 16;

/// How many sets of clients there are: so many service ports with affinity have one each. Beyond that, some
/// share one.
pub(crate) const AFFINITY_SETS: u32 = 256;

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
        let routers = config.routers.clone();
        let keeps_own_addresses = config.keeps_own_addresses;
        Self { family, id, sets, mark, pods, masquerade_as, node_sources, routers, keeps_own_addresses }
    }

    /// One of the sets of remembered clients.
    pub(crate) fn affinity(&self, set: u32) -> Set {
        Set { name: affinity_name(set), ..self.sets.affinity.clone() }
    }

    /// Whether there may be links to routers.
    pub(crate) fn has_routers(&self) -> bool {
        self.routers.is_some()
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
            &s.slots,
            &s.members,
            &s.hairpin,
            &s.cluster_ips,
            &s.sources,
        ] {
            state = state.set(set.clone(), []);
        }
        let to_services = || [Rule::new().jump("services")];
        // A service address that an interface of this namespace has is served by whoever listens there
        // (NodeLocal DNSCache).
        let own = || to_own_address().ret();
        if self.keeps_own_addresses {
            state = state.chain(Chain::regular(OWN_ADDRESS), self.node_ports::<I>(node));
        }
        state
            .chain(Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, DSTNAT), to_services())
            .chain(Chain::base("output", ChainKind::Nat, Hook::Output, DSTNAT), to_services())
            .chain(
                Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, SRCNAT),
                self.postrouting::<I>(),
            )
            .chain(Chain::regular("services"), self.services::<I>(node))
            .chain(Chain::regular("masquerade-unless-pod"), self.unless_pod::<I>())
            .chain(Chain::regular("reject"), reject::<I>())
            .chain(Chain::regular("drop"), [Rule::new().drop()])
            .chain(Chain::regular("no-such-port"), [own(), Rule::new().goto("reject")])
            .chain(Chain::regular("no-such-service"), [own(), Rule::new().drop()])
    }

    /// Does what is to be done at a place, if it is a frontend.
    fn act<I: Ip>(&self, rule: Rule, key: &(Field<I::Address>, Field<L4Proto>, Field<Port>)) -> Rule {
        let found = save_mark(rule).map(key, self.sets.frontends.name.clone());
        through_mark(found, Reg::FIRST, &[Reg::FIRST]).expr(Expr::Lookup {
            set: SetRef::Named(self.sets.actions.name.clone()),
            sreg: Reg::FIRST,
            result: LookupResult::Verdict,
        })
    }

    /// Node ports that answer on every address of the namespace.
    fn node_ports<I: Ip>(&self, node: &NodeSettings) -> Option<Rule> {
        let any = *node.node_ports.get(self.family) == NodePortMatch::AnyLocal;
        any.then(|| {
            let here = to_own_address().not_in_prefix(I::daddr(), I::LOOPBACK.0, I::LOOPBACK.1);
            self.act::<I>(here, &key::<I>(true)).comment("node ports")
        })
    }

    fn services<I: Ip>(&self, node: &NodeSettings) -> Vec<Rule> {
        let mut rules = vec![self.act::<I>(Rule::new(), &key::<I>(false))];
        rules.extend(self.node_ports::<I>(node));
        let exempt: Vec<_> = node.exempt.iter().filter(|a| Family::of(**a) == self.family).collect();
        if !exempt.is_empty() {
            let ranges = exempt.into_iter().map(|a| Element::prefix(*a, max_prefix(self.family))).collect();
            rules.push(ranges_rule::<I>(&I::daddr(), ranges).ret().comment("service addresses of others"));
        }
        rules.push(
            Rule::new()
                .in_set(&I::daddr(), self.sets.cluster_ips.name.clone())
                .goto("no-such-port")
                .comment("no such port"),
        );
        let ranges = ranges(node.service_ranges.iter().copied(), self.family);
        if !ranges.is_empty() {
            let rule = ranges_rule::<I>(&I::daddr(), ranges).goto("no-such-service");
            rules.push(rule.comment("no such service"));
        }
        rules
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
            PodTraffic::InterfacePrefix(prefix) => Some(Rule::new().begins_with(&field::iifname(), prefix)),
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
        let mut rules = Vec::new();
        match masquerade {
            Masquerade::HairpinOnly => {}
            Masquerade::NotPods => rules.push(Rule::new().jump("masquerade-unless-pod")),
            Masquerade::All => rules.push(Rule::new().set_mark_bits(self.mark, self.mark)),
        }
        let key = key::<I>(any_address);
        let slots = if scope == Scope::Local { LOCAL_SLOTS } else { 0 };
        if let Some(Sticky { seconds, set }) = affinity {
            let timeout = Duration::from_secs(seconds.into());
            let clients = self.affinity(set);
            rules.extend(sticky::<I>(&self.sets, &clients, &key, slots, count, timeout));
        } else {
            rules.push(
                Rule::new()
                    .load_at(Reg::FIRST, &key)
                    .expr(Expr::Numgen {
                        dreg: reg(2 + I::REGS),
                        modulus: count,
                        random: true,
                        offset: slots,
                    })
                    .expr(lookup(&self.sets.endpoints, Reg::FIRST, LookupResult::Into(Reg::FIRST)))
                    .dnat_at(I::TABLE, Reg::FIRST),
            );
        }
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
        if behaviour.not_own {
            rules.push(to_own_address().goto(OWN_ADDRESS));
        }
        if let Some(prefix) = self.routers.as_deref().filter(|_| behaviour.not_routers) {
            rules.push(from_ours().begins_with(&field::iifname(), prefix).ret());
        }
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
        affinity: Set::map::<(Mark, I::Address), Mark>(affinity_name(0)).dynamic(AFFINITY_SIZE).timeouts(),
        slots: Set::map::<(Mark, Mark), Mark>("slots"),
        members: Set::map::<(Mark, Mark, Mark), (I::Address, Port)>("members"),
        hairpin: Set::of::<(I::Address, I::Address)>("hairpin"),
        cluster_ips: Set::of::<I::Address>("cluster-ips"),
        sources: Set::of::<(I::Address, L4Proto, Port, I::Address)>("sources").interval(),
    }
}

/// A packet goes to an address that an interface of the namespace has.
fn to_own_address() -> Rule {
    Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL)
}

/// A packet came in by a link of Knit's own: a pod's, or a router's.
fn from_ours() -> Rule {
    // Without the bit that the group of a link has which is about to be deleted.
    let group = |bits: u32| Mark(bits & !1);
    Rule::new().masked_eq(field::iifgroup(), &group(u32::MAX), &group(owner::GROUP))
}

fn affinity_name(set: u32) -> Name {
    format!("affinity-{set}").into()
}

fn reg(index: u8) -> Reg {
    Reg::new(index).unwrap_or(Reg::FIRST)
}

fn lookup(set: &Set, sreg: Reg, result: LookupResult) -> Expr {
    Expr::Lookup { set: SetRef::Named(set.name.clone()), sreg, result }
}

/// Keeps the packet's mark, for [`through_mark`] in the same rule.
fn save_mark(rule: Rule) -> Rule {
    rule.expr(Expr::Meta { dreg: SAVED, key: MetaKey::MARK })
}

/// Takes what a map had from one register to others, by way of the packet's mark; the module says why. The
/// mark is put back at once, before anything that may end the rule.
fn through_mark(rule: Rule, from: Reg, to: &[Reg]) -> Rule {
    let rule = rule.expr(Expr::MetaSet { sreg: from, key: MetaKey::MARK });
    let rule = to.iter().fold(rule, |rule, to| rule.expr(Expr::Meta { dreg: *to, key: MetaKey::MARK }));
    rule.expr(Expr::MetaSet { sreg: SAVED, key: MetaKey::MARK })
}

/// What is done for a service port with affinity: the endpoint that the client had, if it is still in this
/// scope, or one at random, which is remembered.
fn sticky<I: Ip>(
    sets: &Sets,
    clients: &Set,
    key: &(Field<I::Address>, Field<L4Proto>, Field<Port>),
    slots: u32,
    count: u32,
    timeout: Duration,
) -> [Rule; 4] {
    // Registers: service port and client; behind them service port, slot or scope, and endpoint; then what it
    // leads to.
    let client = Reg::FIRST;
    let (service, slot, endpoint, found) =
        (reg(1 + I::REGS), reg(2 + I::REGS), reg(3 + I::REGS), reg(4 + I::REGS));
    let of_client = || {
        let rule = save_mark(Rule::new()).map_at(found, key, sets.services.name.clone());
        through_mark(rule, found, &[client, service]).load_at(reg(1), &I::saddr())
    };
    let remember = |op| Expr::Dynset {
        set: clients.name.clone(),
        op,
        key: client,
        data: Some(endpoint),
        timeout: Some(timeout),
    };
    let to_endpoint = |rule: Rule| {
        through_mark(rule, endpoint, &[endpoint])
            .expr(Expr::Immediate { dreg: slot, data: Mark(slots).bytes() })
            .expr(lookup(&sets.members, service, LookupResult::Into(found)))
    };
    let pick = || {
        let rule = of_client()
            .expr(Expr::Numgen { dreg: slot, modulus: count, random: true, offset: slots })
            .expr(lookup(&sets.slots, service, LookupResult::Into(endpoint)));
        to_endpoint(rule)
    };
    [
        to_endpoint(of_client().expr(lookup(clients, client, LookupResult::Into(endpoint))))
            .expr(remember(DynsetOp::Update))
            .dnat_at(I::TABLE, found)
            .comment("the same endpoint as before"),
        // An update keeps the value of an element that is there, so one that leads nowhere has to go first.
        // What is given as value does not matter, but the kernel asks for one.
        of_client()
            .expr(Expr::Immediate { dreg: endpoint, data: Mark(0).bytes() })
            .expr(remember(DynsetOp::Delete)),
        pick().expr(remember(DynsetOp::Update)).dnat_at(I::TABLE, found),
        pick().dnat_at(I::TABLE, found).comment("when nobody more can be remembered"),
    ]
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
