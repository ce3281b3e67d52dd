//! What the policies in force here ask of peers: each question once, however many rules ask it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use crate::cluster::index::{SelectorIndex, required};
use crate::cluster::{AddressOwner, Cluster, claims};
use crate::model::{Action, AddressRanges, Name, NamespaceMatch, Pod, Protocol, Selector, Subject};

/// A question about a peer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Atom {
    /// Is it one of these pods, as far as a rule with this action goes by it? Where not all labels of a pod
    /// are known, the answer depends on that: [`Action::Accept`], or [`Action::Deny`] for any other.
    Pods(Subject, Action),
    /// Is it one of these nodes?
    Nodes(Selector),
    /// Has it one of these addresses?
    Addresses(AddressRanges),
    /// Which port does it call by this name?
    Port(Name, Option<Protocol>),
}

/// A question's number; never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct AtomId(u32);

/// The answers for one peer: peers with the same answers are the same to every policy here.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PeerKey {
    /// Pods and nodes that it is one of, sorted.
    pub(super) who: Box<[AtomId]>,
    /// Ranges that its address is in, sorted.
    pub(super) ranges: Box<[AtomId]>,
    /// What it calls by a name that is asked for, sorted.
    pub(super) ports: Box<[(AtomId, Protocol, u16)]>,
}

/// All questions in use.
#[derive(Debug, Default)]
pub(super) struct Atoms {
    by_atom: HashMap<Atom, AtomId>,
    known: BTreeMap<AtomId, (Atom, usize)>,
    /// Pods of one namespace, by the namespace and the pod's labels.
    of_namespace: HashMap<Name, SelectorIndex<AtomId>>,
    /// Pods of selected namespaces, by the pod's labels, or else by the namespace's.
    by_pod: SelectorIndex<AtomId>,
    by_namespace: SelectorIndex<AtomId>,
    /// Pods of selected namespaces, where a namespace counts of which a label is not known.
    of_unknown: BTreeSet<AtomId>,
    nodes: BTreeSet<AtomId>,
    ports: HashMap<Name, Vec<AtomId>>,
    /// The keys of pods' labels that questions are about, and how often.
    label_keys: HashMap<Name, usize>,
    next: u32,
}

// === impl PeerKey ===

impl PeerKey {
    /// Whether nothing but the address tells it from others.
    pub(super) fn is_only_address(&self) -> bool {
        self.who.is_empty() && self.ports.is_empty()
    }

    pub(super) fn atoms(&self) -> impl Iterator<Item = AtomId> + '_ {
        self.who.iter().chain(&self.ranges).copied().chain(self.ports.iter().map(|(atom, ..)| *atom))
    }

    pub(super) fn contains(&self, atom: AtomId) -> bool {
        self.who.binary_search(&atom).is_ok() || self.ranges.binary_search(&atom).is_ok()
    }
}

// === impl Atoms ===

impl Atoms {
    /// One more rule asks this. Tells whether it is new.
    pub(super) fn acquire(&mut self, atom: Atom) -> (AtomId, bool) {
        if let Some(id) = self.by_atom.get(&atom) {
            if let Some((_, users)) = self.known.get_mut(id) {
                *users += 1;
            }
            return (*id, false);
        }
        let id = AtomId(self.next);
        self.next += 1;
        self.change_indices(&atom, |index, selector| index.insert(selector, &id));
        match &atom {
            Atom::Nodes(_) => drop(self.nodes.insert(id)),
            Atom::Port(name, _) => self.ports.entry(name.clone()).or_default().push(id),
            Atom::Pods(Subject { namespaces: NamespaceMatch::Selected(_), .. }, action)
                if *action != Action::Accept =>
            {
                self.of_unknown.insert(id);
            }
            Atom::Pods(..) | Atom::Addresses(_) => {}
        }
        for key in label_keys(&atom) {
            *self.label_keys.entry(key.clone()).or_default() += 1;
        }
        self.by_atom.insert(atom.clone(), id);
        self.known.insert(id, (atom, 1));
        (id, true)
    }

