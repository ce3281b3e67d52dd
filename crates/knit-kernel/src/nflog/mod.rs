//! What rules log (`log group N`): packets of one group of one namespace, as nfnetlink_log hands them out.
//!
//! ```no_run
//! use knit_kernel::netns::NetNs;
//! use knit_kernel::nflog::Nflog;
//!
//! let mut log = Nflog::open_in(&NetNs::current()?, 7)?;
//! let lost = log.drain(|packet| println!("{}: {:?}", packet.prefix, packet.headers))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A pod decides what is in these packets, and how many there are. So only their first bytes are asked for,
//! the kernel keeps a bounded number of them, and what does not fit is lost, told as lost, and slows nobody
//! down. Rules that log should have a limit all the same: each packet costs the kernel a copy.

mod packet;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

pub use packet::{Headers, Transport};

use crate::netlink::attr::Writer;
use crate::netlink::{self, Answers, Batch, Message, Protocol, Socket};
use crate::netns::NetNs;

/// `NFNL_SUBSYS_ULOG` in the upper byte, `NFULNL_MSG_*` in the lower.
const PACKET: u16 = 4 << 8;
const CONFIG: u16 = 4 << 8 | 1;

const NFULA_CFG_CMD: u16 = 1;
const NFULA_CFG_MODE: u16 = 2;
const NFULA_CFG_NLBUFSIZ: u16 = 3;
const NFULA_CFG_TIMEOUT: u16 = 4;
const NFULA_CFG_QTHRESH: u16 = 5;
const CMD_BIND: u8 = 1;
const COPY_PACKET: u8 = 2;

const NFULA_MARK: u16 = 2;
const NFULA_IFINDEX_INDEV: u16 = 4;
const NFULA_IFINDEX_OUTDEV: u16 = 5;
const NFULA_PAYLOAD: u16 = 9;
const NFULA_PREFIX: u16 = 10;

/// How much of a packet is copied: an IPv6 header, a few extension headers, a transport header.
const SNAP_LENGTH: u32 = 128;
/// The kernel gathers packets in a buffer of this size before it hands them out, at the latest after
/// [`GATHER_DELAY`].
const GATHER_BYTES: u32 = 16 * 1024;
/// At most so many packets are gathered.
const GATHER_PACKETS: u32 = 32;
/// In hundredths of a second.
const GATHER_DELAY: u32 = 10;
/// What waits while nobody reads: some hundred packets. What does not fit is lost.
const RECEIVE_BUFFER: usize = 256 * 1024;
/// A prefix is what a rule says, and longer ones are not ours.
const LONGEST_PREFIX: usize = 64;

/// The packets that rules of one namespace log to one group.
#[derive(Debug)]
pub struct Nflog {
    socket: Socket,
    group: u16,
}

/// A packet that a rule logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// What the rule says before it.
    pub prefix: String,
    /// Its headers, as far as they can be read.
    pub headers: Option<Headers>,
    /// Its mark; 0 without.
    pub mark: u32,
    /// The index of the link that it came from; 0 if from here.
    pub input: u32,
    /// The index of the link that it would have left by; 0 if that is not decided.
    pub output: u32,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be opened.
    #[error("cannot open a socket for logged packets")]
    Open(#[source] netlink::Error),
    /// The group could not be taken.
    #[error("cannot take over log group {group}: another program may be listening to it")]
    Bind {
        /// Which one.
        group: u16,
        /// What the kernel said.
        source: netlink::Error,
    },
    /// The socket failed.
    #[error("cannot read what was logged to group {group}")]
    Read {
        /// Which one.
        group: u16,
        /// The cause.
        source: netlink::Error,
    },
}

// === impl Nflog ===

