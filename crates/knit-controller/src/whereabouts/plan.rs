//! Which objects are to be told their node: pure, and by event. Time and tokens come from the caller.
//!
//! A namespace with ten thousand objects costs what it changes, and waits for itself: namespaces take turns,
//! and a node is told of no more objects of one namespace than its agent would work on.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::rate::{self, Bucket};

/// How many objects of one namespace a node is told of: as many as an agent works on.
pub(super) const PER_NODE: usize = 256;
/// The shortest time between two writes of one object, and the first pause after one that failed.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the event of a write that was made may take. A controller that is behind must not write
/// everything twice.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause after a write that failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// When an object whose pod is on a node that is not there is looked at again.
const NO_NODE_DELAY: Duration = Duration::from_secs(30);

/// A namespace and a name: of an object, or of a pod.
pub(super) type Place = (Arc<str>, Arc<str>);

/// What counts of a user's NetworkAttachment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Asked {
    pub(super) uid: String,
    /// The version that says this: users change labels and annotations as often as they like.
    pub(super) version: String,
    /// The pod that it is for, in its namespace.
    pub(super) pod: Arc<str>,
    /// The node that it names.
    pub(super) node: Option<Arc<str>>,
    pub(super) created: Option<Timestamp>,
    /// It says that it was refused, and names no node.
    pub(super) refused: bool,
    /// It is on its way out, and no agent holds it.
    pub(super) leaving: bool,
}

/// One write that is to be made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Order {
    pub(super) place: Place,
    pub(super) uid: String,
    /// Only to this version: what is asked for in another one may be something else.
    pub(super) version: String,
    pub(super) what: Say,
}

/// What is to be said.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Say {
    /// It is for this node.
    Node(Arc<str>),
    /// This node has enough of its namespace; it is for none.
    TooMany(Arc<str>),
}

/// Objects and pods, and what of them is not settled.
#[derive(Debug, Default)]
pub(super) struct Whereabouts {
    objects: BTreeMap<Place, Asked>,
    /// The names of the objects for each pod.
    of_pod: BTreeMap<Place, BTreeSet<Arc<str>>>,
    /// The nodes of pods.
    pods: BTreeMap<Place, Arc<str>>,
    /// The node that each object names, or is being told.
    told: BTreeMap<Place, Arc<str>>,
    /// How many objects of a namespace are told each node.
    counts: BTreeMap<Place, usize>,
    /// Objects for which their node has no room, by their namespace and that node: the oldest comes first.
    too_many: BTreeMap<Place, BTreeSet<Age>>,
    /// Objects that are to be looked at, by namespace.
    due: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// The namespace whose turn was last.
    last: Option<Arc<str>>,
    /// When an object may be written again, and how often that failed in a row.
    pace: BTreeMap<Place, (Duration, u32)>,
    /// Objects that are to be looked at later: in the order of time, and when each is.
    later: BTreeSet<(Duration, Place)>,
    later_at: BTreeMap<Place, Duration>,
    writing: BTreeSet<Place>,
    /// Those of them that were to be looked at meanwhile.
    missed: BTreeSet<Place>,
}

type Age = (Option<Timestamp>, Arc<str>);

// === impl Asked ===

impl Asked {
    fn says_the_same(&self, other: &Self) -> bool {
        let Self { version: _, uid, pod, node, created, refused, leaving } = self;
        (uid, pod, node) == (&other.uid, &other.pod, &other.node)
            && (created, refused, leaving) == (&other.created, &other.refused, &other.leaving)
    }
}

// === impl Whereabouts ===

impl Whereabouts {
    /// An object is as this says, or gone.
    pub(super) fn set_object(&mut self, place: Place, asked: Option<Asked>) {
        if let (Some(known), Some(asked)) = (self.objects.get_mut(&place), &asked)
            && known.says_the_same(asked)
        {
            known.version.clone_from(&asked.version);
            return;
        }
        if let Some(before) = self.objects.remove(&place) {
            self.leave(&place, &before);
        }
        match asked {
            Some(asked) => {
                let names = self.of_pod.entry((Arc::clone(&place.0), Arc::clone(&asked.pod))).or_default();
                names.insert(Arc::clone(&place.1));
                match &asked.node {
                    Some(node) => self.count(&place, Arc::clone(node)),
                    // What is being written does not show yet.
                    None if self.writing.contains(&place) => {}
                    None => self.discount(&place),
                }
                self.objects.insert(place.clone(), asked);
                self.look_at(&place);
            }
            None => {
                self.discount(&place);
                self.settle(&place);
                self.pace.remove(&place);
                if let Some(at) = self.later_at.remove(&place) {
                    self.later.remove(&(at, place));
                }
            }
        }
    }

