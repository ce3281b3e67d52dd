//! What is told of which node, when, and at what cost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use proptest::prelude::*;

use super::plan::{Asked, Order, PER_NODE, Place, Say, Whereabouts};
use crate::rate::Bucket;

fn place(namespace: &str, name: &str) -> Place {
    (namespace.into(), name.into())
}

fn asked(pod: &str, created: i64) -> Asked {
    Asked {
        uid: format!("uid-{created}"),
        version: created.to_string(),
        pod: pod.into(),
        node: None,
        created: Timestamp::from_second(created).ok(),
        refused: false,
        leaving: false,
    }
}

/// Objects as the API has them, and a clock.
#[derive(Default)]
struct Api {
    known: Whereabouts,
    objects: BTreeMap<Place, Asked>,
    bucket: Bucket,
    now: Duration,
    writes: usize,
}

impl Api {
    fn put(&mut self, place: Place, asked: Asked) {
        self.objects.insert(place.clone(), asked.clone());
        self.known.set_object(place, Some(asked));
    }

    fn delete(&mut self, place: &Place) {
        self.objects.remove(place);
        self.known.set_object(place.clone(), None);
    }

    fn pod(&mut self, pod: &Place, node: Option<&str>) {
        self.known.set_pod(pod, node.map(Arc::from).as_ref());
    }

    fn orders(&mut self, most: usize) -> (Vec<Order>, Option<Duration>) {
        self.known.orders(most, &mut self.bucket, |node| node != "gone", self.now)
    }

    /// The API takes a write, if it is of this version.
    fn write(&mut self, order: &Order) -> bool {
        self.writes += 1;
        let there = self.objects.get_mut(&order.place).filter(|there| there.version == order.version);
        let Some(there) = there else { return false };
        match &order.what {
            Say::Node(node) => there.node = Some(Arc::clone(node)),
            Say::TooMany(_) => (there.node, there.refused) = (None, true),
        }
        there.version.push('+');
        true
    }

    /// Writes until nothing is left to be written; the objects that were written, in their order.
    fn settle(&mut self) -> Vec<String> {
        let mut written = Vec::new();
        for _ in 0..100_000 {
            let (orders, again) = self.orders(8);
            if orders.is_empty() {
                match again {
                    Some(again) => self.now = again,
                    None => return written,
                }
            }
            for order in orders {
                let done = self.write(&order);
                written.push(order.place.1.to_string());
                self.known.done(&order, done, self.now);
                if let Some(now) = self.objects.get(&order.place).cloned() {
                    self.known.set_object(order.place.clone(), Some(now));
                }
            }
        }
        panic!("there is always something to be written");
    }

    fn node(&self, place: &Place) -> Option<&str> {
        self.objects[place].node.as_deref()
    }
}

#[test]
fn an_object_is_told_the_node_of_its_pod_in_whatever_order_they_come() {
    let mut api = Api::default();
    let (first, second) = (place("shop", "first"), place("shop", "second"));
    api.put(first.clone(), asked("web", 1));
    assert!(api.settle().is_empty(), "its pod is not there, or on no node yet");
    api.pod(&place("shop", "web"), Some("n1"));
    api.put(second.clone(), asked("web", 2));
    assert_eq!(api.settle().len(), 2);
    assert_eq!((api.node(&first), api.node(&second)), (Some("n1"), Some("n1")));
    // Another pod of that name in another namespace is another pod.
    api.pod(&place("other", "web"), Some("n2"));
    assert!(api.settle().is_empty());
    // The pod goes: somebody may come back. It comes to another node.
    api.pod(&place("shop", "web"), None);
    assert!(api.settle().is_empty());
    api.pod(&place("shop", "web"), Some("n2"));
    assert_eq!(api.settle().len(), 2);
    assert_eq!((api.node(&first), api.node(&second)), (Some("n2"), Some("n2")));
    // What an agent or an earlier controller had said is put right.
    let wrong = Asked { node: Some("n9".into()), ..asked("web", 1) };
    api.put(first.clone(), wrong);
    api.settle();
    assert_eq!(api.node(&first), Some("n2"));
}

#[test]
fn an_object_of_a_node_that_is_gone_is_told_nothing() {
    let mut api = Api::default();
    api.put(place("shop", "a"), asked("web", 1));
    api.pod(&place("shop", "web"), Some("gone"));
    let (orders, again) = api.orders(8);
    assert!(orders.is_empty() && again.is_some(), "it is looked at later");
    api.pod(&place("shop", "web"), Some("n1"));
    api.settle();
    assert_eq!(api.node(&place("shop", "a")), Some("n1"));
}

