//! What the objects of a namespace come to: what is to be done for which of them, and by which worker.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use knit_api::{NetworkAttachment, conditions};
use knit_ledger::{AttachmentState, SandboxRecord};

use super::objects::{by_objects, find, has_finalizer, has_name, is_forgotten, is_of, uid_of};
use super::pace::RefusalFacts;
use super::state::lock;
use super::work::ReportedStatus;
use super::{Item, Job, Lane, ObjectKey, ObjectsDoor, PER_NAMESPACE, PER_POD, Task, Waiting};
use crate::netns;
use crate::request::Door;
use crate::world::{Labels, World};

impl ObjectsDoor {
    /// What is to be done for the objects of a namespace that are there.
    pub(super) fn look(
        &self,
        world: &World,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
        jobs: &mut BTreeMap<Lane, Vec<Job>>,
    ) {
        let records = self.records(objects);
        let mut waiting: BTreeMap<&str, Vec<Waiting<'_>>> = BTreeMap::new();
        let mut plugged: BTreeMap<&str, usize> = BTreeMap::new();
        let mut add = |place: &ObjectKey,
                       object: &Arc<NetworkAttachment>,
                       leaving: bool,
                       task: Task,
                       facts: RefusalFacts| {
            let item = Item { place: place.clone(), uid: uid_of(object) };
            let lane = Lane { pod: (place.0.clone(), object.spec.pod.clone()), leaving };
            jobs.entry(lane).or_default().push(Job { item, object: Some(Arc::clone(object)), task, facts });
        };
        for (place, object) in objects {
            let record = records.get(&(place.0.clone(), object.spec.pod.clone()));
            let own = record.and_then(|record| find(record, place, object));
            if object.metadata.deletion_timestamp.is_some() {
                if own.is_some()
                    || (self.is_held(place, object) && self.is_ours(world, place, object, record.is_some()))
                {
                    let sandbox = record.filter(|_| own.is_some()).map(|r| r.sandbox().clone());
                    add(place, object, true, Task::Leave(sandbox), RefusalFacts::default());
                }
                continue;
            }
            let told = match (record, own) {
                // What an earlier object of this name asked for goes first.
                (Some(record), None) if has_name(record, place) => continue,
                (Some(record), None) => {
                    waiting.entry(&place.0).or_default().push((place, object, record));
                    continue;
                }
                // The ledger was damaged, and forgot what it was made for.
                (Some(record), Some(own)) if is_forgotten(own) => {
                    *plugged.entry(&place.0).or_default() += 1;
                    let facts = self.facts(world, &place.0, record);
                    add(place, object, false, Task::Plug(record.runtime_pod()), facts);
                    continue;
                }
                (Some(_), Some(own)) => {
                    *plugged.entry(&place.0).or_default() += 1;
                    own.made().map(|attachment| ReportedStatus::attached(world, self.core.node(), attachment))
                }
                (None, _) => self.without_pod(world, place, object),
            };
            if let Some(told) = told
                && !self.was_told(place, object, &told)
            {
                add(place, object, false, Task::Tell(told), RefusalFacts::default());
            }
        }
        if !world.knows_primaries() {
            return;
        }
        for (namespace, mut objects) in waiting {
            // The oldest first, so that it is always the same ones that are too many.
            objects.sort_by_key(|(place, object, _)| (object.metadata.creation_timestamp.clone(), &place.1));
            let room = PER_NAMESPACE.saturating_sub(plugged.get(namespace).copied().unwrap_or_default());
            for (n, (place, object, record)) in objects.into_iter().enumerate() {
                let has = by_objects(record);
                let refusal = if n >= room {
                    Some(format!(
                        "namespace {namespace} has more than {PER_NAMESPACE} NetworkAttachments for pods of \
                         node {}: \
                         delete some of them",
                        self.core.node()
                    ))
                } else if has >= PER_POD {
                    Some(format!(
                        "pod {namespace}/{} already has {PER_POD} interfaces from NetworkAttachments: \
                        delete one of them",
                        object.spec.pod
                    ))
                } else {
                    None
                };
                let facts = self.facts(world, namespace, record);
                match refusal {
                    None => add(place, object, false, Task::Plug(record.runtime_pod()), facts),
                    Some(message) => {
                        let told =
                            ReportedStatus::Failed(conditions::network_attachment::REASON_REFUSED, message);
                        if !self.was_told(place, object, &told) {
                            add(place, object, false, Task::Tell(told), facts);
                        }
                    }
                }
            }
        }
    }

