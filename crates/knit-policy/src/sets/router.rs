//! The sets of one router: what changed in the cluster goes in, elements come out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::atoms::{Atom, AtomId, Atoms, PeerKey};
use super::blocks::Blocks;
use super::classes::{ClassKey, Classes, ServicePort};
use super::element::{Change, Class, Decision, Key, Pending, TrafficKey, Value};
use super::encode::Encoded;
use super::groups::{Compiled, Group, GroupKey, Said};
use crate::cluster::Cluster;
use crate::model::{AddressRanges, DEFAULT_NETWORK, Direction, Family, Name, Policy, Tier};

/// From this many new questions on, it is cheaper to ask every peer all of them than to look for peers of
/// each.
const MANY: usize = 16;

/// The router of one Network on one node.
#[derive(Debug)]
pub(super) struct Router {
    network: Name,
    node: Name,
    atoms: Atoms,
    classes: Classes,
    peers: BTreeMap<IpAddr, Class>,
    blocks: Blocks,
    /// Policies that act on a local pod, by their place in memory, each with how many addresses it acts on.
    active: HashMap<usize, (Arc<Compiled>, usize)>,
    groups: HashMap<GroupKey, Group>,
    locals: BTreeMap<IpAddr, Local>,
    stale_peers: BTreeSet<IpAddr>,
    stale_locals: BTreeSet<IpAddr>,
    pending: Pending,
}

/// A local address that policies act on.
#[derive(Debug)]
struct Local {
    group: GroupKey,
    /// What is said about the pod's way to itself, if anything is.
    itself: Option<[Encoded; 2]>,
}

/// A local address that other policies act on than before.
#[derive(Debug)]
struct Move {
    address: IpAddr,
    from: Option<GroupKey>,
    to: Option<GroupKey>,
}

/// What is said otherwise in one group than in another.
type Difference = Vec<(Said, Option<Decision>, Option<Decision>)>;

impl Router {
    pub(super) fn new(network: Name, node: Name) -> Self {
        Self {
            network,
            node,
            atoms: Atoms::default(),
            classes: Classes::default(),
            peers: BTreeMap::new(),
            blocks: Blocks::default(),
            active: HashMap::new(),
            groups: HashMap::new(),
            locals: BTreeMap::new(),
            stale_peers: BTreeSet::new(),
            stale_locals: BTreeSet::new(),
            pending: Pending::default(),
        }
    }

    /// Whoever has this address may have changed.
    pub(super) fn touch_peer(&mut self, address: IpAddr) {
        self.stale_peers.insert(address);
    }

    /// The policies that act on this address may have changed.
    pub(super) fn touch_local(&mut self, address: IpAddr) {
        self.stale_locals.insert(address);
    }

    /// Whether a policy that acts here goes by pods' labels with this key.
    pub(super) fn asks_for_label(&self, key: &Name) -> bool {
        self.atoms.asks_for_label(key)
    }

    /// Whether policies act on this address.
    pub(super) fn acts_on(&self, address: IpAddr) -> bool {
        self.locals.contains_key(&address)
    }

    /// Whether nothing is said and nothing is to be done: it can be forgotten.
    pub(super) fn is_idle(&self) -> bool {
        self.locals.is_empty() && self.stale_locals.is_empty()
    }

    /// Brings everything up to date, and returns what changed since the last time.
    pub(super) fn settle(&mut self, cluster: &Cluster) -> Vec<Change> {
        let mut touched = BTreeSet::new();
        let stale: Vec<IpAddr> = std::mem::take(&mut self.stale_locals).into_iter().collect();
        let (moves, asked) = self.regroup(cluster, &stale, &mut touched);
        let peers = std::mem::take(&mut self.stale_peers);
        self.reclassify(cluster, &peers, &mut touched);
        let fresh = self.carry_out(moves);
        self.refresh_classes(&touched, &fresh);
        // A pod's way to itself follows from its own class; who changed is known unless the questions did.
        let itself: Vec<IpAddr> = match asked {
            true => self.locals.keys().copied().collect(),
            false => stale.into_iter().chain(peers).filter(|a| self.locals.contains_key(a)).collect(),
        };
        for address in itself {
            self.refresh_itself(cluster, address);
        }
        self.classes.taken();
        self.pending.take()
    }

