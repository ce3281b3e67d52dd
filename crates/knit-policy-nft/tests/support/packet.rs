//! Packets by hand, through the forward hook of a router: any source, any destination, any protocol, without
//! anybody who would have to answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use knit_kernel::addr::Address;
use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::testing::{eventually, namespace};
use knit_kernel::{Handle, NetNs, Op};
use knit_nft::expr::Base;
use knit_nft::{
    Chain, ChainKind, DynsetOp, ElementValue, Expr, Family, Hook, L4Proto, Mark, Nftables as _, Port, Reg,
    Rule, Set, TableId, TableState, Transaction, field,
};
use knit_policy::model::{Protocol, Traffic};
use knit_testbed::{SOON, ip, name, net};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

/// A packet that can be told from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub traffic: Traffic,
    /// Its source port, or whatever its protocol has in place of one.
    pub tag: u16,
    /// TCP flags.
    pub flags: u8,
}

/// How often packets are sent again that should have come through.
const RESENT: usize = 5;
/// After how many looks packets are sent again whose coming through is waited for.
const LOOKS: usize = 20;

pub const SYN: u8 = 2;
pub const ACK: u8 = 16;

/// A router that packets come to, and that notes those which pass all its rules.
pub struct Bench {
    pub router: NetNs,
    /// Kept, because they end with their value.
    _others: [NetNs; 2],
    sockets: [OwnedFd; 2],
    next: u16,
}

impl Packet {
    pub fn new(source: IpAddr, destination: IpAddr, traffic: Traffic) -> Self {
        Self { source, destination, traffic, tag: 0, flags: SYN }
    }

    fn protocol(&self) -> u8 {
        match (self.traffic, self.source.is_ipv4()) {
            (Traffic::Port(protocol, _), _) => protocol.number(),
            (Traffic::Icmpv6(_), _) => 58,
            (Traffic::Other, true) => 1,
            // Nobody's: for experiments.
            (Traffic::Other, false) => 253,
        }
    }

