//! Rules as text: runs the expressions over registers that hold words instead of values.

use super::value;
use crate::data::Data;
use crate::datatype::{Datatype, KeyType};
use crate::expr::{
    AnonymousSet, Base, CmpOp, CtKey, Direction, DynsetOp, Expr, FibResult, LimitUnit, LogTarget,
    LookupResult, MetaKey, NatFlags, NatKind, Reg, Reject, SetRef, SocketKey,
};
use crate::object::Family;
use crate::rule::Rule;

/// What a register holds, in words.
#[derive(Clone, Default)]
enum Word {
    #[default]
    Empty,
    /// Something of the packet.
    Field(String, Option<Datatype>),
    /// Something of the packet, with some bits masked out.
    Masked(String, Option<Datatype>, Data, Data),
    /// A constant.
    Constant(Data),
    /// The second and further registers of a map's value.
    Rest,
}

struct Text<'a> {
    words: [Word; Reg::COUNT as usize],
    rule: &'a Rule,
    key_of: &'a dyn Fn(&str) -> Option<&'a KeyType>,
    out: Vec<String>,
}

/// A rule as text; `key_of` says what keys a named set has.
pub(super) fn text<'a>(rule: &'a Rule, key_of: &'a dyn Fn(&str) -> Option<&'a KeyType>) -> String {
    let mut text = Text { words: Default::default(), rule, key_of, out: Vec::new() };
    for expr in &rule.exprs {
        text.expr(expr);
    }
    if let Some(comment) = &rule.comment {
        text.out.push(format!("comment \"{comment}\""));
    }
    text.out.join(" ")
}

