//! MAC addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A MAC address, written as `02:00:5e:10:00:01`.
#[derive(Clone, Copy, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

/// A text that is not a MAC address.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is not a MAC address: write six hexadecimal octets, for example 02:00:5e:10:00:01")]
pub struct ParseMacError(String);

impl Mac {
    /// All zeros: in a VXLAN device's forwarding entries it stands for every address that has no entry.
    pub const ZERO: Self = Self([0; 6]);

    /// The six octets.
    #[must_use]
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }

    /// Whether one interface can have it: it is neither a group address nor all zeros.
    #[must_use]
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
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseMacError(text.to_owned());
        let mut mac = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut mac {
            // `from_str_radix` alone would let a sign pass.
            let digits = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
            let part = parts.next().filter(digits).ok_or_else(wrong)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() { Err(wrong()) } else { Ok(Self(mac)) }
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

impl TryFrom<String> for Mac {
    type Error = ParseMacError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_six_octets_parse() {
        assert_eq!("02:00:5E:10:00:01".parse::<Mac>().expect("a MAC").to_string(), "02:00:5e:10:00:01");
        for wrong in [
            "",
            "02",
            "02:00:5e:10:00",
            "02:00:5e:10:00:01:02",
            "+2:00:5e:10:00:01",
            "2:0:5e:10:0:1",
            "zz:00:00:00:00:00",
        ] {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn one_interface_has_no_group_address_and_not_zero() {
        assert!(Mac([2, 0, 0, 0, 0, 1]).is_unicast());
        assert!(!Mac::ZERO.is_unicast() && !Mac([1, 0, 0x5e, 0, 0, 1]).is_unicast());
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(octets: [u8; 6]) {
            let mac = Mac(octets);
            prop_assert_eq!(mac.to_string().parse::<Mac>(), Ok(mac));
            let json = serde_json::to_string(&mac).expect("JSON");
            prop_assert_eq!(&json, &format!("\"{mac}\""));
            prop_assert_eq!(serde_json::from_str::<Mac>(&json).expect("a MAC"), mac);
        }

        #[test]
        fn what_parses_is_six_octets_and_nothing_else(text in "[0-9a-fA-F:+ ]{0,20}") {
            if let Ok(mac) = text.parse::<Mac>() {
                prop_assert_eq!(mac.to_string(), text.to_ascii_lowercase());
            }
        }
    }
}
