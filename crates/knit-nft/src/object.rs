//! Tables, chains, sets, maps and their elements, as one wants them to be.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::data::{Data, Key, prefix_bounds};
use crate::datatype::KeyType;

/// The name of a table, chain or set. Cheap to clone.
pub type Name = Arc<str>;

/// Which packets a table sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet = 1,
    /// IPv4.
    Ip = 2,
    /// ARP.
    Arp = 3,
    /// Frames of one device.
    Netdev = 5,
    /// Frames on a bridge.
    Bridge = 7,
    /// IPv6.
    Ip6 = 10,
}

/// A table's family and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId {
    /// Which packets it sees.
    pub family: Family,
    /// The table's name.
    pub name: Name,
}

/// A table: a namespace for chains and sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Family and name.
    pub id: TableId,
    /// Whether its base chains are unhooked for now.
    pub dormant: bool,
    /// For people; at most [`MAX_COMMENT`] bytes.
    pub comment: Option<Box<str>>,
}

/// The longest comment in bytes that `nft` accepts as well.
pub const MAX_COMMENT: usize = 128;

/// What a base chain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChainKind {
    /// Accept and drop.
    Filter,
    /// Translate addresses; sees only the first packet of a connection.
    Nat,
    /// Like filter in the output hook, but routes again when a mark changed.
    Route,
}

/// Where on a packet's way a base chain sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// Before the routing decision.
    Prerouting,
    /// For this machine.
    Input,
    /// Through this machine.
    Forward,
    /// From this machine.
    Output,
    /// On the way out.
    Postrouting,
    /// As it comes off a device (netdev and inet).
    Ingress,
    /// As it goes to a device (netdev).
    Egress,
}

/// What happens to a packet that reaches the end of a base chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// It goes on.
    #[default]
    Accept,
    /// It is dropped.
    Drop,
}

/// The part of a base chain that a regular chain does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseChain {
    /// What it may do.
    pub kind: ChainKind,
    /// Where it sits.
    pub hook: Hook,
    /// Lower runs earlier.
    pub priority: i32,
    /// What happens at its end.
    pub policy: Policy,
    /// The devices of an ingress or egress chain, sorted.
    pub devices: Vec<Name>,
}

/// A chain of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The chain's name.
    pub name: Name,
    /// Where packets enter it; a regular chain is only reached by jumps.
    pub base: Option<BaseChain>,
    /// For people; at most [`MAX_COMMENT`] bytes.
    pub comment: Option<Box<str>>,
}

/// What a set holds next to its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetKind {
    /// Nothing: a plain set.
    Set,
    /// A value for each key.
    Map(KeyType),
    /// A verdict for each key.
    VerdictMap,
}

/// A named set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The name of the set or map.
    pub name: Name,
    /// The type of its keys.
    pub key: KeyType,
    /// What it holds next to the keys.
    pub kind: SetKind,
    /// Whether keys are ranges.
    pub interval: bool,
    /// Whether no element may change once a rule uses it.
    pub constant: bool,
    /// Whether elements may have a timeout.
    pub timeouts: bool,
    /// Whether rules may add elements.
    pub dynamic: bool,
    /// The timeout of elements that name none.
    pub timeout: Option<Duration>,
    /// The most elements it may hold.
    pub size: Option<u32>,
    /// Whether each element counts packets.
    pub counter: bool,
    /// For people; at most [`MAX_COMMENT`] bytes.
    pub comment: Option<Box<str>>,
}

/// Where a packet goes next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// On with the next hook.
    Accept,
    /// Gone.
    Drop,
    /// On with the next rule.
    Continue,
    /// Back to the calling chain.
    Return,
    /// To this chain, and back after its end.
    Jump(Name),
    /// To this chain, without coming back here.
    Goto(Name),
}

/// What an element holds next to its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementValue {
    /// Nothing.
    None,
    /// A map's value.
    Data(Data),
    /// A verdict map's verdict.
    Verdict(Verdict),
}

