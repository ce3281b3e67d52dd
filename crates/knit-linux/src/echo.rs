//! One packet there and back: an ICMP or ICMPv6 echo request that the kernel of the other namespace answers.
//!
//! That is the proof that link, address and routes work, in both directions, through all rules.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use knit_kernel::netns::NetNs;
use knit_types::Family;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, socket_with};

/// A socket for echo requests, in one namespace.
#[derive(Debug)]
pub(crate) struct Echo {
    socket: OwnedFd,
    family: Family,
    /// Once bound, and then connected, a raw socket cannot be bound again.
    pub from: Option<IpAddr>,
}

/// An answer takes 50 microseconds, but the kernel activates a link that has just got its carrier a moment
/// later and drops what is sent before; so ask again soon, then less and less often.
const ECHO_RETRY_DELAY: Duration = Duration::from_micros(100);

/// Numbers of requests: identifier and sequence number.
static NEXT: AtomicU32 = AtomicU32::new(1);

impl Echo {
    /// A socket in a namespace that sends from `from`, or from where the routes say.
    pub fn open(namespace: &NetNs, family: Family, from: Option<IpAddr>) -> io::Result<Self> {
        let open = move || {
            let (family, protocol) = match family {
                Family::V4 => (AddressFamily::INET, ipproto::ICMP),
                Family::V6 => (AddressFamily::INET6, ipproto::ICMPV6),
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socket_with(family, SocketType::RAW, flags, Some(protocol))
        };
        let socket = namespace.run(open).map_err(io::Error::other)??;
        if let Some(from) = from {
            rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
        }
        Ok(Self { socket, family, from })
    }

    /// Sends requests until one is answered: how many it took.
    ///
    /// # Errors
    /// `TimedOut` if none was before `deadline` has passed; anything that the kernel says.
    pub fn ask(&mut self, to: IpAddr, deadline: Duration) -> io::Result<u32> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // A connected socket hears only its peer.
        rustix::net::connect(&self.socket, &SocketAddr::new(to, 0))?;
        self.ask_connected(number, deadline)
    }

    fn ask_connected(&self, number: u32, deadline: Duration) -> io::Result<u32> {
        let end = Instant::now() + deadline;
        let mut wait = ECHO_RETRY_DELAY;
        let mut trouble = None;
        for attempt in 1.. {
            match rustix::net::send(&self.socket, &self.request(number), SendFlags::empty()) {
                Ok(_) => {}
                // No route or no neighbour may be news that is old a moment later.
                Err(error) => trouble = Some(error),
            }
            let until = end.min(Instant::now() + wait);
            if self.answered(number, until)? {
                return Ok(attempt);
            }
            if Instant::now() >= end {
                break;
            }
            wait *= 2;
        }
        Err(trouble.map_or_else(|| io::ErrorKind::TimedOut.into(), io::Error::from))
    }

    /// Whether the answer comes before `until`.
    fn answered(&self, number: u32, until: Instant) -> io::Result<bool> {
        let mut buffer = [0; 256];
        loop {
            match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) if self.is_answer(&buffer[..length.min(256)], number) => return Ok(true),
                Ok(_) | Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                Err(Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::CONNREFUSED) => continue,
                Err(error) => return Err(error.into()),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn request(&self, number: u32) -> [u8; 16] {
        let mut packet = [0; 16];
        packet[0] = match self.family {
            Family::V4 => 8,
            Family::V6 => 128,
        };
        packet[4..8].copy_from_slice(&number.to_be_bytes());
        packet[8..].copy_from_slice(b"knit.dev");
        if self.family == Family::V4 {
            // For ICMPv6 the kernel does it.
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        packet
    }

    fn is_answer(&self, packet: &[u8], number: u32) -> bool {
        let message = match (self.family, packet.first()) {
            // An IPv4 raw socket gets the IP header, too.
            (Family::V4, Some(first)) => packet.get(usize::from(first & 15) * 4..),
            _ => Some(packet),
        };
        let kind = match self.family {
            Family::V4 => 0,
            Family::V6 => 129,
        };
        message.is_some_and(|message| {
            message.first() == Some(&kind) && message.get(4..8) == Some(&number.to_be_bytes()[..])
        })
    }
}

fn checksum(packet: &[u8]) -> u16 {
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !(((folded & 0xffff) + (folded >> 16)) as u16)
}
