//! What was said in the status of each object, and what workers leave behind for the next pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use knit_api::{NetworkAttachment, NetworkAttachmentStatus};
use knit_types::sync::Locked;

use super::Item;
use super::pace::AttemptPace;
use super::work::{ReportedStatus, says_the_same};

/// What workers leave behind for the next pass.
#[derive(Debug, Default)]
pub(super) struct State {
    /// What was said last in the status of each object.
    pub(super) told: BTreeMap<Item, WrittenStatus>,
    /// When each may be tried again.
    pub(super) pace: BTreeMap<(bool, Item), AttemptPace>,
    /// Objects that have our finalizer, as far as we wrote it.
    pub(super) held: BTreeSet<Item>,
    /// Objects that we have let go, in this version: what comes of it has not arrived yet.
    pub(super) let_go: BTreeMap<Item, Option<String>>,
}

/// What was said in the status of an object, and what that said before: while it still does, ours has not
/// arrived. Whatever else it says was written by somebody else meanwhile.
#[derive(Debug)]
pub(super) struct WrittenStatus {
    pub(super) told: ReportedStatus,
    pub(super) before: Option<NetworkAttachmentStatus>,
}

// === impl State ===

impl State {
    /// Forgets what is known of a namespace's objects that are not there.
    pub(super) fn retain(&mut self, namespace: &str, exists: impl Fn(&Item) -> bool) {
        let first = Item { place: (namespace.to_owned(), String::new()), uid: None };
        let is_of = |item: &Item| item.place.0 == namespace;
        fn gone<'a, V: 'a>(
            items: impl Iterator<Item = (&'a Item, V)>,
            is_of: impl Fn(&Item) -> bool,
            exists: impl Fn(&Item) -> bool,
        ) -> Vec<Item> {
            let of = items.map(|(item, _)| item).take_while(|item| is_of(item));
            of.filter(|item| !exists(item)).cloned().collect()
        }
        for item in gone(self.told.range(first.clone()..), is_of, &exists) {
            self.told.remove(&item);
        }
        for item in gone(self.held.range(first.clone()..).map(|item| (item, ())), is_of, &exists) {
            self.held.remove(&item);
        }
        for item in gone(self.let_go.range(first.clone()..), is_of, &exists) {
            self.let_go.remove(&item);
        }
        let coming = self.pace.range((false, first)..(true, Item::default()));
        for item in gone(coming.map(|((_, item), pace)| (item, pace)), is_of, &exists) {
            self.pace.remove(&(false, item));
        }
    }
}

// === impl WrittenStatus ===

impl WrittenStatus {
    /// Whether an object says this, or will as soon as it arrives.
    pub(super) fn holds(&self, told: &ReportedStatus, object: &NetworkAttachment, node: &str) -> bool {
        self.told == *told
            && (object.status == self.before
                || object.status.as_ref().is_some_and(|status| says_the_same(status, &told.status(node))))
    }
}

pub(super) fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.locked()
}
