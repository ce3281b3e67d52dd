//! The headers of a packet: who sends it to whom, and what it carries. What is cut off is left out.
//!
//! Every byte may come from a pod, so nothing here is believed: lengths are checked, chains of IPv6 extension
//! headers end after a few, and a fragment that is not the first has no ports.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Extension headers that are followed before a packet counts as one without a transport header.
const EXTENSIONS: usize = 8;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// What the headers of a packet say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Headers {
    /// Where it comes from.
    pub source: IpAddr,
    /// Where it goes to, in the same family.
    pub destination: IpAddr,
    /// What it carries.
    pub transport: Transport,
}

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the fields are those of the headers")]
pub enum Transport {
    /// TCP, UDP, UDP-Lite or SCTP.
    Ports { protocol: u8, source: u16, destination: u16 },
    /// ICMP or ICMPv6.
    Icmp { protocol: u8, kind: u8, code: u8 },
    /// Anything else, and whatever has no ports to be read: later fragments, packets that are cut off.
    Other { protocol: u8 },
}

// === impl Headers ===

impl Headers {
    /// Reads an IPv4 or IPv6 packet from its first byte on. Nothing if it is neither, or the IP header is not
    /// complete.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes.first()? >> 4 {
            4 => Self::parse_v4(bytes),
            6 => Self::parse_v6(bytes),
            _ => None,
        }
    }

    fn parse_v4(bytes: &[u8]) -> Option<Self> {
        let length = usize::from(bytes.first()? & 0xf) * 4;
        if length < 20 || bytes.len() < length {
            return None;
        }
        let fragment = u16_at(bytes, 6)? & 0x1fff;
        let protocol = *bytes.get(9)?;
        let transport = match fragment {
            0 => Transport::parse(protocol, bytes.get(length..)?),
            _ => Transport::Other { protocol },
        };
        let (source, destination) = (array::<4>(bytes, 12)?, array::<4>(bytes, 16)?);
        Some(Self {
            source: Ipv4Addr::from(source).into(),
            destination: Ipv4Addr::from(destination).into(),
            transport,
        })
    }

    fn parse_v6(bytes: &[u8]) -> Option<Self> {
        let (source, destination) = (array::<16>(bytes, 8)?, array::<16>(bytes, 24)?);
        Some(Self {
            source: Ipv6Addr::from(source).into(),
            destination: Ipv6Addr::from(destination).into(),
            transport: behind_extensions(*bytes.get(6)?, bytes.get(40..)?),
        })
    }
}

/// The transport header behind the extension headers of an IPv6 packet.
fn behind_extensions(mut protocol: u8, mut rest: &[u8]) -> Transport {
    for _ in 0..EXTENSIONS {
        let (next, length) = match (protocol, rest) {
            // Hop-by-hop options, routing, destination options, mobility: in units of 8 bytes, less one.
            (0 | 43 | 60 | 135, [next, units, ..]) => (*next, (usize::from(*units) + 1) * 8),
            // A fragment; only the first one has what follows.
            (44, [next, _, high, low, ..]) => {
                if u16::from_be_bytes([*high, *low]) & 0xfff8 != 0 {
                    return Transport::Other { protocol: *next };
                }
                (*next, 8)
            }
            // An authentication header: length in units of 4 bytes, less two.
            (51, [next, units, ..]) => (*next, (usize::from(*units) + 2) * 4),
            _ => return Transport::parse(protocol, rest),
        };
        let Some(behind) = rest.get(length..) else { return Transport::Other { protocol: next } };
        (protocol, rest) = (next, behind);
    }
    Transport::Other { protocol }
}

// === impl Transport ===

impl Transport {
    fn parse(protocol: u8, bytes: &[u8]) -> Self {
        match (protocol, bytes) {
            (TCP | UDP | UDP_LITE | SCTP, [a, b, c, d, ..]) => Self::Ports {
                protocol,
                source: u16::from_be_bytes([*a, *b]),
                destination: u16::from_be_bytes([*c, *d]),
            },
            (ICMP | ICMPV6, [kind, code, ..]) => Self::Icmp { protocol, kind: *kind, code: *code },
            _ => Self::Other { protocol },
        }
    }

    /// The protocol number.
    #[must_use]
    pub fn protocol(&self) -> u8 {
        match self {
            Self::Ports { protocol, .. } | Self::Icmp { protocol, .. } | Self::Other { protocol } => {
                *protocol
            }
        }
    }

