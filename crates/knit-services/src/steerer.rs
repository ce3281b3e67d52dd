//! The thread that writes what leads into routers to the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use knit_node::level::{Backoff, RepairTurn};
use knit_runtime::routers::{Entrance, Routers, Steered, Steering};

/// How long to wait before what failed is tried again.
const STEER_RETRY_DELAY: Duration = Duration::from_secs(1);

/// How often the table is repaired, whoever changes it again and again.
const STEER_REPAIR_INTERVAL: Duration = Duration::from_secs(5);

/// The thread; it ends when this is dropped. What it wrote stays.
#[derive(Debug)]
pub(crate) struct Steerer {
    updates: Sender<SteererNews>,
}

/// Is told of each repair of what somebody else had changed.
pub(crate) type OnRepair = Box<dyn Fn() + Send>;

/// What the thread is told.
enum SteererNews {
    /// These places lead elsewhere now.
    Changed(Vec<(Entrance, Option<Steered>)>),
    /// Somebody else changed the table.
    Touched,
    /// The table is to be compared with what it should be.
    Compare,
    /// Nobody is left to tell anything.
    Stop,
}

struct SteererWork {
    routers: Arc<dyn Routers>,
    /// For those who hear of changes by others.
    tell: Sender<SteererNews>,
    on_repair: OnRepair,
    table: Option<Box<dyn Steering>>,
    wanted: BTreeMap<Entrance, Steered>,
    changed: BTreeSet<Entrance>,
    /// It failed, and that was said.
    failing: bool,
    /// How often the table is repaired that others change.
    repairs: Backoff<()>,
    /// Somebody else changed it, and it has not been looked at since.
    touched: bool,
}

impl Steerer {
    /// Starts it for the routers of a runtime, with all that is wanted now.
    pub(crate) fn start(
        routers: Arc<dyn Routers>,
        wanted: BTreeMap<Entrance, Steered>,
        on_repair: OnRepair,
    ) -> std::io::Result<Self> {
        let (updates, inbox) = channel();
        let work = SteererWork {
            routers,
            tell: updates.clone(),
            on_repair,
            table: None,
            wanted,
            changed: BTreeSet::new(),
            failing: false,
            repairs: Backoff::new(STEER_REPAIR_INTERVAL),
            touched: false,
        };
        std::thread::Builder::new().name("steering".to_owned()).spawn(move || work.run(&inbox))?;
        Ok(Self { updates })
    }

    /// These places lead elsewhere now.
    pub(crate) fn update(&self, changes: Vec<(Entrance, Option<Steered>)>) {
        // It never ends before this one does.
        let _ = self.updates.send(SteererNews::Changed(changes));
    }

    /// Has the table compared with what it should be, and repaired.
    pub(crate) fn compare(&self) {
        let _ = self.updates.send(SteererNews::Compare);
    }
}

impl Drop for Steerer {
    fn drop(&mut self) {
        let _ = self.updates.send(SteererNews::Stop);
    }
}

impl SteererWork {
    fn run(mut self, inbox: &Receiver<SteererNews>) {
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
                    SteererNews::Changed(changes) => changes.into_iter().for_each(|change| self.take(change)),
                    SteererNews::Touched => self.touched = true,
                    SteererNews::Compare => self.compare(),
                    SteererNews::Stop => return,
                }
            }
            let later = self.look_again();
            pause = self.attempt().into_iter().chain(later).min();
        }
    }

    fn take(&mut self, (place, to): (Entrance, Option<Steered>)) {
        self.changed.insert(place);
        match to {
            Some(to) => self.wanted.insert(place, to),
            None => self.wanted.remove(&place),
        };
    }

    /// Has the next attempt look at the whole table unless it is certain that nobody else changed it.
    fn compare(&mut self) {
        if let Some(table) = &mut self.table
            && !table.is_intact()
        {
            table.look_again();
        }
    }

    /// Has the next attempt look at the whole table if somebody else changed it; says when, if that is not
    /// now.
    fn look_again(&mut self) -> Option<Duration> {
        if !self.touched {
            return None;
        }
        let now = tokio::time::Instant::now();
        match self.repairs.turn(&(), now) {
            RepairTurn::Later(at) => return Some(at.saturating_duration_since(now)),
            RepairTurn::Now { first: true, fight: true } => {
                tracing::warn!("another program keeps changing the rules that steer traffic into routers");
            }
            RepairTurn::Now { .. } => {}
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
                    tracing::info!("traffic to Services of Networks is steered into their routers again");
                }
                None
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(
                        error,
                        "traffic to Services of Networks may not be steered into their routers"
                    );
                }
                self.table = None;
                Some(STEER_RETRY_DELAY)
            }
        }
    }

    fn write(&mut self) -> knit_runtime::Result<()> {
        let table = match &mut self.table {
            Some(table) => table,
            none => {
                let mut table = self.routers.steering()?;
                let tell = self.tell.clone();
                // It ends when the thread does.
                table.watch(Box::new(move || _ = tell.send(SteererNews::Touched)));
                none.insert(table)
            }
        };
        let written = table.set(&self.wanted, &self.changed);
        let repairs = table.take_repairs();
        if repairs > 0 {
            tracing::warn!(
                "another program changed the rules that steer traffic into routers; repaired \
            with {repairs} changes"
            );
            (self.on_repair)();
        }
        written
    }
}
