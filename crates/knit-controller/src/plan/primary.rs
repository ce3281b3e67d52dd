//! Which Network is a namespace's primary: the oldest of those that select it.

use std::collections::BTreeMap;
use std::sync::Arc;

use knit_api::Network;
use knit_api::names::DEFAULT_NETWORK;
use kube::core::{Selector, SelectorExt};

use crate::cluster::NamespaceView;

/// Who has a namespace, and who wanted it too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Primaries {
    /// The primary Network of each namespace; one that is not in it has the default Network.
    pub of_namespace: BTreeMap<String, String>,
    /// For each Network that did not get a namespace: the first such namespace, and who has it.
    pub conflicts: BTreeMap<String, (String, String)>,
    /// Networks whose selector is wrong, and what is wrong with it.
    pub invalid: BTreeMap<String, String>,
}

/// Works out the primary Network of every namespace. Where several select one, the oldest has it: what worked goes
/// on working when somebody adds a Network.
#[must_use]
pub fn primaries(
    networks: &BTreeMap<String, Arc<Network>>,
    namespaces: &BTreeMap<String, Arc<NamespaceView>>,
) -> Primaries {
    let mut found = Primaries::default();
    let mut selecting: Vec<(&String, &Arc<Network>, Selector)> = Vec::new();
    for (name, network) in networks {
        let Some(selector) = &network.spec.primary_for else { continue };
        match Selector::try_from(selector.clone()) {
            Ok(selector) => selecting.push((name, network, selector)),
            Err(error) => {
                found.invalid.insert(name.clone(), format!("spec.primaryFor: {error}"));
            }
        }
    }
    selecting
        .sort_by_key(|(name, network, _)| (network.metadata.creation_timestamp.clone(), (*name).clone()));
    for (namespace, view) in namespaces {
        let mut owner: Option<&String> = None;
        for (network, _, selector) in &selecting {
            if !selector.matches(&view.labels) {
                continue;
            }
            match owner {
                None => owner = Some(network),
                Some(owner) => {
                    let conflict = (namespace.clone(), owner.clone());
                    found.conflicts.entry((*network).clone()).or_insert(conflict);
                }
            }
        }
        if let Some(owner) = owner {
            found.of_namespace.insert(namespace.clone(), owner.clone());
        }
    }
    found
}

impl Primaries {
    /// How many namespaces have this Network as their primary one.
    #[must_use]
    pub fn count(&self, network: &str, namespaces: usize) -> usize {
        if network == DEFAULT_NETWORK {
            let elsewhere = self.of_namespace.values().filter(|n| *n != DEFAULT_NETWORK).count();
            return namespaces - elsewhere;
        }
        self.of_namespace.values().filter(|n| *n == network).count()
    }
}
