//! The service ports of one table: their numbers, their slots, and the elements that follow from them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_nft::{Data, Element, ElementValue, TableState};
use knit_proxy::diff::{SlotOp, Slots};
use knit_proxy::model::Family;
use knit_proxy::view::{NodePortMatch, NodeSettings, PortKey, PortView, Scope, Sources, Targets};

use crate::behaviour::{Behaviour, LOCAL_SLOTS};
use crate::ip;
use crate::layout::{AFFINITY_SETS, Layout, Sets};
use crate::sticky::{FoundSticky, Numbers, StickyElements, swap};

/// The key of a frontend, and what is done there.
pub(crate) type Entry = (Data, Behaviour);

/// An endpoint as the kernel has it.
pub(crate) type EndpointAddress = (IpAddr, u16);

/// A service port in the kernel.
#[derive(Debug)]
pub(crate) struct Port {
    /// Its number, since it first had affinity.
    pub id: Option<u32>,
    pub view: Arc<PortView>,
    cluster: Slots<EndpointAddress>,
    local: Slots<EndpointAddress>,
    /// The numbers of its endpoints, if it has affinity.
    numbers: Numbers,
}

/// Numbers of service ports with affinity: the lowest that was never used first, so that one that is gone is
/// not soon another. A number says in which set clients are remembered ([`set_of`]): as long as there is one
/// that nobody has, nobody shares one.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    next: u32,
    used: HashSet<u32>,
    /// How many have each set.
    sets: HashMap<u32, usize>,
}

/// The set where clients of a service port with this number are remembered.
pub(crate) fn set_of(id: u32) -> u32 {
    id % AFFINITY_SETS
}

/// What was found in the kernel, to go on from.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The number of the service port at a frontend's key.
    ids: HashMap<Data, u32>,
    /// Endpoints by a frontend's key and slot.
    slots: HashMap<Data, BTreeMap<u32, EndpointAddress>>,
    sticky: FoundSticky,
    /// The number of a behaviour, by its chain's name.
    pub actions: HashMap<Arc<str>, u32>,
}

/// What is written for a change, set by set.
#[derive(Debug, Default)]
pub(crate) struct Edit {
    pub endpoints: SetEdit,
    pub members: SetEdit,
    pub slots: SetEdit,
    pub sources: SetEdit,
    pub hairpin: SetEdit,
    pub services: SetEdit,
    pub frontends: SetEdit,
    pub cluster_ips: SetEdit,
}

/// Elements of one set that go and that come.
#[derive(Debug, Default)]
pub(crate) struct SetEdit {
    pub removed: Vec<Element>,
    pub added: Vec<Element>,
}

impl SetEdit {
    /// Like [`sorted`](Self::sorted), for a set of ranges: what goes and overlaps what comes makes room for
    /// it first.
    pub(crate) fn sorted_ranges(self) -> (Vec<Element>, Vec<Element>, Vec<Element>) {
        let Self { removed, added } = self;
        let overlaps = |gone: &Element| {
            added.iter().any(|new| gone.key <= *new.last_key() && new.key <= *gone.last_key())
        };
        let (replaced, gone) = removed.into_iter().partition(overlaps);
        (gone, replaced, added)
    }

    /// Elements that go for good, those that go to make room for a new value, and those that come.
    pub(crate) fn sorted(self) -> (Vec<Element>, Vec<Element>, Vec<Element>) {
        if self.removed.is_empty() || self.added.is_empty() {
            return (self.removed, Vec::new(), self.added);
        }
        let coming: HashSet<&Data> = self.added.iter().map(|element| &element.key).collect();
        let (replaced, gone) = self.removed.into_iter().partition(|element| coming.contains(&element.key));
        (gone, replaced, self.added)
    }
}

impl Ids {
    fn take(&mut self, wish: Option<u32>) -> u32 {
        let wish = wish.filter(|id| !self.used.contains(id));
        let id = wish.unwrap_or_else(|| {
            let full = self.sets.len() >= AFFINITY_SETS as usize;
            let mut id = self.next;
            while self.used.contains(&id) || (!full && self.sets.contains_key(&set_of(id))) {
                id = id.wrapping_add(1);
            }
            id
        });
        self.used.insert(id);
        *self.sets.entry(set_of(id)).or_default() += 1;
        self.next = self.next.max(id.wrapping_add(1));
        id
    }

