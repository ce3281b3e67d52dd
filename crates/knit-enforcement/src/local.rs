//! The pods of this node as policies see them: interfaces from the agent's own records, labels and named
//! ports from the pods' objects.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use knit_node::Core;
use knit_node::world::{PodPort, PodView, World};
use knit_policy::model::{NamedPort, Pod, PodKey};
use knit_types::sync::Locked;
use serde::{Deserialize, Serialize};

use crate::recorded::{Recorded, Strangers, by_pod, of_pod};

/// What a pod's object says, as long as one of its sandboxes is there: also after the object is gone, and in
/// the next run while the API is away.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub(crate) struct Facts {
    uid: Option<String>,
    /// The uid that the pod is recorded with: a static pod's mirror has another one. Earlier versions did not
    /// keep it.
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded: Option<String>,
    mirror: bool,
    labels: BTreeMap<String, String>,
    ports: Vec<PodPort>,
    created: i64,
}

/// The facts of the pods that have a sandbox here, by namespace and name: of each pod that has the name.
#[derive(Debug, Default)]
pub(crate) struct Remembered(Mutex<BTreeMap<(String, String), Vec<Facts>>>);

/// A pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Local {
    pub(crate) pod: Pod,
    /// Whether its labels are known.
    pub(crate) labels_known: bool,
}

/// What is recorded of one pod. Several have a name while one goes and another comes.
#[derive(Debug)]
struct OnePod<'a> {
    uid: Option<&'a str>,
    records: Vec<&'a Recorded>,
}

impl Facts {
    fn of(view: &PodView) -> Self {
        Self {
            uid: view.uid.clone(),
            recorded: None,
            mirror: view.mirror,
            labels: view.labels.clone(),
            ports: view.ports.clone(),
            created: view.created,
        }
    }

    /// Whether it says something of the pod that is recorded with this uid. What a static pod's mirror says,
    /// it says of that pod.
    fn is_about(&self, uid: Option<&str>) -> bool {
        self.mirror || self.uid.is_none() || uid.is_none_or(|uid| Some(uid) == self.uid.as_deref())
    }
}

impl<'a> OnePod<'a> {
    /// The pods that these records are of, the newest first. A record that does not say which of them is
    /// taken to be of the newest.
    fn all_of(records: &'a [Recorded]) -> Vec<Self> {
        let mut sorted: Vec<&Recorded> = records.iter().collect();
        sorted.sort_by_key(|record| std::cmp::Reverse(record.created_at));
        let mut pods: Vec<Self> = Vec::new();
        for record in sorted.iter().filter(|record| record.uid.is_some()) {
            let uid = record.uid.as_deref();
            match pods.iter_mut().find(|pod| pod.uid == uid) {
                Some(pod) => pod.records.push(record),
                None => pods.push(Self { uid, records: vec![record] }),
            }
        }
        for record in sorted.iter().filter(|record| record.uid.is_none()) {
            match pods.first_mut() {
                Some(newest) => newest.records.push(record),
                None => pods.push(Self { uid: None, records: vec![record] }),
            }
        }
        pods
    }

    /// What is remembered of it.
    fn remembered<'b>(&self, known: &'b [Facts]) -> Option<&'b Facts> {
        let recorded = |facts: &&Facts| facts.recorded.is_some() && facts.recorded.as_deref() == self.uid;
        let may_be = |facts: &&Facts| (facts.mirror || facts.recorded.is_none()) && facts.is_about(self.uid);
        known.iter().find(recorded).or_else(|| known.iter().find(may_be))
    }
}

impl Remembered {
    /// What is known from the last run.
    pub(crate) fn new(known: Vec<(String, String, Facts)>) -> Self {
        let mut all: BTreeMap<(String, String), Vec<Facts>> = BTreeMap::new();
        for (namespace, name, facts) in known {
            all.entry((namespace, name)).or_default().push(facts);
        }
        Self(Mutex::new(all))
    }