#[test]
fn one_namespaces_ten_thousand_objects_delayed_another_ones_first() {
    let mut api = Api::default();
    api.pod(&place("evil", "web"), Some("n1"));
    for n in 0..10_000 {
        api.put(place("evil", &format!("x{n:05}")), asked("web", n));
    }
    // Some tokens are gone when somebody else comes.
    let (orders, _) = api.orders(8);
    for order in &orders {
        assert!(api.write(order));
        api.known.done(order, true, api.now);
    }
    api.pod(&place("shop", "web"), Some("n1"));
    api.put(place("shop", "good"), asked("web", 20_000));
    let (orders, _) = api.orders(8);
    let first: Vec<&str> = orders.iter().take(2).map(|order| &*order.place.1).collect();
    assert!(first.contains(&"good"), "its turn is the next one: {first:?}");
    for order in &orders {
        assert!(api.write(order));
        api.known.done(order, true, api.now);
        api.known.set_object(order.place.clone(), Some(api.objects[&order.place].clone()));
    }
    api.settle();
    assert_eq!(api.node(&place("shop", "good")), Some("n1"));
    // Of the others a node hears as many as its agent would take, and the rest is told once that it is too
    // much.
    let told =
        |api: &Api| api.objects.iter().filter(|((ns, _), o)| &**ns == "evil" && o.node.is_some()).count();
    assert_eq!(told(&api), PER_NODE);
    let writes = api.writes;
    assert!(writes <= 10_100, "one write for each object: {writes}");
    // A tenant that patches all of them all the time is no reason to write.
    for (place, mut object) in api.objects.clone() {
        object.version.push('p');
        api.put(place, object);
    }
    assert!(api.settle().is_empty());
    // One goes: the oldest that waits has its room.
    api.delete(&place("evil", "x00000"));
    assert_eq!(api.settle().len(), 1);
    assert_eq!(told(&api), PER_NODE);
    // A pod elsewhere has room of its own.
    api.pod(&place("evil", "web"), Some("n2"));
    api.settle();
    let on = |node: &str| api.objects.values().filter(|o| o.node.as_deref() == Some(node)).count();
    assert_eq!(on("n2"), PER_NODE, "n1 has {}", on("n1"));
}

#[test]
fn a_write_that_fails_is_tried_again_at_growing_intervals_and_holds_up_nobody() {
    let mut api = Api::default();
    for namespace in ["a", "b"] {
        api.pod(&place(namespace, "web"), Some("n1"));
        api.put(place(namespace, "x"), asked("web", 1));
    }
    let (mut tried, mut other) = (Vec::new(), 0);
    for _ in 0..1000 {
        let (orders, again) = api.orders(8);
        for order in &orders {
            let fails = &*order.place.0 == "a";
            if fails {
                tried.push(api.now.as_secs());
            } else {
                other += 1;
                assert!(api.write(order));
            }
            api.known.done(order, !fails, api.now);
            api.known.set_object(order.place.clone(), Some(api.objects[&order.place].clone()));
        }
        if let Some(again) = again.filter(|_| orders.is_empty()) {
            api.now = again;
        }
        if api.now > Duration::from_secs(200) {
            break;
        }
    }
    assert_eq!(tried, [0, 2, 6, 14, 30, 62, 122, 182]);
    assert_eq!(other, 1);
}

/// Those that named the node of an earlier pod were told so again and again, for as long as they were there.
#[test]
fn what_a_node_has_no_room_for_is_told_once_whatever_node_it_named() {
    let mut api = Api::default();
    api.pod(&place("evil", "web"), Some("n1"));
    let named = |letter: char, n: usize| place("evil", &format!("{letter}{n:03}"));
    for (n, letter) in [(0, 'z'), (1, 'a')] {
        for number in 0..PER_NODE {
            let created = i64::try_from(n * PER_NODE + number).expect("a number");
            api.put(named(letter, number), asked("web", created));
        }
        api.settle();
    }
    assert_eq!((api.node(&named('z', 0)), api.node(&named('a', 0))), (Some("n1"), None));
    // The pod comes to another node: those come first there that it had no room for here.
    api.pod(&place("evil", "web"), Some("n2"));
    let writes = api.writes;
    api.settle();
    assert!(api.writes <= writes + 2 * PER_NODE, "{} writes", api.writes - writes);
    let on = |node: Option<&str>| api.objects.values().filter(|o| o.node.as_deref() == node).count();
    assert_eq!((on(Some("n1")), on(Some("n2")), on(None)), (0, PER_NODE, PER_NODE));
    assert!(api.known.is_consistent());
}

