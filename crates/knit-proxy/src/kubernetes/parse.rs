//! Addresses as Kubernetes reads them: leading zeros are allowed and mean nothing (rule 12).

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// Reads an address. `010.0.0.1` is 10.0.0.1, as in Kubernetes; an IPv4 address written as IPv6 is IPv4.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let mut octets = [0u8; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next()?;
        // `parse` alone would let a sign pass.
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        *octet = part.parse().ok()?;
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets).into())
}

/// Reads a range. White space around it is ignored (rule 44), and bits after the prefix are cut off.
#[must_use]
pub fn parse_net(text: &str) -> Option<IpNet> {
    let (address, length) = text.trim().split_once('/')?;
    if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let address: IpAddr = parse_ip(address)?;
    IpNet::new(address, length.parse().ok()?).ok().map(|net| net.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_12_addresses_are_read_sloppily_and_made_canonical() {
        for (text, wanted) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("010.000.00.1", Some("10.0.0.1")),
            ("0172.016.0.08", Some("172.16.0.8")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("FD00:0:0::1", Some("fd00::1")),
            ("10.0.0", None),
            ("10.0.0.1.2", None),
            ("10.0.0.256", None),
            ("10.0.0.+1", None),
            ("10.0..1", None),
            ("None", None),
            ("", None),
        ] {
            assert_eq!(parse_ip(text).map(|a| a.to_string()).as_deref(), wanted, "{text:?}");
        }
    }

    #[test]
    fn rules_12_44_ranges() {
        for (text, wanted) in [
            (" 10.1.2.3/8 ", Some("10.0.0.0/8")),
            ("010.0.0.0/08", Some("10.0.0.0/8")),
            ("fd00::1/64", Some("fd00::/64")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("10.0.0.0/33", None),
            ("10.0.0.0/-1", None),
            ("10.0.0.0/", None),
            ("10.0.0.0", None),
        ] {
            assert_eq!(parse_net(text).map(|a| a.to_string()).as_deref(), wanted, "{text:?}");
        }
    }
}
