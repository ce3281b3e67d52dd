//! Why a side lets a packet pass, or does not.

use std::fmt;

use crate::model::{Name, PolicyName};

/// Why a side decided as it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// A rule decided.
    Rule(RuleRef),
    /// These policies isolate the pod in this direction, and no rule of theirs allows it.
    Isolated(Vec<PolicyName>),
    /// No policy selects the pod in this direction (rule 6).
    NotSelected,
    /// Policies select it, no rule matched, and none isolates.
    NothingDecided,
    /// A pod that reaches itself through a Service: policies of its namespace do not stop it (rule 28).
    Itself,
    /// From the node that the pod runs on (rule 25).
    OwnNode,
    /// It is a node, or a pod in a node's network namespace: no policy selects it (rule 27).
    Node,
    /// It is not a pod of this Network, and policies select pods only.
    NotAPod,
    /// A later packet of a connection that was let pass, or an error about it (rule 22).
    Connection,
    /// Neighbour discovery always passes (rule 24).
    NeighbourDiscovery,
    /// A cluster service of which no endpoint is known (rule 38).
    NoEndpoints,
}

/// One rule of one policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRef {
    /// The policy.
    pub policy: PolicyName,
    /// The rule's place in the list of its direction, from 0.
    pub index: usize,
    /// Its own name, if it has one.
    pub name: Option<Name>,
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rule {}", self.policy, self.index)?;
        match &self.name {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => rule.fmt(f),
            Self::Isolated(policies) => {
                let names: Vec<String> = policies.iter().map(ToString::to_string).collect();
                write!(f, "isolated by {}, and no rule allows this", names.join(", "))
            }
            Self::NotSelected => f.write_str("no policy selects the pod in this direction"),
            Self::NothingDecided => f.write_str("no rule matches, and no policy isolates the pod"),
            Self::Itself => f.write_str("a pod may reach itself through a Service (rule 28)"),
            Self::OwnNode => f.write_str("the pod's own node may always reach it (rule 25)"),
            Self::Node => f.write_str("a node, which no policy selects (rule 27)"),
            Self::NotAPod => f.write_str("not a pod of this Network, so no policy selects it"),
            Self::Connection => f.write_str("part of an allowed connection (rule 22)"),
            Self::NeighbourDiscovery => f.write_str("neighbor discovery always passes (rule 24)"),
            Self::NoEndpoints => f.write_str("a cluster service of which no endpoint is known (rule 38)"),
        }
    }
}
