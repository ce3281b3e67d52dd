//! Properties of the codec: what is written is read back, and no bytes make a decoder panic.

use std::time::Duration;

use knit_netlink::Batch;
use knit_netlink::attr::{Reader, Writer};
use proptest::prelude::*;

use super::*;
use crate::decode;
use crate::encode::Encoded;
use crate::encode_expr::put_expr;
use crate::expr::{
    Base, CmpOp, CtKey, DynsetOp, FibResult, LimitUnit, LogTarget, LookupResult, MetaKey, SetRef, SocketKey,
};

fn reg() -> impl Strategy<Value = Reg> {
    (0..Reg::COUNT).prop_map(|index| Reg::new(index).expect("below sixteen"))
}

fn data() -> impl Strategy<Value = Data> {
    prop::collection::vec(any::<u8>(), 1..=64).prop_map(|bytes| Data::from_slice(&bytes))
}

fn name() -> impl Strategy<Value = Name> {
    "[a-z][a-z0-9-]{0,20}".prop_map(Name::from)
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Accept),
        Just(Verdict::Drop),
        Just(Verdict::Continue),
        Just(Verdict::Return),
        name().prop_map(Verdict::Jump),
        name().prop_map(Verdict::Goto),
    ]
}

fn nat_flags() -> impl Strategy<Value = NatFlags> {
    any::<(bool, bool, bool)>().prop_map(|(random, fully_random, persistent)| NatFlags {
        random,
        fully_random,
        persistent,
    })
}

