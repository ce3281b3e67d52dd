//! Classes of peers, each with the answers that its members share.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::atoms::{AtomId, PeerKey};
use super::element::Class;
use crate::model::{Family, Protocol};

/// What the members of a class have in common. Families are apart, because the packet filter's sets are.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClassKey {
    pub(super) family: Family,
    pub(super) peer: PeerKey,
    /// For the address of a cluster service: its ports, each with who is judged at which port in its place
    /// (rule 38).
    pub(super) services: Box<[ServicePort]>,
}

/// One port of a cluster service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ServicePort {
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    pub(super) endpoints: Box<[(PeerKey, u16)]>,
}

/// All classes that have members.
#[derive(Debug)]
pub(super) struct Classes {
    by_key: HashMap<ClassKey, Class>,
    known: BTreeMap<Class, (ClassKey, usize)>,
    free: BTreeSet<u32>,
    /// Given up since the changes were last taken: a packet that is judged while a batch is carried out must
    /// not find another class under the number that it has in hand.
    given_up: Vec<u32>,
    next: u32,
}

// === impl ClassKey ===

impl ClassKey {
    pub(super) fn atoms(&self) -> impl Iterator<Item = AtomId> + '_ {
        let endpoints =
            self.services.iter().flat_map(|s| s.endpoints.iter().flat_map(|(key, _)| key.atoms()));
        self.peer.atoms().chain(endpoints)
    }
}

// === impl Classes ===

impl Default for Classes {
    fn default() -> Self {
        Self {
            by_key: HashMap::new(),
            known: BTreeMap::new(),
            free: BTreeSet::new(),
            given_up: Vec::new(),
            next: Class::FIRST,
        }
    }
}

impl Classes {
    pub(super) fn get(&self, class: Class) -> Option<&ClassKey> {
        self.known.get(&class).map(|(key, _)| key)
    }

    pub(super) fn find(&self, key: &ClassKey) -> Option<Class> {
        self.by_key.get(key).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Class, &ClassKey)> {
        self.known.iter().map(|(class, (key, _))| (*class, key))
    }

    pub(super) fn members(&self, class: Class) -> usize {
        self.known.get(&class).map_or(0, |(_, members)| *members)
    }

    /// One member more. A class that was not there is told of in `touched`.
    pub(super) fn join(&mut self, key: ClassKey, touched: &mut BTreeSet<Class>) -> Class {
        if let Some(class) = self.by_key.get(&key) {
            if let Some((_, members)) = self.known.get_mut(class) {
                *members += 1;
            }
            return *class;
        }
        let class = Class(self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        }));
        self.by_key.insert(key.clone(), class);
        self.known.insert(class, (key, 1));
        touched.insert(class);
        class
    }

    /// One member less.
    pub(super) fn leave(&mut self, class: Class, touched: &mut BTreeSet<Class>) {
        let Some((_, members)) = self.known.get_mut(&class) else { return };
        *members -= 1;
        if *members == 0
            && let Some((key, _)) = self.known.remove(&class)
        {
            self.by_key.remove(&key);
            self.given_up.push(class.0);
            touched.insert(class);
        }
    }

    /// The changes were taken: numbers that were given up may be others' from now on.
    pub(super) fn taken(&mut self) {
        self.free.extend(self.given_up.drain(..));
    }

    /// All members have these answers now, and no other class has: the number stays, and with it every
    /// member's element.
    pub(super) fn rename(&mut self, class: Class, key: ClassKey, touched: &mut BTreeSet<Class>) {
        if let Some((old, _)) = self.known.get_mut(&class) {
            self.by_key.remove(old);
            *old = key.clone();
            self.by_key.insert(key, class);
            touched.insert(class);
        }
    }
}
