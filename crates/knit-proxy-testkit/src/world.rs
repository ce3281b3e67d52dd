//! The world of the tests: a node, two pods on it, two elsewhere, and somebody outside, each a network
//! namespace.
//!
//! Everybody is wired to the node and to nobody else, so every packet passes it. Pods have addresses of
//! 10.1.0.0/16 and fd01::/48, those on the node of 10.1.0.0/24 and fd01::/64. On each wire the node has an
//! address of its own, which is what an endpoint sees of a masqueraded client.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Mutex;
use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{Handle, IfName, NetNs, Op};
use knit_proxy::model::{NodeInfo, Protocol};
use knit_types::sync::Locked;

/// The name of the node.
pub const NODE: &str = "node";
/// The node's first addresses.
pub const NODE_ADDRESSES: [&str; 2] = ["192.0.2.1", "2001:db8:2::1"];
/// More addresses of the node.
pub const MORE_NODE_ADDRESSES: [&str; 2] = ["192.0.2.2", "2001:db8:2::2"];
/// The ranges of all pods.
pub const POD_RANGES: [&str; 2] = ["10.1.0.0/16", "fd01::/48"];
/// The ranges of the node's own pods.
pub const NODE_POD_RANGES: [&str; 2] = ["10.1.0.0/24", "fd01::/64"];

/// Everybody but the node: name, IPv4 and IPv6 address.
const HOSTS: [(&str, &str, &str); 5] = [
    ("pod-a", "10.1.0.1", "fd01::1"),
    ("pod-b", "10.1.0.2", "fd01::2"),
    ("remote-a", "10.1.1.1", "fd01:0:0:1::1"),
    ("remote-b", "10.1.1.2", "fd01:0:0:1::2"),
    ("outside", "203.0.113.9", "2001:db8:9::9"),
];

/// The namespaces of a test.
#[derive(Debug)]
pub struct World {
    node: NetNs,
    hosts: Vec<Host>,
    servers: Mutex<HashSet<(SocketAddr, Protocol)>>,
}

#[derive(Debug)]
struct Host {
    name: &'static str,
    namespace: NetNs,
    addresses: [IpAddr; 2],
}

