//! Reads what routers log, and passes it on: to the book, to those who follow, to events.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use knit_kernel::netns::NetNs;
use knit_kernel::nflog::{self, Headers, Logged, Nflog};
use knit_objects::{EventNote, EventRecorder};
use knit_policy::cluster::Cluster;
use knit_policy_nft::log::{GROUP, Why};
use knit_types::NetworkName;
use knit_types::sync::Locked as _;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::broadcast;

use crate::book::Book;
use crate::entry::{Dropped, Named, Subject};

/// What is known of the cluster, by which dropped packets are named.
pub trait Clusters: Send + Sync {
    /// Asks something, and returns at once. The question is dropped if nobody is left to answer it.
    fn ask(&self, question: Question);
}

/// Something to ask.
pub type Question = Box<dyn FnOnce(&Cluster) + Send>;

/// The reason of events about dropped packets.
pub const REASON: &str = "PolicyDropped";

/// What waits for one who follows before they miss some.
const FOLLOW_QUEUE: usize = 256;
/// How many packets are named at a time: who enforces policies answers, and has other things to do.
const NAMED_AT_ONCE: usize = 64;
/// How long that may take. What is not named in this time is not told.
const NAME_TIMEOUT: Duration = Duration::from_secs(10);

/// What policies drop on this node. Clones share it; its thread ends with the last one.
#[derive(Clone)]
pub struct Drops {
    shared: Arc<Shared>,
    thread: Arc<Thread>,
}

struct Shared {
    clusters: Arc<dyn Clusters>,
    book: Mutex<Book>,
    follow: broadcast::Sender<Dropped>,
    events: OnceLock<EventRecorder>,
}

/// How the thread that reads is told something.
#[derive(Debug)]
struct Thread {
    commands: Mutex<Sender<Command>>,
    /// A byte wakes it; its end ends it.
    wake: UnixStream,
    next: AtomicU64,
}

#[derive(Debug)]
enum Command {
    Listen(u64, Heard),
    Stop(u64),
}

/// What is read of one router. With it, those who asked for it see that nobody reads it any more.
#[derive(Debug)]
struct Heard {
    network: NetworkName,
    log: Nflog,
    _reading: Arc<()>,
}

/// A router that is listened to until this is dropped.
#[derive(Debug)]
pub struct Listening {
    id: u64,
    reading: Weak<()>,
    thread: Arc<Thread>,
}

// === impl Drops ===

impl Drops {
    /// Nothing is listened to yet.
    ///
    /// # Errors
    /// When the thread that reads cannot be started.
    pub fn start(clusters: Arc<dyn Clusters>) -> io::Result<Self> {
        let (follow, _) = broadcast::channel(FOLLOW_QUEUE);
        let book = Mutex::new(Book::new(Timestamp::now()));
        let shared = Arc::new(Shared { clusters, book, follow, events: OnceLock::new() });
        let (commands, inbox) = channel();
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let reading = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("policy-drops".to_owned());
        thread.spawn(move || reading.read(&inbox, woken))?;
        let thread = Thread { commands: Mutex::new(commands), wake, next: AtomicU64::new(0) };
        Ok(Self { shared, thread: Arc::new(thread) })
    }

    /// From now on pods are told by events. The first recorder counts.
    pub fn tell_pods(&self, recorder: EventRecorder) {
        let _ = self.shared.events.set(recorder);
    }

    /// Listens in a Network's router.
    ///
    /// # Errors
    /// When somebody else listens there, or the kernel cannot do it.
    pub fn listen(&self, network: &NetworkName, router: &NetNs) -> Result<Listening, nflog::Error> {
        let log = Nflog::open_in(router, GROUP)?;
        let id = self.thread.next.fetch_add(1, Ordering::Relaxed);
        let reading = Arc::new(());
        let listening = Listening { id, reading: Arc::downgrade(&reading), thread: Arc::clone(&self.thread) };
        self.thread.tell(Command::Listen(id, Heard { network: network.to_owned(), log, _reading: reading }));
        Ok(listening)
    }

    /// What was dropped lately, the newest at the end.
    #[must_use]
    pub fn recent(&self) -> Vec<Dropped> {
        self.shared.book().recent()
    }