fn expr() -> impl Strategy<Value = Expr> {
    let ops = prop::sample::select(vec![CmpOp::Eq, CmpOp::Ne, CmpOp::Lt, CmpOp::Le, CmpOp::Gt, CmpOp::Ge]);
    let bases = prop::sample::select(vec![Base::Link, Base::Network, Base::Transport]);
    let directions = prop::sample::select(vec![None, Some(Direction::Original), Some(Direction::Reply)]);
    let results = prop::sample::select(vec![FibResult::Oif, FibResult::OifName, FibResult::AddrType]);
    let keys = prop_oneof![
        Just(SocketKey::Transparent),
        Just(SocketKey::Mark),
        Just(SocketKey::Wildcard),
        any::<u32>().prop_map(|level| SocketKey::CgroupV2 { level }),
    ];
    let lookups = prop_oneof![
        Just(LookupResult::Match),
        Just(LookupResult::NoMatch),
        Just(LookupResult::Verdict),
        reg().prop_map(LookupResult::Into),
    ];
    let dynsets = prop::sample::select(vec![DynsetOp::Add, DynsetOp::Update, DynsetOp::Delete]);
    let rejects = prop_oneof![
        Just(Reject::TcpReset),
        any::<u8>().prop_map(Reject::Icmp),
        Just(Reject::Icmpx(IcmpxCode::AdminProhibited)),
    ];
    let pair = |first: Option<Reg>, last: Option<Reg>| if first == last { None } else { last };
    let optional = || prop::option::of(reg());
    prop_oneof![
        (reg(), bases, any::<u32>(), any::<u32>()).prop_map(|(dreg, base, offset, len)| Expr::Payload {
            dreg,
            base,
            offset,
            len
        }),
        (reg(), any::<u32>(), any::<u32>(), prop::option::of(any::<u32>())).prop_map(
            |(sreg, offset, len, checksum)| Expr::PayloadSet {
                sreg,
                base: Base::Network,
                offset,
                len,
                checksum
            }
        ),
        (reg(), any::<u32>()).prop_map(|(dreg, key)| Expr::Meta { dreg, key: MetaKey(key) }),
        (reg(), any::<u32>()).prop_map(|(sreg, key)| Expr::MetaSet { sreg, key: MetaKey(key) }),
        (reg(), any::<u32>(), directions.clone()).prop_map(|(dreg, key, direction)| Expr::Ct {
            dreg,
            key: CtKey(key),
            direction
        }),
        (reg(), any::<u32>(), directions).prop_map(|(sreg, key, direction)| Expr::CtSet {
            sreg,
            key: CtKey(key),
            direction
        }),
        (reg(), results, any::<u32>()).prop_map(|(dreg, result, flags)| Expr::Fib { dreg, result, flags }),
        (reg(), keys).prop_map(|(dreg, key)| Expr::Socket { dreg, key }),
        (reg(), ops, data()).prop_map(|(sreg, op, data)| Expr::Cmp { sreg, op, data }),
        (reg(), any::<bool>(), data(), data()).prop_map(|(sreg, invert, from, to)| Expr::Range {
            sreg,
            invert,
            from,
            to
        }),
        (reg(), reg(), data(), data()).prop_map(|(sreg, dreg, mask, xor)| Expr::Bitwise {
            sreg,
            dreg,
            mask,
            xor
        }),
        (reg(), data()).prop_map(|(dreg, data)| Expr::Immediate { dreg, data }),
        verdict().prop_map(Expr::Verdict),
        (name(), reg(), lookups).prop_map(|(set, sreg, result)| Expr::Lookup {
            set: SetRef::Named(set),
            sreg,
            result
        }),
        (reg(), any::<u32>(), any::<bool>(), any::<u32>())
            .prop_map(|(dreg, modulus, random, offset)| Expr::Numgen { dreg, modulus, random, offset }),
        (reg(), reg(), any::<u32>(), any::<u32>(), any::<Option<u32>>(), any::<u32>()).prop_map(
            |(sreg, dreg, len, modulus, seed, offset)| Expr::Jhash { sreg, dreg, len, modulus, seed, offset }
        ),
        (reg(), any::<u32>(), any::<u32>()).prop_map(|(dreg, modulus, offset)| Expr::Symhash {
            dreg,
            modulus,
            offset
        }),
        (any::<bool>(), any::<bool>(), optional(), optional(), optional(), optional(), nat_flags()).prop_map(
            move |(dnat, v6, addr, addr_max, port, port_max, flags)| Expr::Nat {
                kind: if dnat { NatKind::Dnat } else { NatKind::Snat },
                family: if v6 { Family::Ip6 } else { Family::Ip },
                addr,
                addr_max: pair(addr, addr_max),
                port,
                port_max: pair(port, port_max),
                flags,
            }
        ),
        (nat_flags(), optional(), optional()).prop_map(move |(flags, port, last)| Expr::Masquerade {
            flags,
            port,
            port_max: pair(port, last)
        }),
        (nat_flags(), optional(), optional()).prop_map(move |(flags, port, last)| Expr::Redirect {
            flags,
            port,
            port_max: pair(port, last)
        }),
        (any::<bool>(), optional(), optional()).prop_map(|(v6, addr, port)| Expr::Tproxy {
            family: v6.then_some(Family::Ip6),
            addr,
            port
        }),
        rejects.prop_map(Expr::Reject),
        Just(Expr::Counter),
        Just(Expr::Notrack),
        (any::<u64>(), any::<u64>(), any::<u32>(), any::<bool>(), any::<bool>()).prop_map(
            |(rate, per, burst, bytes, invert)| Expr::Limit {
                rate,
                per: Duration::from_secs(per),
                burst,
                unit: if bytes { LimitUnit::Bytes } else { LimitUnit::Packets },
                invert,
            }
        ),
        (prop::option::of("[ -~]{0,40}"), any::<bool>(), any::<u16>(), any::<u32>()).prop_map(
            |(prefix, kernel, group, snaplen)| Expr::Log {
                prefix: prefix.map(Into::into),
                target: if kernel {
                    LogTarget::Kernel { level: (group % 8) as u8 }
                } else {
                    LogTarget::Group { group, snaplen }
                },
            }
        ),
        (any::<u32>(), any::<bool>()).prop_map(|(count, invert)| Expr::Connlimit { count, invert }),
        (name(), reg(), any::<u32>(), any::<bool>()).prop_map(|(set, key, count, invert)| Expr::Meter {
            set,
            key,
            timeout: invert.then_some(Duration::from_millis(u64::from(count) + 1)),
            limit: Box::new(Expr::Connlimit { count, invert }),
        }),
        (name(), reg()).prop_map(|(set, key)| Expr::Meter {
            set,
            key,
            timeout: None,
            limit: Box::new(Expr::Counter),
        }),
        (name(), dynsets, reg(), optional(), prop::option::of(1..u64::MAX)).prop_map(
            |(set, op, key, data, timeout)| Expr::Dynset {
                set,
                op,
                key,
                data,
                timeout: timeout.map(Duration::from_millis)
            }
        ),
    ]
}

fn element() -> impl Strategy<Value = Element> {
    let value = prop_oneof![
        Just(ElementValue::None),
        data().prop_map(ElementValue::Data),
        verdict().prop_map(ElementValue::Verdict),
    ];
    let key = prop::collection::vec(any::<u8>(), 12).prop_map(|bytes| Data::from_slice(&bytes));
    (key, value, prop::option::of(1..u64::MAX), prop::option::of("[ -~]{0,128}")).prop_map(
        |(key, value, timeout, comment)| Element {
            key,
            key_end: None,
            value,
            timeout: timeout.map(Duration::from_millis),
            comment: comment.map(Into::into),
        },
    )
}

/// What the elements of a transaction look like to whoever reads its messages.
fn read_back(batch: &Batch) -> Vec<Element> {
    let bytes = batch.as_bytes();
    let mut found = Vec::new();
    for message in knit_netlink::Messages::new(bytes) {
        let message = message.expect("well formed");
        let (_, attrs) = message.split::<4>().expect("a header");
        found.extend(decode::elements(&attrs).map(|listed| listed.element));
    }
    found
}