/// One element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// Its key, or the first key of its range.
    pub key: Data,
    /// The last key of its range, in interval sets; without one the range is the key alone.
    pub key_end: Option<Box<Data>>,
    /// What it holds.
    pub value: ElementValue,
    /// When it goes away, counted from when it was added.
    pub timeout: Option<Duration>,
    /// For people; at most [`MAX_COMMENT`] bytes.
    pub comment: Option<Box<str>>,
}

// === impl Family ===

impl Family {
    /// The family with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Inet, Self::Ip, Self::Arp, Self::Netdev, Self::Bridge, Self::Ip6]
            .into_iter()
            .find(|family| *family as u8 == number)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Arp => "arp",
            Self::Netdev => "netdev",
            Self::Bridge => "bridge",
            Self::Ip6 => "ip6",
        })
    }
}

// === impl TableId and Table ===

impl TableId {
    /// The table of this family and name.
    pub fn new(family: Family, name: impl Into<Name>) -> Self {
        Self { family, name: name.into() }
    }
}

impl fmt::Display for TableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

impl Table {
    /// An active table without a comment.
    pub fn new(id: TableId) -> Self {
        Self { id, dormant: false, comment: None }
    }

    /// With a comment.
    pub fn comment(mut self, comment: &str) -> Self {
        self.comment = Some(comment.into());
        self
    }
}

impl From<TableId> for Table {
    fn from(id: TableId) -> Self {
        Self::new(id)
    }
}

// === impl Chain ===

impl Chain {
    /// A chain that is only reached by jumps.
    pub fn regular(name: impl Into<Name>) -> Self {
        Self { name: name.into(), base: None, comment: None }
    }

    /// A chain at a hook, with policy accept.
    pub fn base(name: impl Into<Name>, kind: ChainKind, hook: Hook, priority: i32) -> Self {
        let base = BaseChain { kind, hook, priority, policy: Policy::Accept, devices: Vec::new() };
        Self { name: name.into(), base: Some(base), comment: None }
    }

    /// With this policy. A regular chain has none and stays as it is.
    pub fn policy(mut self, policy: Policy) -> Self {
        if let Some(base) = &mut self.base {
            base.policy = policy;
        }
        self
    }

    /// On one more device, for ingress and egress hooks. A regular chain has none and stays as it is.
    pub fn device(mut self, device: impl Into<Name>) -> Self {
        if let Some(base) = &mut self.base {
            base.devices.push(device.into());
            base.devices.sort();
        }
        self
    }

    /// With a comment.
    pub fn comment(mut self, comment: &str) -> Self {
        self.comment = Some(comment.into());
        self
    }
}

impl Hook {
    /// Its number, which depends on the family.
    pub fn number(self, family: Family) -> u32 {
        match (family, self) {
            (Family::Netdev, Self::Egress) => 1,
            (Family::Netdev, _) => 0,
            (Family::Arp, Self::Output) => 1,
            (Family::Arp, _) => 0,
            (_, Self::Prerouting) => 0,
            (_, Self::Input) => 1,
            (_, Self::Forward) => 2,
            (_, Self::Output) => 3,
            (_, Self::Postrouting) => 4,
            (_, Self::Ingress | Self::Egress) => 5,
        }
    }

    /// The hook with this number in this family.
    pub fn from_number(family: Family, number: u32) -> Option<Self> {
        Some(match (family, number) {
            (Family::Netdev, 0) => Self::Ingress,
            (Family::Netdev, 1) => Self::Egress,
            (Family::Arp, 0) => Self::Input,
            (Family::Arp, 1) => Self::Output,
            (Family::Netdev | Family::Arp, _) => return None,
            (_, 0) => Self::Prerouting,
            (_, 1) => Self::Input,
            (_, 2) => Self::Forward,
            (_, 3) => Self::Output,
            (_, 4) => Self::Postrouting,
            (_, 5) => Self::Ingress,
            _ => return None,
        })
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

impl ChainKind {
    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Filter, Self::Nat, Self::Route].into_iter().find(|kind| kind.name() == name)
    }

    /// The name that nftables uses for the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Route => "route",
        }
    }
}

// === impl Set ===

