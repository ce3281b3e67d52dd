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
}

/// A text that is not one of the topologies.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{text:?} is not a topology: write {}", Topology::ALL.map(Topology::as_str).join(" or "))]
pub struct ParseTopologyError {
    text: String,
}

impl Topology {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Layer3, Self::Layer2];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Layer3 => "Layer3",
            Self::Layer2 => "Layer2",
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
