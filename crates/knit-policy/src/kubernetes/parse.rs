//! Ranges, protocols and ports of policies, with a problem for each that cannot be read.

use ipnet::IpNet;
use knit_types::parse_net;

use super::Problems;
use crate::model::{PortRanges, Ports, Protocol};

impl Problems {
    pub(super) fn net(&mut self, text: &str, field: impl FnOnce() -> String) -> Option<IpNet> {
        let found = parse_net(text);
        if found.is_none() {
            self.add(field(), format!("{text:?} is not a valid CIDR such as 10.0.0.0/8; it is ignored"));
        }
        found
    }

    pub(super) fn protocol(
        &mut self,
        text: Option<&str>,
        field: impl FnOnce() -> String,
    ) -> Option<Protocol> {
        // Rule 4: TCP where none is given.
        let Some(text) = text else { return Some(Protocol::Tcp) };
        let found = Protocol::parse(text);
        if found.is_none() {
            self.add(field(), format!("{text:?} must be TCP, UDP or SCTP; it matches nothing"));
        }
        found
    }

    /// Ports from one to another, both included.
    pub(super) fn range(
        &mut self,
        protocol: Protocol,
        first: impl Into<i64>,
        last: impl Into<i64>,
        field: impl FnOnce() -> String,
    ) -> Option<Ports> {
        let (first, last) = (first.into(), last.into());
        let number = |n: i64| u16::try_from(n).ok().filter(|n| *n != 0);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => {
                Some(Ports::of(protocol, PortRanges::range(first, last)))
            }
            _ => {
                let range = if first == last { format!("{first}") } else { format!("{first} to {last}") };
                self.add(
                    field(),
                    format!("{range}: ports are 1 to 65535, and a range rises; it matches nothing"),
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_16_cidrs_are_read_sloppily_and_masked() {
        for (text, wanted) in [
            ("10.1.2.3/8", Some("10.0.0.0/8")),
            ("010.000.0.0/08", Some("10.0.0.0/8")),
            ("fd00::1/64", Some("fd00::/64")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("::/0", Some("::/0")),
            ("::ffff:10.1.0.0/104", Some("10.0.0.0/8")),
            ("::ffff:10.1.0.0/64", None),
            ("10.0.0.0/33", None),
            ("10.0.0.0/-1", None),
            ("10.0.0.0/+8", None),
            ("10.0.0.0/", None),
            ("10.0.0.0", None),
            ("10.0.0.+1/8", None),
            ("", None),
        ] {
            assert_eq!(parse_net(text).map(|n| n.to_string()).as_deref(), wanted, "{text:?}");
        }
    }
}
