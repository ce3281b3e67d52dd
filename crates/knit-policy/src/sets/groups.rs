//! Local pods that the same policies select, and what those policies come to for each class of peers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::atoms::{Atom, AtomId, Atoms, PeerKey};
use super::classes::{ClassKey, Classes};
use super::element::{Class, Decision, Key, TrafficKey};
use super::encode::{Encoded, for_anybody, for_class};
use crate::model::{
    Action, AddressRanges, Direction, Family, Name, NamedPort, Peer, Policy, PortRanges, Ports, Protocol,
    Rule, Tier,
};

/// A policy in force here, its peers as questions.
#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) policy: Arc<Policy>,
    sides: [Option<Box<[CompiledRule]>>; 2],
    /// Whether it asks for ports that the pod itself has a name for.
    pub(super) asks_own_ports: bool,
}

#[derive(Debug)]
struct CompiledRule {
    action: Action,
    /// It has no list of peers: everybody is one.
    anybody: bool,
    pods: Box<[AtomId]>,
    others: Box<[AtomId]>,
    numbers: Ports,
    /// Ports by name, as questions to the peer (egress).
    asked: Box<[AtomId]>,
    /// Ports by name, as the pod itself has them (ingress).
    own: Box<[(Name, Option<Protocol>)]>,
}

/// What tells a group from another: its policies in order, by their place in memory, and the pod's named
/// ports if one of those policies asks for one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct GroupKey {
    pub(super) policies: Box<[usize]>,
    pub(super) ports: Box<[NamedPort]>,
}

/// One thing that is said about each address of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Said {
    Default(Direction),
    Rule(Direction, Option<Class>, TrafficKey),
}

/// Local addresses that the same policies act on.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) key: GroupKey,
    pub(super) members: BTreeSet<IpAddr>,
    /// Every question that its policies ask.
    atoms: HashSet<AtomId>,
    sides: [Option<GroupSide>; 2],
}

/// One direction of a group.
#[derive(Debug)]
pub(super) struct GroupSide {
    /// The rules that act on this direction, in the order in which they are asked.
    rules: Vec<FlatRule>,
    /// Which of them ask a question, and which match everybody.
    by_atom: HashMap<AtomId, Vec<usize>>,
    for_everybody: Vec<usize>,
    isolates: bool,
    ports: Box<[NamedPort]>,
    direction: Direction,
    /// What is allowed whoever the other side is.
    anybody: Ports,
    pub(super) default: Decision,
    pub(super) for_anybody: Encoded,
    pub(super) classes: BTreeMap<Class, (Family, Encoded)>,
}

/// One rule of one policy.
#[derive(Debug)]
struct FlatRule {
    tier: Tier,
    policy: Arc<Compiled>,
    index: usize,
}

// === impl Compiled ===

impl Compiled {
    /// Asks the policy's questions; new ones go to the list.
    pub(super) fn new(policy: &Arc<Policy>, atoms: &mut Atoms, fresh: &mut Vec<AtomId>) -> Self {
        let sides: [Option<Box<[CompiledRule]>>; 2] = Direction::ALL.map(|direction| {
            let rules = policy.rules(direction).filter(|_| policy.acts_on(direction))?;
            Some(rules.iter().map(|rule| CompiledRule::new(rule, direction, atoms, fresh)).collect())
        });
        let mut rules = sides.iter().flatten().flat_map(|rules| rules.iter());
        let asks_own_ports = rules.any(|rule| !rule.own.is_empty());
        Self { policy: Arc::clone(policy), sides, asks_own_ports }
    }

    /// Every question, as often as it is asked.
    pub(super) fn atoms(&self) -> impl Iterator<Item = AtomId> + '_ {
        let rules = self.sides.iter().flatten().flat_map(|rules| rules.iter());
        rules.flat_map(|r| r.pods.iter().chain(&r.others).chain(&r.asked).copied())
    }

    fn rules(&self, direction: Direction) -> &[CompiledRule] {
        self.sides[direction as usize].as_deref().unwrap_or_default()
    }
}

// === impl Said ===

impl Said {
    pub(super) fn about(self, pod: IpAddr) -> Key {
        match self {
            Self::Default(direction) => Key::Subject(direction, pod),
            Self::Rule(direction, peer, traffic) => Key::Rule { direction, pod, peer, traffic },
        }
    }
}

// === impl CompiledRule ===

