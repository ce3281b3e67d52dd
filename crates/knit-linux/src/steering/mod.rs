//! Steering: leads from the node's own namespace into routers apart from it.
//!
//! [`SteerTable`] has a map from entrances to where the router takes them. A steered connection carries a
//! mark ([`STEERED`](crate::STEERED)), so that the node's rules can tell it from everything else that would
//! like to get into a router.
//!
//! Where this node has no such router, an entrance leads to other nodes that have one, at their node ports
//! ([`Way::Nodes`](knit_runtime::routers::Way)). For them it is traffic from outside, for which their own
//! rules hold: nothing is open on them for this. The client's address is replaced by this node's, so that
//! answers come back. Such packets have a hop limit by which a node that has no router either (any more)
//! knows them: it refuses them, and no connection is handed over twice.
//!
//! It is one table of its own, a little before service proxies at the same hooks, so that theirs never see
//! what is steered. One changed entrance is one element to write.
//!
//! Whose traffic is steered depends on who chose the address ([`Chosen`]): a tenant must not take what others
//! send. What comes out of a router is never steered: it is another Network's.

mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use knit_kernel::NetNs;
use knit_kernel::conntrack::{Conntrack, Filter, Flow, L4, TupleFilter};
use knit_kernel::nft::Kernel;
use knit_kernel::watch::Untouched;
use knit_nft::{Family as TableFamily, L4Proto, Nftables, TableId, Transaction};
use knit_runtime::routers::{Entrance, Steered, Steering};
use knit_runtime::{Protocol, Result};
use knit_types::Family;

use crate::fail::{chain, internal};
use layout::{Sets, elements};

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

/// Each is a walk through the kernel's whole table: beyond a few, one that sees all is cheaper.
const MAX_FILTERS: usize = 4;

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
            let state = layout::state(&self.id, wanted);
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
                (true, Some(to)) => !to.leads_to(answers),
                (true, None) => gone.get(&entrance).is_some_and(|old| old.leads_to(answers)),
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

    use knit_nft::{Fake, Generation, Result, TableState};
    use knit_runtime::routers::{Chosen, Way};

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
        let to = Way::Router(text.parse().unwrap());
        Steered { to, near: None, sources: None, chosen: Chosen::ByOperator }
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
