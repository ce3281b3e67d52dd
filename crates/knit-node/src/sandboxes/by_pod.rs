//! Records by the namespace and name of their pod, and the namespaces in which some have changed: whoever
//! looks for a pod's sandboxes does not read all records.

use std::collections::{BTreeMap, BTreeSet};

use knit_ipam::PodRef;
use knit_ledger::{Batch, Change, Entry, SandboxRecord};
use knit_runtime::SandboxId;

use super::books::Store;

/// The index.
#[derive(Debug, Default)]
pub(super) struct ByPod {
    sandboxes: BTreeMap<(String, String), BTreeSet<SandboxId>>,
    /// Namespaces of pods whose records have changed since somebody asked.
    touched: BTreeSet<String>,
}

/// What a batch does to the index.
#[derive(Debug, Default)]
pub(super) struct Moves(Vec<(SandboxId, Option<PodRef>, Option<PodRef>)>);

// === impl ByPod ===

impl ByPod {
    /// The index of everything that is recorded.
    pub(super) fn of(store: &dyn Store) -> Self {
        let mut index = Self::default();
        let records = store.entries().filter_map(Entry::sandbox);
        let moves = records.map(|record| (record.sandbox().clone(), None, record.pod().cloned()));
        index.carry_out(Moves(moves.collect()));
        index
    }

    /// What a batch would change.
    pub(super) fn moves(store: &dyn Store, batch: &Batch<Entry>) -> Moves {
        let known = |key: &str| store.get(key).and_then(Entry::sandbox);
        let change = |change: &Change<Entry>| {
            let (key, after): (&str, Option<&SandboxRecord>) = match change {
                Change::Put(entry) => (entry.sandbox()?.sandbox().as_str(), entry.sandbox()),
                Change::Remove(key) => (key, None),
            };
            let before = known(key);
            let sandbox = after.or(before)?.sandbox().clone();
            Some((
                sandbox,
                before.and_then(SandboxRecord::pod).cloned(),
                after.and_then(|r| r.pod().cloned()),
            ))
        };
        Moves(batch.changes().iter().filter_map(change).collect())
    }

    /// A batch was written.
    pub(super) fn carry_out(&mut self, Moves(moves): Moves) {
        for (sandbox, before, after) in moves {
            for pod in before.iter().chain(&after) {
                self.touched.insert(pod.namespace.clone());
            }
            let place = |pod: PodRef| (pod.namespace, pod.name);
            if let Some(place) = before.map(place)
                && let Some(sandboxes) = self.sandboxes.get_mut(&place)
            {
                sandboxes.remove(&sandbox);
                if sandboxes.is_empty() {
                    self.sandboxes.remove(&place);
                }
            }
            if let Some(place) = after.map(place) {
                self.sandboxes.entry(place).or_default().insert(sandbox);
            }
        }
    }

    /// The sandboxes of a pod.
    pub(super) fn of_pod(&self, namespace: &str, name: &str) -> impl Iterator<Item = &SandboxId> {
        self.sandboxes.get(&(namespace.to_owned(), name.to_owned())).into_iter().flatten()
    }

    /// The sandboxes of a namespace's pods.
    pub(super) fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = &SandboxId> {
        let from = (namespace.to_owned(), String::new());
        let of_namespace = self.sandboxes.range(from..).take_while(move |((of, _), _)| of == namespace);
        of_namespace.flat_map(|(_, sandboxes)| sandboxes)
    }

    /// The namespaces in which records have changed since the last call.
    pub(super) fn take_touched(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.touched)
    }

    /// The namespaces that have pods with records.
    pub(super) fn namespaces(&self) -> BTreeSet<String> {
        self.sandboxes.keys().map(|(namespace, _)| namespace.clone()).collect()
    }
}
