//! The wire between control plane and nodes: one bridge in the control plane's namespace. Nothing of it
//! touches this machine's own network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::{Handle, IfName, NetNs, Op};

/// The port of the API server, in the control plane's namespace and on this machine's loopback.
pub const API_PORT: u16 = 6443;
/// The cluster DNS.
pub const DNS_V4: &str = "10.96.0.10";

/// Pod and service ranges of one family.
#[derive(Debug, Clone, Copy)]
pub struct Ranges {
    pub pods: &'static str,
    pub services: &'static str,
}

pub const V4: Ranges = Ranges { pods: "10.244.0.0/16", services: "10.96.0.0/16" };
pub const V6: Ranges = Ranges { pods: "fd00:10:244::/56", services: "fd00:10:96::/112" };

/// What a person did, for the kernel: routes that no agent may take for its own.
const STATIC: u8 = 4;

/// The control plane's addresses on the wire.
pub fn control_plane() -> [IpNet; 2] {
    // Both prefix lengths are within their families.
    [
        IpNet::new_assert(control_plane_v4().into(), 24),
        IpNet::new_assert(Ipv6Addr::new(0xfd00, 0x10, 0x250, 0, 0, 0, 0, 1).into(), 64),
    ]
}

pub fn control_plane_v4() -> Ipv4Addr {
    Ipv4Addr::new(10, 250, 0, 1)
}

/// A node's addresses on the wire: 10.250.0.11 for the first.
pub fn node_addresses(index: usize) -> [IpNet; 2] {
    let number = u8::try_from(index).unwrap_or(u8::MAX - 11) + 11;
    let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x250, 0, 0, 0, 0, 0x11 + u16::from(number) - 11);
    [IpNet::new_assert(Ipv4Addr::new(10, 250, 0, number).into(), 24), IpNet::new_assert(v6.into(), 64)]
}

/// Under which addresses the API server is reached: on the wire, and as the Service `kubernetes`.
pub fn api_addresses() -> Vec<IpAddr> {
    let services = [V4, V6].into_iter().filter_map(|ranges| ranges.services.parse::<IpNet>().ok());
    let first = services.filter_map(|range| range.hosts().find(|address| *address != range.network()));
    control_plane().into_iter().map(|net| net.addr()).chain(first).collect()
}

/// Lays the wire in the control plane's namespace.
pub fn lay(control_plane_ns: &NetNs) -> Result<()> {
    let lay = || -> knit_kernel::Result<()> {
        let handle = Handle::open(control_plane_ns)?;
        let mut bridge = NewLink::bridge(IfName::new("br0")?, Bridge::default());
        bridge.up = true;
        let bridge = handle.create_link(&bridge)?;
        handle.apply(&control_plane().map(|net| Op::create(Address::new(bridge.index, net))))?;
        forward(control_plane_ns)
    };
    lay().context("cannot lay the wire between control plane and nodes")
}

/// Joins a node to it: its `eth0`, its addresses, its way out.
pub fn plug(control_plane_ns: &NetNs, index: usize, name: &str, node: &NetNs) -> Result<()> {
    let plug = || -> knit_kernel::Result<()> {
        let outside = Handle::open(control_plane_ns)?;
        let eth0 = IfName::new("eth0")?;
        let mut port = NewLink::veth(IfName::new(format!("v{name}"))?, Peer::new(eth0.clone(), node));
        port.master = Some(outside.index_of(&IfName::new("br0")?)?);
        port.up = true;
        outside.create_link(&port)?;
        let inside = Handle::open(node)?;
        let eth0 = inside.index_of(&eth0)?;
        let mut ops = vec![Op::from(Change::of(eth0).up())];
        ops.extend(node_addresses(index).map(|net| Op::create(Address::new(eth0, net))));
        inside.apply(&ops)?;
        let ways = control_plane().into_iter().zip([Route::default_v4(), Route::default_v6()]);
        let ops: Vec<_> = ways
            .map(|(gateway, route)| {
                Op::create(Route { protocol: STATIC, ..route.dev(eth0).via(gateway.addr()) })
            })
            .collect();
        inside.apply(&ops)?;
        forward(node)
    };
    plug().with_context(|| format!("cannot join node {name} to the wire"))
}

/// A route to a node's pods, in the namespace of the control plane or of another node.
pub fn route_to_pods(from: &NetNs, pods: IpNet, node: usize) -> Result<()> {
    let gateway = node_addresses(node).into_iter().map(|net| net.addr());
    let gateway = gateway.into_iter().find(|address| address.is_ipv4() == pods.addr().is_ipv4());
    let gateway = gateway.context("a node has an address of each family")?;
    let add = || -> knit_kernel::Result<()> {
        let route = Route { protocol: STATIC, ..Route::to(pods).via(gateway) };
        Handle::open(from)?.apply(&[Op::replace(route)])
    };
    add().with_context(|| format!("cannot add the route to {pods}"))
}

fn forward(space: &NetNs) -> knit_kernel::Result<()> {
    let on = [Sysctl::ipv4_forwarding(), Sysctl::ipv6_forwarding()].map(|name| (name, "1".to_owned()));
    Sysctls::of(space)?.set_all(&on)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_has_the_first_address_of_the_service_ranges() {
        let addresses = api_addresses();
        for wanted in ["10.250.0.1", "10.96.0.1", "fd00:10:250::1", "fd00:10:96::1"] {
            assert!(addresses.contains(&wanted.parse().unwrap()), "{wanted} is missing in {addresses:?}");
        }
    }

    #[test]
    fn nodes_have_addresses_of_their_own() {
        assert_eq!(node_addresses(0)[0].to_string(), "10.250.0.11/24");
        assert_eq!(node_addresses(1)[1].to_string(), "fd00:10:250::12/64");
    }
}
