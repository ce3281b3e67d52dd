//! The types of set keys and map values, with the numbers that `nft` knows them by.
//!
//! The kernel only stores these numbers; they decide how `nft list ruleset` prints a set. In a concatenation
//! each type takes six bits.

use std::fmt;

/// The type of one field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Datatype {
    /// Network protocol, one byte.
    NfProto,
    /// A plain number. `nft` 1.0.6 aborts on it inside a concatenation: use [`Datatype::Mark`] there.
    Integer,
    /// IPv4 address.
    Ipv4Addr,
    /// IPv6 address.
    Ipv6Addr,
    /// Ethernet address.
    EtherAddr,
    /// Ethernet protocol number.
    EtherType,
    /// ARP operation.
    ArpOp,
    /// Transport protocol number.
    InetProto,
    /// Port.
    InetService,
    /// ICMP type.
    IcmpType,
    /// TCP flag byte.
    TcpFlag,
    /// Packet mark, host byte order.
    Mark,
    /// Interface index, host byte order.
    IfIndex,
    /// User id, host byte order.
    Uid,
    /// Group id, host byte order.
    Gid,
    /// Connection state mask, host byte order.
    CtState,
    /// Connection direction.
    CtDir,
    /// Connection status mask, host byte order.
    CtStatus,
    /// ICMPv6 type.
    Icmp6Type,
    /// Link-layer packet kind.
    PktType,
    /// Routing type of an address, host byte order.
    FibAddr,
    /// Yes or no.
    Boolean,
    /// Interface name, 16 bytes.
    IfName,
    /// Cgroup id, host byte order.
    CgroupV2,
    /// How many routers a packet may still pass.
    HopLimit,
    /// A number that this crate does not know.
    Other(u8),
}

/// The types of a whole key: one field, or a concatenation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyType {
    fields: Vec<Datatype>,
    len: u32,
}

// === impl Datatype ===

impl Datatype {
    const KNOWN: [(Self, u8, u32, &'static str); 25] = [
        (Self::NfProto, 2, 1, "nf_proto"),
        (Self::Integer, 4, 2, "integer"),
        (Self::Ipv4Addr, 7, 4, "ipv4_addr"),
        (Self::Ipv6Addr, 8, 16, "ipv6_addr"),
        (Self::EtherAddr, 9, 6, "ether_addr"),
        (Self::EtherType, 10, 2, "ether_type"),
        (Self::ArpOp, 11, 2, "arp_op"),
        (Self::InetProto, 12, 1, "inet_proto"),
        (Self::InetService, 13, 2, "inet_service"),
        (Self::IcmpType, 14, 1, "icmp_type"),
        (Self::TcpFlag, 15, 1, "tcp_flag"),
        (Self::Mark, 19, 4, "mark"),
        (Self::IfIndex, 20, 4, "iface_index"),
        (Self::Uid, 24, 4, "uid"),
        (Self::Gid, 25, 4, "gid"),
        (Self::CtState, 26, 4, "ct_state"),
        (Self::CtDir, 27, 1, "ct_dir"),
        (Self::CtStatus, 28, 4, "ct_status"),
        (Self::Icmp6Type, 29, 1, "icmpv6_type"),
        (Self::PktType, 31, 1, "pkt_type"),
        (Self::FibAddr, 38, 4, "fib_addrtype"),
        (Self::Boolean, 39, 1, "boolean"),
        (Self::IfName, 41, 16, "ifname"),
        (Self::CgroupV2, 46, 8, "cgroupsv2"),
        // `nft` has one number for integers of any length; it is read as the first one of them.
        (Self::HopLimit, 4, 1, "integer"),
    ];

    fn row(self) -> Option<&'static (Self, u8, u32, &'static str)> {
        Self::KNOWN.iter().find(|row| row.0 == self)
    }

    /// Its number in `nft`.
    pub fn id(self) -> u8 {
        match self {
            Self::Other(id) => id,
            known => known.row().map_or(0, |row| row.1),
        }
    }

