//! The service ports of one table: their numbers, their slots, and the elements that follow from them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use knit_kernel::nft::{Data, Element, ElementValue, TableState};
use knit_proxy::diff::{SlotOp, Slots};
use knit_proxy::model::Family;
use knit_proxy::view::{NodePortMatch, NodeSettings, PortKey, PortView, Scope, Sources, Targets};

use crate::behaviour::{Behaviour, LOCAL_SLOTS};
use crate::ip;
use crate::layout::Sets;

/// An endpoint as the kernel has it.
pub(crate) type Place = (IpAddr, u16);

/// A service port in the kernel.
#[derive(Debug)]
pub(crate) struct Port {
    pub id: u32,
    pub view: Arc<PortView>,
    cluster: Slots<Place>,
    local: Slots<Place>,
}

/// Numbers of service ports: the lowest that was never used first, so that one that is gone is not soon another.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    next: u32,
    used: HashSet<u32>,
}

/// What was found in the kernel, to go on from.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The number of the service port at a frontend's key.
    ids: HashMap<Data, u32>,
    /// Endpoints by number and slot.
    slots: HashMap<u32, BTreeMap<u32, Place>>,
    /// The number of a behaviour, by its chain's name.
    pub actions: HashMap<Arc<str>, u32>,
}

/// What is written for a change, set by set.
#[derive(Debug, Default)]
pub(crate) struct Edit {
    pub endpoints: SetEdit,
    pub members: SetEdit,
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
        if let Some(id) = wish
            && self.used.insert(id)
        {
            self.next = self.next.max(id.wrapping_add(1));
            return id;
        }
        while !self.used.insert(self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        id
    }

    pub(crate) fn free(&mut self, id: u32) {
        self.used.remove(&id);
    }

    /// Never hands out a number that is in the kernel to somebody else.
    pub(crate) fn start_after(&mut self, found: &Found) {
        self.next = found.ids.values().max().map_or(0, |id| id.wrapping_add(1)).max(self.next);
    }
}

