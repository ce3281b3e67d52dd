//! The blocking netlink socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use knit_netlink::{Batch, Message, Messages, Refusal, flags, kind};

use super::error::{Error, Result};
use super::own::Registered;
use crate::netns::{NetNs, NsId};
use crate::sys;

/// Enough for the largest part of a dump that the kernel makes.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// The port of the kernel's end of every netlink socket.
const KERNEL: u32 = 0;
/// How often a dump that changed while it was read is begun again.
const DUMP_ATTEMPTS: u32 = 16;

/// The netlink families in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Links, addresses, routes, rules, neighbours.
    Route,
    /// nftables and conntrack.
    Netfilter,
    /// Families by name.
    Generic,
}

impl Protocol {
    fn number(self) -> i32 {
        match self {
            Self::Route => libc::NETLINK_ROUTE,
            Self::Netfilter => libc::NETLINK_NETFILTER,
            Self::Generic => libc::NETLINK_GENERIC,
        }
    }
}

/// A netlink socket. It stays in the namespace that it was opened in, whichever thread uses it.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    protocol: Protocol,
    port: u32,
    sequence: u32,
    buffer: Vec<u8>,
    /// So that whoever watches this namespace tells our changes from those of others.
    _own: Registered,
}

/// What to do about a list that changed while it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changed {
    /// Read it again.
    ReadAgain,
    /// Take it: the caller compares it with another reading.
    Take,
}

/// What came back for a batch.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Answers {
    /// Requests that the kernel refused: place in the batch, and why. Empty if all were carried out.
    pub refused: Vec<(usize, Refusal)>,
    /// Replies that are no acks (what `GET` requests and `ECHO` return): place in the batch, type, payload.
    pub replies: Vec<(usize, u16, Vec<u8>)>,
}

impl Answers {
    /// The first refusal as an error, or the replies.
    pub fn all(self) -> Result<Vec<(usize, u16, Vec<u8>)>> {
        match self.refused.into_iter().next() {
            Some((_, refusal)) => Err(refusal.into()),
            None => Ok(self.replies),
        }
    }
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open(protocol: Protocol) -> Result<Self> {
        let namespace = NetNs::current_id().map_err(|error| Error::Namespace(Box::new(error)))?;
        Self::open_here(protocol, namespace)
    }

    /// Opens a socket in the calling thread's network namespace, which is this one.
    fn open_here(protocol: Protocol, namespace: NsId) -> Result<Self> {
        let open = |source| Error::Open { protocol, source };
        let fd = sys::netlink_socket(protocol.number()).map_err(open)?;
        let port = sys::netlink_port(fd.as_fd()).map_err(open)?;
        let own = Registered::new(namespace, protocol, port);
        let socket = Self { fd, protocol, port, sequence: 1, buffer: Vec::new(), _own: own };
        // The kernel's own words in refusals, without a copy of the request in front of them.
        socket.set(libc::NETLINK_EXT_ACK, "ask for extended acks")?;
        socket.set(libc::NETLINK_CAP_ACK, "ask for short acks")?;
        Ok(socket)
    }

    /// Opens a socket in `namespace`; the calling thread stays where it is.
    pub fn open_in(protocol: Protocol, namespace: &NetNs) -> Result<Self> {
        let open = || Self::open_here(protocol, namespace.id());
        namespace.visit(open).map_err(|e| Error::Namespace(Box::new(e)))?
    }

    fn set(&self, option: i32, what: &'static str) -> Result<()> {
        let set = sys::set_option(self.fd.as_fd(), libc::SOL_NETLINK, option, 1);
        set.map_err(|source| Error::Option { what, source })
    }

    /// Asks the kernel to check dump requests strictly and to filter by what they name. Dumps of links,
    /// addresses, routes and neighbours need it; requests with a wrong header are then refused instead of
    /// ignored.
    pub fn set_strict(&self) -> Result<()> {
        self.set(libc::NETLINK_GET_STRICT_CHK, "ask for strict checks")
    }

    /// Joins a multicast group (`RTNLGRP_*`, `NFNLGRP_*`).
    pub fn subscribe(&self, group: u32) -> Result<()> {
        let set = sys::set_option(
            self.fd.as_fd(),
            libc::SOL_NETLINK,
            libc::NETLINK_ADD_MEMBERSHIP,
            group.cast_signed(),
        );
        set.map_err(|source| Error::Option { what: "join a multicast group", source })
    }

