//! Expressions, values and verdicts to attributes.

use knit_netlink::attr::Writer;

use crate::data::Data;
use crate::expr::{
    Base, CmpOp, Direction, DynsetOp, Expr, FibResult, LimitUnit, LogTarget, LookupResult, NatFlags, NatKind,
    Reg, Reject, SetRef, SocketKey,
};
use crate::object::Verdict;
use crate::wire::{self, code};

/// The name of an expression, and its attributes. `sets` are the names and batch ids of the rule's own sets.
pub(crate) fn put_expr(w: &mut Writer<'_>, expr: &Expr, sets: &[(&'static str, u32)]) {
    w.string(wire::expr::NAME, name(expr));
    match expr {
        Expr::Notrack => {}
        Expr::Raw { data, .. } => {
            w.bytes(wire::expr::DATA | knit_netlink::attr::NESTED, data);
        }
        known => {
            w.nested(wire::expr::DATA, |w| put_body(w, known, sets));
        }
    }
}

/// A value inside an attribute of its own.
pub(crate) fn put_data(w: &mut Writer<'_>, attribute: u16, data: &Data) {
    w.nested(attribute, |w| {
        w.bytes(wire::data::VALUE, data.as_slice());
    });
}

/// A verdict, as the content of a data attribute.
pub(crate) fn put_verdict(w: &mut Writer<'_>, verdict: &Verdict) {
    let code = match verdict {
        Verdict::Accept => code::ACCEPT,
        Verdict::Drop => code::DROP,
        Verdict::Continue => code::CONTINUE,
        Verdict::Return => code::RETURN,
        Verdict::Jump(_) => code::JUMP,
        Verdict::Goto(_) => code::GOTO,
    };
    w.nested(wire::data::VERDICT, |w| {
        w.u32_be(wire::verdict::CODE, code as u32);
        if let Some(chain) = verdict.chain() {
            w.string(wire::verdict::CHAIN, chain);
        }
    });
}

fn number_of(base: Base) -> u32 {
    match base {
        Base::Link => 0,
        Base::Network => 1,
        Base::Transport => 2,
    }
}

fn name(expr: &Expr) -> &str {
    match expr {
        Expr::Payload { .. } | Expr::PayloadSet { .. } => "payload",
        Expr::Meta { .. } | Expr::MetaSet { .. } => "meta",
        Expr::Ct { .. } | Expr::CtSet { .. } => "ct",
        Expr::Fib { .. } => "fib",
        Expr::Socket { .. } => "socket",
        Expr::Cmp { .. } => "cmp",
        Expr::Range { .. } => "range",
        Expr::Bitwise { .. } => "bitwise",
        Expr::Immediate { .. } | Expr::Verdict(_) => "immediate",
        Expr::Lookup { .. } => "lookup",
        Expr::Numgen { .. } => "numgen",
        Expr::Jhash { .. } | Expr::Symhash { .. } => "hash",
        Expr::Nat { .. } => "nat",
        Expr::Masquerade { .. } => "masq",
        Expr::Redirect { .. } => "redir",
        Expr::Tproxy { .. } => "tproxy",
        Expr::Reject(_) => "reject",
        Expr::Counter => "counter",
        Expr::Limit { .. } => "limit",
        Expr::Log { .. } => "log",
        Expr::Dynset { .. } | Expr::Meter { .. } => "dynset",
        Expr::Connlimit { .. } => "connlimit",
        Expr::Notrack => "notrack",
        Expr::Raw { name, .. } => name,
    }
}

