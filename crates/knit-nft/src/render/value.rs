//! Values by their type.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::datatype::{Datatype, KeyType};

/// A whole key.
pub(super) fn key(types: &KeyType, bytes: &[u8]) -> String {
    let parts: Vec<String> = types.split(bytes).into_iter().map(|(kind, part)| value(kind, part)).collect();
    parts.join(" . ")
}

/// A range of keys, field by field.
pub(super) fn range(types: &KeyType, first: &[u8], last: &[u8]) -> String {
    let pairs = types.split(first).into_iter().zip(types.split(last));
    let parts: Vec<String> = pairs
        .map(|((kind, from), (_, to))| {
            if from == to {
                value(kind, from)
            } else if let Some(length) = prefix_length(from, to).filter(|_| is_address(kind)) {
                format!("{}/{length}", value(kind, from))
            } else {
                format!("{}-{}", value(kind, from), value(kind, to))
            }
        })
        .collect();
    parts.join(" . ")
}

fn is_address(kind: Datatype) -> bool {
    matches!(kind, Datatype::Ipv4Addr | Datatype::Ipv6Addr)
}

/// How long the prefix is that covers exactly this range.
pub(super) fn prefix_length(first: &[u8], last: &[u8]) -> Option<u32> {
    let mut length = 0;
    let mut host = false;
    for (from, to) in first.iter().zip(last) {
        for bit in (0..8).rev() {
            let pair = (from >> bit & 1, to >> bit & 1);
            match (host, pair) {
                (false, (0, 0) | (1, 1)) => length += 1,
                (_, (0, 1)) => host = true,
                _ => return None,
            }
        }
    }
    Some(length)
}

/// The number in up to eight bytes, in the order of its type.
pub(super) fn number(kind: Datatype, bytes: &[u8]) -> Option<u64> {
    let mut wide = [0; 8];
    let little = kind.is_host_order() && cfg!(target_endian = "little");
    let target = wide.get_mut(..bytes.len())?;
    target.copy_from_slice(bytes);
    if !little {
        target.reverse();
    }
    Some(u64::from_le_bytes(wide))
}

/// One field.
pub(super) fn value(kind: Datatype, bytes: &[u8]) -> String {
    let raw = || {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("0x{digits}")
    };
    match kind {
        Datatype::Ipv4Addr => {
            <[u8; 4]>::try_from(bytes).map_or_else(|_| raw(), |b| Ipv4Addr::from(b).to_string())
        }
        Datatype::Ipv6Addr => {
            <[u8; 16]>::try_from(bytes).map_or_else(|_| raw(), |b| Ipv6Addr::from(b).to_string())
        }
        Datatype::EtherAddr => {
            let parts: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            parts.join(":")
        }
        Datatype::IfName => {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            format!("\"{}\"", String::from_utf8_lossy(&bytes[..end]))
        }
        // One byte, or a whole register in either order.
        Datatype::Boolean => if bytes.iter().all(|byte| *byte == 0) { "missing" } else { "exists" }.into(),
        _ => number(kind, bytes).map_or_else(raw, |number| named(kind, number)),
    }
}

fn named(kind: Datatype, number: u64) -> String {
    let one = |names: &[(u64, &str)]| {
        names
            .iter()
            .find(|(value, _)| *value == number)
            .map_or_else(|| number.to_string(), |(_, n)| (*n).into())
    };
    match kind {
        Datatype::InetProto => one(&[(1, "icmp"), (6, "tcp"), (17, "udp"), (58, "ipv6-icmp"), (132, "sctp")]),
        Datatype::NfProto => one(&[(2, "ipv4"), (10, "ipv6")]),
        Datatype::EtherType => one(&[(0x800, "ip"), (0x806, "arp"), (0x86dd, "ip6")]),
        Datatype::ArpOp => one(&[(1, "request"), (2, "reply")]),
        Datatype::CtDir => one(&[(0, "original"), (1, "reply")]),
        Datatype::PktType => one(&[(0, "host"), (1, "broadcast"), (2, "multicast"), (3, "other")]),
        Datatype::FibAddr => one(&[(1, "unicast"), (2, "local"), (3, "broadcast"), (5, "multicast")]),
        Datatype::CtState => {
            bits(number, &[(1, "invalid"), (2, "established"), (4, "related"), (8, "new"), (64, "untracked")])
        }
        Datatype::CtStatus => bits(
            number,
            &[
                (1, "expected"),
                (2, "seen-reply"),
                (4, "assured"),
                (8, "confirmed"),
                (16, "snat"),
                (32, "dnat"),
            ],
        ),
        Datatype::TcpFlag => bits(
            number,
            &[
                (1, "fin"),
                (2, "syn"),
                (4, "rst"),
                (8, "psh"),
                (16, "ack"),
                (32, "urg"),
                (64, "ecn"),
                (128, "cwr"),
            ],
        ),
        Datatype::Mark => format!("0x{number:08x}"),
        _ => number.to_string(),
    }
}

fn bits(number: u64, names: &[(u64, &str)]) -> String {
    let known: u64 = names.iter().map(|(bit, _)| bit).sum();
    if number == 0 || number & !known != 0 {
        return format!("0x{number:x}");
    }
    let set: Vec<&str> = names.iter().filter(|(bit, _)| number & bit != 0).map(|(_, name)| *name).collect();
    set.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_are_prefixes_are_found() {
        assert_eq!(prefix_length(&[10, 0, 0, 0], &[10, 255, 255, 255]), Some(8));
        assert_eq!(prefix_length(&[10, 0, 0, 0], &[10, 0, 0, 0]), Some(32));
        assert_eq!(prefix_length(&[10, 0, 0, 0], &[10, 0, 0, 5]), None);
        assert_eq!(prefix_length(&[0, 0, 0, 0], &[255; 4]), Some(0));
        assert_eq!(prefix_length(&[10, 0, 0, 1], &[10, 0, 0, 0]), None);
    }
}
