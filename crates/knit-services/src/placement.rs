//! Which namespaces may have moved to another Network when the world changed: what Networks claim is read
//! once for each state of them, and a namespace is looked at only if its labels changed, since this is done
//! between changes of endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use knit_model::{Claims, Network};
use knit_node::resolve::{claims, primary_network};
use knit_node::world::{Labels, World};
use knit_proxy::model::NetworkName;

/// What was read of the world last.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    networks: Arc<BTreeMap<NetworkName, Arc<Network>>>,
    namespaces: Arc<BTreeMap<String, Arc<Labels>>>,
    known: bool,
    claims: Claims,
}

/// Namespaces to look at again.
#[derive(Debug, PartialEq)]
pub(crate) enum Moved {
    /// All of them: Networks changed, or can be told only now.
    All,
    /// Those whose labels changed, that are new or gone.
    Some(BTreeSet<String>),
}

impl Placement {
    /// Takes in a state of the world.
    pub(crate) fn look(&mut self, world: &World) -> Moved {
        let same = Arc::ptr_eq(&self.networks, &world.networks);
        if !same {
            self.claims = claims(world);
            self.networks = Arc::clone(&world.networks);
        }
        let before = std::mem::replace(&mut self.namespaces, Arc::clone(&world.namespaces));
        let known = std::mem::replace(&mut self.known, world.knows_primaries());
        if !same || known != self.known {
            return Moved::All;
        }
        if Arc::ptr_eq(&before, &self.namespaces) {
            return Moved::Some(BTreeSet::new());
        }
        let is_as = |there: &BTreeMap<String, Arc<Labels>>, name: &str, labels: &Arc<Labels>| {
            there.get(name).is_some_and(|other| Arc::ptr_eq(other, labels) || other == labels)
        };
        let changed = self.namespaces.iter().filter(|(name, labels)| !is_as(&before, name, labels));
        let gone = before.iter().filter(|(name, _)| !self.namespaces.contains_key(*name));
        Moved::Some(changed.chain(gone).map(|(name, _)| name.clone()).collect())
    }

    /// The primary Network of a namespace; none if that cannot be said.
    pub(crate) fn network_of(&self, world: &World, namespace: &str) -> Option<NetworkName> {
        if Arc::ptr_eq(&self.networks, &world.networks) {
            primary_network(world, &self.claims, namespace)
        } else {
            // Not looked at yet: the next look finds them changed.
            primary_network(world, &claims(world), namespace)
        }
    }
}

impl Moved {
    /// Whether a namespace is to be looked at.
    pub(crate) fn contains(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Some(names) => names.contains(namespace),
        }
    }

    /// Whether there is none to look at.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Some(names) if names.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use knit_proxy::model::{Protocol, Service};
    use knit_proxy::source::Event;
    use serde_json::json;

    use super::*;
    use crate::table::Table;

    fn world(namespaces: usize) -> World {
        let network = |name: &str, spec: serde_json::Value| {
            let object = knit_api::Network::new(name, serde_json::from_value(spec).expect("a spec"));
            let network = Network::try_from(object).expect("a name");
            (network.name().clone(), Arc::new(network))
        };
        let red = json!({"topology": "Layer3", "primaryFor": {"matchLabels": {"team": "red"}}});
        let networks = [network("default", json!({"topology": "Layer3"})), network("red", red)];
        let mut world = World {
            networks: Arc::new(networks.into()),
            namespaces: Arc::new((0..namespaces).map(|n| (format!("ns{n}"), Arc::default())).collect()),
            ..World::default()
        };
        (world.synced.networks, world.synced.namespaces) = (true, true);
        world
    }

    #[test]
    fn every_selector_was_read_again_for_every_namespace_on_every_change_of_one() {
        let (mut world, mut placement, mut table) = (world(100), Placement::default(), Table::default());
        assert_eq!(placement.look(&world), Moved::All);
        for name in world.namespaces.keys() {
            let service = Service::new(format!("{name}/web").as_str()).cluster_ip([10, 96, 0, 1].into());
            let event = Event::SetService(Box::new(service.port(Protocol::Tcp, 80)));
            table.take(event, |namespace| placement.network_of(&world, namespace));
        }
        // If the claims were read again, this would not be there any more.
        placement.claims = Claims::default();
        let labels = Arc::new(Labels::from([("team".to_owned(), "red".to_owned())]));
        Arc::make_mut(&mut world.namespaces).insert("ns7".to_owned(), labels);
        let moved = placement.look(&world);
        assert_eq!(moved, Moved::Some(["ns7".to_owned()].into()));
        let asked = Cell::new(0);
        table.reassign(
            |namespace| moved.contains(namespace),
            |namespace| {
                asked.set(asked.get() + 1);
                placement.network_of(&world, namespace)
            },
        );
        assert_eq!(asked.get(), 1);
        assert_eq!(placement.network_of(&world, "ns7"), Some(NetworkName::default()), "they were read again");
        assert!(placement.look(&world).is_empty());

        // Networks that changed are read, once, and then every namespace is looked at.
        Arc::make_mut(&mut world.networks).remove("default");
        assert_eq!(placement.look(&world), Moved::All);
        assert_eq!(placement.network_of(&world, "ns7"), Some("red".into()));
        // One that goes is looked at; one that may be another Network's by now stays where it was.
        Arc::make_mut(&mut world.namespaces).remove("ns8");
        assert_eq!(placement.look(&world), Moved::Some(["ns8".to_owned()].into()));
        world.synced.networks = false;
        assert_eq!(placement.look(&world), Moved::All);
        assert_eq!(placement.network_of(&world, "ns7"), None);
    }
}
