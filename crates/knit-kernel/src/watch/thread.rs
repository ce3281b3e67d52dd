//! The thread that listens in any number of namespaces, for all watchers of this process.
//!
//! One for all: each change is received and read once, however many parts of the program want to know. After
//! it has heard something it lets a moment pass before it listens again, because what one request changes
//! comes in a dozen notifications, and waking up for each costs more than all of them together. Whoever needs
//! to know at once says so ([`Watcher::catch_up`]).

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use knit_nft::Generation;
use knit_types::sync::Locked;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use super::{Ears, Listen, News};
use crate::netlink::Result;
use crate::netns::{NetNs, NsId};

/// How long notifications gather after some were heard. The first one after that is heard at once.
const GATHER_INTERVAL: Duration = Duration::from_millis(10);

/// The thread of this process, while there are watchers.
static HUB: Mutex<Option<Hub>> = Mutex::new(None);

/// Listens in namespaces until it is dropped, and tells what others did there. See the [module](super).
pub struct Watcher {
    shared: Arc<Shared>,
    number: u64,
    teller: Arc<Teller>,
}

/// What a watcher wants to be called; nothing once it is dropped.
struct Teller(Mutex<Option<Box<Tell>>>);

type Tell = dyn Fn(NsId, News) + Send;

struct Hub {
    shared: Arc<Shared>,
    watchers: usize,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    /// Wakes the thread: the list has changed, or somebody cannot wait.
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
    spaces: HashMap<NsId, Heard>,
}

/// What is known of a namespace that is listened in.
#[derive(Debug)]
struct Heard {
    /// How much is listened to there.
    listen: Listen,
    /// The newest state of the rule set that was heard of.
    generation: Option<Generation>,
    /// How often somebody joined: who did so while something was being heard has not been told of it.
    joined: u64,
    listeners: Vec<Listener>,
}

#[derive(Clone)]
struct Listener {
    watcher: u64,
    listen: Listen,
    teller: Arc<Teller>,
}

// === impl Watcher ===

impl Watcher {
    /// A watcher with nothing to listen to yet. `tell` is called on the thread and must not take long.
    ///
    /// # Errors
    /// When there is no thread or no descriptor for it.
    pub fn start(tell: impl Fn(NsId, News) + Send + 'static) -> std::io::Result<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let mut hub = HUB.locked();
        let running = match hub.take() {
            Some(running) => running,
            None => Hub::start()?,
        };
        let shared = Arc::clone(&running.shared);
        *hub = Some(Hub { watchers: running.watchers + 1, ..running });
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { shared, number, teller: Arc::new(Teller(Mutex::new(Some(Box::new(tell))))) })
    }

    /// Listens in a namespace from now on. One that it listens in already is fine.
    ///
    /// # Errors
    /// When the kernel gives no sockets there.
    pub fn add(&self, namespace: &NetNs, listen: Listen) -> Result<()> {
        let id = namespace.id();
        let listener = Listener { watcher: self.number, listen, teller: Arc::clone(&self.teller) };
        if let Some(heard) = self.shared.state().spaces.get_mut(&id) {
            if heard.listeners.iter().any(|other| other.watcher == self.number) {
                return Ok(());
            }
            if heard.listen >= listen {
                heard.listeners.push(listener);
                heard.joined += 1;
                return Ok(());
            }
        }
        let ears = Ears::open(namespace, listen)?;
        let mut state = self.shared.state();
        let heard = state.spaces.entry(id).or_insert_with(|| Heard {
            listen,
            generation: ears.generation,
            joined: 0,
            listeners: Vec::new(),
        });
        heard.listen = heard.listen.max(listen);
        heard.listeners.push(listener);
        heard.joined += 1;
        state.new.push(ears);
        drop(state);
        self.shared.wake();
        Ok(())
    }

    /// Listens there no more.
    pub fn remove(&self, namespace: NsId) {
        let mut state = self.shared.state();
        let Some(heard) = state.spaces.get_mut(&namespace) else { return };
        heard.listeners.retain(|listener| listener.watcher != self.number);
        if heard.listeners.is_empty() {
            state.spaces.remove(&namespace);
            drop(state);
            self.shared.wake();
        }
    }

    /// Waits until the rule set of a namespace was heard of at this state: what others did up to there has
    /// been told. False at once if that is not known, and when it takes longer than `limit`.
    #[must_use]
    pub fn catch_up(&self, namespace: NsId, generation: Generation, limit: Duration) -> bool {
        let heard = |state: &State| state.spaces.get(&namespace).and_then(|heard| heard.generation);
        let behind = |state: &State| heard(state).is_some_and(|heard| !heard.reaches(generation));
        let state = self.shared.state();
        if behind(&state) {
            self.shared.wake();
        }
        let waited = self.shared.heard.wait_timeout_while(state, limit, |state| behind(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        heard(&state).is_some_and(|heard| heard.reaches(generation))
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("number", &self.number).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("watcher", &self.watcher).finish_non_exhaustive()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // It waits for a call that is under way: after this there is none.
        let tell = self.teller.0.locked().take();
        drop(tell);
        let mut state = self.shared.state();
        for heard in state.spaces.values_mut() {
            heard.listeners.retain(|listener| listener.watcher != self.number);
        }
        state.spaces.retain(|_, heard| !heard.listeners.is_empty());
        drop(state);
        let mut hub = HUB.locked();
        let last = hub.take_if(|hub| {
            hub.watchers -= 1;
            hub.watchers == 0
        });
        if last.is_some() {
            self.shared.state().stop = true;
        }
        self.shared.wake();
        drop(hub);
        if let Some(hub) = last {
            // A panic of what it tells has been printed.
            let _ = hub.thread.join();
        }
    }
}

// === impl Hub ===

impl Hub {
    fn start() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { wake, state: Mutex::default(), heard: Condvar::new() });
        let inside = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kernel-watch".to_owned());
        let thread = thread.spawn(move || inside.listen())?;
        Ok(Self { shared, watchers: 0, thread })
    }
}

