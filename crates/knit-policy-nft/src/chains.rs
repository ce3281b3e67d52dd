//! The chains: which packets are judged, and how.
//!
//! | chain | what |
//! |---|---|
//! | `forward` | hook: what is known passes, what was cut does not; the rest is judged if its source or its destination is a subject |
//! | `input` | hook: packets to the router itself, egress alone |
//! | `to` | ingress: looks whether the destination is a subject |
//! | `egress`, `ingress` | one direction of a subject: finds out how the other side is known |
//! | `egress-itself`, `-peer`, `-block`, `-any` | asks the maps, narrowest first |
//! | `egress-denied` | counts, tells, drops |
//! | `not-syn` | TCP without a beginning |
//! | `group` | packets to many, which pass pods of a bridge |
//! | `cut` | packets of connections that are no longer allowed |

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use knit_kernel::owner;
use knit_nft::expr::{AnonymousSet, CmpOp, LogTarget, LookupResult, MetaKey, SetRef};
use knit_nft::ip::Ip;
use knit_nft::{
    AddrType, Chain, ChainKind, CtState, Data, Element, Expr, FibFlags, Field, Hook, Icmp6Type, IfName,
    L4Proto, Mark, Name, Reg, Rule, Scalar as _, Set, TableState, Verdict, field,
};
use knit_policy::model::Direction;
use knit_policy::sets::Class;
use knit_types::Family;

use crate::elements::{ACCEPT, ANYBODY, DROP};
use crate::ip::family;
use crate::layout::{CUT, NODE_SET, Router, Which, told_name};
use crate::log::{self, Why};

/// After the runtime's own rules, and after those that an administrator puts at the usual place: what they
/// drop is not told as denied. Before source addresses are translated.
const PRIORITY: i32 = 10;

/// Where a class, and then a decision, comes out of a map.
const FOUND: Reg = reg(8);
/// Where the packet's own mark is kept while it carries something else.
const SAVED: Reg = Reg::LAST;
/// A subject is told of from the start again after this.
const FORGET: Duration = Duration::from_secs(60);

/// `RTN_ANYCAST`.
const ANYCAST: AddrType = AddrType(4);

/// How the other side is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// By its address.
    Peer,
    /// By a range that its address is in.
    Block,
    /// As this class.
    As(u32),
}

/// The chains of one family and direction.
struct Side<I: Ip> {
    direction: Direction,
    local: Field<I::Address>,
    remote: Field<I::Address>,
}

/// Adds all chains.
pub(crate) fn add<I: Ip>(state: TableState, router: &Router, logs: bool) -> TableState {
    let base = |name: &str, hook| Chain::base(name, ChainKind::Filter, hook, PRIORITY);
    let (egress, ingress) = (Side::<I>::new(Direction::Egress), Side::<I>::new(Direction::Ingress));

    let mut forward = already_judged();
    forward.extend(always_passes::<I>());
    forward.extend(link_local::<I>(router, Hook::Forward));
    forward.extend([
        not_syn().jump("not-syn"),
        egress.is_no_subject().goto("to"),
        Rule::new().jump("egress"),
        Rule::new().goto("to"),
    ]);
    let mut input = already_judged();
    input.extend(always_passes::<I>());
    input.extend(link_local::<I>(router, Hook::Input));
    input.extend([egress.is_no_subject().accept(), Rule::new().goto("egress")]);
    let mut to = vec![ingress.is_no_subject().goto("group")];
    let mut group = Vec::new();
    if let Router::Apart { uplink, .. } = router {
        let from_node = Rule::new().eq(field::iifname(), &IfName::new(uplink.as_str()));
        to.push(from_node.in_set(&I::saddr(), NODE_SET).accept().comment("the node itself"));
        let many = [AddrType::BROADCAST, ANYCAST, AddrType::MULTICAST];
        let to_many = Rule::new().one_of(&field::fib_addrtype(FibFlags::DADDR), &many);
        group.push(to_many.counter().drop().comment("to many pods of a bridge at once"));
    }
    to.push(Rule::new().goto("ingress"));
    let no_subject = [&egress, &ingress].into_iter().fold(Rule::new(), |rule, side| {
        let set = side.set(Which::Subjects);
        rule.not_in_set(&I::saddr(), set.clone()).not_in_set(&I::daddr(), set)
    });
    let state = state
        .chain(base("forward", Hook::Forward), forward)
        .chain(base("input", Hook::Input), input)
        .chain(Chain::regular("to"), to)
        .chain(
            Chain::regular("not-syn").comment("TCP that was not seen to begin"),
            [no_subject.ret(), Rule::new().counter().drop()],
        )
        .chain(Chain::regular("group"), group)
        .chain(Chain::regular("cut").comment("connections that policies no longer allow"), cut(logs));
    ingress.add(egress.add(state, logs), logs)
}