    pub(crate) fn free(&mut self, id: u32) {
        if !self.used.remove(&id) {
            return;
        }
        if let Some(users) = self.sets.get_mut(&set_of(id)) {
            *users -= 1;
            if *users == 0 {
                self.sets.remove(&set_of(id));
            }
        }
    }

    /// Never hands out a number that is in the kernel to somebody else.
    pub(crate) fn start_after(&mut self, found: &Found) {
        self.next = found.ids.values().max().map_or(0, |id| id.wrapping_add(1)).max(self.next);
    }
}

impl Found {
    /// Reads what is there. Values that make no sense are left out, and repaired by the difference.
    pub(crate) fn read(state: &TableState, sets: &Sets) -> Self {
        let mut found = Self { sticky: FoundSticky::read(state, sets), ..Self::default() };
        let elements = |set: &knit_nft::Set| {
            state.sets.get(&set.name).into_iter().flat_map(|state| state.elements.values())
        };
        for element in elements(&sets.services) {
            if let ElementValue::Data(value) = &element.value
                && let Some([id]) = ip::read_marks(value)
            {
                found.ids.insert(element.key.clone(), id);
            }
        }
        for element in elements(&sets.endpoints) {
            if let ElementValue::Data(value) = &element.value
                && let Some((frontend, slot)) = ip::read_slot(&element.key)
                && let Some(place) = ip::read_target(value)
            {
                found.slots.entry(frontend).or_default().insert(slot, place);
            }
        }
        for element in elements(&sets.actions) {
            if let ElementValue::Verdict(verdict) = &element.value
                && let (Some([number]), Some(chain)) = (ip::read_marks(&element.key), verdict.chain())
            {
                found.actions.insert(chain.clone(), number);
            }
        }
        found
    }

    /// The endpoints of the first frontend that has any from slot `base` on, as far as there is no gap.
    fn slots(&self, entries: &[Entry], base: u32) -> Slots<EndpointAddress> {
        for slots in entries.iter().filter_map(|(frontend, _)| self.slots.get(frontend)) {
            let dense = slots.range(base..).zip(base..).take_while(|((slot, _), wanted)| *slot == wanted);
            let places: Vec<EndpointAddress> = dense.map(|((_, place), _)| *place).collect();
            if !places.is_empty() {
                return Slots::found(places);
            }
        }
        Slots::new()
    }
}

fn places(targets: &Targets) -> Vec<EndpointAddress> {
    targets.iter().map(|target| (target.address, target.port)).collect()
}

/// Where a service port answers: the key, and what is done there.
pub(crate) fn entries(key: &PortKey, view: &PortView, node: &NodeSettings, layout: &Layout) -> Vec<Entry> {
    let mut found = Vec::with_capacity(view.frontends.len());
    for frontend in &view.frontends {
        let mut add = |address, any: bool| {
            let place = ip::place(address, key.protocol, frontend.port);
            found.push((place, Behaviour::of(frontend, view, any, layout)));
        };
        match (frontend.address, node.node_ports.get(key.family)) {
            (Some(address), _) => add(address, false),
            (None, NodePortMatch::AnyLocal) => add(ip::any(key.family), true),
            (None, NodePortMatch::Only(addresses)) => addresses.iter().for_each(|a| add(*a, false)),
        }
    }
    found
}

/// Who may use the load-balancer addresses of a service port (rules 43, 44).
fn allowed(key: &PortKey, view: &PortView) -> Vec<Element> {
    let mut found = Vec::new();
    for frontend in &view.frontends {
        let (Sources::Only { ranges, and_itself }, Some(address)) = (&frontend.sources, frontend.address)
        else {
            continue;
        };
        let mut ranges: Vec<IpNet> = ranges.to_vec();
        ranges.extend(and_itself.then(|| IpNet::from(address)));
        let place = ip::place(address, key.protocol, frontend.port);
        found.extend(IpNet::aggregate(&ranges).into_iter().map(|range| ip::allowed(&place, range)));
    }
    found
}

/// The addresses of this node's endpoints, each once (rule 45).
pub(crate) fn own_addresses(view: &PortView) -> Vec<IpAddr> {
    let all = view.cluster.iter().chain(view.local.iter());
    let mut own: Vec<IpAddr> = all.filter(|target| target.local).map(|target| target.address).collect();
    own.sort_unstable();
    own.dedup();
    own
}

/// The key of a slot of a frontend.
fn slot_key(frontend: &Data, slot: usize, base: u32) -> Data {
    ip::slot(frontend, base.wrapping_add(u32::try_from(slot).unwrap_or(u32::MAX)))
}