proptest! {
    #[test]
    fn expressions_are_read_back_as_written(expr in expr()) {
        let mut buffer = Vec::new();
        let mut w = Writer::new(&mut buffer);
        put_expr(&mut w, &expr, &[]);
        w.finish().expect("small");
        prop_assert_eq!(decode_expr::expr(&Reader::new(&buffer)), expr);
    }

    #[test]
    fn any_rule_can_be_printed(exprs in prop::collection::vec(expr(), 0..12)) {
        let mut rule = Rule::new().comment("x");
        rule.exprs = exprs;
        prop_assert!(render::rule_text(&rule).ends_with("comment \"x\""));
    }

    #[test]
    fn elements_are_read_back_as_written(elements in prop::collection::vec(element(), 0..60)) {
        let set = Set::of::<(std::net::Ipv4Addr, L4Proto, Port)>("s");
        let mut tx = Transaction::new();
        tx.add_elements(&TableId::new(Family::Ip, "t"), &set, elements.clone());
        let mut encoded = Encoded::begin(None);
        encoded.op(0, &tx.ops()[0]).expect("valid");
        prop_assert_eq!(read_back(&encoded.batch), elements);
    }

    #[test]
    fn ranges_are_joined_from_their_ends(cuts in prop::collection::btree_set(any::<u32>(), 0..40)) {
        let cuts: Vec<u32> = cuts.into_iter().collect();
        let address = |number: u32| std::net::Ipv4Addr::from(number);
        let ranges: Vec<Element> =
            cuts.chunks_exact(2).map(|cut| Element::range(&address(cut[0]), &address(cut[1]))).collect();
        let set = Set::of::<std::net::Ipv4Addr>("s").interval();
        let mut tx = Transaction::new();
        tx.add_elements(&TableId::new(Family::Ip, "t"), &set, ranges.clone());
        let mut encoded = Encoded::begin(None);
        encoded.op(0, &tx.ops()[0]).expect("valid");
        let mut listed = Vec::new();
        for message in knit_netlink::Messages::new(encoded.batch.as_bytes()).flatten() {
            listed.extend(decode::elements(&message.split::<4>().expect("a header").1));
        }
        listed.reverse();
        let joined: Vec<Element> = decode::join_ranges(&set, listed).into_iter().map(|item|
            item.element).collect();
        prop_assert_eq!(joined, ranges);
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        decode_any(&bytes);
    }

    #[test]
    fn damaged_messages_never_panic(
        exprs in prop::collection::vec(expr(), 0..6),
        elements in prop::collection::vec(element(), 0..4),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
    ) {
        let id = TableId::new(Family::Ip, "t");
        let mut rule = Rule::new();
        rule.exprs = exprs;
        let set = Set::of::<(std::net::Ipv4Addr, L4Proto, Port)>("s");
        let mut tx = Transaction::new();
        tx.add_table(id.clone()).add_chain(&id, Chain::base("c", ChainKind::Nat, Hook::Input, 0));
        tx.add_set(&id, set.clone()).add_rule(&id, "c", rule).add_elements(&id, &set, elements);
        let mut encoded = Encoded::begin(None);
        for (index, op) in tx.ops().iter().enumerate() {
            encoded.op(index, op).expect("valid");
        }
        let mut bytes = encoded.batch.as_bytes().to_vec();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        decode_any(&bytes);
    }
}

#[test]
fn long_lists_are_split_below_64_kib_and_named_by_element() {
    let id = TableId::new(Family::Ip, "t");
    let set = Set::verdict_map::<(std::net::Ipv4Addr, L4Proto, Port)>("services");
    let element = |n: u32| {
        let key = (std::net::Ipv4Addr::from(n), L4Proto::TCP, Port(80));
        Element::new(&key).verdict(Verdict::Goto("a-chain-with-a-long-name".into()))
    };
    let mut tx = Transaction::new();
    tx.add_elements(&id, &set, (0..5000).map(element).collect());
    let mut encoded = Encoded::begin(None);
    encoded.op(0, &tx.ops()[0]).expect("valid");
    let parts: Vec<_> = encoded.origin.iter().flatten().filter_map(|(_, part)| part.clone()).collect();
    assert!(parts.len() > 5, "{parts:?}");
    assert_eq!(parts.first().map(|part| part.start), Some(0));
    assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
    assert_eq!(parts.last().map(|part| part.end), Some(5000));
    assert_eq!(read_back(&encoded.batch).len(), 5000);
    // The header, table and set name and the list's header are in front of the first element.
    let first = 16 + 4 + 8 + 16 + 4;
    assert_eq!(encode::element_at(&tx.ops()[0], parts[1].clone(), first), Some(parts[1].start));
    assert_eq!(encode::element_at(&tx.ops()[0], parts[1].clone(), first + 1), Some(parts[1].start));
    assert_eq!(encode::element_at(&tx.ops()[0], parts[1].clone(), 1 << 20), None);
}