    /// Brings the questions up to date with the policies that act on stale addresses now. Returns which of
    /// those go to another group, and whether the questions changed.
    fn regroup(
        &mut self,
        cluster: &Cluster,
        stale: &[IpAddr],
        touched: &mut BTreeSet<Class>,
    ) -> (Vec<Move>, bool) {
        let (mut moves, mut fresh, mut released) = (Vec::new(), Vec::new(), Vec::new());
        let idle = self.active.is_empty();
        for address in stale {
            let policies = self.policies_on(cluster, *address);
            for policy in &policies {
                let (atoms, fresh) = (&mut self.atoms, &mut fresh);
                let entry = self.active.entry(Arc::as_ptr(policy) as usize);
                entry.or_insert_with(|| (Arc::new(Compiled::new(policy, atoms, fresh)), 0)).1 += 1;
            }
            let from = self.locals.get(address).map(|local| local.group.clone());
            released.extend(from.iter().flat_map(|group| group.policies.iter().copied()));
            let ids: Box<[usize]> = policies.iter().map(|p| Arc::as_ptr(p) as usize).collect();
            let asks = ids.iter().any(|id| self.active.get(id).is_some_and(|(c, _)| c.asks_own_ports));
            let pod = cluster.owner_on(&self.node, &self.network, *address).filter(|_| asks);
            let ports = pod.map(|pod| pod.ports.clone()).unwrap_or_default();
            let to = (!policies.is_empty()).then_some(GroupKey { policies: ids, ports });
            if from != to {
                moves.push(Move { address: *address, from, to });
            }
        }
        // Released at last, so that what is asked before and after is never given up in between.
        let mut gone = Vec::new();
        for id in released {
            let Some((_, users)) = self.active.get_mut(&id) else { continue };
            *users -= 1;
            if *users == 0
                && let Some((compiled, _)) = self.active.remove(&id)
            {
                gone.extend(compiled.atoms().filter_map(|atom| Some((atom, self.atoms.release(atom)?))));
            }
        }
        let fresh: Vec<AtomId> = fresh.into_iter().filter(|id| self.atoms.get(*id).is_some()).collect();
        let asked = !fresh.is_empty() || !gone.is_empty();
        if asked {
            self.ask(cluster, &fresh, &gone, touched);
        }
        if asked || idle != self.active.is_empty() {
            self.stale_peers.extend(cluster.aliases(&self.network).iter().map(|alias| alias.address));
        }
        (moves, asked)
    }

    fn policies_on(&self, cluster: &Cluster, address: IpAddr) -> Vec<Arc<Policy>> {
        let Some(pod) = cluster.owner_on(&self.node, &self.network, address) else { return Vec::new() };
        let Some(attachment) = pod.attachment(&self.network, address) else { return Vec::new() };
        let selecting = cluster.selecting(pod, &self.network, attachment.primary);
        let acting = selecting.filter(|p| Direction::ALL.into_iter().any(|d| p.acts_on(d)));
        let mut policies: Vec<Arc<Policy>> = acting.cloned().collect();
        // Those of namespaces are asked all together: their order means nothing, but it must be one.
        policies.sort_by(|a, b| match (a.tier, b.tier) {
            (Tier::Namespace, Tier::Namespace) => Arc::as_ptr(a).cmp(&Arc::as_ptr(b)),
            _ => a.order().cmp(&b.order()),
        });
        policies
    }

    /// Questions have come and gone: cuts blocks again, and finds the peers to which that can mean something.
    fn ask(
        &mut self,
        cluster: &Cluster,
        fresh: &[AtomId],
        gone: &[(AtomId, Atom)],
        touched: &mut BTreeSet<Class>,
    ) {
        let fresh_atoms = fresh.iter().filter_map(|id| self.atoms.get(*id));
        let changed: Vec<AddressRanges> = fresh_atoms
            .chain(gone.iter().map(|(_, atom)| atom))
            .filter_map(|atom| match atom {
                Atom::Addresses(ranges) => Some(ranges.clone()),
                _ => None,
            })
            .collect();
        if !changed.is_empty() {
            let changed = AddressRanges::union(&changed);
            let ranges: Vec<(AtomId, &AddressRanges)> = self.atoms.ranges().collect();
            self.blocks.refresh(&changed, &ranges, &mut self.classes, touched, &mut self.pending);
            for (first, last) in changed.iter() {
                self.stale_peers.extend(self.peers.range(first..=last).map(|(address, _)| *address));
            }
        }
        let named: Vec<&Atom> = fresh.iter().filter_map(|id| self.atoms.get(*id)).collect();
        let questions = named.iter().filter(|atom| !matches!(atom, Atom::Addresses(_)));
        if questions.clone().count() > MANY {
            self.stale_peers.extend(cluster.addresses_in(&self.network));
            self.stale_peers.extend(cluster.nodes().flat_map(|n| n.addresses.iter().copied()));
        } else {
            for atom in questions {
                Atoms::could_match(atom, cluster, &self.network, &mut self.stale_peers);
            }
        }
        if !gone.is_empty() {
            let gone: BTreeSet<AtomId> = gone.iter().map(|(id, _)| *id).collect();
            let asking = self.classes.iter().filter(|(_, key)| key.atoms().any(|atom| gone.contains(&atom)));
            let classes: BTreeSet<Class> = asking.map(|(class, _)| class).collect();
            let members = self.peers.iter().filter(|(_, class)| classes.contains(class));
            self.stale_peers.extend(members.map(|(address, _)| *address));
        }
    }

