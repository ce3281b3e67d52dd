//! MTUs that are known to be acceptable; names and MAC addresses that are, from knit-types.

use std::fmt;

pub use knit_types::{IfName, Mac};

use crate::error::{Error, Result};

/// A link's MTU, within what Ethernet-like links take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mtu(u32);

impl Mtu {
    /// The least that IPv4 needs.
    pub const MIN: u32 = 68;
    /// The most that a veth, bridge or VXLAN takes.
    pub const MAX: u32 = 65_535;
    /// The least that IPv6 needs: below it the kernel turns IPv6 off on the link.
    pub const MIN_IPV6: u32 = knit_types::IPV6_MIN_MTU;

    /// Checks an MTU.
    pub fn new(bytes: u32) -> Result<Self> {
        if (Self::MIN..=Self::MAX).contains(&bytes) {
            return Ok(Self(bytes));
        }
        let problem = format!("it is not between {} and {}", Self::MIN, Self::MAX);
        let advice = "use the underlay's MTU less the tunnel's header; 1280 or more if IPv6 is used";
        Err(Error::invalid(format!("MTU {bytes}"), problem, advice))
    }

    /// In bytes.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_are_checked() {
        assert_eq!(Mtu::new(1450).expect("usual").get(), 1450);
        for bad in [0, 67, 65_536, u32::MAX] {
            assert!(Mtu::new(bad).expect_err("out of range").to_string().contains("between 68 and 65535"));
        }
    }
}
