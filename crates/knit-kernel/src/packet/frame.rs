//! Who has an address: ARP for IPv4 (RFC 826, RFC 5227), neighbor discovery for IPv6 (RFC 4861, RFC 4862), as
//! Ethernet frames.
//!
//! Every byte that is read may come from anybody on the segment: lengths are checked, and what is not
//! understood says nothing. Checksums are not compared: whoever could send a wrong one can send a right one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::EtherType;
use crate::name::Mac;

/// As much of a frame as says anything.
pub const LONGEST: usize = 256;

const BROADCAST: Mac = Mac([0xff; 6]);
/// Everybody who has IPv6.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ETHERNET: usize = 14;
const IPV6: usize = 40;
const ICMPV6: u8 = 58;
/// What has come over a router has less: neighbor discovery does not leave the segment.
const HOP_LIMIT: u8 = 255;
/// Of an ARP message: addresses of Ethernet (1) and IPv4, and their lengths.
const ARP_KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// The flag of an advertisement by which it takes the place of what others remember.
const OVERRIDE: u8 = 0x20;
const TARGET_LINK_ADDRESS: u8 = 2;

/// What a frame says about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heard {
    /// The address.
    pub address: IpAddr,
    /// Who says so.
    pub mac: Mac,
    /// What is said.
    pub word: Word,
}

/// What can be said about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Word {
    /// The sender has it.
    Has,
    /// The sender is about to have it, and asks whether anybody else has.
    Probes,
}

/// The question whether anybody has an address, by somebody who has none yet.
#[must_use]
pub fn probe(mac: Mac, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => arp(mac, Ipv4Addr::UNSPECIFIED, address),
        IpAddr::V6(address) => {
            let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
            message.extend(address.octets());
            icmpv6(mac, Ipv6Addr::UNSPECIFIED, solicited_node(address), message)
        }
    }
}

/// Tells everybody who remembers another MAC for an address that it is here now.
#[must_use]
pub fn announcement(mac: Mac, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => arp(mac, address, address),
        IpAddr::V6(address) => {
            let mut message = vec![ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
            message.extend(address.octets());
            message.extend([TARGET_LINK_ADDRESS, 1]);
            message.extend(mac.octets());
            icmpv6(mac, address, ALL_NODES, message)
        }
    }
}

/// The Ethernet groups that somebody must be in to hear what is said about an address.
#[must_use]
pub fn groups(address: IpAddr) -> Vec<Mac> {
    match address {
        IpAddr::V4(_) => Vec::new(),
        IpAddr::V6(address) => [solicited_node(address), ALL_NODES].map(group).to_vec(),
    }
}

/// Reads a frame; `None` if it says nothing about an address.
#[must_use]
pub fn parse(frame: &[u8]) -> Option<Heard> {
    let kind = u16::from_be_bytes(array(frame, 12)?);
    if kind == EtherType::Arp.number() {
        parse_arp(frame.get(ETHERNET..)?)
    } else if kind == EtherType::Ipv6.number() {
        parse_ipv6(Mac(array(frame, 6)?), frame.get(ETHERNET..)?)
    } else {
        None
    }
}

fn parse_arp(message: &[u8]) -> Option<Heard> {
    let operation = u16::from_be_bytes(array(message, 6)?);
    if array(message, 0)? != ARP_KIND || ![ARP_REQUEST, ARP_REPLY].contains(&operation) {
        return None;
    }
    let (mac, sender) = (Mac(array(message, 8)?), Ipv4Addr::from(array::<4>(message, 14)?));
    let target = Ipv4Addr::from(array::<4>(message, 24)?);
    let (address, word) = match (sender.is_unspecified(), operation) {
        (false, _) => (sender, Word::Has),
        (true, ARP_REQUEST) => (target, Word::Probes),
        (true, _) => return None,
    };
    heard(address.into(), mac, word)
}

fn parse_ipv6(from: Mac, packet: &[u8]) -> Option<Heard> {
    let is_discovery = packet.first()? >> 4 == 6 && packet.get(6..8)? == [ICMPV6, HOP_LIMIT];
    if !is_discovery {
        return None;
    }
    let length = usize::from(u16::from_be_bytes(array(packet, 4)?));
    let message = packet.get(IPV6..IPV6.checked_add(length)?)?;
    let (sender, target) =
        (Ipv6Addr::from(array::<16>(packet, 8)?), Ipv6Addr::from(array::<16>(message, 8)?));
    match (message.first()?, message.get(1)?) {
        (&SOLICITATION, 0) if sender.is_unspecified() => heard(target.into(), from, Word::Probes),
        (&SOLICITATION, 0) => heard(sender.into(), from, Word::Has),
        (&ADVERTISEMENT, 0) => {
            heard(target.into(), target_link_address(message.get(24..)?).unwrap_or(from), Word::Has)
        }
        _ => None,
    }
}

/// Nobody has an address that is everybody's or nobody's.
fn heard(address: IpAddr, mac: Mac, word: Word) -> Option<Heard> {
    (!address.is_unspecified() && !address.is_multicast()).then_some(Heard { address, mac, word })
}

/// The MAC in the options of an advertisement.
fn target_link_address(mut options: &[u8]) -> Option<Mac> {
    loop {
        let (kind, length) = (*options.first()?, usize::from(*options.get(1)?) * 8);
        let (option, rest) = options.split_at_checked(length).filter(|(option, _)| !option.is_empty())?;
        if kind == TARGET_LINK_ADDRESS {
            return array(option, 2).map(Mac);
        }
        options = rest;
    }
}

