//! Which netlink ports of a namespace are this process's: a notification says by which port a change was
//! made.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::socket::Protocol;
use crate::netns::NsId;

/// A port is unique within a protocol and a namespace only.
type Port = (NsId, Protocol, u32);

static OWN: Mutex<Option<HashSet<Port>>> = Mutex::new(None);

/// Links that this process is deleting, or has just deleted.
static DOOMED: Mutex<Doomed> = Mutex::new(Doomed(Vec::new()));
/// Notifications come sooner; the kernel does not give a link's number to another one for long.
const REMEMBER: Duration = Duration::from_secs(2);

/// Links that are about to go, each with the time at which that was said.
#[derive(Debug)]
struct Doomed(Vec<(NsId, u32, Instant)>);

thread_local! {
    static STRANGER: Cell<bool> = const { Cell::new(false) };
}

/// A port that counts as this process's until it is dropped.
#[derive(Debug)]
pub(super) struct Registered(Option<Port>);

impl Registered {
    pub fn new(namespace: NsId, protocol: Protocol, port: u32) -> Self {
        if STRANGER.get() {
            return Self(None);
        }
        let port = (namespace, protocol, port);
        ports().get_or_insert_default().insert(port);
        Self(Some(port))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let (Some(port), Some(own)) = (self.0, ports().as_mut()) {
            own.remove(&port);
        }
    }
}

/// Whether a change that came by this port was made by this process.
pub(crate) fn is_own(namespace: NsId, protocol: Protocol, port: u32) -> bool {
    port != 0 && ports().as_ref().is_some_and(|own| own.contains(&(namespace, protocol, port)))
}

/// This process is about to delete a link: what the kernel tells of it until then is no news. Kernels before
/// 6.2 do not say who deleted it, and none says why it went down before.
pub(crate) fn doom(namespace: NsId, link: u32) {
    if STRANGER.get() {
        return;
    }
    DOOMED.lock().unwrap_or_else(PoisonError::into_inner).add(namespace, link, Instant::now());
}

/// Whether this process is deleting a link, or has just done so.
pub(crate) fn is_doomed(namespace: NsId, link: u32) -> bool {
    DOOMED.lock().unwrap_or_else(PoisonError::into_inner).contains(namespace, link, Instant::now())
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

fn ports() -> MutexGuard<'static, Option<HashSet<Port>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

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