    fn body(&self) -> Vec<u8> {
        let tag = self.tag.to_be_bytes();
        let mut body = match self.traffic {
            Traffic::Port(Protocol::Tcp, port) => {
                let mut tcp = [&tag[..], &port.to_be_bytes(), &[0; 8], &[0x50, self.flags, 0x20, 0]].concat();
                tcp.extend([0; 4]);
                tcp
            }
            Traffic::Port(Protocol::Udp, port) => [&tag[..], &port.to_be_bytes(), &[0, 8, 0, 0]].concat(),
            // An INIT chunk.
            Traffic::Port(Protocol::Sctp, port) => {
                [&tag[..], &port.to_be_bytes(), &[0; 8], &[1, 0, 0, 20], &[0, 0, 0, 1], &[0; 12]].concat()
            }
            Traffic::Icmpv6(kind) => [&[kind, 0, 0, 0], &tag[..], &[0; 18]].concat(),
            Traffic::Other if self.source.is_ipv4() => [&[8, 0, 0, 0], &tag[..], &[0, 1]].concat(),
            Traffic::Other => [&tag[..], &[0; 6]].concat(),
        };
        let at = match self.traffic {
            Traffic::Port(Protocol::Tcp, _) => 16,
            Traffic::Port(Protocol::Udp, _) => 6,
            Traffic::Icmpv6(_) => 2,
            Traffic::Other if self.source.is_ipv4() => 2,
            _ => return body,
        };
        let pseudo = if self.protocol() == 1 {
            Vec::new()
        } else {
            let addresses = [octets(self.source), octets(self.destination)].concat();
            let length = u16::try_from(body.len()).expect("short");
            [&addresses[..], &[0, self.protocol()], &length.to_be_bytes()].concat()
        };
        let sum = checksum(&[&pseudo[..], &body[..]].concat());
        body[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        body
    }

    fn bytes(&self) -> Vec<u8> {
        let body = self.body();
        let length = u16::try_from(body.len()).expect("short");
        if self.source.is_ipv4() {
            let total = (length + 20).to_be_bytes();
            let mut header = [&[0x45, 0], &total[..], &[0, 0, 0, 0, 64, self.protocol(), 0, 0]].concat();
            header.extend(octets(self.source));
            header.extend(octets(self.destination));
            let sum = checksum(&header).to_be_bytes();
            header[10..12].copy_from_slice(&sum);
            header.extend(body);
            return header;
        }
        let mut header = [&[0x60, 0, 0, 0], &length.to_be_bytes()[..], &[self.protocol(), 255]].concat();
        header.extend(octets(self.source));
        header.extend(octets(self.destination));
        header.extend(body);
        header
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Where it is noted.
fn notes() -> TableId {
    TableId::new(Family::Inet, "notes")
}

fn seen() -> Set {
    Set::map::<Port, Mark>("seen").dynamic(1 << 16)
}

impl Bench {
    /// `inward` is the name of the link that packets come in by.
    pub fn new(inward: &str) -> Self {
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
        let handle = Handle::open(&router).expect("a handle");
        let (source, beyond) = (namespace(), namespace());
        let wire = |space: &NetNs, link: &str| {
            let peer = Peer::new(name("eth0"), space);
            let made = handle.create_link(&NewLink { up: true, ..NewLink::veth(name(link), peer) });
            let made = made.expect("a wire");
            let eth0 = made.peer.expect("a veth has a peer");
            Handle::open(space).expect("a handle").apply(&[Change::of(eth0).up().into()]).expect("up");
            (made.index, eth0)
        };
        let ((inner, eth0), (outer, _)) = (wire(&source, inward), wire(&beyond, "out"));
        let there = Handle::open(&source).expect("a handle");
        for (own, gateway, default) in [
            ("169.254.8.2/30", "169.254.8.1/30", Route::default_v4()),
            ("fd08::2/126", "fd08::1/126", Route::default_v6()),
        ] {
            let (own, gateway) = (net(own), net(gateway));
            // Nothing ever gets beyond: what passes is noted and dropped.
            let beyond = Op::create(default.dev(outer));
            handle.apply(&[Op::create(Address::new(inner, gateway)), beyond]).expect("ways");
            let way = Op::create(default.via(gateway.addr()).dev(eth0));
            there.apply(&[Op::create(Address::new(eth0, own)), way]).expect("a way");
        }
        let socket = |family| {
            let flags = SocketFlags::CLOEXEC;
            let open = move || {
                rustix::net::socket_with(family, SocketType::RAW, flags, Some(rustix::net::ipproto::RAW))
            };
            source.run(open).expect("entered").expect("a raw socket")
        };
        let sockets = [socket(AddressFamily::INET), socket(AddressFamily::INET6)];
        let bench = Self { router, _others: [source, beyond], sockets, next: 0 };
        bench.note();
        bench
    }

    /// Notes the tag of whatever has passed all else, with its mark.
    fn note(&self) {
        let icmp = |protocol| {
            let rule = Rule::new().eq(field::l4proto(), &protocol);
            let id = Expr::Payload { dreg: Reg::FIRST, base: Base::Transport, offset: 4, len: 2 };
            let mark = Reg::new(1).expect("a register");
            let set = seen().name;
            rule.expr(id).load_at(mark, &field::mark()).expr(Expr::Dynset {
                set,
                op: DynsetOp::Add,
                key: Reg::FIRST,
                data: Some(mark),
                timeout: None,
            })
        };
        let others = Rule::new().not_one_of(&field::l4proto(), &[L4Proto::ICMP, L4Proto::ICMPV6]).update_map(
            DynsetOp::Add,
            &field::th_sport(),
            &field::mark(),
            seen().name,
            None,
        );
        let state = TableState::new(notes()).set(seen(), []).chain(
            Chain::base("forward", ChainKind::Filter, Hook::Forward, 300),
            [icmp(L4Proto::ICMP), icmp(L4Proto::ICMPV6), others, Rule::new().drop()],
        );
        Kernel::open_in(&self.router).expect("nftables").apply(&state).expect("notes");
    }

    /// Sends packets and says which came through. `expected` says which must: those are waited for, and for
    /// the others until one that was sent after them has come through.
    #[track_caller]
    pub fn pass(&mut self, packets: &[Packet], expected: impl Fn(&Packet) -> bool) -> Vec<bool> {
        let mut forget = Transaction::new();
        forget.flush_set(&notes(), seen().name);
        Kernel::open_in(&self.router).expect("nftables").commit(&forget).expect("forgotten");
        let mut sent = Vec::new();
        for packet in packets {
            let packet = Packet { tag: self.tag(), ..*packet };
            self.send(&packet);
            sent.push(packet);
        }
        let wanted: Vec<Packet> = sent.iter().copied().filter(&expected).collect();
        let mut seen = self.after_markers();
        // A packet may get lost before it comes to any rule, where the machine has too much to do. What is
        // wanted is sent again, so that the caller only says that one is missing if it never gets through.
        for _ in 0..RESENT {
            let lost: Vec<&Packet> = wanted.iter().filter(|packet| !seen.contains_key(&packet.tag)).collect();
            if lost.is_empty() {
                break;
            }
            lost.into_iter().for_each(|packet| self.send(packet));
            seen = self.after_markers();
        }
        sent.iter().map(|packet| seen.contains_key(&packet.tag)).collect()
    }

    /// What came through by the time that packets did which were sent after all others.
    #[track_caller]
    fn after_markers(&mut self) -> BTreeMap<u16, u32> {
        let mut seen = BTreeMap::new();
        let mut markers = self.send_markers();
        let mut looks = 0;
        eventually("the last packets come through", SOON / 4, || {
            seen = self.seen();
            let all = markers.iter().all(|tag| seen.contains_key(tag));
            looks += 1;
            if !all && looks % LOOKS == 0 {
                markers = self.send_markers();
            }
            all
        });
        seen
    }

    /// A packet of each family that nobody's policies are about.
    fn send_markers(&mut self) -> BTreeSet<u16> {
        let pairs = [("198.51.100.1", "198.51.100.2"), ("2001:db8:ffff::1", "2001:db8:ffff::2")];
        let markers = pairs.map(|(source, destination)| Packet {
            tag: self.tag(),
            ..Packet::new(ip(source), ip(destination), Traffic::Port(Protocol::Udp, 9))
        });
        markers.iter().for_each(|marker| self.send(marker));
        markers.map(|marker| marker.tag).into()
    }

    /// Whether one packet comes through that may or may not.
    #[track_caller]
    pub fn passes(&mut self, packet: Packet) -> bool {
        self.pass(&[packet], |_| false)[0]
    }

    /// The tags that came through, with the packets' marks.
    pub fn seen(&self) -> BTreeMap<u16, u32> {
        let mut kernel = Kernel::open_in(&self.router).expect("nftables");
        let listed = kernel.elements(&notes(), &seen()).expect("listed");
        let tag = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
        let mark = |value: &ElementValue| match value {
            ElementValue::Data(data) => u32::from_ne_bytes(data.as_slice().try_into().expect("a mark")),
            other => panic!("{other:?}"),
        };
        let read =
            |item: &knit_nft::ListedElement| (tag(item.element.key.as_slice()), mark(&item.element.value));
        listed.iter().map(read).collect()
    }

    pub fn tag(&mut self) -> u16 {
        // What came before is forgotten by then.
        self.next = self.next % 60_000 + 1;
        self.next
    }

    pub fn send(&self, packet: &Packet) {
        let socket = &self.sockets[usize::from(packet.source.is_ipv6())];
        let to = SocketAddr::new(packet.destination, 0);
        rustix::net::sendto(socket, &packet.bytes(), SendFlags::empty(), &to).expect("sent");
    }
}
