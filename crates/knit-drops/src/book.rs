//! The short list of what was dropped, with a share for each pod. Pure: time comes in.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};

use knit_types::NetworkName;

use crate::entry::{Dropped, Named, Subject};

/// How many entries one pod may have; its oldest makes way for a new one.
pub const ENTRIES_PER_POD: usize = 32;
/// How many pods the list has; the one that was quiet for longest makes way for a new one.
pub const PODS: usize = 512;
/// How often a line is handed to those who follow for the same entry.
const TELL_INTERVAL: SignedDuration = SignedDuration::from_secs(1);
/// After how long the same entry may be an event again.
const EVENT_INTERVAL: SignedDuration = SignedDuration::from_mins(10);
/// How many events one pod may have at once; one more after each [`POD_REFILL`].
const POD_EVENTS: u32 = 5;
const POD_REFILL: SignedDuration = SignedDuration::from_mins(5);
/// How many events all pods of the node may have at once; one more after each [`NODE_REFILL`].
const NODE_EVENTS: u32 = 60;
const NODE_REFILL: SignedDuration = SignedDuration::from_secs(10);

/// What was dropped lately.
#[derive(Debug)]
pub struct Book {
    pods: HashMap<Option<Subject>, Share>,
    events: Bucket,
}

/// What one pod has of the list.
#[derive(Debug)]
struct Share {
    entries: Vec<Entry>,
    last: Timestamp,
    events: Bucket,
    /// Packets seen, by Network and direction.
    seen: BTreeMap<(NetworkName, String), u64>,
}

#[derive(Debug)]
struct Entry {
    dropped: Dropped,
    told: Timestamp,
    event: Option<Timestamp>,
}

/// So many at once, and one more after a while.
#[derive(Debug)]
struct Bucket {
    left: u32,
    most: u32,
    refill: SignedDuration,
    since: Timestamp,
}

/// What is to be done about a packet that was noted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// What those who follow are told.
    pub tell: Option<Dropped>,
    /// What is said on the pod.
    pub event: Option<Dropped>,
}

// === impl Book ===

impl Book {
    /// Nothing was dropped yet.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self { pods: HashMap::new(), events: Bucket::new(NODE_EVENTS, NODE_REFILL, now) }
    }

    /// A packet was dropped.
    pub fn note(&mut self, named: Named, now: Timestamp) -> Noted {
        let Named { dropped, subject } = named;
        let accused = subject.is_some();
        if !self.pods.contains_key(&subject) && self.pods.len() >= PODS {
            let quiet = self.pods.iter().min_by_key(|(_, share)| share.last).map(|(key, _)| key.clone());
            quiet.and_then(|key| self.pods.remove(&key));
        }
        let share = self.pods.entry(subject).or_insert_with(|| Share::new(now));
        share.last = now;
        *share.seen.entry((dropped.network.clone(), dropped.direction.clone())).or_default() += 1;
        let (entry, tell) = share.enter(dropped, now);
        let mut noted = Noted { tell: tell.then(|| entry.dropped.clone()), event: None };
        let is_due = entry.event.is_none_or(|at| now.duration_since(at) >= EVENT_INTERVAL);
        // What policies allow by now is not worth a warning.
        let is_denied = !entry.dropped.policies.is_empty();
        let at = share.entries.len() - 1;
        if accused && is_due && is_denied && share.events.take(now) && self.events.take(now) {
            share.entries[at].event = Some(now);
            noted.event = Some(share.entries[at].dropped.clone());
        }
        noted
    }

    /// All entries, the one that was seen last at the end.
    #[must_use]
    pub fn recent(&self) -> Vec<Dropped> {
        let entries = self.pods.values().flat_map(|share| &share.entries);
        let mut all: Vec<Dropped> = entries.map(|entry| entry.dropped.clone()).collect();
        all.sort_by(|a, b| a.last.cmp(&b.last).then_with(|| a.message().cmp(&b.message())));
        all
    }

    /// What was seen, by pod and direction, in the text form of OpenMetrics without its end.
    #[must_use]
    pub fn metrics(&self) -> String {
        let mut rows: BTreeMap<[&str; 4], u64> = BTreeMap::new();
        for (subject, share) in &self.pods {
            let (namespace, pod) = subject.as_ref().map_or(("", ""), |s| (&*s.namespace, &*s.name));
            for ((network, direction), seen) in &share.seen {
                *rows.entry([namespace, pod, network, direction]).or_default() += seen;
            }
        }
        let mut text = String::from(
            "# HELP knit_policy_drops_seen Dropped packets sampled by the kernel, a few per second per \
             pod.\n# TYPE knit_policy_drops_seen counter\n",
        );
        // Names of Kubernetes objects need no escape.
        for ([namespace, pod, network, direction], seen) in rows {
            let _ = writeln!(
                text,
                "knit_policy_drops_seen_total{{namespace=\"{namespace}\",pod=\"{pod}\",network=\"{network}\",\
                 direction=\"{direction}\"}} {seen}"
            );
        }
        text
    }
}