    /// All of it.
    pub(crate) fn all(&self) -> Vec<(String, String, Facts)> {
        let known = self.0.locked();
        let each = known.iter().flat_map(|((namespace, name), facts)| {
            facts.iter().map(|facts| (namespace.clone(), name.clone(), facts.clone()))
        });
        each.collect()
    }

    /// Whether the facts of every pod are known that has something recorded here.
    pub(crate) fn knows_all(&self, core: &Core) -> bool {
        let ((by_pod, _), known) = (by_pod(core), self.0.locked());
        by_pod.iter().all(|(key, records)| {
            let known = known.get(key).map(Vec::as_slice).unwrap_or_default();
            OnePod::all_of(records).iter().all(|pod| pod.remembered(known).is_some())
        })
    }

    /// The pods of this node that have a name, as they are recorded and known, the newest first.
    pub(crate) fn named(&self, core: &Core, world: &World, namespace: &str, name: &str) -> Vec<Local> {
        let records = of_pod(core, namespace, name);
        self.locals_of(core.node(), world, (namespace, name), &records)
    }

    /// All pods of this node, and where there is one of which nobody knows who it is.
    pub(crate) fn locals(&self, core: &Core, world: &World) -> (BTreeMap<PodKey, Pod>, Strangers) {
        let (by_pod, strangers) = by_pod(core);
        // While the API is away, the next sandbox of a pod is judged by what its last one was.
        if world.synced.pods {
            self.0.locked().retain(|key, _| by_pod.contains_key(key));
        }
        let each = by_pod.iter().flat_map(|((namespace, name), records)| {
            self.locals_of(core.node(), world, (namespace, name), records)
        });
        (each.map(|local| (local.pod.key.clone(), local.pod)).collect(), strangers)
    }

    fn locals_of(
        &self,
        node: &str,
        world: &World,
        (namespace, name): (&str, &str),
        records: &[Recorded],
    ) -> Vec<Local> {
        let key = (namespace.to_owned(), name.to_owned());
        let seen = world.pods.get(&key).map(|view| Facts::of(view));
        let mut all_known = self.0.locked();
        let known = all_known.entry(key.clone()).or_default();
        let mut locals = Vec::new();
        let mut of_each = Vec::new();
        for (place, pod) in OnePod::all_of(records).iter().enumerate() {
            let is_newest = place == 0;
            // Of an older pod, an object says only what it says by its uid.
            let about = |facts: &&Facts| match is_newest {
                true => facts.is_about(pod.uid),
                false => facts.uid.as_deref() == pod.uid,
            };
            let facts = seen.as_ref().filter(about).or_else(|| pod.remembered(known)).cloned();
            let facts = facts.map(|facts| Facts { recorded: pod.uid.map(str::to_owned), ..facts });
            of_each.extend(facts.clone());
            let labels_known = facts.is_some();
            // An older pod of which nothing is known any more was most likely made as its namesake is.
            let facts = facts.or_else(|| seen.clone().filter(|_| !is_newest)).unwrap_or_default();
            let plain = PodKey::new(namespace, name);
            let uid = pod.uid.map(str::to_owned).or(facts.uid).unwrap_or_default();
            let port = |port: &PodPort| NamedPort {
                name: port.name.as_str().into(),
                protocol: port.protocol,
                number: port.number,
            };
            let pod = Pod {
                key: if is_newest { plain } else { plain.of_older(uid.as_str().into()) },
                uid: uid.into(),
                created: facts.created,
                node: node.into(),
                // As a peer, it may have any label until they are.
                known_labels: (!labels_known).then(Arc::default),
                labels: facts.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
                ports: facts.ports.iter().map(port).collect(),
                attachments: pod.records.iter().flat_map(|r| r.attachments.iter().cloned()).collect(),
                host_network: false,
                // Whatever is said of it: its sandbox is there, and with it the address.
                finished: false,
            };
            locals.push(Local { pod, labels_known });
        }
        // While the API is away, the next sandbox of a pod is judged by what its last one was.
        if !world.synced.pods {
            let others = known.drain(..).filter(|old| of_each.iter().all(|facts| facts.uid != old.uid));
            let others: Vec<Facts> = others.collect();
            of_each.extend(others);
        }
        *known = of_each;
        if known.is_empty() {
            all_known.remove(&key);
        }
        locals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: &str, created_at: u64) -> Recorded {
        Recorded { uid: Some(uid.into()), created_at, attachments: Vec::new() }
    }

