//! Addresses and prefixes as Kubernetes reads them, which is more than the standard library takes.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// Reads an address. Leading zeros mean nothing, as in Kubernetes: `010.0.0.1` is 10.0.0.1. An IPv4 address
/// written as IPv6 is IPv4.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let mut octets = [0_u8; 4];
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

/// Reads a CIDR; bits behind the prefix are cut off. White space is not part of one: whoever allows it trims
/// it.
#[must_use]
pub fn parse_net(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let length: u8 = length.parse().ok()?;
    let (address, length) = match (parse_ip(address)?, address.contains(':')) {
        // ::ffff:10.0.0.0/104 is 10.0.0.0/8.
        (IpAddr::V4(v4), true) => (IpAddr::V4(v4), length.checked_sub(96)?),
        (address, _) => (address, length),
    };
    IpNet::new(address, length).ok().map(|net| net.trunc())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_read_sloppily_and_made_canonical() {
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
    fn cidrs_are_read_sloppily_and_masked() {
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
            (" 10.0.0.0/8", None),
            ("", None),
        ] {
            assert_eq!(parse_net(text).map(|n| n.to_string()).as_deref(), wanted, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn every_address_is_read_as_it_prints(bits: u128) {
            for address in [IpAddr::V4((bits as u32).into()), IpAddr::V6(bits.into())] {
                prop_assert_eq!(parse_ip(&address.to_string()), Some(address.to_canonical()));
            }
        }

        #[test]
        fn what_is_read_is_a_first_address_of_its_prefix(text in "[0-9a-f:.]{0,20}/[0-9]{0,3}") {
            if let Some(net) = parse_net(&text) {
                prop_assert_eq!(net, net.trunc());
                prop_assert_eq!(parse_net(&net.to_string()), Some(net));
            }
        }
    }
}
