//! A range of addresses that one node owns in one Network, its families paired by index.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_types::{Addresses, Family, Mac, NetworkName};
use serde::{Deserialize, Serialize};

use crate::address::{AddressRange, to_number};
use crate::error::BlockError;
use crate::mac::pod_mac;

/// How many addresses a block has: a power of two from 1 to 65,536, so that each family is one prefix.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockSize(u8);

/// A range of addresses that one node owns in one Network. The pod at index i has the i-th address of each
/// family.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "RawBlock", into = "RawBlock")]
pub struct Block {
    network: NetworkName,
    node: String,
    start: Addresses,
    size: BlockSize,
}

/// How a [`Block`] is written down: as in the AddressBlock object.
#[derive(Deserialize, Serialize)]
struct RawBlock {
    network: NetworkName,
    node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv4: Option<Ipv4Net>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ipv6: Option<Ipv6Net>,
}

// === impl BlockSize ===

impl BlockSize {
    /// 8 addresses: what a node starts with.
    pub const SMALL: Self = Self(3);
    /// 256 addresses: the most that a node is given at once.
    pub const LARGE: Self = Self(8);
    /// 65,536 addresses: the most that is used of a range that somebody else chose, such as a Node's podCIDR.
    pub const MAX: Self = Self(16);

    /// A size; `None` if it is no power of two, or too large.
    #[must_use]
    pub fn new(addresses: u32) -> Option<Self> {
        let power = addresses.trailing_zeros();
        (addresses.is_power_of_two() && power <= u32::from(Self::MAX.0)).then_some(Self(power as u8))
    }

    /// The size of a range of 2^`power` addresses, or the largest there is.
    fn at_most(power: u8) -> Self {
        Self(power.min(Self::MAX.0))
    }

    /// The number of addresses.
    #[must_use]
    pub fn addresses(self) -> u32 {
        1 << self.0
    }

    /// The length of a prefix of this size.
    #[must_use]
    pub fn prefix_len(self, family: Family) -> u8 {
        match family {
            Family::V4 => 32 - self.0,
            Family::V6 => 128 - self.0,
        }
    }

    /// Half of it; `None` below one address.
    #[must_use]
    pub fn half(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }
}

// === impl Block ===

impl Block {
    /// A block that starts at these addresses, which must be multiples of the size.
    pub fn new(
        network: impl Into<NetworkName>,
        node: impl Into<String>,
        start: Addresses,
        size: BlockSize,
    ) -> Result<Self, BlockError> {
        let (network, node) = (network.into(), node.into());
        match start.iter().find(|a| !to_number(*a).is_multiple_of(u128::from(size.addresses()))) {
            Some(address) => Err(BlockError::NotAligned { network, node, address, size: size.addresses() }),
            None => Ok(Self { network, node, start, size }),
        }
    }

    /// A block from the ranges of an AddressBlock or a Node's podCIDRs. Where they differ in size the smaller
    /// one rules, and of a larger one than [`BlockSize::MAX`] the beginning is used.
    pub fn from_ranges(
        network: impl Into<NetworkName>,
        node: impl Into<String>,
        ipv4: Option<Ipv4Net>,
        ipv6: Option<Ipv6Net>,
    ) -> Result<Self, BlockError> {
        let (network, node) = (network.into(), node.into());
        let Some(start) = Addresses::new(ipv4.map(|n| n.addr()), ipv6.map(|n| n.addr())) else {
            return Err(BlockError::Empty { network, node });
        };
        let powers = ipv4.map(|n| 32 - n.prefix_len()).into_iter().chain(ipv6.map(|n| 128 - n.prefix_len()));
        let power = powers.min().expect("one family is there");
        Self::new(network, node, start, BlockSize::at_most(power))
    }

    /// The Network's name.
    #[must_use]
    pub fn network(&self) -> &NetworkName {
        &self.network
    }

    /// The node that owns it.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    /// The first address of each family. No two blocks of one Network share it, so it names the block.
    #[must_use]
    pub fn start(&self) -> Addresses {
        self.start
    }

    /// How many addresses each family has.
    #[must_use]
    pub fn size(&self) -> BlockSize {
        self.size
    }

    /// The addresses at an index.
    #[must_use]
    pub fn at(&self, index: u32) -> Option<Addresses> {
        if index >= self.size.addresses() {
            return None;
        }
        // Aligned to its size, so this cannot overflow.
        Some(match self.start {
            Addresses::V4(v4) => Addresses::V4((v4.to_bits() + index).into()),
            Addresses::V6(v6) => Addresses::V6((v6.to_bits() + u128::from(index)).into()),
            Addresses::Dual { v4, v6 } => Addresses::Dual {
                v4: (v4.to_bits() + index).into(),
                v6: (v6.to_bits() + u128::from(index)).into(),
            },
        })
    }