fn put_body(w: &mut Writer<'_>, expr: &Expr, sets: &[(&'static str, u32)]) {
    match expr {
        Expr::Payload { dreg, base, offset, len } => {
            reg(w, wire::payload::DREG, *dreg);
            w.u32_be(wire::payload::BASE, number_of(*base));
            w.u32_be(wire::payload::OFFSET, *offset).u32_be(wire::payload::LEN, *len);
        }
        Expr::PayloadSet { sreg, base, offset, len, checksum } => {
            reg(w, wire::payload::SREG, *sreg);
            w.u32_be(wire::payload::BASE, number_of(*base));
            w.u32_be(wire::payload::OFFSET, *offset).u32_be(wire::payload::LEN, *len);
            w.u32_be(wire::payload::CSUM_TYPE, u32::from(checksum.is_some()));
            w.u32_be(wire::payload::CSUM_OFFSET, checksum.unwrap_or_default());
        }
        Expr::Meta { dreg, key } => {
            w.u32_be(wire::meta::KEY, key.0);
            reg(w, wire::meta::DREG, *dreg);
        }
        Expr::MetaSet { sreg, key } => {
            w.u32_be(wire::meta::KEY, key.0);
            reg(w, wire::meta::SREG, *sreg);
        }
        Expr::Ct { dreg, key, direction } => {
            w.u32_be(wire::ct::KEY, key.0);
            put_direction(w, *direction);
            reg(w, wire::ct::DREG, *dreg);
        }
        Expr::CtSet { sreg, key, direction } => {
            w.u32_be(wire::ct::KEY, key.0);
            put_direction(w, *direction);
            reg(w, wire::ct::SREG, *sreg);
        }
        Expr::Fib { dreg, result, flags } => {
            let result = match result {
                FibResult::Oif => 1,
                FibResult::OifName => 2,
                FibResult::AddrType => 3,
            };
            reg(w, wire::fib::DREG, *dreg);
            w.u32_be(wire::fib::RESULT, result).u32_be(wire::fib::FLAGS, *flags);
        }
        Expr::Socket { dreg, key } => {
            let (key, level) = match key {
                SocketKey::Transparent => (0, None),
                SocketKey::Mark => (1, None),
                SocketKey::Wildcard => (2, None),
                SocketKey::CgroupV2 { level } => (3, Some(*level)),
            };
            w.u32_be(wire::socket::KEY, key);
            reg(w, wire::socket::DREG, *dreg);
            if let Some(level) = level {
                w.u32_be(wire::socket::LEVEL, level);
            }
        }
        Expr::Cmp { sreg, op, data } => {
            let op = match op {
                CmpOp::Eq => 0,
                CmpOp::Ne => 1,
                CmpOp::Lt => 2,
                CmpOp::Le => 3,
                CmpOp::Gt => 4,
                CmpOp::Ge => 5,
            };
            reg(w, wire::cmp::SREG, *sreg);
            w.u32_be(wire::cmp::OP, op);
            put_data(w, wire::cmp::DATA, data);
        }
        Expr::Range { sreg, invert, from, to } => {
            reg(w, wire::range::SREG, *sreg);
            w.u32_be(wire::range::OP, u32::from(*invert));
            put_data(w, wire::range::FROM, from);
            put_data(w, wire::range::TO, to);
        }
        Expr::Bitwise { sreg, dreg, mask, xor } => {
            reg(w, wire::bitwise::SREG, *sreg);
            reg(w, wire::bitwise::DREG, *dreg);
            w.u32_be(wire::bitwise::LEN, mask.len() as u32);
            put_data(w, wire::bitwise::MASK, mask);
            put_data(w, wire::bitwise::XOR, xor);
        }
        Expr::Immediate { dreg, data } => {
            reg(w, wire::immediate::DREG, *dreg);
            put_data(w, wire::immediate::DATA, data);
        }
        Expr::Verdict(verdict) => {
            w.u32_be(wire::immediate::DREG, 0);
            w.nested(wire::immediate::DATA, |w| put_verdict(w, verdict));
        }
        Expr::Lookup { set, sreg, result } => put_lookup(w, set, *sreg, *result, sets),
        Expr::Numgen { dreg, modulus, random, offset } => {
            reg(w, wire::numgen::DREG, *dreg);
            w.u32_be(wire::numgen::MODULUS, *modulus).u32_be(wire::numgen::TYPE, u32::from(*random));
            w.u32_be(wire::numgen::OFFSET, *offset);
        }
        Expr::Jhash { sreg, dreg, len, modulus, seed, offset } => {
            reg(w, wire::hash::SREG, *sreg);
            reg(w, wire::hash::DREG, *dreg);
            w.u32_be(wire::hash::LEN, *len).u32_be(wire::hash::MODULUS, *modulus);
            if let Some(seed) = seed {
                w.u32_be(wire::hash::SEED, *seed);
            }
            w.u32_be(wire::hash::OFFSET, *offset).u32_be(wire::hash::TYPE, 0);
        }
        Expr::Symhash { dreg, modulus, offset } => {
            reg(w, wire::hash::DREG, *dreg);
            w.u32_be(wire::hash::MODULUS, *modulus);
            w.u32_be(wire::hash::OFFSET, *offset).u32_be(wire::hash::TYPE, 1);
        }
        Expr::Nat { kind, family, addr, addr_max, port, port_max, flags } => {
            w.u32_be(wire::nat::TYPE, u32::from(*kind == NatKind::Dnat));
            w.u32_be(wire::nat::FAMILY, u32::from(*family as u8));
            optional_reg(w, wire::nat::ADDR_MIN, *addr);
            optional_reg(w, wire::nat::ADDR_MAX, *addr_max);
            optional_reg(w, wire::nat::PROTO_MIN, *port);
            optional_reg(w, wire::nat::PROTO_MAX, *port_max);
            nat_flags(w, wire::nat::FLAGS, *flags);
        }
        Expr::Masquerade { flags, port, port_max } => {
            nat_flags(w, wire::masq::FLAGS, *flags);
            optional_reg(w, wire::masq::PROTO_MIN, *port);
            optional_reg(w, wire::masq::PROTO_MAX, *port_max);
        }
        Expr::Redirect { flags, port, port_max } => {
            optional_reg(w, wire::redir::PROTO_MIN, *port);
            optional_reg(w, wire::redir::PROTO_MAX, *port_max);
            nat_flags(w, wire::redir::FLAGS, *flags);
        }
        Expr::Tproxy { family, addr, port } => {
            w.u32_be(wire::tproxy::FAMILY, family.map_or(0, |family| u32::from(family as u8)));
            optional_reg(w, wire::tproxy::REG_ADDR, *addr);
            optional_reg(w, wire::tproxy::REG_PORT, *port);
        }
        Expr::Reject(reject) => {
            let (kind, code) = match reject {
                Reject::Icmp(code) => (0, Some(*code)),
                Reject::TcpReset => (1, None),
                Reject::Icmpx(code) => (2, Some(code.number())),
            };
            w.u32_be(wire::reject::TYPE, kind);
            if let Some(code) = code {
                w.u8(wire::reject::CODE, code);
            }
        }
        Expr::Counter => {
            w.u64_be(wire::counter::BYTES, 0).u64_be(wire::counter::PACKETS, 0);
        }
        Expr::Limit { rate, per, burst, unit, invert } => {
            w.u64_be(wire::limit::RATE, *rate).u64_be(wire::limit::UNIT, per.as_secs());
            w.u32_be(wire::limit::BURST, *burst);
            w.u32_be(wire::limit::TYPE, u32::from(*unit == LimitUnit::Bytes));
            w.u32_be(wire::limit::FLAGS, u32::from(*invert));
        }
        Expr::Log { prefix, target } => {
            if let Some(prefix) = prefix {
                w.string(wire::log::PREFIX, prefix);
            }
            match target {
                LogTarget::Kernel { level } => {
                    w.u32_be(wire::log::LEVEL, u32::from(*level));
                }
                LogTarget::Group { group, snaplen } => {
                    w.u16_be(wire::log::GROUP, *group);
                    if *snaplen > 0 {
                        w.u32_be(wire::log::SNAPLEN, *snaplen);
                    }
                }
            }
        }
        Expr::Dynset { set, op, key, data, timeout } => {
            let op = match op {
                DynsetOp::Add => 0,
                DynsetOp::Update => 1,
                DynsetOp::Delete => 2,
            };
            w.string(wire::dynset::SET_NAME, set).u32_be(wire::dynset::OP, op);
            reg(w, wire::dynset::SREG_KEY, *key);
            optional_reg(w, wire::dynset::SREG_DATA, *data);
            if let Some(timeout) = timeout {
                w.u64_be(wire::dynset::TIMEOUT, u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
            }
        }
        Expr::Meter { set, key, timeout, limit } => {
            w.string(wire::dynset::SET_NAME, set).u32_be(wire::dynset::OP, 0);
            reg(w, wire::dynset::SREG_KEY, *key);
            if let Some(timeout) = timeout {
                w.u64_be(wire::dynset::TIMEOUT, u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
            }
            w.nested(wire::dynset::EXPR, |w| put_expr(w, limit, sets));
        }
        Expr::Connlimit { count, invert } => {
            w.u32_be(wire::connlimit::COUNT, *count).u32_be(wire::connlimit::FLAGS, u32::from(*invert));
        }
        Expr::Notrack | Expr::Raw { .. } => {}
    }
}

fn put_lookup(
    w: &mut Writer<'_>,
    set: &SetRef,
    sreg: Reg,
    result: LookupResult,
    sets: &[(&'static str, u32)],
) {
    match set {
        SetRef::Named(name) => {
            w.string(wire::lookup::SET, name);
        }
        SetRef::Anonymous(index) => {
            // A reference to a set that the rule does not have is sent without one, and refused.
            if let Some((template, id)) = sets.get(*index) {
                w.string(wire::lookup::SET, template).u32_be(wire::lookup::SET_ID, *id);
            }
        }
    }
    reg(w, wire::lookup::SREG, sreg);
    match result {
        LookupResult::Match => {}
        LookupResult::NoMatch => {
            w.u32_be(wire::lookup::FLAGS, 1);
        }
        LookupResult::Into(dreg) => reg(w, wire::lookup::DREG, dreg),
        LookupResult::Verdict => {
            w.u32_be(wire::lookup::DREG, 0);
        }
    }
}

fn reg(w: &mut Writer<'_>, attribute: u16, reg: Reg) {
    w.u32_be(attribute, reg.number());
}

fn optional_reg(w: &mut Writer<'_>, attribute: u16, optional: Option<Reg>) {
    if let Some(it) = optional {
        reg(w, attribute, it);
    }
}

fn nat_flags(w: &mut Writer<'_>, attribute: u16, flags: NatFlags) {
    if flags != NatFlags::NONE {
        w.u32_be(attribute, flags.bits());
    }
}

fn put_direction(w: &mut Writer<'_>, direction: Option<Direction>) {
    if let Some(direction) = direction {
        w.u8(wire::ct::DIRECTION, u8::from(direction == Direction::Reply));
    }
}