impl Nflog {
    /// Listens to a group in this namespace. One listener can have it at a time, and it ends with the value.
    ///
    /// # Errors
    /// When somebody else listens to it, the kernel has no nfnetlink_log, or we may not.
    pub fn open_in(namespace: &NetNs, group: u16) -> Result<Self, Error> {
        let mut socket = Socket::open_in(Protocol::Netfilter, namespace).map_err(Error::Open)?;
        let bind = |source| Error::Bind { group, source };
        socket.raise_receive_buffer(RECEIVE_BUFFER).map_err(bind)?;
        // One after the other: the second is refused for a group that is not ours.
        for fill in [put_bind, put_mode] {
            let mut batch = Batch::new();
            batch.push(CONFIG, 0, |w| {
                let [high, low] = group.to_be_bytes();
                fill(w.fixed(&[libc::AF_UNSPEC as u8, 0, high, low]));
            });
            socket.request(&mut batch).and_then(Answers::all).map_err(bind)?;
        }
        Ok(Self { socket, group })
    }

    /// Hands out every packet that is there now, without waiting. Returns whether some were lost before.
    ///
    /// # Errors
    /// When the socket does not work any more.
    pub fn drain(&mut self, mut each: impl FnMut(Logged)) -> Result<bool, Error> {
        let read = self.socket.drain(|message| each_packet(&message, &mut each));
        self.outcome(read.map(|()| false))
    }

    /// Waits until there are packets, at most until `deadline`, and hands out some. Returns whether some were
    /// lost before.
    ///
    /// # Errors
    /// When the socket does not work any more.
    pub fn receive(&mut self, deadline: Instant, mut each: impl FnMut(Logged)) -> Result<bool, Error> {
        let read = self.socket.receive(Some(deadline), |message| each_packet(&message, &mut each));
        self.outcome(read.map(|_| false))
    }

    fn outcome(&self, read: netlink::Result<bool>) -> Result<bool, Error> {
        match read {
            // What is malformed is lost as well.
            Err(netlink::Error::Overrun | netlink::Error::Malformed(_)) => Ok(true),
            Err(source) => Err(Error::Read { group: self.group, source }),
            Ok(lost) => Ok(lost),
        }
    }
}

impl AsFd for Nflog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn put_bind(w: &mut Writer<'_>) {
    w.u8(NFULA_CFG_CMD, CMD_BIND);
}

fn put_mode(w: &mut Writer<'_>) {
    let [a, b, c, d] = SNAP_LENGTH.to_be_bytes();
    w.bytes(NFULA_CFG_MODE, &[a, b, c, d, COPY_PACKET, 0])
        .u32_be(NFULA_CFG_NLBUFSIZ, GATHER_BYTES)
        .u32_be(NFULA_CFG_TIMEOUT, GATHER_DELAY)
        .u32_be(NFULA_CFG_QTHRESH, GATHER_PACKETS);
}

fn each_packet(message: &Message<'_>, each: &mut impl FnMut(Logged)) {
    if let Some(logged) = Logged::parse(message) {
        each(logged);
    }
}

// === impl Logged ===

impl Logged {
    /// Reads what nfnetlink_log sends; nothing for other messages.
    fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != PACKET {
            return None;
        }
        let (_, attrs) = message.split::<4>().ok()?;
        let number = |kind| attrs.get(kind).and_then(|attr| attr.u32_be().ok()).unwrap_or_default();
        let mut prefix = attrs.get(NFULA_PREFIX).map(|attr| attr.string()).unwrap_or_default();
        let end = (0..=LONGEST_PREFIX.min(prefix.len())).rev().find(|at| prefix.is_char_boundary(*at));
        prefix.truncate(end.unwrap_or_default());
        Some(Self {
            prefix,
            headers: attrs.get(NFULA_PAYLOAD).and_then(|attr| Headers::parse(attr.value)),
            mark: number(NFULA_MARK),
            input: number(NFULA_IFINDEX_INDEV),
            output: number(NFULA_IFINDEX_OUTDEV),
        })
    }
}

/// Reads what the decoder makes of a netlink datagram; for fuzzing and property tests.
#[doc(hidden)]
#[must_use]
pub fn decode_any(bytes: &[u8]) -> usize {
    netlink::Messages::new(bytes).flatten().filter_map(|message| Logged::parse(&message)).count()
}