    /// A pod is on this node, or on none.
    pub(super) fn set_pod(&mut self, pod: &Place, node: Option<&Arc<str>>) {
        let before = match node {
            Some(node) => self.pods.insert(pod.clone(), Arc::clone(node)),
            None => self.pods.remove(pod),
        };
        if before.as_ref() == node {
            return;
        }
        for name in self.of_pod.get(pod).cloned().unwrap_or_default() {
            let place = (Arc::clone(&pod.0), name);
            if let Some(before) = &before {
                self.wait_no_more(&place, before);
            }
            // What the objects of a pod that is gone name stays, until there is another pod of that name.
            if node.is_some() {
                self.look_at(&place);
            }
        }
    }

    /// Forgets the pods of a namespace that nobody follows any more.
    pub(super) fn forget_pods(&mut self, is_followed: impl Fn(&str) -> bool) {
        self.pods.retain(|(namespace, _), _| is_followed(namespace));
    }

    /// The pods that are known, of all namespaces or of one.
    pub(super) fn pods(&self, namespace: Option<&str>) -> Vec<(Place, Arc<str>)> {
        let of_namespace = |((known, _), _): &(&Place, &Arc<str>)| namespace.is_none_or(|n| **known == *n);
        let all = self.pods.iter().filter(of_namespace);
        all.map(|(pod, node)| (pod.clone(), Arc::clone(node))).collect()
    }

    /// Whether a namespace has objects.
    pub(super) fn has_namespace(&self, namespace: &Arc<str>) -> bool {
        let begin = (Arc::clone(namespace), Arc::from(""));
        self.objects.range(begin..).next().is_some_and(|((found, _), _)| found == namespace)
    }

    /// The namespaces that have objects.
    pub(super) fn namespaces(&self) -> BTreeSet<Arc<str>> {
        let mut found = BTreeSet::new();
        let mut next = self.objects.keys().next();
        while let Some((namespace, _)) = next {
            found.insert(Arc::clone(namespace));
            // No name begins with this.
            let end = (Arc::clone(namespace), Arc::from("\u{10ffff}"));
            next =
                self.objects.range((Bound::Excluded(end), Bound::Unbounded)).next().map(|(place, _)| place);
        }
        found
    }

    /// What is to be written now, at most so much, and when there may be more.
    pub(super) fn orders(
        &mut self,
        most: usize,
        bucket: &mut Bucket,
        is_node: impl Fn(&str) -> bool,
        now: Duration,
    ) -> (Vec<Order>, Option<Duration>) {
        while let Some((at, place)) = self.later.first().cloned().filter(|(at, _)| *at <= now) {
            self.later_at.remove(&place);
            self.look_at(&place);
            self.later.remove(&(at, place));
        }
        let mut orders = Vec::new();
        while orders.len() < most {
            let Some((namespace, name)) = self.next_due() else { break };
            let place = (namespace, name);
            let Some(order) = self.judge(&place, &is_node, now) else {
                self.settle(&place);
                continue;
            };
            if let Err(next) = bucket.take(rate::ATTACHMENTS, now) {
                let again = self.later.first().map_or(next, |(at, _)| next.min(*at));
                return (orders, Some(again));
            }
            self.last = Some(Arc::clone(&place.0));
            self.settle(&place);
            self.writing.insert(place.clone());
            if let Say::Node(node) = &order.what {
                // Counted at once: those that come next find less room.
                self.count(&place, Arc::clone(node));
            }
            orders.push(order);
        }
        (orders, self.later.first().map(|(at, _)| *at))
    }