/// What is known passes at once: the first rule decides about most packets.
fn already_judged() -> Vec<Rule> {
    let known = CtState::ESTABLISHED | CtState::RELATED;
    vec![
        Rule::new().any_of(field::ct_state(), &known).none_of(field::ct_mark(), &Mark(CUT)).accept(),
        Rule::new().any_of(field::ct_mark(), &Mark(CUT)).goto("cut"),
    ]
}

fn cut(logs: bool) -> Vec<Rule> {
    let told = logs.then(|| tell(Why::Cut));
    told.into_iter().chain([Rule::new().counter().drop()]).collect()
}

impl<I: Ip> Side<I> {
    fn new(direction: Direction) -> Self {
        let (local, remote) = match direction {
            Direction::Egress => (I::saddr(), I::daddr()),
            Direction::Ingress => (I::daddr(), I::saddr()),
        };
        Self { direction, local, remote }
    }

    fn set(&self, which: fn(Direction) -> Which) -> Name {
        which(self.direction).name()
    }

    fn chain(&self, word: &str) -> Name {
        let direction = match self.direction {
            Direction::Egress => "egress",
            Direction::Ingress => "ingress",
        };
        format!("{direction}{word}").into()
    }

    /// A lookup that does not find is not counted by the element, so that only what is denied is.
    fn is_no_subject(&self) -> Rule {
        Rule::new().not_in_set(&self.local, self.set(Which::Subjects))
    }

    fn add(&self, state: TableState, logs: bool) -> TableState {
        let itself = (I::saddr(), I::daddr());
        let judge = [
            Rule::new().in_set(&itself, Which::Itself.name()).goto(self.chain("-itself")),
            self.is_known(Which::Peers).goto(self.chain("-peer")),
            self.is_known(Which::Blocks).goto(self.chain("-block")),
            Rule::new().goto(self.chain("-any")),
        ];
        let mut state = state.chain(Chain::regular(self.chain("-denied")), self.denied(logs));
        for (word, known) in [
            ("-itself", Known::As(Class::ITSELF.0)),
            ("-peer", Known::Peer),
            ("-block", Known::Block),
            ("-any", Known::As(ANYBODY)),
        ] {
            let mut rules = self.ask(known);
            // Where no rule is about the class, what is said about anybody counts; that has a default.
            if known == Known::As(ANYBODY) {
                rules.push(Rule::new().goto(self.chain("-denied")).comment("no default: not to be"));
            } else {
                rules.push(Rule::new().goto(self.chain("-any")));
            }
            state = state.chain(Chain::regular(self.chain(word)), rules);
        }
        state.chain(Chain::regular(self.chain("")), judge)
    }

    /// The other side is in a map. The value goes nowhere but through the mark: `nft` 1.0.6 shows the rule.
    fn is_known(&self, which: Which) -> Rule {
        let rule = save_mark(Rule::new()).map_at(FOUND, &self.remote, which.name());
        restore_mark(rule.expr(Expr::MetaSet { sreg: FOUND, key: MetaKey::MARK }))
    }

    /// Asks for a port, a range, a protocol, everything: the first that is there decides.
    fn ask(&self, known: Known) -> Vec<Rule> {
        let (protocol, port) = (reg(I::REGS + 1), reg(I::REGS + 2));
        let with_protocol = |rule: Rule| rule.load_at(protocol, &field::l4proto());
        let with_port = |rule: Rule| with_protocol(rule).load_at(port, &field::th_dport());
        vec![
            self.decide(with_port(self.begin(known)), Which::Ports),
            self.decide(with_port(self.begin(known)), Which::Ranges),
            self.decide(with_protocol(self.begin(known)), Which::Protocols),
            self.decide(self.begin(known), Which::All),
        ]
    }

    /// Subject and class, in the registers that every key begins with. The mark is put back before anything
    /// that may end the rule.
    fn begin(&self, known: Known) -> Rule {
        let class = reg(I::REGS);
        let rule = save_mark(Rule::new());
        let map = match known {
            Known::As(number) => {
                let data = Mark(number).bytes();
                return rule.load_at(Reg::FIRST, &self.local).expr(Expr::Immediate { dreg: class, data });
            }
            Known::Peer => Which::Peers,
            Known::Block => Which::Blocks,
        };
        let rule = rule.map_at(FOUND, &self.remote, map.name());
        let rule = rule.load_at(Reg::FIRST, &self.local);
        restore_mark(
            rule.expr(Expr::MetaSet { sreg: FOUND, key: MetaKey::MARK })
                .expr(Expr::Meta { dreg: class, key: MetaKey::MARK }),
        )
    }

