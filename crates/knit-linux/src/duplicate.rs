//! Whether somebody else on a segment has an address that a pod is about to get, and telling the segment that
//! the pod has it then.
//!
//! The interface is up and has no address yet. It asks for all addresses at once, several times, as RFC 5227
//! has it for IPv4 and RFC 4862 for IPv6: by questions from nobody's address, which no host remembers. An
//! answer, or the same question by another host that is about to take the address, makes it a duplicate. The
//! kernel has such a check for IPv6 alone, and that one takes a second or two.
//!
//! Who has the same MAC, too, is not heard of: neither by its questions, which look like reflections of ours,
//! nor, as a rule, by its answers, which go to itself.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use knit_kernel::Mac;
use knit_kernel::netns::NetNs;
use knit_kernel::packet::frame::{self, Heard, Word};
use knit_kernel::packet::{EtherType, PacketSocket, wait};
use rustix::io::Errno;

/// How often each address is asked for. A switch or a bridge may lose the first frame of a link that has just
/// come up.
const PROBES: u32 = 3;
/// How many frames are read before the clock is looked at again: a segment that never falls silent must not
/// hold this up.
const AT_ONCE: usize = 1000;

/// Looks for the first of `addresses` that somebody else has, on the link with this number and this MAC in a
/// pod's namespace, which is up; asks for as long as `patience`.
pub(crate) fn find(
    pod: &NetNs,
    interface: u32,
    mac: Mac,
    addresses: &[IpAddr],
    patience: Duration,
) -> io::Result<Option<(IpAddr, Mac)>> {
    let sockets = open(pod, interface, addresses)?;
    let begin = Instant::now();
    for round in 1..=PROBES {
        for address in addresses {
            send(&sockets, *address, &frame::probe(mac, *address))?;
        }
        if let Some(found) = listen(&sockets, begin + patience * round / PROBES, addresses, mac)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Tells everybody on the segment that these addresses are here: those who know another MAC for one forget
/// it.
pub(crate) fn announce(pod: &NetNs, interface: u32, mac: Mac, addresses: &[IpAddr]) -> io::Result<()> {
    let sockets = open(pod, interface, addresses)?;
    addresses.iter().try_for_each(|address| send(&sockets, *address, &frame::announcement(mac, *address)))
}

/// A socket for each family of the addresses: for ARP first.
fn open(pod: &NetNs, interface: u32, addresses: &[IpAddr]) -> io::Result<Vec<PacketSocket>> {
    let mut protocols: Vec<EtherType> = addresses.iter().copied().map(protocol).collect();
    protocols.sort_by_key(|protocol| protocol.number());
    protocols.dedup();
    let sockets: Vec<PacketSocket> = protocols
        .into_iter()
        .map(|protocol| PacketSocket::open(pod, interface, protocol))
        .collect::<io::Result<_>>()?;
    for address in addresses {
        let socket = of(&sockets, *address);
        frame::groups(*address).into_iter().try_for_each(|group| socket.join(group))?;
    }
    Ok(sockets)
}

fn protocol(address: IpAddr) -> EtherType {
    match address {
        IpAddr::V4(_) => EtherType::Arp,
        IpAddr::V6(_) => EtherType::Ipv6,
    }
}

/// The socket for an address's family.
fn of(sockets: &[PacketSocket], address: IpAddr) -> &PacketSocket {
    let found = sockets.iter().find(|socket| socket.protocol() == protocol(address));
    found.expect("there is one for each family")
}

/// Sends a frame. One that finds no room is as good as lost on the wire.
fn send(sockets: &[PacketSocket], address: IpAddr, frame: &[u8]) -> io::Result<()> {
    match of(sockets, address).send(frame) {
        Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Ok(()),
        other => other,
    }
}

/// Listens until somebody says that one of the addresses is taken, or the time has come.
fn listen(
    sockets: &[PacketSocket],
    until: Instant,
    addresses: &[IpAddr],
    mac: Mac,
) -> io::Result<Option<(IpAddr, Mac)>> {
    let mut buffer = [0; frame::LONGEST];
    loop {
        let is_early = wait(sockets, until)?;
        // What has come is looked at even if the time is over.
        for socket in sockets {
            for _ in 0..AT_ONCE {
                let Some(frame) = socket.receive(&mut buffer)? else { break };
                let heard = frame::parse(frame).filter(|heard| is_taken(heard, addresses, mac));
                if let Some(heard) = heard {
                    return Ok(Some((heard.address, heard.mac)));
                }
            }
        }
        if !is_early {
            return Ok(None);
        }
    }
}

/// Whether what was heard means that somebody else has one of the addresses, or is about to.
fn is_taken(heard: &Heard, addresses: &[IpAddr], mac: Mac) -> bool {
    match heard.word {
        // Nobody has said so in our name: the interface has no address yet.
        Word::Has => addresses.contains(&heard.address),
        // Our own question comes back from a switch that reflects frames.
        Word::Probes => addresses.contains(&heard.address) && heard.mac != mac,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Mac = Mac([2, 0, 0x5e, 0, 0, 1]);
    const OTHERS: Mac = Mac([2, 0, 0x5e, 0, 0, 2]);

    #[test]
    fn an_address_is_taken_by_whoever_has_it_or_is_about_to() {
        let addresses: [IpAddr; 2] = ["10.9.0.18", "fd09::12"].map(|text| text.parse().expect("an address"));
        let heard = |address: &str, mac, word| {
            let heard = Heard { address: address.parse().expect("an address"), mac, word };
            is_taken(&heard, &addresses, OURS)
        };
        for address in ["10.9.0.18", "fd09::12"] {
            assert!(heard(address, OTHERS, Word::Has));
            assert!(heard(address, OTHERS, Word::Probes), "two would have it at once");
            assert!(heard(address, OURS, Word::Has), "nothing of ours says so yet");
            assert!(!heard(address, OURS, Word::Probes), "a reflection");
        }
        assert!(!heard("10.9.0.19", OTHERS, Word::Has));
        assert!(!heard("fd09::13", OTHERS, Word::Probes));
    }
}
