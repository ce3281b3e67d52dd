//! AddressBlocks: a range of addresses that one node owns in one Network.

use std::fmt;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use knit_api::AddressBlockSpec;
use knit_ipam::{Block, BlockError};
use knit_types::{InvalidNetworkName, NetworkName};

/// An AddressBlock that can be used. What its node gives out of it is [`Self::block`]; its ranges may be
/// larger, and are the node's all the same.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AddressBlock {
    block: Block,
    ipv4: Option<Ipv4Net>,
    ipv6: Option<Ipv6Net>,
}

/// What is wrong with an AddressBlock.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AddressBlockError {
    /// A range that is none.
    #[error("spec.{field}: {text:?} is not a valid CIDR: delete this AddressBlock")]
    Range {
        /// `ipv4` or `ipv6`.
        field: &'static str,
        /// As it was written.
        text: String,
    },
    /// The Network's name.
    #[error("spec.network does not name a Network: delete this AddressBlock")]
    Network(#[source] InvalidNetworkName),
    /// Ranges that make no block.
    #[error("its ranges cannot be used")]
    Block(#[source] BlockError),
}

impl AddressBlock {
    /// Reads one.
    ///
    /// # Errors
    /// When one of its ranges cannot be read, or there is none.
    pub fn of(spec: &AddressBlockSpec) -> Result<Self, AddressBlockError> {
        let (ipv4, ipv6) = (range("ipv4", spec.ipv4.as_deref())?, range("ipv6", spec.ipv6.as_deref())?);
        let network = NetworkName::new(&spec.network).map_err(AddressBlockError::Network)?;
        let block =
            Block::from_ranges(network, spec.node.as_str(), ipv4, ipv6).map_err(AddressBlockError::Block)?;
        Ok(Self { block, ipv4, ipv6 })
    }

    /// What its node gives out.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// The Network's name.
    #[must_use]
    pub fn network(&self) -> &NetworkName {
        self.block.network()
    }

    /// The node that owns it.
    #[must_use]
    pub fn node(&self) -> &str {
        self.block.node()
    }

    /// Its IPv4 range.
    #[must_use]
    pub fn ipv4(&self) -> Option<Ipv4Net> {
        self.ipv4
    }

    /// Its IPv6 range.
    #[must_use]
    pub fn ipv6(&self) -> Option<Ipv6Net> {
        self.ipv6
    }

    /// Its ranges.
    pub fn ranges(&self) -> impl Iterator<Item = IpNet> + use<> {
        self.ipv4.map(IpNet::from).into_iter().chain(self.ipv6.map(IpNet::from))
    }

    /// What is written in the object.
    #[must_use]
    pub fn spec(&self) -> AddressBlockSpec {
        AddressBlockSpec {
            network: self.network().to_string(),
            node: self.node().to_owned(),
            ipv4: self.ipv4.map(|range| range.to_string()),
            ipv6: self.ipv6.map(|range| range.to_string()),
        }
    }
}

impl fmt::Display for AddressBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.ranges().enumerate() {
            write!(f, "{}{range}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

fn range<T: std::str::FromStr>(
    field: &'static str,
    text: Option<&str>,
) -> Result<Option<T>, AddressBlockError> {
    let wrong = |text: &str| AddressBlockError::Range { field, text: text.to_owned() };
    text.map(|text| text.parse().map_err(|_| wrong(text))).transpose()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(ipv4: Option<&str>, ipv6: Option<&str>) -> AddressBlockSpec {
        AddressBlockSpec {
            network: "blue".into(),
            node: "a".into(),
            ipv4: ipv4.map(Into::into),
            ipv6: ipv6.map(Into::into),
        }
    }

    #[test]
    fn a_block_with_one_range_that_cannot_be_read_is_no_block() {
        let both = AddressBlock::of(&spec(Some("10.244.1.0/24"), Some("fd44:1::/64"))).expect("a block");
        assert_eq!(both.to_string(), "10.244.1.0/24,fd44:1::/64");
        assert_eq!(both.block().size().addresses(), 256, "the smaller range rules");
        let wrong = AddressBlock::of(&spec(Some("10.244.1.0/24"), Some("10.0.0.0/8"))).expect_err("wrong");
        assert_eq!(
            wrong.to_string(),
            "spec.ipv6: \"10.0.0.0/8\" is not a valid CIDR: delete this AddressBlock"
        );
        AddressBlock::of(&spec(None, None)).expect_err("without ranges");
        let nowhere = AddressBlockSpec { network: "Blue!".into(), ..spec(Some("10.244.1.0/24"), None) };
        AddressBlock::of(&nowhere).expect_err("of a Network that cannot be");
    }

    proptest! {
        #[test]
        fn what_is_read_says_what_was_written(
            v4: u32,
            l4 in 16_u8..=32,
            v6: u128,
            l6 in 112_u8..=128,
            which in 0..3,
        ) {
            let v4 = Ipv4Net::new(v4.into(), l4).expect("a range").trunc().to_string();
            let v6 = Ipv6Net::new(v6.into(), l6).expect("a range").trunc().to_string();
            let written = spec((which != 1).then_some(&*v4), (which != 2).then_some(&*v6));
            let read = AddressBlock::of(&written).expect("a block");
            prop_assert_eq!(read.spec(), written);
            for range in read.block().ranges() {
                let (first, last) = (range.first(), range.last());
                prop_assert!(read.ranges().any(|r| r.contains(&first) && r.contains(&last)));
            }
        }
    }
}
