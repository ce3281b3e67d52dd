//! How pods of one Network reach each other.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How pods of one Network reach each other.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum Topology {
    /// Each pod is a routed host; nothing is switched, nothing is flooded.
    #[default]
    Layer3,
    /// All pods are on one switched segment, as virtual machines expect it.
    Layer2,
    /// Pods are on a segment of the nodes' own, beside whatever else is there.
    Underlay,
}

/// How pods of one node reach each other on a link of the node. All of them reach what is on the wire.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum UnderlayMode {
    /// Directly.
    #[default]
    Bridge,
    /// Not at all.
    Private,
    /// By a switch on the wire that sends frames back to where they came from.
    Vepa,
}

/// What an interface on a link of its node is.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum UnderlayKind {
    /// A macvlan child of the link.
    #[default]
    Macvlan,
    /// A port of the link, which is a bridge.
    Bridge,
}

/// A text that is not one of the topologies.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{text:?} is not a topology: write {}", Topology::ALL.map(Topology::as_str).join(" or "))]
pub struct ParseTopologyError {
    text: String,
}

impl Topology {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Layer3, Self::Layer2, Self::Underlay];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Layer3 => "Layer3",
            Self::Layer2 => "Layer2",
            Self::Underlay => "Underlay",
        }
    }

    /// Whether each node has a router for the Network, with an address of its own in it. Where there is none,
    /// there is nothing that serves Services, keeps policies or leads outside.
    #[must_use]
    pub const fn has_router(self) -> bool {
        match self {
            Self::Layer3 | Self::Layer2 => true,
            Self::Underlay => false,
        }
    }

    /// Whether pods have the Network's subnet on their link, and not their gateway alone.
    #[must_use]
    pub const fn has_subnet_on_link(self) -> bool {
        match self {
            Self::Layer3 => false,
            Self::Layer2 | Self::Underlay => true,
        }
    }
}

impl UnderlayMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bridge, Self::Private, Self::Vepa];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bridge => "Bridge",
            Self::Private => "Private",
            Self::Vepa => "Vepa",
        }
    }
}

impl UnderlayKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Macvlan, Self::Bridge];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Macvlan => "Macvlan",
            Self::Bridge => "Bridge",
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Topology {
    type Err = ParseTopologyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|topology| topology.as_str() == text);
        found.ok_or_else(|| ParseTopologyError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies_are_written_as_they_print() {
        for topology in Topology::ALL {
            assert_eq!(topology.to_string().parse(), Ok(topology));
            assert_eq!(serde_json::to_string(&topology).expect("JSON"), format!("\"{topology}\""));
        }
        "layer3".parse::<Topology>().expect_err("names are exact");
    }
}
