//! Bytes as nftables sees them in registers, keys and map values.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::datatype::{Datatype, KeyType};

/// How many bytes are kept without an allocation: enough for an IPv6 service key (16 + 4 + 4 + 4).
const INLINE: usize = 30;

/// A value of up to 64 bytes: a register's content, a set key, a map value. Short ones need no allocation.
#[derive(Clone)]
pub struct Data(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE] },
    Heap(Box<[u8]>),
}

/// A value with an nftables type: one field of a key, or a whole map value.
pub trait Scalar {
    /// The type that `nft` prints it as.
    const TYPE: Datatype;

    /// Its bytes in the order that the kernel compares them.
    fn bytes(&self) -> Data;
}

/// One field, or a tuple of up to five: the key or the value of a set or map.
pub trait Key {
    /// The types of its fields.
    fn key_type() -> KeyType;

    /// Its bytes; in a concatenation every field is padded to whole 32-bit registers.
    fn data(&self) -> Data;
}

/// A transport protocol port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u16);

/// A transport protocol number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct L4Proto(pub u8);

/// The number of a VXLAN Network as its header has it: 24 bits and a reserved byte that must be 0. Stored as
/// an address, so that `nft` prints number 3 as `0.0.3.0`: it has no type for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vni(pub u32);

/// A packet or connection mark; also the type of a `numgen` or hash slot, because `nft` prints it well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark(pub u32);

/// How many routers a packet may still pass: the TTL of IPv4, the hop limit of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopLimit(pub u8);

/// An interface index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfIndex(pub u32);

/// An interface name, padded with zeros to 16 bytes. Longer names are cut, as no interface can have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfName([u8; 16]);

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EtherAddr(pub [u8; 6]);

/// An Ethernet protocol number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EtherType(pub u16);

/// An ARP operation: 1 request, 2 reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArpOp(pub u16);

/// The network protocol of a packet: 2 for IPv4, 10 for IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NfProto(pub u8);

/// A user id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uid(pub u32);

/// A group id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub u32);

/// An ICMP message type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IcmpType(pub u8);

/// An ICMPv6 message type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Icmp6Type(pub u8);

/// The flag byte of a TCP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TcpFlags(pub u8);

/// The kind of packet at the link layer: 0 for us, 1 broadcast, 2 multicast, 3 for another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PktType(pub u8);

/// Connection states as a bit mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CtState(pub u32);

/// Connection status bits (`IPS_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CtStatus(pub u32);

/// The direction of a packet within its connection: 0 original, 1 reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CtDirection(pub u8);

/// The routing type of an address (`RTN_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddrType(pub u32);

/// The id (inode number) of a cgroup of the unified hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupId(pub u64);

/// Whether a lookup found something, as in `fib ... exists`: a whole register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Exists(pub bool);

/// Yes or no in one byte, as in `socket transparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Boolean(pub bool);

/// A two-byte number without a type of its own, as a connection tracking zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Zone(pub u16);

// === impl Data ===

impl Data {
    /// No bytes.
    pub const fn new() -> Self {
        Self(Repr::Inline { len: 0, bytes: [0; INLINE] })
    }

    /// A copy of these bytes.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut data = Self::new();
        data.push(bytes);
        data
    }

    /// Appends bytes as they are.
    pub fn push(&mut self, more: &[u8]) {
        match &mut self.0 {
            Repr::Inline { len, bytes } if usize::from(*len) + more.len() <= INLINE => {
                let start = usize::from(*len);
                bytes[start..start + more.len()].copy_from_slice(more);
                *len += more.len() as u8;
            }
            _ => {
                let joined: Vec<u8> = self.as_slice().iter().chain(more).copied().collect();
                self.0 = Repr::Heap(joined.into_boxed_slice());
            }
        }
    }

    /// Appends one field of a concatenation: the bytes, then zeros up to a whole 32-bit register.
    pub fn push_padded(&mut self, more: &[u8]) {
        self.push(more);
        let rest = more.len().next_multiple_of(4) - more.len();
        self.push(&[0; 3][..rest]);
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// The bytes, to change in place.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Repr::Inline { len, bytes } => &mut bytes[..usize::from(*len)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next value when the bytes are read as one big-endian number; none after all ones.
    pub fn successor(&self) -> Option<Self> {
        let mut next = self.clone();
        for byte in next.as_mut_slice().iter_mut().rev() {
            let (value, carry) = byte.overflowing_add(1);
            *byte = value;
            if !carry {
                return Some(next);
            }
        }
        None
    }

    /// The value before this one when the bytes are read as one big-endian number; none before zero.
    pub fn predecessor(&self) -> Option<Self> {
        let mut previous = self.clone();
        for byte in previous.as_mut_slice().iter_mut().rev() {
            let (value, borrow) = byte.overflowing_sub(1);
            *byte = value;
            if !borrow {
                return Some(previous);
            }
        }
        None
    }
}

