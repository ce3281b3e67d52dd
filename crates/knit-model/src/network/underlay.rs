//! Networks on links of the nodes: which link a node has for one.

use std::time::Duration;

use knit_api::{NetworkSpec, UnderlayKind, UnderlayMode};
use knit_types::{Family, Topology};

use super::Network;
use crate::Labels;
use crate::selector::{self, SelectorError};
use kube::core::{Selector, SelectorExt as _};

/// How long a node asks whether somebody else has an address, where the Network does not say.
const DUPLICATE_CHECK: Duration = Duration::from_millis(200);

/// A link of some nodes.
#[derive(Clone, Debug)]
pub(super) struct Parent {
    name: String,
    /// Which nodes; all of them without one.
    nodes: Option<Result<Selector, SelectorError>>,
}

/// Why a Network is on no link of a node.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UnderlayError {
    /// No entry is for the node.
    #[error(
        "no entry of spec.underlay.parents matches this node's labels: add one, or keep pods of the Network \
         off this node"
    )]
    NoParent,
    /// An entry that cannot be read, and may be for the node or not.
    #[error("spec.underlay.parents[{index}].nodeSelector")]
    Selector {
        /// Which entry.
        index: usize,
        /// What is wrong with it.
        source: SelectorError,
    },
    /// It names no links at all.
    #[error("topology Underlay needs spec.underlay.parents: name the nodes' links")]
    NoParents,
    /// Pods would have no Services and no policy.
    #[error(
        "topology {topology} has no Services and no NetworkPolicy, and cannot be a primary Network: remove \
         primaryFor, or give it topology Layer3 or Layer2"
    )]
    Primary {
        /// What it is.
        topology: Topology,
    },
}

pub(super) fn parents(spec: &NetworkSpec) -> Vec<Parent> {
    let parents = spec.underlay.iter().flat_map(|underlay| &underlay.parents);
    let parent = |parent: &knit_api::UnderlayParent| Parent {
        name: parent.name.clone(),
        nodes: parent.node_selector.as_ref().map(selector::read),
    };
    parents.map(parent).collect()
}

impl Network {
    /// The link that it is on on a node with these labels: the first whose selector matches.
    ///
    /// # Errors
    /// When it is on none, or that cannot be told.
    pub fn parent_on(&self, labels: &Labels) -> Result<&str, UnderlayError> {
        for (index, parent) in self.parents.iter().enumerate() {
            let matches = match &parent.nodes {
                None => true,
                Some(Ok(selector)) => selector.matches(labels),
                // The next one may be the wrong link.
                Some(Err(error)) => return Err(UnderlayError::Selector { index, source: error.clone() }),
            };
            if matches {
                return Ok(&parent.name);
            }
        }
        Err(UnderlayError::NoParent)
    }

    /// How pods of one node reach each other on that link.
    #[must_use]
    pub fn underlay_mode(&self) -> UnderlayMode {
        self.object.spec.underlay.as_ref().map(|underlay| underlay.mode).unwrap_or_default()
    }

    /// What a pod's interface on that link is.
    #[must_use]
    pub fn underlay_kind(&self) -> UnderlayKind {
        self.object.spec.underlay.as_ref().map(|underlay| underlay.kind).unwrap_or_default()
    }

    /// How long a node asks whether somebody else has a pod's addresses.
    #[must_use]
    pub fn duplicate_check(&self) -> Duration {
        let wanted = self.object.spec.underlay.as_ref().and_then(|u| u.duplicate_check_milliseconds);
        wanted.map_or(DUPLICATE_CHECK, |milliseconds| Duration::from_millis(milliseconds.into()))
    }

    /// Whether pods have a gateway of this family: a router of ours, or one of the segment that it names.
    #[must_use]
    pub fn has_gateway(&self, family: Family) -> bool {
        let named = self.object.spec.subnets.iter().filter(|subnet| subnet.gateway.is_some());
        let mut named = named.filter_map(|subnet| subnet.cidr.parse::<ipnet::IpNet>().ok());
        self.topology().has_router() || named.any(|range| Family::of(range.addr()) == family)
    }

