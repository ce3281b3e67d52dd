//! Steering: leads from the node's own namespace into routers apart from it.
//!
//! The services of a Network are balanced in that Network's router. Clients outside do not know routers: they come to
//! an address of the node, or to one of a load balancer, and those arrive in the node's own namespace. [`SteerTable`]
//! has a map there from such places to where the router takes them. A steered connection carries a mark, so that the
//! node's rules can tell it from everything else that would like to get into a router.
//!
//! It is one table of its own, a little before service proxies at the same hooks, so that theirs never see what is
//! steered. One changed place is one element to write.
//!
//! Whose traffic is steered depends on who chose the address ([`Chosen`]): a tenant must not take what others send. What
//! comes out of a router is never steered: it is another Network's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::conntrack::{Conntrack, Filter, Flow, L4, TupleFilter};
use knit_kernel::nft::{
    AddrType, Chain, ChainKind, Element, ElementValue, Error, Family as TableFamily, FibFlags, Hook, Kernel,
    L4Proto, NfProto, Nftables, Port, Reg, Rule, Set, Table, TableId, TableState, Transaction, field,
};
use knit_proxy::model::{Family, Protocol};

use crate::backend::delete_table;
use crate::ip;
use crate::layout::{begins_with, elements_of, from_ours};
use crate::others::{Others, after};
use crate::table::report;

/// Where clients come to: an address and a port that lead into a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The address, the node's own or one that somebody routes to it.
    pub address: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// Where a place leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steered {
    /// The router's own address, and a port of it; of the place's family.
    pub to: SocketAddr,
    /// Who may come (rule 43); `None`: anyone. Others are dropped.
    pub sources: Option<Box<[IpNet]>>,
    /// Who chose the address, and so whose traffic is taken.
    pub chosen: Chosen,
}

/// Who chose the address of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Chosen {
    /// The operator: a node port. Taken from the outside, the node and its pods, unless a pod has that port of the node.
    ByOperator,
    /// A load balancer that the operator lets have addresses of nodes. Taken like a node port, and also where a pod has
    /// that port of the node: the pods of k3s' ServiceLB have the ports of the Services that they are there for.
    OnNode,
    /// A load balancer. The same, but never where the address is one of this namespace's own.
    ByProvider,
    /// A tenant. Taken only from the outside, and never where the address is one of this namespace's own.
    ByTenant,
}

/// Something about steering did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteerError {
    /// There is no way to nftables.
    #[error("cannot reach nftables of the node's namespace")]
    Nftables(#[source] Error),
    /// There is no way to connection tracking.
    #[error("cannot reach connection tracking of the node's namespace")]
    Conntrack(#[source] knit_kernel::conntrack::Error),
    /// The kernel refused.
    #[error("cannot write what leads into routers, table {table}")]
    Write {
        /// The table.
        table: TableId,
        /// Why.
        #[source]
        source: Error,
    },
}

/// The table that leads into routers. See the module.
pub struct SteerTable {
    nft: Box<dyn Nftables + Send>,
    conntrack: Option<Conntrack>,
    id: TableId,
    mark: u32,
    /// How the names of links to routers begin.
    uplinks: String,
    /// What is in the kernel; none if that is not known, or is no table at all.
    known: Option<BTreeMap<Place, Steered>>,
    /// Somebody else may have changed that.
    doubted: bool,
    others: Others,
    /// How many changes put right what somebody else had changed.
    repairs: usize,
}

/// After ports of the node that pods have, before service proxies.
const BEFORE_PROXIES: i32 = -105;
/// Before ports of the node that pods have.
const BEFORE_HOST_PORTS: i32 = -115;
/// Each is a walk through the kernel's whole table: beyond a few, one that sees all is cheaper.
const MAX_FILTERS: usize = 4;

/// The sets of one family and one kind of place.
struct Sets {
    /// `address . protocol . port : address . port`
    steer: Set,
    /// Places that not everybody may use, and `address . protocol . port . source`; none where everybody may.
    checked: Option<(Set, Set)>,
}

impl Chosen {
    const ALL: [Self; 4] = [Self::ByOperator, Self::OnNode, Self::ByProvider, Self::ByTenant];

    /// How its sets are called.
    fn name(self) -> &'static str {
        match self {
            Self::ByOperator => "node",
            Self::OnNode => "on-node",
            Self::ByProvider => "balanced",
            Self::ByTenant => "external",
        }
    }
}

