//! The thread that writes what leads into routers to the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_proxy_nft::{Place, SteerError, SteerTable, Steered};

/// The name of the table.
const TABLE: &str = "knit-steer";

/// How long to wait before what failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// The thread; it ends when this is dropped. What it wrote stays.
#[derive(Debug)]
pub(crate) struct Steerer {
    updates: Sender<Vec<(Place, Option<Steered>)>>,
}

struct Work {
    namespace: NetNs,
    table: Option<SteerTable>,
    wanted: BTreeMap<Place, Steered>,
    changed: BTreeSet<Place>,
    /// It failed, and that was said.
    failing: bool,
}

impl Steerer {
    /// Starts it for the node's namespace, with all that is wanted now.
    pub(crate) fn start(namespace: NetNs, wanted: BTreeMap<Place, Steered>) -> std::io::Result<Self> {
        let (updates, inbox) = channel();
        let work = Work { namespace, table: None, wanted, changed: BTreeSet::new(), failing: false };
        std::thread::Builder::new().name("steering".to_owned()).spawn(move || work.run(&inbox))?;
        Ok(Self { updates })
    }

    /// These places lead elsewhere now.
    pub(crate) fn update(&self, changes: Vec<(Place, Option<Steered>)>) {
        // It never ends before this one does.
        let _ = self.updates.send(changes);
    }
}

impl Work {
    fn run(mut self, inbox: &Receiver<Vec<(Place, Option<Steered>)>>) {
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
            for (place, to) in news.into_iter().chain(inbox.try_iter()).flatten() {
                self.changed.insert(place);
                match to {
                    Some(to) => self.wanted.insert(place, to),
                    None => self.wanted.remove(&place),
                };
            }
            pause = self.attempt();
        }
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
            none => none.insert(SteerTable::new_in(&self.namespace, TABLE, knit_linux::STEERED)?),
        };
        table.set(&self.wanted, &self.changed).map(|_| ())
    }
}
