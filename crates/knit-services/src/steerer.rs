//! The thread that writes what leads into routers to the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::watch::{self, Listen, Watcher};
use knit_node::level::{Backoff, Turn};
use knit_proxy_nft::{Place, SteerError, SteerTable, Steered};

/// The name of the table.
const TABLE: &str = "knit-steer";

/// How long to wait before what failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// How often the table is put right, whoever changes it again and again.
const REPAIR: Duration = Duration::from_secs(5);

/// The thread; it ends when this is dropped. What it wrote stays.
#[derive(Debug)]
pub(crate) struct Steerer {
    updates: Sender<News>,
    /// Hears of changes by others. None where the kernel does not tell.
    _watcher: Option<Watcher>,
}

/// What the thread is told.
enum News {
    /// These places lead elsewhere now.
    Changed(Vec<(Place, Option<Steered>)>),
    /// Somebody else changed the table.
    Touched,
}

struct Work {
    namespace: NetNs,
    table: Option<SteerTable>,
    wanted: BTreeMap<Place, Steered>,
    changed: BTreeSet<Place>,
    /// It failed, and that was said.
    failing: bool,
    /// How often the table is put right that others change.
    repairs: Backoff<()>,
    /// Somebody else changed it, and it has not been looked at since.
    touched: bool,
}

impl Steerer {
    /// Starts it for the node's namespace, with all that is wanted now.
    pub(crate) fn start(namespace: NetNs, wanted: BTreeMap<Place, Steered>) -> std::io::Result<Self> {
        let (updates, inbox) = channel();
        let watcher = watch(&namespace, updates.clone());
        let work = Work {
            namespace,
            table: None,
            wanted,
            changed: BTreeSet::new(),
            failing: false,
            repairs: Backoff::new(REPAIR),
            touched: false,
        };
        std::thread::Builder::new().name("steering".to_owned()).spawn(move || work.run(&inbox))?;
        Ok(Self { updates, _watcher: watcher })
    }

    /// These places lead elsewhere now.
    pub(crate) fn update(&self, changes: Vec<(Place, Option<Steered>)>) {
        // It never ends before this one does.
        let _ = self.updates.send(News::Changed(changes));
    }
}

/// Tells the thread when somebody else changes the table.
fn watch(namespace: &NetNs, tell: Sender<News>) -> Option<Watcher> {
    let touched = move |_, news| {
        let ours = match news {
            watch::News::Table(table) => &*table.name == TABLE,
            watch::News::Network => false,
            watch::News::Lost => true,
        };
        if ours {
            // It ends when the thread does.
            let _ = tell.send(News::Touched);
        }
    };
    let watcher = match Watcher::start(touched) {
        Ok(watcher) => watcher,
        Err(error) => {
            tracing::warn!(%error, "what others change of steering is not noticed");
            return None;
        }
    };
    if let Err(error) = watcher.add(namespace, Listen::Tables) {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(error, "what others change of steering is not noticed");
    }
    Some(watcher)
}

impl Work {
    fn run(mut self, inbox: &Receiver<News>) {
        let mut pause = self.attempt();
        loop {
            let news = match pause {
                Some(pause) => match inbox.recv_timeout(pause) {
                    Ok(news) => Some(news),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                None => match inbox.recv() {
                    Ok(news) => Some(news),
                    Err(_) => return,
                },
            };
            for news in news.into_iter().chain(inbox.try_iter()) {
                match news {
                    News::Changed(changes) => changes.into_iter().for_each(|change| self.take(change)),
                    News::Touched => self.touched = true,
                }
            }
            let later = self.look_again();
            pause = self.attempt().into_iter().chain(later).min();
        }
    }

    fn take(&mut self, (place, to): (Place, Option<Steered>)) {
        self.changed.insert(place);
        match to {
            Some(to) => self.wanted.insert(place, to),
            None => self.wanted.remove(&place),
        };
    }

    /// Has the next attempt look at the whole table if somebody else changed it; says when, if that is not now.
    fn look_again(&mut self) -> Option<Duration> {
        if !self.touched {
            return None;
        }
        let now = tokio::time::Instant::now();
        match self.repairs.turn(&(), now) {
            Turn::Later(at) => return Some(at.saturating_duration_since(now)),
            Turn::Now { first: true, fight } => {
                let again = if fight { " again and again" } else { "" };
                tracing::warn!("somebody else changes table {TABLE}{again}: it is put right");
            }
            Turn::Now { .. } => {}
        }
        self.touched = false;
        if let Some(table) = &mut self.table {
            table.look_again();
        }
        None
    }

    /// Writes what changed; says when to try again, if it failed.
    fn attempt(&mut self) -> Option<Duration> {
        match self.write() {
            Ok(()) => {
                self.changed.clear();
                if std::mem::take(&mut self.failing) {
                    tracing::info!("traffic to Services of Networks is led into their routers again");
                }
                None
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(
                        error,
                        "traffic to Services of Networks may not be led into their routers"
                    );
                }
                self.table = None;
                Some(RETRY)
            }
        }
    }

    fn write(&mut self) -> Result<(), SteerError> {
        let table = match &mut self.table {
            Some(table) => table,
            none => {
                let (mark, uplinks) = (knit_linux::STEERED, knit_linux::UPLINK_PREFIX);
                none.insert(SteerTable::new_in(&self.namespace, TABLE, mark, uplinks)?)
            }
        };
        table.set(&self.wanted, &self.changed).map(|_| ())
    }
}