impl SteerTable {
    /// For the node's network namespace, with a table of this name; steered connections get the bits of `mark`. The names
    /// of links to routers begin with `uplinks`; the node's pods have theirs in Knit's link group.
    ///
    /// # Errors
    /// If the kernel gives no sockets for nftables or connection tracking there.
    pub fn new_in(namespace: &NetNs, table: &str, mark: u32, uplinks: &str) -> Result<Self, SteerError> {
        let nft = Kernel::open_in(namespace).map_err(SteerError::Nftables)?;
        let conntrack = Conntrack::open_in(namespace).map_err(SteerError::Conntrack)?;
        Ok(Self { conntrack: Some(conntrack), ..Self::over(nft, table, mark, uplinks) })
    }

    /// Over nftables that somebody else brings, as [`Fake`](knit_kernel::nft::Fake), without connection tracking.
    #[must_use]
    pub fn over(nft: impl Nftables + Send + 'static, table: &str, mark: u32, uplinks: &str) -> Self {
        let id = TableId::new(TableFamily::Inet, table);
        Self {
            nft: Box::new(nft),
            conntrack: None,
            id,
            mark,
            uplinks: uplinks.to_owned(),
            known: None,
            doubted: false,
            others: Others::default(),
            repairs: 0,
        }
    }

    /// Listens to changes by others in the table's namespace: `tell` is called at each.
    pub fn watch(&mut self, namespace: &NetNs, tell: Box<dyn Fn() + Send>) {
        self.others.watch(namespace, &self.id.name, tell);
    }

    /// Whether the table is certainly as the last call of [`set`](Self::set) left it, without a look into it.
    pub fn is_intact(&mut self) -> bool {
        !self.doubted && self.nft.generation().is_ok_and(|now| self.others.left_alone(now))
    }

    /// How many changes it took to put right what others had changed, since the last call of this.
    pub fn take_repairs(&mut self) -> usize {
        std::mem::take(&mut self.repairs)
    }

