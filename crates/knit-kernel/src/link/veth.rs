//! The other end of a veth pair, made directly in the namespace where it belongs.

use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};

use crate::name::{IfName, Mac, Mtu};
use crate::netns::NetNs;

/// What each end is made with. Left to itself the kernel makes as many queues as there can ever be
/// processors, and then uses one of them all the same; to make and unmake the others takes a third of the
/// time of a pair on two processors, and grows with their number. (Only `ethtool -L`, for XDP programs, could
/// have used them later.)
pub(super) const ONE_QUEUE: [LinkAttribute; 2] =
    [LinkAttribute::NumTxQueues(1), LinkAttribute::NumRxQueues(1)];

/// The other end of a veth pair.
///
/// It cannot be set up in the message that makes it (the kernel opens it before the two are paired and
/// answers `ENOTCONN`), so there is no field for that: set it up from inside its namespace.
#[derive(Debug, Clone)]
pub struct Peer<'a> {
    /// Its name there.
    pub name: IfName,
    /// Where it is to be; `None` is the namespace of the first end.
    pub namespace: Option<&'a NetNs>,
    /// Its MAC address; `None` lets the kernel choose.
    pub mac: Option<Mac>,
    /// Its MTU; `None` is the kernel's default of 1500.
    pub mtu: Option<Mtu>,
}

impl<'a> Peer<'a> {
    /// A peer with nothing but a name, in `namespace`.
    pub fn new(name: IfName, namespace: &'a NetNs) -> Self {
        Self { name, namespace: Some(namespace), mac: None, mtu: None }
    }

    pub(super) fn data(&self) -> InfoData {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(self.name.to_string()));
        if let Some(namespace) = self.namespace {
            message.attributes.push(LinkAttribute::NetNsFd(namespace.as_fd().as_raw_fd()));
        }
        message.attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        message.attributes.extend(self.mtu.map(|mtu| LinkAttribute::Mtu(mtu.get())));
        message.attributes.extend(ONE_QUEUE);
        InfoData::Veth(InfoVeth::Peer(message))
    }
}
