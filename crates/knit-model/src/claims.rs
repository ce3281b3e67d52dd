//! Which Network is a namespace's primary one: the rule of `primaryFor`.

use std::sync::Arc;

use knit_types::NetworkName;
use kube::core::SelectorExt;

use crate::selector::{NamespaceSelector, SelectorError};
use crate::{Labels, Network};

/// What all Networks say in `primaryFor`.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    /// The oldest first.
    readable: Vec<Arc<Network>>,
    /// By name.
    unreadable: Vec<Arc<Network>>,
}

/// Who has a namespace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim<'a> {
    /// No Network selects it: it has the default one.
    Nobody,
    /// The oldest Network that selects it.
    Of(&'a NetworkName),
    /// A Network whose selector cannot be read may have meant it.
    Unknown {
        /// That Network.
        network: &'a NetworkName,
        /// What is wrong with its selector.
        problem: &'a SelectorError,
    },
}

// === impl Claims ===

impl Claims {
    /// What these Networks claim.
    #[must_use]
    pub fn of<'a>(networks: impl IntoIterator<Item = &'a Arc<Network>>) -> Self {
        let claiming = networks.into_iter().filter(|network| network.primary_for().is_some()).cloned();
        let (mut readable, mut unreadable): (Vec<_>, Vec<_>) =
            claiming.partition(|n| matches!(n.primary_for(), Some(NamespaceSelector::Readable(_))));
        readable.sort_by(|a, b| a.age().cmp(&b.age()));
        unreadable.sort_by(|a, b| a.name().cmp(b.name()));
        Self { readable, unreadable }
    }

    /// The Networks that select a namespace, the oldest first: it has the namespace, so that what worked goes
    /// on working when somebody adds a Network.
    pub fn selecting<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = &'a NetworkName> {
        let selects = |network: &&Arc<Network>| {
            network.primary_for().is_some_and(|selector| selector.selects(labels) == Ok(true))
        };
        self.readable.iter().filter(selects).map(|network| network.name())
    }

    /// Who has a namespace with these labels.
    ///
    /// A selector that cannot be read takes nothing from a Network whose selector can be. Nobody gets the
    /// default Network in place of one that was probably meant: where all that can be read of a selector
    /// matches, the rest may have meant the namespace. One of which nothing can be read holds namespaces up
    /// only until the controller has refused its Network.
    #[must_use]
    pub fn of_namespace<'a>(&'a self, labels: &'a Labels) -> Claim<'a> {
        if let Some(network) = self.selecting(labels).next() {
            return Claim::Of(network);
        }
        for network in &self.unreadable {
            let Some(NamespaceSelector::Unreadable { error, rest }) = network.primary_for() else { continue };
            let may_mean = match rest {
                Some(rest) => rest.matches(labels),
                None => network.refusal().is_none(),
            };
            if may_mean {
                return Claim::Unknown { network: network.name(), problem: error };
            }
        }
        Claim::Nobody
    }

    /// Networks whose selector cannot be read, and what is wrong with it.
    pub fn unreadable(&self) -> impl Iterator<Item = (&NetworkName, &SelectorError)> {
        self.unreadable.iter().filter_map(|network| match network.primary_for() {
            Some(NamespaceSelector::Unreadable { error, .. }) => Some((network.name(), error)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn network(name: &str, primary_for: &Value, created: &str, refused: bool) -> Arc<Network> {
        let condition = json!({"type": "Accepted", "status": "False", "reason": "Invalid", "message": "wrong",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let network = json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"topology": "Layer3", "primaryFor": primary_for},
            "status": {"conditions": if refused { vec![condition] } else { Vec::new() }},
        });
        let network: knit_api::Network = serde_json::from_value(network).expect("a Network");
        Arc::new(network.try_into().expect("a name"))
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_second_network_that_selects_a_namespace_does_not_take_it_from_the_first() {
        let red = json!({"matchLabels": {"team": "red"}});
        let found = Claims::of(&[
            network("a-later", &red, "2026-03-01T00:00:00Z", false),
            network("red", &red, "2026-02-01T00:00:00Z", false),
        ]);
        assert_eq!(found.of_namespace(&labels(&[("team", "red")])), Claim::Of(&"red".into()));
        assert_eq!(found.of_namespace(&labels(&[])), Claim::Nobody);
    }

    #[test]
    fn one_selector_that_cannot_be_read_does_not_stop_every_namespace() {
        let red = network("red", &json!({"matchLabels": {"team": "red"}}), "2026-02-01T00:00:00Z", false);
        let expression = |key: &str, operator: &str, values: Value| {
            let expression = json!({"key": key, "operator": operator, "values": values});
            json!({"matchExpressions": [expression]})
        };
        for wrong in [
            expression("team", "Equals", json!(["blue"])),
            expression("team", "In", Value::Null),
            expression("team", "NotIn", json!([])),
            expression("team", "Exists", json!(["blue"])),
        ] {
            let old = |refused| network("wrong", &wrong, "2026-01-01T00:00:00Z", refused);
            // Whom the others select is theirs, refused or not.
            let before = Claims::of(&[Arc::clone(&red), old(false)]);
            assert_eq!(before.of_namespace(&labels(&[("team", "red")])), Claim::Of(&"red".into()), "{wrong}");
            // Who else it means is not known before the controller has spoken.
            let nobody = labels(&[]);
            let unknown = before.of_namespace(&nobody);
            assert!(
                matches!(unknown, Claim::Unknown { network, .. } if network == "wrong"),
                "{wrong}: {unknown:?}"
            );
            let refused = Claims::of(&[Arc::clone(&red), old(true)]);
            assert_eq!(
                refused.of_namespace(&labels(&[("team", "red")])),
                Claim::Of(&"red".into()),
                "{wrong}"
            );
            assert_eq!(refused.of_namespace(&labels(&[])), Claim::Nobody, "{wrong}");
        }
    }

    #[test]
    fn whom_a_wrong_selector_probably_meant_does_not_get_the_default_network() {
        let half = json!({"matchLabels": {"team": "blue"},
            "matchExpressions": [{"key": "tier", "operator": "Equals", "values": ["front"]}]});
        let found = Claims::of(&[network("blue", &half, "2026-01-01T00:00:00Z", true)]);
        let blues = labels(&[("team", "blue")]);
        assert!(matches!(found.of_namespace(&blues), Claim::Unknown { network, .. } if network == "blue"));
        assert_eq!(found.of_namespace(&labels(&[("team", "red")])), Claim::Nobody);
        assert_eq!(found.unreadable().map(|(name, _)| name).collect::<Vec<_>>(), ["blue"]);
    }

    proptest! {
        #[test]
        fn the_oldest_of_those_that_select_a_namespace_has_it_in_whatever_order_they_come(
            made in prop::collection::vec((0_u8..3, 1_u8..9, any::<bool>()), 0..6),
            team in 0_u8..3,
            turn in 0_usize..6,
        ) {
            let all: Vec<Arc<Network>> = made.iter().enumerate().map(|(i, (team, month, refused))| {
                let selector = json!({"matchLabels": {"team": team.to_string()}});
                network(&format!("n{i}"), &selector, &format!("2026-0{month}-01T00:00:00Z"), *refused)
            }).collect();
            let selecting = made.iter().enumerate().filter(|(_, (of, _, _))| *of == team);
            let oldest = selecting.min_by_key(|(i, (_, month, _))| (*month, *i));
            let oldest = oldest.map(|(i, _)| NetworkName::new(format!("n{i}")).expect("a name"));
            let mut turned = all.clone();
            turned.rotate_left(turn.min(all.len()));
            let (team, claims) = (labels(&[("team", &team.to_string())]), Claims::of(&turned));
            let expected = oldest.as_ref().map_or(Claim::Nobody, Claim::Of);
            prop_assert_eq!(claims.of_namespace(&team), expected);
            prop_assert_eq!(claims.selecting(&team).next(), oldest.as_ref());
        }
    }
}
