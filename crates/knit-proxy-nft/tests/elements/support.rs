//! nftables in memory that refuses what some kernels refuse, and a backend over it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use knit_nft::{Fake, Family, Generation, Nftables, Op, Result, TableId, TableState, Transaction};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::view::{LocalTraffic, View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend};

/// nftables in memory that test and backend share.
#[derive(Clone, Default)]
pub struct Shared {
    pub fake: Arc<Mutex<Fake>>,
    /// Transactions that mention this text are refused, as by a kernel that does not like an element.
    pub refuse: Arc<Mutex<Option<String>>>,
    /// Everything about this family is refused, as by a kernel that does not have it.
    pub without: Arc<Mutex<Option<Family>>>,
    /// Somebody else commits after each look, as on a node where other programs are busy.
    pub busy: Arc<Mutex<bool>>,
    /// Chains are not deleted together with elements that led there, as by kernels before 6.2.
    pub old: Arc<Mutex<bool>>,
    /// How often a whole table was read: a full sync does, and a change does not.
    pub reads: Arc<AtomicUsize>,
}

pub const OTHERS: &str = "somebody-elses";

impl Shared {
    pub fn with<T>(&self, f: impl FnOnce(&mut Fake) -> T) -> T {
        f(&mut self.fake.lock().unwrap())
    }

    pub fn check(&self, tx: &Transaction) -> Result<()> {
        if let Some(family) = *self.without.lock().unwrap()
            && tx.ops().iter().any(|op| op.to_string().contains(&format!(" {family} knit-proxy")))
        {
            // A table that is not there is refused in much the same way.
            let mut wrong = Transaction::new();
            wrong.delete_table(&TableId::new(family, "missing"));
            return self.with(|fake| fake.commit(&wrong));
        }
        let deletes = |what: &str| tx.ops().iter().any(|op| op.to_string().starts_with(what));
        if *self.old.lock().unwrap() && deletes("delete chain") && tx.to_string().contains(" actions") {
            // A chain that something still leads to.
            let mut wrong = Transaction::new();
            wrong.delete_chain(&TableId::new(Family::Ip, "knit-proxy"), "services");
            return self.with(|fake| fake.commit(&wrong));
        }
        let Some(bad) = self.refuse.lock().unwrap().clone() else { return Ok(()) };
        for op in tx.ops() {
            if let Op::AddElements { shape, elements, table, .. } = op
                && let Some(element) = elements.iter().find(|e| format!("{:?}", e.key).contains(&bad))
            {
                // A set that is not there makes the fake refuse the element, and name it.
                let mut shape = shape.clone();
                shape.set = "missing".into();
                let mut wrong = Transaction::new();
                wrong.push(Op::AddElements {
                    table: table.clone(),
                    shape,
                    elements: vec![element.clone()],
                    if_exists: knit_nft::IfExists::Keep,
                });
                return self.with(|fake| fake.commit(&wrong));
            }
        }
        Ok(())
    }

    pub fn table(&self, family: Family) -> TableState {
        let id = TableId::new(family, "knit-proxy");
        self.with(|fake| fake.table(&id)).expect("a listing").expect("the table is there")
    }

    /// How many elements a set has.
    pub fn count(&self, set: &str) -> usize {
        self.table(Family::Ip).sets[set].elements.len()
    }

    pub fn commits(&self) -> usize {
        self.with(|fake| fake.committed().len())
    }

    /// How often a whole table was read.
    pub fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }

    /// The last transaction, as text.
    pub fn last(&self) -> String {
        self.with(|fake| fake.committed().last().expect("something was committed").to_string())
    }
}

impl Nftables for Shared {
    fn commit(&mut self, tx: &Transaction) -> Result<()> {
        self.check(tx)?;
        self.with(|fake| fake.commit(tx))
    }

    fn commit_if(&mut self, generation: Generation, tx: &Transaction) -> Result<()> {
        self.check(tx)?;
        self.with(|fake| fake.commit_if(generation, tx))
    }

    fn commit_chunked(&mut self, tx: &Transaction) -> Result<usize> {
        self.check(tx)?;
        self.with(|fake| fake.commit_chunked(tx))
    }

    fn generation(&mut self) -> Result<Generation> {
        self.with(Nftables::generation)
    }

    fn tables(&mut self) -> Result<Vec<TableId>> {
        self.with(Nftables::tables)
    }

    fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let found = self.with(|fake| fake.snapshot(table))?;
        if *self.busy.lock().unwrap() {
            let mut tx = Transaction::new();
            tx.add_table(TableId::new(Family::Inet, OTHERS));
            self.with(|fake| fake.commit(&tx))?;
        }
        Ok(found)
    }
}

pub struct Setup {
    pub nft: Shared,
    pub view: View,
    pub backend: NftBackend,
}

pub fn group(service: &str, addresses: &[&str]) -> EndpointGroup {
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    EndpointGroup::of_addresses(format!("{service}-1").as_str(), service, Protocol::Tcp, 8080, &addresses)
}

pub fn web(name: &str, ip: &str) -> Service {
    Service::new(name).cluster_ip(ip.parse().unwrap()).port(Protocol::Tcp, 80)
}

impl Setup {
    pub fn new() -> Self {
        let nft = Shared::default();
        let node = NodeInfo { addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeInfo::new("node") };
        let pods = LocalTraffic::Sources(vec!["10.1.0.0/16".parse().unwrap()]);
        let config = ViewConfig { local_traffic: pods, ..ViewConfig::default() };
        let backend = NftBackend::over(nft.clone(), Config::default());
        Self { nft, view: View::new(config, node), backend }
    }

    pub fn sync(&mut self) {
        self.view.take_changes();
        assert_eq!(self.backend.sync(self.view.current()), Outcome::Done);
    }

    pub fn apply(&mut self) {
        let changes = self.view.take_changes();
        assert_eq!(self.backend.apply(&changes, self.view.current()), Outcome::Done);
    }

    /// What a backend that is started now would change: nothing, if all is right.
    pub fn settled(&mut self) {
        let before = self.nft.commits();
        let mut again = NftBackend::over(self.nft.clone(), Config::default());
        assert_eq!(again.sync(self.view.current()), Outcome::Done);
        let text = if self.nft.commits() > before { self.nft.last() } else { String::new() };
        assert_eq!(text.trim(), "", "a restart changes nothing");
    }
}