    /// The index that has this address.
    #[must_use]
    pub fn index_of(&self, address: IpAddr) -> Option<u32> {
        let start = to_number(self.start.get(Family::of(address))?);
        let offset = to_number(address).checked_sub(start)?;
        (offset < u128::from(self.size.addresses())).then_some(offset as u32)
    }

    /// The MAC of the pod or router at an index, known before it exists.
    #[must_use]
    pub fn mac_at(&self, network_id: u32, index: u32) -> Option<Mac> {
        self.at(index).map(|addresses| pod_mac(network_id, addresses.first()))
    }

    /// The prefix of a family, as one route to the node covers it.
    #[must_use]
    pub fn prefix(&self, family: Family) -> Option<IpNet> {
        let address = self.start.get(family)?;
        Some(
            IpNet::new(address, self.size.prefix_len(family))
                .expect("a block's prefix length fits its family"),
        )
    }

    /// The range of each family.
    pub fn ranges(&self) -> impl Iterator<Item = AddressRange> + '_ {
        self.start.iter().map(|first| {
            let number = to_number(first);
            let last = number + u128::from(self.size.addresses() - 1);
            AddressRange::of_numbers(Family::of(first), number, last)
        })
    }

    /// Whether the two have an address in common, whatever their Networks.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.ranges().any(|mine| other.ranges().any(|theirs| mine.overlaps(&theirs)))
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, family) in Family::ALL.into_iter().filter(|f| self.start.get(*f).is_some()).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{}", self.prefix(family).expect("the family is there"))?;
        }
        Ok(())
    }
}

impl From<Block> for RawBlock {
    fn from(block: Block) -> Self {
        let v4 = block.start.v4().map(|a| Ipv4Net::new_assert(a, block.size.prefix_len(Family::V4)));
        let v6 = block.start.v6().map(|a| Ipv6Net::new_assert(a, block.size.prefix_len(Family::V6)));
        Self { network: block.network, node: block.node, ipv4: v4, ipv6: v6 }
    }
}

impl TryFrom<RawBlock> for Block {
    type Error = BlockError;

    fn try_from(raw: RawBlock) -> Result<Self, Self::Error> {
        Self::from_ranges(raw.network, raw.node, raw.ipv4, raw.ipv6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod_cidrs() -> Block {
        let v6 = Some("fd77:0:0:3::/64".parse().unwrap());
        Block::from_ranges("default", "n1", Some("10.244.3.0/24".parse().unwrap()), v6).unwrap()
    }

    #[test]
    fn families_are_paired_by_index() {
        let block = pod_cidrs();
        assert_eq!(block.size().addresses(), 256);
        assert_eq!(block.to_string(), "10.244.3.0/24,fd77:0:0:3::/120");
        let at = block.at(17).unwrap();
        assert_eq!(at.to_string(), "10.244.3.17,fd77:0:0:3::11");
        for address in at.iter() {
            assert_eq!(block.index_of(address), Some(17));
        }
        assert_eq!(block.at(256), None);
        assert_eq!(block.index_of("10.244.4.0".parse().unwrap()), None);
        assert_eq!(block.index_of("10.244.2.255".parse().unwrap()), None);
        assert_eq!(block.mac_at(1, 17), Some(pod_mac(1, "10.244.3.17".parse().unwrap())));
    }

    #[test]
    fn written_down_as_prefixes() {
        let text = serde_json::to_string(&pod_cidrs()).unwrap();
        assert_eq!(
            text,
            r#"{"network":"default","node":"n1","ipv4":"10.244.3.0/24","ipv6":"fd77:0:0:3::/120"}"#
        );
        assert_eq!(serde_json::from_str::<Block>(&text).unwrap(), pod_cidrs());
        let skewed = r#"{"network":"a","node":"b","ipv4":"10.0.0.3/29"}"#;
        assert!(serde_json::from_str::<Block>(skewed).is_err());
    }

    #[test]
    fn sizes_are_powers_of_two() {
        assert_eq!(BlockSize::new(8), Some(BlockSize::SMALL));
        assert_eq!(BlockSize::new(65_536), Some(BlockSize::MAX));
        for wrong in [0, 3, 131_072] {
            assert_eq!(BlockSize::new(wrong), None);
        }
    }
}