impl Default for Data {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Data {}

impl PartialOrd for Data {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Data {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_slice().cmp(other.as_slice())
    }
}

impl Hash for Data {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

impl Borrow<[u8]> for Data {
    fn borrow(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("0x")?;
        for byte in self.as_slice() {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

// === impl L4Proto, CtState, CtStatus, AddrType ===

impl L4Proto {
    /// ICMP.
    pub const ICMP: Self = Self(1);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
    /// ICMPv6.
    pub const ICMPV6: Self = Self(58);
    /// SCTP.
    pub const SCTP: Self = Self(132);
}

impl NfProto {
    /// IPv4.
    pub const IPV4: Self = Self(2);
    /// IPv6.
    pub const IPV6: Self = Self(10);
}

impl EtherType {
    /// IPv4.
    pub const IPV4: Self = Self(0x0800);
    /// ARP.
    pub const ARP: Self = Self(0x0806);
    /// IPv6.
    pub const IPV6: Self = Self(0x86dd);
}

impl CtState {
    /// Not understood by connection tracking.
    pub const INVALID: Self = Self(1);
    /// Of a connection that has been seen before.
    pub const ESTABLISHED: Self = Self(2);
    /// Belongs to another connection, as an ICMP error.
    pub const RELATED: Self = Self(4);
    /// First of its connection.
    pub const NEW: Self = Self(8);
    /// Exempt from connection tracking.
    pub const UNTRACKED: Self = Self(64);
}

impl CtStatus {
    /// Packets were seen in both directions.
    pub const SEEN_REPLY: Self = Self(2);
    /// Will not be dropped early when the table is full.
    pub const ASSURED: Self = Self(4);
    /// The first packet has left the machine.
    pub const CONFIRMED: Self = Self(8);
    /// The source was translated.
    pub const SNAT: Self = Self(16);
    /// The destination was translated.
    pub const DNAT: Self = Self(32);
}

impl AddrType {
    /// An ordinary remote address.
    pub const UNICAST: Self = Self(1);
    /// An address of this machine.
    pub const LOCAL: Self = Self(2);
    /// A broadcast address.
    pub const BROADCAST: Self = Self(3);
    /// A multicast address.
    pub const MULTICAST: Self = Self(5);
}

impl std::ops::BitOr for CtState {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::ops::BitOr for CtStatus {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl IfName {
    /// This name. Bytes after the fifteenth are cut.
    pub fn new(name: &str) -> Self {
        let mut bytes = [0; 16];
        for (to, from) in bytes[..15].iter_mut().zip(name.bytes().take_while(|byte| *byte != 0)) {
            *to = from;
        }
        Self(bytes)
    }
}

// === impl Scalar and Key ===

macro_rules! fields {
    ($($name:ty, $datatype:ident, $self:ident => $bytes:expr;)*) => {$(
        impl Scalar for $name {
            const TYPE: Datatype = Datatype::$datatype;

            fn bytes(&self) -> Data {
                let $self = self;
                Data::from_slice(&$bytes)
            }
        }

        impl Key for $name {
            fn key_type() -> KeyType {
                KeyType::from([Datatype::$datatype])
            }

            fn data(&self) -> Data {
                self.bytes()
            }
        }
    )*};
}

fields! {
    Ipv4Addr, Ipv4Addr, value => value.octets();
    Ipv6Addr, Ipv6Addr, value => value.octets();
    Vni, Ipv4Addr, value => (value.0 << 8).to_be_bytes();
    Port, InetService, value => value.0.to_be_bytes();
    L4Proto, InetProto, value => [value.0];
    Mark, Mark, value => value.0.to_ne_bytes();
    IfIndex, IfIndex, value => value.0.to_ne_bytes();
    IfName, IfName, value => value.0;
    EtherAddr, EtherAddr, value => value.0;
    EtherType, EtherType, value => value.0.to_be_bytes();
    ArpOp, ArpOp, value => value.0.to_be_bytes();
    NfProto, NfProto, value => [value.0];
    Uid, Uid, value => value.0.to_ne_bytes();
    Gid, Gid, value => value.0.to_ne_bytes();
    IcmpType, IcmpType, value => [value.0];
    Icmp6Type, Icmp6Type, value => [value.0];
    TcpFlags, TcpFlag, value => [value.0];
    PktType, PktType, value => [value.0];
    CtState, CtState, value => value.0.to_ne_bytes();
    CtStatus, CtStatus, value => value.0.to_ne_bytes();
    CtDirection, CtDir, value => [value.0];
    AddrType, FibAddr, value => value.0.to_ne_bytes();
    CgroupId, CgroupV2, value => value.0.to_ne_bytes();
    Boolean, Boolean, value => [u8::from(value.0)];
    Exists, Boolean, value => u32::from(value.0).to_ne_bytes();
    Zone, Integer, value => value.0.to_ne_bytes();
    HopLimit, HopLimit, value => [value.0];
}

macro_rules! tuple_keys {
    ($(($($name:ident $index:tt),+);)*) => {$(
        impl<$($name: Scalar),+> Key for ($($name,)+) {
            fn key_type() -> KeyType {
                KeyType::from([$($name::TYPE),+])
            }

            fn data(&self) -> Data {
                let mut data = Data::new();
                $(data.push_padded(self.$index.bytes().as_slice());)+
                data
            }
        }
    )*};
}

tuple_keys! {
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
    (A 0, B 1, C 2, D 3, E 4);
}

/// The first and the last address of a prefix, as bytes.
pub(crate) fn prefix_bounds(address: IpAddr, length: u8) -> (Data, Data) {
    match address {
        IpAddr::V4(v4) => {
            let host = u32::MAX.checked_shr(u32::from(length)).unwrap_or(0);
            let first = u32::from(v4) & !host;
            (Data::from_slice(&first.to_be_bytes()), Data::from_slice(&(first | host).to_be_bytes()))
        }
        IpAddr::V6(v6) => {
            let host = u128::MAX.checked_shr(u32::from(length)).unwrap_or(0);
            let first = u128::from(v6) & !host;
            (Data::from_slice(&first.to_be_bytes()), Data::from_slice(&(first | host).to_be_bytes()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_concatenation_pads_every_field_to_a_register() {
        let key = (Ipv4Addr::new(10, 0, 0, 1), L4Proto::TCP, Port(80), Mark(3));
        let mut expected = vec![10, 0, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0];
        expected.extend(3u32.to_ne_bytes());
        assert_eq!(key.data().as_slice(), expected);
    }

    #[test]
    fn a_single_field_is_not_padded() {
        assert_eq!(Port(443).data().as_slice(), [1, 187]);
    }

    #[test]
    fn long_values_move_to_the_heap_and_stay_equal() {
        let long = Data::from_slice(&[7; 40]);
        let mut grown = Data::from_slice(&[7; 20]);
        grown.push(&[7; 20]);
        assert_eq!(long, grown);
        assert_eq!(long.len(), 40);
    }

    #[test]
    fn neighbours_carry_and_stop_at_the_ends() {
        assert_eq!(Data::from_slice(&[1, 255]).successor(), Some(Data::from_slice(&[2, 0])));
        assert_eq!(Data::from_slice(&[255, 255]).successor(), None);
        assert_eq!(Data::from_slice(&[2, 0]).predecessor(), Some(Data::from_slice(&[1, 255])));
        assert_eq!(Data::from_slice(&[0, 0]).predecessor(), None);
    }

    #[test]
    fn prefixes_cover_all_lengths() {
        let (first, last) = prefix_bounds("10.1.2.3".parse().unwrap(), 8);
        assert_eq!((first.as_slice(), last.as_slice()), (&[10, 0, 0, 0][..], &[10, 255, 255, 255][..]));
        let (first, last) = prefix_bounds("10.1.2.3".parse().unwrap(), 0);
        assert_eq!((first.as_slice(), last.as_slice()), (&[0; 4][..], &[255; 4][..]));
        let (first, last) = prefix_bounds("2001:db8::1".parse().unwrap(), 128);
        assert_eq!(first, last);
    }
}