impl Text<'_> {
    fn expr(&mut self, expr: &Expr) {
        match expr {
            Expr::Payload { dreg, base, offset, len } => {
                let (name, kind) = payload_name(*base, *offset, *len);
                self.load(*dreg, name, kind);
            }
            Expr::PayloadSet { sreg, base, offset, len, .. } => {
                let (name, kind) = payload_name(*base, *offset, *len);
                let text = format!("{name} set {}", self.operand(*sreg, kind));
                self.out.push(text);
            }
            Expr::Meta { dreg, key } => {
                let (name, kind) = meta_name(*key);
                self.load(*dreg, name, kind);
            }
            Expr::Ct { dreg, key, direction } => {
                let (name, kind) = ct_name(*key, *direction);
                self.load(*dreg, name, kind);
            }
            Expr::Fib { dreg, result, flags } => {
                let (name, kind) = fib_name(*result, *flags);
                self.load(*dreg, name, kind);
            }
            Expr::Socket { dreg, key } => match key {
                SocketKey::Transparent => {
                    self.load(*dreg, "socket transparent".into(), Some(Datatype::Integer));
                }
                SocketKey::Wildcard => self.load(*dreg, "socket wildcard".into(), Some(Datatype::Integer)),
                SocketKey::Mark => self.load(*dreg, "socket mark".into(), Some(Datatype::Mark)),
                SocketKey::CgroupV2 { level } => {
                    self.load(*dreg, format!("socket cgroupv2 level {level}"), Some(Datatype::CgroupV2));
                }
            },
            Expr::Numgen { dreg, modulus, random, offset } => {
                let mode = if *random { "random" } else { "inc" };
                self.load(
                    *dreg,
                    format!("numgen {mode} mod {modulus}{}", plus(*offset)),
                    Some(Datatype::Mark),
                );
            }
            Expr::Jhash { sreg, dreg, len, modulus, seed, offset } => {
                let of = self.concat(*sreg, Span::Bytes(*len));
                let seed = seed.map_or(String::new(), |seed| format!(" seed 0x{seed:x}"));
                let hash = format!("jhash {of} mod {modulus}{seed}{}", plus(*offset));
                self.load(*dreg, hash, Some(Datatype::Mark));
            }
            Expr::Symhash { dreg, modulus, offset } => {
                self.load(*dreg, format!("symhash mod {modulus}{}", plus(*offset)), Some(Datatype::Mark));
            }
            Expr::Immediate { dreg, data } => self.put(*dreg, Word::Constant(data.clone())),
            Expr::Bitwise { sreg, dreg, mask, xor } => {
                let word = match self.word(*sreg) {
                    Word::Field(text, kind) => Word::Masked(text, kind, mask.clone(), xor.clone()),
                    other => other,
                };
                self.put(*dreg, word);
            }
            Expr::Cmp { sreg, op, data } => {
                let text = self.comparison(*sreg, *op, data);
                self.out.push(text);
            }
            Expr::Range { sreg, invert, from, to } => {
                let (text, kind) = self.field(*sreg);
                let sign = if *invert { "!= " } else { "" };
                let (from, to) = (value::value(kind, from.as_slice()), value::value(kind, to.as_slice()));
                self.out.push(format!("{text} {sign}{from}-{to}"));
            }
            Expr::Lookup { set, sreg, result } => self.lookup(set, *sreg, *result),
            Expr::MetaSet { sreg, key } => {
                let (name, kind) = meta_name(*key);
                let text = format!("{name} set {}", self.operand(*sreg, kind));
                self.out.push(text);
            }
            Expr::CtSet { sreg, key, direction } => {
                let (name, kind) = ct_name(*key, *direction);
                let text = format!("{name} set {}", self.operand(*sreg, kind));
                self.out.push(text);
            }
            Expr::Verdict(verdict) => self.out.push(verdict.to_string()),
            Expr::Dynset { set, op, key, data, timeout } => {
                let verb = match op {
                    DynsetOp::Add => "add",
                    DynsetOp::Update => "update",
                    DynsetOp::Delete => "delete",
                };
                let types = (self.key_of)(set);
                let key = self.concat(*key, types.map_or(Span::AsLoaded(*data), Span::Key));
                let timeout = timeout.map_or(String::new(), |t| format!(" timeout {}", super::duration(t)));
                let data = data
                    .map_or(String::new(), |data| format!(" : {}", self.concat(data, Span::AsLoaded(None))));
                self.out.push(format!("{verb} @{set} {{ {key}{timeout}{data} }}"));
            }
            Expr::Meter { set, key, timeout, limit } => {
                let types = (self.key_of)(set);
                let key = self.concat(*key, types.map_or(Span::AsLoaded(None), Span::Key));
                let timeout = timeout.map_or(String::new(), |t| format!(" timeout {}", super::duration(t)));
                self.out.push(format!("add @{set} {{ {key}{timeout} {} }}", statement(limit)));
            }
            Expr::Nat { kind, family, addr, addr_max, port, port_max, flags } => {
                let verb = if *kind == NatKind::Dnat { "dnat" } else { "snat" };
                let target = self.nat_target(*addr, *addr_max, *port, *port_max, *family);
                self.out.push(format!("{verb} {family} to {target}{}", nat_flags(*flags)));
            }
            Expr::Masquerade { flags, port, port_max } => {
                let to = self.port_target(*port, *port_max);
                self.out.push(format!("masquerade{to}{}", nat_flags(*flags)));
            }
            Expr::Redirect { flags, port, port_max } => {
                let to = self.port_target(*port, *port_max);
                self.out.push(format!("redirect{to}{}", nat_flags(*flags)));
            }
            Expr::Tproxy { family, addr, port } => {
                let target = self.nat_target(*addr, None, *port, None, family.unwrap_or(Family::Ip));
                self.out.push(format!("tproxy to {target}"));
            }
            simple => self.out.push(statement(simple)),
        }
    }

    /// Puts a word into a register. Later registers are forgotten: loads run upwards.
    fn put(&mut self, reg: Reg, word: Word) {
        let at = usize::from(reg.index());
        self.words[at..].fill(Word::Empty);
        self.words[at] = word;
    }

    fn load(&mut self, reg: Reg, text: String, kind: Option<Datatype>) {
        self.put(reg, Word::Field(text, kind));
    }

    fn word(&self, reg: Reg) -> Word {
        self.words[usize::from(reg.index())].clone()
    }

    /// The field in a register, and its type.
    fn field(&self, reg: Reg) -> (String, Datatype) {
        match self.word(reg) {
            Word::Field(text, kind) | Word::Masked(text, kind, ..) => {
                (text, kind.unwrap_or(Datatype::Other(0)))
            }
            _ => (format!("reg {}", reg.index()), Datatype::Other(0)),
        }
    }

    /// What a register holds, as the right side of something of type `kind`.
    fn operand(&self, reg: Reg, kind: Option<Datatype>) -> String {
        match self.word(reg) {
            Word::Field(text, _) => text,
            Word::Masked(text, own, mask, xor) => {
                let kind = own.or(kind).unwrap_or(Datatype::Other(0));
                let mask = value::value(kind, mask.as_slice());
                if xor.as_slice().iter().all(|byte| *byte == 0) {
                    format!("{text} & {mask}")
                } else {
                    format!("{text} & {mask} ^ {}", value::value(kind, xor.as_slice()))
                }
            }
            Word::Constant(data) => value::value(kind.unwrap_or(guess(&data)), data.as_slice()),
            Word::Empty | Word::Rest => format!("reg {}", reg.index()),
        }
    }

    fn comparison(&self, reg: Reg, op: CmpOp, data: &Data) -> String {
        let (text, kind) = self.field(reg);
        let zero = data.as_slice().iter().all(|byte| *byte == 0);
        if let Word::Masked(_, _, mask, _) = self.word(reg) {
            let last: Vec<u8> = data.as_slice().iter().zip(mask.as_slice()).map(|(d, m)| d | !m).collect();
            let is_address = matches!(kind, Datatype::Ipv4Addr | Datatype::Ipv6Addr);
            if is_address && let Some(length) = value::prefix_length(data.as_slice(), &last) {
                let sign = if op == CmpOp::Ne { "!= " } else { "" };
                return format!("{text} {sign}{}/{length}", value::value(kind, data.as_slice()));
            }
            let mask = value::value(kind, mask.as_slice());
            return match (op, zero) {
                (CmpOp::Ne, true) => format!("{text} {mask}"),
                (CmpOp::Eq, _) => format!("{text} & {mask} == {}", value::value(kind, data.as_slice())),
                _ => format!("{text} & {mask} {} {}", sign(op), value::value(kind, data.as_slice())),
            };
        }
        let value = value::value(kind, data.as_slice());
        if op == CmpOp::Eq { format!("{text} {value}") } else { format!("{text} {} {value}", sign(op)) }
    }

    fn lookup(&mut self, set: &SetRef, sreg: Reg, result: LookupResult) {
        let (name, key) = match set {
            SetRef::Named(name) => {
                let span = (self.key_of)(name).map_or(Span::AsLoaded(None), Span::Key);
                (format!("@{name}"), self.concat(sreg, span))
            }
            SetRef::Anonymous(index) => match self.rule.sets.get(*index) {
                Some(own) => (anonymous(own), self.concat(sreg, Span::Key(&own.set.key))),
                None => ("@?".into(), self.concat(sreg, Span::AsLoaded(None))),
            },
        };
        match result {
            LookupResult::Match => self.out.push(format!("{key} {name}")),
            LookupResult::NoMatch => self.out.push(format!("{key} != {name}")),
            LookupResult::Verdict => self.out.push(format!("{key} vmap {name}")),
            LookupResult::Into(dreg) => {
                // The registers of the key below the result stay as they are; the result's further ones are
                // its own.
                let at = usize::from(dreg.index());
                self.words[at..].fill(Word::Rest);
                self.words[at] = Word::Field(format!("{key} map {name}"), None);
            }
        }
    }

    /// The words in registers from `reg` on, joined.
    fn concat(&self, reg: Reg, span: Span<'_>) -> String {
        let mut parts = Vec::new();
        let mut at = usize::from(reg.index());
        let mut push = |at: usize| match self.words.get(at) {
            Some(Word::Field(text, _) | Word::Masked(text, ..)) => Some(text.clone()),
            Some(Word::Constant(data)) => Some(value::value(guess(data), data.as_slice())),
            _ => None,
        };
        match span {
            Span::Key(key) => {
                for field in key.fields() {
                    parts.push(push(at).unwrap_or_else(|| format!("reg {at}")));
                    at += field.size().div_ceil(4).max(1) as usize;
                }
            }
            Span::Bytes(len) => {
                let end = at + len.div_ceil(4) as usize;
                parts.extend((at..end.min(self.words.len())).filter_map(&mut push));
            }
            Span::AsLoaded(until) => {
                let end = until
                    .map(|reg| usize::from(reg.index()))
                    .filter(|end| *end > at)
                    .unwrap_or(self.words.len());
                parts.extend((at..end).filter_map(&mut push));
            }
        }
        parts.join(" . ")
    }

    fn nat_target(
        &self,
        addr: Option<Reg>,
        addr_max: Option<Reg>,
        port: Option<Reg>,
        port_max: Option<Reg>,
        family: Family,
    ) -> String {
        let kind = if family == Family::Ip6 { Datatype::Ipv6Addr } else { Datatype::Ipv4Addr };
        let constant = |reg: Reg| matches!(self.word(reg), Word::Constant(_));
        let mut text = match addr {
            Some(addr) if family == Family::Ip6 && port.is_some() && constant(addr) => {
                format!("[{}]", self.operand(addr, Some(kind)))
            }
            Some(addr) => self.operand(addr, Some(kind)),
            None => String::new(),
        };
        if let Some(max) = addr_max {
            text.push_str(&format!("-{}", self.operand(max, Some(kind))));
        }
        if let Some(port) = port.filter(|port| !matches!(self.word(*port), Word::Rest)) {
            text.push_str(&format!(":{}", self.operand(port, Some(Datatype::InetService))));
        }
        if let Some(max) = port_max {
            text.push_str(&format!("-{}", self.operand(max, Some(Datatype::InetService))));
        }
        text
    }

    fn port_target(&self, port: Option<Reg>, port_max: Option<Reg>) -> String {
        if port.is_none() {
            return String::new();
        }
        format!(" to {}", self.nat_target(None, None, port, port_max, Family::Ip))
    }
}

