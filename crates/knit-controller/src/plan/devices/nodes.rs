//! The nodes that a Network is for, in the words of those that select nodes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use knit_model::{Network, selector};

/// The nodes that a Network is for, as far as one term can say it; none where that cannot be read: the API
/// server would refuse it with all that are in its slice.
pub(super) fn nodes_of(network: &Network) -> Option<Vec<NodeSelectorRequirement>> {
    let spec = &network.object().spec;
    let parents = spec.underlay.as_ref().map(|underlay| &underlay.parents[..]).unwrap_or_default();
    let of_parents = || parents.iter().filter_map(|parent| parent.node_selector.as_ref());
    let mut all = spec.node_selector.iter().chain(of_parents());
    if !all.all(|selector| selector::read_for_nodes(selector).is_ok()) {
        return None;
    }
    let own = spec.node_selector.as_ref().map(node_selector).unwrap_or_default();
    let on_parents = match parents {
        [parent] => parent.node_selector.as_ref().map(node_selector).unwrap_or_default(),
        // A node may be any one's, and a term has no "or" but among the values of a label.
        _ if of_parents().count() == parents.len() => {
            one_label(&of_parents().map(node_selector).collect::<Vec<_>>()).into_iter().collect()
        }
        _ => Vec::new(),
    };
    Some(own.into_iter().chain(on_parents).collect())
}

/// What several selectors say together that each want some values of the same label.
fn one_label(selectors: &[Vec<NodeSelectorRequirement>]) -> Option<NodeSelectorRequirement> {
    let (key, mut values) = (&selectors.first()?.first()?.key, BTreeSet::new());
    for selector in selectors {
        let [only] = &selector[..] else { return None };
        if only.key != *key || only.operator != "In" {
            return None;
        }
        values.extend(only.values.iter().flatten().cloned());
    }
    let values = Some(values.into_iter().collect());
    Some(NodeSelectorRequirement { key: key.clone(), operator: "In".to_owned(), values })
}

/// A selector of labels in the words of those that select nodes.
fn node_selector(selector: &LabelSelector) -> Vec<NodeSelectorRequirement> {
    let labels = selector.match_labels.iter().flatten().map(|(key, value)| NodeSelectorRequirement {
        key: key.clone(),
        operator: "In".to_owned(),
        values: Some(vec![value.clone()]),
    });
    let expressions = selector.match_expressions.iter().flatten().map(|e| NodeSelectorRequirement {
        key: e.key.clone(),
        operator: e.operator.clone(),
        values: e.values.clone(),
    });
    labels.chain(expressions).collect()
}

pub(super) fn one_term(requirements: Vec<NodeSelectorRequirement>) -> NodeSelector {
    let term = NodeSelectorTerm { match_expressions: Some(requirements), match_fields: None };
    NodeSelector { node_selector_terms: vec![term] }
}
