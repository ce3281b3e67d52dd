//! What a rule can look at: typed selectors, named as in `nft`.
//!
//! `field::ip_daddr()` is a [`Field`] of [`Ipv4Addr`]; comparing it with anything else does not compile.
//! Tuples of fields make the concatenated keys of sets and maps.

use std::marker::PhantomData;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::data::{
    AddrType, ArpOp, Boolean, CgroupId, CtDirection, CtState, CtStatus, EtherAddr, EtherType, Exists, Gid,
    HopLimit, Icmp6Type, IcmpType, IfIndex, IfName, L4Proto, Mark, NfProto, PktType, Port, Scalar, TcpFlags,
    Uid, Vni, Zone,
};
use crate::expr::{Base, CtKey, Direction, Expr, FibResult, MetaKey, Reg, SocketKey};

/// Something that can be loaded into registers, of type `T`.
#[derive(Clone, Debug)]
pub struct Field<T> {
    source: Source,
    value: PhantomData<fn() -> T>,
}

/// One field, or a tuple of up to five, that can be loaded into registers in a row.
pub trait Fields {
    /// Appends the instructions that load everything from `at` on. Returns the register after the last, or
    /// none if the sixteen registers do not suffice.
    fn load(&self, at: Reg, into: &mut Vec<Expr>) -> Option<u8>;
}

#[derive(Clone, Debug)]
enum Source {
    Payload { base: Base, offset: u32, len: u32 },
    Meta(MetaKey),
    Ct(CtKey, Option<Direction>),
    Fib(FibResult, u32),
    Socket(SocketKey),
    Numgen { modulus: u32, random: bool, offset: u32 },
    Jhash { of: Vec<(Source, u32)>, modulus: u32, seed: Option<u32> },
    Symhash { modulus: u32 },
    Constant(crate::data::Data),
}

/// Which address a routing lookup takes, and what narrows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FibFlags(u32);

impl FibFlags {
    /// The source address.
    pub const SADDR: Self = Self(1);
    /// The destination address.
    pub const DADDR: Self = Self(2);
    /// With the packet's mark.
    pub const MARK: Self = Self(4);
    /// Only by the interface it came from.
    pub const IIF: Self = Self(8);
    /// Only by the interface it goes to.
    pub const OIF: Self = Self(16);
}

impl std::ops::BitOr for FibFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const FIB_PRESENT: u32 = 32;

// === constructors ===

fn field<T>(source: Source) -> Field<T> {
    Field { source, value: PhantomData }
}

macro_rules! payload {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $base:ident + $offset:literal, $len:literal;)*) => {$(
        $(#[$doc])*
        pub fn $name() -> Field<$type> {
            field(Source::Payload { base: Base::$base, offset: $offset, len: $len })
        }
    )*};
}

payload! {
    /// Destination of the Ethernet frame.
    ether_daddr: EtherAddr = Link + 0, 6;
    /// Source of the Ethernet frame.
    ether_saddr: EtherAddr = Link + 6, 6;
    /// Protocol of the Ethernet frame.
    ether_type: EtherType = Link + 12, 2;
    /// IPv4 source.
    ip_saddr: Ipv4Addr = Network + 12, 4;
    /// IPv4 destination.
    ip_daddr: Ipv4Addr = Network + 16, 4;
    /// IPv4 protocol.
    ip_protocol: L4Proto = Network + 9, 1;
    /// IPv4: how many routers the packet may still pass.
    ip_ttl: HopLimit = Network + 8, 1;
    /// IPv6: how many routers the packet may still pass.
    ip6_hoplimit: HopLimit = Network + 7, 1;
    /// IPv6 source.
    ip6_saddr: Ipv6Addr = Network + 8, 16;
    /// IPv6 destination.
    ip6_daddr: Ipv6Addr = Network + 24, 16;
    /// IPv6 next header.
    ip6_nexthdr: L4Proto = Network + 6, 1;
    /// ARP operation.
    arp_operation: ArpOp = Network + 6, 2;
    /// ARP: Ethernet address of the sender.
    arp_saddr_ether: EtherAddr = Network + 8, 6;
    /// ARP: IPv4 address of the sender.
    arp_saddr_ip: Ipv4Addr = Network + 14, 4;
    /// ARP: IPv4 address that is asked for.
    arp_daddr_ip: Ipv4Addr = Network + 24, 4;
    /// Source port of TCP, UDP or SCTP. Match the protocol before.
    th_sport: Port = Transport + 0, 2;
    /// Destination port of TCP, UDP or SCTP. Match the protocol before.
    th_dport: Port = Transport + 2, 2;
    /// TCP flags.
    tcp_flags: TcpFlags = Transport + 13, 1;
    /// ICMP type.
    icmp_type: IcmpType = Transport + 0, 1;
    /// ICMPv6 type.
    icmpv6_type: Icmp6Type = Transport + 0, 1;
    /// Target address of a neighbour solicitation or advertisement.
    nd_target: Ipv6Addr = Transport + 8, 16;
    /// VXLAN: the Network's number, in a UDP datagram. Match protocol and port before, here and below.
    vxlan_vni: Vni = Transport + 12, 4;
    /// VXLAN: protocol of the inner frame.
    vxlan_ether_type: EtherType = Transport + 28, 2;
    /// VXLAN: IPv4 source of the inner packet. Match the inner protocol before, here and below.
    vxlan_ip_saddr: Ipv4Addr = Transport + 42, 4;
    /// VXLAN: IPv6 source of the inner packet.
    vxlan_ip6_saddr: Ipv6Addr = Transport + 38, 16;
    /// VXLAN: IPv4 address of the sender in an inner ARP packet.
    vxlan_arp_saddr_ip: Ipv4Addr = Transport + 44, 4;
}

