//! On random clusters: the sets judge every packet as the verdict function does, whatever happened in which
//! order.

mod support;

use std::collections::BTreeMap;
use std::net::IpAddr;

use knit_policy::model::*;
use knit_policy::sets::{Change, Class, Engine, Key, Value};
use knit_policy::verdict::{Flow, State};
use proptest::prelude::*;
use support::filter::Filter;
use support::random::{self, Event};

const NODES: [&str; 2] = ["n0", "n1"];
const NETWORKS: [&str; 2] = ["default", "blue"];

/// One engine for each node, and a packet filter for each of their routers that is told of changes only.
struct World {
    engines: BTreeMap<&'static str, Engine>,
    filters: BTreeMap<(&'static str, &'static str), Filter>,
}

impl World {
    fn new() -> Self {
        let engines = NODES.into_iter().map(|node| (node, Engine::new(node))).collect();
        Self { engines, filters: BTreeMap::new() }
    }

    fn tell(&mut self, event: &Event) {
        self.engines.values_mut().for_each(|engine| random::tell(engine, event));
    }

    fn settle(&mut self) {
        for (node, engine) in &mut self.engines {
            for (network, changes) in engine.settle() {
                let network = NETWORKS.into_iter().find(|n| *n == &*network).expect("a Network of this test");
                let filter = self.filters.entry((*node, network)).or_default();
                changes.iter().for_each(|change: &Change| filter.apply(change));
            }
        }
    }

    /// The elements by changes, with what classes mean in place of their numbers.
    fn meaning(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for ((node, network), filter) in &self.filters {
            let engine = &self.engines[node];
            let name = |class: Class| engine.describe(network, class).expect("a class that is in use");
            for (key, value) in filter.elements() {
                let key = match key {
                    Key::Rule { direction, pod, peer, traffic } => {
                        format!("{direction} {pod} {:?} {traffic:?}", peer.map(name))
                    }
                    other => format!("{other:?}"),
                };
                let value = match value {
                    Value::Class(class) => name(*class),
                    other => format!("{other:?}"),
                };
                assert!(
                    all.insert(format!("{node} {network} {key}"), value).is_none(),
                    "{key} is there twice"
                );
            }
        }
        all
    }

    /// What a packet meets on its way: the filter of the node that it leaves, and that of the node that it
    /// comes to.
    fn passes(&self, flow: &Flow) -> bool {
        let cluster = self.engines["n0"].cluster();
        let node_of = |address: IpAddr| match cluster.owner(&flow.network, address) {
            knit_policy::cluster::AddressOwner::Pod(pod) => Some(pod.node.clone()),
            _ => None,
        };
        let filter = |node: Option<&Name>| {
            let key = NODES.into_iter().find(|n| node.is_some_and(|node| **node == **n))?;
            let network = NETWORKS.into_iter().find(|n| **n == *flow.network)?;
            self.filters.get(&(key, network))
        };
        let (from, to) = (node_of(flow.source), node_of(flow.destination));
        let egress = filter(from.as_ref()).is_none_or(|f| f.passes(Direction::Egress, flow));
        // What a node sends to its own pods leaves it by another hook.
        let from_here =
            to.as_ref().is_some_and(|node| from.is_none() && cluster.is_address_of_node(flow.source, node));
        egress && (from_here || filter(to.as_ref()).is_none_or(|f| f.passes(Direction::Ingress, flow)))
    }
}

fn flows() -> impl Strategy<Value = Vec<Flow>> {
    let one = (
        prop::sample::select(&NETWORKS[..]),
        random::any_address(),
        random::any_address(),
        random::traffic(),
        prop_oneof![9 => Just(State::New), 1 => Just(State::Established), 1 => Just(State::Related)],
    );
    let one = one.prop_filter_map("one family", |(network, source, destination, traffic, state)| {
        let flow = Flow { network: network.into(), source, destination, traffic, state };
        (Family::of(source) == Family::of(destination)).then_some(flow)
    });
    prop::collection::vec(one, 60)
}