    /// Does what a map of decisions has for the key in the first registers.
    fn decide(&self, rule: Rule, which: fn(Direction) -> Which) -> Rule {
        let lookup = |set, sreg, result| Expr::Lookup { set, sreg, result };
        let found = SetRef::Named(self.set(which));
        let rule = rule
            .expr(lookup(found, Reg::FIRST, LookupResult::Into(FOUND)))
            .expr(Expr::MetaSet { sreg: FOUND, key: MetaKey::MARK })
            .expr(Expr::Meta { dreg: Reg::FIRST, key: MetaKey::MARK });
        let mut rule = restore_mark(rule);
        let element = |decision, verdict| Element::new(&Mark(decision)).verdict(verdict);
        rule.sets.push(AnonymousSet {
            set: Set::verdict_map::<Mark>("").constant(),
            elements: vec![
                element(ACCEPT, Verdict::Return),
                element(DROP, Verdict::Goto(self.chain("-denied"))),
            ],
        });
        let verdicts = SetRef::Anonymous(rule.sets.len() - 1);
        rule.expr(lookup(verdicts, Reg::FIRST, LookupResult::Verdict))
    }

    fn denied(&self, logs: bool) -> Vec<Rule> {
        let counted = Rule::new().in_set(&self.local, self.set(Which::Subjects)).comment("counts");
        let mut rules = vec![counted];
        if logs {
            let told = told_name(self.direction);
            let often = Rule::new().limit_each(&self.local, told, log::EACH, FORGET);
            rules.push(often.drop().comment("told often enough"));
            rules.push(tell(Why::Denied(self.direction)));
        }
        rules.push(Rule::new().drop());
        rules
    }
}

/// Passes packets on, as many as all together may.
fn tell(why: Why) -> Rule {
    let (rate, burst) = log::TOGETHER;
    let target = LogTarget::Group { group: log::GROUP, snaplen: log::SNAPLEN };
    let limited = Rule::new().limit(rate, Duration::from_secs(1), burst);
    limited.expr(Expr::Log { prefix: Some(why.prefix().into()), target })
}

/// Without it an IPv6 address does not work at all (rule 24).
fn always_passes<I: Ip>() -> Vec<Rule> {
    if family::<I>() == Family::V4 {
        return Vec::new();
    }
    let kinds: Vec<Icmp6Type> = (130..=137).chain([143]).map(Icmp6Type).collect();
    let rule = Rule::new().eq(field::l4proto(), &L4Proto::ICMPV6);
    vec![rule.one_of(&field::icmpv6_type(), &kinds).accept().comment("neighbour discovery")]
}

/// What a pod sends from its link-local address has nothing to be judged by. It reaches the router, and other
/// pods of a bridge, and none of that where policies act.
fn link_local<I: Ip>(router: &Router, hook: Hook) -> Vec<Rule> {
    const RANGE: (IpAddr, u8) = (IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10);
    if family::<I>() == Family::V4 {
        return Vec::new();
    }
    // Without the bit that the group of a link has which is about to be deleted.
    let group = |bits: u32| Mark(bits & !1);
    let from_pods = || match router {
        Router::Node => Rule::new().masked_eq(field::iifgroup(), &group(u32::MAX), &group(owner::GROUP)),
        Router::Apart { uplink, .. } => Rule::new().ne(field::iifname(), &IfName::new(uplink.as_str())),
    };
    let drop = |rule: Rule| rule.counter().drop().comment("link-local addresses are nobody's");
    let mut rules = vec![drop(from_pods().in_prefix(field::ip6_saddr(), RANGE.0, RANGE.1))];
    if hook == Hook::Forward {
        rules.push(drop(from_pods().in_prefix(field::ip6_daddr(), RANGE.0, RANGE.1)));
    }
    rules
}

/// TCP that does not begin a connection.
fn not_syn() -> Rule {
    const SYN: u8 = 0x02;
    const SYN_ACK_RST_FIN: u8 = 0x17;
    let byte = |byte: u8| Data::from_slice(&[byte]);
    Rule::new()
        .eq(field::l4proto(), &L4Proto::TCP)
        .load_at(Reg::FIRST, &field::tcp_flags())
        .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask: byte(SYN_ACK_RST_FIN), xor: byte(0) })
        .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ne, data: byte(SYN) })
}

fn save_mark(rule: Rule) -> Rule {
    rule.expr(Expr::Meta { dreg: SAVED, key: MetaKey::MARK })
}

fn restore_mark(rule: Rule) -> Rule {
    rule.expr(Expr::MetaSet { sreg: SAVED, key: MetaKey::MARK })
}

const fn reg(index: u8) -> Reg {
    match Reg::new(index) {
        Some(reg) => reg,
        None => Reg::LAST,
    }
}
