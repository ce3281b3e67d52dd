//! Rules, built by calls that read like `nft` text.
//!
//! ```
//! use knit_nft::{Rule, field, CtState, L4Proto, Port};
//!
//! // meta l4proto tcp th dport 22 ct state new counter accept comment "ssh"
//! let rule = Rule::new()
//!     .eq(field::l4proto(), &L4Proto::TCP)
//!     .eq(field::th_dport(), &Port(22))
//!     .any_of(field::ct_state(), &CtState::NEW)
//!     .counter()
//!     .accept()
//!     .comment("ssh");
//! assert_eq!(rule.exprs.len(), 9);
//! ```
//!
//! Each match starts again at the first register. Where a value must survive further matches (a map's result
//! that is both stored and translated to), [`Rule::map_at`] and [`Rule::load_at`] take the register.

use std::net::IpAddr;
use std::time::Duration;

use crate::data::{Data, HopLimit, IfName, Key, Mark, Port, Scalar, Zone, prefix_bounds};
use crate::expr::{
    AnonymousSet, Base, CmpOp, CtKey, DynsetOp, Expr, LimitUnit, LogTarget, LookupResult, MetaKey, NatFlags,
    NatKind, Reg, Reject, SetRef,
};
use crate::field::{Field, Fields};
use crate::object::{Element, ElementValue, Family, Name, Set, Verdict};

/// A rule: expressions that run in order until one does not match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The expressions.
    pub exprs: Vec<Expr>,
    /// The sets that belong to this rule alone.
    pub sets: Vec<AnonymousSet>,
    /// For people; at most [`crate::MAX_COMMENT`] bytes.
    pub comment: Option<Box<str>>,
    /// What made the builder give up; such a rule is refused when it is committed.
    pub(crate) fault: Option<&'static str>,
}

const TOO_MANY_REGISTERS: &str = "its fields need more than the sixteen registers";

impl Rule {
    /// A rule without expressions: it matches everything and does nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends an expression as it is.
    pub fn expr(mut self, expr: Expr) -> Self {
        self.exprs.push(expr);
        self
    }

    /// With a comment.
    pub fn comment(mut self, comment: &str) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// Loads fields into registers from `at` on, for expressions that are added by hand.
    pub fn load_at(mut self, at: Reg, fields: &impl Fields) -> Self {
        if fields.load(at, &mut self.exprs).is_none() {
            self.fault = Some(TOO_MANY_REGISTERS);
        }
        self
    }

    fn load(self, fields: &impl Fields) -> Self {
        self.load_at(Reg::FIRST, fields)
    }

    // --- matches ---

    /// Compares a field with a value. Less and greater only make sense for fields in network byte order.
    pub fn cmp<T: Scalar>(self, field: Field<T>, op: CmpOp, value: &T) -> Self {
        self.load(&field).expr(Expr::Cmp { sreg: Reg::FIRST, op, data: value.bytes() })
    }

    /// The field is this value.
    pub fn eq<T: Scalar>(self, field: Field<T>, value: &T) -> Self {
        self.cmp(field, CmpOp::Eq, value)
    }

    /// The field is not this value.
    pub fn ne<T: Scalar>(self, field: Field<T>, value: &T) -> Self {
        self.cmp(field, CmpOp::Ne, value)
    }

    /// The field is between these values, both included. Only for fields in network byte order.
    pub fn between<T: Scalar>(self, field: Field<T>, from: &T, to: &T) -> Self {
        self.load(&field).expr(Expr::Range {
            sreg: Reg::FIRST,
            invert: false,
            from: from.bytes(),
            to: to.bytes(),
        })
    }