// === impl Share ===

impl Share {
    fn new(now: Timestamp) -> Self {
        let events = Bucket::new(POD_EVENTS, POD_REFILL, now);
        Self { entries: Vec::new(), last: now, events, seen: BTreeMap::new() }
    }

    /// Its entry, moved to the end, and whether those who follow are told.
    fn enter(&mut self, dropped: Dropped, now: Timestamp) -> (&Entry, bool) {
        let found = self.entries.iter().position(|entry| entry.dropped.is_same(&dropped));
        let (entry, tell) = match found {
            Some(at) => {
                let mut entry = self.entries.remove(at);
                let (first, seen) = (entry.dropped.first, entry.dropped.seen);
                entry.dropped = Dropped { first, seen: seen.saturating_add(1), ..dropped };
                let tell = now.duration_since(entry.told) >= TELL_INTERVAL;
                if tell {
                    entry.told = now;
                }
                (entry, tell)
            }
            None => {
                if self.entries.len() >= ENTRIES_PER_POD {
                    self.entries.remove(0);
                }
                (Entry { dropped, told: now, event: None }, true)
            }
        };
        self.entries.push(entry);
        (&self.entries[self.entries.len() - 1], tell)
    }
}

// === impl Bucket ===

impl Bucket {
    fn new(most: u32, refill: SignedDuration, now: Timestamp) -> Self {
        Self { left: most, most, refill, since: now }
    }

    fn take(&mut self, now: Timestamp) -> bool {
        let passed = now.duration_since(self.since).as_secs() / self.refill.as_secs().max(1);
        if let Ok(more) = u32::try_from(passed)
            && more > 0
        {
            self.left = self.left.saturating_add(more).min(self.most);
            self.since = now;
        }
        let taken = self.left > 0;
        self.left = self.left.saturating_sub(1);
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::entry::End;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).expect("a time")
    }

    fn dropped(pod: &str, port: u16, now: Timestamp) -> Named {
        let end = |name: &str, last| End {
            name: Some(name.to_owned()),
            address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)),
        };
        let dropped = Dropped {
            first: now,
            last: now,
            seen: 1,
            network: "default".into(),
            direction: "egress".into(),
            from: end(&format!("shop/{pod}"), 1),
            to: end("shop/db", 2),
            protocol: "TCP".into(),
            port: Some(port),
            policies: vec!["NetworkPolicy shop/deny".into()],
            reason: "isolated by NetworkPolicy shop/deny, and no rule allows this".into(),
        };
        let subject = Subject { namespace: "shop".into(), name: pod.into(), uid: pod.into() };
        Named { dropped, subject: Some(subject) }
    }

    #[test]
    fn the_same_again_is_counted_and_told_once_a_second() {
        let mut book = Book::new(at(0));
        let first = book.note(dropped("web", 80, at(0)), at(0));
        assert!(first.tell.is_some() && first.event.is_some());
        assert_eq!(book.note(dropped("web", 80, at(0)), at(0)), Noted::default());
        let later = book.note(dropped("web", 80, at(2)), at(2));
        assert_eq!((later.tell.map(|d| d.seen), later.event), (Some(3), None));
        let recent = book.recent();
        assert_eq!((recent.len(), recent[0].seen), (1, 3));
        assert_eq!((recent[0].first, recent[0].last), (at(0), at(2)));
        // After a while it is worth an event again.
        assert!(book.note(dropped("web", 80, at(700)), at(700)).event.is_some());
    }

    #[test]
    fn a_pod_that_floods_takes_its_own_share_only() {
        let mut book = Book::new(at(0));
        book.note(dropped("quiet", 80, at(0)), at(0));
        let mut events = 0;
        for port in 0..5_000 {
            events += usize::from(book.note(dropped("loud", port, at(1)), at(1)).event.is_some());
        }
        assert_eq!(events, POD_EVENTS as usize, "events of one pod are limited");
        let recent = book.recent();
        assert_eq!(recent.len(), 1 + ENTRIES_PER_POD);
        assert!(recent.iter().any(|d| d.from.name.as_deref() == Some("shop/quiet")));
        // Others still get theirs.
        assert!(book.note(dropped("quiet", 81, at(2)), at(2)).event.is_some());
        assert!(book.metrics().contains("pod=\"loud\",network=\"default\",direction=\"egress\"} 5000"));
    }

    #[test]
    fn any_number_of_pods_stays_within_bounds() {
        let mut book = Book::new(at(0));
        let mut events = 0;
        for number in 0..2_000_i64 {
            let noted = book.note(dropped(&format!("pod-{number}"), 80, at(0)), at(number / 1_000));
            events += usize::from(noted.event.is_some());
        }
        assert_eq!(book.pods.len(), PODS);
        assert_eq!(events, NODE_EVENTS as usize, "events of one node are limited");
        assert!(book.recent().iter().any(|d| d.from.name.as_deref() == Some("shop/pod-1999")));
    }
}