/// Events that were late cost a second write of each object, which the API refused.
#[test]
fn a_write_whose_event_is_late_was_made_again() {
    let mut api = Api::default();
    let (object, pod) = (place("shop", "a"), place("shop", "web"));
    api.put(object.clone(), asked("web", 1));
    api.pod(&pod, Some("n1"));
    let (orders, _) = api.orders(8);
    let [order] = &orders[..] else { panic!("{orders:?}") };
    // Its pod comes to another node while it is being written.
    api.pod(&pod, Some("n2"));
    assert!(api.orders(8).0.is_empty(), "one write at a time");
    assert!(api.write(order));
    api.known.done(order, true, api.now);
    api.known.set_object(object.clone(), Some(api.objects[&object].clone()));
    assert!(api.orders(8).0.is_empty());
    api.now += Duration::from_secs(1);
    let (orders, _) = api.orders(8);
    let [order] = &orders[..] else { panic!("{orders:?}") };
    assert!(api.write(order));
    api.known.done(order, true, api.now);
    // Nobody has told of this one yet.
    api.now += Duration::from_secs(9);
    assert!(api.orders(8).0.is_empty());
    api.known.set_object(object.clone(), Some(api.objects[&object].clone()));
    assert!(api.settle().is_empty());
    assert_eq!((api.node(&object), api.writes), (Some("n2"), 2));
}

#[test]
fn the_watch_of_pods_follows_the_namespaces_that_have_objects() {
    let mut api = Api::default();
    for (namespace, name) in [("b", "x"), ("a", "x"), ("a", "y"), ("a-b", "z")] {
        api.put(place(namespace, name), asked("web", 1));
    }
    let names = |api: &Api| api.known.namespaces().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names(&api), ["a", "a-b", "b"]);
    api.delete(&place("a", "x"));
    assert!(api.known.has_namespace(&"a".into()));
    api.delete(&place("a", "y"));
    assert!(!api.known.has_namespace(&"a".into()));
    assert_eq!(names(&api), ["a-b", "b"]);
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Object(usize, usize, usize),
    Delete(usize, usize),
    Pod(usize, usize, Option<usize>),
    Write(usize, bool),
    Patch(usize, usize),
    Later(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0_usize..3, 0_usize..6, 0_usize..3).prop_map(|(n, o, p)| Happening::Object(n, o, p)),
        2 => (0_usize..3, 0_usize..6).prop_map(|(n, o)| Happening::Delete(n, o)),
        4 => (0_usize..3, 0_usize..3, prop::option::of(0_usize..3))
            .prop_map(|(n, p, on)| Happening::Pod(n, p, on)),
        6 => (1_usize..4, any::<bool>()).prop_map(|(most, works)| Happening::Write(most, works)),
        2 => (0_usize..3, 0_usize..6).prop_map(|(n, o)| Happening::Patch(n, o)),
        1 => (0_u64..5).prop_map(Happening::Later),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_each_object_ends_with_the_node_of_its_pod(
        happenings in prop::collection::vec(happening(), 0..150)
    ) {
        let (mut api, mut pods) = (Api::default(), BTreeMap::new());
        let mut clock = 0;
        for happening in happenings {
            clock += 1;
            let object = |n: usize, o: usize| place(&format!("ns{n}"), &format!("o{o}"));
            match happening {
                Happening::Object(n, o, p) => api.put(object(n, o), asked(&format!("p{p}"), clock)),
                Happening::Delete(n, o) => api.delete(&object(n, o)),
                Happening::Pod(n, p, node) => {
                    let pod = place(&format!("ns{n}"), &format!("p{p}"));
                    let node = node.map(|n| format!("n{n}"));
                    api.pod(&pod, node.as_deref());
                    match node {
                        Some(node) => drop(pods.insert(pod, node)),
                        None => drop(pods.remove(&pod)),
                    }
                }
                Happening::Write(most, works) => {
                    for order in api.orders(most).0 {
                        let done = works && api.write(&order);
                        api.known.done(&order, done, api.now);
                        if let Some(now) = api.objects.get(&order.place).cloned() {
                            api.known.set_object(order.place.clone(), Some(now));
                        }
                    }
                }
                Happening::Patch(n, o) => {
                    if let Some(mut known) = api.objects.get(&object(n, o)).cloned() {
                        known.version.push('p');
                        api.put(object(n, o), known);
                    }
                }
                Happening::Later(seconds) => api.now += Duration::from_secs(seconds),
            }
        }
        api.settle();
        for ((namespace, name), object) in &api.objects {
            if let Some(node) = pods.get(&(Arc::clone(namespace), Arc::clone(&object.pod))) {
                prop_assert_eq!(object.node.as_deref(), Some(node.as_str()), "{}/{}", namespace, name);
            }
        }
        prop_assert!(api.settle().is_empty());
        prop_assert!(api.known.is_consistent());
        for place in api.objects.keys().cloned().collect::<Vec<_>>() {
            api.delete(&place);
        }
        prop_assert!(api.known.is_empty(), "{:?}", api.known);
    }
}
