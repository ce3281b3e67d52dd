//! One family's table: brought to a state as a whole, or changed by a few elements.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use knit_nft::{
    Chain, Data, Element, Error, Name, Nftables, Op, Result, Rule, Set, TableState, Transaction, Verdict,
    diff, until_current,
};
use knit_proxy::view::{Changes, NodeSettings, NodeView, PortKey, PortView};
pub(crate) use knit_types::chain as report;

use crate::behaviour::{Behaviour, Leaf};
use crate::ip;
use crate::layout::{Layout, chain_state, elements_of};
use crate::ports::{Edit, Found, Ids, Port, SetEdit, entries, is_of, numbered, own_addresses};

/// Chains that nobody uses are kept for a while, because endpoint counts go up and down; this many at most.
const IDLE_CHAINS: usize = 32;
/// With the chains that are used, those for this many endpoints more or less are made in a new table: a rule
/// that is added later makes the kernel walk through all elements of the maps that it uses, which is 0.2 s
/// with a million of them. While the maps are empty, it is nothing.
const SPARE: u32 = 4;
/// How often a sync plans again because somebody changed the rule set in between. The generation is that of
/// the whole namespace: where other programs change theirs many times a second, after that only this table
/// counts, which is nobody else's.
const ATTEMPTS: u32 = 3;

/// One family's table as it is in the kernel.
#[derive(Debug)]
pub(crate) struct FamilyTable {
    layout: Layout,
    node: Arc<NodeSettings>,
    ports: HashMap<PortKey, Port>,
    ids: Ids,
    actions: HashMap<Behaviour, Action>,
    leaves: HashMap<Leaf, usize>,
    idle: usize,
    /// How many service ports have a local endpoint at an address.
    hairpin: HashMap<IpAddr, u32>,
    /// The sets of remembered clients that are there.
    clients: BTreeSet<u32>,
    /// Chains that nobody leads to any more, and that the kernel would not delete together with what led
    /// there.
    doomed: Vec<Name>,
}

#[derive(Debug)]
struct Action {
    number: u32,
    users: usize,
    /// Made ahead of time, and kept whether or not somebody uses it.
    spare: bool,
}

/// What a sync came to.
pub(crate) struct Synced {
    pub table: FamilyTable,
    /// Service ports that the kernel refused, and why.
    pub refused: Vec<(PortKey, String)>,
    /// What was committed, for those who count.
    pub changes: usize,
    /// In how many transactions.
    pub commits: usize,
}

