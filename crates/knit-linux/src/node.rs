//! The node that this runtime works on: its own namespace with all that Networks share there, and what it
//! hears.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use knit_runtime::{Error, Reason, Result};

use crate::config::Config;
use crate::fail::internal;
use crate::neighbours::Room;
use crate::node_tables::NodeTables;
use crate::senses::Senses;
use crate::shape::Facts;
use crate::space::Space;

/// The node.
#[derive(Debug)]
pub(crate) struct Node {
    pub config: Config,
    /// Its own namespace.
    pub space: Arc<Space>,
    /// Whether this kernel has IPv6.
    pub ipv6: bool,
    /// Held while the node's tables may change their shape or a Network's part of them.
    tables: Mutex<NodeTables>,
    /// Room in the machine's tables of neighbours.
    pub room: Room,
    /// Hears of what others change.
    pub senses: Senses,
}

impl Node {
    /// The node of this configuration, as the kernel has it.
    pub fn new(config: Config) -> Result<Self> {
        let open = config.namespace.try_clone();
        let space = Arc::new(Space::new(open.map_err(internal("open the node's network namespace"))?));
        let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let room = Room::default();
        room.make(&space);
        let senses = Senses::start();
        senses.listen(&space);
        Ok(Self { config, space, ipv6, tables: Mutex::default(), room, senses })
    }

    /// Alone with the node's tables.
    pub fn tables(&self) -> MutexGuard<'_, NodeTables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the node is: read again each time, since addresses and MTUs change.
    pub fn facts(&self) -> Result<Facts> {
        let handle = self.space.links()?;
        let addresses = handle.addresses(None).map_err(internal("list the node's addresses"))?;
        let own = self.config.addresses.iter();
        let uplink = own.clone().find_map(|own| addresses.iter().find(|found| found.address.addr() == *own));
        let Some(uplink) = uplink else {
            let own: Vec<String> = own.map(IpAddr::to_string).collect();
            let message = format!(
                "no interface of node {} has an address of {}: give the node's addresses as its interfaces \
                 have them",
                self.config.node,
                own.join(", ")
            );
            return Err(Error::new(Reason::NotReady, message));
        };
        let link = handle.link(uplink.interface).map_err(internal("read the node's uplink"))?;
        let link = link.ok_or_else(|| Error::new(Reason::NotReady, "the node's uplink has just gone"))?;
        let prefixes = addresses.iter().filter(|found| found.interface == uplink.interface);
        let global = |net: &IpNet| !matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
        Ok(Facts {
            node: self.config.node.clone(),
            addresses: self.config.addresses.clone(),
            uplink: link.name.to_string(),
            mtu: link.mtu,
            prefixes: prefixes.map(|found| found.address).filter(global).collect(),
            vxlan_port: self.config.vxlan_port,
        })
    }
}
