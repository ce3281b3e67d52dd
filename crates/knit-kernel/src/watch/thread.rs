//! The thread that listens in any number of namespaces.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;

use super::{Ears, Listen, News};
use crate::netlink::Result;
use crate::netns::{NetNs, NsId};
use crate::nft::Generation;

/// Listens in namespaces until it is dropped, and tells what others did there. See the [module](super).
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Wakes the thread: the list has changed.
    wake: OwnedFd,
    state: Mutex<State>,
    /// Something was heard.
    heard: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    /// Those that the thread has not taken yet.
    new: Vec<Ears>,
    gone: Vec<NsId>,
    /// The newest state of the rule set that was heard of, in each namespace.
    generations: HashMap<NsId, Option<Generation>>,
}

impl Watcher {
    /// Starts it, with nothing to listen to yet. `tell` is called on its thread and must not take long.
    ///
    /// # Errors
    /// When there is no thread or no descriptor for it.
    pub fn start(tell: impl Fn(NsId, News) + Send + 'static) -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { wake, state: Mutex::default(), heard: Condvar::new() });
        let inside = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kernel-watch".to_owned());
        let thread = thread.spawn(move || inside.listen(&tell))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Listens in a namespace from now on. One that it listens in already is fine.
    ///
    /// # Errors
    /// When the kernel gives no sockets there.
    pub fn add(&self, namespace: &NetNs, listen: Listen) -> Result<()> {
        if self.shared.state().generations.contains_key(&namespace.id()) {
            return Ok(());
        }
        let ears = Ears::open(namespace, listen)?;
        let mut state = self.shared.state();
        state.generations.insert(namespace.id(), ears.generation);
        state.new.push(ears);
        drop(state);
        self.shared.wake();
        Ok(())
    }

    /// Listens there no more.
    pub fn remove(&self, namespace: NsId) {
        let mut state = self.shared.state();
        if state.generations.remove(&namespace).is_some() {
            state.gone.push(namespace);
        }
        drop(state);
        self.shared.wake();
    }

    /// The newest state of a namespace's rule set that was heard of: up to there, every change by others was
    /// told. None if that is not known.
    #[must_use]
    pub fn heard(&self, namespace: NsId) -> Option<Generation> {
        self.shared.state().generations.get(&namespace).copied().flatten()
    }
}

impl Watcher {
    /// Waits until the rule set of a namespace was heard of at this state: what others did up to there has
    /// been told. False at once if that is not known, and when it takes longer than `limit`.
    #[must_use]
    pub fn catch_up(&self, namespace: NsId, generation: Generation, limit: Duration) -> bool {
        let heard = |state: &State| state.generations.get(&namespace).copied().flatten();
        let behind = |state: &mut State| heard(state).is_some_and(|heard| !heard.reaches(generation));
        let waited = self.shared.heard.wait_timeout_while(self.shared.state(), limit, behind);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        heard(&state).is_some_and(|heard| heard.reaches(generation))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.wake();
        // A panic of what it tells has been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // It fails only when the counter is at its end, and then the thread is about to wake up anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn listen(&self, tell: &dyn Fn(NsId, News)) {
        let mut all: Vec<Ears> = Vec::new();
        loop {
            {
                let mut state = self.state();
                if state.stop {
                    return;
                }
                let gone = std::mem::take(&mut state.gone);
                all.retain(|ears| !gone.contains(&ears.namespace));
                let new = std::mem::take(&mut state.new);
                all.extend(new.into_iter().filter(|ears| state.generations.contains_key(&ears.namespace)));
            }
            let ready = {
                let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
                for ears in &all {
                    fds.push(PollFd::from_borrowed_fd(ears.tables.as_fd(), PollFlags::IN));
                    let network = ears.network.as_ref().map(|network| network.socket.as_fd());
                    let network = network.unwrap_or_else(|| ears.tables.as_fd());
                    fds.push(PollFd::from_borrowed_fd(network, PollFlags::IN));
                }
                // Whatever the reason that it ended: look.
                let _ = poll(&mut fds, None);
                let (first, others) = fds.split_at(1);
                if !first[0].revents().is_empty() {
                    let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                }
                let news = |pair: &[PollFd<'_>]| pair.iter().any(|fd| !fd.revents().is_empty());
                others.chunks(2).map(news).collect::<Vec<bool>>()
            };
            for (ears, _) in all.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
                let namespace = ears.namespace;
                ears.hear(&mut |news| tell(namespace, news));
                // Only now: what was heard up to there has been told.
                if let Some(known) = self.state().generations.get_mut(&namespace) {
                    *known = ears.generation;
                }
                self.heard.notify_all();
            }
        }
    }
}
