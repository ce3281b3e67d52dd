//! How often to look, and how often to put the same thing right.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// The least time between two looks while there is one disturbance after another; it doubles up to the most.
const LOOK_MIN_INTERVAL: Duration = Duration::from_millis(50);
const LOOK_MAX_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after the first repair of a thing; it doubles up to the most.
const REPAIR_DELAY: Duration = Duration::from_millis(200);
/// That many repairs of one thing in a row are a fight.
const REPAIRS_IN_A_FIGHT: u32 = 5;

/// When to look: at once after a quiet time, and more and more seldom while disturbances go on.
#[derive(Debug)]
pub struct Pace {
    last: Option<Instant>,
    gap: Duration,
}

/// Puts right what is damaged at once, and more and more seldom what is damaged again and again; each thing
/// by itself.
#[derive(Debug)]
pub struct Backoff<K> {
    most: Duration,
    things: BTreeMap<K, RepairedThing>,
}

#[derive(Debug)]
struct RepairedThing {
    repairs: u32,
    last: Instant,
    pause: Duration,
}

/// Whether it is a thing's turn to be repaired.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RepairTurn {
    /// Now.
    Now {
        /// It was repaired several times of late.
        fight: bool,
        /// For the first time, or for the first time in a fight: that is worth telling.
        first: bool,
    },
    /// Not before this time.
    Later(Instant),
}

impl Default for Pace {
    fn default() -> Self {
        Self { last: None, gap: LOOK_MIN_INTERVAL }
    }
}

impl Pace {
    /// When to look because of a disturbance now.
    pub fn next(&mut self, now: Instant) -> Instant {
        let Some(last) = self.last else { return now };
        if now >= last + self.gap * 4 {
            self.gap = LOOK_MIN_INTERVAL;
        }
        (last + self.gap).max(now)
    }

    /// It was looked.
    pub fn looked(&mut self, now: Instant) {
        let soon = self.last.is_some_and(|last| now < last + self.gap * 4);
        self.gap = if soon { (self.gap * 2).min(LOOK_MAX_INTERVAL) } else { LOOK_MIN_INTERVAL };
        self.last = Some(now);
    }
}

impl<K: Ord + Clone> Backoff<K> {
    /// The same thing is repaired this often at the least.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        Self { most, things: BTreeMap::new() }
    }

    /// Whether it is a thing's turn; if so, it counts as repaired now.
    pub fn turn(&mut self, thing: &K, now: Instant) -> RepairTurn {
        let most = self.most;
        // What has been left alone for a while is forgotten.
        self.things.retain(|_, thing| now < thing.last + thing.pause + most * 2);
        let Some(known) = self.things.get_mut(thing) else {
            self.things.insert(
                thing.clone(),
                RepairedThing { repairs: 1, last: now, pause: REPAIR_DELAY.min(most) },
            );
            return RepairTurn::Now { fight: false, first: true };
        };
        if now < known.last + known.pause {
            return RepairTurn::Later(known.last + known.pause);
        }
        known.repairs += 1;
        (known.last, known.pause) = (now, (known.pause * 2).min(most));
        RepairTurn::Now {
            fight: known.repairs >= REPAIRS_IN_A_FIGHT,
            first: known.repairs == REPAIRS_IN_A_FIGHT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_comes_at_once_after_a_quiet_time_and_seldom_in_a_storm() {
        let start = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.next(start), start);
        pace.looked(start);
        let (mut now, mut looks) = (start, 0);
        // Disturbed all the time, for a minute.
        while now < start + Duration::from_secs(60) {
            now = pace.next(now);
            pace.looked(now);
            looks += 1;
        }
        assert!((25..45).contains(&looks), "{looks} looks in a minute");
        let quiet = now + LOOK_MAX_INTERVAL * 5;
        assert_eq!(pace.next(quiet), quiet);
    }

    #[test]
    fn what_is_damaged_again_and_again_is_put_right_ever_more_seldom_and_others_at_once() {
        let start = Instant::now();
        let mut backoff = Backoff::new(Duration::from_secs(5));
        let (mut now, mut repairs, mut told) = (start, 0, 0);
        while now < start + Duration::from_secs(60) {
            match backoff.turn(&"fought over", now) {
                RepairTurn::Now { fight, first } => {
                    repairs += 1;
                    told += u32::from(fight && first);
                }
                RepairTurn::Later(at) => now = at,
            }
        }
        assert!((12..22).contains(&repairs), "{repairs} repairs in a minute");
        assert_eq!(told, 1, "a fight is told once");
        assert_eq!(backoff.turn(&"another", now), RepairTurn::Now { fight: false, first: true });
        let later = now + Duration::from_secs(60);
        assert_eq!(backoff.turn(&"fought over", later), RepairTurn::Now { fight: false, first: true });
    }
}