    /// Makes true what is wanted, of which these places may be other ones than at the last call. Returns how many
    /// changes that took. After a failure the next call looks at all of it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(
        &mut self,
        wanted: &BTreeMap<Place, Steered>,
        changed: &BTreeSet<Place>,
    ) -> Result<usize, SteerError> {
        if std::mem::take(&mut self.doubted) {
            self.restore()?;
        }
        let Some(mut known) = self.known.take() else { return self.set_all(wanted) };
        let changed: Vec<Place> =
            changed.iter().filter(|place| known.get(place) != wanted.get(place)).copied().collect();
        if changed.is_empty() {
            self.known = Some(known);
            return Ok(0);
        }
        let tx = self.transaction(&changed, &known, wanted);
        self.others.written();
        if let Err(error) = self.nft.commit_chunked(&tx) {
            tracing::info!(error = report(&error), "a change of steering was refused; looking at all of it");
            return self.set_all(wanted);
        }
        let mut gone = BTreeMap::new();
        for place in &changed {
            let before = match wanted.get(place) {
                Some(new) => known.insert(*place, new.clone()),
                None => known.remove(place),
            };
            gone.extend(before.map(|before| (*place, before)));
        }
        self.known = Some(known);
        self.clean(&changed, &gone, wanted);
        Ok(tx.len())
    }

    /// Somebody else may have changed the table: the next call looks at all of it, and puts it right.
    pub fn look_again(&mut self) {
        self.doubted = true;
    }

    /// Brings the table back to what it was, so that nothing but damage is counted as such.
    fn restore(&mut self) -> Result<(), SteerError> {
        let Some(known) = self.known.take() else { return Ok(()) };
        let repairs = self.make(&known)?;
        if repairs > 0 {
            let all: Vec<Place> = known.keys().copied().collect();
            self.clean(&all, &BTreeMap::new(), &known);
        }
        self.repairs += repairs;
        self.known = Some(known);
        Ok(())
    }

    /// Makes the table so, from whatever is there.
    fn make(&mut self, wanted: &BTreeMap<Place, Steered>) -> Result<usize, SteerError> {
        let failed = |source| SteerError::Write { table: self.id.clone(), source };
        self.others.looking();
        let before = self.nft.generation().map_err(failed)?;
        let changes = if wanted.is_empty() {
            delete_table(&mut *self.nft, &self.id).map(usize::from).map_err(failed)?
        } else {
            let state = self.state(wanted);
            self.nft.apply(&state).map_err(failed)?.len()
        };
        let expected = after(before, usize::from(changes > 0));
        let now = self.nft.generation().map_err(failed)?;
        self.others.looked((now == expected).then_some(now));
        Ok(changes)
    }

    /// Looks at what is there, and makes true what is wanted. A node where nothing is steered has no table.
    fn set_all(&mut self, wanted: &BTreeMap<Place, Steered>) -> Result<usize, SteerError> {
        let changes = self.make(wanted)?;
        if !wanted.is_empty() {
            self.known = Some(wanted.clone());
            let all: Vec<Place> = wanted.keys().copied().collect();
            self.clean(&all, &BTreeMap::new(), wanted);
        }
        Ok(changes)
    }

    fn state(&self, wanted: &BTreeMap<Place, Steered>) -> TableState {
        let table = Table::new(self.id.clone()).comment("what leads into routers, written by knit-proxy");
        let mut state = TableState::new(table);
        for chosen in Chosen::ALL {
            for sets in Family::BOTH.map(|family| Sets::of(family, chosen)) {
                state = state.set(sets.steer, []);
                if let Some((checked, sources)) = sets.checked {
                    state = state.set(checked, []).set(sources, []);
                }
            }
        }
        let local = || Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL);
        let not_local = || local().ret().comment("an address of this node");
        let by_provider = [not_local()].into_iter().chain(self.rules(Chosen::ByProvider));
        let of_routers =
            || begins_with(from_ours(), &field::iifname(), &self.uplinks).ret().comment("another Network's");
        let mut state = state
            .chain(
                Chain::base("first-in", ChainKind::Nat, Hook::Prerouting, BEFORE_HOST_PORTS),
                [of_routers(), Rule::new().jump("on-node")],
            )
            .chain(
                Chain::base("first-out", ChainKind::Nat, Hook::Output, BEFORE_HOST_PORTS),
                [Rule::new().jump("on-node")],
            )
            .chain(Chain::regular("on-node"), self.rules(Chosen::OnNode))
            .chain(
                Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, BEFORE_PROXIES),
                [
                    of_routers(),
                    Rule::new().jump("steer"),
                    from_ours().ret().comment("pods"),
                    local().ret().comment("an address of this node"),
                    Rule::new().jump("external"),
                ],
            )
            .chain(
                Chain::base("output", ChainKind::Nat, Hook::Output, BEFORE_PROXIES),
                [Rule::new().jump("steer")],
            )
            .chain(
                Chain::regular("steer"),
                self.rules(Chosen::ByOperator).into_iter().chain(by_provider).collect::<Vec<_>>(),
            )
            .chain(Chain::regular("external"), self.rules(Chosen::ByTenant));
        for (place, to) in wanted {
            let sets = Sets::of(Family::of(place.address), to.chosen);
            for (set, elements) in elements(&sets, place, to) {
                elements_of(&mut state, set).extend(elements);
            }
        }
        state
    }

    fn rules(&self, chosen: Chosen) -> Vec<Rule> {
        // Beyond the registers that setting a mark needs.
        let at = Reg::new(8).expect("there are sixteen registers");
        let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
        let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
        let (protocol, port) = (field::l4proto, field::th_dport);
        let place4 = (field::ip_daddr(), protocol(), port());
        let place6 = (field::ip6_daddr(), protocol(), port());
        let from4 = (field::ip_daddr(), protocol(), port(), field::ip_saddr());
        let from6 = (field::ip6_daddr(), protocol(), port(), field::ip6_saddr());
        let steer = |rule: Rule| rule.set_ct_mark_bits(self.mark, self.mark);
        let [sets4, sets6] = Family::BOTH.map(|family| Sets::of(family, chosen));
        let mut rules = Vec::new();
        if let (Some((checked4, sources4)), Some((checked6, sources6))) = (sets4.checked, sets6.checked) {
            rules.push(v4().in_set(&place4, checked4.name).not_in_set(&from4, sources4.name).drop());
            rules.push(v6().in_set(&place6, checked6.name).not_in_set(&from6, sources6.name).drop());
        }
        rules.push(steer(v4().map_at(at, &place4, sets4.steer.name)).dnat_at(TableFamily::Ip, at));
        rules.push(steer(v6().map_at(at, &place6, sets6.steer.name)).dnat_at(TableFamily::Ip6, at));
        rules
    }

    /// Who may come is written before what leads there, and goes after it.
    fn transaction(
        &self,
        changed: &[Place],
        known: &BTreeMap<Place, Steered>,
        wanted: &BTreeMap<Place, Steered>,
    ) -> Transaction {
        let (mut tx, mut later) = (Transaction::new(), Transaction::new());
        for place in changed {
            let sets = |chosen| Sets::of(Family::of(place.address), chosen);
            if let Some(old) = known.get(place) {
                let sets = sets(old.chosen);
                for (set, elements) in elements(&sets, place, old).into_iter().rev() {
                    tx.delete_elements(&self.id, set, elements);
                }
            }
            if let Some(new) = wanted.get(place) {
                let sets = sets(new.chosen);
                for (set, elements) in elements(&sets, place, new) {
                    later.create_elements(&self.id, set, elements);
                }
            }
        }
        tx.append(later);
        tx
    }

    /// Deletes UDP flows of changed places that go on to where the place no longer leads (rule 51).
    fn clean(
        &mut self,
        changed: &[Place],
        gone: &BTreeMap<Place, Steered>,
        wanted: &BTreeMap<Place, Steered>,
    ) {
        let Some(conntrack) = &mut self.conntrack else { return };
        let udp: BTreeSet<Place> =
            changed.iter().filter(|place| place.protocol == Protocol::Udp).copied().collect();
        if udp.is_empty() {
            return;
        }
        let tuple = || TupleFilter::new().protocol(Protocol::Udp.number());
        let filters: Vec<Filter> = if udp.len() <= MAX_FILTERS {
            let one = |place: &Place| {
                Filter::family_of(place.address).original(tuple().dst(place.address).dst_port(place.port))
            };
            udp.iter().map(one).collect()
        } else {
            vec![Filter::v4().original(tuple()), Filter::v6().original(tuple())]
        };
        let stale = |flow: &Flow| {
            let (L4::Ports { dst, .. }, L4::Ports { src, .. }) = (flow.original.l4, flow.reply.l4) else {
                return false;
            };
            let place = Place { address: flow.original.dst, protocol: Protocol::Udp, port: dst };
            let answers = SocketAddr::new(flow.reply.src, src);
            match (udp.contains(&place), wanted.get(&place)) {
                (false, _) => false,
                (true, Some(to)) => to.to != answers,
                (true, None) => gone.get(&place).is_some_and(|old| old.to == answers),
            }
        };
        for filter in filters {
            let deleted = conntrack.list(&filter).and_then(|mut flows| {
                flows.retain(stale);
                conntrack.delete(&flows)
            });
            if let Err(error) = deleted {
                tracing::warn!(error = report(&error), "stale UDP flows into routers were not all deleted");
            }
        }
    }
}

