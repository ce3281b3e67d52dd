//! The expressions that a rule is made of: small instructions over sixteen 32-bit registers.
//!
//! [`crate::Rule`] builds them from text-like calls; they are public for what the builder does not cover.

use std::time::Duration;

use crate::data::Data;
use crate::object::{Element, Family, Name, Set, Verdict};

/// One of sixteen 32-bit registers. A longer value takes several in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reg(u8);

/// Where a payload offset counts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    /// The link-layer header.
    Link,
    /// The network header.
    Network,
    /// The transport header.
    Transport,
}

/// Facts about a packet besides its bytes; the number is the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MetaKey(pub u32);

/// Facts about a packet's connection; the number is the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CtKey(pub u32);

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As its first packet went.
    Original,
    /// The way back.
    Reply,
}

/// What a routing lookup answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FibResult {
    /// Index of the output interface.
    Oif,
    /// Name of the output interface.
    OifName,
    /// Type of the address.
    AddrType,
}

/// How a register is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CmpOp {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less, as big-endian bytes.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

/// The set that a rule looks into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetRef {
    /// A set of the table, by name.
    Named(Name),
    /// The rule's own set: index into [`crate::Rule::sets`].
    Anonymous(usize),
}

/// What a lookup does with what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LookupResult {
    /// The rule goes on if the key is in the set.
    Match,
    /// The rule goes on if the key is not in the set.
    NoMatch,
    /// The map's value goes into registers from this one.
    Into(Reg),
    /// The map's verdict is taken.
    Verdict,
}

/// Whether source or destination is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NatKind {
    /// The source.
    Snat,
    /// The destination.
    Dnat,
}

/// How NAT chooses a port or an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NatFlags {
    /// Ports at random, from a keyed hash.
    pub random: bool,
    /// Ports fully at random.
    pub fully_random: bool,
    /// The same client gets the same address.
    pub persistent: bool,
}

/// How a sender is told that its packet was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reject {
    /// A TCP reset.
    TcpReset,
    /// An ICMP or ICMPv6 error of the table's family, with this code.
    Icmp(u8),
    /// The fitting error of either family.
    Icmpx(IcmpxCode),
}

/// Reasons that both ICMP and ICMPv6 know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IcmpxCode {
    /// No route.
    NoRoute,
    /// Nobody listens there.
    PortUnreachable,
    /// The host is not there.
    HostUnreachable,
    /// Not allowed.
    AdminProhibited,
}

/// What a rate limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitUnit {
    /// Packets.
    Packets,
    /// Bytes.
    Bytes,
}

/// Where a log line goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogTarget {
    /// The kernel log, at this syslog level.
    Kernel {
        /// 0 emergency to 7 debug; 4 is a warning.
        level: u8,
    },
    /// A netlink group.
    Group {
        /// Its number.
        group: u16,
        /// Bytes of the packet to pass on; 0 for all.
        snaplen: u32,
    },
}

/// What is asked of the socket that a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SocketKey {
    /// Whether it has IP_TRANSPARENT set.
    Transparent,
    /// Its mark.
    Mark,
    /// Whether it is bound to the wildcard address.
    Wildcard,
    /// The id of its ancestor cgroup at this depth.
    CgroupV2 {
        /// Depth below the root.
        level: u32,
    },
}

/// What a rule does to a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DynsetOp {
    /// Adds the element if it is not there.
    Add,
    /// Adds it, or starts its timeout again.
    Update,
    /// Deletes it.
    Delete,
}