    /// Leaves a multicast group.
    pub fn unsubscribe(&self, group: u32) -> Result<()> {
        let set = sys::set_option(
            self.fd.as_fd(),
            libc::SOL_NETLINK,
            libc::NETLINK_DROP_MEMBERSHIP,
            group.cast_signed(),
        );
        set.map_err(|source| Error::Option { what: "leave a multicast group", source })
    }

    /// Raises the send buffer, beyond the system's limit where we may. Returns how many bytes one batch may
    /// have.
    pub fn raise_send_buffer(&self, bytes: usize) -> Result<usize> {
        self.raise(bytes, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)
    }

    /// Raises the receive buffer, beyond the system's limit where we may. Returns what it is.
    pub fn raise_receive_buffer(&self, bytes: usize) -> Result<usize> {
        self.raise(bytes, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)
    }

    /// Makes the receive buffer as small as the kernel allows, so that a test can overrun it.
    #[cfg(all(test, feature = "testing"))]
    pub(crate) fn least_receive_buffer(&self) {
        sys::set_option(self.fd.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 0).expect("a small buffer");
    }

    fn raise(&self, bytes: usize, force: i32, plain: i32) -> Result<usize> {
        let fd = self.fd.as_fd();
        let option = |source| Error::Option { what: "set the buffer size", source };
        // The kernel doubles what it is told, for its own bookkeeping, and reports the double.
        let wanted = i32::try_from(bytes).unwrap_or(i32::MAX / 2);
        if sys::get_option(fd, libc::SOL_SOCKET, plain).map_err(option)? / 2 < wanted
            && sys::set_option(fd, libc::SOL_SOCKET, force, wanted).is_err()
        {
            sys::set_option(fd, libc::SOL_SOCKET, plain, wanted).map_err(option)?;
        }
        let now = sys::get_option(fd, libc::SOL_SOCKET, plain).map_err(option)?;
        Ok(usize::try_from(now / 2).unwrap_or(0))
    }

