//! Steering: leads from the node's own namespace into routers apart from it.
//!
//! [`SteerTable`] has a map from entrances to where the router takes them. A steered connection carries a
//! mark ([`STEERED`]), so that the node's rules can tell it from everything else that would like to get into
//! a router.
//!
//! It is one table of its own, a little before service proxies at the same hooks, so that theirs never see
//! what is steered. One changed entrance is one element to write.
//!
//! Whose traffic is steered depends on who chose the address ([`Chosen`]): a tenant must not take what others
//! send. What comes out of a router is never steered: it is another Network's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::conntrack::{Conntrack, Filter, Flow, L4, TupleFilter};
use knit_kernel::nft::Kernel;
use knit_kernel::watch::Untouched;
use knit_nft::{
    AddrType, Chain, ChainKind, Data, Element, ElementValue, Family as TableFamily, FibFlags, Hook, Key,
    L4Proto, NfProto, Nftables, Port, Reg, Rule, Set, SetState, Table, TableId, TableState, Transaction,
    field,
};
use knit_runtime::routers::{Chosen, Entrance, Steered, Steering};
use knit_runtime::{Protocol, Result};
use knit_types::Family;

use crate::fail::{chain, internal};
use crate::rules::{STEERED, from_ours};
use crate::uplink::NODE_END_PREFIX;

/// The name of the table.
const TABLE: &str = "knit-steer";

/// The table that leads into routers. See the module.
pub(crate) struct SteerTable {
    nft: Box<dyn Nftables + Send>,
    conntrack: Option<Conntrack>,
    /// Where it is; none if nobody else can be there.
    namespace: Option<NetNs>,
    id: TableId,
    /// What is in the kernel; none if that is not known, or is no table at all.
    known: Option<BTreeMap<Entrance, Steered>>,
    /// Somebody else may have changed that.
    doubted: bool,
    others: Untouched,
    /// How many changes repaired what somebody else had changed.
    repairs: usize,
}

/// After ports of the node that pods have, before service proxies.
const BEFORE_PROXIES: i32 = -105;
/// Before ports of the node that pods have.
const BEFORE_HOST_PORTS: i32 = -115;
/// Each is a walk through the kernel's whole table: beyond a few, one that sees all is cheaper.
const MAX_FILTERS: usize = 4;

/// The sets of one family and one kind of entrance.
struct Sets {
    /// `address . protocol . port : address . port`
    steer: Set,
    /// Entrances that not everybody may use, and `address . protocol . port . source`; none where everybody
    /// may.
    checked: Option<(Set, Set)>,
}

const CHOSEN: [Chosen; 4] = [Chosen::ByOperator, Chosen::OnNode, Chosen::ByProvider, Chosen::ByTenant];

/// How the sets of a kind of entrance are called.
fn name(chosen: Chosen) -> &'static str {
    match chosen {
        Chosen::ByOperator => "node",
        Chosen::OnNode => "on-node",
        Chosen::ByProvider => "balanced",
        Chosen::ByTenant => "external",
    }
}

impl SteerTable {
    /// For the node's network namespace.
    ///
    /// # Errors
    /// If the kernel gives no sockets for nftables or connection tracking there.
    pub(crate) fn new_in(namespace: &NetNs) -> Result<Self> {
        let nft = Kernel::open_in(namespace).map_err(internal("open nftables in the node's namespace"))?;
        let conntrack = Conntrack::open_in(namespace)
            .map_err(internal("open connection tracking in the node's namespace"))?;
        let namespace = namespace.try_clone().map_err(internal("open the node's namespace again"))?;
        Ok(Self { conntrack: Some(conntrack), namespace: Some(namespace), ..Self::over(nft) })
    }

    /// Over nftables that somebody else brings, as [`Fake`](knit_nft::Fake), without connection
    /// tracking.
    fn over(nft: impl Nftables + Send + 'static) -> Self {
        Self {
            nft: Box::new(nft),
            conntrack: None,
            namespace: None,
            id: TableId::new(TableFamily::Inet, TABLE),
            known: None,
            doubted: false,
            others: Untouched::default(),
            repairs: 0,
        }
    }

    /// Makes true what is wanted, and says how many changes that took.
    fn write(&mut self, wanted: &BTreeMap<Entrance, Steered>, changed: &BTreeSet<Entrance>) -> Result<usize> {
        if std::mem::take(&mut self.doubted) {
            self.restore()?;
        }
        let Some(mut known) = self.known.take() else { return self.set_all(wanted) };
        let changed: Vec<Entrance> =
            changed.iter().filter(|entrance| known.get(entrance) != wanted.get(entrance)).copied().collect();
        if changed.is_empty() {
            self.known = Some(known);
            return Ok(0);
        }
        let tx = self.transaction(&changed, &known, wanted);
        self.others.written();
        if let Err(error) = self.nft.commit_chunked(&tx) {
            tracing::info!(
                error = chain(&error),
                "a change of the steering rules was refused; reading all of them"
            );
            return self.set_all(wanted);
        }
        let mut gone = BTreeMap::new();
        for entrance in &changed {
            let before = match wanted.get(entrance) {
                Some(new) => known.insert(*entrance, new.clone()),
                None => known.remove(entrance),
            };
            gone.extend(before.map(|before| (*entrance, before)));
        }
        self.known = Some(known);
        self.clean(&changed, &gone, wanted);
        Ok(tx.len())
    }

