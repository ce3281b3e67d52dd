//! The wire: one segment in the lab's own namespace, with a port for each node.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route;
use knit_kernel::{Handle, IfName, Mac, Op};

use super::error::{Error, Result};

/// The wire's own addresses: the lab's API is there, and what nodes take for the way to the outside.
pub const GATEWAY: [&str; 2] = ["172.20.255.254/16", "fd20::ffff:fffe/64"];
/// What stands for the outside world.
pub const OUTSIDE: [&str; 2] = ["203.0.113.9/32", "2001:db8:99::9/128"];

/// The wire.
#[derive(Debug)]
pub struct Wire {
    handle: Handle,
    bridge: u32,
}

/// A node's place on the wire: its addresses with their prefixes.
pub fn addresses(index: u16) -> [IpNet; 2] {
    let v4 = std::net::Ipv4Addr::new(172, 20, (index / 250) as u8, (index % 250 + 1) as u8);
    let v6 = std::net::Ipv6Addr::new(0xfd20, 0, 0, 0, 0, 0, 0, index + 1);
    // Both prefix lengths are within their families.
    [IpNet::new_assert(v4.into(), 16), IpNet::new_assert(v6.into(), 64)]
}

fn parse<const N: usize>(texts: [&str; N]) -> impl Iterator<Item = IpNet> {
    texts.into_iter().filter_map(|text| text.parse().ok())
}

fn name(text: &str) -> Result<IfName> {
    IfName::new(text).map_err(Error::kernel(format!("link {text}")))
}

impl Wire {
    /// Lays the wire in the calling thread's namespace.
    pub fn lay() -> Result<Self> {
        let handle = Handle::current().map_err(Error::kernel("the wire"))?;
        let mut link = NewLink::bridge(name("wire")?, Bridge::default());
        // A bridge without an address of its own takes that of a port, and another one when that port goes.
        link.mac = Some(mac(u16::MAX));
        link.up = true;
        let made = handle.create_link(&link).map_err(Error::kernel("the wire"))?;
        let lo = handle.index_of(&name("lo")?).map_err(Error::kernel("the wire"))?;
        let own = parse(GATEWAY).map(|net| Op::create(Address::new(made.index, net)));
        let outside = parse(OUTSIDE).map(|net| Op::create(Address::new(lo, net)));
        let ops: Vec<Op<'_>> = own.chain(outside).collect();
        handle.apply(&ops).map_err(Error::kernel("the wire's addresses"))?;
        Ok(Self { handle, bridge: made.index })
    }

    /// Joins a namespace to the wire: its `eth0` gets these addresses.
    pub fn plug(&self, node: &str, index: u16, space: &NetNs) -> Result<()> {
        let failed = || Error::kernel(format!("the link of node {node}"));
        // A machine that boots again has the address it had: others need not find out.
        let eth0 = Peer { mac: Some(mac(index)), ..Peer::new(name("eth0")?, space) };
        let mut link = NewLink::veth(port(index)?, eth0);
        link.master = Some(self.bridge);
        link.up = true;
        self.handle.create_link(&link).map_err(failed())?;
        let inside = Handle::open(space).map_err(failed())?;
        let eth0 = inside.index_of(&name("eth0")?).map_err(failed())?;
        let mut ops: Vec<Op<'_>> = vec![Change::of(eth0).up().into()];
        ops.extend(addresses(index).map(|net| Op::create(Address::new(eth0, net))));
        inside.apply(&ops).map_err(failed())?;
        let defaults = [Route::default_v4(), Route::default_v6()];
        let ops: Vec<Op<'_>> = parse(GATEWAY)
            .zip(defaults)
            .map(|(gateway, route)| Op::create(Route { protocol: 4, ..route.dev(eth0).via(gateway.addr()) }))
            .collect();
        inside.apply(&ops).map_err(failed())
    }

    /// Takes a node's link down, or brings it up again.
    pub fn set(&self, node: &str, index: u16, up: bool) -> Result<()> {
        let failed = || Error::kernel(format!("the link of node {node}"));
        let port = self.handle.index_of(&port(index)?).map_err(failed())?;
        let change = Change::of(port);
        let change = if up { change.up() } else { change.down() };
        self.handle.apply(&[change.into()]).map_err(failed())
    }

    /// Takes a node's link away, if it is there.
    pub fn unplug(&self, node: &str, index: u16) -> Result<()> {
        let failed = || Error::kernel(format!("the link of node {node}"));
        if let Some(link) = self.handle.link_by_name(&port(index)?).map_err(failed())? {
            self.handle.delete_link(link.index).map_err(failed())?;
        }
        Ok(())
    }

    /// The lab's address of a family, for what nodes reach.
    pub fn gateway() -> IpAddr {
        IpAddr::from([172, 20, 255, 254])
    }
}

/// The hardware address of a node, locally administered.
fn mac(index: u16) -> Mac {
    let [high, low] = index.to_be_bytes();
    Mac([0x02, 0x6b, 0x6e, 0x74, high, low])
}

fn port(index: u16) -> Result<IfName> {
    name(&format!("port{}", index + 1))
}
