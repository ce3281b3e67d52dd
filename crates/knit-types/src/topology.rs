//! How pods of one Network reach each other.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A kind of Network is one entry here: its name in the API, its number in the KNI protocol (forever), and
/// what everybody but its driver must know of it. `cargo xtask generate` writes the CRD and the protocol from
/// it.
macro_rules! topologies {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident = $number:literal { $($field:ident: $value:expr),+ $(,)? }
    )+) => {
        /// How pods of one Network reach each other.
        #[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
        pub enum Topology {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Topology {
            /// All of them.
            pub const ALL: [Self; [$(stringify!($name)),+].len()] = [$(Self::$name),+];

            /// The name in the API, which is also that of the feature of runtimes that have it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// The number in the KNI protocol.
            #[must_use]
            pub const fn number(self) -> i32 {
                match self {
                    $(Self::$name => $number,)+
                }
            }

            /// What it is, in a sentence.
            #[must_use]
            pub const fn description(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($doc),+),)+
                }
            }

            const fn properties(self) -> Properties {
                match self {
                    $(Self::$name => Properties { $($field: $value),+ },)+
                }
            }
        }
    };
}

/// What everybody must know of a topology; [`Topology`] has a method for each.
struct Properties {
    router: bool,
    subnet_on_link: bool,
    host_link: bool,
    conformance: &'static str,
}

topologies! {
    /// Each pod is a routed host; nothing is switched, nothing is flooded.
    Layer3 = 1 { router: true, subnet_on_link: false, host_link: false, conformance: "RoutedPods" }
    /// All pods are on one switched segment, as virtual machines expect it.
    Layer2 = 2 { router: true, subnet_on_link: true, host_link: false, conformance: "SwitchedPods" }
    /// Pods are on a link of their node, beside whatever else is on its segment. Needs Network.underlay.
    Underlay = 3 { router: false, subnet_on_link: true, host_link: true, conformance: "UnderlayPods" }
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
    /// The one with a number in the KNI protocol.
    #[must_use]
    pub fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|topology| topology.number() == number)
    }

    /// Whether each node has a router for the Network, with an address of its own in it. Where there is none,
    /// there is nothing that serves Services, keeps policies or leads outside.
    #[must_use]
    pub const fn has_router(self) -> bool {
        self.properties().router
    }

    /// Whether pods have the Network's subnet on their link, and not their gateway alone.
    #[must_use]
    pub const fn has_subnet_on_link(self) -> bool {
        self.properties().subnet_on_link
    }

    /// Whether it is on a link of each node that the Network names, on a segment with hosts and addresses
    /// that are not Knit's.
    #[must_use]
    pub const fn is_on_host_link(self) -> bool {
        self.properties().host_link
    }

    /// Whether Knit switches frames between pods: a router with a bridge.
    #[must_use]
    pub const fn is_switched(self) -> bool {
        self.has_router() && self.has_subnet_on_link()
    }

    /// The conformance suite's case that every runtime with this topology must pass: two pods reach each
    /// other. Its name in reports, forever.
    #[must_use]
    pub const fn conformance_case(self) -> &'static str {
        self.properties().conformance
    }
}

#[expect(
    clippy::derivable_impls,
    reason = "a macro writes the enum, and only one of its entries is the default"
)]
impl Default for Topology {
    fn default() -> Self {
        Self::Layer3
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

    #[test]
    fn names_and_numbers_are_forever() {
        let all = Topology::ALL.map(|topology| (topology.as_str(), topology.number()));
        assert!(all.starts_with(&[("Layer3", 1), ("Layer2", 2), ("Underlay", 3)]), "{all:?}");
        let numbers: std::collections::BTreeSet<i32> = all.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers.len(), all.len(), "two topologies have one number");
        for topology in Topology::ALL {
            assert_eq!(Topology::of_number(topology.number()), Some(topology));
        }
        assert_eq!(Topology::of_number(0), None, "0 is what a message has that does not say");
    }
}