/// Which registers a key covers.
enum Span<'a> {
    /// As many as this key has.
    Key(&'a KeyType),
    /// This many bytes.
    Bytes(u32),
    /// Everything that was loaded, up to this register if there is one.
    AsLoaded(Option<Reg>),
}

fn anonymous(own: &AnonymousSet) -> String {
    let elements: Vec<String> =
        own.elements.iter().map(|element| super::whole_element(&own.set, element)).collect();
    format!("{{ {} }}", elements.join(", "))
}

fn plus(offset: u32) -> String {
    if offset == 0 { String::new() } else { format!(" offset {offset}") }
}

fn sign(op: CmpOp) -> &'static str {
    match op {
        CmpOp::Eq => "==",
        CmpOp::Ne => "!=",
        CmpOp::Lt => "<",
        CmpOp::Le => "<=",
        CmpOp::Gt => ">",
        CmpOp::Ge => ">=",
    }
}

/// The likely type of a constant without context.
fn guess(data: &Data) -> Datatype {
    match data.len() {
        2 => Datatype::InetService,
        4 => Datatype::Mark,
        16 => Datatype::Ipv6Addr,
        _ => Datatype::Other(0),
    }
}

fn nat_flags(flags: NatFlags) -> String {
    let names =
        [(flags.random, "random"), (flags.fully_random, "fully-random"), (flags.persistent, "persistent")];
    let set: Vec<&str> = names.into_iter().filter_map(|(on, name)| on.then_some(name)).collect();
    if set.is_empty() { String::new() } else { format!(" {}", set.join(",")) }
}

