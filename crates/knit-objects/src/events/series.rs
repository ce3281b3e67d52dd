//! Events that repeat become one that counts. Pure; time comes in, writes go out.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use serde_json::json;

use super::{EventLimits, EventNote, Reporter};
use crate::key::Key;
use crate::write::Write;

/// Everything that was told lately.
#[derive(Debug)]
pub(super) struct Collector {
    reporter: Reporter,
    limits: EventLimits,
    series: HashMap<Identity, Series>,
    /// How much each object may still say.
    allowances: HashMap<String, Allowance>,
}

/// Two notes with the same identity are the same event.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Identity {
    object: String,
    warning: bool,
    reason: String,
    action: String,
    note: String,
}

#[derive(Debug)]
struct Series {
    name: String,
    note: EventNote,
    first: Timestamp,
    last: Timestamp,
    count: i32,
    /// The count that was written; nothing was if it is 0.
    written: i32,
    /// A write of it is under way.
    busy: bool,
}

/// A bucket of tokens, one per write.
#[derive(Debug)]
struct Allowance {
    tokens: f64,
    at: Timestamp,
}

/// A write that is due, and what it is about.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) write: Write,
    identity: Identity,
    count: i32,
}

// === impl Collector ===

impl Collector {
    pub(super) fn new(reporter: Reporter, limits: EventLimits) -> Self {
        Self { reporter, limits, series: HashMap::new(), allowances: HashMap::new() }
    }

    /// Something happened. `unique` makes the name of a new event differ from all others.
    pub(super) fn note(&mut self, note: EventNote, now: Timestamp, unique: u64) {
        self.forget(now);
        let identity = Identity::of(&note);
        let window = signed(self.limits.window);
        if let Some(series) = self.series.get_mut(&identity)
            && now.duration_since(series.last) <= window
        {
            series.count = series.count.saturating_add(1);
            series.last = now;
            return;
        }
        let subject = note.regarding.name.as_deref().unwrap_or("unknown");
        let short: String = subject.chars().take(200).collect();
        let series = Series {
            name: format!("{short}.{unique:016x}"),
            note,
            first: now,
            last: now,
            count: 1,
            written: 0,
            busy: false,
        };
        self.series.insert(identity, series);
    }

    /// What may be written now, and when to ask again if something must wait.
    pub(super) fn due(&mut self, now: Timestamp) -> (Vec<Due>, Option<Timestamp>) {
        let (mut writes, mut again) = (Vec::new(), None::<Timestamp>);
        for (identity, series) in &mut self.series {
            if series.busy || series.written == series.count {
                continue;
            }
            let allowance = self
                .allowances
                .entry(identity.object.clone())
                .or_insert_with(|| Allowance { tokens: f64::from(self.limits.burst), at: now });
            if let Some(wait) = allowance.take(&self.limits, now) {
                again = Some(again.map_or(wait, |a| a.min(wait)));
                continue;
            }
            series.busy = true;
            writes.push(Due {
                write: series.write(&self.reporter),
                identity: identity.clone(),
                count: series.count,
            });
        }
        writes.sort_by(|a, b| a.write.target().key.cmp(&b.write.target().key));
        (writes, again)
    }

    /// How a write of [`Self::due`] went.
    pub(super) fn outcome(&mut self, due: &Due, result: Outcome) {
        let Some(series) = self.series.get_mut(&due.identity) else { return };
        series.busy = false;
        match result {
            Outcome::Written => series.written = due.count,
            Outcome::TryAgain => {}
            Outcome::Drop => {
                self.series.remove(&due.identity);
            }
        }
    }

    /// Forgets what is over, and if too much is told, what was told the longest time ago.
    fn forget(&mut self, now: Timestamp) {
        let window = signed(self.limits.window);
        self.series.retain(|_, s| s.busy || s.written != s.count || now.duration_since(s.last) <= window);
        while self.series.len() >= self.limits.series {
            let oldest = self.series.iter().filter(|(_, s)| !s.busy).min_by_key(|(_, s)| s.last);
            let Some(identity) = oldest.map(|(identity, _)| identity.clone()) else { break };
            self.series.remove(&identity);
        }
        let told: std::collections::HashSet<&str> = self.series.keys().map(|i| i.object.as_str()).collect();
        let full = f64::from(self.limits.burst);
        let limits = self.limits;
        self.allowances.retain(|object, allowance| {
            allowance.refill(&limits, now);
            allowance.tokens < full || told.contains(object.as_str())
        });
    }
}

/// How a write went.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    Written,
    TryAgain,
    Drop,
}

// === impl Identity ===

impl Identity {
    fn of(note: &EventNote) -> Self {
        Self {
            object: subject(&note.regarding),
            warning: note.warning,
            reason: note.reason.clone(),
            action: note.action.clone(),
            note: note.note.clone(),
        }
    }
}

// === impl Series ===

