//! Transport protocols that have ports.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A transport protocol that Services, policies and port mappings know. It prints as Kubernetes writes it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Protocol {
    /// TCP, IP protocol 6.
    Tcp,
    /// UDP, IP protocol 17.
    Udp,
    /// SCTP, IP protocol 132.
    Sctp,
}

/// A text that is not one of the protocols.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is not a protocol: write TCP, UDP or SCTP")]
pub struct ParseProtocolError(String);

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The IP protocol number, as it stands in packets.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The name in the Kubernetes API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }

    /// Reads the name in the Kubernetes API, in exactly that spelling.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.as_str() == text)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Protocol {
    type Err = ParseProtocolError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text).ok_or_else(|| ParseProtocolError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_read_as_they_print() {
        for protocol in Protocol::ALL {
            assert_eq!(protocol.to_string().parse(), Ok(protocol));
        }
        for wrong in ["", "tcp", "TCP ", "ICMP", "6"] {
            wrong.parse::<Protocol>().expect_err(wrong);
        }
    }

    #[test]
    fn ledgers_hold_the_names_of_the_variants() {
        assert_eq!(serde_json::to_string(&Protocol::ALL).expect("JSON"), r#"["Tcp","Udp","Sctp"]"#);
    }
}