/// A set that belongs to one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnonymousSet {
    /// What it is; the kernel chooses the name, so this one's is empty.
    pub set: Set,
    /// What it holds, sorted by key.
    pub elements: Vec<Element>,
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields repeat the kernel's attributes: registers, offsets, lengths")]
pub enum Expr {
    /// Loads packet bytes.
    Payload { dreg: Reg, base: Base, offset: u32, len: u32 },
    /// Writes packet bytes. The checksum at `checksum`, an offset from the same base, follows them.
    PayloadSet { sreg: Reg, base: Base, offset: u32, len: u32, checksum: Option<u32> },
    /// Loads a fact about the packet.
    Meta { dreg: Reg, key: MetaKey },
    /// Sets a fact about the packet.
    MetaSet { sreg: Reg, key: MetaKey },
    /// Loads a fact about the connection.
    Ct { dreg: Reg, key: CtKey, direction: Option<Direction> },
    /// Sets a fact about the connection.
    CtSet { sreg: Reg, key: CtKey, direction: Option<Direction> },
    /// Asks the routing tables. The flags are `NFTA_FIB_F_*`.
    Fib { dreg: Reg, result: FibResult, flags: u32 },
    /// Asks the packet's socket.
    Socket { dreg: Reg, key: SocketKey },
    /// Goes on if the comparison holds.
    Cmp { sreg: Reg, op: CmpOp, data: Data },
    /// Goes on if the value is within (or, inverted, outside) the range.
    Range { sreg: Reg, invert: bool, from: Data, to: Data },
    /// `(value & mask) ^ xor`.
    Bitwise { sreg: Reg, dreg: Reg, mask: Data, xor: Data },
    /// Loads a constant.
    Immediate { dreg: Reg, data: Data },
    /// Ends the rule with a verdict.
    Verdict(Verdict),
    /// Looks into a set or map.
    Lookup { set: SetRef, sreg: Reg, result: LookupResult },
    /// A number below `modulus`, plus `offset`: at random, or counting up.
    Numgen { dreg: Reg, modulus: u32, random: bool, offset: u32 },
    /// A hash of `len` bytes, below `modulus`, plus `offset`. Without a seed the kernel picks one.
    Jhash { sreg: Reg, dreg: Reg, len: u32, modulus: u32, seed: Option<u32>, offset: u32 },
    /// A hash of the connection, same in both directions.
    Symhash { dreg: Reg, modulus: u32, offset: u32 },
    /// Translates addresses and ports.
    Nat {
        kind: NatKind,
        family: Family,
        addr: Option<Reg>,
        addr_max: Option<Reg>,
        port: Option<Reg>,
        port_max: Option<Reg>,
        flags: NatFlags,
    },
    /// Translates the source to the address of the output interface.
    Masquerade { flags: NatFlags, port: Option<Reg>, port_max: Option<Reg> },
    /// Translates the destination to this machine.
    Redirect { flags: NatFlags, port: Option<Reg>, port_max: Option<Reg> },
    /// Hands the packet to a local transparent socket.
    Tproxy { family: Option<Family>, addr: Option<Reg>, port: Option<Reg> },
    /// Refuses with an answer.
    Reject(Reject),
    /// Counts packets and bytes.
    Counter,
    /// Goes on below (or, inverted, above) a rate per `per`.
    Limit { rate: u64, per: Duration, burst: u32, unit: LimitUnit, invert: bool },
    /// Goes on while there are at most (or, inverted, more than) this many connections. For first packets
    /// only: the kernel looks through all that it has counted.
    Connlimit { count: u32, invert: bool },
    /// Writes a log line.
    Log { prefix: Option<Box<str>>, target: LogTarget },
    /// Changes a set.
    Dynset { set: Name, op: DynsetOp, key: Reg, data: Option<Reg>, timeout: Option<Duration> },
    /// Adds a key to a set, and asks the limit that this key has of its own: a rate, or a number of
    /// connections.
    Meter { set: Name, key: Reg, timeout: Option<Duration>, limit: Box<Expr> },
    /// Exempts the packet from connection tracking.
    Notrack,
    /// An expression that this crate does not know, with its attributes as they are on the wire.
    Raw { name: Box<str>, data: Box<[u8]> },
}

// === impl Reg ===

impl Reg {
    /// How many there are.
    pub const COUNT: u8 = 16;

    /// The first one.
    pub const FIRST: Self = Self(0);

    /// The last one.
    pub const LAST: Self = Self(Self::COUNT - 1);

    /// Register `index` of sixteen; none beyond that.
    pub const fn new(index: u8) -> Option<Self> {
        if index < Self::COUNT { Some(Self(index)) } else { None }
    }

    /// Its index.
    pub const fn index(self) -> u8 {
        self.0
    }

    /// Its number on the wire. Every fourth one is a 16-byte register of the old numbering, which is how the
    /// kernel itself writes it back.
    pub(crate) fn number(self) -> u32 {
        if self.0.is_multiple_of(4) { u32::from(self.0 / 4 + 1) } else { u32::from(self.0 + 8) }
    }