fn payload_name(base: Base, offset: u32, len: u32) -> (String, Option<Datatype>) {
    let known = match (base, offset, len) {
        (Base::Link, 0, 6) => ("ether daddr", Datatype::EtherAddr),
        (Base::Link, 6, 6) => ("ether saddr", Datatype::EtherAddr),
        (Base::Link, 12, 2) => ("ether type", Datatype::EtherType),
        (Base::Network, 12, 4) => ("ip saddr", Datatype::Ipv4Addr),
        (Base::Network, 16, 4) => ("ip daddr", Datatype::Ipv4Addr),
        (Base::Network, 9, 1) => ("ip protocol", Datatype::InetProto),
        (Base::Network, 8, 16) => ("ip6 saddr", Datatype::Ipv6Addr),
        (Base::Network, 24, 16) => ("ip6 daddr", Datatype::Ipv6Addr),
        (Base::Network, 6, 1) => ("ip6 nexthdr", Datatype::InetProto),
        (Base::Network, 8, 1) => ("ip ttl", Datatype::HopLimit),
        (Base::Network, 7, 1) => ("ip6 hoplimit", Datatype::HopLimit),
        (Base::Network, 6, 2) => ("arp operation", Datatype::ArpOp),
        (Base::Network, 8, 6) => ("arp saddr ether", Datatype::EtherAddr),
        (Base::Network, 14, 4) => ("arp saddr ip", Datatype::Ipv4Addr),
        (Base::Network, 24, 4) => ("arp daddr ip", Datatype::Ipv4Addr),
        (Base::Transport, 0, 2) => ("th sport", Datatype::InetService),
        (Base::Transport, 2, 2) => ("th dport", Datatype::InetService),
        (Base::Transport, 13, 1) => ("tcp flags", Datatype::TcpFlag),
        (Base::Transport, 0, 1) => ("icmp type", Datatype::IcmpType),
        (Base::Transport, 8, 16) => ("nd target", Datatype::Ipv6Addr),
        _ => {
            let base = match base {
                Base::Link => "ll",
                Base::Network => "nh",
                Base::Transport => "th",
            };
            return (format!("@{base},{},{}", u64::from(offset) * 8, u64::from(len) * 8), None);
        }
    };
    (known.0.into(), Some(known.1))
}