/// What went wrong while the world was made.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// The kernel refused something.
    #[error("cannot create the namespaces of the tests")]
    Kernel(#[from] knit_kernel::Error),
    /// A namespace could not be entered.
    #[error("cannot enter a namespace of the tests")]
    Namespace(#[from] knit_kernel::netns::Error),
    /// A server could not be started.
    #[error("cannot serve {address}")]
    Serve {
        /// The address that could not be served.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A case names an endpoint that nobody has.
    #[error("nobody in the world of the tests has the address {0}")]
    Nobody(IpAddr),
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address in this file is right")
}

fn name(text: &str) -> IfName {
    text.parse().expect("a name in this file is right")
}

impl World {
    /// Makes it. The caller is root in namespaces of its own, as in
    /// [`in_namespaces`](knit_kernel::testing::in_namespaces).
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn new() -> Result<Self, WorldError> {
        let node = Handle::new(knit_kernel::testing::namespace())?;
        Sysctls::of(node.namespace())?.set_all(&[
            (Sysctl::ipv4_forwarding(), "1".to_owned()),
            (Sysctl::ipv6_forwarding(), "1".to_owned()),
            (Sysctl::rp_filter(Scope::All), "0".to_owned()),
            (Sysctl::rp_filter(Scope::Default), "0".to_owned()),
        ])?;
        let lo = node.index_of(&name("lo"))?;
        let own = NODE_ADDRESSES.iter().chain(&MORE_NODE_ADDRESSES);
        let own: Vec<Op<'_>> = own.map(|a| Op::create(Address::new(lo, IpNet::from(ip(a))))).collect();
        node.apply(&own)?;
        let mut hosts = Vec::new();
        for (number, (host, v4, v6)) in HOSTS.into_iter().enumerate() {
            hosts.push(wire(&node, number + 1, host, [ip(v4), ip(v6)])?);
        }
        Ok(Self { node: node.namespace().try_clone()?, hosts, servers: Mutex::default() })
    }

    /// The node's namespace, where the proxy works.
    #[must_use]
    pub fn node(&self) -> &NetNs {
        &self.node
    }

    /// What a proxy is told of the node.
    #[must_use]
    pub fn node_info() -> NodeInfo {
        let addresses: Vec<IpAddr> = NODE_ADDRESSES.into_iter().map(ip).collect();
        let range = |text: &str| text.parse().expect("a range in this file is right");
        NodeInfo {
            host_addresses: addresses.iter().copied().chain(MORE_NODE_ADDRESSES.map(ip)).collect(),
            addresses,
            pod_ranges: NODE_POD_RANGES.into_iter().map(range).collect(),
            ..NodeInfo::new(NODE)
        }
    }

    /// The namespace of somebody.
    #[must_use]
    pub fn host(&self, name: &str) -> Option<&NetNs> {
        if name == NODE {
            return Some(&self.node);
        }
        self.hosts.iter().find(|host| host.name == name).map(|host| &host.namespace)
    }

    /// Has the owner of an address answer there, if nobody does yet: with its own and the client's address as
    /// it sees them.
    ///
    /// # Errors
    /// If nobody has the address, or it cannot listen.
    pub fn serve(&self, address: SocketAddr, protocol: Protocol) -> Result<(), WorldError> {
        let mut servers = self.servers.locked();
        if !servers.insert((address, protocol)) {
            return Ok(());
        }
        let node = NODE_ADDRESSES.iter().any(|a| ip(a) == address.ip()).then_some(&self.node);
        let host = self.hosts.iter().find(|host| host.addresses.contains(&address.ip()));
        let namespace = node.or(host.map(|host| &host.namespace)).ok_or(WorldError::Nobody(address.ip()))?;
        let failed = |source| WorldError::Serve { address, source };
        match protocol {
            Protocol::Tcp => {
                let listener = namespace.run(|| TcpListener::bind(address))?.map_err(failed)?;
                std::thread::spawn(move || serve_tcp(&listener));
            }
            Protocol::Udp => {
                let socket = namespace.run(|| UdpSocket::bind(address))?.map_err(failed)?;
                std::thread::spawn(move || serve_udp(&socket));
            }
            // Not every kernel has it; nobody asks for it here.
            Protocol::Sctp => {}
        }
        Ok(())
    }
}

/// The wire between the node and somebody.
fn wire(
    node: &Handle,
    number: usize,
    host: &'static str,
    addresses: [IpAddr; 2],
) -> Result<Host, WorldError> {
    let there = Handle::new(knit_kernel::testing::namespace())?;
    let peer = Peer::new(name("eth0"), there.namespace());
    let made = node.create_link(&NewLink { up: true, ..NewLink::veth(name(host), peer) })?;
    let eth0 = made.peer.expect("a veth has a peer");
    there.apply(&[Change::of(eth0).up().into()])?;
    let defaults = [Route::default_v4(), Route::default_v6()];
    for (address, default) in addresses.into_iter().zip(defaults) {
        let gateway =
            ip(&if address.is_ipv4() { format!("169.254.1.{number}") } else { format!("fd0f::{number}") });
        node.apply(&[
            Op::create(Address::new(made.index, IpNet::from(gateway))),
            Op::create(Route::to(IpNet::from(address)).dev(made.index)),
        ])?;
        there.apply(&[
            Op::create(Address::new(eth0, IpNet::from(address))),
            Op::create(Route::to(IpNet::from(gateway)).dev(eth0)),
            Op::create(default.via(gateway).dev(eth0)),
        ])?;
        if host == "outside" {
            // Where the node sends what it knows no better way for, and what its own clients start from.
            let source = ip(NODE_ADDRESSES[usize::from(address.is_ipv6())]);
            let route = Route { source: Some(source), ..default.via(address).dev(made.index).onlink() };
            node.apply(&[Op::create(route)])?;
        }
    }
    Ok(Host { name: host, namespace: there.namespace().try_clone()?, addresses })
}

fn serve_tcp(listener: &TcpListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { return };
        // A client that is gone already wants no answer.
        if let (Ok(own), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) {
            let _ = stream.write_all(format!("{own} {peer}").as_bytes());
            // The client closes first, so that the port stays free here.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read(&mut [0; 1]);
        }
    }
}

fn serve_udp(socket: &UdpSocket) {
    let Ok(own) = socket.local_addr() else { return };
    let mut buffer = [0; 64];
    while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
        // Likewise.
        let _ = socket.send_to(format!("{own} {peer}").as_bytes(), peer);
    }
}