    /// Gives stale addresses the class that they have now.
    fn reclassify(&mut self, cluster: &Cluster, stale: &BTreeSet<IpAddr>, touched: &mut BTreeSet<Class>) {
        let mut moves: BTreeMap<(Option<Class>, Option<ClassKey>), Vec<IpAddr>> = BTreeMap::new();
        for address in stale {
            let old = self.peers.get(address).copied();
            let new = self.class_key(cluster, *address);
            if old.and_then(|class| self.classes.get(class)) != new.as_ref() {
                moves.entry((old, new)).or_default().push(*address);
            }
        }
        for ((old, new), addresses) in moves {
            if let (Some(class), Some(key)) = (old, &new)
                && self.classes.members(class) == addresses.len()
                && self.classes.find(key).is_none()
            {
                self.classes.rename(class, key.clone(), touched);
                continue;
            }
            for address in addresses {
                let class = new.as_ref().map(|key| self.classes.join(key.clone(), touched));
                match class {
                    Some(class) => drop(self.peers.insert(address, class)),
                    None => drop(self.peers.remove(&address)),
                }
                self.pending.set(Key::Peer(address), old.map(Value::Class), class.map(Value::Class));
                if let Some(old) = old {
                    self.classes.leave(old, touched);
                }
            }
        }
    }

    /// What whoever has an address has in common with others; nothing if its address alone says it.
    fn class_key(&self, cluster: &Cluster, address: IpAddr) -> Option<ClassKey> {
        let peer = self.peer_key(cluster, &self.network, address);
        let mut services = Vec::new();
        for alias in cluster.aliases(&self.network).iter().filter(|a| a.address == address) {
            let endpoint = |e: &crate::model::AliasEndpoint| {
                (self.peer_key(cluster, DEFAULT_NETWORK, e.address), e.port)
            };
            let endpoints = alias.endpoints.iter().map(endpoint).collect();
            services.push(ServicePort { protocol: alias.protocol, port: alias.port, endpoints });
        }
        // While no policy acts here, nobody has to be told from anybody.
        if self.active.is_empty() || (peer.is_only_address() && services.is_empty()) {
            return None;
        }
        Some(ClassKey { family: Family::of(address), peer, services: services.into() })
    }

    fn peer_key(&self, cluster: &Cluster, network: &str, address: IpAddr) -> PeerKey {
        let piece = self.blocks.at(address).and_then(|class| self.classes.get(class));
        let ranges = piece.map_or(&[][..], |key| &key.peer.ranges);
        self.atoms.key(cluster, &cluster.owner(network, address), ranges)
    }

    /// Moves addresses between groups, and says only what differs. Returns the groups that are new.
    fn carry_out(&mut self, moves: Vec<Move>) -> HashSet<GroupKey> {
        let mut fresh = HashSet::new();
        let mut differences: HashMap<(Option<GroupKey>, Option<GroupKey>, Family), Difference> =
            HashMap::new();
        for Move { address, from, to } in moves {
            if let Some(key) = &to
                && !self.groups.contains_key(key)
            {
                let active = key.policies.iter().filter_map(|id| self.active.get(id));
                let compiled: Vec<Arc<Compiled>> = active.map(|(c, _)| Arc::clone(c)).collect();
                self.groups.insert(key.clone(), Group::new(key.clone(), &compiled, &self.classes));
                fresh.insert(key.clone());
            }
            let groups = &self.groups;
            let family = Family::of(address);
            let difference = differences.entry((from.clone(), to.clone(), family)).or_insert_with(|| {
                let says = |key: &Option<GroupKey>| {
                    let group = key.as_ref().and_then(|key| groups.get(key));
                    group.map(|group| group.says(family)).unwrap_or_default()
                };
                let (old, new) = (says(&from), says(&to));
                let all = old.keys().chain(new.keys().filter(|said| !old.contains_key(said)));
                let changes = all.map(|said| (*said, old.get(said).copied(), new.get(said).copied()));
                changes.filter(|(_, old, new)| old != new).collect()
            });
            for (said, old, new) in difference {
                self.pending.set(said.about(address), old.map(Value::Decision), new.map(Value::Decision));
            }
            if let Some(group) = from.as_ref().and_then(|key| self.groups.get_mut(key)) {
                group.members.remove(&address);
            }
            let Some(key) = to else {
                let itself_said = self.locals.remove(&address).and_then(|local| local.itself);
                for (key, value) in itself(address, itself_said.as_ref()) {
                    self.pending.remove(key, value);
                }
                continue;
            };
            if let Some(group) = self.groups.get_mut(&key) {
                group.members.insert(address);
            }
            let itself = self.locals.remove(&address).and_then(|local| local.itself);
            self.locals.insert(address, Local { group: key, itself });
        }
        self.groups.retain(|_, group| !group.members.is_empty());
        fresh
    }

