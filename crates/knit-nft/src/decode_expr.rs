//! Attributes to expressions, values and verdicts. What is not understood becomes a raw expression, never a
//! panic.

use std::time::Duration;

use knit_netlink::attr::Reader;

use crate::data::Data;
use crate::expr::{
    Base, CmpOp, CtKey, Direction, DynsetOp, Expr, FibResult, IcmpxCode, LimitUnit, LogTarget, LookupResult,
    MetaKey, NatFlags, NatKind, Reg, Reject, SetRef, SocketKey,
};
use crate::object::{Family, Verdict};
use crate::wire::{self, code};

/// An expression from the attributes of a list element.
pub(crate) fn expr(attrs: &Reader<'_>) -> Expr {
    let name = attrs.get(wire::expr::NAME).map(|attr| attr.string()).unwrap_or_default();
    let body = attrs.get(wire::expr::DATA).map_or(&[][..], |attr| attr.value);
    known(&name, &Reader::new(body)).unwrap_or_else(|| Expr::Raw { name: name.into(), data: body.into() })
}

/// The packets and bytes of a counter expression.
pub(crate) fn counter(attrs: &Reader<'_>) -> Option<(u64, u64)> {
    if attrs.get(wire::expr::NAME)?.string() != "counter" {
        return None;
    }
    let body = attrs.get(wire::expr::DATA)?.nested();
    Some((body.get(wire::counter::PACKETS)?.u64_be().ok()?, body.get(wire::counter::BYTES)?.u64_be().ok()?))
}

/// The value in a data attribute.
pub(crate) fn data(attrs: &Reader<'_>, attribute: u16) -> Option<Data> {
    let value = attrs.get(attribute)?.nested().get(wire::data::VALUE)?;
    (value.value.len() <= 64).then(|| Data::from_slice(value.value))
}

/// The verdict in a data attribute.
pub(crate) fn verdict(attrs: &Reader<'_>, attribute: u16) -> Option<Verdict> {
    let verdict = attrs.get(attribute)?.nested().get(wire::data::VERDICT)?.nested();
    let chain = || verdict.get(wire::verdict::CHAIN).map(|attr| attr.string().into());
    Some(match verdict.get(wire::verdict::CODE)?.u32_be().ok()? as i32 {
        code::ACCEPT => Verdict::Accept,
        code::DROP => Verdict::Drop,
        code::CONTINUE => Verdict::Continue,
        code::RETURN => Verdict::Return,
        code::JUMP => Verdict::Jump(chain()?),
        code::GOTO => Verdict::Goto(chain()?),
        _ => return None,
    })
}