    /// What is dropped from now on.
    #[must_use]
    pub fn follow(&self) -> broadcast::Receiver<Dropped> {
        self.shared.follow.subscribe()
    }

    /// What was seen, in the text form of OpenMetrics without its end.
    #[must_use]
    pub fn metrics(&self) -> String {
        self.shared.book().metrics()
    }
}

impl fmt::Debug for Drops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drops").finish_non_exhaustive()
    }
}

// === impl Thread, Listening ===

impl Thread {
    fn tell(&self, command: Command) {
        // Once the thread is gone, nobody is listened to anyway.
        let _ = self.commands.locked().send(command);
        // If its buffer is full, it wakes up in any case.
        let _ = (&self.wake).write(&[0]);
    }
}

impl Listening {
    /// Whether nobody listens any more: it could not be read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.reading.strong_count() == 0
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.thread.tell(Command::Stop(self.id));
    }
}

// === impl Shared ===

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.locked()
    }

    /// Reads the logs of all routers, until nobody is left who could ask for it.
    fn read(&self, inbox: &Receiver<Command>, mut woken: UnixStream) {
        let mut logs: BTreeMap<u64, Heard> = BTreeMap::new();
        loop {
            for command in inbox.try_iter() {
                match command {
                    Command::Listen(id, heard) => drop(logs.insert(id, heard)),
                    Command::Stop(id) => drop(logs.remove(&id)),
                }
            }
            let ready: Vec<u64> = {
                let mut waiting = vec![PollFd::new(&woken, PollFlags::IN)];
                waiting.extend(logs.values().map(|heard| PollFd::new(&heard.log, PollFlags::IN)));
                match poll(&mut waiting, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => {
                        tracing::warn!(%error, "dropped packets are no longer reported");
                        return;
                    }
                }
                let has_news = |fd: &PollFd<'_>| !fd.revents().is_empty();
                logs.keys().zip(&waiting[1..]).filter(|(_, fd)| has_news(fd)).map(|(id, _)| *id).collect()
            };
            if woken.read(&mut [0; 64]).is_ok_and(|read| read == 0) {
                return;
            }
            for id in ready {
                let Some(Heard { network, log, .. }) = logs.get_mut(&id) else { continue };
                let mut packets = Vec::new();
                // All that is queued: the kernel's limits keep that short.
                let drained = log.drain(|packet| packets.extend(of_policy(&packet)));
                for some in packets.chunks(NAMED_AT_ONCE) {
                    self.note(network, some.to_vec());
                }
                match drained {
                    Ok(false) => {}
                    Ok(true) => tracing::debug!(%network, "some dropped packets were not seen"),
                    Err(error) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(%network, error, "dropped packets of this Network are not reported");
                        // Until the next pass listens again.
                        logs.remove(&id);
                    }
                }
            }
        }
    }

    /// Has packets named, and passes them on.
    fn note(&self, network: &NetworkName, packets: Vec<(Why, Headers)>) {
        let (answer, answered) = channel();
        let (network, now) = (network.to_owned(), Timestamp::now());
        self.clusters.ask(Box::new(move |cluster| {
            let name = |(why, headers): (Why, Headers)| Named::new(cluster, &network, why, &headers, now);
            // Nobody may be waiting any more.
            let _ = answer.send(packets.into_iter().map(name).collect::<Vec<Named>>());
        }));
        for named in answered.recv_timeout(NAME_TIMEOUT).unwrap_or_default() {
            let subject = named.subject.clone();
            let noted = self.book().note(named, now);
            if let Some(dropped) = noted.tell {
                // Nobody may be following.
                let _ = self.follow.send(dropped);
            }
            if let (Some(dropped), Some(subject), Some(recorder)) = (noted.event, subject, self.events.get())
            {
                let message = dropped.message();
                recorder.tell(EventNote::warning(reference(&subject), REASON, "Enforce", message));
            }
        }
    }
}

/// What our own rules logged.
fn of_policy(packet: &Logged) -> Option<(Why, Headers)> {
    Some((Why::of_prefix(&packet.prefix)?, packet.headers?))
}

fn reference(subject: &Subject) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(subject.namespace.to_string()),
        name: Some(subject.name.to_string()),
        uid: Some(subject.uid.to_string()),
        ..ObjectReference::default()
    }
}