fn endpoint(frontend: &Data, slot: usize, base: u32, (address, port): EndpointAddress) -> Element {
    let mut element = Element::from_data(slot_key(frontend, slot, base));
    element.value = ElementValue::Data(ip::target(address, port));
    element
}

/// `key : number`.
pub(crate) fn numbered(key: Data, number: u32) -> Element {
    let mut element = Element::from_data(key);
    element.value = ElementValue::Data(ip::marks([number]));
    element
}

impl Port {
    /// A service port with the number and the slots that it had, if it was there.
    pub(crate) fn adopt(view: &Arc<PortView>, entries: &[Entry], found: &Found, ids: &mut Ids) -> Self {
        let wish = entries.iter().find_map(|(frontend, _)| found.ids.get(frontend).copied());
        let id = view.affinity_seconds.map(|_| ids.take(wish));
        let known = id.filter(|_| id == wish);
        let slots =
            |base| known.map_or_else(|| found.slots(entries, base), |id| found.sticky.slots(id, base));
        let numbers = known.map_or_else(Numbers::default, |id| found.sticky.numbers(id));
        let (cluster, local) = (slots(0), slots(LOCAL_SLOTS));
        let mut port = Self { id, view: Arc::clone(view), cluster, local, numbers };
        let _ = port.cluster.update(&places(&view.cluster));
        let _ = port.local.update(&places(&view.local));
        port.renumber();
        port
    }

    /// A service port that is new, without anything in the kernel.
    pub(crate) fn empty() -> Self {
        let view = PortView {
            frontends: Box::new([]),
            cluster: Arc::new([]),
            local: Arc::new([]),
            affinity_seconds: None,
            serving: Arc::new([]),
        };
        let (cluster, local) = (Slots::new(), Slots::new());
        Self { id: None, view: Arc::new(view), cluster, local, numbers: Numbers::default() }
    }

    /// Gives it a number if it is to have affinity, and has none yet.
    pub(crate) fn number(&mut self, new: Option<&Arc<PortView>>, ids: &mut Ids) {
        if self.id.is_none() && new.is_some_and(|view| view.affinity_seconds.is_some()) {
            self.id = Some(ids.take(None));
        }
    }

    /// What is done at its frontends, with its own set of remembered clients.
    pub(crate) fn placed(&self, entries: Vec<Entry>) -> Vec<Entry> {
        let Some(id) = self.id else { return entries };
        entries.into_iter().map(|(key, behaviour)| (key, behaviour.remembering_in(set_of(id)))).collect()
    }

    /// Gives each endpoint a number, if there is affinity.
    fn renumber(&mut self) {
        let sticky = self.view.affinity_seconds.is_some();
        let all = self.cluster.members().iter().chain(self.local.members()).filter(|_| sticky);
        self.numbers.update(all);
    }

    /// What it has in `members` and `slots`: nothing without affinity.
    fn sticky(&self) -> StickyElements {
        let Some(id) = self.id.filter(|_| self.view.affinity_seconds.is_some()) else {
            return StickyElements::default();
        };
        self.numbers.elements(id, [(&self.cluster, 0), (&self.local, LOCAL_SLOTS)])
    }

    /// Its slots of both scopes.
    fn scopes(&self) -> [(Scope, &Slots<EndpointAddress>, u32); 2] {
        [(Scope::Cluster, &self.cluster, 0), (Scope::Local, &self.local, LOCAL_SLOTS)]
    }

    /// All elements but those that it shares with others: `frontends` and `hairpin`.
    pub(crate) fn elements(&self, key: &PortKey, entries: &[Entry]) -> Edit {
        let mut edit = Edit::default();
        for (frontend, behaviour) in entries {
            for (scope, slots, base) in self.scopes() {
                if behaviour.draws(scope) {
                    let places = slots.members().iter().enumerate();
                    let all = places.map(|(slot, place)| endpoint(frontend, slot, base, *place));
                    edit.endpoints.added.extend(all);
                }
            }
        }
        let sticky = self.sticky();
        edit.members.added = sticky.members;
        edit.slots.added = sticky.slots;
        edit.sources.added = allowed(key, &self.view);
        edit.services.added = services(self.id, &self.view, entries);
        edit
    }