    #[test]
    fn a_pod_is_not_judged_by_the_labels_of_an_older_one_of_its_name() {
        let labels = BTreeMap::from([("app".to_owned(), "old".to_owned())]);
        let view = PodView { uid: Some("u1".into()), labels, ..PodView::default() };
        let key = ("shop".to_owned(), "web".to_owned());
        let pods = Arc::new(BTreeMap::from([(key, Arc::new(view))]));
        let world = World { pods, ..World::default() };
        let remembered = Remembered::default();
        // Its sandbox is still there when the new one comes, whose object has not arrived yet.
        for records in [[record("u1", 1), record("u2", 2)], [record("u2", 2), record("u1", 1)]] {
            let locals = remembered.locals_of("n", &world, ("shop", "web"), &records);
            assert!(!locals[0].labels_known);
            assert_eq!(&*locals[0].pod.uid, "u2");
            assert!(!locals[0].pod.knows_label(&"app".into()), "whether it has it is not known");
        }
        let only = [record("u1", 1)];
        assert!(remembered.locals_of("n", &world, ("shop", "web"), &only)[0].labels_known);
    }

    fn world(uid: &str, app: &str) -> World {
        let labels = BTreeMap::from([("app".to_owned(), app.to_owned())]);
        let view = PodView { uid: Some(uid.into()), labels, ..PodView::default() };
        let key = ("shop".to_owned(), "web".to_owned());
        let pods = Arc::new(BTreeMap::from([(key, Arc::new(view))]));
        let mut world = World { pods, ..World::default() };
        world.synced.pods = true;
        world
    }

    #[test]
    fn a_pod_whose_sandbox_still_runs_was_judged_by_the_labels_of_the_next_one_of_its_name() {
        let remembered = Remembered::default();
        let of = |world: &World, records: &[Recorded]| {
            let found = remembered.locals_of("n", world, ("shop", "web"), records);
            let each = found.into_iter().map(|local| {
                let app = local.pod.labels.get("app").map(str::to_owned);
                (local.pod.key.to_string(), app, local.labels_known)
            });
            each.collect::<Vec<_>>()
        };
        let app = |name: &str| Some(name.to_owned());
        let (first, second) = (record("u1", 1), record("u2", 2));
        assert_eq!(
            of(&world("u1", "old"), std::slice::from_ref(&first)),
            [("shop/web".into(), app("old"), true)]
        );
        let both = [first.clone(), second.clone()];
        let old = ("shop/web (uid u1)".to_owned(), app("old"), true);
        // It was deleted by force; the next one is on this node, too, and its object comes later.
        let none = World { synced: world("", "").synced, ..World::default() };
        assert_eq!(of(&none, &both), [("shop/web".into(), None, false), old.clone()]);
        let known = of(&world("u2", "new"), &both);
        assert_eq!(known, [("shop/web".into(), app("new"), true), old]);
        // The next agent knows both.
        let next = Remembered::new(remembered.all());
        assert_eq!(next.locals_of("n", &World::default(), ("shop", "web"), &both).len(), 2);
        assert_eq!(next.all(), remembered.all());
        assert_eq!(of(&world("u2", "new"), &[second]), [("shop/web".into(), app("new"), true)]);
        assert_eq!(remembered.all().len(), 1, "what is gone is forgotten");
    }
}
