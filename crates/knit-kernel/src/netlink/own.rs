//! Which netlink ports of a namespace are this process's: a notification says by which port a change was
//! made.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use knit_types::sync::Locked;

use super::socket::Protocol;
use crate::netns::NsId;

/// A port is unique within a protocol and a namespace only.
type Port = (NsId, Protocol, u32);

static OWN: Mutex<Option<Ports>> = Mutex::new(None);

/// Links that this process is deleting, or has just deleted.
static DOOMED: Mutex<Doomed> = Mutex::new(Doomed(Vec::new()));
/// Notifications are heard sooner; the kernel does not give a link's number, or a port, to another one for
/// long.
const REMEMBER: Duration = Duration::from_secs(2);

/// Links that are about to go, each with the time at which that was said.
#[derive(Debug)]
struct Doomed(Vec<(NsId, u32, Instant)>);

/// The ports that are open, and those that were until a moment ago: what was changed by one of these may not
/// have been heard of yet.
#[derive(Debug, Default)]
struct Ports {
    /// Each with the time at which it was closed.
    all: HashMap<Port, Option<Instant>>,
    /// Those that were closed, in that order.
    closed: VecDeque<(Instant, Port)>,
}

thread_local! {
    static STRANGER: Cell<bool> = const { Cell::new(false) };
}

/// A port that counts as this process's until a while after this is dropped.
#[derive(Debug)]
pub(super) struct Registered(Option<Port>);

impl Registered {
    pub fn new(namespace: NsId, protocol: Protocol, port: u32) -> Self {
        let port = (namespace, protocol, port);
        if STRANGER.get() {
            ports().get_or_insert_default().all.remove(&port);
            return Self(None);
        }
        ports().get_or_insert_default().all.insert(port, None);
        Self(Some(port))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let (Some(port), Some(own)) = (self.0, ports().as_mut()) {
            own.close(port, Instant::now());
        }
    }
}

/// Whether a change that came by this port was made by this process.
pub(crate) fn is_own(namespace: NsId, protocol: Protocol, port: u32) -> bool {
    let port = (namespace, protocol, port);
    port.2 != 0 && ports().as_ref().is_some_and(|own| own.contains(&port, Instant::now()))
}

impl Ports {
    fn close(&mut self, port: Port, now: Instant) {
        while let Some((at, port)) = self.closed.pop_front_if(|(at, _)| !is_recent(*at, now)) {
            // Unless it was opened again since.
            if self.all.get(&port) == Some(&Some(at)) {
                self.all.remove(&port);
            }
        }
        self.all.insert(port, Some(now));
        self.closed.push_back((now, port));
    }

    fn contains(&self, port: &Port, now: Instant) -> bool {
        self.all.get(port).is_some_and(|closed| closed.is_none_or(|at| is_recent(at, now)))
    }
}

/// This process is about to delete a link: what the kernel tells of it until then is no news. Kernels before
/// 6.2 do not say who deleted it, and none says why it went down before.
pub(crate) fn doom(namespace: NsId, link: u32) {
    if STRANGER.get() {
        return;
    }
    DOOMED.locked().add(namespace, link, Instant::now());
}

/// Whether this process is deleting a link, or has just done so.
pub(crate) fn is_doomed(namespace: NsId, link: u32) -> bool {
    DOOMED.locked().contains(namespace, link, Instant::now())
}

impl Doomed {
    fn add(&mut self, namespace: NsId, link: u32, now: Instant) {
        self.0.retain(|(_, _, at)| is_recent(*at, now));
        self.0.push((namespace, link, now));
    }

    /// A number that was said long ago is another link's by now.
    fn contains(&self, namespace: NsId, link: u32, now: Instant) -> bool {
        let said = |(space, index, at): &(NsId, u32, Instant)| {
            (*space, *index) == (namespace, link) && is_recent(*at, now)
        };
        self.0.iter().any(said)
    }
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < REMEMBER
}

/// Runs something whose sockets count as another program's: what a test does to damage what is watched.
#[cfg(feature = "testing")]
pub(crate) fn as_stranger<T>(work: impl FnOnce() -> T) -> T {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            STRANGER.set(self.0);
        }
    }
    let _back = Back(STRANGER.replace(true));
    work()
}

fn ports() -> MutexGuard<'static, Option<Ports>> {
    OWN.locked()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_by_a_socket_that_is_closed_by_now_is_our_own() {
        let start = Instant::now();
        let port = |number| (NsId { dev: 4, ino: 7 }, Protocol::Netfilter, number);
        let mut ports = Ports::default();
        ports.all.insert(port(1), None);
        ports.all.insert(port(2), None);
        ports.close(port(2), start);
        assert!(ports.contains(&port(1), start + REMEMBER * 9));
        assert!(ports.contains(&port(2), start + REMEMBER / 2));
        assert!(!ports.contains(&port(2), start + REMEMBER * 2));
        ports.close(port(1), start + REMEMBER * 2);
        assert_eq!(ports.all.len(), 1, "what is long closed is forgotten");
        ports.all.insert(port(1), None);
        ports.close(port(3), start + REMEMBER * 9);
        assert!(ports.contains(&port(1), start + REMEMBER * 9), "it was opened again");
    }

    #[test]
    fn a_link_number_that_was_doomed_long_ago_is_another_links() {
        let (space, start) = (NsId { dev: 4, ino: 7 }, Instant::now());
        let mut doomed = Doomed(Vec::new());
        doomed.add(space, 9, start);
        assert!(doomed.contains(space, 9, start + REMEMBER / 2));
        assert!(!doomed.contains(space, 8, start));
        assert!(!doomed.contains(NsId { dev: 4, ino: 8 }, 9, start));
        assert!(
            !doomed.contains(space, 9, start + REMEMBER),
            "nothing was doomed since, and it is old all the same"
        );
    }
}
