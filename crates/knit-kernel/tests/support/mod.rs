//! What the tests of this crate share: short names, and packets between namespaces.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::addr::Address;
use knit_kernel::handle::Created;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::{Handle, IfName, Mac, NetNs, Op};

/// An interface name that is known to be legal.
pub fn name(name: &str) -> IfName {
    name.parse().expect("a legal interface name")
}

/// A MAC address that is known to be legal.
pub fn mac(mac: &str) -> Mac {
    mac.parse().expect("a MAC address")
}

/// An IP address.
pub fn ip(ip: &str) -> IpAddr {
    ip.parse().expect("an address")
}

/// An address with its prefix length.
pub fn net(net: &str) -> ipnet::IpNet {
    net.parse().expect("a prefix")
}

/// A namespace with `lo` up, and a handle to it.
pub fn node() -> Handle {
    Handle::new(knit_kernel::testing::namespace()).expect("a handle")
}

/// A bridge that is up.
pub fn bridge(on: &Handle, called: &str) -> Created {
    let new = NewLink { up: true, ..NewLink::bridge(name(called), Bridge::default()) };
    on.create_link(&new).expect("a bridge")
}

/// A veth pair between two namespaces, both ends up, with these addresses.
pub fn wire(here: &Handle, called: &str, here_net: &str, there: &Handle, there_net: &str) -> (u32, u32) {
    let peer = Peer::new(name("eth0"), there.namespace());
    let new = NewLink { up: true, ..NewLink::veth(name(called), peer) };
    let made = here.create_link(&new).expect("a veth pair");
    let peer = made.peer.expect("a veth has a peer");
    here.apply(&[Op::create(Address::new(made.index, net(here_net)))]).expect("an address here");
    set_up(there, peer, there_net);
    (made.index, peer)
}

/// Sets a link up and gives it an address.
pub fn set_up(on: &Handle, index: u32, address: &str) {
    let ops = [Change::of(index).up().into(), Op::create(Address::new(index, net(address)))];
    on.apply(&ops).expect("up, with an address");
}

/// A pod: a namespace with an `eth0` that is a port of `bridge`.
pub fn pod(
    on: &Handle,
    bridge: u32,
    called: &str,
    address: &str,
    port: knit_kernel::link::PortFlags,
) -> Handle {
    let pod = node();
    let peer = Peer::new(name("eth0"), pod.namespace());
    let new =
        NewLink { master: Some(bridge), port: Some(port), up: true, ..NewLink::veth(name(called), peer) };
    let made = on.create_link(&new).expect("a port");
    set_up(&pod, made.peer.expect("a peer"), address);
    pod
}

/// Whether a UDP packet gets from one namespace to an address of another, and the answer back. `patience` is
/// how long to wait for it.
pub fn reaches(from: &NetNs, to: &NetNs, address: IpAddr, patience: Duration) -> bool {
    let server = to.run(|| UdpSocket::bind(SocketAddr::new(address, 0))).expect("enter").expect("bind");
    let target = server.local_addr().expect("bound");
    let any: IpAddr = if address.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let client = from.run(|| UdpSocket::bind(SocketAddr::new(any, 0))).expect("enter").expect("bind");
    server.set_nonblocking(true).expect("nonblocking");
    client.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
    let end = std::time::Instant::now() + patience;
    while std::time::Instant::now() < end {
        // No route yet, or an ICMP error of the packet before: try again until patience ends.
        let _ = client.send_to(b"ping", target);
        let mut buffer = [0; 16];
        // The packet is delivered within send_to, but for neighbour resolution; then the next round finds it.
        while let Ok((length, sender)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], sender);
        }
        if let Ok((4, sender)) = client.recv_from(&mut buffer)
            && sender == target
        {
            return true;
        }
    }
    false
}

/// Asserts that a packet and its answer get through.
#[track_caller]
pub fn must_reach(from: &Handle, to: &Handle, address: &str) {
    let patience = Duration::from_secs(60);
    assert!(reaches(from.namespace(), to.namespace(), ip(address), patience), "{address} must be reachable");
}

/// Asserts that no packet and answer get through, within a time in which they always did when they should.
#[track_caller]
pub fn must_not_reach(from: &Handle, to: &Handle, address: &str) {
    let patience = Duration::from_millis(400);
    assert!(
        !reaches(from.namespace(), to.namespace(), ip(address), patience),
        "{address} must not be reachable"
    );
}