impl FamilyTable {
    /// Brings the kernel's table to `state`, from whatever is there. Ports that the kernel refuses are left
    /// out.
    pub(crate) fn sync(nft: &mut dyn Nftables, layout: &Layout, state: &NodeView) -> Result<Synced> {
        let mut refused: Vec<(PortKey, String)> = Vec::new();
        loop {
            let (table, committed) = until_current(nft, &layout.id, ATTEMPTS + 1, |nft, attempt, found| {
                let skip: BTreeSet<&PortKey> = refused.iter().map(|(key, _)| key).collect();
                let (mut table, wanted) = Self::build(layout, state, found.as_ref(), &skip);
                let plan = diff(found.as_ref(), &wanted);
                drop((found, wanted));
                let at = (!attempt.last).then_some(attempt.generation);
                match sparing_busy_chains(&plan, |plan| nft.commit_planned(at, plan)) {
                    Ok((commits, left)) => {
                        table.doomed = left;
                        Ok(Some((table, Ok((plan.len(), commits)))))
                    }
                    Err(error) if error.is_stale() => Err(error),
                    // The table knows whose fault it is.
                    Err(error) => Ok(Some((table, Err(error)))),
                }
            })?;
            match committed {
                Ok((changes, commits)) => return Ok(Synced { table, refused, changes, commits }),
                Err(error) => match table.culprit(&error) {
                    Some(key) if refused.iter().all(|(known, _)| *known != key) => {
                        refused.push((key, report(&error)));
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// Whether it is a table for this state and no other.
    pub(crate) fn is_for(&self, state: &NodeView) -> bool {
        let own = state.ports.iter().filter(|(key, _)| key.family == self.layout.family);
        let same = |(key, view): (&PortKey, &Arc<PortView>)| {
            self.ports.get(key).is_some_and(|port| Arc::ptr_eq(&port.view, view) || port.view == *view)
        };
        self.node == state.node && own.clone().count() == self.ports.len() && own.into_iter().all(same)
    }

    fn build(
        layout: &Layout,
        state: &NodeView,
        found: Option<&TableState>,
        skip: &BTreeSet<&PortKey>,
    ) -> (Self, TableState) {
        let fresh = found.is_none();
        let found = found.map_or_else(Found::default, |found| Found::read(found, &layout.sets));
        let node = &state.node;
        let mut wanted = layout.skeleton(node);
        let mut table = Self {
            layout: layout.clone(),
            node: Arc::clone(node),
            ports: HashMap::new(),
            ids: Ids::default(),
            actions: HashMap::new(),
            leaves: HashMap::new(),
            idle: 0,
            hairpin: HashMap::new(),
            clients: BTreeSet::new(),
            doomed: Vec::new(),
        };
        table.ids.start_after(&found);
        let sets = &layout.sets;
        let mut numbers: BTreeSet<u32> = found.actions.values().copied().collect();
        let mut all = Edit::default();
        for (key, view) in &state.ports {
            if key.family != layout.family || skip.contains(key) {
                continue;
            }
            let entries = entries(key, view, node, layout);
            let port = Port::adopt(view, &entries, &found, &mut table.ids);
            let entries = port.placed(entries);
            let Edit { endpoints, members, slots, sources, services, .. } = port.elements(key, &entries);
            all.endpoints.added.extend(endpoints.added);
            all.members.added.extend(members.added);
            all.slots.added.extend(slots.added);
            all.sources.added.extend(sources.added);
            all.services.added.extend(services.added);
            for (place, behaviour) in entries {
                let action = table.actions.entry(behaviour).or_insert_with(|| {
                    let name: Arc<str> = behaviour.to_string().into();
                    let number =
                        found.actions.get(&name).copied().unwrap_or_else(|| lowest_free(&mut numbers));
                    Action { number, users: 0, spare: false }
                });
                action.users += 1;
                all.frontends.added.push(numbered(place, action.number));
            }
            for address in own_addresses(view) {
                *table.hairpin.entry(address).or_default() += 1;
            }
            table.ports.insert(key.clone(), port);
        }
        let spare: BTreeSet<Behaviour> = table.actions.keys().flat_map(|used| used.near(SPARE)).collect();
        for behaviour in spare {
            let name: Arc<str> = behaviour.to_string().into();
            let known = found.actions.get(&name).copied();
            if !fresh && known.is_none() {
                continue;
            }
            table.actions.entry(behaviour).or_insert_with(|| Action {
                number: known.unwrap_or_else(|| lowest_free(&mut numbers)),
                users: 0,
                spare: true,
            });
        }
        for (behaviour, action) in &table.actions {
            behaviour.leaves().for_each(|leaf| *table.leaves.entry(leaf).or_default() += 1);
            elements_of(&mut wanted, &sets.actions).extend([act(behaviour, action.number)]);
            if let Some(chain) = layout.behaviour(behaviour) {
                wanted.chains.insert(chain.0.clone(), chain_state(chain));
            }
        }
        table.clients = table.leaves.keys().filter_map(Leaf::clients).collect();
        for set in &table.clients {
            // What packets wrote there stays.
            elements_of(&mut wanted, &layout.affinity(*set));
        }
        for chain in table.leaves.keys().filter_map(|leaf| layout.leaf(*leaf)) {
            wanted.chains.insert(chain.0.clone(), chain_state(chain));
        }
        all.hairpin.added = table.hairpin.keys().map(|a| Element::from_data(ip::pair(*a))).collect();
        let cluster_ips = state.cluster_ips.keys().filter(|a| is_of(**a, layout.family));
        all.cluster_ips.added = cluster_ips.map(|a| Element::from_data(ip::address(*a))).collect();
        for (set, edit) in [
            (&sets.endpoints, all.endpoints),
            (&sets.members, all.members),
            (&sets.slots, all.slots),
            (&sets.sources, all.sources),
            (&sets.services, all.services),
            (&sets.frontends, all.frontends),
            (&sets.hairpin, all.hairpin),
            (&sets.cluster_ips, all.cluster_ips),
        ] {
            elements_of(&mut wanted, set).extend(edit.added);
        }
        (table, wanted)
    }

    /// The service port that an element belongs to which the kernel refused.
    fn culprit(&self, error: &Error) -> Option<PortKey> {
        let key = error.element()?;
        let place = |port: &PortKey, view: &PortView| {
            entries(port, view, &self.node, &self.layout)
                .iter()
                .any(|(place, _)| key.as_slice().starts_with(place.as_slice()))
        };
        let id: Option<[u32; 1]> = ip::read_marks(&Data::from_slice(key.as_slice().get(..4)?));
        let by_id = |port: &Port| id.is_some_and(|[id]| port.id == Some(id));
        let of_place = self.ports.iter().find(|(key, port)| place(key, &port.view));
        let found = of_place.or_else(|| self.ports.iter().find(|(_, port)| by_id(port)));
        found.map(|(key, _)| key.clone())
    }

    /// Makes the changes that `state` has over what is there. After an error it is not known what is there.
    pub(crate) fn apply(&mut self, nft: &mut dyn Nftables, changes: &Changes) -> Result<usize> {
        let family = self.layout.family;
        let mut edit = Edit::default();
        let mut chains = Transaction::new();
        for change in changes.ports.iter().filter(|change| change.key.family == family) {
            self.change(&change.key, change.new.as_ref(), &mut edit, &mut chains);
        }
        let ips = |list: &[IpAddr]| -> Vec<Element> {
            let own = list.iter().filter(|address| is_of(**address, family));
            own.map(|address| Element::from_data(ip::address(*address))).collect()
        };
        edit.cluster_ips =
            SetEdit { added: ips(&changes.cluster_ips_added), removed: ips(&changes.cluster_ips_removed) };
        self.bury(nft, &chains);
        let mut tx = chains;
        self.write(edit, &mut tx);
        if self.idle > IDLE_CHAINS {
            self.reap(&mut tx);
        }
        if tx.is_empty() {
            return Ok(0);
        }
        let (_, left) = sparing_busy_chains(&tx, |tx| nft.commit_chunked(tx))?;
        let committed = tx.len() - left.len();
        self.doomed.extend(left);
        Ok(committed)
    }

    /// Deletes chains that were left behind; those that are wanted again stay.
    fn bury(&mut self, nft: &mut dyn Nftables, chains: &Transaction) {
        if self.doomed.is_empty() {
            return;
        }
        let wanted = |name: &Name| {
            chains.ops().iter().any(|op| matches!(op, Op::AddChain { chain, .. } if chain.name == *name))
        };
        let mut tx = Transaction::new();
        for name in self.doomed.iter().filter(|name| !wanted(name)) {
            tx.delete_chain(&self.layout.id, Arc::clone(name));
        }
        match nft.commit(&tx) {
            Err(error) if error.is_busy() => {}
            // What is not there need not go, and what else is wrong the next full sync sees.
            _ => self.doomed.clear(),
        }
    }

    fn change(
        &mut self,
        key: &PortKey,
        new: Option<&Arc<PortView>>,
        edit: &mut Edit,
        chains: &mut Transaction,
    ) {
        let mut port = match self.ports.remove(key) {
            Some(port) => port,
            None if new.is_none() => return,
            None => Port::empty(),
        };
        let before = port.placed(entries(key, &port.view, &self.node, &self.layout));
        let own_before = own_addresses(&port.view);
        port.number(new, &mut self.ids);
        let after = new.map_or_else(Vec::new, |view| entries(key, view, &self.node, &self.layout));
        let after = port.placed(after);
        port.change(key, new, (&before, &after), edit);
        for (place, behaviour) in &after {
            match before.iter().find(|(known, _)| known == place) {
                Some((_, same)) if same == behaviour => continue,
                Some((_, other)) => {
                    let number = self.number(other);
                    edit.frontends.removed.push(numbered(place.clone(), number));
                }
                None => {}
            }
            let number = self.acquire(behaviour, chains);
            edit.frontends.added.push(numbered(place.clone(), number));
        }
        for (place, behaviour) in &before {
            let now = after.iter().find(|(known, _)| known == place);
            if now.is_none() {
                let number = self.number(behaviour);
                edit.frontends.removed.push(numbered(place.clone(), number));
            }
            if now.is_none_or(|(_, other)| other != behaviour) {
                self.release(behaviour);
            }
        }
        let own_after = new.map_or_else(Vec::new, |view| own_addresses(view));
        for address in own_after.iter().filter(|a| own_before.binary_search(a).is_err()) {
            let count = self.hairpin.entry(*address).or_default();
            *count += 1;
            if *count == 1 {
                edit.hairpin.added.push(Element::from_data(ip::pair(*address)));
            }
        }
        for address in own_before.iter().filter(|a| own_after.binary_search(a).is_err()) {
            let Some(count) = self.hairpin.get_mut(address) else { continue };
            *count -= 1;
            if *count == 0 {
                self.hairpin.remove(address);
                edit.hairpin.removed.push(Element::from_data(ip::pair(*address)));
            }
        }
        if new.is_some() {
            self.ports.insert(key.clone(), port);
        } else {
            port.id.into_iter().for_each(|id| self.ids.free(id));
        }
    }

    fn number(&self, behaviour: &Behaviour) -> u32 {
        self.actions.get(behaviour).map_or(u32::MAX, |action| action.number)
    }

    /// The number of a behaviour, with its chains made if there are none.
    fn acquire(&mut self, behaviour: &Behaviour, chains: &mut Transaction) -> u32 {
        if let Some(action) = self.actions.get_mut(behaviour) {
            self.idle -= usize::from(action.users == 0 && !action.spare);
            action.users += 1;
            return action.number;
        }
        let mut taken: BTreeSet<u32> = self.actions.values().map(|action| action.number).collect();
        let number = lowest_free(&mut taken);
        for leaf in behaviour.leaves() {
            let users = self.leaves.entry(leaf).or_default();
            *users += 1;
            if let Some(set) = leaf.clients().filter(|set| self.clients.insert(*set)) {
                chains.add_set(&self.layout.id, self.layout.affinity(set));
            }
            if *users == 1
                && let Some((name, rules)) = self.layout.leaf(leaf)
            {
                self.add_chain(chains, &name, rules);
            }
        }
        if let Some((name, rules)) = self.layout.behaviour(behaviour) {
            self.add_chain(chains, &name, rules);
        }
        chains.add_elements(&self.layout.id, &self.layout.sets.actions, vec![act(behaviour, number)]);
        self.actions.insert(*behaviour, Action { number, users: 1, spare: false });
        number
    }

    fn add_chain(&self, tx: &mut Transaction, name: &Arc<str>, rules: Vec<Rule>) {
        tx.add_chain(&self.layout.id, Chain::regular(Arc::clone(name)));
        if self.doomed.contains(name) {
            tx.flush_chain(&self.layout.id, Arc::clone(name));
        }
        for rule in rules {
            tx.add_rule(&self.layout.id, Arc::clone(name), rule);
        }
    }

    fn release(&mut self, behaviour: &Behaviour) {
        if let Some(action) = self.actions.get_mut(behaviour) {
            action.users -= 1;
            self.idle += usize::from(action.users == 0 && !action.spare);
        }
    }

    /// Deletes the chains that nobody uses.
    fn reap(&mut self, tx: &mut Transaction) {
        let idle = self.actions.iter().filter(|(_, action)| action.users == 0 && !action.spare);
        let idle: BTreeMap<Behaviour, u32> = idle.map(|(b, action)| (*b, action.number)).collect();
        let (id, sets) = (&self.layout.id, &self.layout.sets);
        let elements = idle.iter().map(|(behaviour, number)| act(behaviour, *number)).collect();
        tx.delete_elements(id, &sets.actions, elements);
        for behaviour in idle.keys() {
            self.actions.remove(behaviour);
            if !behaviour.is_plain() {
                tx.delete_chain(id, behaviour.to_string());
            }
        }
        for leaf in idle.keys().flat_map(Behaviour::leaves) {
            let Some(users) = self.leaves.get_mut(&leaf) else { continue };
            *users -= 1;
            if *users == 0 {
                self.leaves.remove(&leaf);
                if matches!(leaf, Leaf::Endpoints { .. }) {
                    tx.delete_chain(id, leaf.to_string());
                }
            }
        }
        self.idle = 0;
    }

    /// Puts the edits in an order in which every beginning of the transaction is one to live with: endpoints
    /// come before the frontends that lead to them, and go after those.
    fn write(&self, edit: Edit, tx: &mut Transaction) {
        let (id, sets) = (&self.layout.id, &self.layout.sets);
        let mut last = Vec::new();
        type Sorted = (Vec<Element>, Vec<Element>, Vec<Element>);
        let mut put = |set: &Set, (gone, replaced, added): Sorted, tx: &mut Transaction| {
            if !replaced.is_empty() {
                tx.delete_elements(id, set, replaced);
            }
            if !added.is_empty() {
                tx.create_elements(id, set, added);
            }
            if !gone.is_empty() {
                let mut tx = Transaction::new();
                tx.delete_elements(id, set, gone);
                last.push(tx);
            }
        };
        put(&sets.endpoints, edit.endpoints.sorted(), tx);
        put(&sets.members, edit.members.sorted(), tx);
        put(&sets.slots, edit.slots.sorted(), tx);
        put(&sets.sources, edit.sources.sorted_ranges(), tx);
        put(&sets.hairpin, edit.hairpin.sorted(), tx);
        put(&sets.services, edit.services.sorted(), tx);
        // What answers here no more goes at once, before its endpoints do.
        let (gone, replaced, added) = edit.frontends.sorted();
        for removed in [gone, replaced] {
            if !removed.is_empty() {
                tx.delete_elements(id, &sets.frontends, removed);
            }
        }
        if !added.is_empty() {
            tx.create_elements(id, &sets.frontends, added);
        }
        put(&sets.cluster_ips, edit.cluster_ips.sorted(), tx);
        // What leads to something goes before it.
        for gone in last.into_iter().rev() {
            tx.append(gone);
        }
    }
}

/// Commits; if a chain that is to go is in use, all but the deletions of chains. Kernels before 6.2 do not
/// delete a chain together with the element that led there, nor soon after: they let go of the element later.
/// Returns what `commit` does, and the chains that were left.
fn sparing_busy_chains(
    tx: &Transaction,
    mut commit: impl FnMut(&Transaction) -> Result<usize>,
) -> Result<(usize, Vec<Name>)> {
    let busy = match commit(tx) {
        Err(error) if error.is_busy() => error,
        other => return other.map(|commits| (commits, Vec::new())),
    };
    let (mut rest, mut left) = (Transaction::new(), Vec::new());
    for op in tx.ops() {
        match op {
            Op::DeleteChain { chain, .. } => left.push(Arc::clone(chain)),
            other => {
                rest.push(other.clone());
            }
        }
    }
    if left.is_empty() { Err(busy) } else { commit(&rest).map(|commits| (commits, left)) }
}

/// An element of `actions`.
fn act(behaviour: &Behaviour, number: u32) -> Element {
    Element::from_data(ip::marks([number])).verdict(Verdict::Goto(behaviour.to_string().into()))
}

fn lowest_free(taken: &mut BTreeSet<u32>) -> u32 {
    let number = (1..).find(|number| !taken.contains(number)).unwrap_or(u32::MAX);
    taken.insert(number);
    number
}