/// An ARP request: with the address that is asked for as the sender's own, it is an announcement.
fn arp(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(BROADCAST, mac, EtherType::Arp);
    frame.extend(ARP_KIND);
    frame.extend(ARP_REQUEST.to_be_bytes());
    frame.extend(mac.octets());
    frame.extend(sender.octets());
    frame.extend([0; 6]);
    frame.extend(target.octets());
    frame
}

/// A message of neighbor discovery; its checksum is filled in.
fn icmpv6(mac: Mac, from: Ipv6Addr, to: Ipv6Addr, mut message: Vec<u8>) -> Vec<u8> {
    let length = u16::try_from(message.len()).expect("a message of a few bytes");
    let sum = checksum(from, to, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = ethernet(group(to), mac, EtherType::Ipv6);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([ICMPV6, HOP_LIMIT]);
    frame.extend(from.octets());
    frame.extend(to.octets());
    frame.extend(message);
    frame
}

fn ethernet(to: Mac, from: Mac, kind: EtherType) -> Vec<u8> {
    let mut frame = Vec::with_capacity(LONGEST);
    frame.extend(to.octets());
    frame.extend(from.octets());
    frame.extend(kind.number().to_be_bytes());
    frame
}

/// The group in which whoever has an address hears questions about it.
fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b] = address.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | (a & 0xff), b)
}

/// The Ethernet group of an IPv6 one.
fn group(address: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = address.octets();
    Mac([0x33, 0x33, a, b, c, d])
}

/// The checksum of an ICMPv6 message whose own checksum is still zero; of one that has it, zero.
fn checksum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let length = u32::try_from(message.len()).expect("a message of a few bytes").to_be_bytes();
    let pseudo = [&from.octets()[..], &to.octets(), &length, &[0, 0, 0, ICMPV6], message].concat();
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
    let sum: u32 = pseudo.chunks(2).map(word).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !(((folded & 0xffff) + (folded >> 16)) as u16)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OURS: Mac = Mac([2, 0, 0x5e, 0x10, 0, 1]);

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn hex(frame: &[u8]) -> String {
        frame.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn frames_are_those_of_the_standards() {
        let (v4, v6) = (ip("10.9.0.18"), ip("fd09::12"));
        assert_eq!(
            hex(&probe(OURS, v4)),
            "ffffffffffff02005e1000010806\
             0001080006040001\
             02005e10000100000000\
             0000000000000a090012"
        );
        assert_eq!(
            hex(&announcement(OURS, v4)),
            "ffffffffffff02005e1000010806\
             0001080006040001\
             02005e1000010a090012\
             0000000000000a090012"
        );
        let without_sum = |frame: Vec<u8>| hex(&[&frame[..56], &frame[58..]].concat());
        assert_eq!(
            without_sum(probe(OURS, v6)),
            "3333ff00001202005e10000186dd\
             6000000000183aff\
             00000000000000000000000000000000\
             ff0200000000000000000001ff000012\
             870000000000\
             fd090000000000000000000000000012"
        );
        assert_eq!(
            without_sum(announcement(OURS, v6)),
            "33330000000102005e10000186dd\
             6000000000203aff\
             fd090000000000000000000000000012\
             ff020000000000000000000000000001\
             880020000000\
             fd090000000000000000000000000012\
             020102005e100001"
        );
        let (from, to) = (Ipv6Addr::UNSPECIFIED, "ff02::1:ff00:12".parse().expect("a group"));
        assert_eq!(checksum(from, to, &probe(OURS, v6)[54..]), 0, "the sum over a right message");
    }

    #[test]
    fn what_is_sent_is_understood() {
        for address in [ip("10.9.0.18"), ip("fd09::12")] {
            let heard = |word| Some(Heard { address, mac: OURS, word });
            assert_eq!(parse(&probe(OURS, address)), heard(Word::Probes));
            assert_eq!(parse(&announcement(OURS, address)), heard(Word::Has));
        }
    }

    #[test]
    fn answers_and_questions_of_others_say_who_has_an_address() {
        let mut reply = arp(OURS, "10.9.0.18".parse().expect("v4"), "10.9.0.1".parse().expect("v4"));
        reply[21] = 2;
        let has = |address: &str| Some(Heard { address: ip(address), mac: OURS, word: Word::Has });
        assert_eq!(parse(&reply), has("10.9.0.18"));
        reply[21] = 3;
        assert_eq!(parse(&reply), None, "RARP");
        // Somebody who asks for a neighbor has the address that he asks from.
        let mut asks = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        asks.extend("fd09::99".parse::<Ipv6Addr>().expect("v6").octets());
        let [from, to] = ["fd09::12", "ff02::1:ff00:99"].map(|text| text.parse().expect("v6"));
        assert_eq!(parse(&icmpv6(OURS, from, to, asks)), has("fd09::12"));
        // The MAC of an advertisement is the one that it names.
        let mut told = announcement(OURS, ip("fd09::12"));
        told[6..12].copy_from_slice(&[2, 2, 2, 2, 2, 2]);
        assert_eq!(parse(&told), has("fd09::12"));
        told[78] = 1;
        assert_eq!(parse(&told).map(|heard| heard.mac), Some(Mac([2; 6])), "another option");
        told[79] = 0;
        assert_eq!(parse(&told).map(|heard| heard.mac), Some(Mac([2; 6])), "an option without a length");
        // What has come over a router is not of this segment.
        told[21] = 254;
        assert_eq!(parse(&told), None);
    }

    proptest! {
        #[test]
        fn any_frame_is_read_without_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            v6: bool,
        ) {
            let _ = parse(&bytes);
            // Deeper, where most random bytes do not come.
            let good = announcement(OURS, if v6 { ip("fd09::12") } else { ip("10.9.0.18") });
            let at = bytes.len().min(good.len());
            bytes.extend(&good[at..]);
            let _ = parse(&bytes);
            let _ = parse(&good[..at]);
        }
    }
}
