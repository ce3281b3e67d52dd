//! The nftables backend, as the worker uses it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use knit_policy::sets::{Change, Key, Value};
use knit_policy_nft::live::Touched;
use knit_policy_nft::{PolicyTable, Router};

use crate::backend::{Backend, Backends, Failure, RouterPlace};

/// Policies in nftables, one table for each router.
#[derive(Clone, Copy, Debug, Default)]
pub struct NftBackends;

impl Backends for NftBackends {
    fn open(&self, router: &RouterPlace) -> Result<Box<dyn Backend>, Failure> {
        let place = match router.uplink.clone() {
            None => Router::Node,
            Some(uplink) => Router::Apart { uplink, node: router.node.clone() },
        };
        let table = PolicyTable::open_in(&router.namespace, place)?;
        Ok(Box::new(Table { table, touched: Touched::default() }))
    }
}

struct Table {
    table: PolicyTable,
    /// What live connections have not followed yet.
    touched: Touched,
}

impl Table {
    fn touch(&mut self, touched: Touched) {
        self.touched = std::mem::take(&mut self.touched).and(touched);
    }
}

impl Backend for Table {
    fn sync(&mut self, wanted: &BTreeMap<Key, Value>) -> Result<(), Failure> {
        let applied = self.table.sync(wanted)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<(), Failure> {
        let applied = self.table.apply(changes)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn restore(&mut self) -> Result<usize, Failure> {
        let applied = self.table.restore()?;
        self.touch(applied.touched);
        Ok(applied.changes)
    }

    fn set_node(&mut self, node: &[IpNet]) -> Result<(), Failure> {
        let applied = self.table.set_node(node)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        self.table.watch(tell);
    }

    fn touch_all(&mut self) {
        self.touched = Touched::All;
    }

    fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    fn follow(&mut self) -> Result<usize, Failure> {
        let followed = self.table.follow(&self.touched)?;
        Ok(followed.cut)
    }

    fn leave_connections(&mut self, but: &BTreeSet<IpAddr>) {
        self.touched = match but.is_empty() {
            true => Touched::default(),
            false => Touched::Addresses(but.clone()),
        };
    }
}
