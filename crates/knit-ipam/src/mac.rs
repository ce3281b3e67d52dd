//! MAC addresses that follow from a Network's id and an address, so that nobody has to announce them.
//!
//! | first octet | whose | the other five octets | unique because |
//! |---|---|---|---|
//! | `0a` | interface with an IPv4 address | low octet of the Network's id, the IPv4 address | it holds the whole address |
//! | `0e` | interface with IPv6 only | low 40 bits of the IPv6 address | blocks are cut from the first 2^40 addresses of the one IPv6 subnet |
//! | `12` | static IPv6-only address beyond those 2^40 | 40-bit hash of the address | only likely; such an address is announced by itself |
//! | `06` | the anycast gateway | `6b`, the Network's id | one per Network |
//! | `06` | ends of uplinks and tunnels | `75` or `76`, then a number or a node's address | the runtime's own |
//!
//! All are unicast and locally administered. A MAC is unique inside one Network; routers of two Networks
//! never share a segment, so that is enough. A router's own address is an address of its node's block and has
//! that address's MAC.

use std::net::IpAddr;

use knit_types::{Addresses, Mac, fnv1a};

use crate::address::to_number;

const WITH_V4: u8 = 0x0a;
const WITH_V6: u8 = 0x0e;
const HASHED: u8 = 0x12;
const GATEWAY: u8 = 0x06;

/// How many addresses of an IPv6 subnet, from its first on, have a MAC of their own: 2^40.
pub(crate) const V6_WINDOW: u128 = 1 << 40;

/// The MAC of the interface that has this address: the IPv4 one where there is one, the IPv6 one otherwise.
///
/// For all addresses of blocks and of routers. See the module's table for why two of one Network never share
/// one.
#[must_use]
pub fn pod_mac(network_id: u32, address: IpAddr) -> Mac {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            Mac([WITH_V4, network_id as u8, a, b, c, d])
        }
        IpAddr::V6(v6) => with_prefix(WITH_V6, v6.to_bits()),
    }
}

/// The MAC of a Network's anycast gateway, the same on every node.
#[must_use]
pub fn gateway_mac(network_id: u32) -> Mac {
    let [a, b, c, d] = network_id.to_be_bytes();
    Mac([GATEWAY, b'k', a, b, c, d])
}

/// The MAC of a static IPv6-only address beyond the window in which [`pod_mac`] is unique.
pub(crate) fn hashed_mac(address: IpAddr) -> Mac {
    let hash = fnv1a(to_number(address).to_be_bytes());
    with_prefix(HASHED, u128::from(hash ^ (hash >> 40)))
}

/// Whether a MAC has the form of one that is derived in this Network.
pub(crate) fn is_derived(network_id: u32, mac: Mac) -> bool {
    match mac.0[0] {
        WITH_V4 => mac.0[1] == network_id as u8,
        WITH_V6 | HASHED => true,
        GATEWAY => matches!(mac.0[1], b'k' | b'u' | b'v'),
        _ => false,
    }
}

/// Whether an interface whose deciding address is this one may have this MAC: its own, or one that is
/// nobody's by its form. What another node says of its pods must hold to that, too.
#[must_use]
pub fn may_have_mac(network_id: u32, first: IpAddr, mac: Mac) -> bool {
    let own = mac == pod_mac(network_id, first) || mac == hashed_mac(first);
    mac.is_unicast() && (own || !is_derived(network_id, mac))
}

/// The address that decides an interface's MAC.
pub(crate) fn deciding(addresses: &Addresses) -> IpAddr {
    addresses.first()
}

fn with_prefix(prefix: u8, number: u128) -> Mac {
    let bytes = number.to_be_bytes();
    let mut mac = [prefix; 6];
    mac[1..].copy_from_slice(&bytes[11..]);
    Mac(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_module_holds() {
        let v4 = pod_mac(0x0102, "10.1.2.3".parse().unwrap());
        assert_eq!(v4.to_string(), "0a:02:0a:01:02:03");
        let v6 = pod_mac(7, "fd77::12:3456:789a".parse().unwrap());
        assert_eq!(v6.to_string(), "0e:12:34:56:78:9a");
        assert_eq!(gateway_mac(0x0102).to_string(), "06:6b:00:00:01:02");
        let hashed = hashed_mac("fd77::1".parse().unwrap());
        for mac in [v4, v6, gateway_mac(1), hashed] {
            assert!(mac.is_unicast() && mac.0[0] & 2 == 2, "{mac} is unicast and locally administered");
        }
        assert_ne!(hashed, hashed_mac("fd77::2".parse().unwrap()));
    }
}