impl CompiledRule {
    fn new(rule: &Rule, direction: Direction, atoms: &mut Atoms, fresh: &mut Vec<AtomId>) -> Self {
        let mut acquire = |atom| {
            let (id, new) = atoms.acquire(atom);
            fresh.extend(new.then_some(id));
            id
        };
        let (mut pods, mut others, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
        for peer in rule.peers.iter().flatten() {
            match peer {
                Peer::Pods(subject) => {
                    let accepts = rule.action == Action::Accept;
                    let action = if accepts { Action::Accept } else { Action::Deny };
                    pods.push(acquire(Atom::Pods(subject.clone(), action)));
                }
                Peer::Nodes(selector) => others.push(acquire(Atom::Nodes(selector.clone()))),
                Peer::Addresses(some) => ranges.push(some.clone()),
            }
        }
        // A thousand blocks of one rule are one question.
        let ranges = AddressRanges::union(&ranges);
        if !ranges.is_empty() {
            others.push(acquire(Atom::Addresses(ranges)));
        }
        let mut asked = Vec::new();
        let mut own = Vec::new();
        for (name, protocol) in rule.names() {
            match direction {
                Direction::Ingress => own.push((name.clone(), protocol)),
                Direction::Egress => asked.push(acquire(Atom::Port(name.clone(), protocol))),
            }
        }
        Self {
            action: rule.action,
            anybody: rule.peers.is_none(),
            pods: pods.into(),
            others: others.into(),
            numbers: rule.numbers(),
            asked: asked.into(),
            own: own.into(),
        }
    }

    /// The traffic to or from such a peer that the rule matches.
    fn matched(&self, peer: &PeerKey, ports: &[NamedPort]) -> Option<Ports> {
        let as_pod = self.anybody || self.pods.iter().any(|atom| peer.contains(*atom));
        if !as_pod && !self.others.iter().any(|atom| peer.contains(*atom)) {
            return None;
        }
        let mut matched = self.numbers.clone();
        let mut add = |protocol, number| {
            matched = matched.union(&Ports::of(protocol, PortRanges::range(number, number)));
        };
        for (name, protocol) in &self.own {
            for wanted in Protocol::ALL.into_iter().filter(|p| protocol.is_none_or(|only| only == *p)) {
                if let Some(found) = ports.iter().find(|p| p.protocol == wanted && p.name == *name) {
                    add(wanted, found.number);
                }
            }
        }
        for (_, protocol, number) in
            peer.ports.iter().filter(|(atom, ..)| as_pod && self.asked.contains(atom))
        {
            add(*protocol, *number);
        }
        Some(matched)
    }
}

// === impl GroupSide ===

impl GroupSide {
    fn new(compiled: &[Arc<Compiled>], ports: &[NamedPort], direction: Direction) -> Option<Self> {
        let mut side = Self {
            rules: Vec::new(),
            by_atom: HashMap::new(),
            for_everybody: Vec::new(),
            isolates: false,
            ports: ports.into(),
            direction,
            anybody: Ports::none(),
            default: Decision::Accept,
            for_anybody: Encoded::new(),
            classes: BTreeMap::new(),
        };
        let mut acts = false;
        for policy in compiled.iter().filter(|c| c.policy.acts_on(direction)) {
            let tier = policy.policy.tier;
            acts = true;
            side.isolates |= tier == Tier::Namespace;
            for (index, rule) in policy.rules(direction).iter().enumerate() {
                let at = side.rules.len();
                side.rules.push(FlatRule { tier, policy: Arc::clone(policy), index });
                if rule.anybody {
                    side.for_everybody.push(at);
                }
                for atom in rule.pods.iter().chain(&rule.others) {
                    side.by_atom.entry(*atom).or_default().push(at);
                }
            }
        }
        if !acts {
            return None;
        }
        side.anybody = side.allowed(&PeerKey::default(), false);
        (side.default, side.for_anybody) = for_anybody(&side.anybody);
        Some(side)
    }

    pub(super) fn isolates(&self) -> bool {
        self.isolates
    }

    /// What the tiers allow with such a peer, all traffic at once.
    fn allowed(&self, peer: &PeerKey, itself: bool) -> Ports {
        let asked = peer.who.iter().chain(&peer.ranges).filter_map(|atom| self.by_atom.get(atom));
        let mut matching: Vec<usize> = asked.flatten().chain(&self.for_everybody).copied().collect();
        matching.sort_unstable();
        matching.dedup();
        let rules = |wanted: fn(&Tier) -> bool| {
            let flat = matching.iter().map(|at| &self.rules[*at]).filter(move |flat| wanted(&flat.tier));
            flat.map(|flat| &flat.policy.rules(self.direction)[flat.index])
        };
        let mut allowed = Ports::none();
        let admin = rules(|tier| matches!(tier, Tier::Admin(_)));
        let mut open = self.first_match(admin, peer, Ports::all(), &mut allowed);
        if !self.isolates {
            let baseline = rules(|tier| matches!(tier, Tier::Baseline(_)));
            open = self.first_match(baseline, peer, open, &mut allowed);
            return allowed.union(&open);
        }
        if itself {
            return allowed.union(&open);
        }
        for rule in rules(|tier| *tier == Tier::Namespace) {
            if let Some(matched) = rule.matched(peer, &self.ports) {
                allowed = allowed.union(&matched.intersection(&open));
            }
        }
        allowed
    }