impl Found {
    /// Reads what is there. Values that make no sense are left out, and put right by the difference.
    pub(crate) fn read(state: &TableState, sets: &Sets) -> Self {
        let mut found = Self::default();
        let elements = |set: &knit_kernel::nft::Set| {
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
                && let (Some([id, slot]), Some(place)) =
                    (ip::read_marks(&element.key), ip::read_target(value))
            {
                found.slots.entry(id).or_default().insert(slot, place);
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

    /// The endpoints from slot `base` on, as far as there is no gap.
    fn slots(&self, id: u32, base: u32) -> Slots<Place> {
        let dense = self.slots.get(&id).into_iter().flat_map(|slots| slots.range(base..));
        let dense = dense.zip(base..).take_while(|((slot, _), wanted)| *slot == wanted);
        Slots::found(dense.map(|((_, place), _)| *place).collect())
    }
}

fn places(targets: &Targets) -> Vec<Place> {
    targets.iter().map(|target| (target.address, target.port)).collect()
}

/// Where a service port answers: the key, and what is done there.
pub(crate) fn entries(key: &PortKey, view: &PortView, node: &NodeSettings) -> Vec<(Data, Behaviour)> {
    let mut found = Vec::with_capacity(view.frontends.len());
    for frontend in &view.frontends {
        let mut add = |address, any: bool| {
            let place = ip::place(address, key.protocol, frontend.port);
            found.push((place, Behaviour::of(frontend, view, any)));
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

/// The endpoints that count for affinity, in both scopes (rule 41).
fn members(id: u32, view: &PortView) -> Vec<Element> {
    if view.affinity_seconds.is_none() {
        return Vec::new();
    }
    let of = |scope: Scope, number: u32| {
        let targets = view.targets(scope).iter();
        targets.map(move |t| Element::from_data(ip::member(id, number, &ip::target(t.address, t.port))))
    };
    of(Scope::Cluster, 0).chain(of(Scope::Local, LOCAL_SLOTS)).collect()
}

/// The addresses of this node's endpoints, each once (rule 45).
pub(crate) fn own_addresses(view: &PortView) -> Vec<IpAddr> {
    let all = view.cluster.iter().chain(view.local.iter());
    let mut own: Vec<IpAddr> = all.filter(|target| target.local).map(|target| target.address).collect();
    own.sort_unstable();
    own.dedup();
    own
}

fn endpoint(id: u32, slot: usize, base: u32, (address, port): Place) -> Element {
    let slot = base.wrapping_add(u32::try_from(slot).unwrap_or(u32::MAX));
    let mut element = Element::from_data(ip::marks([id, slot]));
    element.value = ElementValue::Data(ip::target(address, port));
    element
}

/// `key : number`.
pub(crate) fn numbered(key: Data, number: u32) -> Element {
    let mut element = Element::from_data(key);
    element.value = ElementValue::Data(ip::marks([number]));
    element
}

/// Elements of `old` that are not in `new`, and the other way round.
fn swap(edit: &mut SetEdit, old: Vec<Element>, new: Vec<Element>) {
    let same = |list: &[Element], element: &Element| list.iter().any(|e| e == element);
    if old.len().min(new.len()) <= 8 {
        edit.added.extend(new.iter().filter(|e| !same(&old, e)).cloned());
        edit.removed.extend(old.into_iter().filter(|e| !same(&new, e)));
        return;
    }
    let old_keys: HashSet<Data> = old.iter().map(|e| e.key.clone()).collect();
    let new_keys: HashSet<Data> = new.iter().map(|e| e.key.clone()).collect();
    edit.removed.extend(old.into_iter().filter(|e| !new_keys.contains(&e.key)));
    edit.added.extend(new.into_iter().filter(|e| !old_keys.contains(&e.key)));
}

impl Port {
    /// A service port with the number and the slots that it had, if it was there.
    pub(crate) fn adopt(
        key: &PortKey,
        view: &Arc<PortView>,
        node: &NodeSettings,
        found: &Found,
        ids: &mut Ids,
    ) -> Self {
        let wish = entries(key, view, node).iter().find_map(|(place, _)| found.ids.get(place).copied());
        let id = ids.take(wish);
        let known = |base| if wish == Some(id) { found.slots(id, base) } else { Slots::new() };
        let mut port = Self { id, view: Arc::clone(view), cluster: known(0), local: known(LOCAL_SLOTS) };
        let _ = port.cluster.update(&places(&view.cluster));
        let _ = port.local.update(&places(&view.local));
        port
    }

    /// A service port that is new, without anything in the kernel.
    pub(crate) fn empty(ids: &mut Ids) -> Self {
        let view = PortView {
            frontends: Box::new([]),
            cluster: Arc::new([]),
            local: Arc::new([]),
            affinity_seconds: None,
            serving: Arc::new([]),
        };
        Self { id: ids.take(None), view: Arc::new(view), cluster: Slots::new(), local: Slots::new() }
    }

    /// All elements but those that it shares with others: `frontends` and `hairpin`.
    pub(crate) fn elements(&self, key: &PortKey, node: &NodeSettings) -> Edit {
        let mut edit = Edit::default();
        for (slots, base) in [(&self.cluster, 0), (&self.local, LOCAL_SLOTS)] {
            let places = slots.members().iter().enumerate();
            edit.endpoints.added.extend(places.map(|(slot, place)| endpoint(self.id, slot, base, *place)));
        }
        edit.members.added = members(self.id, &self.view);
        edit.sources.added = allowed(key, &self.view);
        let entries = entries(key, &self.view, node).into_iter();
        edit.services.added = entries.map(|(place, _)| numbered(place, self.id)).collect();
        edit
    }

    /// Goes over to another view; none: it is gone. Writes what that takes, but for `frontends` and `hairpin`.
    pub(crate) fn change(
        &mut self,
        key: &PortKey,
        new: Option<&Arc<PortView>>,
        node: &NodeSettings,
        edit: &mut Edit,
    ) {
        let old = Arc::clone(&self.view);
        let empty: Targets = Arc::new([]);
        let (id, cluster) = (self.id, new.map_or(&empty, |view| &view.cluster));
        let local = new.map_or(&empty, |view| &view.local);
        let scopes = [
            (&mut self.cluster, cluster, &old.cluster, 0),
            (&mut self.local, local, &old.local, LOCAL_SLOTS),
        ];
        for (slots, targets, before, base) in scopes {
            if Arc::ptr_eq(targets, before) || targets == before {
                continue;
            }
            for op in slots.update(&places(targets)).ops {
                match op {
                    SlotOp::Replace { slot, old, new } => {
                        edit.endpoints.removed.push(endpoint(id, slot, base, old));
                        edit.endpoints.added.push(endpoint(id, slot, base, new));
                    }
                    SlotOp::Append { slot, new } => {
                        edit.endpoints.added.push(endpoint(id, slot, base, new));
                    }
                    SlotOp::Remove { slot, old } => {
                        edit.endpoints.removed.push(endpoint(id, slot, base, old));
                    }
                }
            }
        }
        let of = |view: Option<&Arc<PortView>>, f: &dyn Fn(&PortView) -> Vec<Element>| {
            view.map_or_else(Vec::new, |view| f(view))
        };
        if old.affinity_seconds.is_some() || new.is_some_and(|view| view.affinity_seconds.is_some()) {
            let new = of(new, &|view| members(id, view));
            swap(&mut edit.members, members(id, &old), new);
        }
        if new.is_none_or(|new| new.frontends != old.frontends) {
            swap(&mut edit.sources, allowed(key, &old), of(new, &|view| allowed(key, view)));
            let services = |view: &PortView| -> Vec<Element> {
                entries(key, view, node).into_iter().map(|(place, _)| numbered(place, id)).collect()
            };
            swap(&mut edit.services, services(&old), of(new, &services));
        }
        if let Some(new) = new {
            self.view = Arc::clone(new);
        }
    }
}

/// Whether an address is of a family.
pub(crate) fn is_of(address: IpAddr, family: Family) -> bool {
    Family::of(address) == family
}
