//! A wire: one segment, 192.168.7.0/24 and fd07::/64, in a namespace of its own, and namespaces with a port
//! on it.

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::netns::NetNs;
use knit_kernel::testing::namespace;
use knit_kernel::{Handle, Mtu, Op};

use crate::{name, net};

/// One segment. It ends with the value.
#[derive(Debug)]
pub struct Wire {
    /// Where its bridge, called `wire`, is. Not the test's own namespace: what is made there carries the mark
    /// of Knit.
    pub space: NetNs,
    mtu: Option<u32>,
}

/// The addresses of host number `host`: 192.168.7.HOST/24 and fd07::HOST/64.
pub fn addresses(host: u8) -> [IpNet; 2] {
    [net(&format!("192.168.7.{host}/24")), net(&format!("fd07::{host}/64"))]
}

impl Wire {
    /// A segment whose links have the kernel's own MTU.
    #[expect(clippy::new_without_default, reason = "it makes something in the kernel")]
    pub fn new() -> Self {
        Self::made(None)
    }

    /// A segment whose links have this MTU.
    pub fn with_mtu(mtu: u32) -> Self {
        Self::made(Some(mtu))
    }

    fn made(mtu: Option<u32>) -> Self {
        let space = namespace();
        let mut bridge = NewLink::bridge(name("wire"), Bridge::default());
        bridge.up = true;
        Handle::open(&space).expect("a handle").create_link(&bridge).expect("the wire");
        Self { space, mtu }
    }

    /// A new namespace on the wire, as host number `host`.
    pub fn host(&self, port: &str, host: u8) -> NetNs {
        let space = namespace();
        self.plug(&space, port, host);
        space
    }

    /// Joins a namespace to the wire: its `eth0` is host number `host`.
    pub fn plug(&self, space: &NetNs, port: &str, host: u8) {
        let handle = Handle::open(&self.space).expect("a handle");
        let mtu = self.mtu.map(|mtu| Mtu::new(mtu).expect("an MTU"));
        let mut link = NewLink::veth(name(port), Peer { mtu, ..Peer::new(name("eth0"), space) });
        link.mtu = mtu;
        link.master = Some(handle.index_of(&name("wire")).expect("the wire"));
        link.up = true;
        handle.create_link(&link).expect("a port of the wire");
        let inside = Handle::open(space).expect("a handle");
        let eth0 = inside.index_of(&name("eth0")).expect("eth0");
        let mut ops: Vec<Op<'_>> = vec![Change::of(eth0).up().into()];
        ops.extend(addresses(host).map(|address| Op::create(Address::new(eth0, address))));
        inside.apply(&ops).expect("addresses of eth0");
    }
}
