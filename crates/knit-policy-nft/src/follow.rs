//! Live connections follow what is in force, apart from the table: where there are many, a look at them takes
//! a while, and no change of policies has to wait for it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, RwLock};

use ipnet::IpNet;
use knit_kernel::conntrack::{Conntrack, Flow};
use knit_kernel::{Handle, NetNs};
use knit_types::sync::{Locked as _, ReadWrite as _};

use crate::error::Error;
use crate::layout::CUT;
use crate::live::{Connection, Fate, Followed, Plan, Touched, fate, flows, plan};
use crate::verdict::Elements;

/// The connections of a router.
#[derive(Debug)]
pub(crate) struct Connections {
    /// None if there is no kernel.
    kernel: Option<(Conntrack, NetNs)>,
    /// There may be some that are cut.
    any_cut: bool,
}

/// One look at the live connections of a router, made by
/// [`PolicyTable::following`](crate::PolicyTable::following). It goes by what the table wants while it looks,
/// and may be carried out on another thread than the table's.
#[derive(Debug)]
#[must_use = "nothing follows before run()"]
pub struct Following {
    pub(crate) connections: Arc<Mutex<Connections>>,
    pub(crate) wanted: Arc<RwLock<Elements>>,
    /// The node's addresses: what it sends is not judged.
    pub(crate) node: Vec<IpNet>,
    pub(crate) touched: Touched,
}

impl Connections {
    /// An earlier run may have cut some.
    pub(crate) fn new(kernel: Option<(Conntrack, NetNs)>) -> Self {
        Self { kernel, any_cut: true }
    }
}

impl Following {
    /// Cuts those that are no longer allowed, in both directions, and lets those go on that were cut and are
    /// allowed again. One look at a router's connections waits for the other.
    ///
    /// A connection whose first packet is on its way at the very moment of a change is not in the kernel's
    /// list yet: look again a second later.
    ///
    /// # Errors
    /// If connections cannot be listed or marked. Some of them may have been.
    pub fn run(self) -> Result<Followed, Error> {
        let Self { connections, wanted, node, touched } = self;
        let mut connections = connections.locked();
        if touched.is_empty() || (touched == Touched::Cut && !connections.any_cut) {
            return Ok(Followed::default());
        }
        let Some((conntrack, namespace)) = &mut connections.kernel else { return Ok(Followed::default()) };
        // What the node sends itself is not judged, whatever address it has.
        let own = own_addresses(namespace)?;
        let is_node = |address: &IpAddr| own.contains(address) || node.iter().any(|n| n.contains(address));
        // The lock is taken for one connection at a time: whoever changes what is wanted waits for no more.
        let allowed =
            |c: &Connection| is_node(&c.source) || wanted.reading().allow(c.source, c.destination, c.traffic);
        let is_to_change = |flow: &Flow| fate(flow, &touched, allowed) != Fate::Stay;
        let flows = flows(conntrack, &touched, is_to_change).map_err(Error::Conntrack)?;
        let Plan { cut, resume } = plan(&flows, &touched, allowed);
        let marked = conntrack.set_mark(cut, CUT, CUT).map_err(Error::Conntrack)?;
        let cleared = conntrack.set_mark(resume, 0, CUT).map_err(Error::Conntrack)?;
        // All that are cut were in the list.
        let were_cut = flows.iter().filter(|flow| flow.mark & CUT != 0).count();
        connections.any_cut = were_cut + marked > cleared;
        Ok(Followed { cut: marked, resumed: cleared })
    }
}

fn own_addresses(namespace: &NetNs) -> Result<BTreeSet<IpAddr>, Error> {
    let addresses = Handle::open(namespace).and_then(|handle| handle.addresses(None));
    Ok(addresses.map_err(Error::Addresses)?.into_iter().map(|found| found.address.addr()).collect())
}