    /// The type with this number.
    pub fn from_id(id: u8) -> Self {
        Self::KNOWN.iter().find(|row| row.1 == id).map_or(Self::Other(id), |row| row.0)
    }

    /// Its length in bytes; 0 where this crate does not know.
    pub fn size(self) -> u32 {
        self.row().map_or(0, |row| row.2)
    }

    /// Whether a number of this type is in the machine's byte order rather than the network's.
    pub fn is_host_order(self) -> bool {
        matches!(
            self,
            Self::Integer
                | Self::Mark
                | Self::IfIndex
                | Self::Uid
                | Self::Gid
                | Self::CtState
                | Self::CtStatus
                | Self::FibAddr
                | Self::CgroupV2
        )
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(id) => write!(f, "type-{id}"),
            known => f.write_str(known.row().map_or("unknown", |row| row.3)),
        }
    }
}

// === impl KeyType ===

impl<const N: usize> From<[Datatype; N]> for KeyType {
    fn from(fields: [Datatype; N]) -> Self {
        let len = match fields.as_slice() {
            [only] => only.size(),
            several => several.iter().map(|field| field.size().next_multiple_of(4)).sum(),
        };
        Self { fields: fields.to_vec(), len }
    }
}

impl KeyType {
    /// The types behind a number as `nft` packs them, for a key of `len` bytes.
    pub fn from_id(id: u32, len: u32) -> Self {
        let mut fields: Vec<Datatype> =
            (0..6).rev().map(|index| ((id >> (6 * index)) & 0x3f) as u8).map(Datatype::from_id).collect();
        let leading = fields.iter().take_while(|field| field.id() == 0).count();
        fields.drain(..leading.min(fields.len() - 1));
        Self { fields, len }
    }

    /// The number as `nft` packs it: six bits for each field.
    pub fn id(&self) -> u32 {
        self.fields.iter().fold(0, |id, field| (id << 6) | u32::from(field.id()))
    }

    /// The fields.
    pub fn fields(&self) -> &[Datatype] {
        &self.fields
    }

    /// Length of the whole key in bytes.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the key has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the key has more than one field.
    pub fn is_concat(&self) -> bool {
        self.fields.len() > 1
    }

    /// Splits a key into its fields without padding. Fewer fields come out of a key that is too short.
    pub fn split<'a>(&self, mut bytes: &'a [u8]) -> Vec<(Datatype, &'a [u8])> {
        if !self.is_concat() {
            return self.fields.first().map(|field| (*field, bytes)).into_iter().collect();
        }
        let mut parts = Vec::with_capacity(self.fields.len());
        for field in &self.fields {
            let len = if field.size() == 0 { bytes.len() } else { field.size() as usize };
            let Some(part) = bytes.get(..len) else { break };
            parts.push((*field, part));
            bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        parts
    }
}

impl fmt::Display for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, field) in self.fields.iter().enumerate() {
            if index > 0 {
                f.write_str(" . ")?;
            }
            write!(f, "{field}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concatenated_type_ids_take_six_bits_each() {
        let key = KeyType::from([Datatype::Ipv4Addr, Datatype::InetProto, Datatype::InetService]);
        assert_eq!(key.id(), (7 << 12) | (12 << 6) | 13);
        assert_eq!(key.len(), 12);
        assert_eq!(KeyType::from_id(key.id(), 12), key);
        assert_eq!(key.to_string(), "ipv4_addr . inet_proto . inet_service");
    }

    #[test]
    fn every_known_type_finds_itself_by_number() {
        for row in Datatype::KNOWN.into_iter().filter(|row| row.0 != Datatype::HopLimit) {
            assert_eq!(Datatype::from_id(row.1), row.0);
        }
        assert_eq!(Datatype::from_id(63), Datatype::Other(63));
    }

    #[test]
    fn five_fields_fit() {
        let key = KeyType::from([Datatype::Ipv6Addr; 5]);
        assert_eq!(KeyType::from_id(key.id(), key.len()), key);
    }
}