    /// The register with this number on the wire.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        match number {
            1..=4 => Some(Self((number as u8 - 1) * 4)),
            8..=23 => Some(Self(number as u8 - 8)),
            _ => None,
        }
    }

    /// The register after a value of `len` bytes that starts here; none past the last.
    pub(crate) fn after(self, len: u32) -> Option<Self> {
        u8::try_from(u32::from(self.0) + len.div_ceil(4)).ok().and_then(Self::new)
    }
}

// === impl MetaKey, CtKey ===

#[expect(missing_docs, reason = "named as in nft")]
impl MetaKey {
    pub const PROTOCOL: Self = Self(1);
    pub const MARK: Self = Self(3);
    pub const IIF: Self = Self(4);
    pub const OIF: Self = Self(5);
    pub const IIFNAME: Self = Self(6);
    pub const OIFNAME: Self = Self(7);
    pub const SKUID: Self = Self(10);
    pub const SKGID: Self = Self(11);
    pub const NFPROTO: Self = Self(15);
    pub const L4PROTO: Self = Self(16);
    pub const IBRNAME: Self = Self(17);
    pub const OBRNAME: Self = Self(18);
    pub const PKTTYPE: Self = Self(19);
    pub const IIFGROUP: Self = Self(21);
    pub const OIFGROUP: Self = Self(22);
}

#[expect(missing_docs, reason = "named as in nft")]
impl CtKey {
    pub const STATE: Self = Self(0);
    pub const DIRECTION: Self = Self(1);
    pub const STATUS: Self = Self(2);
    pub const MARK: Self = Self(3);
    pub const PROTOCOL: Self = Self(10);
    pub const PROTO_SRC: Self = Self(11);
    pub const PROTO_DST: Self = Self(12);
    pub const ZONE: Self = Self(17);
    pub const SRC_IP: Self = Self(19);
    pub const DST_IP: Self = Self(20);
    pub const SRC_IP6: Self = Self(21);
    pub const DST_IP6: Self = Self(22);
}

// === impl IcmpxCode ===

impl IcmpxCode {
    /// Its number.
    pub fn number(self) -> u8 {
        match self {
            Self::NoRoute => 0,
            Self::PortUnreachable => 1,
            Self::HostUnreachable => 2,
            Self::AdminProhibited => 3,
        }
    }

    /// The code with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::NoRoute, Self::PortUnreachable, Self::HostUnreachable, Self::AdminProhibited]
            .into_iter()
            .find(|code| code.number() == number)
    }
}

// === impl NatFlags ===

impl NatFlags {
    /// Ports fully at random, which avoids clashes between many clients.
    pub const FULLY_RANDOM: Self = Self { random: false, fully_random: true, persistent: false };

    /// None of them.
    pub const NONE: Self = Self { random: false, fully_random: false, persistent: false };

    /// As the kernel's bits.
    pub(crate) fn bits(self) -> u32 {
        u32::from(self.random) << 2 | u32::from(self.persistent) << 3 | u32::from(self.fully_random) << 4
    }

    /// From the kernel's bits; those that follow from the registers in use are left out.
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self { random: bits & 4 != 0, persistent: bits & 8 != 0, fully_random: bits & 16 != 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_one_number_each_and_both_numberings_are_read() {
        for index in 0..Reg::COUNT {
            let reg = Reg::new(index).unwrap();
            assert_eq!(Reg::from_number(reg.number()), Some(reg));
            assert_eq!(Reg::from_number(u32::from(index) + 8), Some(reg));
        }
        assert_eq!(Reg::new(4).unwrap().number(), 2);
        assert_eq!(Reg::new(5).unwrap().number(), 13);
        assert_eq!([0, 5, 6, 7, 24].map(Reg::from_number), [None; 5]);
    }

    #[test]
    fn a_value_takes_whole_registers() {
        assert_eq!(Reg::FIRST.after(1), Reg::new(1));
        assert_eq!(Reg::FIRST.after(16), Reg::new(4));
        assert_eq!(Reg::new(15).unwrap().after(4), None);
    }
}
