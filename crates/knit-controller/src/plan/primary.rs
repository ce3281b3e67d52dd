//! Which Network is a namespace's primary: the oldest of those that select it.

use std::collections::BTreeMap;
use std::sync::Arc;

use knit_api::names::DEFAULT_NETWORK;
use knit_model::{Claims, Network};
use knit_types::NetworkName;

use crate::cluster::NamespaceView;

/// Who has a namespace, and who wanted it too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Primaries {
    /// The primary Network of each namespace; one that is not in it has the default Network.
    pub of_namespace: BTreeMap<String, NetworkName>,
    /// For each Network that did not get a namespace: the first such namespace, and who has it.
    pub conflicts: BTreeMap<NetworkName, (String, NetworkName)>,
    /// Networks whose selector is wrong, and what is wrong with it.
    pub invalid: BTreeMap<NetworkName, String>,
}

/// Works out the primary Network of every namespace. Where several select one, the oldest has it: what worked
/// goes on working when somebody adds a Network.
#[must_use]
pub fn primaries(
    networks: &BTreeMap<NetworkName, Arc<Network>>,
    namespaces: &BTreeMap<String, Arc<NamespaceView>>,
) -> Primaries {
    let claims = Claims::of(networks.values());
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
    /// How many namespaces have each Network as their primary one, of so many.
    #[must_use]
    pub fn counts(&self, namespaces: usize) -> BTreeMap<&str, usize> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for network in self.of_namespace.values() {
            *counts.entry(network.as_str()).or_default() += 1;
        }
        *counts.entry(DEFAULT_NETWORK).or_default() += namespaces - self.of_namespace.len();
        counts
    }
}
