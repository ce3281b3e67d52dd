//! macvlan links: children of another link, each with a MAC of its own, made directly in the namespace where
//! they belong.

use std::fmt;

use netlink_packet_route::link::{InfoData, InfoMacVlan, MacVlanMode};

use crate::error::Difference;
use crate::netlink::attr::Reader;
use crate::netns::NetNs;

const IFLA_MACVLAN_MODE: u16 = 1;

/// A child of another link.
///
/// One in another namespace than its parent is not told its alias, address generation mode or state by who
/// makes it: these are set from inside that namespace.
#[derive(Debug, Clone)]
pub struct Macvlan<'a> {
    /// The parent's index, in the namespace of the handle that makes the child.
    pub parent: u32,
    /// How it and its siblings reach each other.
    pub mode: MacvlanMode,
    /// Where it is to be; `None` is the parent's namespace.
    pub namespace: Option<&'a NetNs>,
}

/// How the children of one link reach each other. All of them reach what is on the wire, and none of them the
/// host whose link their parent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MacvlanMode {
    /// Directly.
    Bridge,
    /// Not at all.
    Private,
    /// By a switch on the wire that sends frames back to where they came from.
    Vepa,
    /// There is one child only, and it has the parent to itself.
    Passthru,
}

impl Macvlan<'_> {
    pub(super) fn data(&self) -> InfoData {
        InfoData::MacVlan(vec![InfoMacVlan::Mode(match self.mode {
            MacvlanMode::Bridge => MacVlanMode::Bridge,
            MacvlanMode::Private => MacVlanMode::Private,
            MacvlanMode::Vepa => MacVlanMode::Vepa,
            MacvlanMode::Passthru => MacVlanMode::Passthrough,
        })])
    }

    pub(super) fn compare(&self, found: MacvlanMode, into: &mut Vec<Difference>) {
        Difference::check(into, "mode", &self.mode, &found);
    }
}

impl MacvlanMode {
    /// Reads the mode out of a link's own attributes; `None` for one that is not known here.
    pub(super) fn parse(data: Reader<'_>) -> Option<Self> {
        match data.get(IFLA_MACVLAN_MODE)?.u32().ok()? {
            1 => Some(Self::Private),
            2 => Some(Self::Vepa),
            4 => Some(Self::Bridge),
            8 => Some(Self::Passthru),
            _ => None,
        }
    }
}

impl fmt::Display for MacvlanMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::Private => "private",
            Self::Vepa => "vepa",
            Self::Passthru => "passthru",
        })
    }
}