    /// A write was made, or failed. What it says comes back as an event of the object.
    pub(super) fn done(&mut self, order: &Order, written: bool, now: Duration) {
        self.writing.remove(&order.place);
        let missed = self.missed.remove(&order.place);
        let asked = self.objects.get(&order.place);
        let (is_there, is_it) = (asked.is_some(), asked.is_some_and(|asked| asked.uid == order.uid));
        match order.what {
            // It was counted before it was written.
            Say::Node(_) if is_it && written => {}
            Say::TooMany(_) if is_it && written => self.discount(&order.place),
            Say::Node(_) | Say::TooMany(_) => match asked.and_then(|asked| asked.node.clone()) {
                Some(node) => self.count(&order.place, node),
                None => self.discount(&order.place),
            },
        }
        if !is_it {
            // Another one has its name by now.
            if is_there {
                self.look_at(&order.place);
            }
            return;
        }
        let before = self.pace.get(&order.place).map_or(0, |(_, failures)| *failures);
        let failures = if written { 0 } else { before.saturating_add(1) };
        let pause = WRITE_INTERVAL.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE);
        let next = now.saturating_add(pause);
        self.pace.insert(order.place.clone(), (next, failures));
        // If its event does not come, or says something else, it is written again.
        let settles = written && !missed;
        self.look_later(&order.place, if settles { now.saturating_add(EVENT_TIMEOUT) } else { next });
    }

    /// What is to be written about an object; nothing if it is settled for now.
    fn judge(&mut self, place: &Place, is_node: &impl Fn(&str) -> bool, now: Duration) -> Option<Order> {
        let asked = self.objects.get(place)?.clone();
        // Its end is waited for, and it is looked at again.
        if self.writing.contains(place) {
            self.missed.insert(place.clone());
            return None;
        }
        if asked.leaving {
            return None;
        }
        let node = Arc::clone(self.pods.get(&(Arc::clone(&place.0), Arc::clone(&asked.pod)))?);
        let order = |what| {
            Some(Order { place: place.clone(), uid: asked.uid.clone(), version: asked.version.clone(), what })
        };
        if asked.node.as_ref() == Some(&node) {
            return None;
        }
        if let Some((at, _)) = self.pace.get(place).filter(|(at, _)| *at > now) {
            let at = *at;
            self.look_later(place, at);
            return None;
        }
        if !is_node(&node) {
            self.look_later(place, now.saturating_add(NO_NODE_DELAY));
            return None;
        }
        let there = (Arc::clone(&place.0), Arc::clone(&node));
        let age = (asked.created, Arc::clone(&place.1));
        if self.counts.get(&there).is_some_and(|count| *count >= PER_NODE) {
            self.too_many.entry(there).or_default().insert(age);
            return if asked.refused { None } else { order(Say::TooMany(node)) };
        }
        order(Say::Node(node))
    }

    fn look_at(&mut self, place: &Place) {
        self.due.entry(Arc::clone(&place.0)).or_default().insert(Arc::clone(&place.1));
    }

    fn settle(&mut self, (namespace, name): &Place) {
        if let Some(due) = self.due.get_mut(namespace) {
            due.remove(name);
            if due.is_empty() {
                self.due.remove(namespace);
            }
        }
    }

    /// One object of the namespace whose turn it is.
    fn next_due(&self) -> Option<Place> {
        let after = self.last.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let mut behind = self.due.range((after, Bound::Unbounded));
        let (namespace, names) = behind.next().or_else(|| self.due.iter().next())?;
        Some((Arc::clone(namespace), Arc::clone(names.first()?)))
    }

    fn look_later(&mut self, place: &Place, at: Duration) {
        if self.later_at.get(place).is_some_and(|known| *known <= at) {
            return;
        }
        if let Some(known) = self.later_at.insert(place.clone(), at) {
            self.later.remove(&(known, place.clone()));
        }
        self.later.insert((at, place.clone()));
    }

    fn count(&mut self, place: &Place, node: Arc<str>) {
        if self.told.get(place) == Some(&node) {
            return;
        }
        self.discount(place);
        *self.counts.entry((Arc::clone(&place.0), Arc::clone(&node))).or_default() += 1;
        self.told.insert(place.clone(), node);
    }

    /// An object names its node no more: the one that waits longest for room there may have it.
    fn discount(&mut self, place: &Place) {
        let Some(node) = self.told.remove(place) else { return };
        let there = (Arc::clone(&place.0), node);
        if let Some(count) = self.counts.get_mut(&there) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&there);
            }
        }
        let Some(waiting) = self.too_many.get_mut(&there) else { return };
        let first = waiting.pop_first();
        if waiting.is_empty() {
            self.too_many.remove(&there);
        }
        if let Some((_, name)) = first {
            self.look_at(&(there.0, name));
        }
    }

    /// Takes an object out of what is looked up by its pod.
    fn leave(&mut self, place: &Place, before: &Asked) {
        let pod = (Arc::clone(&place.0), Arc::clone(&before.pod));
        if let Some(names) = self.of_pod.get_mut(&pod) {
            names.remove(&place.1);
            if names.is_empty() {
                self.of_pod.remove(&pod);
            }
        }
        if let Some(node) = self.pods.get(&pod).cloned() {
            self.wait_no_more_as(place, before.created, &node);
        }
    }

    /// An object waits for room on this node no more.
    fn wait_no_more(&mut self, place: &Place, node: &Arc<str>) {
        let created = self.objects.get(place).and_then(|asked| asked.created);
        self.wait_no_more_as(place, created, node);
    }

    fn wait_no_more_as(&mut self, place: &Place, created: Option<Timestamp>, node: &Arc<str>) {
        let there = (Arc::clone(&place.0), Arc::clone(node));
        if let Some(waiting) = self.too_many.get_mut(&there) {
            waiting.remove(&(created, Arc::clone(&place.1)));
            if waiting.is_empty() {
                self.too_many.remove(&there);
            }
        }
    }
}

#[cfg(test)]
impl Whereabouts {
    /// Whether what is counted is what objects say.
    pub(super) fn is_consistent(&self) -> bool {
        let mut counts = BTreeMap::<Place, usize>::new();
        for (place, asked) in &self.objects {
            if let Some(node) = &asked.node {
                *counts.entry((Arc::clone(&place.0), Arc::clone(node))).or_default() += 1;
            }
        }
        counts == self.counts && self.writing.is_empty() && self.due.is_empty()
    }

    /// Whether nothing of any object is left.
    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
            && self.of_pod.is_empty()
            && self.told.is_empty()
            && self.counts.is_empty()
            && self.too_many.is_empty()
            && self.due.is_empty()
            && self.pace.is_empty()
            && self.later.is_empty()
            && self.later_at.is_empty()
            && self.writing.is_empty()
            && self.missed.is_empty()
    }
}