impl Series {
    fn write(&self, reporter: &Reporter) -> Write {
        // An object of the cluster has its events in the namespace default.
        let namespace = self.note.regarding.namespace.clone().unwrap_or_else(|| "default".into());
        let series = (self.count > 1)
            .then_some(EventSeries { count: self.count, last_observed_time: MicroTime(self.last) });
        if self.written > 0 {
            let key = Key::namespaced(namespace, self.name.clone());
            return Write::merge::<Event>(key, json!({ "series": series }));
        }
        let event = Event {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(namespace),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(self.first)),
            reporting_controller: Some(reporter.controller.clone()),
            reporting_instance: Some(cut(&reporter.instance, 128)),
            action: Some(cut(&self.note.action, 128)),
            reason: Some(cut(&self.note.reason, 128)),
            regarding: Some(self.note.regarding.clone()),
            note: Some(cut(&self.note.note, 1024)),
            type_: Some(if self.note.warning { "Warning" } else { "Normal" }.into()),
            series,
            ..Event::default()
        };
        Write::create(&event)
    }
}

// === impl Allowance ===

impl Allowance {
    fn refill(&mut self, limits: &EventLimits, now: Timestamp) {
        let passed = now.duration_since(self.at).as_secs_f64().max(0.0);
        let gained = passed / limits.refill.as_secs_f64().max(0.001);
        self.tokens = (self.tokens + gained).min(f64::from(limits.burst));
        self.at = now;
    }

    /// Takes one token, or says when there will be one.
    fn take(&mut self, limits: &EventLimits, now: Timestamp) -> Option<Timestamp> {
        self.refill(limits, now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return None;
        }
        let wait = SignedDuration::from_secs_f64((1.0 - self.tokens) * limits.refill.as_secs_f64());
        Some(now.saturating_add(wait + SignedDuration::from_millis(1)).unwrap_or(Timestamp::MAX))
    }
}

fn subject(object: &ObjectReference) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}/{}/{}", part(&object.kind), part(&object.namespace), part(&object.name), part(&object.uid))
}

/// At most so many bytes, cut where a character ends.
fn cut(text: &str, most: usize) -> String {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

fn signed(duration: std::time::Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn collector(burst: u32) -> Collector {
        let limits = EventLimits {
            burst,
            refill: Duration::from_secs(60),
            window: Duration::from_secs(360),
            series: 100,
        };
        Collector::new(Reporter { controller: "knit.dev/node".into(), instance: "node-1".into() }, limits)
    }

    fn note(text: &str) -> EventNote {
        let regarding = ObjectReference {
            kind: Some("Pod".into()),
            namespace: Some("x".into()),
            name: Some("web".into()),
            uid: Some("1".into()),
            ..ObjectReference::default()
        };
        EventNote::warning(regarding, "AttachFailed", "Attach", text)
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).expect("a time")
    }

    fn write_all(collector: &mut Collector, now: Timestamp) -> Vec<String> {
        let (due, _) = collector.due(now);
        due.into_iter()
            .map(|due| {
                collector.outcome(&due, Outcome::Written);
                due.write.to_string()
            })
            .collect()
    }

    #[test]
    fn repeats_are_counted_in_one_event() {
        let mut collector = collector(10);
        collector.note(note("no address"), at(0), 1);
        assert_eq!(write_all(&mut collector, at(0)), ["create events.events.k8s.io x/web.0000000000000001"]);
        for second in 1..=5 {
            collector.note(note("no address"), at(second), 2);
        }
        let writes = write_all(&mut collector, at(5));
        assert_eq!(writes.len(), 1);
        assert!(writes[0].starts_with("patch events.events.k8s.io x/web.0000000000000001 "), "{writes:?}");
        assert!(writes[0].contains("\"count\":6"), "{writes:?}");
        assert!(write_all(&mut collector, at(6)).is_empty());
        // Another text is another event; the same one after a long silence begins again.
        collector.note(note("other"), at(7), 3);
        collector.note(note("no address"), at(1000), 4);
        assert_eq!(
            write_all(&mut collector, at(1000)),
            [
                "create events.events.k8s.io x/web.0000000000000003",
                "create events.events.k8s.io x/web.0000000000000004"
            ]
        );
    }

    #[test]
    fn one_object_cannot_flood_and_the_count_stays_right() {
        let mut collector = collector(2);
        for i in 0..5 {
            collector.note(note(&format!("text {i}")), at(0), i);
        }
        let (due, again) = collector.due(at(0));
        assert_eq!(due.len(), 2);
        let again = again.expect("a time");
        assert!(again > at(59) && again <= at(61), "{again}");
        for due in &due {
            collector.outcome(due, Outcome::Written);
        }
        assert_eq!(write_all(&mut collector, again).len(), 1);
        // Another object has its own allowance.
        let mut other = note("text");
        other.regarding.name = Some("db".into());
        collector.note(other, again, 9);
        assert_eq!(write_all(&mut collector, again).len(), 1);
    }

    #[test]
    fn what_could_not_be_written_is_tried_again_with_the_newer_count() {
        let mut collector = collector(10);
        collector.note(note("x"), at(0), 1);
        let (due, _) = collector.due(at(0));
        collector.note(note("x"), at(1), 2);
        assert!(collector.due(at(1)).0.is_empty());
        collector.outcome(&due[0], Outcome::TryAgain);
        let (due, _) = collector.due(at(2));
        assert_eq!(due.len(), 1);
        assert_eq!((due[0].write.verb(), due[0].count), ("create", 2));
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("aé", 3), "aé");
    }
}
