//! A router with pods around it, each in a namespace of its own: routed, or joined by a bridge.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, UdpSocket};

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Bridge, Change, NewLink, Peer};
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::testing::namespace;
use knit_kernel::{Handle, NetNs, Op};
use knit_testbed::{ip, name, net};

/// Where everybody listens, by TCP and UDP.
pub const PORTS: [u16; 5] = [80, 81, 5000, 5100, 8080];

/// The namespaces of a test.
pub struct World {
    pub router: NetNs,
    hosts: BTreeMap<String, Host>,
}

pub struct Host {
    pub space: NetNs,
    pub addresses: [IpAddr; 2],
}

impl World {
    fn router() -> NetNs {
        let router = namespace();
        Sysctls::of(&router)
            .expect("settings")
            .set_all(&[
                (Sysctl::ipv4_forwarding(), "1".to_owned()),
                (Sysctl::ipv6_forwarding(), "1".to_owned()),
                (Sysctl::rp_filter(Scope::All), "0".to_owned()),
                (Sysctl::rp_filter(Scope::Default), "0".to_owned()),
            ])
            .expect("a router");
        router
    }

    /// Everybody on a wire of its own to the router, which has 192.0.2.1 and 2001:db8:2::1.
    pub fn routed(hosts: &[(&str, &str, &str)]) -> Self {
        let router = Self::router();
        let handle = Handle::open(&router).expect("a handle");
        let lo = handle.index_of(&name("lo")).expect("lo");
        let own = ["192.0.2.1/32", "2001:db8:2::1/128"].map(|own| Op::create(Address::new(lo, net(own))));
        handle.apply(&own).expect("addresses of the router");
        let mut world = Self { router, hosts: BTreeMap::new() };
        for (number, (link, v4, v6)) in hosts.iter().enumerate() {
            let space = namespace();
            let peer = Peer::new(name("eth0"), &space);
            let made = handle.create_link(&NewLink { up: true, ..NewLink::veth(name(link), peer) });
            let made = made.expect("a wire");
            let eth0 = made.peer.expect("a veth has a peer");
            let there = Handle::open(&space).expect("a handle");
            there.apply(&[Change::of(eth0).up().into()]).expect("up");
            let addresses = [ip(v4), ip(v6)];
            for (address, default) in addresses.into_iter().zip([Route::default_v4(), Route::default_v6()]) {
                let gateway = if address.is_ipv4() { "169.254.1." } else { "fd0f::" };
                let gateway = ip(&format!("{gateway}{}", number + 1));
                let ways = [
                    Op::create(Address::new(made.index, IpNet::from(gateway))),
                    Op::create(Route::to(IpNet::from(address)).dev(made.index)),
                ];
                handle.apply(&ways).expect("the way there");
                let ways = [
                    Op::create(Address::new(eth0, IpNet::from(address))),
                    Op::create(Route::to(IpNet::from(gateway)).dev(eth0)),
                    Op::create(default.via(gateway).dev(eth0)),
                ];
                there.apply(&ways).expect("the way back");
            }
            world.hosts.insert((*link).to_owned(), Host { space, addresses });
        }
        world
    }

    /// Everybody on one bridge, in 10.0.0.0/24 and fd00::/64; the router has .1. None if the kernel does not
    /// show bridged packets to IP rules.
    pub fn bridged(hosts: &[(&str, &str, &str)]) -> Option<Self> {
        let router = Self::router();
        let settings = Sysctls::of(&router).expect("settings");
        let both = [Sysctl::bridge_nf_call_iptables(), Sysctl::bridge_nf_call_ip6tables()];
        for setting in both {
            settings.set(&setting, 1).ok()?;
        }
        let handle = Handle::open(&router).expect("a handle");
        let mut bridge = NewLink::bridge(name("bridge"), Bridge::default());
        bridge.up = true;
        let bridge = handle.create_link(&bridge).expect("a bridge").index;
        let own = ["10.0.0.1/24", "fd00::1/64"].map(|own| Op::create(Address::new(bridge, net(own))));
        handle.apply(&own).expect("addresses of the router");
        let mut world = Self { router, hosts: BTreeMap::new() };
        for (link, v4, v6) in hosts {
            let space = namespace();
            let mut made = NewLink::veth(name(link), Peer::new(name("eth0"), &space));
            (made.up, made.master) = (true, Some(bridge));
            let eth0 = handle.create_link(&made).expect("a port").peer.expect("a veth has a peer");
            let there = Handle::open(&space).expect("a handle");
            there.apply(&[Change::of(eth0).up().into()]).expect("up");
            let addresses = [ip(v4), ip(v6)];
            for (address, length) in addresses.into_iter().zip([24, 64]) {
                let own = IpNet::new(address, length).expect("a prefix");
                let default = if address.is_ipv4() { Route::default_v4() } else { Route::default_v6() };
                let router = ip(if address.is_ipv4() { "10.0.0.1" } else { "fd00::1" });
                let ops = [Op::create(Address::new(eth0, own)), Op::create(default.via(router).dev(eth0))];
                there.apply(&ops).expect("an address and a way out");
            }
            world.hosts.insert((*link).to_owned(), Host { space, addresses });
        }
        Some(world)
    }

    pub fn host(&self, name: &str) -> &Host {
        self.hosts.get(name).unwrap_or_else(|| panic!("no host {name}"))
    }

    /// Has everybody listen at [`PORTS`] and send back what they hear.
    pub fn serve(&self) {
        for host in self.hosts.values() {
            serve(&host.space);
        }
    }
}

/// Listens at [`PORTS`] in a namespace, for both families, and sends everything back.
pub fn serve(space: &NetNs) {
    for port in PORTS {
        let bind = move || (TcpListener::bind(("::", port)), UdpSocket::bind(("::", port)));
        let (tcp, udp) = space.run(bind).expect("entered");
        let (tcp, udp) = (tcp.expect("listens"), udp.expect("listens"));
        std::thread::spawn(move || {
            for mut stream in tcp.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut buffer = [0; 64];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        if stream.write_all(&buffer[..length]).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
                // A client that is gone wants no answer.
                let _ = udp.send_to(&buffer[..length], peer);
            }
        });
    }
}