    /// The family.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Our address on the netlink bus; answers carry it.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Sends a batch in one `sendmsg` and collects what the kernel answered.
    ///
    /// Only the last request asks for an ack: the kernel reports refusals unasked, in order, so that a batch
    /// that succeeds costs one send and one receive however long it is.
    pub fn request(&mut self, batch: &mut Batch) -> Result<Answers> {
        let mut answers = Answers::default();
        if batch.is_empty() {
            return Ok(answers);
        }
        let first = self.send(batch, flags::ACK)?;
        let last = batch.len() - 1;
        let mut finished = false;
        while !finished {
            let mut push = |message: Message<'_>| {
                let index = message.sequence.wrapping_sub(first) as usize;
                if index > last {
                    return; // a notification, or an answer to a request that was given up
                }
                match message.answer() {
                    Some(outcome) => {
                        finished |= index == last;
                        if let Err(mut refusal) = outcome {
                            refusal.attribute = refusal.offset.and_then(|at| batch.attribute_at(index, at));
                            answers.refused.push((index, refusal));
                        }
                    }
                    None => answers.replies.push((index, message.kind, message.payload.to_vec())),
                }
            };
            self.receive_now(&mut push)?;
        }
        Ok(answers)
    }

    /// Sends a batch and returns the first sequence number; `last_flags` are added to the last request.
    /// For callers that collect the answers themselves with [`drain`](Self::drain).
    pub fn send(&mut self, batch: &mut Batch, last_flags: u16) -> Result<u32> {
        let first = self.number(batch, last_flags)?;
        let bytes = batch.bytes();
        let sent = retry(|| sys::send(self.fd.as_fd(), batch.as_bytes()));
        match sent {
            Ok(sent) if sent == bytes => Ok(first),
            Ok(_) => Err(Error::Send { bytes, source: io::ErrorKind::WriteZero.into() }),
            Err(source) => Err(Error::Send { bytes, source }),
        }
    }

    /// Makes a batch ready to be sent on this socket by another thread: the first sequence number, and the
    /// bytes.
    pub(crate) fn prepare(&mut self, batch: &mut Batch) -> Result<(u32, Vec<u8>)> {
        Ok((self.number(batch, 0)?, batch.as_bytes().to_vec()))
    }

    fn number(&mut self, batch: &mut Batch, last_flags: u16) -> Result<u32> {
        batch.check()?;
        // Sequence numbers never become 0, which is what notifications carry.
        let count = batch.len() as u32;
        let first = if self.sequence.checked_add(count).is_some() { self.sequence } else { 1 };
        self.sequence = first + count;
        batch.number(first, self.port, last_flags);
        Ok(first)
    }

    /// Hands every message that is queued now to `each`, without waiting.
    ///
    /// # Errors
    /// The first thing that went wrong, told when all that is queued was read: after an overrun the kernel
    /// throws away whatever comes, without a word, until the queue is empty.
    pub fn drain(&mut self, mut each: impl FnMut(Message<'_>)) -> Result<()> {
        let mut outcome = Ok(());
        loop {
            match self.receive_now(&mut each) {
                Ok(()) => {}
                Err(Error::NoAnswer) => return outcome,
                // The socket itself does not work, and asking it again may never end.
                Err(error @ Error::Receive(_)) => return outcome.and(Err(error)),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
    }

    /// Lists: sends one `DUMP` request of this type and hands every message of the answer to `each`.
    ///
    /// If the list changed while it was read, it is read again; `begin` is called before each reading, to
    /// forget what was collected.
    pub fn dump<T>(
        &mut self,
        kind: u16,
        body: impl Fn(&mut knit_netlink::attr::Writer<'_>),
        begin: impl Fn() -> T,
        each: impl FnMut(&mut T, Message<'_>) -> Result<()>,
    ) -> Result<T> {
        self.dump_as(Changed::ReadAgain, kind, body, begin, each)
    }

    /// Like [`dump`](Self::dump), for whoever decides what to do about changes in between.
    pub fn dump_as<T>(
        &mut self,
        if_changed: Changed,
        kind: u16,
        body: impl Fn(&mut knit_netlink::attr::Writer<'_>),
        begin: impl Fn() -> T,
        mut each: impl FnMut(&mut T, Message<'_>) -> Result<()>,
    ) -> Result<T> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut collected = begin();
            let mut batch = Batch::new();
            batch.push(kind, flags::DUMP, &body);
            let sequence = self.send(&mut batch, 0)?;
            let (mut finished, mut changed) = (false, false);
            let mut failure = None;
            while !finished {
                self.receive_now(&mut |message| {
                    if message.sequence != sequence {
                        return;
                    }
                    changed |= message.flags & flags::DUMP_INTR != 0;
                    match message.answer() {
                        Some(Ok(())) => finished = true,
                        Some(Err(refusal)) => {
                            finished = true;
                            failure.get_or_insert(Error::from(refusal));
                        }
                        None if failure.is_none() => failure = each(&mut collected, message).err(),
                        None => {}
                    }
                })?;
            }
            match failure {
                Some(Error::Refused(refusal)) if refusal.errno.0 == libc::EINTR => {}
                Some(error) => return Err(error),
                None if changed && if_changed == Changed::ReadAgain => {}
                None => return Ok(collected),
            }
        }
        Err(Error::Inconsistent(DUMP_ATTEMPTS))
    }

    /// Waits until something is queued, at most until `deadline`, and hands it to `each`. Returns whether
    /// anything came. `None` waits for as long as it takes.
    pub fn receive(&mut self, deadline: Option<Instant>, mut each: impl FnMut(Message<'_>)) -> Result<bool> {
        loop {
            match self.receive_now(&mut each) {
                Err(Error::NoAnswer) => {}
                other => return other.map(|()| true),
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            wait(self.fd.as_fd(), left).map_err(Error::Receive)?;
        }
    }

    /// Receives one datagram that is queued already. One that did not come from the kernel is thrown away: in
    /// a pod's namespace, whoever has NET_ADMIN there can send to this socket, too.
    fn receive_now(&mut self, each: &mut impl FnMut(Message<'_>)) -> Result<()> {
        if self.buffer.is_empty() {
            self.buffer.resize(RECEIVE_BUFFER, 0);
        }
        let mut received = retry(|| sys::receive(self.fd.as_fd(), &mut self.buffer));
        while matches!(received, Ok((_, port)) if port != KERNEL) {
            received = retry(|| sys::receive(self.fd.as_fd(), &mut self.buffer));
        }
        let length = match received {
            Ok((length, _)) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Error::NoAnswer),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Err(Error::Overrun),
            Err(error) => return Err(Error::Receive(error)),
        };
        if length > self.buffer.len() {
            return Err(
                knit_netlink::Malformed::Message { claimed: length, available: self.buffer.len() }.into()
            );
        }
        for message in Messages::new(&self.buffer[..length]) {
            let message = message?;
            match message.kind {
                kind::OVERRUN => return Err(Error::Overrun),
                kind::NOOP => {}
                _ => each(message),
            }
        }
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Waits until there is something to read.
fn wait(fd: BorrowedFd<'_>, left: Option<Duration>) -> io::Result<()> {
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