impl Sets {
    fn of(family: Family, chosen: Chosen) -> Self {
        type Key<A> = (A, L4Proto, Port);
        let digit = if family == Family::V4 { '4' } else { '6' };
        let name = |what: &str| format!("{}{what}{digit}", chosen.name());
        let steer = match family {
            Family::V4 => Set::map::<Key<Ipv4Addr>, (Ipv4Addr, Port)>(name("")),
            Family::V6 => Set::map::<Key<Ipv6Addr>, (Ipv6Addr, Port)>(name("")),
        };
        let checked = || match family {
            Family::V4 => Set::of::<Key<Ipv4Addr>>(name("-checked")),
            Family::V6 => Set::of::<Key<Ipv6Addr>>(name("-checked")),
        };
        let sources = || match family {
            Family::V4 => Set::of::<(Ipv4Addr, L4Proto, Port, Ipv4Addr)>(name("-sources")).interval(),
            Family::V6 => Set::of::<(Ipv6Addr, L4Proto, Port, Ipv6Addr)>(name("-sources")).interval(),
        };
        // Rule 43 is about load balancers.
        let checked = (chosen != Chosen::ByTenant).then(|| (checked(), sources()));
        Self { steer, checked }
    }
}

/// What a place is in the kernel, in the order in which it is written. Nothing if it leads to another family.
fn elements<'a>(sets: &'a Sets, place: &Place, to: &Steered) -> Vec<(&'a Set, Vec<Element>)> {
    if place.address.is_ipv4() != to.to.is_ipv4() {
        return Vec::new();
    }
    let key = ip::place(place.address, place.protocol, place.port);
    let mut all = Vec::new();
    if let (Some(sources), Some((checked, allowed))) = (&to.sources, &sets.checked) {
        let same = |range: &&IpNet| Family::of_net(**range) == Family::of(place.address);
        let ranges: Vec<IpNet> = sources.iter().filter(same).copied().collect();
        let ranges: Vec<Element> =
            IpNet::aggregate(&ranges).into_iter().map(|range| ip::allowed(&key, range)).collect();
        if !ranges.is_empty() {
            all.push((allowed, ranges));
        }
        all.push((checked, vec![Element::from_data(key.clone())]));
    }
    let mut element = Element::from_data(key);
    element.value = ElementValue::Data(ip::target(to.to.ip(), to.to.port()));
    all.push((&sets.steer, vec![element]));
    all
}