macro_rules! meta {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $key:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name() -> Field<$type> {
            field(Source::Meta(MetaKey::$key))
        }
    )*};
}

meta! {
    /// Ethernet protocol of the packet.
    meta_protocol: EtherType = PROTOCOL;
    /// Packet mark.
    mark: Mark = MARK;
    /// Index of the input interface.
    iif: IfIndex = IIF;
    /// Index of the output interface.
    oif: IfIndex = OIF;
    /// Name of the input interface.
    iifname: IfName = IIFNAME;
    /// Name of the output interface.
    oifname: IfName = OIFNAME;
    /// User of the sending socket.
    skuid: Uid = SKUID;
    /// Group of the sending socket.
    skgid: Gid = SKGID;
    /// Network protocol.
    nfproto: NfProto = NFPROTO;
    /// Transport protocol.
    l4proto: L4Proto = L4PROTO;
    /// Name of the bridge that the packet came in on.
    ibrname: IfName = IBRNAME;
    /// Name of the bridge that the packet goes out on.
    obrname: IfName = OBRNAME;
    /// Link-layer packet kind.
    pkttype: PktType = PKTTYPE;
    /// Group of the input interface.
    iifgroup: Mark = IIFGROUP;
    /// Group of the output interface.
    oifgroup: Mark = OIFGROUP;
}

macro_rules! ct {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $key:ident $(, $direction:ident)?;)*) => {$(
        $(#[$doc])*
        pub fn $name($($direction: Direction)?) -> Field<$type> {
            let direction: Option<Direction> = None$(.or(Some($direction)))?;
            field(Source::Ct(CtKey::$key, direction))
        }
    )*};
}

ct! {
    /// State of the packet within its connection.
    ct_state: CtState = STATE;
    /// Status of the connection.
    ct_status: CtStatus = STATUS;
    /// Direction of the packet.
    ct_direction: CtDirection = DIRECTION;
    /// Mark of the connection.
    ct_mark: Mark = MARK;
    /// Zone of the connection.
    ct_zone: Zone = ZONE;
    /// Transport protocol of the connection.
    ct_protocol: L4Proto = PROTOCOL;
    /// IPv4 source of one direction.
    ct_ip_saddr: Ipv4Addr = SRC_IP, direction;
    /// IPv4 destination of one direction.
    ct_ip_daddr: Ipv4Addr = DST_IP, direction;
    /// IPv6 source of one direction.
    ct_ip6_saddr: Ipv6Addr = SRC_IP6, direction;
    /// IPv6 destination of one direction.
    ct_ip6_daddr: Ipv6Addr = DST_IP6, direction;
    /// Source port of one direction.
    ct_proto_src: Port = PROTO_SRC, direction;
    /// Destination port of one direction.
    ct_proto_dst: Port = PROTO_DST, direction;
}

/// The routing type of the source or destination address.
pub fn fib_addrtype(flags: FibFlags) -> Field<AddrType> {
    field(Source::Fib(FibResult::AddrType, flags.0))
}

/// The interface that the routing tables name.
pub fn fib_oif(flags: FibFlags) -> Field<IfIndex> {
    field(Source::Fib(FibResult::Oif, flags.0))
}

/// Whether the routing tables name an interface at all.
pub fn fib_exists(flags: FibFlags) -> Field<Exists> {
    field(Source::Fib(FibResult::Oif, flags.0 | FIB_PRESENT))
}

/// Whether the packet's socket is transparent.
pub fn socket_transparent() -> Field<Boolean> {
    field(Source::Socket(SocketKey::Transparent))
}

/// Whether the packet's socket is bound to the wildcard address.
pub fn socket_wildcard() -> Field<Boolean> {
    field(Source::Socket(SocketKey::Wildcard))
}