    /// One rule less asks this. Returns the question if nobody asks it any more.
    pub(super) fn release(&mut self, id: AtomId) -> Option<Atom> {
        let (_, users) = self.known.get_mut(&id)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        let (atom, _) = self.known.remove(&id)?;
        self.by_atom.remove(&atom);
        self.change_indices(&atom, |index, selector| index.remove(selector, |other| *other == id));
        if let Atom::Pods(Subject { namespaces: NamespaceMatch::Named(name), .. }, _) = &atom
            && self.of_namespace.get(name).is_some_and(SelectorIndex::is_empty)
        {
            self.of_namespace.remove(name);
        }
        for key in label_keys(&atom) {
            if let Some(count) = self.label_keys.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    self.label_keys.remove(key);
                }
            }
        }
        self.nodes.remove(&id);
        self.of_unknown.remove(&id);
        if let Atom::Port(name, _) = &atom
            && let Some(list) = self.ports.get_mut(name)
        {
            list.retain(|other| *other != id);
            if list.is_empty() {
                self.ports.remove(name);
            }
        }
        Some(atom)
    }

    fn change_indices(&mut self, atom: &Atom, change: impl Fn(&mut SelectorIndex<AtomId>, &Selector)) {
        let Atom::Pods(subject, action) = atom else { return };
        // A pod of which a label is not known can match what asks for that label, and has it not.
        let everything = Selector::everything();
        let pods = if *action == Action::Accept { &subject.pods } else { &everything };
        match &subject.namespaces {
            NamespaceMatch::Named(name) => {
                change(self.of_namespace.entry(name.clone()).or_default(), pods);
            }
            NamespaceMatch::Selected(_) if required(pods).is_some() => {
                change(&mut self.by_pod, pods);
            }
            NamespaceMatch::Selected(selector) => change(&mut self.by_namespace, selector),
        }
    }

    /// Whether a question is about pods' labels with this key.
    pub(super) fn asks_for_label(&self, key: &Name) -> bool {
        self.label_keys.contains_key(key)
    }

    pub(super) fn get(&self, id: AtomId) -> Option<&Atom> {
        self.known.get(&id).map(|(atom, _)| atom)
    }

    /// The ranges that are asked for.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (AtomId, &AddressRanges)> {
        self.known.iter().filter_map(|(id, (atom, _))| match atom {
            Atom::Addresses(ranges) => Some((*id, ranges)),
            _ => None,
        })
    }

    /// The answers for whoever has an address, given those about the address itself.
    pub(super) fn key(&self, cluster: &Cluster, owner: &AddressOwner, ranges: &[AtomId]) -> PeerKey {
        let ranges = ranges.into();
        match owner {
            AddressOwner::Pod(pod) => {
                let (who, ports) = self.of_pod(cluster, pod);
                PeerKey { who, ranges, ports }
            }
            AddressOwner::Node(node) => {
                let asks =
                    |id: &&AtomId| matches!(self.get(**id), Some(Atom::Nodes(s)) if s.matches(&node.labels));
                PeerKey {
                    who: self.nodes.iter().filter(asks).copied().collect(),
                    ranges,
                    ports: Box::default(),
                }
            }
            AddressOwner::Nobody => PeerKey { ranges, ..PeerKey::default() },
        }
    }

    #[allow(clippy::type_complexity)]
    fn of_pod(&self, cluster: &Cluster, pod: &Pod) -> (Box<[AtomId]>, Box<[(AtomId, Protocol, u16)]>) {
        let namespace = &pod.key.namespace;
        let known = cluster.known_namespace(namespace);
        let named = self.of_namespace.get(namespace).into_iter().flat_map(|i| i.candidates(&pod.labels));
        let candidates = named
            .chain(self.by_pod.candidates(&pod.labels))
            .chain(self.by_namespace.candidates(&known.labels))
            .chain(self.of_unknown.iter().filter(|_| !known.known));
        let is_one = |id: &&AtomId| match self.get(**id) {
            Some(Atom::Pods(subject, action)) => subject.matches_peer(&known, pod, *action),
            _ => false,
        };
        let mut who: Vec<AtomId> = candidates.filter(is_one).copied().collect();
        who.sort_unstable();
        who.dedup();
        let mut ports = Vec::new();
        for port in pod.ports.iter().filter(|_| !self.ports.is_empty()) {
            for id in self.ports.get(&port.name).into_iter().flatten() {
                if let Some(Atom::Port(name, protocol)) = self.get(*id) {
                    ports
                        .extend(pod.named(name, *protocol).map(|(protocol, number)| (*id, protocol, number)));
                }
            }
        }
        ports.sort_unstable();
        ports.dedup();
        (who.into(), ports.into())
    }

    /// The addresses in a Network of which a question could be true.
    pub(super) fn could_match(atom: &Atom, cluster: &Cluster, network: &str, found: &mut BTreeSet<IpAddr>) {
        let mut take =
            |pod: &Pod| found.extend(claims(pod).filter(|(n, _)| ***n == *network).map(|(_, a)| a));
        match atom {
            Atom::Pods(subject, action) => match &subject.namespaces {
                NamespaceMatch::Named(name) => {
                    let known = cluster.known_namespace(name);
                    let pods = cluster.pods_of(name);
                    pods.filter(|p| subject.matches_peer(&known, p, *action)).for_each(|p| take(p));
                }
                NamespaceMatch::Selected(selector) => {
                    for name in cluster.namespaces_with_pods() {
                        let known = cluster.known_namespace(name);
                        if selector.matches_namespace(&known, *action != Action::Accept) {
                            let pods = cluster.pods_of(name);
                            pods.filter(|p| subject.matches_peer(&known, p, *action)).for_each(|p| take(p));
                        }
                    }
                }
            },
            Atom::Port(name, _) => {
                let namespaces = cluster.namespaces_with_pods();
                let pods = namespaces.flat_map(|n| cluster.pods_of(n));
                pods.filter(|p| p.ports.iter().any(|port| port.name == *name)).for_each(|p| take(p));
            }
            Atom::Nodes(selector) => {
                let nodes = cluster.nodes().filter(|n| selector.matches(&n.labels));
                found.extend(nodes.flat_map(|n| n.addresses.iter().copied()));
            }
            // Ranges have their own set, and who is in it follows from that.
            Atom::Addresses(_) => {}
        }
    }
}

/// The keys of the labels of pods that a question is about.
fn label_keys(atom: &Atom) -> impl Iterator<Item = &Name> {
    let selector = match atom {
        Atom::Pods(subject, _) => Some(&subject.pods),
        Atom::Nodes(_) | Atom::Addresses(_) | Atom::Port(..) => None,
    };
    selector.into_iter().flat_map(Selector::requirements).map(|requirement| &requirement.key)
}
