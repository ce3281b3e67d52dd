//! What waits to be written: the latest value per object. Pure; time comes in.

use std::collections::{HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::key::Target;
use crate::write::Write;

/// The queue is full: too many different objects wait.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{capacity} objects wait to be written already: the API has been away for long; try again later")]
pub struct QueueFull {
    /// How many may wait.
    pub capacity: usize,
}

#[derive(Debug)]
pub(super) struct Queue {
    capacity: usize,
    waiting: HashMap<Target, Item>,
    /// Targets in the order in which they came; each waiting one is in it once.
    order: VecDeque<Target>,
    /// Being written now. A newer value waits until that is over, so that writes to one object keep their
    /// order.
    busy: HashSet<Target>,
    /// Objects whose last attempt failed.
    failing: HashMap<Target, Failing>,
}

#[derive(Debug)]
struct Item {
    writes: Vec<Write>,
}

#[derive(Debug)]
struct Failing {
    backoff: Backoff,
    not_before: Instant,
}

/// What there is to do.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Write this, then say [`Queue::done`] or [`Queue::failed`].
    Write(Target, Vec<Write>),
    /// Nothing before this time, unless something new comes.
    Wait(Option<Instant>),
}

impl Queue {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            waiting: HashMap::new(),
            order: VecDeque::new(),
            busy: HashSet::new(),
            failing: HashMap::new(),
        }
    }

    /// These writes are what the object should get now; what waited for it is forgotten.
    pub(super) fn set(&mut self, target: Target, writes: Vec<Write>) -> Result<(), QueueFull> {
        if let Some(item) = self.waiting.get_mut(&target) {
            item.writes = writes;
            return Ok(());
        }
        if self.waiting.len() >= self.capacity {
            return Err(QueueFull { capacity: self.capacity });
        }
        self.order.push_back(target.clone());
        self.waiting.insert(target, Item { writes });
        Ok(())
    }

    pub(super) fn next(&mut self, now: Instant) -> Next {
        let mut earliest = None;
        for position in 0..self.order.len() {
            let target = &self.order[position];
            if self.busy.contains(target) {
                continue;
            }
            match self.failing.get(target) {
                Some(failing) if failing.not_before > now => {
                    earliest =
                        Some(earliest.map_or(failing.not_before, |e: Instant| e.min(failing.not_before)));
                }
                _ => {
                    let Some(target) = self.order.remove(position) else { break };
                    let writes = self.waiting.remove(&target).map(|item| item.writes).unwrap_or_default();
                    self.busy.insert(target.clone());
                    return Next::Write(target, writes);
                }
            }
        }
        Next::Wait(earliest)
    }

    /// It was written, or there is no point in trying again.
    pub(super) fn done(&mut self, target: &Target) {
        self.busy.remove(target);
        self.failing.remove(target);
    }

    /// It failed and should be tried again; unless something newer waits, with the same writes.
    pub(super) fn failed(
        &mut self,
        target: &Target,
        writes: Vec<Write>,
        jitter: f64,
        at_least: std::time::Duration,
        now: Instant,
    ) {
        self.busy.remove(target);
        let failing = self
            .failing
            .entry(target.clone())
            .or_insert_with(|| Failing { backoff: Backoff::default(), not_before: now });
        failing.not_before = now + failing.backoff.next(jitter).max(at_least);
        if !self.waiting.contains_key(target) {
            // It was there before the others: room is made for it even if the queue has filled meanwhile.
            self.order.push_back(target.clone());
            self.waiting.insert(target.clone(), Item { writes });
        }
    }

    /// How many objects wait or are being written.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.busy.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use knit_api::Network;
    use serde_json::json;

    use super::*;
    use crate::key::Key;

    fn status(name: &str, id: u32) -> Write {
        Write::merge_status::<Network>(Key::cluster(name), json!({"status": {"id": id}}))
    }

    fn set(queue: &mut Queue, write: Write) -> Result<(), QueueFull> {
        queue.set(write.target().clone(), vec![write])
    }

    #[test]
    fn the_latest_value_wins_and_objects_keep_their_turn() {
        let mut queue = Queue::new(10);
        let now = Instant::now();
        for write in [status("a", 1), status("b", 1), status("a", 2)] {
            set(&mut queue, write).expect("room");
        }
        let a = status("a", 2);
        assert_eq!(queue.next(now), Next::Write(a.target().clone(), vec![a.clone()]));
        // A newer value waits until the older one is through.
        set(&mut queue, status("a", 3)).expect("room");
        let b = status("b", 1);
        assert_eq!(queue.next(now), Next::Write(b.target().clone(), vec![b.clone()]));
        assert_eq!(queue.next(now), Next::Wait(None));
        queue.done(a.target());
        assert_eq!(queue.next(now), Next::Write(a.target().clone(), vec![status("a", 3)]));
        queue.done(a.target());
        queue.done(b.target());
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_failure_waits_and_holds_nobody_else_up() {
        let mut queue = Queue::new(10);
        let now = Instant::now();
        set(&mut queue, status("a", 1)).expect("room");
        let Next::Write(target, writes) = queue.next(now) else { panic!("nothing to write") };
        queue.failed(&target, writes.clone(), 1.0, Duration::ZERO, now);
        set(&mut queue, status("b", 1)).expect("room");
        assert!(matches!(queue.next(now), Next::Write(target, _) if target.key.name() == "b"));
        let later = now + Duration::from_millis(100);
        assert_eq!(queue.next(now), Next::Wait(Some(later)));
        assert_eq!(queue.next(later), Next::Write(target.clone(), writes.clone()));
        // Failing again waits longer; a value that came meanwhile takes the place of the old one.
        set(&mut queue, status("a", 2)).expect("room");
        queue.failed(&target, writes, 1.0, Duration::ZERO, later);
        let again = later + Duration::from_millis(200);
        assert_eq!(queue.next(later), Next::Wait(Some(again)));
        assert_eq!(queue.next(again), Next::Write(target.clone(), vec![status("a", 2)]));
    }

    #[test]
    fn a_full_queue_says_so_and_still_takes_newer_values() {
        let mut queue = Queue::new(1);
        set(&mut queue, status("a", 1)).expect("room");
        assert_eq!(set(&mut queue, status("b", 1)), Err(QueueFull { capacity: 1 }));
        assert_eq!(set(&mut queue, status("a", 2)), Ok(()));
    }
}