/// The mark of the packet's socket.
pub fn socket_mark() -> Field<Mark> {
    field(Source::Socket(SocketKey::Mark))
}

/// The ancestor, at this depth, of the cgroup of the packet's socket.
pub fn socket_cgroup(level: u32) -> Field<CgroupId> {
    field(Source::Socket(SocketKey::CgroupV2 { level }))
}

/// A random number below `modulus`.
pub fn numgen_random(modulus: u32) -> Field<Mark> {
    field(Source::Numgen { modulus, random: true, offset: 0 })
}

/// A number that counts up and wraps at `modulus`.
pub fn numgen_inc(modulus: u32) -> Field<Mark> {
    field(Source::Numgen { modulus, random: false, offset: 0 })
}

/// A hash of some fields, below `modulus`. Without a seed the kernel picks one, and the hash differs between
/// hosts.
pub fn jhash(of: &dyn Hashable, modulus: u32, seed: Option<u32>) -> Field<Mark> {
    field(Source::Jhash {
        of: of.sources().into_iter().map(|(source, len)| (source.0, len)).collect(),
        modulus,
        seed,
    })
}

/// A hash of the connection below `modulus`, the same in both directions.
pub fn symhash(modulus: u32) -> Field<Mark> {
    field(Source::Symhash { modulus })
}

/// A fixed value, as part of a key.
pub fn constant<T: Scalar>(value: &T) -> Field<T> {
    field(Source::Constant(value.bytes()))
}

// === impl Source ===

/// Where a field comes from; only this module can look inside.
#[derive(Clone, Debug)]
pub struct OpaqueSource(Source);

/// Fields that can be hashed together.
pub trait Hashable {
    /// The fields with their lengths.
    fn sources(&self) -> Vec<(OpaqueSource, u32)>;
}

impl Source {
    fn load(&self, at: Reg, len: u32, into: &mut Vec<Expr>) -> Option<()> {
        let expr = match self {
            Self::Payload { base, offset, len } => {
                Expr::Payload { dreg: at, base: *base, offset: *offset, len: *len }
            }
            Self::Meta(key) => Expr::Meta { dreg: at, key: *key },
            Self::Ct(key, direction) => Expr::Ct { dreg: at, key: *key, direction: *direction },
            Self::Fib(result, flags) => Expr::Fib { dreg: at, result: *result, flags: *flags },
            Self::Socket(key) => Expr::Socket { dreg: at, key: *key },
            Self::Numgen { modulus, random, offset } => {
                Expr::Numgen { dreg: at, modulus: *modulus, random: *random, offset: *offset }
            }
            Self::Jhash { of, modulus, seed } => {
                let mut next = u32::from(at.index());
                let mut total = 0;
                for (source, len) in of {
                    let reg = Reg::new(u8::try_from(next).ok()?)?;
                    source.load(reg, *len, into)?;
                    next += len.div_ceil(4);
                    total += len.next_multiple_of(4);
                }
                let len = if of.len() == 1 { of[0].1 } else { total };
                Expr::Jhash { sreg: at, dreg: at, len, modulus: *modulus, seed: *seed, offset: 0 }
            }
            Self::Symhash { modulus } => Expr::Symhash { dreg: at, modulus: *modulus, offset: 0 },
            Self::Constant(data) => Expr::Immediate { dreg: at, data: data.clone() },
        };
        into.push(expr);
        (u32::from(at.index()) + len.div_ceil(4) <= u32::from(Reg::COUNT)).then_some(())
    }
}

// === impl Fields ===

impl<T: Scalar> Fields for Field<T> {
    fn load(&self, at: Reg, into: &mut Vec<Expr>) -> Option<u8> {
        self.source.load(at, T::TYPE.size(), into)?;
        Some(at.index() + T::TYPE.size().div_ceil(4) as u8)
    }
}

impl<T: Scalar> Hashable for Field<T> {
    fn sources(&self) -> Vec<(OpaqueSource, u32)> {
        vec![(OpaqueSource(self.source.clone()), T::TYPE.size())]
    }
}

macro_rules! tuple_fields {
    ($(($($name:ident $index:tt),+);)*) => {$(
        impl<$($name: Scalar),+> Fields for ($(Field<$name>,)+) {
            fn load(&self, at: Reg, into: &mut Vec<Expr>) -> Option<u8> {
                let next = at.index();
                $(let next = self.$index.load(Reg::new(next)?, into)?;)+
                Some(next)
            }
        }

        impl<$($name: Scalar),+> Hashable for ($(Field<$name>,)+) {
            fn sources(&self) -> Vec<(OpaqueSource, u32)> {
                vec![$((OpaqueSource(self.$index.source.clone()), $name::TYPE.size())),+]
            }
        }
    )*};
}

tuple_fields! {
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
    (A 0, B 1, C 2, D 3, E 4);
}