    /// At least one bit of the value is set in the field, as in `ct state established,related`.
    pub fn any_of<T: Scalar>(self, field: Field<T>, bits: &T) -> Self {
        let mask = bits.bytes();
        let zero = Data::from_slice(&vec![0; mask.len()]);
        self.load(&field)
            .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask, xor: zero.clone() })
            .expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Ne, data: zero })
    }

    /// No bit of the value is set in the field.
    pub fn none_of<T: Scalar>(self, field: Field<T>, bits: &T) -> Self {
        self.masked(field, bits, CmpOp::Eq, &vec![0; bits.bytes().len()])
    }

    /// The name of an interface begins like this; 15 bytes of it count.
    pub fn begins_with(self, field: &Field<IfName>, prefix: &str) -> Self {
        let data = IfName::new(prefix).bytes();
        let used = prefix.len().min(15);
        let data = Data::from_slice(&data.as_slice()[..used]);
        self.load_at(Reg::FIRST, field).expr(Expr::Cmp { sreg: Reg::FIRST, op: CmpOp::Eq, data })
    }

    /// The bits of `mask` in the field are those of `value`.
    pub fn masked_eq<T: Scalar>(self, field: Field<T>, mask: &T, value: &T) -> Self {
        self.masked(field, mask, CmpOp::Eq, value.bytes().as_slice())
    }

    fn masked<T: Scalar>(self, field: Field<T>, mask: &T, op: CmpOp, value: &[u8]) -> Self {
        let mask = mask.bytes();
        let xor = Data::from_slice(&vec![0; mask.len()]);
        self.load(&field)
            .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask, xor })
            .expr(Expr::Cmp { sreg: Reg::FIRST, op, data: Data::from_slice(value) })
    }

    /// The address is within a prefix. A prefix of the other family never matches, so the caller picks the
    /// field.
    pub fn in_prefix<T: Scalar>(self, field: Field<T>, address: IpAddr, length: u8) -> Self {
        self.prefix(field, address, length, CmpOp::Eq)
    }

    /// The address is outside a prefix.
    pub fn not_in_prefix<T: Scalar>(self, field: Field<T>, address: IpAddr, length: u8) -> Self {
        self.prefix(field, address, length, CmpOp::Ne)
    }

    fn prefix<T: Scalar>(mut self, field: Field<T>, address: IpAddr, length: u8, op: CmpOp) -> Self {
        let (first, last) = prefix_bounds(address, length);
        if first.len() != T::TYPE.size() as usize {
            self.fault = Some("a prefix and the field that it is compared with are of different families");
            return self;
        }
        if first == last {
            return self.load(&field).expr(Expr::Cmp { sreg: Reg::FIRST, op, data: first });
        }
        let mask: Vec<u8> = first.as_slice().iter().zip(last.as_slice()).map(|(a, b)| !(a ^ b)).collect();
        let xor = Data::from_slice(&vec![0; mask.len()]);
        let mask = Data::from_slice(&mask);
        self.load(&field)
            .expr(Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask, xor })
            .expr(Expr::Cmp { sreg: Reg::FIRST, op, data: first })
    }

    /// The fields are a key of a named set.
    pub fn in_set(self, fields: &impl Fields, set: impl Into<Name>) -> Self {
        self.lookup(fields, set, LookupResult::Match)
    }

    /// The fields are no key of a named set.
    pub fn not_in_set(self, fields: &impl Fields, set: impl Into<Name>) -> Self {
        self.lookup(fields, set, LookupResult::NoMatch)
    }

    /// The verdict that a named verdict map has for the fields; goes on if it has none.
    pub fn vmap(self, fields: &impl Fields, map: impl Into<Name>) -> Self {
        self.lookup(fields, map, LookupResult::Verdict)
    }

    /// Loads what a named map has for the fields into the first registers; no match if it has nothing.
    pub fn map(self, fields: &impl Fields, map: impl Into<Name>) -> Self {
        self.map_at(Reg::FIRST, fields, map)
    }

    /// Like [`map`](Self::map), with key and result in the registers from `at` on.
    pub fn map_at(self, at: Reg, fields: &impl Fields, map: impl Into<Name>) -> Self {
        let set = SetRef::Named(map.into());
        self.load_at(at, fields).expr(Expr::Lookup { set, sreg: at, result: LookupResult::Into(at) })
    }

    fn lookup(self, fields: &impl Fields, set: impl Into<Name>, result: LookupResult) -> Self {
        self.load(fields).expr(Expr::Lookup { set: SetRef::Named(set.into()), sreg: Reg::FIRST, result })
    }

    /// The field is one of a few values that are part of the rule.
    pub fn one_of<K: Key>(self, fields: &impl Fields, keys: &[K]) -> Self {
        let elements = keys.iter().map(Element::new).collect();
        self.anonymous(fields, Set::of::<K>(""), elements, LookupResult::Match)
    }

    /// The field is none of a few values that are part of the rule.
    pub fn not_one_of<K: Key>(self, fields: &impl Fields, keys: &[K]) -> Self {
        let elements = keys.iter().map(Element::new).collect();
        self.anonymous(fields, Set::of::<K>(""), elements, LookupResult::NoMatch)
    }

    /// The address is within one of a few ranges or prefixes that are part of the rule.
    pub fn in_ranges<K: Key>(self, fields: &impl Fields, ranges: Vec<Element>) -> Self {
        self.anonymous(fields, Set::of::<K>("").interval(), ranges, LookupResult::Match)
    }

    /// The verdict of a map that is part of the rule.
    pub fn vmap_of<K: Key>(self, fields: &impl Fields, verdicts: &[(K, Verdict)]) -> Self {
        let elements = verdicts.iter().map(|(key, to)| Element::new(key).verdict(to.clone())).collect();
        self.anonymous(fields, Set::verdict_map::<K>(""), elements, LookupResult::Verdict)
    }

    /// Loads the value of a map that is part of the rule into the first registers.
    pub fn map_of<K: Key, V: Key>(self, fields: &impl Fields, values: &[(K, V)]) -> Self {
        let elements = values.iter().map(|(key, value)| Element::new(key).value(value)).collect();
        self.anonymous(fields, Set::map::<K, V>(""), elements, LookupResult::Into(Reg::FIRST))
    }

    fn anonymous(
        mut self,
        fields: &impl Fields,
        set: Set,
        mut elements: Vec<Element>,
        result: LookupResult,
    ) -> Self {
        elements.sort_by(|a, b| a.key.cmp(&b.key));
        self.sets.push(AnonymousSet { set: set.constant(), elements });
        let set = SetRef::Anonymous(self.sets.len() - 1);
        self.load(fields).expr(Expr::Lookup { set, sreg: Reg::FIRST, result })
    }

    // --- statements ---

    /// Counts packets and bytes.
    pub fn counter(self) -> Self {
        self.expr(Expr::Counter)
    }

    /// Goes on for at most `rate` packets per `per`, with bursts of `burst`.
    pub fn limit(self, rate: u64, per: Duration, burst: u32) -> Self {
        self.expr(Expr::Limit { rate, per, burst, unit: LimitUnit::Packets, invert: false })
    }

    /// Goes on for packets above `rate` per `per`.
    pub fn limit_over(self, rate: u64, per: Duration, burst: u32) -> Self {
        self.expr(Expr::Limit { rate, per, burst, unit: LimitUnit::Packets, invert: true })
    }

    /// Goes on for packets above `rate` per second, with bursts of `burst`, counted for each key by itself.
    /// `set` is a dynamic one with timeouts: a key is counted from the start again after `forget`.
    pub fn limit_each(
        self,
        fields: &impl Fields,
        set: impl Into<Name>,
        (rate, burst): (u64, u32),
        forget: Duration,
    ) -> Self {
        let per = Duration::from_secs(1);
        let limit = Box::new(Expr::Limit { rate, per, burst, unit: LimitUnit::Packets, invert: true });
        let timeout = Some(forget);
        self.load(fields).expr(Expr::Meter { set: set.into(), key: Reg::FIRST, timeout, limit })
    }

    /// Goes on for the first packets of connections above `count`, counted for each key by itself; `set` is a
    /// dynamic one. Match [`CtState::NEW`](crate::CtState::NEW) before, since the kernel looks through all
    /// that it counted.
    pub fn connections_over(self, fields: &impl Fields, set: impl Into<Name>, count: u32) -> Self {
        let limit = Box::new(Expr::Connlimit { count, invert: true });
        self.load(fields).expr(Expr::Meter { set: set.into(), key: Reg::FIRST, timeout: None, limit })
    }

    /// Counts packets for each key by itself; `set` is a dynamic one. Where the set has no room for a further
    /// key, the rule ends there: what must happen to the packet anyway belongs into a rule of its own.
    pub fn count_each(self, fields: &impl Fields, set: impl Into<Name>) -> Self {
        let limit = Box::new(Expr::Counter);
        self.load(fields).expr(Expr::Meter { set: set.into(), key: Reg::FIRST, timeout: None, limit })
    }

    /// Writes a line to the kernel log, as a warning.
    pub fn log(self, prefix: &str) -> Self {
        self.expr(Expr::Log { prefix: Some(prefix.into()), target: LogTarget::Kernel { level: 4 } })
    }

    /// Passes packets on to a netlink group.
    pub fn log_group(self, prefix: &str, group: u16) -> Self {
        self.expr(Expr::Log { prefix: Some(prefix.into()), target: LogTarget::Group { group, snaplen: 0 } })
    }

    /// Sets the packet's mark.
    pub fn set_mark(self, mark: Mark) -> Self {
        self.expr(Expr::Immediate { dreg: Reg::FIRST, data: mark.bytes() })
            .expr(Expr::MetaSet { sreg: Reg::FIRST, key: MetaKey::MARK })
    }

    /// Sets the bits of `mask` in the packet's mark to those of `value`; other bits stay.
    pub fn set_mark_bits(self, mask: u32, value: u32) -> Self {
        self.load(&crate::field::mark())
            .expr(Self::replace_bits(mask, value))
            .expr(Expr::MetaSet { sreg: Reg::FIRST, key: MetaKey::MARK })
    }

    /// Sets the connection's mark.
    pub fn set_ct_mark(self, mark: Mark) -> Self {
        self.expr(Expr::Immediate { dreg: Reg::FIRST, data: mark.bytes() }).expr(Expr::CtSet {
            sreg: Reg::FIRST,
            key: CtKey::MARK,
            direction: None,
        })
    }

    /// Sets the bits of `mask` in the connection's mark to those of `value`; other bits stay.
    pub fn set_ct_mark_bits(self, mask: u32, value: u32) -> Self {
        self.load(&crate::field::ct_mark()).expr(Self::replace_bits(mask, value)).expr(Expr::CtSet {
            sreg: Reg::FIRST,
            key: CtKey::MARK,
            direction: None,
        })
    }

    fn replace_bits(mask: u32, value: u32) -> Expr {
        let data = |bits: u32| Data::from_slice(&bits.to_ne_bytes());
        Expr::Bitwise { sreg: Reg::FIRST, dreg: Reg::FIRST, mask: data(!mask), xor: data(value & mask) }
    }

    /// Sets how many routers an IPv4 packet may still pass. Match the family before.
    pub fn set_ttl(self, limit: HopLimit) -> Self {
        // The checksum goes by pairs of bytes: the TTL is the first of its pair.
        self.set_byte(8, [0, 0xff], [limit.0, 0], Some(10))
    }

    /// Sets how many routers an IPv6 packet may still pass. Match the family before.
    pub fn set_hoplimit(self, limit: HopLimit) -> Self {
        self.set_byte(6, [0xff, 0], [0, limit.0], None)
    }

    /// Replaces those of two bytes of the network header that the mask does not keep.
    fn set_byte(self, offset: u32, keep: [u8; 2], value: [u8; 2], checksum: Option<u32>) -> Self {
        let (at, base, len) = (Reg::FIRST, Base::Network, 2);
        let (mask, xor) = (Data::from_slice(&keep), Data::from_slice(&value));
        self.expr(Expr::Payload { dreg: at, base, offset, len })
            .expr(Expr::Bitwise { sreg: at, dreg: at, mask, xor })
            .expr(Expr::PayloadSet { sreg: at, base, offset, len, checksum })
    }

    /// Copies the packet's mark to its connection.
    pub fn save_mark(self) -> Self {
        self.load(&crate::field::mark()).expr(Expr::CtSet {
            sreg: Reg::FIRST,
            key: CtKey::MARK,
            direction: None,
        })
    }

    /// Copies the connection's mark to the packet.
    pub fn restore_mark(self) -> Self {
        self.load(&crate::field::ct_mark()).expr(Expr::MetaSet { sreg: Reg::FIRST, key: MetaKey::MARK })
    }

    /// Puts the packet's connection into a zone. Only in prerouting and output before connection tracking.
    pub fn set_ct_zone(self, zone: Zone) -> Self {
        self.expr(Expr::Immediate { dreg: Reg::FIRST, data: zone.bytes() }).expr(Expr::CtSet {
            sreg: Reg::FIRST,
            key: CtKey::ZONE,
            direction: None,
        })
    }

    /// Exempts the packet from connection tracking.
    pub fn notrack(self) -> Self {
        self.expr(Expr::Notrack)
    }

    /// Adds the fields to a named set, or starts their timeout again.
    pub fn update_set(self, fields: &impl Fields, set: impl Into<Name>, timeout: Option<Duration>) -> Self {
        let set = set.into();
        self.load(fields).expr(Expr::Dynset {
            set,
            op: DynsetOp::Update,
            key: Reg::FIRST,
            data: None,
            timeout,
        })
    }

    /// Adds the fields to a named set if they are not in it.
    pub fn add_to_set(self, fields: &impl Fields, set: impl Into<Name>, timeout: Option<Duration>) -> Self {
        let set = set.into();
        self.load(fields).expr(Expr::Dynset { set, op: DynsetOp::Add, key: Reg::FIRST, data: None, timeout })
    }

    /// Adds the fields to a named map with other fields as their value, or starts their timeout again.
    ///
    /// For session affinity, do this after the translation: in a filter chain behind the nat chain, the
    /// packet's destination is the endpoint, and `ct original` the service.
    pub fn update_map(
        mut self,
        op: DynsetOp,
        fields: &impl Fields,
        value: &impl Fields,
        map: impl Into<Name>,
        timeout: Option<Duration>,
    ) -> Self {
        let data = fields.load(Reg::FIRST, &mut self.exprs).and_then(Reg::new);
        let Some((data, _)) = data.and_then(|reg| Some((reg, value.load(reg, &mut self.exprs)?))) else {
            self.fault = Some(TOO_MANY_REGISTERS);
            return self;
        };
        self.expr(Expr::Dynset { set: map.into(), op, key: Reg::FIRST, data: Some(data), timeout })
    }

    /// Stores, in a named map, what is in the registers from `data` on, under the fields, which are loaded
    /// from `at`.
    ///
    /// If those registers hold a map's value, `nft` 1.0.6 aborts when it lists the rule (the kernel does not
    /// mind): prefer [`update_map`](Self::update_map), or set the mark to the value and load it from there
    /// again.
    pub fn store_in_map(
        self,
        op: DynsetOp,
        at: Reg,
        fields: &impl Fields,
        data: Reg,
        map: impl Into<Name>,
        timeout: Option<Duration>,
    ) -> Self {
        let set = map.into();
        self.load_at(at, fields).expr(Expr::Dynset { set, op, key: at, data: Some(data), timeout })
    }

    // --- verdicts ---

    /// Ends with this verdict.
    pub fn verdict(self, verdict: Verdict) -> Self {
        self.expr(Expr::Verdict(verdict))
    }

    /// Accepts.
    pub fn accept(self) -> Self {
        self.verdict(Verdict::Accept)
    }

    /// Drops.
    pub fn drop(self) -> Self {
        self.verdict(Verdict::Drop)
    }

    /// Returns to the calling chain.
    pub fn ret(self) -> Self {
        self.verdict(Verdict::Return)
    }

    /// Jumps to a chain.
    pub fn jump(self, chain: impl Into<Name>) -> Self {
        self.verdict(Verdict::Jump(chain.into()))
    }

    /// Goes to a chain for good.
    pub fn goto(self, chain: impl Into<Name>) -> Self {
        self.verdict(Verdict::Goto(chain.into()))
    }

    /// Refuses with an answer.
    pub fn reject(self, with: Reject) -> Self {
        self.expr(Expr::Reject(with))
    }

    // --- NAT ---

    /// Translates to a fixed address, and port if there is one.
    pub fn nat_to(self, kind: NatKind, address: IpAddr, port: Option<Port>, flags: NatFlags) -> Self {
        let (family, data) = match address {
            IpAddr::V4(v4) => (Family::Ip, v4.bytes()),
            IpAddr::V6(v6) => (Family::Ip6, v6.bytes()),
        };
        let after = Reg::FIRST.after(data.len() as u32);
        let rule = self.expr(Expr::Immediate { dreg: Reg::FIRST, data });
        let (rule, port) = match (port, after) {
            (Some(port), Some(reg)) => {
                (rule.expr(Expr::Immediate { dreg: reg, data: port.bytes() }), Some(reg))
            }
            _ => (rule, None),
        };
        rule.expr(nat(kind, family, Some(Reg::FIRST), port, flags))
    }

    /// Translates the destination to a fixed address, and port if there is one.
    pub fn dnat_to(self, address: IpAddr, port: Option<Port>) -> Self {
        self.nat_to(NatKind::Dnat, address, port, NatFlags::NONE)
    }

    /// Translates the source to a fixed address.
    pub fn snat_to(self, address: IpAddr, flags: NatFlags) -> Self {
        self.nat_to(NatKind::Snat, address, None, flags)
    }

    /// Translates the destination to what a named map of (address, port) has for the fields.
    pub fn dnat_map(self, family: Family, fields: &impl Fields, map: impl Into<Name>) -> Self {
        self.map(fields, map).dnat_at(family, Reg::FIRST)
    }

    /// Translates the destination to the address and port in the registers from `at` on.
    pub fn dnat_at(mut self, family: Family, at: Reg) -> Self {
        let Some(port) = at.after(if family == Family::Ip6 { 16 } else { 4 }) else {
            self.fault = Some(TOO_MANY_REGISTERS);
            return self;
        };
        self.expr(nat(NatKind::Dnat, family, Some(at), Some(port), NatFlags::NONE))
    }

    /// Translates the source to the address of the output interface.
    pub fn masquerade(self, flags: NatFlags) -> Self {
        self.expr(Expr::Masquerade { flags, port: None, port_max: None })
    }

    /// Translates the destination to this machine, at this port.
    pub fn redirect_to(self, port: Port) -> Self {
        self.expr(Expr::Immediate { dreg: Reg::FIRST, data: port.bytes() }).expr(Expr::Redirect {
            flags: NatFlags::NONE,
            port: Some(Reg::FIRST),
            port_max: None,
        })
    }

    // --- what it refers to ---

    /// The chains that it leads to, directly or by its own verdict maps.
    pub fn chains(&self) -> impl Iterator<Item = &Name> {
        let direct = self.exprs.iter().filter_map(|expr| match expr {
            Expr::Verdict(verdict) => verdict.chain(),
            _ => None,
        });
        let mapped =
            self.sets.iter().flat_map(|set| &set.elements).filter_map(|element| match &element.value {
                ElementValue::Verdict(verdict) => verdict.chain(),
                _ => None,
            });
        direct.chain(mapped)
    }

    /// The named sets that it looks into or changes.
    pub fn named_sets(&self) -> impl Iterator<Item = &Name> {
        self.exprs.iter().filter_map(|expr| match expr {
            Expr::Lookup { set: SetRef::Named(name), .. }
            | Expr::Dynset { set: name, .. }
            | Expr::Meter { set: name, .. } => Some(name),
            _ => None,
        })
    }
}

fn nat(kind: NatKind, family: Family, addr: Option<Reg>, port: Option<Reg>, flags: NatFlags) -> Expr {
    Expr::Nat { kind, family, addr, addr_max: None, port, port_max: None, flags }
}