// === impl Shared ===

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    fn wake(&self) {
        // It fails only when the counter is at its end, and then the thread is about to wake up anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn listen(&self) {
        let mut all: Vec<Ears> = Vec::new();
        loop {
            {
                let mut state = self.state();
                if state.stop {
                    return;
                }
                let new = std::mem::take(&mut state.new);
                drop(state);
                for new in new {
                    let Some(at) = all.iter().position(|ears| ears.namespace == new.namespace) else {
                        all.push(new);
                        continue;
                    };
                    // Two that came first at the same time; those stay that hear more.
                    if new.network.is_some() || all[at].network.is_none() {
                        // What is replaced is heard to its end first.
                        self.hear(&mut all[at]);
                        all[at] = new;
                    }
                }
                let state = self.state();
                all.retain(|ears| state.spaces.contains_key(&ears.namespace));
            }
            let ready = self.wait(&all);
            let begun = Instant::now();
            let mut any = false;
            for (ears, _) in all.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
                self.hear(ears);
                any = true;
            }
            if any {
                self.gather(GATHER_INTERVAL.saturating_sub(begun.elapsed()));
            }
        }
    }

    /// Waits for news or to be woken; which ears have some.
    fn wait(&self, all: &[Ears]) -> Vec<bool> {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        for ears in all {
            fds.push(PollFd::from_borrowed_fd(ears.tables.as_fd(), PollFlags::IN));
            let network = ears.network.as_ref().map(|network| network.socket.as_fd());
            let network = network.unwrap_or_else(|| ears.tables.as_fd());
            fds.push(PollFd::from_borrowed_fd(network, PollFlags::IN));
        }
        // Whatever the reason that it ended: look.
        let _ = poll(&mut fds, None);
        let (first, others) = fds.split_at(1);
        if !first[0].revents().is_empty() {
            self.woken();
        }
        let news = |pair: &[PollFd<'_>]| pair.iter().any(|fd| !fd.revents().is_empty());
        others.chunks(2).map(news).collect()
    }

    /// Lets notifications come in, until somebody cannot wait.
    fn gather(&self, time: Duration) {
        let time = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
        let mut wake = [PollFd::new(&self.wake, PollFlags::IN)];
        if poll(&mut wake, Some(&time)).is_ok_and(|ready| ready > 0) {
            self.woken();
        }
    }

    fn woken(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn hear(&self, ears: &mut Ears) {
        let namespace = ears.namespace;
        let known = |heard: &Heard| (heard.joined, heard.listeners.clone());
        let (mut joined, mut listeners) = self.state().spaces.get(&namespace).map(known).unwrap_or_default();
        ears.hear(&mut |news, to| {
            listeners
                .iter()
                .filter(|listener| listener.listen >= to)
                .for_each(|l| l.tell(namespace, news.clone()));
        });
        loop {
            let mut state = self.state();
            let Some(heard) = state.spaces.get_mut(&namespace) else { break };
            if heard.joined == joined {
                // Only now: what was heard up to there has been told to all of them.
                heard.generation = ears.generation;
                break;
            }
            // Whoever joined meanwhile may have read the tables before a change that was heard just now.
            joined = heard.joined;
            let is_late = |new: &&Listener| listeners.iter().all(|known| known.watcher != new.watcher);
            let late: Vec<Listener> = heard.listeners.iter().filter(is_late).cloned().collect();
            drop(state);
            late.iter().for_each(|listener| listener.tell(namespace, News::Lost));
            listeners.extend(late);
        }
        self.heard.notify_all();
    }
}

// === impl Listener ===

impl Listener {
    fn tell(&self, namespace: NsId, news: News) {
        if let Some(tell) = &*self.teller.0.locked() {
            tell(namespace, news);
        }
    }
}