fn known(name: &str, body: &Reader<'_>) -> Option<Expr> {
    let number = |attribute: u16| body.get(attribute).and_then(|attr| attr.u32_be().ok());
    let long = |attribute: u16| body.get(attribute).and_then(|attr| attr.u64_be().ok());
    let reg = |attribute: u16| number(attribute).and_then(Reg::from_number);
    // A range of one is written back by the kernel with both ends.
    let end = |first: Option<Reg>, attribute: u16| reg(attribute).filter(|last| Some(*last) != first);
    Some(match name {
        "payload" => {
            let base = match number(wire::payload::BASE)? {
                0 => Base::Link,
                1 => Base::Network,
                2 => Base::Transport,
                _ => return None,
            };
            let (offset, len) = (number(wire::payload::OFFSET)?, number(wire::payload::LEN)?);
            match (reg(wire::payload::SREG), number(wire::payload::CSUM_FLAGS).unwrap_or(0)) {
                (None, _) => Expr::Payload { dreg: reg(wire::payload::DREG)?, base, offset, len },
                (Some(sreg), 0) => {
                    let at = number(wire::payload::CSUM_OFFSET).unwrap_or(0);
                    let checksum = match number(wire::payload::CSUM_TYPE).unwrap_or(0) {
                        0 => None,
                        1 => Some(at),
                        _ => return None,
                    };
                    Expr::PayloadSet { sreg, base, offset, len, checksum }
                }
                // Checksums of transport headers follow too: nothing here is written like that.
                _ => return None,
            }
        }
        "meta" => {
            let key = MetaKey(number(wire::meta::KEY)?);
            match reg(wire::meta::SREG) {
                Some(sreg) => Expr::MetaSet { sreg, key },
                None => Expr::Meta { dreg: reg(wire::meta::DREG)?, key },
            }
        }
        "ct" => {
            let key = CtKey(number(wire::ct::KEY)?);
            let direction = match body.get(wire::ct::DIRECTION) {
                Some(attr) if attr.u8().ok()? == 0 => Some(Direction::Original),
                Some(_) => Some(Direction::Reply),
                None => None,
            };
            match reg(wire::ct::SREG) {
                Some(sreg) => Expr::CtSet { sreg, key, direction },
                None => Expr::Ct { dreg: reg(wire::ct::DREG)?, key, direction },
            }
        }
        "fib" => {
            let result = match number(wire::fib::RESULT)? {
                1 => FibResult::Oif,
                2 => FibResult::OifName,
                3 => FibResult::AddrType,
                _ => return None,
            };
            Expr::Fib { dreg: reg(wire::fib::DREG)?, result, flags: number(wire::fib::FLAGS)? }
        }
        "socket" => {
            let key = match number(wire::socket::KEY)? {
                0 => SocketKey::Transparent,
                1 => SocketKey::Mark,
                2 => SocketKey::Wildcard,
                3 => SocketKey::CgroupV2 { level: number(wire::socket::LEVEL)? },
                _ => return None,
            };
            Expr::Socket { dreg: reg(wire::socket::DREG)?, key }
        }
        "cmp" => {
            let op = match number(wire::cmp::OP)? {
                0 => CmpOp::Eq,
                1 => CmpOp::Ne,
                2 => CmpOp::Lt,
                3 => CmpOp::Le,
                4 => CmpOp::Gt,
                5 => CmpOp::Ge,
                _ => return None,
            };
            Expr::Cmp { sreg: reg(wire::cmp::SREG)?, op, data: data(body, wire::cmp::DATA)? }
        }
        "range" => Expr::Range {
            sreg: reg(wire::range::SREG)?,
            invert: number(wire::range::OP)? == 1,
            from: data(body, wire::range::FROM)?,
            to: data(body, wire::range::TO)?,
        },
        "bitwise" => {
            if number(wire::bitwise::OP).unwrap_or(0) != 0 {
                return None;
            }
            let (mask, xor) = (data(body, wire::bitwise::MASK)?, data(body, wire::bitwise::XOR)?);
            Expr::Bitwise { sreg: reg(wire::bitwise::SREG)?, dreg: reg(wire::bitwise::DREG)?, mask, xor }
        }
        "immediate" => match number(wire::immediate::DREG)? {
            0 => Expr::Verdict(verdict(body, wire::immediate::DATA)?),
            _ => Expr::Immediate {
                dreg: reg(wire::immediate::DREG)?,
                data: data(body, wire::immediate::DATA)?,
            },
        },
        "lookup" => {
            let set = SetRef::Named(body.get(wire::lookup::SET)?.string().into());
            let inverted = number(wire::lookup::FLAGS).unwrap_or(0) & 1 != 0;
            let result = match (number(wire::lookup::DREG), inverted) {
                (None, false) => LookupResult::Match,
                (None, true) => LookupResult::NoMatch,
                (Some(0), false) => LookupResult::Verdict,
                (Some(dreg), false) => LookupResult::Into(Reg::from_number(dreg)?),
                (Some(_), true) => return None,
            };
            Expr::Lookup { set, sreg: reg(wire::lookup::SREG)?, result }
        }
        "numgen" => Expr::Numgen {
            dreg: reg(wire::numgen::DREG)?,
            modulus: number(wire::numgen::MODULUS)?,
            random: number(wire::numgen::TYPE)? == 1,
            offset: number(wire::numgen::OFFSET).unwrap_or(0),
        },
        "hash" => {
            let (dreg, modulus) = (reg(wire::hash::DREG)?, number(wire::hash::MODULUS)?);
            let offset = number(wire::hash::OFFSET).unwrap_or(0);
            if number(wire::hash::TYPE).unwrap_or(0) == 1 {
                Expr::Symhash { dreg, modulus, offset }
            } else {
                let (sreg, len) = (reg(wire::hash::SREG)?, number(wire::hash::LEN)?);
                Expr::Jhash { sreg, dreg, len, modulus, seed: number(wire::hash::SEED), offset }
            }
        }
        "nat" => {
            let family = Family::from_number(u8::try_from(number(wire::nat::FAMILY)?).ok()?)?;
            let kind = if number(wire::nat::TYPE)? == 1 { NatKind::Dnat } else { NatKind::Snat };
            let (addr, port) = (reg(wire::nat::ADDR_MIN), reg(wire::nat::PROTO_MIN));
            let (addr_max, port_max) = (end(addr, wire::nat::ADDR_MAX), end(port, wire::nat::PROTO_MAX));
            let flags = NatFlags::from_bits(number(wire::nat::FLAGS).unwrap_or(0));
            Expr::Nat { kind, family, addr, addr_max, port, port_max, flags }
        }
        "masq" => {
            let port = reg(wire::masq::PROTO_MIN);
            let flags = NatFlags::from_bits(number(wire::masq::FLAGS).unwrap_or(0));
            Expr::Masquerade { flags, port, port_max: end(port, wire::masq::PROTO_MAX) }
        }
        "redir" => {
            let port = reg(wire::redir::PROTO_MIN);
            let flags = NatFlags::from_bits(number(wire::redir::FLAGS).unwrap_or(0));
            Expr::Redirect { flags, port, port_max: end(port, wire::redir::PROTO_MAX) }
        }
        "tproxy" => Expr::Tproxy {
            family: match number(wire::tproxy::FAMILY)? {
                0 => None,
                family => Some(Family::from_number(u8::try_from(family).ok()?)?),
            },
            addr: reg(wire::tproxy::REG_ADDR),
            port: reg(wire::tproxy::REG_PORT),
        },
        "reject" => {
            let code = body.get(wire::reject::CODE).and_then(|attr| attr.u8().ok());
            Expr::Reject(match number(wire::reject::TYPE)? {
                0 => Reject::Icmp(code?),
                1 => Reject::TcpReset,
                2 => Reject::Icmpx(IcmpxCode::from_number(code?)?),
                _ => return None,
            })
        }
        "counter" => Expr::Counter,
        "limit" => Expr::Limit {
            rate: long(wire::limit::RATE)?,
            per: Duration::from_secs(long(wire::limit::UNIT)?),
            burst: number(wire::limit::BURST).unwrap_or(0),
            unit: if number(wire::limit::TYPE)? == 1 { LimitUnit::Bytes } else { LimitUnit::Packets },
            invert: number(wire::limit::FLAGS).unwrap_or(0) & 1 != 0,
        },
        "connlimit" => Expr::Connlimit {
            count: number(wire::connlimit::COUNT)?,
            invert: number(wire::connlimit::FLAGS).unwrap_or(0) & 1 != 0,
        },
        "log" => {
            let prefix = body.get(wire::log::PREFIX).map(|attr| attr.string().into());
            let target = match body.get(wire::log::GROUP) {
                Some(group) => LogTarget::Group {
                    group: group.u16_be().ok()?,
                    snaplen: number(wire::log::SNAPLEN).unwrap_or(0),
                },
                None => LogTarget::Kernel { level: u8::try_from(number(wire::log::LEVEL)?).ok()? },
            };
            Expr::Log { prefix, target }
        }
        "dynset" => {
            if body.get(wire::dynset::EXPRESSIONS).is_some() {
                return None;
            }
            if let Some(limit) = body.get(wire::dynset::EXPR) {
                let plain = number(wire::dynset::OP)? == 0 && body.get(wire::dynset::SREG_DATA).is_none();
                // Anything nested deeper is nothing that this crate makes.
                let limit = expr(&limit.nested());
                let known = matches!(limit, Expr::Limit { .. } | Expr::Connlimit { .. } | Expr::Counter);
                return (plain && known).then_some(Expr::Meter {
                    set: body.get(wire::dynset::SET_NAME)?.string().into(),
                    key: reg(wire::dynset::SREG_KEY)?,
                    timeout: long(wire::dynset::TIMEOUT).filter(|ms| *ms > 0).map(Duration::from_millis),
                    limit: Box::new(limit),
                });
            }
            let op = match number(wire::dynset::OP)? {
                0 => DynsetOp::Add,
                1 => DynsetOp::Update,
                2 => DynsetOp::Delete,
                _ => return None,
            };
            Expr::Dynset {
                set: body.get(wire::dynset::SET_NAME)?.string().into(),
                op,
                key: reg(wire::dynset::SREG_KEY)?,
                data: reg(wire::dynset::SREG_DATA),
                timeout: long(wire::dynset::TIMEOUT).filter(|ms| *ms > 0).map(Duration::from_millis),
            }
        }
        "notrack" => Expr::Notrack,
        _ => return None,
    })
}