impl std::fmt::Debug for SteerTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteerTable").field("table", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use knit_kernel::nft::{Fake, Generation, Result};

    use super::*;

    /// A fake that others can look into.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Fake>>);

    impl Nftables for Shared {
        fn commit(&mut self, transaction: &Transaction) -> Result<()> {
            self.0.lock().unwrap().commit(transaction)
        }

        fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> Result<()> {
            self.0.lock().unwrap().commit_if(generation, transaction)
        }

        fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize> {
            self.0.lock().unwrap().commit_chunked(transaction)
        }

        fn generation(&mut self) -> Result<Generation> {
            self.0.lock().unwrap().generation()
        }

        fn tables(&mut self) -> Result<Vec<TableId>> {
            self.0.lock().unwrap().tables()
        }

        fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
            self.0.lock().unwrap().snapshot(table)
        }
    }

    fn place(address: &str, port: u16) -> Place {
        Place { address: address.parse().unwrap(), protocol: Protocol::Tcp, port }
    }

    fn to(text: &str) -> Steered {
        Steered { to: text.parse().unwrap(), sources: None, chosen: Chosen::ByOperator }
    }

    #[test]
    fn changes_and_a_fresh_start_come_to_the_same() {
        let shared = Shared::default();
        let mut table = SteerTable::over(shared.clone(), "knit-steer", 0x10_0000, "up-");
        let (web, six, lb) =
            (place("192.0.2.1", 30080), place("2001:db8::1", 30080), place("203.0.113.7", 80));
        let mut wanted = BTreeMap::from([(web, to("169.254.192.2:30080")), (six, to("[fd6b::2]:30080"))]);
        table.set(&wanted, &wanted.keys().copied().collect()).unwrap();
        let checked = Steered {
            sources: Some(Box::new([
                "198.51.100.0/25".parse().unwrap(),
                "198.51.100.128/25".parse().unwrap(),
            ])),
            chosen: Chosen::ByProvider,
            ..to("169.254.192.2:1024")
        };
        // One comes with a list of who may, one leads elsewhere, one goes.
        wanted.insert(lb, checked);
        wanted.insert(web, to("169.254.192.6:30080"));
        wanted.remove(&six);
        let changes = table.set(&wanted, &BTreeSet::from([web, six, lb])).unwrap();
        assert!((1..=8).contains(&changes), "{changes}");
        assert_eq!(table.set(&wanted, &BTreeSet::from([web, six, lb])).unwrap(), 0);
        let id = TableId::new(TableFamily::Inet, "knit-steer");
        let by_change = shared.clone().table(&id).unwrap().unwrap().without_handles();
        let mut fresh = SteerTable::over(Fake::new(), "knit-steer", 0x10_0000, "up-");
        fresh.set(&wanted, &BTreeSet::new()).unwrap();
        let at_once = fresh.nft.table(&id).unwrap().unwrap().without_handles();
        assert_eq!(by_change.to_string(), at_once.to_string());
        let text = by_change.to_string();
        assert!(text.contains("203.0.113.7") && !text.contains("2001:db8::1"), "{text}");
        // A start that finds all of it as it should be changes nothing.
        let mut again = SteerTable::over(shared, "knit-steer", 0x10_0000, "up-");
        assert_eq!(again.set(&wanted, &BTreeSet::new()).unwrap(), 0);
    }
}
