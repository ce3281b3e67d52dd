//! Which Network is a namespace's primary one: the rule of `primaryFor`, written once, so that the controller and the nodes cannot
//! differ in it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::core::{Selector, SelectorExt};

use crate::{Network, conditions};

/// What all Networks say in `primaryFor`, read once.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    /// The oldest first.
    readable: Vec<(String, Selector)>,
    unreadable: BTreeMap<String, Unreadable>,
}

/// A selector that cannot be read.
#[derive(Clone, Debug)]
struct Unreadable {
    problem: String,
    /// What of it can be; none if that is nothing.
    rest: Option<Selector>,
    /// The controller has refused its Network.
    refused: bool,
}

/// Who has a namespace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim<'a> {
    /// No Network selects it: it has the default one.
    Nobody,
    /// The oldest Network that selects it.
    Of(&'a str),
    /// A Network whose selector cannot be read may have meant it.
    Unknown {
        /// That Network.
        network: &'a str,
        /// What is wrong with its selector.
        problem: &'a str,
    },
}

// === impl Claims ===

impl Claims {
    /// Reads the selectors of all Networks.
    #[must_use]
    pub fn of<'a>(networks: impl IntoIterator<Item = (&'a str, &'a Network)>) -> Self {
        let (mut readable, mut unreadable) = (Vec::new(), BTreeMap::new());
        for (name, network) in networks {
            let Some(selector) = &network.spec.primary_for else { continue };
            match read(selector) {
                Ok(selector) => {
                    let age = (network.metadata.creation_timestamp.clone(), name.to_owned());
                    readable.push((age, selector));
                }
                Err(problem) => {
                    let rest = readable_part(selector);
                    unreadable
                        .insert(name.to_owned(), Unreadable { problem, rest, refused: is_refused(network) });
                }
            }
        }
        readable.sort_by(|(age, _), (other, _)| age.cmp(other));
        let readable = readable.into_iter().map(|((_, name), selector)| (name, selector)).collect();
        Self { readable, unreadable }
    }

    /// The Networks that select a namespace, the oldest first: it has the namespace, so that what worked goes on working when
    /// somebody adds a Network.
    pub fn selecting<'a>(&'a self, labels: &'a BTreeMap<String, String>) -> impl Iterator<Item = &'a str> {
        let selecting = self.readable.iter().filter(|(_, selector)| selector.matches(labels));
        selecting.map(|(name, _)| name.as_str())
    }

    /// Who has a namespace with these labels.
    ///
    /// A selector that cannot be read takes nothing from a Network whose selector can be. Nobody gets the default Network
    /// in place of one that was probably meant: where all that can be read of a selector matches, the rest may have meant
    /// the namespace. One of which nothing can be read holds namespaces up only until the controller has refused its Network.
    #[must_use]
    pub fn of_namespace(&self, labels: &BTreeMap<String, String>) -> Claim<'_> {
        if let Some((network, _)) = self.readable.iter().find(|(_, selector)| selector.matches(labels)) {
            return Claim::Of(network);
        }
        let may_mean = |unreadable: &Unreadable| match &unreadable.rest {
            Some(rest) => rest.matches(labels),
            None => !unreadable.refused,
        };
        match self.unreadable.iter().find(|(_, unreadable)| may_mean(unreadable)) {
            Some((network, unreadable)) => Claim::Unknown { network, problem: &unreadable.problem },
            None => Claim::Nobody,
        }
    }

    /// Networks whose selector cannot be read, and what is wrong with it.
    pub fn unreadable(&self) -> impl Iterator<Item = (&str, &str)> {
        self.unreadable.iter().map(|(name, unreadable)| (name.as_str(), unreadable.problem.as_str()))
    }
}

/// Reads a selector by the rules of Kubernetes.
///
/// # Errors
/// When it cannot be read: in words, with what to write.
pub fn read(selector: &LabelSelector) -> Result<Selector, String> {
    selector.match_expressions.iter().flatten().try_for_each(check)?;
    Selector::try_from(selector.clone()).map_err(|error| error.to_string())
}