    /// The destination port, if there is one.
    #[must_use]
    pub fn destination_port(&self) -> Option<u16> {
        match self {
            Self::Ports { destination, .. } => Some(*destination),
            Self::Icmp { .. } | Self::Other { .. } => None,
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array::<2>(bytes, at).map(u16::from_be_bytes)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn v4(protocol: u8, fragment: u16, options: usize, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x40 | (5 + options / 4) as u8, 0, 0, 0, 0, 0];
        bytes.extend(fragment.to_be_bytes());
        bytes.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes.extend(std::iter::repeat_n(1, options));
        bytes.extend(rest);
        bytes
    }

    fn v6(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0, 0, 0, next, 64];
        bytes.extend("fd00::1".parse::<Ipv6Addr>().expect("an address").octets());
        bytes.extend("fd00::2".parse::<Ipv6Addr>().expect("an address").octets());
        bytes.extend(rest);
        bytes
    }

    const PORTS: [u8; 8] = [0x30, 0x39, 0, 80, 9, 9, 9, 9];

    #[test]
    fn ports_are_read_behind_options_and_extension_headers() {
        let wanted = |protocol| Transport::Ports { protocol, source: 12345, destination: 80 };
        for protocol in [TCP, UDP, SCTP, UDP_LITE] {
            for packet in [v4(protocol, 0, 0, &PORTS), v4(protocol, 0, 8, &PORTS), v6(protocol, &PORTS)] {
                assert_eq!(Headers::parse(&packet).expect("a packet").transport, wanted(protocol));
            }
        }
        // Hop-by-hop options, then an authentication header, then the first fragment.
        let mut chain = vec![51, 0, 0, 0, 0, 0, 0, 0];
        chain.extend([44, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend([TCP, 0, 0, 1, 0, 0, 0, 0]);
        chain.extend(PORTS);
        let read = Headers::parse(&v6(0, &chain)).expect("a packet");
        assert_eq!(read.transport, wanted(TCP));
        assert_eq!((read.source, read.destination), ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()));
    }

    #[test]
    fn later_fragments_and_packets_cut_off_have_no_ports() {
        let later = Headers::parse(&v4(UDP, 0x2001, 0, &PORTS)).expect("a packet");
        assert_eq!(later.transport, Transport::Other { protocol: UDP });
        // The flag that more fragments follow does not make it a later one.
        let first = Headers::parse(&v4(UDP, 0x2000, 0, &PORTS)).expect("a packet");
        assert_eq!(first.transport.destination_port(), Some(80));
        let later = [UDP, 0, 0, 0x08, 0, 0, 0, 0, 0x30, 0x39, 0, 80];
        let later = Headers::parse(&v6(44, &later)).expect("a packet");
        assert_eq!(later.transport, Transport::Other { protocol: UDP });
        let short = Headers::parse(&v4(TCP, 0, 0, &PORTS[..3])).expect("a packet");
        assert_eq!(short.transport, Transport::Other { protocol: TCP });
        for packet in [&v4(TCP, 0, 8, &[])[..24], &v6(TCP, &[])[..39], &[0x45], &[0x15; 60], &[]] {
            assert_eq!(Headers::parse(packet), None);
        }
    }

    #[test]
    fn an_endless_chain_of_extension_headers_ends() {
        let chain: Vec<u8> = [60, 0, 0, 0, 0, 0, 0, 0].repeat(200);
        let read = Headers::parse(&v6(60, &chain)).expect("a packet");
        assert_eq!(read.transport, Transport::Other { protocol: 60 });
    }

    #[test]
    fn icmp_has_a_type_and_a_code() {
        let ping = Headers::parse(&v4(ICMP, 0, 0, &[8, 0, 1, 2])).expect("a packet");
        assert_eq!(ping.transport, Transport::Icmp { protocol: 1, kind: 8, code: 0 });
        let ping = Headers::parse(&v6(ICMPV6, &[128, 0, 1, 2])).expect("a packet");
        assert_eq!(ping.transport, Transport::Icmp { protocol: 58, kind: 128, code: 0 });
        assert_eq!((ping.transport.protocol(), ping.transport.destination_port()), (58, None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(
            version in prop::sample::select(vec![0x45_u8, 0x4f, 0x60, 0x00]),
            rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = vec![version];
            bytes.extend(rest);
            if let Some(headers) = Headers::parse(&bytes) {
                prop_assert_eq!(headers.source.is_ipv4(), headers.destination.is_ipv4());
            }
        }

        #[test]
        fn chains_of_extension_headers_are_read_without_a_panic(
            chain in prop::collection::vec((prop::sample::select(vec![0_u8, 43, 44, 51, 60, 135, 6]), 0_u8..4,
                any::<u16>()), 0..12)) {
            let first = chain.first().map_or(6, |(next, ..)| *next);
            let mut rest = Vec::new();
            for (next, units, word) in &chain {
                rest.extend([*next, *units]);
                rest.extend(word.to_be_bytes());
                rest.extend([0; 4]);
            }
            prop_assert!(Headers::parse(&v6(first, &rest)).is_some());
        }
    }
}