    /// Brings the table back to what it was, so that nothing but damage is counted as such.
    fn restore(&mut self) -> Result<()> {
        let Some(known) = self.known.take() else { return Ok(()) };
        let repairs = self.make(&known)?;
        if repairs > 0 {
            let all: Vec<Entrance> = known.keys().copied().collect();
            self.clean(&all, &BTreeMap::new(), &known);
        }
        self.repairs += repairs;
        self.known = Some(known);
        Ok(())
    }

    /// Makes the table so, from whatever is there.
    fn make(&mut self, wanted: &BTreeMap<Entrance, Steered>) -> Result<usize> {
        let failed = || internal(format!("write the steering rules of routers, table {TABLE}"));
        self.others.looking();
        let before = self.nft.generation().map_err(failed())?;
        let changes = if wanted.is_empty() {
            self.nft.remove_table(&self.id).map(usize::from).map_err(failed())?
        } else {
            let state = Self::state(&self.id, wanted);
            self.nft.apply(&state).map_err(failed())?.len()
        };
        let expected = before.after(usize::from(changes > 0));
        let now = self.nft.generation().map_err(failed())?;
        self.others.looked((now == expected).then_some(now));
        Ok(changes)
    }

    /// Looks at what is there, and makes true what is wanted. A node where nothing is steered has no table.
    fn set_all(&mut self, wanted: &BTreeMap<Entrance, Steered>) -> Result<usize> {
        let changes = self.make(wanted)?;
        if !wanted.is_empty() {
            self.known = Some(wanted.clone());
            let all: Vec<Entrance> = wanted.keys().copied().collect();
            self.clean(&all, &BTreeMap::new(), wanted);
        }
        Ok(changes)
    }

