//! The pods of this node as policies see them: interfaces from the agent's own records, labels and named
//! ports from the pods' objects.

use std::collections::BTreeMap;
use std::sync::Mutex;

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
    mirror: bool,
    labels: BTreeMap<String, String>,
    ports: Vec<PodPort>,
    created: i64,
}

/// The facts of the pods that have a sandbox here, by namespace and name.
#[derive(Debug, Default)]
pub(crate) struct Remembered(Mutex<BTreeMap<(String, String), Facts>>);

/// A pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Local {
    pub(crate) pod: Pod,
    /// Whether its labels are known.
    pub(crate) labels_known: bool,
}

impl Facts {
    fn of(view: &PodView) -> Self {
        Self {
            uid: view.uid.clone(),
            mirror: view.mirror,
            labels: view.labels.clone(),
            ports: view.ports.clone(),
            created: view.created,
        }
    }

    /// Whether it says something of the pod that these records are of: of the newest, since a sandbox of an
    /// older pod of that name may still be there, and its labels are not those of the pod that starts. What a
    /// static pod's mirror says, it says of that pod.
    fn is_about(&self, records: &[Recorded]) -> bool {
        let newest = newest(records).and_then(|record| record.uid.as_ref());
        self.mirror || self.uid.is_none() || newest.is_none_or(|uid| Some(uid) == self.uid.as_ref())
    }
}

impl Remembered {
    /// What is known from the last run.
    pub(crate) fn new(known: BTreeMap<(String, String), Facts>) -> Self {
        Self(Mutex::new(known))
    }

    /// All of it.
    pub(crate) fn all(&self) -> BTreeMap<(String, String), Facts> {
        self.0.locked().clone()
    }

    /// Whether the facts of every pod are known that has something recorded here.
    pub(crate) fn knows_all(&self, core: &Core) -> bool {
        let ((by_pod, _), known) = (by_pod(core), self.0.locked());
        by_pod.iter().all(|(key, records)| known.get(key).is_some_and(|facts| facts.is_about(records)))
    }

    /// A pod of this node as it is recorded and known; none if nothing is recorded of it.
    pub(crate) fn local(&self, core: &Core, world: &World, namespace: &str, name: &str) -> Option<Local> {
        let records = of_pod(core, namespace, name);
        self.local_of(core.node(), world, (namespace, name), &records)
    }

    /// All pods of this node, and where there is one of which nobody knows who it is.
    pub(crate) fn locals(&self, core: &Core, world: &World) -> (BTreeMap<PodKey, Pod>, Strangers) {
        let (by_pod, strangers) = by_pod(core);
        // While the API is away, the next sandbox of a pod is judged by what its last one was.
        if world.synced.pods {
            self.0.locked().retain(|key, _| by_pod.contains_key(key));
        }
        let each = by_pod.iter().filter_map(|((namespace, name), records)| {
            self.local_of(core.node(), world, (namespace, name), records)
        });
        (each.map(|local| (local.pod.key.clone(), local.pod)).collect(), strangers)
    }

    fn local_of(
        &self,
        node: &str,
        world: &World,
        (namespace, name): (&str, &str),
        records: &[Recorded],
    ) -> Option<Local> {
        let key = (namespace.to_owned(), name.to_owned());
        let mut remembered = self.0.locked();
        if records.is_empty() {
            if world.synced.pods {
                remembered.remove(&key);
            }
            return None;
        }
        let seen = world.pods.get(&key).map(|view| Facts::of(view)).filter(|facts| facts.is_about(records));
        let facts = match seen {
            Some(seen) => {
                remembered.insert(key, seen.clone());
                Some(seen)
            }
            None => remembered.get(&key).filter(|facts| facts.is_about(records)).cloned(),
        };
        drop(remembered);
        let labels_known = facts.is_some();
        let facts = facts.unwrap_or_default();
        let uid = newest(records).and_then(|record| record.uid.clone()).or(facts.uid);
        let port = |port: &PodPort| NamedPort {
            name: port.name.as_str().into(),
            protocol: port.protocol,
            number: port.number,
        };
        let pod = Pod {
            uid: uid.unwrap_or_default().into(),
            created: facts.created,
            node: node.into(),
            labels: facts.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
            ports: facts.ports.iter().map(port).collect(),
            attachments: records.iter().flat_map(|record| record.attachments.iter().cloned()).collect(),
            host_network: false,
            // Whatever is said of it: its sandbox is there, and with it the address.
            finished: false,
            ..Pod::new(namespace, name)
        };
        Some(Local { pod, labels_known })
    }
}

fn newest(records: &[Recorded]) -> Option<&Recorded> {
    records.iter().max_by_key(|record| record.created_at)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
            let local = remembered.local_of("n", &world, ("shop", "web"), &records).expect("recorded");
            assert!(!local.labels_known);
            assert_eq!(&*local.pod.uid, "u2");
        }
        let only = [record("u1", 1)];
        assert!(remembered.local_of("n", &world, ("shop", "web"), &only).expect("recorded").labels_known);
    }
}