    /// Classes have come, gone, or mean something else: says so to every group that cares.
    fn refresh_classes(&mut self, touched: &BTreeSet<Class>, fresh: &HashSet<GroupKey>) {
        // A new group knows the classes as they are.
        for group in self.groups.values_mut().filter(|group| !fresh.contains(&group.key)) {
            for class in touched {
                for (direction, old, new) in group.refresh(*class, self.classes.get(*class)) {
                    for pod in &group.members {
                        let of = |encoded: &Option<(Family, Encoded)>| -> BTreeMap<TrafficKey, Value> {
                            let same = encoded.iter().filter(|(family, _)| *family == Family::of(*pod));
                            same.flat_map(|(_, e)| e.iter().map(|(t, d)| (*t, Value::Decision(*d)))).collect()
                        };
                        let (old, new) = (of(&old), of(&new));
                        for traffic in old.keys().chain(new.keys().filter(|t| !old.contains_key(t))) {
                            let key =
                                Key::Rule { direction, pod: *pod, peer: Some(*class), traffic: *traffic };
                            self.pending.set(key, old.get(traffic).copied(), new.get(traffic).copied());
                        }
                    }
                }
            }
        }
    }

    /// What is said about a pod's way to itself through a Service (rule 28).
    fn refresh_itself(&mut self, cluster: &Cluster, address: IpAddr) {
        let Some(group) = self.locals.get(&address).and_then(|local| self.groups.get(&local.group)) else {
            return;
        };
        let new = group.isolates().then(|| {
            let own = self.peer_key(cluster, &self.network, address);
            Direction::ALL.map(|d| group.side(d).map_or_else(Encoded::new, |side| side.encode_itself(&own)))
        });
        let Some(local) = self.locals.get_mut(&address) else { return };
        if local.itself == new {
            return;
        }
        let old: BTreeMap<Key, Value> = itself(address, local.itself.as_ref()).collect();
        let now: BTreeMap<Key, Value> = itself(address, new.as_ref()).collect();
        for key in old.keys().chain(now.keys().filter(|k| !old.contains_key(k))) {
            self.pending.set(*key, old.get(key).copied(), now.get(key).copied());
        }
        local.itself = new;
    }

    /// Everything that is in force.
    pub(super) fn elements(&self) -> BTreeMap<Key, Value> {
        let mut all: BTreeMap<Key, Value> = self.blocks.iter().collect();
        all.extend(self.peers.iter().map(|(address, class)| (Key::Peer(*address), Value::Class(*class))));
        for (address, local) in &self.locals {
            let says = self.groups.get(&local.group).map(|group| group.says(Family::of(*address)));
            let says = says.unwrap_or_default().into_iter();
            all.extend(says.map(|(said, decision)| (said.about(*address), Value::Decision(decision))));
            all.extend(itself(*address, local.itself.as_ref()));
        }
        all
    }

    /// What a class means, in words that do not depend on how things came about.
    pub(super) fn describe(&self, class: Class) -> Option<String> {
        if class == Class::ITSELF {
            return Some("itself".to_owned());
        }
        let key = self.classes.get(class)?;
        let words = |peer: &PeerKey| {
            let mut parts: Vec<String> =
                peer.who.iter().chain(&peer.ranges).map(|id| format!("{:?}", self.atoms.get(*id))).collect();
            let port = |(id, protocol, number): &(AtomId, _, _)| {
                format!("{:?} is {protocol} {number}", self.atoms.get(*id))
            };
            parts.extend(peer.ports.iter().map(port));
            parts.sort();
            parts.join("; ")
        };
        let service = |s: &ServicePort| {
            let ends: Vec<String> =
                s.endpoints.iter().map(|(p, n)| format!("({}) at {n}", words(p))).collect();
            format!(" {} {} -> {}", s.protocol, s.port, ends.join(", "))
        };
        Some(format!(
            "{} {}{}",
            key.family,
            words(&key.peer),
            key.services.iter().map(service).collect::<String>()
        ))
    }
}

/// The elements about an address's way to itself.
fn itself(address: IpAddr, encoded: Option<&[Encoded; 2]>) -> impl Iterator<Item = (Key, Value)> + '_ {
    let member = encoded.map(|_| (Key::Itself(address), Value::Member));
    let rules = encoded.into_iter().flat_map(|sides| Direction::ALL.into_iter().zip(sides));
    let rules = rules.flat_map(move |(direction, encoded)| {
        encoded.iter().map(move |(traffic, decision)| {
            let peer = Some(Class::ITSELF);
            (Key::Rule { direction, pod: address, peer, traffic: *traffic }, Value::Decision(*decision))
        })
    });
    member.into_iter().chain(rules)
}