    fn state(id: &TableId, wanted: &BTreeMap<Entrance, Steered>) -> TableState {
        let table = Table::new(id.clone()).comment("what leads into routers, written by knit-proxy");
        let mut state = TableState::new(table);
        for chosen in CHOSEN {
            for sets in Family::ALL.map(|family| Sets::of(family, chosen)) {
                state = state.set(sets.steer, []);
                if let Some((checked, sources)) = sets.checked {
                    state = state.set(checked, []).set(sources, []);
                }
            }
        }
        let local = || Rule::new().eq(field::fib_addrtype(FibFlags::DADDR), &AddrType::LOCAL);
        let not_local = || local().ret().comment("an address of this node");
        let by_provider = [not_local()].into_iter().chain(Self::rules(Chosen::ByProvider));
        let of_routers = || {
            let rule = from_ours(Rule::new()).begins_with(&field::iifname(), NODE_END_PREFIX);
            rule.ret().comment("another Network's")
        };
        let mut state = state
            .chain(
                Chain::base("first-in", ChainKind::Nat, Hook::Prerouting, BEFORE_HOST_PORTS),
                [of_routers(), Rule::new().jump("on-node")],
            )
            .chain(
                Chain::base("first-out", ChainKind::Nat, Hook::Output, BEFORE_HOST_PORTS),
                [Rule::new().jump("on-node")],
            )
            .chain(Chain::regular("on-node"), Self::rules(Chosen::OnNode))
            .chain(
                Chain::base("prerouting", ChainKind::Nat, Hook::Prerouting, BEFORE_PROXIES),
                [
                    of_routers(),
                    Rule::new().jump("steer"),
                    from_ours(Rule::new()).ret().comment("pods"),
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
                Self::rules(Chosen::ByOperator).into_iter().chain(by_provider).collect::<Vec<_>>(),
            )
            .chain(Chain::regular("external"), Self::rules(Chosen::ByTenant));
        for (entrance, to) in wanted {
            let sets = Sets::of(Family::of(entrance.address), to.chosen);
            for (set, elements) in elements(&sets, entrance, to) {
                let empty = || SetState { set: set.clone(), elements: BTreeMap::new() };
                state.sets.entry(set.name.clone()).or_insert_with(empty).extend(elements);
            }
        }
        state
    }

    fn rules(chosen: Chosen) -> Vec<Rule> {
        // Beyond the registers that setting a mark needs.
        let at = Reg::new(8).expect("there are sixteen registers");
        let v4 = || Rule::new().eq(field::nfproto(), &NfProto::IPV4);
        let v6 = || Rule::new().eq(field::nfproto(), &NfProto::IPV6);
        let (protocol, port) = (field::l4proto, field::th_dport);
        let at4 = (field::ip_daddr(), protocol(), port());
        let at6 = (field::ip6_daddr(), protocol(), port());
        let from4 = (field::ip_daddr(), protocol(), port(), field::ip_saddr());
        let from6 = (field::ip6_daddr(), protocol(), port(), field::ip6_saddr());
        let steer = |rule: Rule| rule.set_ct_mark_bits(STEERED, STEERED);
        let [sets4, sets6] = Family::ALL.map(|family| Sets::of(family, chosen));
        let mut rules = Vec::new();
        if let (Some((checked4, sources4)), Some((checked6, sources6))) = (sets4.checked, sets6.checked) {
            rules.push(v4().in_set(&at4, checked4.name).not_in_set(&from4, sources4.name).drop());
            rules.push(v6().in_set(&at6, checked6.name).not_in_set(&from6, sources6.name).drop());
        }
        rules.push(steer(v4().map_at(at, &at4, sets4.steer.name)).dnat_at(TableFamily::Ip, at));
        rules.push(steer(v6().map_at(at, &at6, sets6.steer.name)).dnat_at(TableFamily::Ip6, at));
        rules
    }

    /// Who may come is written before what leads there, and goes after it.
    fn transaction(
        &self,
        changed: &[Entrance],
        known: &BTreeMap<Entrance, Steered>,
        wanted: &BTreeMap<Entrance, Steered>,
    ) -> Transaction {
        let (mut tx, mut later) = (Transaction::new(), Transaction::new());
        for entrance in changed {
            let sets = |chosen| Sets::of(Family::of(entrance.address), chosen);
            if let Some(old) = known.get(entrance) {
                let sets = sets(old.chosen);
                for (set, elements) in elements(&sets, entrance, old).into_iter().rev() {
                    tx.delete_elements(&self.id, set, elements);
                }
            }
            if let Some(new) = wanted.get(entrance) {
                let sets = sets(new.chosen);
                for (set, elements) in elements(&sets, entrance, new) {
                    later.create_elements(&self.id, set, elements);
                }
            }
        }
        tx.append(later);
        tx
    }

    /// Deletes UDP flows of changed entrances that go on to where the entrance no longer leads (rule 51).
    fn clean(
        &mut self,
        changed: &[Entrance],
        gone: &BTreeMap<Entrance, Steered>,
        wanted: &BTreeMap<Entrance, Steered>,
    ) {
        let Some(conntrack) = &mut self.conntrack else { return };
        let udp: BTreeSet<Entrance> =
            changed.iter().filter(|entrance| entrance.protocol == Protocol::Udp).copied().collect();
        if udp.is_empty() {
            return;
        }
        let tuple = || TupleFilter::new().protocol(L4Proto::UDP.0);
        let filters: Vec<Filter> = if udp.len() <= MAX_FILTERS {
            let one = |entrance: &Entrance| {
                Filter::family_of(entrance.address)
                    .original(tuple().dst(entrance.address).dst_port(entrance.port))
            };
            udp.iter().map(one).collect()
        } else {
            vec![Filter::v4().original(tuple()), Filter::v6().original(tuple())]
        };
        let stale = |flow: &Flow| {
            let (L4::Ports { dst, .. }, L4::Ports { src, .. }) = (flow.original.l4, flow.reply.l4) else {
                return false;
            };
            let entrance = Entrance { address: flow.original.dst, protocol: Protocol::Udp, port: dst };
            let answers = SocketAddr::new(flow.reply.src, src);
            match (udp.contains(&entrance), wanted.get(&entrance)) {
                (false, _) => false,
                (true, Some(to)) => to.to != answers,
                (true, None) => gone.get(&entrance).is_some_and(|old| old.to == answers),
            }
        };
        for filter in filters {
            let deleted = conntrack.list(&filter).and_then(|mut flows| {
                flows.retain(stale);
                conntrack.delete(&flows)
            });
            if let Err(error) = deleted {
                tracing::warn!(error = chain(&error), "stale UDP flows into routers were not all deleted");
            }
        }
    }
}

impl Sets {
    fn of(family: Family, chosen: Chosen) -> Self {
        type Key<A> = (A, L4Proto, Port);
        let digit = if family == Family::V4 { '4' } else { '6' };
        let name = |what: &str| format!("{}{what}{digit}", name(chosen));
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

/// What an entrance is in the kernel, in the order in which it is written. Nothing if it leads to another
/// family.
fn elements<'a>(sets: &'a Sets, entrance: &Entrance, to: &Steered) -> Vec<(&'a Set, Vec<Element>)> {
    let (protocol, port) = (number(entrance.protocol), Port(entrance.port));
    let (key, target) = match (entrance.address, to.to) {
        (IpAddr::V4(address), SocketAddr::V4(to)) => {
            ((address, protocol, port).data(), (*to.ip(), Port(to.port())).data())
        }
        (IpAddr::V6(address), SocketAddr::V6(to)) => {
            ((address, protocol, port).data(), (*to.ip(), Port(to.port())).data())
        }
        _ => return Vec::new(),
    };
    let mut all = Vec::new();
    if let (Some(sources), Some((checked, allowed))) = (&to.sources, &sets.checked) {
        let same = |range: &&IpNet| Family::of_net(**range) == Family::of(entrance.address);
        let ranges: Vec<IpNet> = sources.iter().filter(same).copied().collect();
        let ranges: Vec<Element> =
            IpNet::aggregate(&ranges).into_iter().map(|range| allowed_from(&key, range)).collect();
        if !ranges.is_empty() {
            all.push((allowed, ranges));
        }
        all.push((checked, vec![Element::from_data(key.clone())]));
    }
    let mut element = Element::from_data(key);
    element.value = ElementValue::Data(target);
    all.push((&sets.steer, vec![element]));
    all
}

/// Those of a range may come to an entrance.
fn allowed_from(entrance: &Data, range: IpNet) -> Element {
    let end = |address| {
        let mut data = entrance.clone();
        match address {
            IpAddr::V4(v4) => data.push(&v4.octets()),
            IpAddr::V6(v6) => data.push(&v6.octets()),
        }
        data
    };
    let mut element = Element::from_data(end(range.network()));
    element.key_end = Some(Box::new(end(range.broadcast())));
    element
}

fn number(protocol: Protocol) -> L4Proto {
    match protocol {
        Protocol::Tcp => L4Proto::TCP,
        Protocol::Udp => L4Proto::UDP,
        Protocol::Sctp => L4Proto::SCTP,
    }
}

impl Steering for SteerTable {
    fn set(&mut self, wanted: &BTreeMap<Entrance, Steered>, changed: &BTreeSet<Entrance>) -> Result<()> {
        self.write(wanted, changed).map(|_| ())
    }

    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        let Some(namespace) = &self.namespace else { return };
        if let Err(error) = self.others.watch(namespace, TABLE, tell) {
            tracing::warn!(
                error = chain(&error),
                "changes that other programs make to the steering rules will be noticed late"
            );
        }
    }

