//! Deleting links without waiting for what the kernel does afterwards.
//!
//! The kernel unlinks a device in half a millisecond and announces it, but returns from the request only
//! after an `rcu_barrier`, some 20 ms later, in which nothing of interest happens. So another thread makes
//! the request, and the caller returns as soon as the announcement is there.

use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use knit_types::sync::Locked;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Handle;
use crate::error::{Error, Result};
use crate::link::{Change, IFLA_GROUP, RTM_DELLINK, RTNLGRP_LINK};
use crate::netlink::{Batch, Error as NetlinkError, Protocol, Refusal, Socket, flags};
use crate::op::Op;
use crate::{owner, sys};

/// Far beyond what a deletion takes on a busy node; then something is wrong.
const DEADLINE: Duration = Duration::from_secs(30);
/// The thread makes one system call.
const STACK: usize = 64 * 1024;
/// How many idle pairs of sockets a handle keeps.
const KEEP: usize = 8;
/// Links in this group are about to be deleted. Next to the owner's group, so that it is recognised, too.
const DOOMED_GROUP: u32 = owner::GROUP + 1;

/// The sockets of one deletion at a time: one to ask by, one to hear by.
#[derive(Debug)]
pub(super) struct Removal {
    requests: Socket,
    events: Socket,
}

enum Outcome {
    Gone,
    Refused(Refusal),
}

impl Handle {
    /// Deletes a link, and with a veth its other end. Returns as soon as it is gone from the namespace:
    /// whether there was one. Other requests of this handle go on meanwhile.
    pub fn delete_link(&self, index: u32) -> Result<bool> {
        let attempted = || format!("delete link {index}");
        let failed = |source| self.failed(attempted(), source);
        if index == 0 {
            return Err(Error::invalid(
                "link 0",
                "there is no link with this index",
                "look the index up first",
            ));
        }
        let mut removal = self.removal().map_err(failed)?;
        removal.events.subscribe(RTNLGRP_LINK).map_err(failed)?;
        crate::netlink::doom(self.namespace.id(), index);
        let outcome = removal.delete(index);
        // What is left in the queues must not be mistaken for news by the next deletion; on any doubt, drop
        // the pair.
        let clean = removal.events.unsubscribe(RTNLGRP_LINK).is_ok()
            && removal.events.drain(|_| {}).is_ok()
            && outcome.is_ok();
        if clean {
            let mut idle = self.removals.locked();
            if idle.len() < KEEP {
                idle.push(removal);
            }
        }
        match outcome.map_err(failed)? {
            Outcome::Gone => Ok(true),
            Outcome::Refused(refusal) if refusal.is_not_found() => Ok(false),
            Outcome::Refused(refusal) => Err(failed(refusal.into())),
        }
    }

    /// Deletes many links at once: they are put into a group of their own, and the group is deleted, which
    /// costs one `rcu_barrier` for all of them. Links that are not there are fine. Returns when all are gone.
    pub fn delete_links(&self, indexes: &[u32]) -> Result<()> {
        let doom = |index: &u32| Op::Change(Change { group: Some(DOOMED_GROUP), ..Change::of(*index) });
        let doomed: Vec<_> = indexes.iter().filter(|index| **index != 0).map(doom).collect();
        if doomed.is_empty() {
            return Ok(());
        }
        match self.apply(&doomed) {
            Err(Error::Refused { failures, .. }) if failures.iter().all(|f| f.refusal.is_not_found()) => {}
            other => other?,
        }
        self.delete_group(DOOMED_GROUP).map(|_| ())
    }

    /// Deletes all links of a group in this namespace; says whether there were any. Group 0 is everybody's
    /// and is refused.
    pub fn delete_group(&self, group: u32) -> Result<bool> {
        if group == 0 {
            let problem = "every link that nobody put elsewhere is in it";
            return Err(Error::invalid("link group 0", problem, "name a group of ours"));
        }
        let failed = |source| self.failed(format_args!("delete the links of group {group}"), source);
        let mut removal = self.removal().map_err(failed)?;
        let mut batch = Batch::new();
        batch.push(RTM_DELLINK, 0, |writer| _ = writer.fixed(&[0; 16]).u32(IFLA_GROUP, group));
        match removal.requests.request(&mut batch).and_then(crate::netlink::Answers::all) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    /// An idle pair of sockets, or a new one.
    fn removal(&self) -> Result<Removal, NetlinkError> {
        let idle = self.removals.locked().pop();
        match idle {
            Some(removal) => Ok(removal),
            None => Ok(Removal {
                requests: Socket::open_in(Protocol::Route, &self.namespace)?,
                events: Socket::open_in(Protocol::Route, &self.namespace)?,
            }),
        }
    }
}

impl Removal {
    fn delete(&mut self, index: u32) -> Result<Outcome, NetlinkError> {
        let mut header = [0; 16];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        let mut batch = Batch::new();
        batch.push(RTM_DELLINK, flags::ACK, |writer| _ = writer.fixed(&header));
        let (sequence, bytes) = self.requests.prepare(&mut batch)?;
        let fd = self.requests.as_fd().try_clone_to_owned().map_err(NetlinkError::Receive)?;
        send_elsewhere(fd, bytes)?;
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(outcome) = self.look(index, sequence)? {
                return Ok(outcome);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NetlinkError::NoAnswer);
            }
            let timeout = Timespec::try_from(left).ok();
            let fds =
                &mut [PollFd::new(&self.events, PollFlags::IN), PollFd::new(&self.requests, PollFlags::IN)];
            match poll(fds, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(NetlinkError::Receive(error.into())),
            }
        }
    }

    /// Whether news of the link, or an answer to the request, is there.
    fn look(&mut self, index: u32, sequence: u32) -> Result<Option<Outcome>, NetlinkError> {
        let mut outcome = None;
        let heard = self.events.drain(|message| {
            let Ok((header, _)) = message.split::<16>() else { return };
            let about = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
            // A bridge announces the end of a port's membership in the same words, with its own family.
            let link_itself = i32::from(header[0]) == libc::AF_UNSPEC;
            if message.kind == RTM_DELLINK && about == index && link_itself {
                outcome = Some(Outcome::Gone);
            }
        });
        match heard {
            Ok(()) | Err(NetlinkError::Overrun) => {} // if news was lost, the answer still comes
            Err(error) => return Err(error),
        }
        self.requests.drain(|message| {
            if message.sequence == sequence && outcome.is_none() {
                outcome = message.answer().map(|answer| match answer {
                    Ok(()) => Outcome::Gone,
                    Err(refusal) => Outcome::Refused(refusal),
                });
            }
        })?;
        Ok(outcome)
    }
}

/// Sends on a thread that may be held up. If none can be started, this one is.
fn send_elsewhere(fd: OwnedFd, bytes: Vec<u8>) -> Result<(), NetlinkError> {
    let length = bytes.len();
    let bytes = std::sync::Arc::new((fd, bytes));
    let shared = std::sync::Arc::clone(&bytes);
    // The answer, or its absence, is what the caller looks at: an error of send(2) itself on a socket of ours
    // with 32 bytes means no memory, and then the deadline ends the wait.
    let send = move || _ = sys::send(shared.0.as_fd(), &shared.1);
    if thread::Builder::new().name("link-delete".into()).stack_size(STACK).spawn(send).is_ok() {
        return Ok(());
    }
    let sent = sys::send(bytes.0.as_fd(), &bytes.1);
    sent.map(|_| ()).map_err(|source| NetlinkError::Send { bytes: length, source })
}