    /// Goes through the rules of a tier; returns what it leaves to the next one.
    fn first_match<'a>(
        &self,
        tier: impl Iterator<Item = &'a CompiledRule>,
        peer: &PeerKey,
        mut open: Ports,
        allowed: &mut Ports,
    ) -> Ports {
        let mut passed = Ports::none();
        for rule in tier {
            let Some(matched) = rule.matched(peer, &self.ports) else { continue };
            let decided = matched.intersection(&open);
            match rule.action {
                Action::Accept => *allowed = allowed.union(&decided),
                Action::Pass => passed = passed.union(&decided),
                Action::Deny => {}
            }
            open = open.difference(&decided);
        }
        open.union(&passed)
    }

    fn encode(&self, key: &ClassKey) -> Encoded {
        let mut allowed = self.allowed(&key.peer, false);
        for service in key.services.iter().filter(|_| self.direction == Direction::Egress) {
            let port = Ports::of(service.protocol, PortRanges::range(service.port, service.port));
            let may = |(peer, number): &(PeerKey, u16)| {
                self.allowed(peer, false).ranges(service.protocol).contains(*number)
            };
            let all = !service.endpoints.is_empty() && service.endpoints.iter().all(may);
            allowed = if all { allowed.union(&port) } else { allowed.difference(&port) };
        }
        for_class(&allowed, &self.anybody)
    }

    pub(super) fn encode_itself(&self, own: &PeerKey) -> Encoded {
        for_class(&self.allowed(own, true), &self.anybody)
    }
}

// === impl Group ===

impl Group {
    pub(super) fn new(key: GroupKey, compiled: &[Arc<Compiled>], classes: &Classes) -> Self {
        let atoms = compiled.iter().flat_map(|c| c.atoms()).collect();
        let sides = Direction::ALL.map(|direction| GroupSide::new(compiled, &key.ports, direction));
        let mut group = Self { key, members: BTreeSet::new(), atoms, sides };
        for (class, key) in classes.iter() {
            if group.cares_for(key) {
                for side in group.sides.iter_mut().flatten() {
                    let encoded = side.encode(key);
                    if !encoded.is_empty() {
                        side.classes.insert(class, (key.family, encoded));
                    }
                }
            }
        }
        group
    }

    /// Whether what tells this class from others can mean anything to the group's policies.
    fn cares_for(&self, key: &ClassKey) -> bool {
        !key.services.is_empty() || key.atoms().any(|atom| self.atoms.contains(&atom))
    }

    pub(super) fn side(&self, direction: Direction) -> Option<&GroupSide> {
        self.sides[direction as usize].as_ref()
    }

    /// What is said about each address of a family, but for the address.
    pub(super) fn says(&self, family: Family) -> BTreeMap<Said, Decision> {
        let mut all = BTreeMap::new();
        for (direction, side) in Direction::ALL.into_iter().zip(&self.sides) {
            let Some(side) = side else { continue };
            all.insert(Said::Default(direction), side.default);
            let mut add = |peer, encoded: &Encoded| {
                all.extend(encoded.iter().map(|(traffic, d)| (Said::Rule(direction, peer, *traffic), *d)));
            };
            add(None, &side.for_anybody);
            for (class, (_, encoded)) in side.classes.iter().filter(|(_, (of, _))| *of == family) {
                add(Some(*class), encoded);
            }
        }
        all
    }

    pub(super) fn isolates(&self) -> bool {
        self.sides.iter().flatten().any(GroupSide::isolates)
    }

    /// Brings what is said about a class up to date; returns what was said and what is, for each direction
    /// that differs.
    #[allow(clippy::type_complexity)]
    pub(super) fn refresh(
        &mut self,
        class: Class,
        key: Option<&ClassKey>,
    ) -> Vec<(Direction, Option<(Family, Encoded)>, Option<(Family, Encoded)>)> {
        let cares = key.is_some_and(|key| self.cares_for(key));
        let mut changes = Vec::new();
        for (direction, side) in Direction::ALL.into_iter().zip(&mut self.sides) {
            let Some(side) = side else { continue };
            let new = key.filter(|_| cares).map(|key| (key.family, side.encode(key)));
            let new = new.filter(|(_, encoded)| !encoded.is_empty());
            let old = match &new {
                Some(new) if side.classes.get(&class) == Some(new) => continue,
                Some(new) => side.classes.insert(class, new.clone()),
                None => side.classes.remove(&class),
            };
            if old != new {
                changes.push((direction, old, new));
            }
        }
        changes
    }
}
