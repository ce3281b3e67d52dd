//! Whole Ethernet frames on one link, past the kernel's own ARP and neighbor discovery: for questions that
//! are asked before an interface has an address.
//!
//! [`frame`] builds and reads the frames.

pub mod frame;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::name::Mac;
use crate::netns::NetNs;
use crate::sys;

/// What a socket hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtherType {
    /// ARP.
    Arp,
    /// IPv6, and with it neighbor discovery.
    Ipv6,
}

/// A socket for the frames of one protocol on one link. It hears what comes in, and not what the link itself
/// sends.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    interface: u32,
    protocol: EtherType,
}

// === impl EtherType ===

impl EtherType {
    /// Its number.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Self::Arp => libc::ETH_P_ARP as u16,
            Self::Ipv6 => libc::ETH_P_IPV6 as u16,
        }
    }
}

// === impl PacketSocket ===

impl PacketSocket {
    /// A socket on the link with this number in a namespace. Needs `CAP_NET_RAW` there.
    pub fn open(namespace: &NetNs, interface: u32, protocol: EtherType) -> io::Result<Self> {
        let open = || sys::packet_socket(protocol.number(), interface);
        let fd = namespace.visit(open).map_err(io::Error::other)??;
        Ok(Self { fd, interface, protocol })
    }

    /// What it hears.
    #[must_use]
    pub fn protocol(&self) -> EtherType {
        self.protocol
    }

    /// Hears what is sent to a multicast address, too, as long as the socket is open.
    pub fn join(&self, group: Mac) -> io::Result<()> {
        sys::packet_join(self.fd.as_fd(), self.interface, group.octets())
    }

    /// Sends a frame.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.fd, frame, SendFlags::empty())?;
        Ok(())
    }

    /// The next frame that has come in, cut to the buffer's length; `None` if there is none yet.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            match rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((length, _)) => return Ok(Some(&buffer[..length.min(buffer.len())])),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until a frame has come in by one of these sockets, or it is `until`: whether one has.
pub fn wait(sockets: &[PacketSocket], until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut each: Vec<PollFd<'_>> =
            sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        match poll(&mut each, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
