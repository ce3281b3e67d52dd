//! Which Network is a namespace's primary: the oldest of those that select it.

use std::collections::BTreeMap;
use std::sync::Arc;

use knit_api::Network;
use knit_api::claims::Claims;
use knit_api::names::DEFAULT_NETWORK;

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

/// Works out the primary Network of every namespace. Where several select one, the oldest has it: what worked
/// goes on working when somebody adds a Network.
#[must_use]
pub fn primaries(
    networks: &BTreeMap<String, Arc<Network>>,
    namespaces: &BTreeMap<String, Arc<NamespaceView>>,
) -> Primaries {
    let claims = Claims::of(networks.iter().map(|(name, network)| (name.as_str(), &**network)));
    let mut found = Primaries::default();
    let invalid = claims.unreadable();
    found
        .invalid
        .extend(invalid.map(|(name, problem)| (name.to_owned(), format!("spec.primaryFor: {problem}"))));
    for (namespace, view) in namespaces {
        let mut selecting = claims.selecting(&view.labels);
        let Some(owner) = selecting.next() else { continue };
        for network in selecting {
            let conflict = (namespace.clone(), owner.to_owned());
            found.conflicts.entry(network.to_owned()).or_insert(conflict);
        }
        found.of_namespace.insert(namespace.clone(), owner.to_owned());
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
