//! The node that this runtime works on: its own namespace with all that Networks share there, and what it
//! hears.

use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{AddrGenMode, Link};
use knit_kernel::{Handle, IfName};
use knit_runtime::{Error, Reason, Result};
use knit_types::sync::Locked;

use crate::config::Config;
use crate::fail::internal;
use crate::neighbours::NeighbourRoom;
use crate::node_tables::NodeTables;
use crate::senses::Senses;
use crate::shape::{Facts, Shape};
use crate::space::NamespaceSockets;

/// The node.
#[derive(Debug)]
pub(crate) struct Node {
    pub config: Config,
    /// Its own namespace.
    pub space: Arc<NamespaceSockets>,
    /// Whether this kernel has IPv6.
    pub ipv6: bool,
    /// Held while the node's tables may change their shape or a Network's part of them.
    tables: Mutex<NodeTables>,
    /// Room in the machine's tables of neighbours.
    pub room: NeighbourRoom,
    /// Hears of what others change.
    pub senses: Senses,
    /// Whether something was seen in the node's table that belongs to nothing.
    pub strays: AtomicBool,
}

impl Node {
    /// The node of this configuration, as the kernel has it.
    pub fn new(config: Config) -> Result<Self> {
        let open = config.namespace.try_clone();
        let space =
            Arc::new(NamespaceSockets::new(open.map_err(internal("open the node's network namespace"))?));
        let ipv6 = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let room = NeighbourRoom::default();
        room.make(&space);
        let senses = Senses::start();
        senses.listen(&space);
        Ok(Self {
            config,
            space,
            ipv6,
            tables: Mutex::default(),
            room,
            senses,
            strays: AtomicBool::new(false),
        })
    }

    /// How a link of a Network makes IPv6 addresses of its own: never. None where it has no IPv6.
    pub fn addr_gen(&self, shape: &Shape) -> Option<AddrGenMode> {
        (self.ipv6 && shape.has_ipv6()).then_some(AddrGenMode::None)
    }

    /// A link of the node that Networks are on; it must be there and work.
    pub fn parent(&self, handle: &Handle, name: &str) -> Result<Link> {
        let not_ready = |message: String| Error::new(Reason::NotReady, message);
        let node = &self.config.node;
        let known = IfName::new(name).map_err(|error| not_ready(error.to_string()))?;
        let link = handle.link_by_name(&known).map_err(internal(format!("look for link {name}")))?;
        let link = link.ok_or_else(|| {
            not_ready(format!(
                "node {node} has no link {name}: create it, or name another one for this node in \
                 spec.underlay.parents"
            ))
        })?;
        if self.goes_out_by(handle, &link)? {
            let message = format!(
                "link {name} of node {node} carries the node's own address, and with it the tunnels of all \
                 Networks, which pods on that link could forge: name another link, for example a dedicated \
                 VLAN"
            );
            return Err(Error::new(Reason::Invalid, message));
        }
        match (link.up, link.carrier) {
            (true, true) => Ok(link),
            (false, _) => Err(not_ready(format!("link {name} of node {node} is down: bring it up"))),
            (true, false) => Err(not_ready(format!(
                "link {name} of node {node} has no carrier: check the cable, the switch port or the peer"
            ))),
        }
    }

    /// Whether what the node itself sends goes out by a link: it has the node's address, or the link that has
    /// it is on top of it.
    fn goes_out_by(&self, handle: &Handle, link: &Link) -> Result<bool> {
        /// A VLAN of a bond over two ports is three.
        const STACKED: usize = 8;
        let addresses = handle.addresses(None).map_err(internal("list the node's addresses"))?;
        let own = |address: &&Address| self.config.addresses.contains(&address.address.addr());
        for address in addresses.iter().filter(own) {
            let mut index = address.interface;
            for _ in 0..STACKED {
                if link.index == index || link.master == Some(index) {
                    return Ok(true);
                }
                let upper = handle.link(index).map_err(internal("read the node's uplink"))?;
                let below = upper.filter(|upper| upper.link_namespace.is_none()).and_then(|upper| upper.link);
                match below {
                    Some(below) => index = below,
                    None => break,
                }
            }
        }
        Ok(false)
    }

    /// Alone with the node's tables.
    pub fn tables(&self) -> MutexGuard<'_, NodeTables> {
        self.tables.locked()
    }

    /// What the node is, for a Network on this link of it or on the one with the node's addresses: read again
    /// each time, since addresses and MTUs change.
    pub fn facts(&self, parent: Option<&str>) -> Result<Facts> {
        let handle = self.space.links()?;
        if let Some(parent) = parent {
            let link = self.parent(&handle, parent)?;
            return Ok(Facts {
                node: self.config.node.clone(),
                addresses: self.config.addresses.clone(),
                uplink: link.name.to_string(),
                mtu: link.mtu,
                prefixes: Vec::new(),
                vxlan_port: self.config.vxlan_port,
            });
        }
        let addresses = handle.addresses(None).map_err(internal("list the node's addresses"))?;
        let own = self.config.addresses.iter();
        let uplink = own.clone().find_map(|own| addresses.iter().find(|found| found.address.addr() == *own));
        let Some(uplink) = uplink else {
            let own: Vec<String> = own.map(IpAddr::to_string).collect();
            let message = format!(
                "no interface of node {} has an address of {}: specify addresses that its interfaces have",
                self.config.node,
                own.join(", ")
            );
            return Err(Error::new(Reason::NotReady, message));
        };
        let link = handle.link(uplink.interface).map_err(internal("read the node's uplink"))?;
        let link = link.ok_or_else(|| {
            Error::new(
                Reason::NotReady,
                "the node's uplink has just \
        disappeared",
            )
        })?;
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