    fn is_intact(&mut self) -> bool {
        !self.doubted && self.nft.generation().is_ok_and(|now| self.others.left_alone(now))
    }

    fn look_again(&mut self) {
        self.doubted = true;
    }

    fn take_repairs(&mut self) -> usize {
        std::mem::take(&mut self.repairs)
    }
}

impl std::fmt::Debug for SteerTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteerTable").field("table", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use knit_nft::{Fake, Generation, Result};

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

    fn entrance(address: &str, port: u16) -> Entrance {
        Entrance { address: address.parse().unwrap(), protocol: Protocol::Tcp, port }
    }

    fn to(text: &str) -> Steered {
        Steered { to: text.parse().unwrap(), sources: None, chosen: Chosen::ByOperator }
    }

    #[test]
    fn changes_and_a_fresh_start_come_to_the_same() {
        let shared = Shared::default();
        let mut table = SteerTable::over(shared.clone());
        let (web, six, lb) =
            (entrance("192.0.2.1", 30080), entrance("2001:db8::1", 30080), entrance("203.0.113.7", 80));
        let mut wanted = BTreeMap::from([(web, to("169.254.192.2:30080")), (six, to("[fd6b::2]:30080"))]);
        table.write(&wanted, &wanted.keys().copied().collect()).unwrap();
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
        let changes = table.write(&wanted, &BTreeSet::from([web, six, lb])).unwrap();
        assert!((1..=8).contains(&changes), "{changes}");
        assert_eq!(table.write(&wanted, &BTreeSet::from([web, six, lb])).unwrap(), 0);
        let id = TableId::new(TableFamily::Inet, "knit-steer");
        let by_change = shared.clone().table(&id).unwrap().unwrap().without_handles();
        let mut fresh = SteerTable::over(Fake::new());
        fresh.write(&wanted, &BTreeSet::new()).unwrap();
        let at_once = fresh.nft.table(&id).unwrap().unwrap().without_handles();
        assert_eq!(by_change.to_string(), at_once.to_string());
        let text = by_change.to_string();
        assert!(text.contains("203.0.113.7") && !text.contains("2001:db8::1"), "{text}");
        // A start that finds all of it as it should be changes nothing.
        let mut again = SteerTable::over(shared);
        assert_eq!(again.write(&wanted, &BTreeSet::new()).unwrap(), 0);
    }
}