fn check(requirement: &LabelSelectorRequirement) -> Result<(), String> {
    let (key, operator) = (&requirement.key, requirement.operator.as_str());
    let values = requirement.values.as_ref().is_some_and(|values| !values.is_empty());
    match (operator, values) {
        ("In" | "NotIn", true) | ("Exists" | "DoesNotExist", false) => Ok(()),
        ("In" | "NotIn", false) => {
            Err(format!("the operator {operator} of {key:?} needs values: write some"))
        }
        ("Exists" | "DoesNotExist", true) => {
            Err(format!("the operator {operator} of {key:?} takes no values: leave them out"))
        }
        _ => Err(format!(
            "{operator:?} of {key:?} is not an operator: write In, NotIn, Exists or DoesNotExist"
        )),
    }
}

fn readable_part(selector: &LabelSelector) -> Option<Selector> {
    let expressions = selector.match_expressions.iter().flatten();
    let good: Vec<_> = expressions.filter(|requirement| check(requirement).is_ok()).cloned().collect();
    let labels = selector.match_labels.clone().filter(|labels| !labels.is_empty());
    if good.is_empty() && labels.is_none() {
        return None;
    }
    Selector::try_from(LabelSelector { match_expressions: Some(good), match_labels: labels }).ok()
}

fn is_refused(network: &Network) -> bool {
    let conditions = network.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|c| c.type_ == conditions::network::ACCEPTED && c.status == "False")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn network(name: &str, primary_for: &Value, created: &str, refused: bool) -> (String, Network) {
        let condition = json!({"type": "Accepted", "status": "False", "reason": "Invalid", "message": "wrong",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let network = json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"topology": "Layer3", "primaryFor": primary_for},
            "status": {"conditions": if refused { vec![condition] } else { Vec::new() }},
        });
        (name.to_owned(), serde_json::from_value(network).expect("a Network"))
    }

    fn claims(networks: &[(String, Network)]) -> Claims {
        Claims::of(networks.iter().map(|(name, network)| (name.as_str(), network)))
    }

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_second_network_that_selects_a_namespace_does_not_take_it_from_the_first() {
        let red = json!({"matchLabels": {"team": "red"}});
        let found = claims(&[
            network("a-later", &red, "2026-03-01T00:00:00Z", false),
            network("red", &red, "2026-02-01T00:00:00Z", false),
        ]);
        assert_eq!(found.of_namespace(&labels(&[("team", "red")])), Claim::Of("red"));
        assert_eq!(found.of_namespace(&labels(&[])), Claim::Nobody);
    }

    #[test]
    fn one_selector_that_cannot_be_read_does_not_stop_every_namespace() {
        let red = network("red", &json!({"matchLabels": {"team": "red"}}), "2026-02-01T00:00:00Z", false);
        let expression = |key: &str, operator: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for wrong in [
            expression("team", "Equals", json!(["blue"])),
            expression("team", "In", Value::Null),
            expression("team", "NotIn", json!([])),
            expression("team", "Exists", json!(["blue"])),
        ] {
            let old = |refused| network("wrong", &wrong, "2026-01-01T00:00:00Z", refused);
            // Whom the others select is theirs, refused or not.
            let before = claims(&[red.clone(), old(false)]);
            assert_eq!(before.of_namespace(&labels(&[("team", "red")])), Claim::Of("red"), "{wrong}");
            // Who else it means is not known before the controller has spoken.
            let unknown = before.of_namespace(&labels(&[]));
            assert!(matches!(unknown, Claim::Unknown { network: "wrong", .. }), "{wrong}: {unknown:?}");
            let refused = claims(&[red.clone(), old(true)]);
            assert_eq!(refused.of_namespace(&labels(&[("team", "red")])), Claim::Of("red"), "{wrong}");
            assert_eq!(refused.of_namespace(&labels(&[])), Claim::Nobody, "{wrong}");
        }
    }

    #[test]
    fn whom_a_wrong_selector_probably_meant_does_not_get_the_default_network() {
        let half = json!({"matchLabels": {"team": "blue"},
            "matchExpressions": [{"key": "tier", "operator": "Equals", "values": ["front"]}]});
        let found = claims(&[network("blue", &half, "2026-01-01T00:00:00Z", true)]);
        let blues = labels(&[("team", "blue")]);
        assert!(matches!(found.of_namespace(&blues), Claim::Unknown { network: "blue", .. }));
        assert_eq!(found.of_namespace(&labels(&[("team", "red")])), Claim::Nobody);
        assert_eq!(found.unreadable().map(|(name, _)| name).collect::<Vec<_>>(), ["blue"]);
    }
}