    /// What speaks against a Network on links of nodes, whichever node it is.
    ///
    /// # Errors
    /// When something does: what the API server let pass, or could not know.
    pub fn check_underlay(&self) -> Result<(), UnderlayError> {
        if !self.topology().has_router() && self.is_primary() {
            return Err(UnderlayError::Primary { topology: self.topology() });
        }
        if !self.topology().is_on_host_link() {
            return Ok(());
        }
        if self.parents.is_empty() {
            return Err(UnderlayError::NoParents);
        }
        for (index, parent) in self.parents.iter().enumerate() {
            if let Some(Err(error)) = &parent.nodes {
                return Err(UnderlayError::Selector { index, source: error.clone() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn office(change: impl FnOnce(&mut Value)) -> Network {
        let mut spec = json!({
            "topology": "Underlay",
            "underlay": { "parents": [
                { "name": "bond0.20", "nodeSelector": { "matchLabels": { "rack": "left" } } },
                { "name": "eth1", "nodeSelector": { "matchExpressions": [
                    { "key": "rack", "operator": "In", "values": ["right", "middle"] },
                ] } },
            ] },
            "subnets": [{ "cidr": "192.168.20.0/24", "reserved": ["192.168.20.0/27"] }],
        });
        change(&mut spec);
        let spec = serde_json::from_value(spec).expect("a spec");
        knit_api::Network::new("office", spec).try_into().expect("a name")
    }

    #[test]
    fn a_node_takes_the_first_parent_that_its_labels_match() {
        let labels = |rack: &str| [("rack".to_owned(), rack.to_owned())].into();
        let network = office(|_| {});
        assert_eq!(network.parent_on(&labels("left")), Ok("bond0.20"));
        assert_eq!(network.parent_on(&labels("middle")), Ok("eth1"));
        assert_eq!(network.parent_on(&labels("cellar")), Err(UnderlayError::NoParent));
        let any = |spec: &mut Value| spec["underlay"]["parents"][1] = json!({ "name": "eth9" });
        assert_eq!(office(any).parent_on(&labels("cellar")), Ok("eth9"));
        // One that cannot be read is not passed over.
        let wrong = office(|spec| {
            spec["underlay"]["parents"][0]["nodeSelector"] =
                json!({ "matchExpressions": [{ "key": "rack", "operator": "Near" }] });
        });
        for problem in [
            wrong.parent_on(&labels("right")).expect_err("it cannot be read"),
            wrong.check_underlay().expect_err("it cannot be read"),
        ] {
            assert!(matches!(problem, UnderlayError::Selector { index: 0, .. }), "{problem}");
        }
    }

    #[test]
    fn duplicates_are_looked_for_unless_the_operator_says_otherwise() {
        assert_eq!(office(|_| {}).duplicate_check(), Duration::from_millis(200));
        let said = |milliseconds: u64| {
            office(|spec| spec["underlay"]["duplicateCheckMilliseconds"] = json!(milliseconds))
        };
        assert_eq!(said(0).duplicate_check(), Duration::ZERO);
        assert_eq!(said(2000).duplicate_check(), Duration::from_secs(2));
    }

    #[test]
    fn a_gateway_is_there_where_the_operator_names_one() {
        assert!(!office(|_| {}).has_gateway(Family::V4));
        let named = office(|spec| spec["subnets"][0]["gateway"] = json!("192.168.20.1"));
        assert_eq!((named.has_gateway(Family::V4), named.has_gateway(Family::V6)), (true, false));
    }

    #[test]
    fn no_pod_gets_what_is_reserved_on_a_segment_of_others_and_no_router_has_an_address() {
        let network = office(|_| {});
        let pool = network.pool().expect("a pool").expect("a pool");
        let standing = pool.standing("192.168.20.9".parse().expect("an address"));
        assert_eq!(standing, knit_ipam::Standing::Never(knit_ipam::NotLeasable::OtherHost));
        assert!(!pool.has_router());
    }
}