impl Set {
    fn with_kind(name: impl Into<Name>, key: KeyType, kind: SetKind) -> Self {
        Self {
            name: name.into(),
            key,
            kind,
            interval: false,
            constant: false,
            timeouts: false,
            dynamic: false,
            timeout: None,
            size: None,
            counter: false,
            comment: None,
        }
    }

    /// A set of keys.
    pub fn of<K: Key>(name: impl Into<Name>) -> Self {
        Self::with_kind(name, K::key_type(), SetKind::Set)
    }

    /// A map from keys to values.
    pub fn map<K: Key, V: Key>(name: impl Into<Name>) -> Self {
        Self::with_kind(name, K::key_type(), SetKind::Map(V::key_type()))
    }

    /// A map from keys to verdicts.
    pub fn verdict_map<K: Key>(name: impl Into<Name>) -> Self {
        Self::with_kind(name, K::key_type(), SetKind::VerdictMap)
    }

    /// A set or map whose types are only known at run time.
    pub fn untyped(name: impl Into<Name>, key: KeyType, kind: SetKind) -> Self {
        Self::with_kind(name, key, kind)
    }

    /// Keys are ranges.
    pub fn interval(mut self) -> Self {
        self.interval = true;
        self
    }

    /// No element may change once a rule uses the set.
    pub fn constant(mut self) -> Self {
        self.constant = true;
        self
    }

    /// Elements may have a timeout.
    pub fn timeouts(mut self) -> Self {
        self.timeouts = true;
        self
    }

    /// Elements have this timeout unless they say otherwise. The kernel rounds to its clock tick.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeouts = true;
        self.timeout = Some(timeout);
        self
    }

    /// Rules may add elements, up to this many.
    pub fn dynamic(mut self, size: u32) -> Self {
        self.dynamic = true;
        self.size = Some(size);
        self
    }

    /// Holds at most this many elements.
    pub fn size(mut self, size: u32) -> Self {
        self.size = Some(size);
        self
    }

    /// Each element counts packets and bytes.
    pub fn counter(mut self) -> Self {
        self.counter = true;
        self
    }

    /// With a comment.
    pub fn comment(mut self, comment: &str) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// Whether ranges are over a concatenation, which the kernel keeps with both ends in one element.
    pub(crate) fn is_concat_interval(&self) -> bool {
        self.interval && self.key.is_concat()
    }
}

// === impl Verdict ===

impl Verdict {
    /// The chain that it leads to.
    pub fn chain(&self) -> Option<&Name> {
        match self {
            Self::Jump(chain) | Self::Goto(chain) => Some(chain),
            _ => None,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Continue => f.write_str("continue"),
            Self::Return => f.write_str("return"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
            Self::Goto(chain) => write!(f, "goto {chain}"),
        }
    }
}

// === impl Element ===

impl Element {
    /// A key of a plain set.
    pub fn new(key: &impl Key) -> Self {
        Self::from_data(key.data())
    }

    /// A key given as bytes.
    pub fn from_data(key: Data) -> Self {
        Self { key, key_end: None, value: ElementValue::None, timeout: None, comment: None }
    }

    /// A range of keys, both ends included.
    pub fn range<K: Key>(first: &K, last: &K) -> Self {
        let mut element = Self::new(first);
        element.key_end = Some(Box::new(last.data()));
        element
    }

    /// All addresses of a prefix.
    pub fn prefix(address: IpAddr, length: u8) -> Self {
        let (first, last) = prefix_bounds(address, length);
        let mut element = Self::from_data(first);
        element.key_end = Some(Box::new(last));
        element
    }

    /// With a map's value.
    pub fn value(mut self, value: &impl Key) -> Self {
        self.value = ElementValue::Data(value.data());
        self
    }

    /// With a verdict map's verdict.
    pub fn verdict(mut self, verdict: Verdict) -> Self {
        self.value = ElementValue::Verdict(verdict);
        self
    }

    /// With a timeout. The kernel rounds to its clock tick; whole seconds come back as they were.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// With a comment.
    pub fn comment(mut self, comment: &str) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// The last key of its range, which for a single key is the key.
    pub fn last_key(&self) -> &Data {
        self.key_end.as_deref().unwrap_or(&self.key)
    }
}
