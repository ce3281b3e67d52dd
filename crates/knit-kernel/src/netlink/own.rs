//! Which netlink ports of a namespace are this process's: a notification says by which port a change was made.

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
static DOOMED: Mutex<Vec<(NsId, u32, Instant)>> = Mutex::new(Vec::new());
/// Notifications come sooner; the kernel does not give a link's number to another one for long.
const REMEMBER: Duration = Duration::from_secs(2);

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

/// This process is about to delete a link: what the kernel tells of it until then is no news. Kernels before 6.2 do not
/// say who deleted it, and none says why it went down before.
pub(crate) fn doom(namespace: NsId, link: u32) {
    if STRANGER.get() {
        return;
    }
    let now = Instant::now();
    let mut doomed = DOOMED.lock().unwrap_or_else(PoisonError::into_inner);
    doomed.retain(|(_, _, at)| now.saturating_duration_since(*at) < REMEMBER);
    doomed.push((namespace, link, now));
}

/// Whether this process is deleting a link, or has just done so.
pub(crate) fn is_doomed(namespace: NsId, link: u32) -> bool {
    let doomed = DOOMED.lock().unwrap_or_else(PoisonError::into_inner);
    doomed.iter().any(|(space, index, _)| (*space, *index) == (namespace, link))
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