fn meta_name(key: MetaKey) -> (String, Option<Datatype>) {
    let known = match key {
        MetaKey::PROTOCOL => ("meta protocol", Datatype::EtherType),
        MetaKey::MARK => ("meta mark", Datatype::Mark),
        MetaKey::IIF => ("iif", Datatype::IfIndex),
        MetaKey::OIF => ("oif", Datatype::IfIndex),
        MetaKey::IIFNAME => ("iifname", Datatype::IfName),
        MetaKey::OIFNAME => ("oifname", Datatype::IfName),
        MetaKey::SKUID => ("meta skuid", Datatype::Uid),
        MetaKey::SKGID => ("meta skgid", Datatype::Gid),
        MetaKey::NFPROTO => ("meta nfproto", Datatype::NfProto),
        MetaKey::L4PROTO => ("meta l4proto", Datatype::InetProto),
        MetaKey::IBRNAME => ("meta ibrname", Datatype::IfName),
        MetaKey::OBRNAME => ("meta obrname", Datatype::IfName),
        MetaKey::PKTTYPE => ("meta pkttype", Datatype::PktType),
        MetaKey::IIFGROUP => ("iifgroup", Datatype::Mark),
        MetaKey::OIFGROUP => ("oifgroup", Datatype::Mark),
        MetaKey(other) => return (format!("meta key-{other}"), None),
    };
    (known.0.into(), Some(known.1))
}