fn agree(world: &World, flows: &[Flow]) -> Result<(), TestCaseError> {
    for flow in flows {
        let verdict = world.engines["n0"].cluster().judge(flow);
        prop_assert_eq!(world.passes(flow), verdict.allowed(), "{:?}\n{:#?}", flow, verdict);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    /// Told event by event, with elements taken now and then: the filters judge as the verdict function at
    /// every stop.
    #[test]
    fn sets_judge_as_the_verdict_function(
        events in prop::collection::vec((random::event(), prop::bool::weighted(0.3)), 1..60),
        flows in flows(),
    ) {
        let mut world = World::new();
        for (event, stop) in &events {
            world.tell(event);
            if *stop {
                world.settle();
                agree(&world, &flows)?;
            }
        }
        world.settle();
        agree(&world, &flows)?;
    }

    /// What was told in whichever order, with whatever in between, ends in the same elements as when it is
    /// told at once.
    #[test]
    fn any_order_of_events_ends_in_the_same_sets(
        events in prop::collection::vec((random::event(), prop::bool::weighted(0.3)), 1..60),
        shuffled in any::<u64>(),
    ) {
        let mut by_event = World::new();
        for (event, stop) in &events {
            by_event.tell(event);
            if *stop {
                by_event.settle();
            }
        }
        by_event.settle();
        // Only the last word about an object counts.
        let mut last: BTreeMap<String, &Event> = BTreeMap::new();
        for (event, _) in &events {
            last.insert(random::about(event), event);
        }
        let mut order: Vec<&Event> = last.into_values().filter(|e| !random::is_deletion(e)).collect();
        order.sort_by_key(|event| {
            use std::hash::{Hash, Hasher};
            let mut hasher = std::hash::DefaultHasher::new();
            (random::about(event), shuffled).hash(&mut hasher);
            hasher.finish()
        });
        let mut at_once = World::new();
        for (index, event) in order.into_iter().enumerate() {
            at_once.tell(event);
            if shuffled % 3 == 0 && index % 5 == 0 {
                at_once.settle();
            }
        }
        at_once.settle();
        prop_assert_eq!(by_event.meaning(), at_once.meaning());
    }

    /// Within one batch no number of a class is given up by some and taken by others: a packet in the middle
    /// of its lookups while the batch is committed would be taken for somebody else.
    #[test]
    fn no_number_changes_its_meaning_within_a_batch(
        events in prop::collection::vec((random::event(), prop::bool::weighted(0.3)), 1..60),
    ) {
        let mut engine = Engine::new("n0");
        let mut before: BTreeMap<Class, (String, Vec<Key>)> = BTreeMap::new();
        for (event, stop) in &events {
            random::tell(&mut engine, event);
            if !*stop {
                continue;
            }
            engine.settle();
            let mut after: BTreeMap<Class, (String, Vec<Key>)> = BTreeMap::new();
            for (key, value) in engine.elements("default") {
                if let Value::Class(class) = value {
                    let words = || engine.describe("default", class).expect("a class that is in use");
                    after.entry(class).or_insert_with(|| (words(), Vec::new())).1.push(key);
                }
            }
            for (class, (meant, members)) in &before {
                let Some((means, now)) = after.get(class) else { continue };
                // Either it means the same, or something else has become of all that were in it.
                let stays = members.iter().any(|member| now.contains(member));
                prop_assert!(meant == means || stays, "class {} was {}, is {}", class, meant, means);
            }
            before = after;
        }
    }

    /// Changes, one after the other, come to exactly what the engine says is in force.
    #[test]
    fn changes_add_up_to_what_is_in_force(
        events in prop::collection::vec((random::event(), prop::bool::weighted(0.5)), 1..40),
    ) {
        let mut world = World::new();
        for (event, stop) in &events {
            world.tell(event);
            if *stop {
                world.settle();
            }
        }
        world.settle();
        for ((node, network), filter) in &world.filters {
            prop_assert_eq!(filter.elements(), &world.engines[node].elements(network));
        }
        prop_assert!(world.engines.values_mut().all(|engine| engine.settle().is_empty()));
    }
}
