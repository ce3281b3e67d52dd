//! The elements that a packet filter holds, and changes of them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use crate::model::{Direction, Protocol};

/// The name of a class of peers: peers of one class are the same to every policy in force here. The numbers
/// mean nothing, and are given again in another run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(pub u32);

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decision {
    /// It goes on.
    Accept,
    /// It ends here, without a word.
    Drop,
}

/// Which element. Each variant is a fixed number of sets or maps of the packet filter, whatever policies
/// there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A local pod's address that policies act on in this direction, with what happens if nothing else
    /// matches.
    Subject(Direction, IpAddr),
    /// The class of an address that a pod, a node or a cluster service has.
    Peer(IpAddr),
    /// The class of the addresses from one to another, both included. These ranges never overlap. They stand
    /// for addresses that have no [`Key::Peer`].
    Block(IpAddr, IpAddr),
    /// From this address to itself: the class is [`Class::ITSELF`] (rule 28).
    Itself(IpAddr),
    /// What happens between a local pod's address and a class, or anybody at all.
    Rule {
        /// Seen from the local pod.
        direction: Direction,
        /// The local pod's address.
        pod: IpAddr,
        /// The class of the other side; anybody if it is left out.
        peer: Option<Class>,
        /// Which traffic.
        traffic: TrafficKey,
    },
}

/// Which traffic a [`Key::Rule`] is about: the narrowest one that matches counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TrafficKey {
    /// One port.
    Port(Protocol, u16),
    /// Ports from one to another, both included.
    Range(Protocol, u16, u16),
    /// A protocol.
    Protocol(Protocol),
    /// Everything.
    All,
}

/// What an element says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// Of [`Key::Subject`] and [`Key::Rule`].
    Decision(Decision),
    /// Of [`Key::Peer`] and [`Key::Block`].
    Class(Class),
    /// Of [`Key::Itself`].
    Member,
}

/// One element that has come, gone, or says something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Change {
    /// Which one.
    pub key: Key,
    /// What it said before; nothing if it is new.
    pub old: Option<Value>,
    /// What it says now; nothing if it is gone.
    pub new: Option<Value>,
}

/// What has changed since the changes were last taken, with what cancels out left out.
#[derive(Debug, Default)]
pub(super) struct Pending(BTreeMap<Key, (Option<Value>, Option<Value>)>);

// === impl Class ===

impl Class {
    /// The class of a pod that reaches itself.
    pub const ITSELF: Self = Self(1);
    /// The first number that is given to a class of others; 0 stands for "no class".
    pub(super) const FIRST: u32 = 2;
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Decision ===

impl Decision {
    /// Accept if so.
    #[must_use]
    pub fn accept_if(so: bool) -> Self {
        if so { Self::Accept } else { Self::Drop }
    }
}

// === impl Pending ===

impl Pending {
    pub(super) fn set(&mut self, key: Key, old: Option<Value>, new: Option<Value>) {
        if old == new {
            return;
        }
        self.0.entry(key).and_modify(|(_, latest)| *latest = new).or_insert((old, new));
    }

    pub(super) fn remove(&mut self, key: Key, value: Value) {
        self.set(key, Some(value), None);
    }

    pub(super) fn take(&mut self) -> Vec<Change> {
        let all = std::mem::take(&mut self.0).into_iter();
        all.filter(|(_, (old, new))| old != new).map(|(key, (old, new))| Change { key, old, new }).collect()
    }
}
