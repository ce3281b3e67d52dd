//! Interface names, MAC addresses and MTUs that are known to be acceptable.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The name of a link: 1 to 15 bytes, as the kernel takes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IfName(String);

/// A MAC address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// A link's MTU, within what Ethernet-like links take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mtu(u32);

impl IfName {
    /// The longest name, in bytes.
    pub const MAX: usize = 15;

    /// Checks a name.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let object = || format!("interface name {name:?}");
        let advice = "use 1 to 15 of the letters, digits, '.', '_', '-'";
        if name.is_empty() {
            return Err(Error::invalid(object(), "it is empty", advice));
        }
        if name.len() > Self::MAX {
            let problem = format!("it has {} bytes, {} is the most", name.len(), Self::MAX);
            return Err(Error::invalid(object(), problem, advice));
        }
        // The kernel would take more, but '%' makes it choose a number, and the rest breaks paths and tools.
        let legal = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if let Some(bad) = name.chars().find(|c| !legal(*c)) {
            return Err(Error::invalid(object(), format!("{bad:?} is not allowed"), advice));
        }
        // Directories below /proc/sys/net/ipv4/conf that are no links.
        if [".", "..", "all", "default"].contains(&name.as_str()) {
            return Err(Error::invalid(object(), "it has a meaning of its own below /proc/sys/net", advice));
        }
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A name that the kernel reported, which needs no check.
    pub(crate) fn trusted(name: String) -> Self {
        Self(name)
    }
}

impl fmt::Display for IfName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for IfName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl Mac {
    /// All zeroes: in a VXLAN device's forwarding entries it stands for every address that has no entry.
    pub const ZERO: Mac = Mac([0; 6]);

    /// Whether a link may have this address: it is neither a group address nor zero.
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self != Self::ZERO
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Mac {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(format!("MAC address {text:?}"), "it does not parse", "write 02:00:00:00:00:01")
        };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let hex = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
            let part = parts.next().filter(hex).ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

impl Mtu {
    /// The least that IPv4 needs.
    pub const MIN: u32 = 68;
    /// The most that a veth, bridge or VXLAN takes.
    pub const MAX: u32 = 65_535;
    /// The least that IPv6 needs: below it the kernel turns IPv6 off on the link.
    pub const MIN_IPV6: u32 = 1280;

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
    fn names_are_checked() {
        for good in ["a", "eth0", "knit-0123456789", "br_x.7"] {
            assert_eq!(IfName::new(good).expect("legal").as_str(), good);
        }
        for bad in
            ["", "sixteencharacter", "a/b", "a b", "a:1", "eth%d", ".", "..", "all", "default", "é", "a\n"]
        {
            let error = IfName::new(bad).expect_err(bad);
            assert!(error.to_string().contains("use 1 to 15"), "{error}");
        }
        let error = IfName::new("sixteencharacter").expect_err("16 bytes").to_string();
        assert_eq!(
            error,
            "interface name \"sixteencharacter\": it has 16 bytes, 15 is the most; use 1 to 15 of the letters, digits, '.', '_', '-'"
        );
    }

    #[test]
    fn mtus_are_checked() {
        assert_eq!(Mtu::new(1450).expect("usual").get(), 1450);
        for bad in [0, 67, 65_536, u32::MAX] {
            assert!(Mtu::new(bad).expect_err("out of range").to_string().contains("between 68 and 65535"));
        }
    }

    #[test]
    fn macs_read_as_they_print() {
        let mac: Mac = "02:0a:ff:00:10:9e".parse().expect("good");
        assert_eq!(mac.to_string(), "02:0a:ff:00:10:9e");
        assert!(mac.is_unicast() && !Mac::ZERO.is_unicast() && !Mac([1, 0, 0, 0, 0, 1]).is_unicast());
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:0",
            "zz:00:00:00:00:00",
            "+2:00:00:00:00:00",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }
}