fn ct_name(key: CtKey, direction: Option<Direction>) -> (String, Option<Datatype>) {
    let known = match key {
        CtKey::STATE => ("state", Datatype::CtState),
        CtKey::DIRECTION => ("direction", Datatype::CtDir),
        CtKey::STATUS => ("status", Datatype::CtStatus),
        CtKey::MARK => ("mark", Datatype::Mark),
        CtKey::ZONE => ("zone", Datatype::Integer),
        CtKey::PROTOCOL => ("protocol", Datatype::InetProto),
        CtKey::PROTO_SRC => ("proto-src", Datatype::InetService),
        CtKey::PROTO_DST => ("proto-dst", Datatype::InetService),
        CtKey::SRC_IP => ("ip saddr", Datatype::Ipv4Addr),
        CtKey::DST_IP => ("ip daddr", Datatype::Ipv4Addr),
        CtKey::SRC_IP6 => ("ip6 saddr", Datatype::Ipv6Addr),
        CtKey::DST_IP6 => ("ip6 daddr", Datatype::Ipv6Addr),
        CtKey(other) => return (format!("ct key-{other}"), None),
    };
    let direction = match direction {
        None => "",
        Some(Direction::Original) => "original ",
        Some(Direction::Reply) => "reply ",
    };
    (format!("ct {direction}{}", known.0), Some(known.1))
}

fn fib_name(result: FibResult, flags: u32) -> (String, Option<Datatype>) {
    let names = [(1, "saddr"), (2, "daddr"), (4, "mark"), (8, "iif"), (16, "oif")];
    let of: Vec<&str> = names.into_iter().filter(|(bit, _)| flags & bit != 0).map(|(_, name)| name).collect();
    let (what, kind) = match (result, flags & 32 != 0) {
        (_, true) => ("oif", Datatype::Boolean),
        (FibResult::Oif, _) => ("oif", Datatype::IfIndex),
        (FibResult::OifName, _) => ("oifname", Datatype::IfName),
        (FibResult::AddrType, _) => ("type", Datatype::FibAddr),
    };
    (format!("fib {} {what}", of.join(" . ")), Some(kind))
}

/// Statements that use no register.
fn statement(expr: &Expr) -> String {
    match expr {
        Expr::Counter => "counter".into(),
        Expr::Notrack => "notrack".into(),
        Expr::Connlimit { count, invert } => {
            format!("ct count {}{count}", if *invert { "over " } else { "" })
        }
        Expr::Reject(Reject::TcpReset) => "reject with tcp reset".into(),
        Expr::Reject(Reject::Icmp(code)) => format!("reject with icmp {code}"),
        Expr::Reject(Reject::Icmpx(code)) => format!(
            "reject with icmpx {}",
            ["no-route", "port-unreachable", "host-unreachable", "admin-prohibited"]
                [usize::from(code.number())]
        ),
        Expr::Limit { rate, per, burst, unit, invert } => {
            let over = if *invert { "over " } else { "" };
            let (bytes, unit) = match unit {
                LimitUnit::Packets => ("", "packets"),
                LimitUnit::Bytes => (" bytes", "bytes"),
            };
            format!("limit rate {over}{rate}{bytes}/{} burst {burst} {unit}", super::duration(*per))
        }
        Expr::Log { prefix, target } => {
            let prefix = prefix.as_ref().map_or(String::new(), |prefix| format!(" prefix \"{prefix}\""));
            match target {
                LogTarget::Kernel { level: 4 } => format!("log{prefix}"),
                LogTarget::Kernel { level } => format!("log{prefix} level {level}"),
                LogTarget::Group { group, snaplen: 0 } => format!("log{prefix} group {group}"),
                LogTarget::Group { group, snaplen } => format!("log{prefix} group {group} snaplen {snaplen}"),
            }
        }
        Expr::Raw { name, data } => format!("[{name} {} bytes]", data.len()),
        other => format!("{other:?}"),
    }
}