    /// Goes over to another view; none: it is gone. Writes what that takes, but for `frontends` and
    /// `hairpin`.
    pub(crate) fn change(
        &mut self,
        key: &PortKey,
        new: Option<&Arc<PortView>>,
        (before, after): (&[Entry], &[Entry]),
        edit: &mut Edit,
    ) {
        let old = Arc::clone(&self.view);
        let sticky = self.sticky();
        let empty: Targets = Arc::new([]);
        let of = |scope| new.map_or(&empty, |view| view.targets(scope));
        let mut changes = Vec::with_capacity(2);
        let scopes = [(&mut self.cluster, Scope::Cluster), (&mut self.local, Scope::Local)];
        for (slots, scope) in scopes {
            let (targets, before) = (of(scope), old.targets(scope));
            let old_len = slots.members().len();
            let same = Arc::ptr_eq(targets, before) || targets == before;
            let ops = if same { Vec::new() } else { slots.update(&places(targets)).ops };
            changes.push((old_len, ops));
        }
        let uses = |list: &[Entry], frontend: &Data, scope| {
            list.iter().any(|(known, behaviour)| known == frontend && behaviour.draws(scope))
        };
        for ((old_len, ops), (scope, slots, base)) in changes.iter().zip(self.scopes()) {
            let gone = |frontend: &Data, slot| Element::from_data(slot_key(frontend, slot, base));
            for (frontend, _) in before.iter().filter(|(_, behaviour)| behaviour.draws(scope)) {
                if !uses(after, frontend, scope) {
                    edit.endpoints.removed.extend((0..*old_len).map(|slot| gone(frontend, slot)));
                }
            }
            for (frontend, _) in after.iter().filter(|(_, behaviour)| behaviour.draws(scope)) {
                if !uses(before, frontend, scope) {
                    let places = slots.members().iter().enumerate();
                    let all = places.map(|(slot, place)| endpoint(frontend, slot, base, *place));
                    edit.endpoints.added.extend(all);
                    continue;
                }
                for op in ops {
                    let (slot, new) = match op {
                        SlotOp::Replace { slot, new, .. } => (slot, Some(new)),
                        SlotOp::Append { slot, new } => {
                            edit.endpoints.added.push(endpoint(frontend, *slot, base, *new));
                            continue;
                        }
                        SlotOp::Remove { slot, .. } => (slot, None),
                    };
                    edit.endpoints.removed.push(gone(frontend, *slot));
                    edit.endpoints.added.extend(new.map(|new| endpoint(frontend, *slot, base, *new)));
                }
            }
        }
        let id = self.id;
        if old.affinity_seconds.is_some() || new.is_some_and(|view| view.affinity_seconds.is_some()) {
            let new = new.map_or_else(Vec::new, |view| services(id, view, after));
            swap(&mut edit.services, services(id, &old, before), new);
        }
        if new.is_none_or(|new| new.frontends != old.frontends) {
            let new = new.map_or_else(Vec::new, |view| allowed(key, view));
            swap(&mut edit.sources, allowed(key, &old), new);
        }
        let now = match new {
            Some(new) => {
                self.view = Arc::clone(new);
                self.renumber();
                self.sticky()
            }
            None => StickyElements::default(),
        };
        swap(&mut edit.members, sticky.members, now.members);
        swap(&mut edit.slots, sticky.slots, now.slots);
    }
}

/// The number of a service port at its frontends, which affinity asks for.
fn services(id: Option<u32>, view: &PortView, entries: &[Entry]) -> Vec<Element> {
    let Some(id) = id else { return Vec::new() };
    let wanted = if view.affinity_seconds.is_some() { entries } else { &[] };
    wanted.iter().map(|(frontend, _)| numbered(frontend.clone(), id)).collect()
}

/// Whether an address is of a family.
pub(crate) fn is_of(address: IpAddr, family: Family) -> bool {
    Family::of(address) == family
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_40_service_ports_have_sets_of_their_own_as_long_as_there_are_any() {
        let mut ids = Ids::default();
        let sets = AFFINITY_SETS as usize;
        let first: Vec<u32> = (0..sets).map(|_| ids.take(None)).collect();
        let distinct = |ids: &[u32]| ids.iter().map(|id| set_of(*id)).collect::<HashSet<_>>().len();
        assert_eq!(distinct(&first), sets);
        // One goes; whoever comes gets that one's set, under a number that was never used.
        ids.free(first[7]);
        let id = ids.take(None);
        assert!(set_of(id) == set_of(first[7]) && !first.contains(&id));
        // Then they are shared.
        assert!(!first.contains(&ids.take(None)));
        // A restart finds each with its number.
        let mut again = Ids::default();
        assert_eq!(again.take(Some(first[3])), first[3]);
        assert_ne!(set_of(again.take(None)), set_of(first[3]));
    }
}