    /// What is to be unplugged because its object is gone, or another one has its name.
    pub(super) fn look_for_vanished(
        &self,
        namespace: &str,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
        jobs: &mut BTreeMap<Lane, Vec<Job>>,
    ) {
        let books = self.core.sandboxes().books();
        for record in books.records_in(namespace) {
            let (Some(pod), sandbox) = (record.pod(), record.sandbox()) else { continue };
            for entry in record.attachments() {
                // What is leaving already, the periodic pass takes away.
                if matches!(entry.state(), AttachmentState::Detaching(_)) {
                    continue;
                }
                let Door::Object(door) = &entry.details().door else { continue };
                let Some((namespace, name)) = door.name.split_once('/') else { continue };
                let place = (namespace.to_owned(), name.to_owned());
                let there = objects.get(&place);
                if there.is_some_and(|object| is_of(door, entry.plan(), &place, object)) {
                    continue;
                }
                let lane = Lane { pod: (pod.namespace.clone(), pod.name.clone()), leaving: true };
                let item = Item { place, uid: door.uid.clone() };
                let task = match there {
                    Some(_) => Task::Leave(Some(sandbox.clone())),
                    None => Task::LeaveUnseen(sandbox.clone()),
                };
                let job = Job { item, object: None, task, facts: RefusalFacts::default() };
                jobs.entry(lane).or_default().push(job);
            }
        }
    }

    /// The newest sandbox of each pod of this node that some object names.
    fn records(
        &self,
        objects: &BTreeMap<ObjectKey, Arc<NetworkAttachment>>,
    ) -> BTreeMap<ObjectKey, SandboxRecord> {
        let named: BTreeSet<(&str, &str)> =
            objects.iter().map(|(place, o)| (place.0.as_str(), o.spec.pod.as_str())).collect();
        let mut found: Vec<SandboxRecord> = {
            let books = self.core.sandboxes().books();
            let of_pod = |(namespace, name): (&str, &str)| -> Vec<SandboxRecord> {
                books.records_of(namespace, name).cloned().collect()
            };
            named.into_iter().flat_map(of_pod).collect()
        };
        found.retain(|record| !netns::is_gone(record.netns()));
        found.sort_by_key(|record| Reverse(record.created_at()));
        let mut newest = BTreeMap::new();
        for record in found {
            if let Some(pod) = record.pod() {
                newest.entry((pod.namespace.clone(), pod.name.clone())).or_insert(record);
            }
        }
        newest
    }

    /// Whether it is for this node to let an object go.
    fn is_ours(
        &self,
        world: &World,
        place: &ObjectKey,
        object: &NetworkAttachment,
        has_record: bool,
    ) -> bool {
        let node = self.core.node();
        has_record
            || object.status.as_ref().and_then(|s| s.node.as_deref()) == Some(node)
            || world.pods.contains_key(&(place.0.clone(), object.spec.pod.clone()))
    }

    /// Whether an object has our finalizer.
    fn is_held(&self, place: &ObjectKey, object: &NetworkAttachment) -> bool {
        let item = Item { place: place.clone(), uid: uid_of(object) };
        let state = lock(&self.state);
        let done =
            state.let_go.get(&item).is_some_and(|version| *version == object.metadata.resource_version);
        !done && (has_finalizer(object) || state.held.contains(&item))
    }

    /// What is said of an object whose pod has no sandbox here: it is another node's, or gone, or has no
    /// network of its own.
    fn without_pod(
        &self,
        world: &World,
        place: &ObjectKey,
        object: &NetworkAttachment,
    ) -> Option<ReportedStatus> {
        let message = match world.pods.get(&(place.0.clone(), object.spec.pod.clone())) {
            Some(pod) if pod.host_network => {
                "the pod uses its node's network (hostNetwork): only a pod with its own network can have \
                an additional one"
            }
            Some(_) => return None,
            None if object.status.as_ref().and_then(|s| s.node.as_deref()) == Some(self.core.node()) => {
                "the pod is gone"
            }
            None => return None,
        };
        Some(ReportedStatus::Failed(conditions::network_attachment::REASON_NO_POD, message.to_owned()))
    }

    /// Whether an object's status says this already.
    pub(super) fn was_told(
        &self,
        place: &ObjectKey,
        object: &NetworkAttachment,
        told: &ReportedStatus,
    ) -> bool {
        let item = Item { place: place.clone(), uid: uid_of(object) };
        let state = lock(&self.state);
        state.told.get(&item).is_some_and(|said| said.holds(told, object, self.core.node()))
    }

    /// What a refusal depends on.
    pub(super) fn facts(&self, world: &World, namespace: &str, record: &SandboxRecord) -> RefusalFacts {
        let labels: Option<Arc<Labels>> = world.namespaces.get(namespace).cloned();
        let has = record.attachments().iter().map(|a| {
            let plan = a.plan();
            (plan.interface.to_string(), plan.network.clone())
        });
        RefusalFacts { networks: self.seen.networks, labels, has: has.collect() }
    }
}
