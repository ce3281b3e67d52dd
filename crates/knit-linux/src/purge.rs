//! Taking everything away that Knit ever made on a node, pods' interfaces included. For the end of Knit on
//! that node: no agent may run.
//!
//! What is Knit's shows from the owner's marks: alias of links, protocol number of routes, rules and
//! neighbours, names of tables, the directory of routers.

use std::fmt;
use std::path::Path;

use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::{Handle, owner};
use knit_nft::{Nftables, TableId, Transaction};
use knit_runtime::Result;

use crate::fail::internal;
use crate::rules::TABLE;
use crate::space::NamespaceSockets;
use crate::topology;

/// How much was taken away.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Purged {
    /// Interfaces.
    pub links: usize,
    /// Routes.
    pub routes: usize,
    /// Policy rules.
    pub rules: usize,
    /// Neighbours.
    pub neighbours: usize,
    /// Tables of nftables, by name.
    pub tables: Vec<String>,
    /// Namespaces of routers.
    pub routers: Vec<String>,
}

/// Takes away what Knit made in a node's namespace, and its routers in this directory. What is not there is
/// fine.
///
/// # Errors
/// When the kernel refuses. What was taken away until then is gone; the rest can be tried again.
pub fn purge(namespace: &NetNs, router_directory: &Path) -> Result<Purged> {
    let mut purged = Purged::default();
    // Links first: with a pod's host end its routes, neighbours and the pod's own end go.
    let handle = Handle::open(namespace).map_err(internal("open the node's links"))?;
    let filter = LinkFilter { owned: true, ..LinkFilter::default() };
    let links = handle.links(&filter).map_err(internal("list interfaces"))?;
    let indexes: Vec<u32> = links.iter().map(|link| link.index).collect();
    if !indexes.is_empty() {
        handle.delete_links(&indexes).map_err(internal("delete interfaces"))?;
    }
    purged.links = indexes.len();
    let ours = Some(owner::PROTOCOL);
    let filter = RouteFilter { protocol: ours, ..RouteFilter::default() };
    for route in handle.routes(&filter).map_err(internal("list routes"))? {
        purged.routes += usize::from(handle.remove(route).map_err(internal("delete a route"))?);
    }
    for rule in handle.rules(ours).map_err(internal("list policy rules"))? {
        purged.rules += usize::from(handle.remove(rule).map_err(internal("delete a policy rule"))?);
    }
    let filter = NeighbourFilter { protocol: ours, ..NeighbourFilter::default() };
    for neighbour in handle.neighbours(&filter).map_err(internal("list neighbours"))? {
        purged.neighbours += usize::from(handle.remove(neighbour).map_err(internal("delete a neighbor"))?);
    }
    purged.tables = tables(namespace)?;
    for (name, _) in NetNs::list(router_directory).map_err(internal("list routers"))? {
        let space = NamespaceSockets::new(
            NetNs::open(router_directory.join(&name)).map_err(internal("open a router"))?,
        );
        purged.links += topology::found_in(&space)?.purge(&space)?;
        NetNs::delete(router_directory.join(&name)).map_err(internal("delete a router"))?;
        purged.routers.push(name);
    }
    NetNs::unshare_directory(router_directory).map_err(internal("remove the directory of routers"))?;
    Ok(purged)
}

/// Deletes every table of Knit's: `knit`, and those whose names begin with `knit-`.
fn tables(namespace: &NetNs) -> Result<Vec<String>> {
    let mut kernel = Kernel::open_in(namespace).map_err(internal("open the node's rules"))?;
    let is_ours = |table: &TableId| {
        table.name.strip_prefix(TABLE).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let mut deleted = Vec::new();
    let all = kernel.tables().map_err(internal("list tables of rules"))?;
    for table in all.into_iter().filter(is_ours) {
        let mut transaction = Transaction::new();
        transaction.delete_table(&table);
        match kernel.commit(&transaction) {
            Err(error) if !error.is_not_found() => return Err(internal("delete a table of rules")(error)),
            _ => deleted.push(table.to_string()),
        }
    }
    Ok(deleted)
}

impl Purged {
    /// Whether nothing was there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Purged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { links, routes, rules, neighbours, tables, routers } = self;
        write!(
            f,
            "{links} interfaces, {routes} routes, {rules} rules, {neighbours} neighbors, {} tables, {} \
             routers",
            tables.len(),
            routers.len()
        )
    }
}
